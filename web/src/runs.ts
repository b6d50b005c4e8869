// SPDX-License-Identifier: Apache-2.0
// The list of runs. The address holds search, state, sorting and selection.
import { listRuns } from "./api.ts";
import { h, replace, type Child } from "./dom.ts";
import { DASH, duration, fixed, num, percent, percentShort, rate } from "./format.ts";
import { t, word } from "./i18n.ts";
import { onEvent } from "./live.ts";
import { STATES, type Run } from "./types.ts";
import { badge, empty, failure, loading, throttle, when, type Page } from "./ui.ts";

type Sortable = number | string | null;
interface Column {
  id: string;
  label: () => string;
  class: string;
  key(run: Run): Sortable;
  cell(run: Run): Child;
}

let target = 0.8;

const COLUMNS: readonly Column[] = [
  { id: "state", label: () => t("state"), class: "", key: (r) => STATES.indexOf(r.state), cell: (r) => badge(r.state) },
  { id: "model", label: () => `${t("model")}, ${t("dataset")}`, class: "two-line", key: (r) => `${r.model} ${r.dataset}`, cell: (r) => [r.model || DASH, h("small", { title: r.dataset }, r.dataset || DASH)] },
  { id: "world", label: () => `${t("world_size")}, ${t("device")}`, class: "two-line", key: (r) => r.world_size, cell: (r) => [r.world_size, h("small", { title: r.device }, r.device || DASH)] },
  { id: "epoch", label: () => t("epoch"), class: "n", key: (r) => r.last_epoch, cell: epochCell },
  { id: "accuracy", label: () => t("accuracy"), class: "n", key: (r) => num(r.accuracy), cell: accuracyCell },
  { id: "loss", label: () => t("loss"), class: "n", key: (r) => num(r.val_loss ?? r.train_loss), cell: (r) => fixed(r.val_loss ?? r.train_loss, 4) },
  { id: "rate", label: () => t("img_s"), class: "n", key: (r) => num(r.samples_per_s), cell: (r) => rate(r.samples_per_s) },
  { id: "elapsed", label: () => t("elapsed"), class: "n", key: (r) => num(r.elapsed_s), cell: (r) => duration(r.elapsed_s) },
  { id: "ttt", label: () => t("time_to", percentShort(target)), class: "n", key: (r) => num(r.time_to_target_s), cell: (r) => duration(r.time_to_target_s) },
  { id: "created", label: () => t("started"), class: "n", key: (r) => r.created_at, cell: (r) => when(r.created_at) },
];

function epochCell(run: Run): Child {
  const planned = run.epochs_planned;
  if (!planned) return run.last_epoch;
  const bar = h("progress", { max: planned, value: run.last_epoch, "aria-label": t("epoch_of", run.last_epoch, planned) });
  return [`${run.last_epoch} / ${planned}`, bar];
}

function accuracyCell(run: Run): Child {
  if (!run.has_epochs) return DASH;
  const best = num(run.best_accuracy);
  const now = num(run.accuracy);
  return [percent(run.accuracy, 2), best !== null && now !== null && best > now && h("small", { class: "soft block" }, `${t("best")} ${percent(best, 2)}`)];
}

