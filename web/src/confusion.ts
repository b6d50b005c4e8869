// SPDX-License-Identifier: Apache-2.0
// Which classes a test mistook for which: label by row, prediction by column, and each class's accuracy.
import { h, type Child } from "./dom.ts";
import { percent } from "./format.ts";
import { t } from "./i18n.ts";
import { classAccuracy } from "./math.ts";
import { scroller } from "./ui.ts";

export interface Confusion {
  epoch: number;
  attempt: number;
  classes: number;
  counts: number[][];
}

// names: as many as classes, else classes are numbered.
export function confusionTable(matrix: Confusion, names: readonly string[]): Child {
  const name = (i: number): string => (names.length === matrix.classes ? names[i] : undefined) ?? String(i);
  const accuracy = classAccuracy(matrix.counts);
  return [
    h("p", { class: "soft" }, t("confusion_hint", matrix.epoch)),
    scroller(t("confusion"), h("table", { class: "confusion" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("label")), matrix.counts.map((_, k) => h("th", { scope: "col", class: "n" }, name(k))),
        h("th", { scope: "col", class: "n" }, t("accuracy")))),
      h("tbody", {}, matrix.counts.map((row, i) => {
        const all = row.reduce((sum, count) => sum + count, 0);
        return h("tr", {}, h("th", { scope: "row" }, name(i)),
          row.map((count, k) => {
            // Five steps of shade; the number is always there, so colour carries nothing alone.
            const share = all ? count / all : 0;
            const step = count === 0 ? 0 : Math.min(5, 1 + Math.floor(share * 5));
            return h("td", { class: `n shade-${step}${i === k ? " right" : ""}` }, count);
          }),
          h("td", { class: "n strong" }, percent(accuracy[i] ?? null, 1)));
      })))),
  ];
}
