// SPDX-License-Identifier: Apache-2.0
// A chart as PNG or SVG, its data as CSV or JSON. Everything is made in the page; nothing is sent anywhere.
import type uPlot from "uplot";
import type { ChartSpec, Line } from "./chart.ts";
import { h, svg } from "./dom.ts";
import { t } from "./i18n.ts";
import { csvOf, tableOf } from "./math.ts";

export const EXPORTS = ["png", "svg", "csv", "json"] as const;
export type ExportKind = (typeof EXPORTS)[number];
interface Look {
  color: (line: Line) => string;
  dash: (line: Line) => readonly number[];
  css: (name: string) => string;
}

const HEAD = 34;
const LEGEND = 20;

function save(name: string, blob: Blob): void {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  document.body.appendChild(link);
  link.click();
  link.remove();
  window.setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const fileName = (title: string, kind: ExportKind): string => `${title.replace(/[^\p{L}\p{N}._-]+/gu, "_").slice(0, 80) || "chart"}.${kind}`;
const listed = (spec: ChartSpec): Line[] => spec.lines.filter((line) => !line.unlisted);

// uPlot keeps what it wrote at the axes, under names of its own.
interface Ticks {
  _splits?: (number | null)[];
  _values?: (string | null)[];
}

export function svgOf(plot: uPlot, spec: ChartSpec, look: Look): string {
  const ratio = devicePixelRatio || 1;
  const box = { left: plot.bbox.left / ratio, top: plot.bbox.top / ratio, width: plot.bbox.width / ratio, height: plot.bbox.height / ratio };
  const legend = listed(spec);
  const top = HEAD + LEGEND * legend.length;
  const [width, height] = [plot.width, plot.height + top];
  const at = (value: number, scale: string): number => Math.round(plot.valToPos(value, scale) * 100) / 100;
  const soft = look.css("--text-soft");
  const text = (x: number, y: number, words: string, anchor = "start", fill = soft, weight = "normal"): SVGElement =>
    svg("text", { x, y, "text-anchor": anchor, fill, "font-size": 12, "font-weight": weight, "font-family": "sans-serif" }, words);
  const inside = (value: number, low: number, size: number): boolean => value >= low - 0.5 && value <= low + size + 0.5;
  const node = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` },
    svg("rect", { width, height, fill: look.css("--panel") }),
    text(8, 20, spec.sub ? `${spec.title} · ${spec.sub}` : spec.title, "start", look.css("--text"), "bold"),
    legend.map((line, i) => [svg("line", { x1: 10, x2: 42, y1: HEAD + LEGEND * i + 6, y2: HEAD + LEGEND * i + 6, stroke: look.color(line), "stroke-width": 2.5, "stroke-dasharray": look.dash(line).join(" ") }),
      text(50, HEAD + LEGEND * i + 10, line.label)]));
  const area = svg("g", { transform: `translate(0 ${top})` });
  node.appendChild(area);
  const [xAxis, yAxis] = plot.axes as unknown as [Ticks, Ticks];
  (yAxis._splits ?? []).forEach((split, i) => {
    const y = split === null ? NaN : at(split, "y") + box.top;
    if (!inside(y, box.top, box.height)) return;
    area.append(svg("line", { x1: box.left, x2: box.left + box.width, y1: y, y2: y, stroke: look.css("--grid") }), text(box.left - 7, y + 4, yAxis._values?.[i] ?? "", "end"));
  });
  (xAxis._splits ?? []).forEach((split, i) => {
    const x = split === null ? NaN : at(split, "x") + box.left;
    if (!inside(x, box.left, box.width)) return;
    area.append(svg("line", { x1: x, x2: x, y1: box.top, y2: box.top + box.height, stroke: look.css("--grid") }), text(x, box.top + box.height + 18, String(xAxis._values?.[i] ?? "").replace("\n", " "), "middle"));
  });
  if (spec.threshold) {
    const y = at(spec.threshold.y, "y") + box.top;
    area.append(svg("line", { x1: box.left, x2: box.left + box.width, y1: y, y2: y, stroke: soft, "stroke-dasharray": "3 3" }), text(box.left + box.width - 4, y + 14, spec.threshold.label, "end"));
  }
  const clip = svg("clipPath", { id: "plot" }, svg("rect", { x: box.left, y: box.top, width: box.width, height: box.height }));
  const lines = svg("g", { "clip-path": "url(#plot)", fill: "none", "stroke-linejoin": "round" });
  area.append(clip, lines);
  spec.lines.forEach((line, index) => {
    const ys = plot.data[index + 1] as (number | null | undefined)[] | undefined;
    if (!ys) return;
    let path = "";
    let pen = false;
    ys.forEach((y, i) => {
      if (y === undefined) return; // another line's point
      if (y === null) {
        pen = false;
        return;
      }
      const [px, py] = [at(plot.data[0][i] ?? 0, "x") + box.left, at(y, "y") + box.top];
      if (line.pointsOnly) lines.appendChild(svg("circle", { cx: px, cy: py, r: 4.5, fill: look.color(line) }));
      path += `${pen ? "L" : "M"}${px} ${py}`;
      pen = true;
    });
    if (!line.pointsOnly && path) lines.appendChild(svg("path", { d: path, stroke: look.color(line), "stroke-width": line.faint ? 1.25 : 2, "stroke-opacity": line.pale ? 0.35 : 1, "stroke-dasharray": look.dash(line).join(" ") }));
  });
  for (const mark of spec.endMarks ?? []) {
    const [x, y] = [Math.min(at(mark.x, "x"), box.width - 9) + box.left, at(mark.y, "y") + box.top];
    area.append(svg("path", { d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z`, fill: look.css("--panel"), stroke: look.color({ style: mark.style } as Line), "stroke-width": 2 }),
      text(Math.min(x, box.left + box.width - 60), y + 20, mark.label, "middle"));
  }
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(node)}\n`;
}

function png(plot: uPlot, spec: ChartSpec, look: Look, done: (blob: Blob) => void): void {
  const ratio = devicePixelRatio || 1;
  const source = plot.ctx.canvas;
  const legend = listed(spec);
  const top = (HEAD + LEGEND * legend.length) * ratio;
  const canvas = h("canvas", { width: source.width, height: source.height + top });
  const ctx = canvas.getContext("2d");
  if (!ctx) return;
  ctx.fillStyle = look.css("--panel");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = look.css("--text");
  ctx.font = `bold ${13 * ratio}px sans-serif`;
  ctx.fillText(spec.title, 8 * ratio, 20 * ratio);
  ctx.font = `${12 * ratio}px sans-serif`;
  legend.forEach((line, i) => {
    const y = (HEAD + LEGEND * i + 6) * ratio;
    ctx.strokeStyle = look.color(line);
    ctx.lineWidth = 2.5 * ratio;
    ctx.setLineDash(look.dash(line).map((d) => d * ratio));
    ctx.beginPath();
    ctx.moveTo(10 * ratio, y);
    ctx.lineTo(42 * ratio, y);
    ctx.stroke();
    ctx.fillStyle = look.css("--text-soft");
    ctx.fillText(line.label, 50 * ratio, y + 4 * ratio);
  });
  ctx.drawImage(source, 0, top);
  canvas.toBlob((blob) => blob && done(blob), "image/png");
}

const told = (value: number): number | string => (Number.isFinite(value) ? value : Number.isNaN(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");

export function exportChart(kind: ExportKind, plot: uPlot, spec: ChartSpec, look: Look): void {
  const name = fileName(spec.title, kind);
  if (kind === "png") png(plot, spec, look, (blob) => save(name, blob));
  else if (kind === "svg") save(name, new Blob([svgOf(plot, spec, look)], { type: "image/svg+xml" }));
  else if (kind === "csv") save(name, new Blob([csvOf(spec.x, tableOf(spec.lines))], { type: "text/csv;charset=utf-8" }));
  else save(name, new Blob([JSON.stringify({ title: spec.title, x: spec.x, lines: spec.lines.map((line) => ({ label: line.label, x: line.x, y: line.y.map(told) })) }, null, 1)], { type: "application/json" }));
}

export function exportMenu(act: (kind: ExportKind) => void): HTMLElement {
  const menu = h("details", { class: "menu export" }, h("summary", { class: "button small", "aria-label": t("export_as"), title: t("export_as") }, "⤓"),
    h("div", { class: "menu-body" }, EXPORTS.map((kind) => h("button", {
      type: "button", class: "small",
      onclick: () => {
        menu.open = false;
        act(kind);
      },
    }, kind.toUpperCase()))));
  return menu;
}
