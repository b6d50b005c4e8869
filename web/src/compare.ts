// SPDX-License-Identifier: Apache-2.0
// Two or more runs side by side. Every figure comes from the server's comparison (the same arithmetic as
// `paramsync compare`); this page only draws. Published results (sample-1, sample-16) are a threshold and one end mark.
import { compareRuns, getEpochs, getRun } from "./api.ts";
import { Chart, dashOf, swatch, type ChartSpec, type Line } from "./chart.ts";
import { h, replace, type Child } from "./dom.ts";
import { DASH, duration, num, percent, percentShort, rate, times } from "./format.ts";
import { t } from "./i18n.ts";
import { onEvent } from "./live.ts";
import { differences, points } from "./math.ts";
import type { CompareRow, Comparison, Epochs, Num, Run } from "./types.ts";
import { badge, empty, failure, loading, panel, scroller, serverText, throttle, type Page } from "./ui.ts";

const SAMPLES = ["sample-1", "sample-16"] as const;
// Options that are never the same and explain nothing.
const QUIET = new Set(["run", "output_dir", "sidecar"]);
const LIVE = new Set(["running", "created"]);

export function comparePage(params: URLSearchParams): Page {
  let ids = [...new Set((params.get("runs") ?? "").split(",").filter((id) => id && !SAMPLES.includes(id as never)))];
  let target = Number(params.get("target") ?? "0.8");
  if (!(target > 0 && target <= 1)) target = 0.8;
  const samples = new Set(`${params.get("samples") ?? ""},${params.get("runs") ?? ""}`.split(",").filter((s) => SAMPLES.includes(s as never)));
  let abort = new AbortController();
  let comparison: Comparison | null = null;
  let runs = new Map<string, Run>();
  let epochs = new Map<string, Epochs>();
  const charts = new Map<string, Chart>();

  const chips = h("div", { class: "legend big" });
  const controls = h("div", { class: "controls" });
  const headline = h("div", { class: "cards" });
  const figures = h("div", {});
  const curves = h("div", { class: "charts" });
  const scaling = h("div", { class: "charts" });
  const config = h("div", {});
  const plans = h("div", {});
  const planPanel = panel(t("cmp_plan"), plans);
  const node = h("div", { class: "page" }, loading());
  const bars = h("figure", { class: "chart bars" });
  const content: Child[] = [
    h("a", { class: "crumb", href: "#/" }, "← ", t("back")),
    h("div", { class: "toolbar" }, h("h1", {}, t("compare")), controls), chips, headline,
    panel(t("cmp_numbers"), figures, h("p", { class: "note" }, t("cmp_measured_note"))),
    panel(t("curves"), curves), h("div", { class: "panel" }, scaling), planPanel, panel(t("cmp_config"), config),
  ];

  function keepAddress(): void {
    const query = new URLSearchParams({ runs: ids.join(",") });
    if (target !== 0.8) query.set("target", String(target));
    if (samples.size) query.set("samples", [...samples].join(","));
    history.replaceState(null, "", "#/compare?" + query.toString().replace(/%2C/g, ","));
  }

  const styleOf = (row: CompareRow): number => {
    const at = ids.findIndex((id) => id === row.run_id || id === row.name);
    return at >= 0 ? at : ids.length + SAMPLES.indexOf(row.name as never);
  };
  const label = (row: CompareRow): string =>
    row.threshold_only ? t(row.name === "sample-1" ? "cmp_sample_1" : "cmp_sample_16") : row.name;

  function drawControls(): void {
    const field = h("input", { type: "number", id: "target", min: 1, max: 100, step: "any", value: String(Number((target * 100).toFixed(4))), inputmode: "decimal" });
    replace(controls,
      h("form", {
        class: "inline",
        onsubmit: (event: Event) => {
          event.preventDefault();
          const value = Number(field.value) / 100;
          if (!(value > 0 && value <= 1)) return;
          target = value;
          keepAddress();
          reload();
        },
      }, h("label", { for: "target" }, t("cmp_target")), field, "%", h("button", { type: "submit", class: "small" }, t("cmp_apply"))),
      h("fieldset", { class: "inline" }, h("legend", {}, t("cmp_samples")), SAMPLES.map((name) => h("label", { class: "check" },
        h("input", {
          type: "checkbox", id: name, checked: samples.has(name),
          onchange: (event: Event) => {
            if ((event.target as HTMLInputElement).checked) samples.add(name);
            else samples.delete(name);
            keepAddress();
            reload();
          },
        }), t(name === "sample-1" ? "cmp_sample_1" : "cmp_sample_16")))));
  }

  function drawHeadline(c: Comparison): void {
    const reference = c.rows.find((row) => isReference(c, row));
    const cards: Child[] = [];
    for (const row of c.rows) {
      if (row === reference || row.threshold_only || !reference) continue;
      if (row.refusal) {
        cards.push(h("div", { class: "card card-refused", role: "note" }, h("span", { class: "card-name" }, swatch(styleOf(row)), row.name),
          h("strong", {}, t("cmp_refused")), h("p", {}, serverText(row.refusal))));
        continue;
      }
      const ratio = row.world_size / reference.world_size;
      const one = reference.world_size === 1 ? t("cmp_one") : String(reference.world_size);
      const [mine, theirs] = [num(row.time_to_target_s), num(reference.time_to_target_s)];
      cards.push(h("div", { class: "card" },
        h("span", { class: "card-name" }, swatch(styleOf(row)), row.name, h("span", { class: "soft" }, `/ ${reference.name}`)),
        h("div", { class: "card-body" }, h("div", { class: "card-figures" },
          h("div", {}, h("span", { class: "figure" }, times(row.speedup)), h("span", { class: "figure-label" }, t("cmp_speedup"))),
          h("div", {}, h("span", { class: "figure" }, percent(row.efficiency)), h("span", { class: "figure-label" }, t("cmp_efficiency"))),
          h("div", {}, h("span", { class: "figure" }, times(row.time_speedup)), h("span", { class: "figure-label" }, t("cmp_time_speedup")))),
        h("div", {}, num(row.speedup) !== null && h("p", {}, t("cmp_headline_speed", row.world_size, times(row.speedup), one),
          ratio > 1 && [" · ", t("cmp_headline_eff", percent(row.efficiency), times(ratio))]),
        h("p", { class: "soft" }, mine !== null && theirs !== null
          ? t("cmp_headline_ttt", percentShort(c.target), duration(mine), duration(theirs))
          : t("cmp_headline_ttt_none", percentShort(c.target)))))));
    }
    replace(headline, cards);
  }

  const isReference = (c: Comparison, row: CompareRow): boolean => row.run_id === c.reference || row.name === c.reference;

  function drawFigures(c: Comparison): void {
    const columns: [string, (row: CompareRow) => Child][] = [
      [t("world_size"), (r) => r.world_size || DASH],
      [t("cmp_epochs"), (r) => r.epochs || DASH],
      [t("cmp_best"), (r) => (r.threshold_only ? "≥ " + percentShort(num(r.best_accuracy) ?? NaN) : percent(r.best_accuracy, 2))],
      [t("cmp_final"), (r) => (r.threshold_only ? DASH : percent(r.final_accuracy, 2))],
      [t("cmp_total"), (r) => duration(r.total_s)],
      [t("cmp_ttt"), (r) => (num(r.time_to_target_s) !== null ? duration(r.time_to_target_s) : r.threshold_only ? DASH : t(LIVE.has(r.state) ? "cmp_not_reached_yet" : "cmp_not_reached"))],
      [t("cmp_epochs_to"), (r) => r.epochs_to_target ?? DASH],
      [t("img_s"), (r) => rate(r.samples_per_s)],
      [t("cmp_speedup"), (r) => times(r.speedup)],
      [t("cmp_efficiency"), (r) => percent(r.efficiency)],
      [t("cmp_time_speedup"), (r) => times(r.time_speedup)],
    ];
    replace(figures, scroller(t("cmp_numbers"), h("table", { class: "figures stack" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("name")), columns.map(([name]) => h("th", { scope: "col", class: "n" }, name)))),
      h("tbody", {}, c.rows.flatMap((row) => {
        const reference = isReference(c, row);
        const name = h("th", { scope: "row" }, swatch(styleOf(row)),
          row.threshold_only ? label(row) : h("a", { href: `#/run/${encodeURIComponent(row.run_id)}` }, row.name),
          reference && h("span", { class: "tag" }, t("cmp_reference")));
        const out: Node[] = [h("tr", { "data-row": row.name }, name, columns.map(([title, cell]) => {
          const shown = cell(row);
          return h("td", { class: shown === DASH ? "n none" : "n", "data-label": title }, shown);
        }))];
        const remark = row.refusal && !reference && !row.threshold_only ? `${t("cmp_refused")}: ${serverText(row.refusal)}`
          : row.threshold_only ? t("cmp_threshold_note", row.epochs, duration(row.total_s), "≥ " + percentShort(num(row.best_accuracy) ?? NaN))
            : [reference ? "" : row.differs && t("cmp_differs", row.differs), reference ? "" : serverText(row.time_refusal), serverText(row.non_finite ?? "")].filter(Boolean).join(" · ");
        if (remark) out.push(h("tr", { class: row.refusal && !row.threshold_only ? "remark refused" : "remark" }, h("td", { colspan: columns.length + 1 }, remark)));
        return out;
      })))));
  }

  function chart(holder: HTMLElement, key: string, spec: ChartSpec): void {
    const known = charts.get(key);
    if (known) return known.set(spec);
    const made = new Chart(spec);
    charts.set(key, made);
    holder.appendChild(made.node);
    made.set(spec);
    return undefined;
  }

  function drawCharts(c: Comparison): void {
    const own = c.rows.filter((row) => !row.threshold_only && epochs.has(row.run_id));
    const make = (x: "epoch" | "elapsed_s", y: (e: Epochs) => readonly (Num | null)[], faint = false): Line[] => own.map((row) => {
      const e = epochs.get(row.run_id) as Epochs;
      return { label: faint ? `${row.name}, ${t("cmp_train")}` : row.name, style: styleOf(row), faint, unlisted: faint, dash: dashOf(styleOf(row)), ...points(e[x].map(num), y(e).map(num)) };
    });
    const endMarks = c.rows.filter((row) => row.threshold_only).map((row) => ({
      x: num(row.total_s) ?? NaN, y: num(row.best_accuracy) ?? NaN, style: styleOf(row),
      label: `${label(row)}: ${duration(row.total_s)}`,
    }));
    const threshold = { y: c.target, label: `${t("cmp_target")} ${percentShort(c.target)}` };
    const acc = (e: Epochs): (Num | null)[] => e.accuracy;
    chart(curves, "acc-time", { title: t("cmp_acc_time"), x: "elapsed", y: "accuracy", lines: make("elapsed_s", acc), threshold, endMarks, group: "cmp-elapsed", height: 260 });
    chart(curves, "acc-epoch", { title: t("cmp_acc_epoch"), x: "epoch", y: "accuracy", lines: make("epoch", acc), threshold, group: "cmp-epoch", height: 260 });
    const losses = (x: "epoch" | "elapsed_s"): Line[] => [...make(x, (e) => e.val_loss), ...make(x, (e) => e.train_loss, true)];
    chart(curves, "loss-time", { title: t("cmp_loss_time"), sub: t("cmp_thick_thin"), x: "elapsed", y: "loss", lines: losses("elapsed_s"), group: "cmp-elapsed", height: 260 });
    chart(curves, "loss-epoch", { title: t("cmp_loss_epoch"), sub: t("cmp_thick_thin"), x: "epoch", y: "loss", lines: losses("epoch"), group: "cmp-epoch", height: 260 });
    drawScaling(c, own);
  }

  function drawScaling(c: Comparison, own: CompareRow[]): void {
    const reference = c.rows.find((row) => isReference(c, row));
    const measured = own.filter((row) => num(row.samples_per_s) !== null && (row === reference || !row.refusal));
    const base = reference ? num(reference.samples_per_s) : null;
    if (reference && base !== null && measured.length > 1) {
      const most = Math.max(...measured.map((row) => row.world_size));
      const lines: Line[] = [
        { label: t("cmp_ideal"), style: 7, dash: [4, 4], faint: true, x: [0, most], y: [0, (base / reference.world_size) * most] },
        ...measured.map((row): Line => ({ label: row.name, style: styleOf(row), pointsOnly: true, dash: [], x: [row.world_size], y: [num(row.samples_per_s) ?? NaN] })),
      ];
      chart(scaling, "scaling", { title: t("cmp_scaling"), x: "processes", y: "rate", lines, fromZero: true, group: "cmp-scaling", height: 220 });
    }
    const efficient = measured.filter((row) => num(row.efficiency) !== null && row.world_size > 0);
    if (efficient.length > 1) {
      const most = Math.max(...efficient.map((row) => row.world_size));
      const planned = efficient.flatMap((row) => {
        const plan = planOf(row);
        return plan?.efficiency !== undefined && plan.efficiency !== null ? [{ row, y: plan.efficiency }] : [];
      });
      chart(scaling, "efficiency", {
        title: t("cmp_efficiency_chart"), x: "processes", y: "accuracy", fromZero: true, group: "cmp-scaling", height: 220,
        lines: [{ label: t("cmp_ideal_eff"), style: 7, dash: [4, 4], faint: true, x: [0, most], y: [1, 1] },
          ...efficient.map((row): Line => ({ label: row.name, style: styleOf(row), pointsOnly: true, dash: [], x: [row.world_size], y: [num(row.efficiency) ?? NaN] })),
          ...planned.map(({ row, y }): Line => ({ label: t("cmp_predicted", row.name), style: styleOf(row), pointsOnly: true, hollow: true, dash: [], x: [row.world_size], y: [y] }))],
      });
    }
    const group = (title: string, value: (row: CompareRow) => number | null, rows: CompareRow[]): Child => {
      const most = Math.max(...rows.map((row) => value(row) ?? 0));
      return [h("figcaption", {}, title), h("div", { class: "bar-rows" }, rows.map((row) => {
        const x = value(row);
        const bar = h("span", { class: `bar bar-${styleOf(row) % 8}${row.threshold_only ? " bar-hollow" : ""}` });
        bar.style.width = x !== null && most > 0 ? `${Math.max(0.5, (x / most) * 100)}%` : "0";
        return h("div", { class: "bar-row" }, h("span", { class: "bar-name", title: label(row) }, label(row)), h("span", { class: "bar-track" }, bar),
          h("span", { class: "bar-value" }, x !== null ? duration(x) : t(LIVE.has(row.state) ? "cmp_not_reached_yet" : "cmp_not_reached")));
      }))];
    };
    replace(bars, group(`${t("cmp_ttt")} (${percentShort(c.target)})`, (row) => num(row.time_to_target_s), own),
      group(t("cmp_total"), (row) => num(row.total_s), [...own, ...c.rows.filter((row) => row.threshold_only)]));
    if (bars.parentNode !== scaling) scaling.appendChild(bars);
  }

  // What `paramsync plan` foretold, where a run carries it in its configuration.
  function planOf(row: CompareRow): { step: number | null; efficiency: number | null } | null {
    const config = new Map(runs.get(row.run_id)?.config ?? []);
    const value = (key: string): number | null => {
      const x = Number(config.get(key) ?? NaN);
      return Number.isFinite(x) ? x : null;
    };
    const plan = { step: value("plan.step_s"), efficiency: value("plan.efficiency") };
    return plan.step === null && plan.efficiency === null ? null : plan;
  }

  function drawPlan(c: Comparison): void {
    const rows = c.rows.flatMap((row) => {
      const plan = row.threshold_only ? null : planOf(row);
      return plan ? [{ row, plan }] : [];
    });
    planPanel.hidden = !rows.length;
    const step = (seconds: number | null): string => (seconds === null ? DASH : seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1000).toFixed(1)} ms`);
    const off = (measured: number | null, planned: number | null): string =>
      (measured === null || planned === null || !(planned > 0) ? DASH : `${measured >= planned ? "+" : "−"}${percent(Math.abs(measured / planned - 1), 1)}`);
    const names = [t("world_size"), t("cmp_plan_step"), t("cmp_measured_step"), t("cmp_plan_off"), t("cmp_plan_eff"), t("cmp_measured_eff"), t("cmp_plan_off")];
    replace(plans, scroller(t("cmp_plan"), h("table", { class: "stack" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("name")), names.map((name) => h("th", { scope: "col", class: "n" }, name)))),
      h("tbody", {}, rows.map(({ row, plan }) => {
        const run = runs.get(row.run_id);
        const speed = num(row.samples_per_s);
        const measured = run && run.batch_per_rank > 0 && speed !== null && speed > 0 ? (run.batch_per_rank * row.world_size) / speed : null;
        const cells = [String(row.world_size), step(plan.step), step(measured), off(measured, plan.step), percent(plan.efficiency), percent(row.efficiency), off(num(row.efficiency), plan.efficiency)];
        return h("tr", { "data-plan": row.name }, h("th", { scope: "row" }, swatch(styleOf(row)), row.name), cells.map((cell, i) => h("td", { class: "n", "data-label": names[i] ?? "" }, cell)));
      })))));
  }

  function drawConfig(): void {
    const list = ids.map((id) => [...runs.values()].find((run) => run.id === id || run.name === id)).filter((run): run is Run => !!run);
    const table = differences(list.map((run) => [
      ["model", run.model], ["dataset", run.dataset], ["dataset_hash", run.dataset_hash], ["device", run.device], ["commit", run.commit],
      ["world_size", String(run.world_size)], ["batch_per_rank", String(run.batch_per_rank)], ["epochs_planned", String(run.epochs_planned)],
      ...(run.config ?? []).filter(([key]) => !QUIET.has(key.replace(/-/g, "_")) && !key.startsWith("plan.")),
    ]));
    replace(config, !table.length ? h("p", { class: "soft" }, t("cmp_same"))
      : scroller(t("cmp_config"), h("table", { class: "diff" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("option")), list.map((run, i) => h("th", { scope: "col" }, swatch(i), run.name)))),
        h("tbody", {}, table.map(({ key, values }) => h("tr", {}, h("th", { scope: "row", class: "mono" }, key),
          values.map((value) => h("td", { class: "wrap" }, value === null ? h("em", { class: "soft" }, t("cmp_absent")) : value || DASH))))))));
  }

  function drawChips(c: Comparison): void {
    replace(chips, c.rows.filter((row) => !row.threshold_only).map((row) => {
      const at = ids.findIndex((id) => id === row.run_id || id === row.name);
      return h("span", { class: "legend-item" }, swatch(styleOf(row)), h("a", { href: `#/run/${encodeURIComponent(row.run_id)}` }, row.name), badge(row.state),
        !isReference(c, row) && h("button", {
          type: "button", class: "link",
          onclick: () => {
            ids = [ids[at] ?? row.run_id, ...ids.filter((_, i) => i !== at)];
            keepAddress();
            reload();
          },
        }, `→ ${t("cmp_reference")}`));
    }));
  }

  function reload(): void {
    if (!ids.length) {
      replace(node, empty(t("compare"), h("p", {}, t("cmp_pick")), h("a", { class: "button primary", href: "#/" }, t("back"))));
      return;
    }
    abort.abort();
    abort = new AbortController();
    const mine = abort;
    const one = (id: string): Promise<[Run, Epochs | undefined]> =>
      Promise.all([getRun(id, mine.signal), getEpochs(id, mine.signal).then((answer) => answer.epochs)]);
    Promise.all([compareRuns([...ids, ...samples], target, mine.signal), Promise.all(ids.map(one))]).then(
      ([got, all]) => {
        if (mine.signal.aborted) return;
        comparison = got;
        runs = new Map(all.map(([run]) => [run.id, run]));
        epochs = new Map(all.flatMap(([run, e]) => (e ? [[run.id, e] as const] : [])));
        if (node.lastChild === null || !node.contains(curves)) replace(node, content);
        if (!controls.contains(document.activeElement)) drawControls(); // not under the reader's fingers
        drawChips(got);
        drawHeadline(got);
        drawFigures(got);
        drawCharts(got);
        drawPlan(got);
        drawConfig();
      },
      (error: unknown) => {
        if (!mine.signal.aborted && !comparison) replace(node, failure(error, reload), h("p", {}, h("a", { href: "#/" }, t("back"))));
      },
    );
  }

  const reloadSoon = throttle(reload, 1000);
  const stop = onEvent((event) => {
    // A checkpoint changes nothing here.
    if (!event || (event.kind !== "checkpoint" && runs.has(event.run_id))) reloadSoon();
  });
  reload();
  let gone = false;
  return {
    node,
    title: t("compare"),
    destroy: () => {
      gone = true;
      stop();
      abort.abort();
      for (const one of charts.values()) one.destroy();
    },
    retheme: () => {
      if (!gone) for (const one of charts.values()) one.retheme();
    },
  };
}

