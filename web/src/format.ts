// SPDX-License-Identifier: Apache-2.0
import { currentLanguage, t } from "./i18n.ts";
import type { Num } from "./types.ts";

export const DASH = "–";

// null stays null (not there); NaN and infinities become what they are.
export function num(value: Num | null | undefined): number | null {
  if (value === null || value === undefined) return null;
  return typeof value === "number" ? value : Number(value);
}

export function fixed(value: Num | null | undefined, digits: number): string {
  const x = num(value);
  if (x === null) return DASH;
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  return x.toFixed(digits).replace("-", "−");
}

export function significant(value: Num | null | undefined): string {
  const x = num(value);
  if (x === null || !Number.isFinite(x)) return fixed(value, 0);
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-4) return x.toExponential(2).replace("-", "−");
  return String(Number(x.toPrecision(4))).replace("-", "−");
}

export function percent(value: Num | null | undefined, digits = 1): string {
  const x = num(value);
  if (x === null || !Number.isFinite(x)) return fixed(value, 0);
  return (x * 100).toFixed(digits) + " %";
}

// "80 %" for a target: no trailing zeros.
export function percentShort(x: number): string {
  return String(Number((x * 100).toFixed(2))) + "\u00a0%";
}

export function rate(value: Num | null | undefined): string {
  const x = num(value);
  if (x === null || !Number.isFinite(x)) return fixed(value, 0);
  return x === 0 ? "0" : x >= 1000 ? Math.round(x).toLocaleString("en-US").replace(/,/g, " ") : x.toFixed(x >= 100 ? 0 : 1);
}

export function times(value: Num | null | undefined): string {
  const x = num(value);
  return x === null || !Number.isFinite(x) ? fixed(value, 0) : x.toFixed(2) + "×";
}

export function duration(value: Num | null | undefined): string {
  const x = num(value);
  if (x === null || !Number.isFinite(x)) return fixed(value, 0);
  const zh = currentLanguage() === "zh";
  const [h, m, s] = zh ? [" 时", " 分", " 秒"] : [" h", " min", " s"];
  if (x < 59.95) return x.toFixed(x < 10 ? 1 : 0) + s;
  const whole = Math.round(x);
  if (whole < 3600) return `${Math.floor(whole / 60)}${m} ${String(whole % 60).padStart(2, "0")}${s}`;
  const minutes = Math.round(x / 60);
  return `${Math.floor(minutes / 60)}${h} ${String(minutes % 60).padStart(2, "0")}${m}`;
}

// Axis labels: shorter, the unit follows the range.
export function axisDuration(seconds: number, range: number): string {
  const [h, m, s] = currentLanguage() === "zh" ? ["时", "分", "秒"] : ["h", "min", "s"];
  if (range < 300) return `${Number(seconds.toFixed(1))} ${s}`;
  if (range < 3 * 3600) return `${Number((seconds / 60).toFixed(1))} ${m}`;
  return `${Number((seconds / 3600).toFixed(1))} ${h}`;
}

// The time of day on an axis; the date too where the range is longer than a day.
export function axisClock(seconds: number, range: number): string {
  const text = absolute(new Date(seconds * 1000).toISOString());
  if (range > 86400) return text.slice(5, 16);
  return range < 600 ? text.slice(11) : text.slice(11, 16);
}

export function bytes(size: number): string {
  if (size < 1024) return `${size} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = size / 1024;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${value.toFixed(value < 10 ? 2 : 1)} ${units[unit]}`;
}

export function absolute(iso: string): string {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return DASH;
  const two = (n: number): string => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function relative(iso: string, now = Date.now()): string {
  const seconds = (now - new Date(iso).getTime()) / 1000;
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 5) return t("just_now");
  if (seconds < 60) return t("ago_s", Math.floor(seconds));
  if (seconds < 3600) return t("ago_min", Math.floor(seconds / 60));
  if (seconds < 86400) return t("ago_h", Math.floor(seconds / 3600));
  return t("ago_d", Math.floor(seconds / 86400));
}
