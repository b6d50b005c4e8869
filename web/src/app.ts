// SPDX-License-Identifier: Apache-2.0
// The frame: header, routes (in the fragment, so that every link is relative), language, live state, login.
import { login, LOGIN_NEEDED, setRole, type Role } from "./api.ts";
import { comparePage } from "./compare.ts";
import { h, replace } from "./dom.ts";
import { relative } from "./format.ts";
import { healthPage } from "./health.ts";
import { currentLanguage, setLanguage, t } from "./i18n.ts";
import { onLiveState, startLive, type LiveState } from "./live.ts";
import { ranksPage } from "./ranks.ts";
import { runPage } from "./run.ts";
import { runsPage } from "./runs.ts";
import { empty, type Page } from "./ui.ts";

const root = document.getElementById("app") as HTMLElement;
let page: Page | null = null;
let live: HTMLElement;
let main: HTMLElement;
let streaming = false;

function showLive(state: LiveState): void {
  if (!live) return;
  live.hidden = !streaming; // nothing is being tried on the login page
  live.className = `live live-${state}`;
  replace(live, h("span", { class: "dot", "aria-hidden": "true" }),
    t(state === "live" ? "live" : state === "lost" ? "live_lost" : "live_connecting"));
}

function frame(): void {
  document.documentElement.lang = currentLanguage() === "zh" ? "zh-CN" : "en";
  live = h("span", { class: "live", role: "status", "aria-live": "polite" });
  main = h("main", { id: "main", tabindex: -1 });
  const language = h("button", {
    type: "button", class: "language", lang: currentLanguage() === "zh" ? "en" : "zh-CN", "aria-label": t("language_label"),
    onclick: () => {
      setLanguage(currentLanguage() === "zh" ? "en" : "zh");
      frame();
      route();
    },
  }, t("language"));
  replace(root,
    h("a", { class: "skip", href: "#main", onclick: (event: Event) => { event.preventDefault(); main.focus(); } }, t("skip")),
    h("header", { class: "top" },
      h("a", { class: "brand", href: "#/" }, h("img", { src: "favicon.svg", alt: "", width: 22, height: 22 }), "paramsync"),
      h("nav", { "aria-label": "paramsync" }, h("a", { href: "#/" }, t("runs")), h("a", { href: "#/health" }, t("health"))),
      h("span", { class: "grow" }), live, language),
    main);
  onLiveState(showLive);
}

function show(next: Page): void {
  page?.destroy();
  page = next;
  document.title = next.title === "paramsync" ? "paramsync" : `${next.title} · paramsync`;
  replace(main, next.node);
  window.scrollTo(0, 0);
}

function route(): void {
  const [path = "/", query = ""] = location.hash.replace(/^#/, "").split("?", 2);
  const params = new URLSearchParams(query);
  const run = /^\/run\/([^/]+)$/.exec(path);
  const ranks = /^\/run\/([^/]+)\/ranks$/.exec(path);
  if (path === "/" || path === "") show(runsPage(params));
  else if (run) show(runPage(safeDecode(run[1] ?? ""), params));
  else if (ranks) show(ranksPage(safeDecode(ranks[1] ?? "")));
  else if (path === "/health") show(healthPage());
  else if (path === "/compare") show(comparePage(params));
  else show({ node: empty(t("not_found"), h("p", {}, h("a", { href: "#/" }, t("back")))), title: "404", destroy: () => undefined });
}

function safeDecode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function loginPage(): void {
  page?.destroy();
  page = null;
  const token = h("input", { type: "password", id: "token", autocomplete: "current-password", required: true });
  const wrong = h("p", { class: "wrong", role: "alert" });
  const form = h("form", {
    class: "login panel",
    onsubmit: (event: Event) => {
      event.preventDefault();
      void login(token.value).then(
        (good) => {
          if (!good) {
            wrong.textContent = t("login_wrong");
            return;
          }
          begin();
        },
        (error: unknown) => (wrong.textContent = error instanceof Error ? error.message : String(error)),
      );
    },
  }, h("h1", {}, t("login_title")), h("p", { class: "soft" }, t("login_hint")),
    h("label", { for: "token" }, t("login_token")), token, wrong, h("button", { type: "submit", class: "primary" }, t("login")));
  replace(main, form);
  token.focus();
}

function begin(): void {
  if (!streaming) startLive();
  streaming = true;
  live.hidden = false;
  route();
}

frame();
// Menus close when something else is wanted.
const closeMenus = (except: Node | null): void => {
  for (const menu of document.querySelectorAll<HTMLDetailsElement>("details.menu[open]")) if (!except || !menu.contains(except)) menu.open = false;
};
window.addEventListener("pointerdown", (event) => closeMenus(event.target as Node));
window.addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeMenus(null);
});
window.addEventListener("hashchange", () => {
  if (streaming) route();
});
window.setInterval(() => {
  for (const node of document.querySelectorAll<HTMLTimeElement>("time[data-relative]")) {
    const text = relative(node.dateTime);
    if (node.textContent !== text) node.textContent = text;
  }
}, 5000);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.retheme?.());

// One cheap question first: a sidecar with a token answers 401, and the form comes up instead of errors.
fetch("api/v1/session").then(
  async (response) => {
    if (response.status === 401) {
      loginPage();
      return;
    }
    if (response.ok) setRole(((await response.json()) as { role?: Role }).role ?? "admin");
    begin();
  },
  () => begin(),
);
window.addEventListener(LOGIN_NEEDED, () => {
  if (page) loginPage();
});
