// SPDX-License-Identifier: Apache-2.0
// The list of runs. The server sorts, filters and searches; rows are made for what is in view, and runs are fetched as
// they come into view. The address holds search, state, tag, sorting, columns and selection.
import { canWrite, changeRun, listRuns } from "./api.ts";
import { h, replace, type Child } from "./dom.ts";
import { askDelete } from "./edit.ts";
import { DASH, duration, fixed, num, percent, percentShort, rate, times } from "./format.ts";
import { t, word, type Key } from "./i18n.ts";
import { onEvent } from "./live.ts";
import { STATES, type Run } from "./types.ts";
import { badge, empty, failure, loading, serverText, throttle, when, type Page } from "./ui.ts";

interface Column {
  id: string;
  sort: string | null; // the server's name
  label: () => string;
  class: string;
  cell(run: Run): Child;
}

const PAGE = 100;
const OVERSCAN = 12;
let target = 0.8;

const COLUMNS: readonly Column[] = [
  { id: "state", sort: "state", label: () => t("state"), class: "", cell: (r) => badge(r.state) },
  { id: "model", sort: "model", label: () => `${t("model")}, ${t("dataset")}`, class: "two-line", cell: (r) => [r.model || DASH, h("small", { title: r.dataset }, r.dataset || DASH)] },
  { id: "world", sort: "world", label: () => `${t("world_size")}, ${t("device")}`, class: "two-line", cell: (r) => [r.world_size, h("small", { title: r.device }, r.device || DASH)] },
  { id: "device", sort: "device", label: () => t("device"), class: "two-line", cell: (r) => r.device || DASH },
  { id: "epoch", sort: "epoch", label: () => t("epoch"), class: "n", cell: epochCell },
  { id: "accuracy", sort: "accuracy", label: () => t("accuracy"), class: "n", cell: accuracyCell },
  { id: "best", sort: "best", label: () => t("cmp_best"), class: "n", cell: (r) => percent(r.best_accuracy, 2) },
  { id: "loss", sort: "loss", label: () => t("loss"), class: "n", cell: (r) => fixed(r.val_loss ?? r.train_loss, 4) },
  { id: "rate", sort: "rate", label: () => t("img_s"), class: "n", cell: (r) => rate(r.samples_per_s) },
  { id: "elapsed", sort: "elapsed", label: () => t("elapsed"), class: "n", cell: (r) => duration(r.elapsed_s) },
  { id: "ttt", sort: "ttt", label: () => t("time_to", percentShort(target)), class: "n", cell: (r) => duration(r.time_to_target_s) },
  { id: "verdict", sort: null, label: () => t("verdict"), class: "", cell: verdictCell },
  { id: "tags", sort: "tags", label: () => t("tags"), class: "two-line", cell: (r) => (r.tags.length ? r.tags.map((tag) => h("a", { class: "tag", href: `#/?tag=${encodeURIComponent(tag)}` }, tag)) : DASH) },
  { id: "notes", sort: null, label: () => t("notes"), class: "two-line", cell: (r) => (r.notes ? h("span", { title: r.notes }, r.notes.length > 60 ? r.notes.slice(0, 60) + "…" : r.notes) : DASH) },
  { id: "created", sort: "created", label: () => t("started"), class: "n", cell: (r) => when(r.created_at) },
];
const DEFAULT_COLUMNS = ["state", "model", "world", "epoch", "accuracy", "loss", "rate", "elapsed", "ttt", "verdict", "created"];

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

const SIGNS: Record<string, string> = { pass: "✓", fail: "✗", undecided: "?", refused: "≠", baseline: "★" };
function verdictCell(run: Run): Child {
  const v = run.verdict;
  if (!v) return DASH;
  const speed = num(v.speedup);
  return h("span", { class: `judged judged-${v.verdict}`, title: serverText(v.reason) }, h("span", { "aria-hidden": "true" }, SIGNS[v.verdict] ?? ""), " ", t(`v_${v.verdict}` as Key),
    speed !== null && h("small", { class: "soft block" }, times(speed)));
}

function keptColumns(): string[] {
  try {
    const kept = (localStorage.getItem("columns") ?? "").split(",").filter((id) => COLUMNS.some((c) => c.id === id));
    if (kept.length) return kept;
  } catch {
    // Storage may be forbidden: the defaults then.
  }
  return DEFAULT_COLUMNS;
}

