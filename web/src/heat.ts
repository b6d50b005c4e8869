// SPDX-License-Identifier: Apache-2.0
// A heat map, row by column, on a canvas: the figure under the pointer or the keyboard's cell is written beside it, and
// all figures stand in a table for those who do not see the picture.
import { h, replace } from "./dom.ts";
import { t } from "./i18n.ts";

export interface HeatSpec {
  title: string;
  rows: { label: string; values: (number | null)[]; marked?: boolean }[];
  columns: string[]; // what each column is, for the cursor's line
  ends: [string, string]; // under the first and the last column
  format: (value: number) => string;
}

// From light to dark by lightness alone, so that it reads the same to every eye (cividis-like blues and yellows).
const LIGHT = [[253, 247, 220], [225, 214, 150], [165, 170, 140], [100, 125, 150], [40, 75, 130], [0, 32, 77]] as const;
const DARK = [[24, 34, 52], [30, 66, 122], [80, 110, 140], [140, 145, 130], [205, 190, 100], [254, 240, 170]] as const;
const ROW = 18;
const NAME_WIDTH = 76;

export function shade(share: number, dark: boolean): string {
  const stops = dark ? DARK : LIGHT;
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  const [a, b] = [stops[low] ?? stops[0], stops[low + 1] ?? stops[0]];
  const mix = (i: 0 | 1 | 2): number => Math.round(a[i] + (b[i] - a[i]) * (at - low));
  return `rgb(${mix(0)} ${mix(1)} ${mix(2)})`;
}

const isDark = (): boolean => matchMedia("(prefers-color-scheme: dark)").matches;

export class Heat {
  readonly node: HTMLElement;
  private spec: HeatSpec;
  private readonly canvas = h("canvas", { "aria-hidden": "true" });
  private readonly holder: HTMLElement;
  private readonly heading = h("figcaption", {});
  private readonly scale = h("div", { class: "heat-scale", "aria-hidden": "true" });
  private readonly ends = h("div", { class: "heat-ends soft" });
  private readonly under = h("span", { class: "soft heat-under", role: "status", "aria-live": "polite" });
  private readonly table = h("details", { class: "heat-table" });
  private readonly observer: ResizeObserver;
  private cell: [number, number] | null = null;

