// SPDX-License-Identifier: Apache-2.0
// A thin layer over uPlot: theme colours, dash patterns, marks for values that are not numbers, thresholds, end marks,
// a legend with the values under the cursor, keyboard cursor, one synchronised cursor per group.
import uPlot from "uplot";
import { absolute, axisClock, axisDuration, duration, fixed, percent, rate, significant } from "./format.ts";
import { h, replace, svg } from "./dom.ts";
import { exportChart, exportMenu } from "./export.ts";
import { t } from "./i18n.ts";

export type XKind = "epoch" | "step" | "elapsed" | "wall" | "processes";
export type YKind = "loss" | "accuracy" | "rate" | "lr" | "plain";

export interface Line {
  label: string;
  x: number[];
  y: number[]; // NaN and infinities are marked, not drawn
  style: number; // index into the palette
  dash?: readonly number[];
  faint?: boolean;
  unlisted?: boolean; // not in the legend: another line of the same style is
  pointsOnly?: boolean;
  hollow?: boolean; // a point that was not measured
  pale?: boolean; // the raw values behind a smoothed line
  unmarked?: boolean; // what is not a number is marked by the raw line
}

export interface ChartSpec {
  title: string;
  sub?: string;
  x: XKind;
  y: YKind;
  lines: Line[];
  log?: boolean;
  threshold?: { y: number; label: string } | undefined;
  endMarks?: { x: number; y: number; label: string; style: number }[];
  group: string;
  height?: number;
  fromZero?: boolean;
  onZoom?: (range: [number, number] | null) => void; // null: everything is in view again
}

// Told apart by dash as well as by colour (Okabe and Ito's palette, in style.css as --line-0...).
export const PALETTE = 8;
const DASHES: readonly (readonly number[])[] = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4], [4, 4], [2, 2, 6, 2], [1, 5]];

export function dashOf(style: number): readonly number[] {
  // The colours begin again after eight; the dashes then stand against others, so that 64 lines differ.
  return DASHES[(style + 3 * Math.floor(style / PALETTE)) % DASHES.length] ?? [];
}

function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function lineColor(style: number): string {
  return css(`--line-${style % PALETTE}`);
}