export function runsPage(params: URLSearchParams): Page {
  let text = params.get("q") ?? "";
  let state = params.get("state") ?? "";
  let tag = params.get("tag") ?? "";
  let sort = params.get("sort") ?? "-created";
  const asked = (params.get("cols") ?? "").split(",").filter((id) => COLUMNS.some((c) => c.id === id));
  let columns = asked.length ? asked : keptColumns();
  const selected = new Map<string, Run | null>((params.get("sel") ?? "").split(",").filter(Boolean).map((id) => [id, null]));
  let runs = new Map<number, Run>(); // by place in the sorted list
  let places = new Map<string, number>();
  let total = 0;
  let baseline: string | null = null;
  const underway = new Set<number>();
  const rows = new Map<string, { run: Run; row: HTMLElement }>();
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
  const picker = h("details", { class: "menu" });
  const bar = h("div", { class: "selection", role: "status", "aria-live": "polite" });
  const head = h("tr", {});
  const above = h("tbody", { class: "spacer", "aria-hidden": "true" });
  const body = h("tbody", {});
  const under = h("tbody", { class: "spacer", "aria-hidden": "true" });
  const table = h("table", { class: "runs" }, h("caption", { class: "offscreen" }, t("runs")), h("thead", {}, head), above, body, under);
  const below = h("div", { class: "below" });
  const holder = h("div", { class: "table-holder" }, loading());
  const node = h("div", { class: "page" },
    h("div", { class: "toolbar" }, h("h1", {}, t("runs")), search, chips, h("span", { class: "grow" }), picker), holder, below, bar);
  const shownColumns = (): Column[] => COLUMNS.filter((c) => columns.includes(c.id));

  let timer = 0;
  function searchSoon(): void {
    window.clearTimeout(timer);
    timer = window.setTimeout(reload, 200);
  }

  function keepAddress(): void {
    const query = new URLSearchParams();
    if (text) query.set("q", text);
    if (state) query.set("state", state);
    if (tag) query.set("tag", tag);
    if (sort !== "-created") query.set("sort", sort);
    if (columns.join() !== DEFAULT_COLUMNS.join()) query.set("cols", columns.join());
    if (selected.size) query.set("sel", [...selected.keys()].join(","));
    const tail = query.toString().replace(/%2C/g, ",");
    history.replaceState(null, "", tail ? `#/?${tail}` : "#/");
  }

  function fetchPage(page: number, fresh: boolean): Promise<void> {
    underway.add(page);
    const mine = abort;
    return listRuns({ text, state, tag, sort, offset: page * PAGE, limit: PAGE, verdict: columns.includes("verdict") }, mine.signal).then((answer) => {
      if (mine.signal.aborted) return;
      if (fresh) {
        runs = new Map();
        places = new Map();
      }
      target = answer.target;
      total = answer.total ?? answer.runs.length;
      baseline = answer.baseline;
      answer.runs.forEach((run, i) => {
        runs.set(page * PAGE + i, run);
        places.set(run.id, page * PAGE + i);
        if (selected.has(run.id)) selected.set(run.id, run);
      });
      loaded = true;
    }).finally(() => {
      if (mine === abort) underway.delete(page);
    });
  }

  // The pages in view anew; what is out of view is fetched again when it comes into view.
  let gone = false; // a reload that was due when the reader left must not write this page's address over the next one's
  function reload(): void {
    if (gone) return;
    keepAddress();
    abort.abort();
    abort = new AbortController();
    underway.clear();
    const mine = abort;
    const page = loaded ? Math.floor(inView()[0] / PAGE) : 0;
    fetchPage(page, true).then(() => {
      if (!mine.signal.aborted) draw();
    }, (error: unknown) => {
      if (mine.signal.aborted) return;
      replace(holder, failure(error, reload));
    });
  }

  let rowHeight = 53;
  function inView(): [number, number] {
    const box = table.getBoundingClientRect();
    const start = box.top + (head.offsetHeight || 0);
    const first = Math.max(0, Math.floor(-start / rowHeight) - OVERSCAN);
    const last = Math.min(total, Math.ceil((window.innerHeight - start) / rowHeight) + OVERSCAN);
    return [Math.min(first, Math.max(0, total - 1)), Math.max(last, Math.min(total, first + 1))];
  }

  function drawChips(): void {
    replace(chips, ["", ...STATES].map((one) => h("button", {
      type: "button", class: "chip", "aria-pressed": String(one === state),
      onclick: () => {
        state = one;
        drawChips();
        loaded = false;
        reload();
      },
    }, one ? word("s_", one) : t("all_states"))), tag && h("button", {
      type: "button", class: "chip", "aria-pressed": "true", "aria-label": t("clear_tag", tag),
      onclick: () => {
        tag = "";
        drawChips();
        loaded = false;
        reload();
      },
    }, `${tag} ×`));
  }

  function drawPicker(): void {
    replace(picker, h("summary", { class: "button small" }, t("columns")), h("div", { class: "menu-body" }, COLUMNS.map((c) => h("label", { class: "check" }, h("input", {
      type: "checkbox", id: `col-${c.id}`, checked: columns.includes(c.id),
      onchange: (event: Event) => {
        const on = (event.target as HTMLInputElement).checked;
        columns = COLUMNS.map((one) => one.id).filter((id) => (id === c.id ? on : columns.includes(id)));
        try {
          localStorage.setItem("columns", columns.join());
        } catch {
          // The address has them.
        }
        rows.clear();
        if (c.id === "verdict" && on) reload();
        else {
          keepAddress();
          draw();
        }
      },
    }), c.label()))));
  }

  function drawHead(): void {
    const by = sort.replace(/^-/, "");
    const down = sort.startsWith("-");
    const header = (id: string | null, label: string, cls: string): HTMLElement => (id === null
      ? h("th", { scope: "col", class: cls }, h("span", { class: "sort" }, label))
      : h("th", { scope: "col", class: cls, "aria-sort": by === id ? (down ? "descending" : "ascending") : "none" },
        h("button", {
          type: "button", class: "sort",
          onclick: () => {
            sort = by === id && !down ? `-${id}` : id;
            window.scrollTo(0, 0);
            drawHead();
            reload();
          },
        }, label, h("span", { class: "arrow", "aria-hidden": "true" }, by === id ? (down ? "↓" : "↑") : ""))));
    replace(head, h("th", { class: "pick" }), header("name", t("name"), ""), shownColumns().map((c) => header(c.sort, c.label(), c.class)));
  }

  function rowOf(run: Run, place: number): HTMLElement {
    const kept = rows.get(run.id);
    if (kept && kept.run === run) {
      kept.row.setAttribute("aria-rowindex", String(place + 2));
      return kept.row;
    }
    const box = h("input", {
      type: "checkbox", id: `pick-${run.id}`, "aria-label": t("select_run", run.name), checked: selected.has(run.id),
      onchange: () => {
        if (box.checked) selected.set(run.id, run);
        else selected.delete(run.id);
        keepAddress();
        drawBar();
      },
    });
    const row = h("tr", { "data-run": run.id, "aria-rowindex": place + 2 },
      h("td", { class: "pick" }, box),
      h("th", { scope: "row", class: "name" }, h("a", { href: `#/run/${encodeURIComponent(run.id)}`, title: run.name }, run.id === baseline && h("span", { role: "img", "aria-label": t("v_baseline") }, "★ "), run.name)),
      shownColumns().map((c) => h("td", { class: c.class, "data-label": c.label(), "data-column": c.id }, c.cell(run))));
    rows.set(run.id, { run, row });
    return row;
  }

  function drawRows(): void {
    if (!loaded || !total || table.parentNode !== holder) return;
    const [first, last] = inView();
    const active = document.activeElement;
    const focus = active && body.contains(active) ? active.id : "";
    const wanted: HTMLElement[] = [];
    for (let i = first; i < last; i++) {
      const run = runs.get(i);
      wanted.push(run ? rowOf(run, i) : h("tr", { class: "waiting", "aria-rowindex": i + 2 }, h("td", { colspan: columns.length + 2 }, "…")));
      if (!run && !underway.has(Math.floor(i / PAGE))) fetchPage(Math.floor(i / PAGE), false).then(drawSoon, () => undefined);
    }
    if (rows.size > 4 * PAGE) { // what has long been scrolled away
      const keep = new Set(wanted);
      for (const [id, { row }] of rows) if (!keep.has(row)) rows.delete(id);
    }
    spacer(above, first);
    spacer(under, total - last);
    if (wanted.length !== body.children.length || wanted.some((row, i) => body.children[i] !== row)) body.replaceChildren(...wanted);
    if (focus && document.activeElement?.id !== focus) document.getElementById(focus)?.focus({ preventScroll: true });
    // Rows are all but equally high: the mean of those in view stands for the others.
    const [top, bottom] = [body.firstElementChild, body.lastElementChild];
    if (top && bottom) {
      const margin = parseFloat(getComputedStyle(bottom).marginBottom) || 0;
      const height = (bottom.getBoundingClientRect().bottom + margin - top.getBoundingClientRect().top) / body.children.length;
      if (height > 10 && Math.abs(height - rowHeight) > 0.5) {
        const again = Math.abs(height - rowHeight) > 4;
        rowHeight = height;
        if (again) window.requestAnimationFrame(drawRows);
      }
    }
  }

  function spacer(part: HTMLElement, count: number): void {
    const height = `${count * rowHeight}px`;
    if (!count) return part.replaceChildren();
    const cell = part.querySelector<HTMLElement>("td") ?? h("td", { colspan: columns.length + 2 });
    cell.style.height = height;
    if (!part.firstChild) part.appendChild(h("tr", {}, cell));
    return undefined;
  }

  function draw(): void {
    if (!loaded) return;
    if (!total) {
      const filtered = text || state || tag;
      replace(holder, filtered
        ? empty(t("no_match"), h("p", { class: "soft" }, t("no_match_hint")))
        : empty(t("no_runs"), h("p", { class: "soft" }, t("no_runs_hint")),
          h("pre", {}, `paramsync-train --sidecar ${location.hostname || "HOST"}:50051 --run my-first-run …`)));
      replace(below);
      drawBar();
      return;
    }
    drawHead();
    table.setAttribute("aria-rowcount", String(total + 1));
    if (table.parentNode !== holder) replace(holder, table);
    drawRows();
    replace(below, h("span", { class: "soft" }, t("runs_count", total)),
      !baseline && columns.includes("verdict") && h("span", { class: "soft" }, t("no_baseline")));
    drawBar();
  }

  function drawBar(): void {
    const ids = [...selected.keys()];
    bar.classList.toggle("active", ids.length > 0);
    if (!ids.length) {
      replace(bar, h("span", { class: "soft" }, t("compare_hint")));
      return;
    }
    // Fewest processes first: the single-process run is the reference.
    ids.sort((a, b) => (selected.get(a)?.world_size ?? 0) - (selected.get(b)?.world_size ?? 0));
    const known = [...selected.values()].filter((run): run is Run => !!run);
    const one = ids.length === 1 ? known[0] : undefined;
    const ended = known.filter((run) => run.state !== "running" && run.state !== "created");
    replace(bar, ids.length > 1 ? h("a", { class: "button primary", href: `#/compare?runs=${ids.map(encodeURIComponent).join(",")}` }, t("compare_selected", ids.length))
      : h("span", { class: "soft" }, t("compare_hint")),
      one && canWrite("write") && h("button", {
        type: "button",
        onclick: () => void changeRun(one.id, { baseline: one.id !== baseline }).then(() => {
          clear();
          reload();
        }, (error: unknown) => alert(String(error))),
      }, t(one.id === baseline ? "unpin" : "pin")),
      canWrite("admin") && ended.length === ids.length && h("button", {
        type: "button", class: "danger",
        onclick: () => askDelete(ended, () => {
          clear();
          reload();
        }),
      }, t("delete")),
      h("button", { type: "button", onclick: clear }, t("clear_selection")));
  }

  function clear(): void {
    selected.clear();
    rows.clear();
    keepAddress();
    draw();
  }

  const drawSoon = throttle(draw, 100);
  const reloadSoon = throttle(reload, 1000);
  const stop = onEvent((event) => {
    if (!event) return reloadSoon();
    const place = places.get(event.run_id);
    const known = place === undefined ? undefined : runs.get(place);
    const still = event.run && (!state || event.run.state === state) && sort === "-created";
    if (event.run && known && place !== undefined && still && event.kind !== "updated") {
      // The stream carries the run as it stands; what only the list computes is kept until it is read again.
      runs.set(place, { ...known, ...event.run, time_to_target_s: event.run.time_to_target_s ?? known.time_to_target_s });
      drawSoon();
    } else {
      reloadSoon();
    }
  });
  let frame = 0;
  const onScroll = (): void => {
    window.cancelAnimationFrame(frame);
    frame = window.requestAnimationFrame(drawRows);
  };
  window.addEventListener("scroll", onScroll, { passive: true });
  window.addEventListener("resize", onScroll);

  drawChips();
  drawPicker();
  drawBar();
  reload();
  return {
    node,
    title: "paramsync",
    destroy: () => {
      gone = true;
      stop();
      abort.abort();
      window.clearTimeout(timer);
      window.removeEventListener("scroll", onScroll);
      window.removeEventListener("resize", onScroll);
    },
  };
}
