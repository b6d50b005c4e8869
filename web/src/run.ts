// SPDX-License-Identifier: Apache-2.0
// One run: progress, live curves, checkpoints, events, attempts, configuration.
import { getCheckpoints, getConfusion, getEpochs, getEvents, getInfo, getLog, getRanks, getRun, getSeries, type Info, type LogLine } from "./api.ts";
import { runActions } from "./edit.ts";
import { confusionTable, type Confusion } from "./confusion.ts";
import { Chart, dashOf, type ChartSpec, type Line, type XKind } from "./chart.ts";
import { h, replace, type Child } from "./dom.ts";
import { absolute, bytes, DASH, duration, fixed, num, percent, percentShort, rate } from "./format.ts";
import { t, word, type Key } from "./i18n.ts";
import { onEvent } from "./live.ts";
import { verdictText } from "./ranks.ts";
import { mergeSteps, points, remaining, shellQuote, smooth } from "./math.ts";
import type { Checkpoint, Epochs, Num, Run, RunEvent, SeriesAnswer, StepSeries } from "./types.ts";
import { badge, copyButton, failure, loading, panel, runTabs, scroller, serverText, throttle, when, whenBoth, type Page } from "./ui.ts";

const XS: readonly XKind[] = ["epoch", "step", "elapsed", "wall"];
const GRPC_PORT = 50051; // what `paramsync` tries on this machine when it is told nothing

function pullCommand(run: Run, checkpoint: Checkpoint, port: number): string {
  const host = location.hostname;
  const away = host !== "" && host !== "localhost" && host !== "127.0.0.1" && host !== "[::1]";
  return ["paramsync pull", shellQuote(run.name.startsWith("-") ? run.id : run.name), `--epoch ${checkpoint.epoch}`,
    `-o ${shellQuote(checkpoint.filename)}`, away || port !== GRPC_PORT ? `--sidecar ${host}:${port}` : ""].filter(Boolean).join(" ");
}