export function swatch(style: number, dash: readonly number[] = dashOf(style)): SVGElement {
  return svg(
    "svg",
    { class: `swatch line-${style % PALETTE}`, viewBox: "0 0 28 10", width: 28, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 1, y1: 5, x2: 27, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") }),
  );
}

function formatX(kind: XKind, value: number): string {
  if (kind === "elapsed") return duration(value);
  if (kind === "wall") return absolute(new Date(value * 1000).toISOString());
  return String(Math.round(value));
}

function formatY(kind: YKind, value: number): string {
  if (kind === "accuracy") return percent(value, 2);
  if (kind === "rate") return rate(value);
  if (kind === "loss") return fixed(value, 4);
  return significant(value);
}

function axisY(kind: YKind, value: number, range: number): string {
  if (kind === "accuracy") return `${Number((value * 100).toFixed(range < 0.02 ? 2 : range < 0.2 ? 1 : 0))} %`;
  if (kind === "rate") return rate(value);
  return significant(value);
}

export class Chart {
  readonly node: HTMLElement;
  private spec: ChartSpec;
  private plot: uPlot | null = null;
  private readonly holder: HTMLElement;
  private readonly legend: HTMLElement;
  private readonly note: HTMLElement;
  private readonly heading: HTMLElement;
  private readonly observer: ResizeObserver;
  private values: HTMLElement[] = [];
  private marks: { x: number; style: number }[] = [];
  private shape = "";
  private zoom: [number, number] | null = null;
  private zoomTimer = 0;

  constructor(spec: ChartSpec) {
    this.spec = spec;
    this.heading = h("figcaption", {});
    this.legend = h("div", { class: "legend" });
    this.holder = h("div", { class: "plot", tabindex: 0, role: "img", title: t("drag_zoom") });
    this.note = h("p", { class: "note", hidden: true });
    this.node = h("figure", { class: "chart" }, h("div", { class: "chart-head" }, this.heading, this.legend, exportMenu((kind) => {
      if (this.plot) exportChart(kind, this.plot, this.spec, { color: (line) => lineColor(line.style), dash: (line) => (line.pale ? [] : line.dash ?? dashOf(line.style)), css });
    })), this.holder, this.note);
    this.holder.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.holder);
    this.set(spec);
  }

  destroy(): void {
    this.observer.disconnect();
    window.clearTimeout(this.zoomTimer);
    this.plot?.destroy();
    this.plot = null;
  }

  retheme(): void {
    this.shape = "";
    this.set(this.spec);
  }

  set(spec: ChartSpec): void {
    this.spec = spec;
    const data = this.align();
    const shape = JSON.stringify([spec.x, spec.y, spec.log, spec.title, spec.threshold, spec.endMarks,
      spec.lines.map((line) => [line.label, line.style, line.dash, line.faint, line.pale, line.pointsOnly])]);
    this.describe();
    if (this.plot && shape === this.shape) {
      const zoom = this.zoom;
      this.plot.setData(data, !zoom); // new points must not end a reader's zoom
      if (zoom) this.plot.setScale("x", { min: zoom[0], max: zoom[1] });
      this.showValues(null);
      return;
    }
    this.shape = shape;
    this.zoom = null;
    this.plot?.destroy();
    this.plot = null;
    this.holder.textContent = "";
    this.buildLegend();
    this.plot = new uPlot(this.options(), data, this.holder);
    this.holder.querySelector("canvas")?.setAttribute("aria-hidden", "true");
    this.showValues(null);
  }

  private align(): uPlot.AlignedData {
    this.marks = [];
    if (!this.spec.lines.length) return [[], []] as unknown as uPlot.AlignedData;
    const tables = this.spec.lines.map((line) => {
      const y = line.y.map((value, index) => {
        const drawable = Number.isFinite(value) && !(this.spec.log && value <= 0);
        if (!drawable && !line.unmarked) this.marks.push({ x: line.x[index] ?? 0, style: line.style });
        return drawable ? value : null;
      });
      return [line.x, y] as unknown as uPlot.AlignedData;
    });
    replace(this.note, this.marks.length > 0 && t("nan_note", this.marks.length));
    this.note.hidden = this.marks.length === 0;
    return tables.length === 1 ? (tables[0] as uPlot.AlignedData) : uPlot.join(tables);
  }

  private describe(): void {
    replace(this.heading, this.spec.title, this.spec.sub && h("small", {}, ` · ${this.spec.sub}`));
    const parts = this.spec.lines.map((line) => {
      const last = line.y.length - 1;
      return last < 0 ? line.label : `${line.label} ${formatY(this.spec.y, line.y[last] ?? NaN)}`;
    });
    this.holder.setAttribute("aria-label", t("chart_label", this.spec.title, parts.join(", ")));
  }

  private buildLegend(): void {
    this.values = [];
    const alone = this.spec.lines.length === 1;
    replace(this.legend, this.spec.lines.map((line) => {
      const value = h("span", { class: "legend-value" });
      this.values.push(value);
      return !line.unlisted && h("span", { class: "legend-item" }, swatch(line.style, line.dash ?? dashOf(line.style)),
        !alone && h("span", { class: "legend-name", title: line.label }, line.label), value);
    }));
  }

  private showValues(index: number | null): void {
    const plot = this.plot;
    if (!plot) return;
    this.spec.lines.forEach((line, i) => {
      const node = this.values[i];
      if (!node) return;
      let text = "";
      const last = line.y.length - 1;
      if (index === null) {
        if (last >= 0) text = formatY(this.spec.y, line.y[last] ?? NaN);
      } else {
        const value = (plot.data[i + 1] as (number | null | undefined)[])[index];
        text = typeof value === "number" ? formatY(this.spec.y, value) : "";
        const x = plot.data[0][index];
        if (text && i === 0 && x !== undefined) text += ` @ ${formatX(this.spec.x, x)}`;
      }
      node.textContent = text;
    });
  }

  private key(event: KeyboardEvent): void {
    const plot = this.plot;
    if (!plot || (event.key !== "ArrowLeft" && event.key !== "ArrowRight")) return;
    event.preventDefault();
    const count = plot.data[0].length;
    if (!count) return;
    const now = plot.cursor.idx ?? (event.key === "ArrowRight" ? -1 : count);
    const next = Math.min(count - 1, Math.max(0, now + (event.key === "ArrowRight" ? 1 : -1)));
    plot.setCursor({ left: plot.valToPos(plot.data[0][next] ?? 0, "x"), top: plot.over.clientHeight / 2 });
  }

  private width(): number {
    return Math.max(200, Math.floor(this.holder.clientWidth || 480));
  }

  private resize(): void {
    const plot = this.plot;
    const width = this.width();
    if (plot && plot.width !== width) plot.setSize({ width, height: this.spec.height ?? 220 });
  }

  private options(): uPlot.Options {
    const { spec } = this;
    const text = css("--text-soft");
    const grid = { stroke: css("--grid"), width: 1 };
    const font = `12px ${css("--font")}`;
    const base = { stroke: text, font, grid, ticks: { show: false } };
    const marksAt = (spec.endMarks ?? []).map((mark) => mark.x);
    return {
      width: this.width(),
      height: spec.height ?? 220,
      legend: { show: false },
      padding: [10, 14, 0, 0],
      cursor: {
        sync: { key: spec.group, setSeries: false },
        points: { size: 7 },
        y: false,
        drag: { x: true, y: false },
      },
      scales: {
        x: {
          time: spec.x === "wall",
          range: (_u, min, max) => {
            if (min === null || max === null || !Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
            let low = spec.x === "elapsed" || spec.x === "processes" ? 0 : min;
            // A published end far beyond the recorded curves would flatten them: it is then drawn at the edge.
            let high = marksAt.reduce((a, b) => (b <= 3 * max ? Math.max(a, b) : a), max);
            if (this.zoomed(min, max)) [low, high] = [min, max];
            if (low === high) [low, high] = [low - 0.5, high + 0.5];
            return spec.x === "processes" ? [0, high * 1.08] : spec.endMarks?.length ? [low, high * 1.03] : [low, high];
          },
        },
        y: {
          distr: spec.log ? 3 : 1,
          range: (_u, min, max) => {
            if (min === null || max === null || !Number.isFinite(min) || !Number.isFinite(max)) return spec.log ? [0.1, 1] : [0, 1];
            if (spec.log) return uPlot.rangeLog(min, max, 10, false);
            let [low, high] = [min, max];
            if (spec.threshold) [low, high] = [Math.min(low, spec.threshold.y), Math.max(high, spec.threshold.y)];
            const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.1;
            low = spec.fromZero ? 0 : low >= 0 ? Math.max(0, low - pad) : low - pad;
            high = spec.y === "accuracy" ? Math.min(1, high + pad) : high + pad;
            return [low, high];
          },
        },
      },
      axes: [
        {
          ...base,
          size: 28,
          gap: 6,
          ...(spec.x === "elapsed"
            ? { space: 64, values: (u: uPlot, splits: number[]) => splits.map((v) => axisDuration(v, (u.scales["x"]?.max ?? 1) - (u.scales["x"]?.min ?? 0))), incrs: [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400] }
            : spec.x === "wall"
              ? { space: 76, values: (u: uPlot, splits: number[]) => splits.map((v) => axisClock(v, (u.scales["x"]?.max ?? 1) - (u.scales["x"]?.min ?? 0))) }
              : { incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7], values: (_u: uPlot, splits: number[]) => splits.map((v) => (Number.isInteger(v) ? String(v) : "")) }),
        },
        {
          ...base,
          size: spec.y === "accuracy" ? 52 : 56,
          gap: 6,
          values: (u: uPlot, splits: number[]) => splits.map((v) => (v === null ? "" : axisY(spec.y, v, (u.scales["y"]?.max ?? 1) - (u.scales["y"]?.min ?? 0)))),
        },
      ],
      series: [
        {},
        ...(spec.lines.length ? spec.lines : [{ label: "", style: 0, x: [], y: [] } as Line]).map((line): uPlot.Series => {
          const color = lineColor(line.style);
          const many = line.x.length > 400;
          const few = line.x.length <= 12;
          return {
            label: line.label,
            stroke: line.pale ? color + (spec.lines.length > 8 ? "22" : "66") : color,
            width: line.pointsOnly ? 0 : line.faint || (many && !line.unmarked) ? 1.25 : 2,
            // Dashes in noise are only more noise, but beyond the palette they alone tell lines apart.
            dash: line.pale || (many && spec.lines.length <= PALETTE) ? [] : [...(line.dash ?? dashOf(line.style))],
            points: { show: line.pointsOnly === true || (few && !line.faint), size: line.pointsOnly ? 10 : 5, fill: line.hollow ? css("--panel") : color, stroke: color, ...(line.hollow ? { width: 2 } : {}) },
            ...(line.pointsOnly ? { paths: () => null } : {}),
          };
        }),
      ],
      hooks: {
        setCursor: [(u) => this.showValues(u.cursor.idx ?? null)],
        draw: [(u) => this.overlay(u)],
        setScale: [(u, key) => {
          if (key === "x") this.onScale(u);
        }],
      },
    };
  }

  private onScale(u: uPlot): void {
    const { min, max } = u.scales["x"] ?? {};
    if (this.plot !== u || min === undefined || max === undefined || min === null || max === null) return;
    const next: [number, number] | null = this.zoomed(min, max) ? [min, max] : null;
    if (next?.[0] === this.zoom?.[0] && next?.[1] === this.zoom?.[1]) return;
    this.zoom = next;
    window.clearTimeout(this.zoomTimer);
    this.zoomTimer = window.setTimeout(() => this.spec.onZoom?.(this.zoom), 120);
  }

  private zoomed(min: number, max: number): boolean {
    const xs = this.plot?.data[0];
    if (!xs || xs.length < 2) return false;
    return min > (xs[0] ?? min) || max < (xs[xs.length - 1] ?? max);
  }

  private haloText(ctx: CanvasRenderingContext2D, text: string, x: number, y: number): void {
    ctx.save();
    ctx.strokeStyle = css("--panel");
    ctx.lineWidth = 4 * (devicePixelRatio || 1);
    ctx.lineJoin = "round";
    ctx.strokeText(text, x, y);
    ctx.restore();
    ctx.fillText(text, x, y);
  }

  private overlay(u: uPlot): void {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio || 1;
    const text = css("--text-soft");
    ctx.save();
    ctx.font = `${12 * ratio}px ${css("--font")}`;
    const { threshold } = this.spec;
    if (threshold) {
      const y = Math.round(u.valToPos(threshold.y, "y", true));
      ctx.strokeStyle = text;
      ctx.lineWidth = ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = text;
      // Below the line at the right no curve runs that has reached it; end marks have their labels there.
      const marked = (this.spec.endMarks ?? []).length > 0;
      ctx.textAlign = marked ? "left" : "right";
      ctx.textBaseline = marked ? "bottom" : "top";
      this.haloText(ctx, threshold.label, marked ? bbox.left + 4 * ratio : bbox.left + bbox.width - 4 * ratio, marked ? y - 3 * ratio : y + 4 * ratio);
    }
    for (const mark of this.marks) {
      const x = u.valToPos(mark.x, "x", true);
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
      const y = bbox.top + bbox.height - 6 * ratio;
      const r = 4 * ratio;
      ctx.strokeStyle = lineColor(mark.style);
      ctx.lineWidth = 2 * ratio;
      ctx.beginPath();
      ctx.moveTo(x - r, y - r);
      ctx.lineTo(x + r, y + r);
      ctx.moveTo(x + r, y - r);
      ctx.lineTo(x - r, y + r);
      ctx.stroke();
    }
    // The labels stand in rows below their marks, so that they never cover one another.
    (this.spec.endMarks ?? []).forEach((mark, row) => {
      const right = bbox.left + bbox.width;
      const at = u.valToPos(mark.x, "x", true);
      const beyond = at > right + 1;
      const x = beyond ? right - 9 * ratio : at;
      const y = u.valToPos(mark.y, "y", true);
      const r = 6 * ratio;
      ctx.strokeStyle = lineColor(mark.style);
      ctx.fillStyle = css("--panel");
      ctx.lineWidth = 2 * ratio;
      ctx.beginPath();
      ctx.moveTo(x, y - r);
      ctx.lineTo(x + r, y);
      ctx.lineTo(x, y + r);
      ctx.lineTo(x - r, y);
      ctx.closePath();
      ctx.fill();
      ctx.stroke();
      ctx.fillStyle = text;
      ctx.textBaseline = "top";
      const words = beyond ? `${mark.label} →` : mark.label;
      const wide = ctx.measureText(words).width;
      ctx.textAlign = "left";
      const left = Math.min(Math.max(x - wide / 2, bbox.left + 4 * ratio), right - wide - 2 * ratio);
      this.haloText(ctx, words, left, y + r + (4 + 17 * row) * ratio);
    });
    ctx.restore();
  }
}
