// SPDX-License-Identifier: Apache-2.0
// What each rank spends its steps on, and which rank the others wait for. The server judges (services/sidecar/
// web_ranks.h); this page draws.
import { getRanks, getRun } from "./api.ts";
import { h, replace, type Child } from "./dom.ts";
import { bytes, duration, num, percent, significant } from "./format.ts";
import { Heat } from "./heat.ts";
import { t, type Key } from "./i18n.ts";
import type { Ranks, Run } from "./types.ts";
import { badge, failure, loading, panel, runTabs, scroller, when, type Page } from "./ui.ts";

const LIVE_MS = 5000;
export const ms = (seconds: number): string => (seconds >= 10 ? duration(seconds) : seconds >= 1 ? `${significant(seconds)} s` : `${significant(seconds * 1000)} ms`);

export const PARTS = ["compute_s", "allreduce_wait_s", "input_wait_s", "evaluation_s", "checkpoint_s"] as const;

export function verdictText(ranks: Ranks): { title: string; lines: string[] } {
  const v = ranks.verdict;
  if (!v) return { title: t("rk_abstain"), lines: [] };
  const lines = v.late.map((one) => t("rk_late", one.rank, percent(one.lateness, 0), percent(one.own, 0), t(one.cause === "input" ? "rk_cause_input" : "rk_cause_compute")));
  if (v.state === "abstain") {
    const key = `rk_why_${v.reason}` as Key;
    return { title: t("rk_abstain"), lines: [t(key), ...(v.reason === "unclear" ? lines : [])] };
  }
  if (v.state === "even") return { title: t("rk_even"), lines: [t("rk_even_more", ms(v.step_s))] };
  return { title: t(v.state === "critical" ? "rk_critical" : "rk_warn", v.late.map((one) => one.rank).join(", ")), lines };
}

