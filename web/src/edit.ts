// SPDX-License-Identifier: Apache-2.0
// Changing a run: tags, notes, the pin, and deleting it after a question.
import { canWrite, changeRun, deleteRun } from "./api.ts";
import { h, replace, type Child } from "./dom.ts";
import { t } from "./i18n.ts";
import type { Run } from "./types.ts";

// A modal question. `act` runs on the primary button; its error is shown in the dialog, which then stays.
export function ask(title: string, body: Child, label: string, act: () => Promise<void>, danger = false): void {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const go = h("button", { type: "submit", class: danger ? "danger" : "primary" }, label);
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, h("form", {
    method: "dialog",
    onsubmit: (event: Event) => {
      event.preventDefault();
      go.disabled = true;
      replace(wrong);
      act().then(() => dialog.close(), (error: unknown) => {
        go.disabled = false;
        replace(wrong, error instanceof Error ? error.message : String(error));
      });
    },
  }, h("h2", { id: "dialog-title" }, title), body, wrong,
    h("div", { class: "dialog-buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, t("cancel")), go)));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.appendChild(dialog);
  dialog.showModal();
}

export const tagsOf = (text: string): string[] => [...new Set(text.split(/[,，\n]/).map((tag) => tag.trim()).filter(Boolean))];

function editNotes(run: Run, done: () => void): void {
  const tags = h("input", { id: "edit-tags", type: "text", value: run.tags.join(", "), autocomplete: "off" });
  const notes = h("textarea", { id: "edit-notes", rows: 5 }, run.notes);
  ask(t("edit_title", run.name), [h("label", { for: "edit-tags" }, t("tags"), " ", h("small", {}, t("edit_tags_hint"))), tags, h("label", { for: "edit-notes" }, t("notes")), notes], t("save"),
    () => changeRun(run.id, { tags: tagsOf(tags.value), notes: notes.value }).then(done));
}

export function askDelete(runs: readonly Pick<Run, "id" | "name">[], done: () => void): void {
  ask(t(runs.length === 1 ? "delete_one" : "delete_many", runs.length === 1 ? runs[0]?.name ?? "" : runs.length),
    [h("p", {}, t("delete_what")), runs.length > 1 && h("ul", {}, runs.slice(0, 12).map((run) => h("li", {}, run.name)), runs.length > 12 && h("li", {}, "…"))], t("delete"),
    async () => {
      for (const run of runs) await deleteRun(run.id);
      done();
    }, true);
}

// The buttons under a run's name; nothing for a token that may only look.
export function runActions(run: Run, changed: () => void): Child {
  if (!canWrite("write")) return null;
  const live = run.state === "running" || run.state === "created";
  return h("div", { class: "actions" },
    h("button", { type: "button", class: "small", onclick: () => editNotes(run, changed) }, t("edit")),
    h("button", {
      type: "button", class: "small", "aria-pressed": String(run.is_baseline === true),
      onclick: () => void changeRun(run.id, { baseline: !run.is_baseline }).then(changed, (error: unknown) => alert(String(error))),
    }, t(run.is_baseline ? "unpin" : "pin")),
    canWrite("admin") && h("button", {
      type: "button", class: "small danger", disabled: live, title: live ? t("delete_live") : null,
      onclick: () => askDelete([run], () => (location.hash = "#/")),
    }, t("delete")));
}