  constructor(spec: HeatSpec) {
    this.spec = spec;
    this.holder = h("div", { class: "heat", tabindex: 0, role: "img" }, this.canvas);
    this.holder.addEventListener("pointermove", (event) => this.point(event));
    this.holder.addEventListener("pointerleave", () => this.select(null));
    this.holder.addEventListener("keydown", (event) => this.key(event));
    this.node = h("figure", { class: "chart" }, h("div", { class: "chart-head" }, this.heading, this.scale), this.holder, this.ends, this.under, this.table);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.holder);
    this.set(spec);
  }

  destroy(): void {
    this.observer.disconnect();
  }

  set(spec: HeatSpec): void {
    this.spec = spec;
    replace(this.heading, spec.title);
    const [low, high] = this.range();
    this.holder.setAttribute("aria-label", t("heat_label", spec.title, spec.rows.length, spec.format(low), spec.format(high)));
    replace(this.ends, h("span", {}, spec.ends[0]), h("span", {}, spec.ends[1]));
    const open = this.table.open;
    const middle = (values: (number | null)[]): number | null => {
      const some = values.filter((v): v is number => v !== null && Number.isFinite(v)).sort((a, b) => a - b);
      return some[Math.floor(some.length / 2)] ?? null;
    };
    const shown = (v: number | null): string => (v === null ? "–" : spec.format(v));
    replace(this.table, h("summary", {}, t("as_table")), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": spec.title },
      h("table", {}, h("thead", {}, h("tr", {}, [t("rank"), t("first"), t("median"), t("last")].map((c) => h("th", { scope: "col", class: "n" }, c)))),
        h("tbody", {}, spec.rows.map((row) => h("tr", {}, h("th", { scope: "row", class: "n" }, row.label), h("td", { class: "n" }, shown(row.values[0] ?? null)),
          h("td", { class: "n" }, shown(middle(row.values))), h("td", { class: "n" }, shown(row.values[row.values.length - 1] ?? null))))))));
    this.table.open = open;
    this.draw();
  }

  // The middle 98 %: one odd step must not turn all the others into one colour.
  private range(): [number, number] {
    const all = this.spec.rows.flatMap((row) => row.values.filter((v): v is number => v !== null && Number.isFinite(v))).sort((a, b) => a - b);
    if (!all.length) return [0, 1];
    const at = (share: number): number => all[Math.min(all.length - 1, Math.floor(share * all.length))] ?? 0;
    return [at(0.01), at(0.99)];
  }

  draw(): void {
    const { spec, canvas } = this;
    const width = Math.max(220, Math.floor(this.holder.clientWidth));
    const height = spec.rows.length * ROW + 2;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.floor(width * ratio);
    canvas.height = Math.floor(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    if (!ctx) return;
    ctx.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim();
    const dark = isDark();
    const [low, high] = this.range();
    const count = spec.columns.length || 1;
    const step = (width - NAME_WIDTH) / count;
    ctx.textBaseline = "middle";
    spec.rows.forEach((row, r) => {
      ctx.font = `${row.marked ? "bold " : ""}12px ${style.getPropertyValue("--font")}`;
      ctx.fillStyle = text;
      ctx.fillText((row.marked ? "▶ " : "") + row.label, 0, r * ROW + ROW / 2 + 1, NAME_WIDTH - 6);
      row.values.forEach((value, c) => {
        if (value === null || !Number.isFinite(value)) return;
        ctx.fillStyle = shade(high > low ? (value - low) / (high - low) : 0, dark);
        ctx.fillRect(NAME_WIDTH + c * step, r * ROW + 1, Math.ceil(step) + 0.5, ROW - 1);
      });
    });
    if (this.cell) {
      const [r, c] = this.cell;
      ctx.strokeStyle = text;
      ctx.lineWidth = 2;
      ctx.strokeRect(NAME_WIDTH + c * step, r * ROW + 1, Math.max(3, step), ROW - 1);
    }
    const bar = h("canvas", { width: 120, height: 10 });
    const paint = bar.getContext("2d");
    for (let x = 0; paint && x < 120; x++) {
      paint.fillStyle = shade(x / 119, dark);
      paint.fillRect(x, 0, 1, 10);
    }
    replace(this.scale, spec.format(low), bar, spec.format(high));
  }

  private point(event: PointerEvent): void {
    const box = this.canvas.getBoundingClientRect();
    const count = this.spec.columns.length;
    const c = Math.floor(((event.clientX - box.left - NAME_WIDTH) / (box.width - NAME_WIDTH)) * count);
    const r = Math.floor((event.clientY - box.top) / ROW);
    this.select(c >= 0 && c < count && r >= 0 && r < this.spec.rows.length ? [r, c] : null);
  }

  private key(event: KeyboardEvent): void {
    const move: Record<string, [number, number]> = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const by = move[event.key];
    if (!by) return;
    event.preventDefault();
    if (!this.cell) {
      this.select([0, 0]);
      return;
    }
    const [r, c] = this.cell;
    const clamp = (v: number, most: number): number => Math.min(most, Math.max(0, v));
    this.select([clamp(r + by[0], this.spec.rows.length - 1), clamp(c + by[1], this.spec.columns.length - 1)]);
  }

  private select(cell: [number, number] | null): void {
    if (cell?.[0] === this.cell?.[0] && cell?.[1] === this.cell?.[1]) return;
    this.cell = cell;
    const row = cell && this.spec.rows[cell[0]];
    const value = row && cell ? row.values[cell[1]] : null;
    this.under.textContent = row && cell ? `${row.label} · ${this.spec.columns[cell[1]] ?? ""} · ${value === null || value === undefined ? "–" : this.spec.format(value)}` : "";
    this.draw();
  }
}