export function ranksPage(id: string): Page {
  const abort = new AbortController();
  const node = h("div", { class: "page" }, loading());
  const title = h("div", { class: "title" });
  const verdict = h("div", {});
  const maps = h("div", { class: "charts wide" });
  const split = h("div", {});
  const reporters = h("div", {});
  const heats = new Map<string, Heat>();
  let run: Run | null = null;

  function drawHead(r: Run): void {
    replace(title, h("a", { class: "crumb", href: "#/" }, "← ", t("back")), h("div", { class: "title-row" }, h("h1", {}, r.name), badge(r.state)), runTabs(id, "ranks"));
  }

  function drawVerdict(ranks: Ranks): void {
    const { title: head, lines } = verdictText(ranks);
    const state = ranks.verdict?.state ?? "abstain";
    replace(verdict, h("div", { class: `card verdict verdict-${state}`, role: "status" }, h("strong", {}, head), lines.map((line) => h("p", {}, line)),
      ranks.verdict && ranks.verdict.to_step > 0 && h("p", { class: "note" }, t("rk_window", ranks.verdict.from_step, ranks.verdict.to_step))));
  }

  function drawMaps(ranks: Ranks): void {
    const late = new Set((ranks.verdict?.late ?? []).map((one) => one.rank));
    const elapsed = (ranks.bin_elapsed_s ?? []).map(num);
    const columns = (ranks.bin_steps ?? []).map((step, i) => `${t("x_step")} ${step}${elapsed[i] !== null && elapsed[i] !== undefined ? `, ${duration(elapsed[i] ?? null)}` : ""}`);
    const missing = (ranks.world_size ?? 0) > (ranks.heat ?? []).length ? t("rk_missing", Array.from({ length: ranks.world_size ?? 0 }, (_, i) => i)
      .filter((i) => !(ranks.heat ?? []).some((row) => row.rank === i)).slice(0, 20).join(", ")) : "";
    if (!ranks.heat?.length) {
      replace(maps, h("p", { class: "soft" }, t("rk_none")));
      heats.clear();
      return;
    }
    for (const [key, label] of [["compute_s", t("rk_compute")], ["allreduce_wait_s", t("rk_wait")]] as const) {
      const spec = {
        title: label,
        rows: ranks.heat.map((row) => ({ label: t("rank_n", row.rank), values: (row[key] ?? []).map(num), marked: late.has(row.rank) })),
        columns, format: ms,
        ends: [columns[0] ?? "", columns[columns.length - 1] ?? ""] as [string, string],
      };
      const known = heats.get(key);
      if (known) known.set(spec);
      else {
        if (!heats.size) replace(maps);
        const made = new Heat(spec);
        heats.set(key, made);
        maps.appendChild(made.node);
      }
    }
    let notes = maps.querySelector(".heat-notes");
    if (!notes) maps.appendChild((notes = h("p", { class: "note heat-notes" })));
    replace(notes, [missing, ranks.sampled ? t("rk_sampled") : ""].filter(Boolean).join(" "));
  }

  function drawSplit(ranks: Ranks): void {
    const rows = ranks.split ?? [];
    if (!rows.length) {
      replace(split, h("p", { class: "soft" }, t("rk_none")));
      return;
    }
    const total = (row: (typeof rows)[number]): number => PARTS.reduce((sum, part) => sum + (num(row[part]) ?? 0), 0);
    const most = Math.max(...rows.map(total));
    replace(split,
      h("div", { class: "legend big parts" }, PARTS.map((part, i) => h("span", { class: "legend-item" }, h("span", { class: `part part-${i}`, "aria-hidden": "true" }), t(`rk_${part}` as Key)))),
      h("div", { class: "stacks", "aria-hidden": "true" }, rows.map((row) => h("div", { class: "bar-row" }, h("span", { class: "bar-name" }, t("rank_n", row.rank)),
        h("span", { class: "bar-track" }, PARTS.map((part, i) => {
          const piece = h("span", { class: `part part-${i}`, title: `${t(`rk_${part}` as Key)}: ${ms(num(row[part]) ?? 0)}` });
          piece.style.width = `${most > 0 ? ((num(row[part]) ?? 0) / most) * 100 : 0}%`;
          return piece;
        })), h("span", { class: "bar-value" }, ms(total(row)))))),
      h("details", { class: "heat-table" }, h("summary", {}, t("as_table")), scroller(t("rk_split"), h("table", { class: "stack" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("rank")), PARTS.map((part) => h("th", { scope: "col", class: "n" }, t(`rk_${part}` as Key))), h("th", { scope: "col", class: "n" }, t("rk_step")))),
        h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, t("rank_n", row.rank)),
          PARTS.map((part) => h("td", { class: "n", "data-label": t(`rk_${part}` as Key) }, ms(num(row[part]) ?? 0), h("small", {}, " ", percent((num(row[part]) ?? 0) / (total(row) || 1), 0)))),
          h("td", { class: "n", "data-label": t("rk_step") }, ms(total(row))))))))),
      h("p", { class: "note" }, t("rk_split_note")));
  }

  function drawReporters(ranks: Ranks): void {
    const list = ranks.ranks;
    replace(reporters, !list.length ? h("p", { class: "soft" }, t("rk_no_beats"))
      : scroller(t("rk_reporters"), h("table", { class: "stack" },
        h("thead", {}, h("tr", {}, [t("rank"), t("x_step"), t("hl_sent"), t("hl_dropped"), t("hl_spool"), t("rk_seen")].map((c, i) => h("th", { scope: "col", class: i ? "n" : "" }, c)))),
        h("tbody", {}, list.map((r) => {
          const cells: [string, Child][] = [[t("x_step"), r.step], [t("hl_sent"), r.points_sent], [t("hl_dropped"), r.points_dropped], [t("hl_spool"), bytes(r.spool_bytes)],
            [t("rk_seen"), r.last_seen_at ? when(r.last_seen_at) : "–"]];
          return h("tr", {}, h("th", { scope: "row" }, t("rank_n", r.rank)), cells.map(([label, value]) => h("td", { class: "n", "data-label": label }, value)));
        })))));
  }

  function load(): void {
    Promise.all([getRun(id, abort.signal), getRanks(id, 96, abort.signal)]).then(([gotRun, ranks]) => {
      run = gotRun;
      document.title = `${run.name} · ${t("ranks")} · paramsync`;
      if (!node.contains(title)) replace(node, title, verdict, panel(t("rk_maps"), maps), panel(t("rk_split"), split), panel(t("rk_reporters"), reporters));
      drawHead(run);
      drawVerdict(ranks);
      drawMaps(ranks);
      drawSplit(ranks);
      drawReporters(ranks);
    }, (error: unknown) => {
      if (!abort.signal.aborted && !run) replace(node, failure(error, load), h("p", {}, h("a", { href: "#/" }, t("back"))));
    });
  }
  // Step points make no events.
  const timer = window.setInterval(() => {
    if (run && (run.state === "running" || run.state === "created") && !document.hidden) load();
  }, LIVE_MS);
  load();
  return {
    node,
    title: t("ranks"),
    destroy: () => {
      abort.abort();
      window.clearInterval(timer);
      for (const one of heats.values()) one.destroy();
    },
    retheme: () => {
      for (const one of heats.values()) one.draw();
    },
  };
}