export function runPage(id: string, params: URLSearchParams): Page {
  let axis: XKind = XS.find((x) => x === params.get("x")) ?? "epoch";
  let log = params.get("log") === "1";
  let run: Run | null = null;
  let info: Info | null = null;
  let answer: SeriesAnswer | null = null;
  let events: RunEvent[] = [];
  let checkpoints: Checkpoint[] = [];
  let confusion: Confusion | null = null;
  let seriesName = params.get("series") ?? "";
  let steps: SeriesAnswer | null = null;
  let detail: { answer: SeriesAnswer; from: number; to: number } | null = null; // of a zoomed part
  let weight = Math.min(0.99, Math.max(0, Number(params.get("smooth") ?? "0") || 0));
  let logLines: LogLine[] = [];
  const abort = new AbortController();
  const charts = new Map<string, Chart>();

  const title = h("div", { class: "title" });
  const facts = h("dl", { class: "facts" });
  const progress = h("div", { class: "progress" });
  const straggler = h("div", {});
  const controls = h("div", { class: "controls" });
  const curves = h("div", { class: "charts" });
  const noCurves = h("p", { class: "soft" });
  const stepBox = h("div", {});
  const checkpointBox = h("div", {});
  const confusionBox = h("div", {});
  const confusionPanel = panel(t("confusion"), confusionBox);
  const eventBox = h("div", {});
  const attemptBox = h("div", {});
  const configBox = h("div", {});
  const logBox = h("div", {});
  const logPanel = panel(t("log"), logBox);
  const page = h("div", { class: "page" }, loading());

  const content: Child[] = [
    title, straggler, progress, facts,
    panel(t("curves"), controls, noCurves, curves),
    stepBox,
    panel(t("checkpoints"), checkpointBox),
    confusionPanel,
    h("div", { class: "two" }, panel(t("events"), eventBox), panel(t("attempts"), attemptBox)),
    logPanel,
    panel(t("configuration"), configBox),
  ];

  function keepAddress(): void {
    const query = new URLSearchParams();
    if (axis !== "epoch") query.set("x", axis);
    if (log) query.set("log", "1");
    if (weight) query.set("smooth", String(weight));
    if (seriesName) query.set("series", seriesName);
    const tail = query.toString();
    history.replaceState(null, "", `#/run/${encodeURIComponent(id)}${tail ? "?" + tail : ""}`);
  }

  function wallOf(elapsed: number | null, attempt: number): number | null {
    const one = run?.attempts?.find((a) => a.attempt === attempt);
    const start = one ? new Date(one.started_at).getTime() / 1000 : NaN;
    return elapsed === null || !one ? null : start + elapsed - (num(one.offset_s) ?? 0);
  }

  function xs(kind: XKind, epochs: Epochs): (number | null)[] {
    if (kind === "epoch") return epochs.epoch;
    if (kind === "step") return epochs.step;
    const elapsed = epochs.elapsed_s.map(num);
    return kind === "elapsed" ? elapsed : elapsed.map((e, i) => wallOf(e, epochs.attempt[i] ?? 0));
  }

  function chart(key: string, spec: ChartSpec): void {
    const known = charts.get(key);
    if (known) {
      known.set(spec);
      return;
    }
    const made = new Chart(spec);
    charts.set(key, made);
    (key === "step" ? stepCurves : curves).appendChild(made.node);
    made.set(spec);
  }

  function drawCurves(): void {
    const epochs = answer?.epochs;
    const none = !epochs || !epochs.epoch.length;
    replace(noCurves, none && t("no_epochs"));
    noCurves.hidden = !none;
    curves.hidden = none;
    controls.hidden = none;
    if (!epochs || none) return;
    const x = xs(axis, epochs);
    const line = (label: Key, column: readonly (Num | null)[], style: number): Line =>
      ({ label: t(label), style, dash: style === 1 ? dashOf(1) : [], ...points(x, column.map(num)) });
    // The raw line stays, paler, behind the smoothed one.
    const lines = (...all: Line[]): Line[] => (weight ? [...all.map((one): Line => ({ ...one, pale: true, unlisted: true })), ...all.map((one): Line => ({ ...one, y: smooth(one.y, weight), unmarked: true }))] : all);
    const common = { x: axis, group: `run-${axis}` };
    chart("loss", { ...common, title: t("loss"), y: "loss", log, lines: lines(line("train_loss", epochs.train_loss, 0), line("val_loss", epochs.val_loss, 1)) });
    chart("accuracy", { ...common, title: t("test_accuracy"), y: "accuracy", lines: lines(line("test_accuracy", epochs.accuracy, 2)) });
    chart("rate", { ...common, title: t("throughput"), y: "rate", fromZero: true, lines: lines(line("throughput", epochs.samples_per_s, 3)) });
    chart("lr", { ...common, title: t("lr"), y: "lr", fromZero: true, lines: [line("lr", epochs.lr, 5)] });
  }

  function drawControls(): void {
    replace(controls,
      h("div", { class: "segmented", role: "group", "aria-label": t("x_axis") }, XS.map((x) => h("button", {
        type: "button", "aria-pressed": String(x === axis),
        onclick: () => {
          axis = x;
          detail = null;
          keepAddress();
          drawControls();
          drawCurves();
          drawSteps();
        },
      }, t(`x_${x}` as Key)))),
      h("label", { class: "check" }, h("input", {
        type: "checkbox", checked: log,
        onchange: (event: Event) => {
          log = (event.target as HTMLInputElement).checked;
          keepAddress();
          drawCurves();
        },
      }), t("log_scale")),
      h("label", { class: "check", for: "smooth" }, t("smoothing"), h("input", {
        type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value: weight,
        oninput: (event: Event) => {
          weight = Number((event.target as HTMLInputElement).value);
          weightText.textContent = weight ? weight.toFixed(2) : t("off");
          keepAddress();
          drawCurves();
          loadStepsSoon();
        },
      }), weightText),
      h("span", { class: "soft hint" }, t("drag_zoom")));
    weightText.textContent = weight ? weight.toFixed(2) : t("off");
  }
  const weightText = h("span", { class: "soft weight" });

  const stepCurves = h("div", { class: "charts wide" });
  const stepNote = h("p", { class: "note" });
  const picker = h("select", {
    id: "series",
    onchange: () => {
      seriesName = picker.value;
      detail = null;
      keepAddress();
      loadSteps();
    },
  });
  const stepPanel = panel(t("step_metrics"), h("div", { class: "controls" }, h("label", { for: "series" }, t("choose_series")), picker), stepCurves, stepNote);

  function loadSteps(): void {
    const name = seriesName;
    if (!name) return;
    const part = detail ? { from: detail.from, to: detail.to, smooth: weight } : null;
    Promise.all([getSeries(id, name, { smooth: weight }, abort.signal), part && getSeries(id, name, part, abort.signal)]).then(([got, finer]) => {
      if (name !== seriesName) return;
      steps = got;
      if (finer && part && detail) detail = { answer: finer, from: part.from, to: part.to };
      drawSteps();
    }, () => undefined);
  }
  // Whether a rank holds the others up is said here too, with the way to the page that shows it.
  function loadVerdict(): void {
    if (!run || run.world_size < 2) return;
    getRanks(id, 1, abort.signal).then((ranks) => {
      const state = ranks.verdict?.state;
      replace(straggler, (state === "warn" || state === "critical") && h("div", { class: `card verdict verdict-${state}`, role: "status" },
        h("strong", {}, verdictText(ranks).title), h("a", { href: `#/run/${encodeURIComponent(id)}/ranks` }, t("ranks"), " →")));
    }, () => undefined);
  }

  const loadStepsSoon = throttle(() => {
    if (!abort.signal.aborted) loadSteps();
  }, 200);

  // The part in view, with as many points as the whole had before.
  function zoomSteps(range: [number, number] | null): void {
    if (!range || !steps) {
      if (detail) {
        detail = null;
        drawSteps();
      }
      return;
    }
    if (!steps.series.some((series) => series.total_points > series.steps.length)) return; // everything is here already
    let [from, to] = [Infinity, 0];
    for (const series of steps.series) {
      const x = stepX(series);
      series.steps.forEach((step, i) => {
        const at = x[i];
        if (at === null || at === undefined || at < range[0] || at > range[1]) return;
        from = Math.min(from, series.steps[i - 1] ?? step);
        to = Math.max(to, series.steps[i + 1] ?? step);
      });
    }
    if (from > to || (detail && detail.from === from && detail.to === to)) return;
    const name = seriesName;
    getSeries(id, name, { from, to: Math.max(1, to), smooth: weight }, abort.signal).then((answer) => {
      if (name !== seriesName) return;
      detail = { answer, from, to };
      drawSteps();
    }, () => undefined);
  }

  function drawNames(): void {
    const names = answer?.names ?? [];
    if (!names.length) {
      replace(stepBox);
      return;
    }
    if (!names.includes(seriesName)) seriesName = names.includes("loss") ? "loss" : names[0] ?? "";
    if ([...picker.options].map((o) => o.value).join("\n") !== names.join("\n"))
      replace(picker, names.map((name) => h("option", { value: name }, name)));
    picker.value = seriesName;
    if (stepPanel.parentNode !== stepBox) replace(stepBox, stepPanel);
  }

  const stepKind = (): XKind => (axis === "epoch" ? "step" : axis);
  function stepX(series: StepSeries): (number | null)[] {
    const kind = stepKind();
    if (kind === "step") return series.steps;
    const elapsed = series.elapsed_s.map(num);
    return kind === "elapsed" ? elapsed : elapsed.map((e, i) => wallOf(e, series.attempts[i] ?? 0));
  }

  interface Spot { step: number; x: number | null; y: number | null; s: number | null }
  const spots = (series: StepSeries | undefined): Spot[] => {
    if (!series) return [];
    const x = stepX(series);
    return series.steps.map((step, i) => ({ step, x: x[i] ?? null, y: num(series.values[i]), s: num(series.smoothed?.[i]) }));
  };

  function drawSteps(): void {
    if (!steps || !steps.series.length) return;
    const raw: Line[] = [];
    const smoothed: Line[] = [];
    let refused = false;
    for (const series of steps.series.slice(0, 16)) {
      const finer = detail?.answer.series.find((one) => one.rank === series.rank);
      const all = finer && detail ? mergeSteps(spots(series), spots(finer), detail.from, detail.to) : spots(series);
      const base = { label: t("rank_n", series.rank), style: series.rank };
      refused ||= weight > 0 && series.smoothed === null && !(finer?.smoothed);
      const averaged = weight > 0 && (series.smoothed || finer?.smoothed);
      raw.push({ ...base, pale: !!averaged, unlisted: !!averaged, ...points(all.map((p) => p.x), all.map((p) => p.y)) });
      if (averaged) smoothed.push({ ...base, unmarked: true, ...points(all.map((p) => p.x), all.map((p) => p.s)) });
    }
    const first = steps.series[0];
    chart("step", { title: seriesName, x: stepKind(), y: "plain", lines: [...raw, ...smoothed], group: "steps", height: 260, onZoom: zoomSteps });
    const finer = detail?.answer.series[0];
    replace(stepNote, [finer ? t("points_zoomed", finer.steps.length, finer.total_points) : first && first.total_points > first.steps.length ? t("points_shown", first.steps.length, first.total_points) : "",
      steps.series.length > 16 ? t("ranks_shown", steps.series.length) : "", refused ? t("smooth_refused") : ""].filter(Boolean).join(" "));
  }

  function drawHead(): void {
    if (!run) return;
    const r = run;
    replace(title, h("a", { class: "crumb", href: "#/" }, "← ", t("back")),
      h("div", { class: "title-row" }, h("h1", {}, r.name), badge(r.state),
        r.is_baseline && h("span", { class: "tag tag-best" }, "★ ", t("v_baseline")),
        r.reason && h("span", { class: "soft" }, serverText(r.reason))), runActions(r, reload), runTabs(id, "overview"));
    const epochs = answer?.epochs;
    const left = r.state === "running" && epochs ? remaining(epochs.epoch, epochs.elapsed_s.map((e) => num(e) ?? NaN), r.epochs_planned) : null;
    replace(progress, r.epochs_planned > 0 && [
      h("div", { class: "progress-text" }, h("span", {}, t("epoch_of", r.last_epoch, r.epochs_planned)),
        h("span", { class: "soft" }, left !== null && left > 0 && [t("eta", duration(left)), " · ",
          t("eta_at", absolute(new Date(Date.now() + left * 1000).toISOString()).slice(11, 16))])),
      h("progress", { max: r.epochs_planned, value: r.last_epoch, "aria-label": t("progress") })]);
    const gaps = num(r.elapsed_with_gaps_s);
    const elapsed = num(r.elapsed_s);
    const fact = (label: string, ...value: Child[]): Child => h("div", {}, h("dt", {}, label), h("dd", {}, value));
    replace(facts,
      fact(t("accuracy"), r.has_epochs ? percent(r.accuracy, 2) : DASH, r.best_epoch > 0 && h("small", {}, `${t("best")} ${percent(r.best_accuracy, 2)} (${t("epoch")} ${r.best_epoch})`)),
      fact(t("loss"), fixed(r.val_loss ?? r.train_loss, 4), h("small", {}, `${t("cmp_train")} ${fixed(r.train_loss, 4)}`)),
      fact(t("img_s"), rate(r.samples_per_s)),
      fact(t("elapsed"), duration(r.elapsed_s), gaps !== null && elapsed !== null && gaps > elapsed + 1 && h("small", {}, t("with_gaps", duration(gaps)))),
      fact(t("time_to", percentShort(0.8)), duration(r.time_to_target_s)),
      fact(t("world_size"), r.world_size, h("small", {}, r.device || DASH)),
      fact(t("model"), r.model || DASH, r.batch_per_rank > 0 && h("small", {}, `${t("batch")} ${r.batch_per_rank}`)),
      fact(t("dataset"), r.dataset || DASH, r.dataset_hash && h("small", { class: "mono", title: r.dataset_hash }, r.dataset_hash.slice(0, 12))),
      fact(t("started"), h("span", { class: "date" }, absolute(r.created_at)), h("small", {}, when(r.created_at))),
      r.tags.length > 0 && fact(t("tags"), r.tags.map((tag) => h("a", { class: "tag", href: `#/?tag=${encodeURIComponent(tag)}` }, tag))),
      r.notes && fact(t("notes"), h("span", { class: "notes" }, r.notes)));
    const attempts = r.attempts ?? [];
    replace(attemptBox, scroller(t("attempts"), h("table", { class: "stack" },
      h("thead", {}, h("tr", {}, [t("attempt"), t("started"), t("elapsed"), t("world_size"), t("reason")].map((c) => h("th", { scope: "col" }, c)))),
      h("tbody", {}, attempts.map((a) => h("tr", {}, h("td", { class: "n", "data-label": t("attempt") }, a.attempt), h("td", { class: "wrap full" }, whenBoth(a.started_at)),
        h("td", { class: "n", "data-label": t("elapsed") }, duration(a.elapsed_s)), h("td", { class: "n", "data-label": t("world_size") }, a.world_size),
        h("td", { class: a.reason ? "wrap full" : "none" }, serverText(a.reason) || DASH)))))));
    const rows: [string, string][] = [["id", r.id], ...(r.commit ? [["commit", r.commit] as [string, string]] : []),
      ...(r.dataset_hash ? [["dataset_hash", r.dataset_hash] as [string, string]] : []), ...(r.config ?? [])];
    replace(configBox, h("dl", { class: "config" }, rows.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value)))));
  }

  function drawCheckpoints(): void {
    if (!run) return;
    const r = run;
    if (!checkpoints.length) {
      replace(checkpointBox, h("p", { class: "soft" }, t("no_checkpoints")));
      return;
    }
    const weights = checkpoints.filter((c) => c.format !== "state"); // what `pull --latest` means
    const latest = weights[weights.length - 1];
    replace(checkpointBox, scroller(t("checkpoints"), h("table", { class: "stack" },
      h("thead", {}, h("tr", {}, [t("epoch"), t("file"), t("accuracy"), t("size"), t("digest"), t("created"), t("pull_command"), ""].map((c, i) =>
        h("th", { scope: "col", class: i === 0 || i === 2 || i === 3 ? "n" : "" }, c || h("span", { class: "offscreen" }, t("download")))))),
      h("tbody", {}, [...checkpoints].reverse().map((c) => {
        const command = pullCommand(r, c, info?.grpc_port ?? GRPC_PORT);
        return h("tr", {},
          h("td", { class: "n", "data-label": t("epoch") }, c.epoch),
          h("td", { class: "full" }, c.filename, c === latest && h("span", { class: "tag" }, t("latest")), c.best && h("span", { class: "tag tag-best" }, t("best"))),
          h("td", { class: "n", "data-label": t("accuracy") }, percent(c.accuracy, 2)),
          h("td", { class: "n", "data-label": t("size") }, bytes(c.size)),
          h("td", { class: "full" }, h("code", { title: c.sha256 }, c.sha256.slice(0, 12), "…"), " ", copyButton(c.sha256, `${t("copy")} ${t("digest")}`)),
          h("td", { "data-label": t("created") }, when(c.created_at)),
          h("td", { class: "command full" }, c.format !== "state" ? [h("code", { title: command }, command), " ", copyButton(command, `${t("copy")} ${t("pull_command")}`)] : DASH),
          h("td", {}, h("a", { class: "button small", href: `api/v1/checkpoints/${c.sha256}`, download: c.filename, "aria-label": `${t("download")} ${c.filename}` }, t("download"))));
      })))));
  }

  function drawEvents(): void {
    replace(eventBox, !events.length ? h("p", { class: "soft" }, t("no_events"))
      : h("ol", { class: "events", tabindex: 0, "aria-label": t("events") }, [...events].reverse().slice(0, 300).map((e) =>
        h("li", { class: `event-${e.kind}` }, h("span", { class: "event-time", title: absolute(e.at) }, absolute(e.at).slice(5)),
          h("span", { class: "event-kind" }, word("k_", e.kind)), h("span", { class: "event-detail" }, serverText(e.detail))))));
  }

  let logRank = -1;
  function drawLog(): void {
    logPanel.hidden = !logLines.length;
    const ranks = [...new Set(logLines.map((line) => line.rank))];
    if (!ranks.includes(logRank)) logRank = ranks[0] ?? -1;
    const box = h("pre", { class: "log", tabindex: 0, "aria-label": t("log") }, logLines.filter((line) => line.rank === logRank).map((line) => line.text).join("\n"));
    replace(logBox, ranks.length > 1 && h("div", { class: "segmented wrapping", role: "group", "aria-label": t("rank") }, ranks.map((rank) => h("button", {
      type: "button", "aria-pressed": String(rank === logRank),
      onclick: () => {
        logRank = rank;
        drawLog();
      },
    }, t("rank_n", rank)))), box);
    box.scrollTop = box.scrollHeight;
  }

  function drawConfusion(): void {
    confusionPanel.hidden = !confusion;
    if (!confusion) return;
    const names = run?.config?.find(([key]) => key === "class_names")?.[1].split(" ") ?? [];
    replace(confusionBox, confusionTable(confusion, names));
  }

  function drawAll(): void {
    drawHead();
    drawCurves();
    drawNames();
    drawCheckpoints();
    drawEvents();
    drawConfusion();
    drawLog();
  }

  let busy = false;
  let again = false;
  function reload(): void {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    Promise.all([info ?? getInfo(abort.signal), getRun(id, abort.signal), getEpochs(id, abort.signal), getCheckpoints(id, abort.signal), getEvents(id, abort.signal), getConfusion(id, abort.signal), getLog(id, abort.signal)]).then(
      ([gotInfo, gotRun, gotSeries, gotCheckpoints, gotEvents, gotConfusion, gotLog]) => {
        logLines = gotLog.lines;
        info = gotInfo;
        run = gotRun;
        answer = gotSeries;
        checkpoints = gotCheckpoints.checkpoints;
        events = gotEvents.events;
        confusion = gotConfusion;
        if (page.firstChild !== title) {
          replace(page, content);
          drawControls();
        }
        document.title = `${run.name} · paramsync`;
        drawAll();
        loadSteps();
        loadVerdict();
      },
      (error: unknown) => {
        if (!abort.signal.aborted && !run) replace(page, failure(error, reload), h("p", {}, h("a", { href: "#/" }, t("back"))));
      },
    ).finally(() => {
      busy = false;
      if (again && !abort.signal.aborted) {
        again = false;
        reloadSoon();
      }
    });
  }
  const reloadSoon = throttle(() => {
    if (!abort.signal.aborted) reload();
  }, 500);
  const stop = onEvent((event) => {
    if (!event || event.run_id === (run?.id ?? id)) reloadSoon();
  });
  // Step points make no events: a live run's chosen series is read again now and then while the page is in view.
  const timer = window.setInterval(() => {
    if (run && (run.state === "running" || run.state === "created") && !document.hidden) loadSteps();
  }, 5000);

  reload();
  return {
    node: page,
    title: t("run"),
    destroy: () => {
      stop();
      abort.abort();
      window.clearInterval(timer);
      for (const one of charts.values()) one.destroy();
    },
    retheme: () => {
      for (const one of charts.values()) one.retheme();
    },
  };
}