export function runsPage(params: URLSearchParams): Page {
  let text = params.get("q") ?? "";
  let state = params.get("state") ?? "";
  let sort = params.get("sort") ?? "-created";
  const selected = new Set((params.get("sel") ?? "").split(",").filter(Boolean));
  const runs = new Map<string, Run>();
  const rows = new Map<string, { run: Run; row: HTMLElement }>();
  let nextPage: string | null = null;
  let abort = new AbortController();
  let loaded = false;

  const search = h("input", {
    type: "search", id: "search", placeholder: t("search"), "aria-label": t("search"), value: text,
    oninput: () => {
      text = search.value.trim();
      searchSoon();
    },
  });
  const chips = h("div", { class: "chips", role: "group", "aria-label": t("state") });
  const bar = h("div", { class: "selection", role: "status", "aria-live": "polite" });
  const head = h("tr", {});
  const body = h("tbody", {});
  const table = h("table", { class: "runs" }, h("caption", { class: "offscreen" }, t("runs")), h("thead", {}, head), body);
  const below = h("div", { class: "below" });
  const holder = h("div", { class: "table-holder" }, loading());
  const node = h("div", { class: "page" },
    h("div", { class: "toolbar" }, h("h1", {}, t("runs")), search, chips), holder, below, bar);

  let timer = 0;
  function searchSoon(): void {
    window.clearTimeout(timer);
    timer = window.setTimeout(reload, 200);
  }

  function keepAddress(): void {
    const query = new URLSearchParams();
    if (text) query.set("q", text);
    if (state) query.set("state", state);
    if (sort !== "-created") query.set("sort", sort);
    if (selected.size) query.set("sel", [...selected].join(","));
    const tail = query.toString();
    history.replaceState(null, "", tail ? `#/?${tail}` : "#/");
  }

  function reload(): void {
    keepAddress();
    abort.abort();
    abort = new AbortController();
    const mine = abort;
    listRuns({ text, state }, mine.signal).then(
      (answer) => {
        target = answer.target;
        runs.clear();
        for (const run of answer.runs) runs.set(run.id, run);
        nextPage = answer.next_page;
        loaded = true;
        draw();
      },
      (error: unknown) => {
        if (mine.signal.aborted) return;
        replace(holder, failure(error, reload));
      },
    );
  }

  function more(): void {
    const page = nextPage;
    if (!page) return;
    listRuns({ text, state, page }, abort.signal).then((answer) => {
      for (const run of answer.runs) runs.set(run.id, run);
      nextPage = answer.next_page;
      draw();
    }, () => undefined);
  }

  function drawChips(): void {
    replace(chips, ["", ...STATES].map((one) => h("button", {
      type: "button", class: "chip", "aria-pressed": String(one === state),
      onclick: () => {
        state = one;
        drawChips();
        reload();
      },
    }, one ? word("s_", one) : t("all_states"))));
  }

  function drawHead(): void {
    const by = sort.replace(/^-/, "");
    const down = sort.startsWith("-");
    const header = (id: string, label: string, cls: string): HTMLElement =>
      h("th", { scope: "col", class: cls, "aria-sort": by === id ? (down ? "descending" : "ascending") : "none" },
        h("button", {
          type: "button", class: "sort",
          onclick: () => {
            sort = by === id && !down ? `-${id}` : id;
            keepAddress();
            drawHead();
            draw();
          },
        }, label, h("span", { class: "arrow", "aria-hidden": "true" }, by === id ? (down ? "↓" : "↑") : "")));
    replace(head, h("th", { class: "pick" }), header("name", t("name"), ""), COLUMNS.map((c) => header(c.id, c.label(), c.class)));
  }

  function rowOf(run: Run): HTMLElement {
    const kept = rows.get(run.id);
    if (kept && kept.run === run) return kept.row;
    const box = h("input", {
      type: "checkbox", id: `pick-${run.id}`, "aria-label": t("select_run", run.name), checked: selected.has(run.id),
      onchange: () => {
        if (box.checked) selected.add(run.id);
        else selected.delete(run.id);
        keepAddress();
        drawBar();
      },
    });
    const row = h("tr", { "data-run": run.id },
      h("td", { class: "pick" }, box),
      h("th", { scope: "row", class: "name" }, h("a", { href: `#/run/${encodeURIComponent(run.id)}` }, run.name)),
      COLUMNS.map((c) => h("td", { class: c.class, "data-label": c.label(), "data-column": c.id }, c.cell(run))));
    rows.set(run.id, { run, row });
    return row;
  }

  function sorted(): Run[] {
    const by = sort.replace(/^-/, "");
    const sign = sort.startsWith("-") ? -1 : 1;
    const key = by === "name" ? (run: Run): Sortable => run.name : COLUMNS.find((c) => c.id === by)?.key ?? ((run: Run) => run.created_at);
    return [...runs.values()].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      // What has no value, or none that is a number, stands last in either direction.
      const missing = (v: Sortable): boolean => v === null || (typeof v === "number" && Number.isNaN(v));
      if (missing(x) || missing(y)) return Number(missing(x)) - Number(missing(y)) || (a.id < b.id ? 1 : -1);
      const order = typeof x === "string" && typeof y === "string" ? x.localeCompare(y) : Number(x) - Number(y);
      return sign * order || (a.id < b.id ? 1 : -1);
    });
  }

  function draw(): void {
    if (!loaded) return;
    if (!runs.size) {
      const filtered = text || state;
      replace(holder, filtered
        ? empty(t("no_match"), h("p", { class: "soft" }, t("no_match_hint")))
        : empty(t("no_runs"), h("p", { class: "soft" }, t("no_runs_hint")),
          h("pre", {}, `paramsync-train --sidecar ${location.hostname || "HOST"}:50051 --run my-first-run …`)));
      replace(below);
      drawBar();
      return;
    }
    drawHead();
    const focus = document.activeElement?.id ?? "";
    body.replaceChildren(...sorted().map(rowOf));
    if (table.parentNode !== holder) replace(holder, table);
    if (focus.startsWith("pick-")) document.getElementById(focus)?.focus();
    replace(below, h("span", { class: "soft" }, t("runs_count", runs.size)), nextPage && h("button", { type: "button", onclick: more }, t("more")));
    drawBar();
  }

  function drawBar(): void {
    const ids = [...selected];
    bar.classList.toggle("active", ids.length > 0);
    if (ids.length < 2) {
      replace(bar, h("span", { class: "soft" }, t("compare_hint")),
        ids.length > 0 && h("button", { type: "button", onclick: clear }, t("clear_selection")));
      return;
    }
    // Fewest processes first: the single-process run is the reference.
    ids.sort((a, b) => (runs.get(a)?.world_size ?? 0) - (runs.get(b)?.world_size ?? 0));
    replace(bar, h("a", { class: "button primary", href: `#/compare?runs=${ids.map(encodeURIComponent).join(",")}` }, t("compare_selected", ids.length)),
      h("button", { type: "button", onclick: clear }, t("clear_selection")));
  }

  function clear(): void {
    selected.clear();
    rows.clear();
    keepAddress();
    draw();
  }

  const drawSoon = throttle(draw, 250);
  const reloadSoon = throttle(reload, 1000);
  const stop = onEvent((event) => {
    if (!event) return reloadSoon();
    const known = runs.get(event.run_id);
    if (event.run && known) {
      // The stream carries the run as it stands; what only the list computes is kept until it is read again.
      runs.set(event.run_id, { ...event.run, time_to_target_s: event.run.time_to_target_s ?? known.time_to_target_s });
      if (state && event.run.state !== state) runs.delete(event.run_id);
      drawSoon();
    } else if (!known || !event.run) {
      reloadSoon();
    }
  });

  drawChips();
  drawBar();
  reload();
  return {
    node,
    title: "paramsync",
    destroy: () => {
      stop();
      abort.abort();
      window.clearTimeout(timer);
    },
  };
}

