// SPDX-License-Identifier: Apache-2.0
// Small pieces that several pages show.
import { h, copyText, type Child } from "./dom.ts";
import { absolute, relative } from "./format.ts";
import { t, word } from "./i18n.ts";

export { serverText } from "./server.ts";

export function badge(state: string): HTMLElement {
  return h("span", { class: `badge badge-${state}` }, h("span", { class: "dot", "aria-hidden": "true" }), word("s_", state));
}

// Relative in the text, absolute in the tooltip; app.ts refreshes the text.
export function when(iso: string): HTMLElement {
  return h("time", { datetime: iso, title: absolute(iso), "data-relative": true }, relative(iso));
}

export function whenBoth(iso: string): HTMLElement {
  return h("span", { class: "when" }, absolute(iso), " ", h("span", { class: "soft" }, "(", when(iso), ")"));
}

export function loading(): HTMLElement {
  return h("div", { class: "state", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), t("loading"), "…");
}

export function failure(error: unknown, retry: () => void): HTMLElement {
  const message = error instanceof Error ? error.message : String(error);
  return h("div", { class: "state state-error", role: "alert" },
    h("strong", {}, t("failed_title")), h("p", {}, message), h("button", { type: "button", onclick: retry }, t("retry")));
}

export function empty(title: string, ...more: Child[]): HTMLElement {
  return h("div", { class: "state" }, h("strong", {}, title), more);
}

export function copyButton(text: string, label: string): HTMLElement {
  const button = h("button", {
    type: "button", class: "small", "aria-label": label,
    onclick: () => {
      void copyText(text).then((done) => {
        if (!done) return;
        button.textContent = t("copied");
        window.setTimeout(() => (button.textContent = t("copy")), 1500);
      });
    },
  }, t("copy"));
  return button;
}

// The pages of one run.
export function runTabs(id: string, current: "overview" | "ranks"): HTMLElement {
  const base = `#/run/${encodeURIComponent(id)}`;
  return h("nav", { class: "tabs", "aria-label": t("run") }, ([["overview", base], ["ranks", `${base}/ranks`]] as const).map(([name, href]) =>
    h("a", { href, "aria-current": name === current ? "page" : null }, t(name))));
}

export function panel(title: string, ...children: Child[]): HTMLElement {
  return h("section", { class: "panel" }, h("h2", {}, title), children);
}

// A scrolling frame that the keyboard reaches.
export function scroller(label: string, ...children: Child[]): HTMLElement {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, children);
}

// At most one call per animation frame, and at least `gap` ms between two.
export function throttle(work: () => void, gap: number): () => void {
  let last = 0;
  let pending = false;
  return () => {
    if (pending) return;
    pending = true;
    const wait = Math.max(0, last + gap - Date.now());
    window.setTimeout(() => {
      pending = false;
      last = Date.now();
      work();
    }, wait);
  };
}

// What a page gives the router: its element, and how to end it.
export interface Page {
  node: HTMLElement;
  title: string;
  destroy(): void;
  retheme?(): void;
}
