// SPDX-License-Identifier: Apache-2.0
// How the sidecar and the reporters of running jobs fare.
import { getStatus } from "./api.ts";
import { h, replace, type Child } from "./dom.ts";
import { bytes, duration, num, percent, rate } from "./format.ts";
import { t, word } from "./i18n.ts";
import { STATES, type Reporter, type Status } from "./types.ts";
import { failure, loading, panel, scroller, serverText, when, type Page } from "./ui.ts";

const EVERY_MS = 5000;
const CLOCK_LIMIT_S = 1; // beyond it an offset is worth a look

export function clockOffset(value: number | null): string {
  if (value === null) return "–";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "+";
  return size < 1 ? `${sign}${(size * 1000).toFixed(size < 0.01 ? 1 : 0)} ms` : `${sign}${duration(size)}`;
}

export function healthPage(): Page {
  const abort = new AbortController();
  const node = h("div", { class: "page" }, loading());
  const alarm = h("div", {});
  const store = h("dl", { class: "facts" });
  const reporters = h("div", {});
  let last: { status: Status; at: number } | null = null;
  let shown = false;

  function draw(s: Status): void {
    const now = performance.now();
    const passed = last ? (now - last.at) / 1000 : 0;
    const cpu = last && passed > 0 ? (s.cpu_s - last.status.cpu_s) / passed : s.uptime_s > 0 ? s.cpu_s / s.uptime_s : 0;
    const ingest = last && passed > 0 ? (s.points_stored - last.status.points_stored) / passed : null;
    last = { status: s, at: now };
    const bad = s.disk_full ? t("hl_disk_full") : s.last_error ? serverText(s.last_error) : "";
    replace(alarm, h("div", { class: `card verdict verdict-${bad ? "critical" : "even"}`, role: "status" }, h("strong", {}, bad || t("hl_good")),
      h("p", { class: "soft" }, t("hl_since", s.version, duration(s.uptime_s)))));
    const fact = (label: string, value: Child, more: Child = null): Child => h("div", {}, h("dt", {}, label), h("dd", {}, value, more && h("small", {}, more)));
    replace(store,
      fact(t("hl_points"), s.points_stored.toLocaleString("en-US").replace(/,/g, " "), ingest !== null ? t("hl_per_s", rate(ingest)) : t("hl_start")),
      fact(t("hl_replays"), s.batches_replayed, t("hl_replays_more")),
      fact(t("hl_queue"), s.queue_depth, t("hl_commits", s.commits, s.failed_operations)),
      fact(t("hl_store"), bytes(s.store_bytes), `WAL ${bytes(s.wal_bytes)}`),
      fact(t("checkpoints"), s.checkpoints, `${bytes(s.blob_bytes)}, ${t("hl_files", s.blobs)}`),
      fact(t("hl_cpu"), percent(cpu, 1), t("hl_cpu_more", duration(s.cpu_s))),
      fact(t("hl_memory"), bytes(s.resident_bytes)),
      fact(t("hl_streams"), s.streams),
      fact(t("runs"), Object.values(s.runs).reduce((sum, n) => sum + n, 0), STATES.filter((state) => s.runs[state]).map((state) => `${word("s_", state)} ${s.runs[state]}`).join(", ")));
    const columns: [string, (r: Reporter) => Child][] = [
      [t("hl_acked"), (r) => r.points_sent], [t("hl_waiting"), (r) => r.points_waiting], [t("hl_replayed"), (r) => r.points_replayed],
      [t("hl_dropped"), (r) => (r.points_dropped ? h("span", { class: "judged-fail" }, r.points_dropped) : 0)], [t("hl_spool"), (r) => bytes(r.spool_bytes)],
      [t("hl_memory"), (r) => (r.rss_bytes ? bytes(r.rss_bytes) : "–")],
      [t("hl_clock"), (r) => {
        const offset = num(r.clock_offset_s);
        return offset !== null && Math.abs(offset) > CLOCK_LIMIT_S ? h("span", { class: "judged-fail", title: t("hl_clock_far") }, "⚠ ", clockOffset(offset)) : clockOffset(offset);
      }],
      [t("rk_seen"), (r) => when(r.last_seen_at)],
    ];
    replace(reporters, !s.live.length ? h("p", { class: "soft" }, t("hl_none_live")) : s.live.map((run) => [
      h("h3", {}, h("a", { href: `#/run/${encodeURIComponent(run.id)}/ranks` }, run.name), " ", h("small", {}, t("hl_heard", run.ranks.length, run.world_size))),
      run.ranks.length > 0 && scroller(run.name, h("table", { class: "stack" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("rank")), columns.map(([name]) => h("th", { scope: "col", class: "n" }, name)))),
        h("tbody", {}, run.ranks.map((r) => h("tr", {}, h("th", { scope: "row" }, t("rank_n", r.rank)), columns.map(([name, cell]) => h("td", { class: "n", "data-label": name }, cell(r)))))))),
    ]));
  }

  function load(): void {
    getStatus(abort.signal).then((status) => {
      if (!shown) replace(node, h("h1", {}, t("health")), alarm, panel(t("hl_sidecar"), store), panel(t("hl_reporters"), h("p", { class: "note" }, t("hl_note")), reporters));
      shown = true;
      draw(status);
    }, (error: unknown) => {
      if (!abort.signal.aborted && !shown) replace(node, failure(error, load));
    });
  }
  const timer = window.setInterval(() => {
    if (!document.hidden) load();
  }, EVERY_MS);
  load();
  return {
    node,
    title: t("health"),
    destroy: () => {
      abort.abort();
      window.clearInterval(timer);
    },
  };
}
