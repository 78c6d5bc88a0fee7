// Several models write to the same prompt, side by side.

import { Column } from "./column.js";
import { byId, complain, forever, keep, kept } from "./dom.js";
import { Labels } from "./tokens.js";

const MOST_COLUMNS = 4;

export class Compare {
  constructor() {
    this.columns = [];
    this.labels = new Labels();
    this.running = null;
    this.restore();
    byId("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.generate();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      byId("compare-form").requestSubmit();
    });
    byId("compare-form").addEventListener("change", () => this.store());
    byId("color").addEventListener("change", () => this.recolor());
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("add-column").addEventListener("click", () => this.add([]).element.querySelector("input, button")?.focus());
    byId("compare-new").addEventListener("click", () => this.restart());
    for (const input of modes()) input.addEventListener("change", () => this.changeMode());
    this.changeMode();
  }

  get mode() {
    return modes().find((input) => input.checked).value;
  }

  serve(served) {
    this.served = served;
    const known = served.grafts.map((graft) => graft.name);
    const before = kept(forever, "columns");
    const wished = Array.isArray(before) && before.length ? before : [[], known.slice(0, 1)];
    this.columns = [];
    byId("columns").replaceChildren();
    for (const names of wished.slice(0, MOST_COLUMNS)) this.add(Array.isArray(names) ? names.filter((name) => known.includes(name)) : []);
    this.busy(Boolean(this.running));
    complain(byId("compare-error"));
  }

  add(chosen) {
    const column = new Column(this.served, this.labels, chosen, () => this.store(), (gone) => this.drop(gone));
    column.colorBy(byId("color").value);
    this.columns.push(column);
    byId("columns").append(column.element);
    this.store();
    return column;
  }

  drop(column) {
    column.element.remove();
    this.columns = this.columns.filter((one) => one !== column);
    this.store();
    byId("add-column").focus();
  }

  store() {
    if (!this.served) return;
    byId("add-column").disabled = this.columns.length >= MOST_COLUMNS;
    keep(forever, "columns", this.columns.map((column) => column.chosen));
    const settings = Object.fromEntries(FIELDS.map((id) => [id, byId(id).value]));
    keep(forever, "compare", { ...settings, mode: this.mode });
  }

  restore() {
    const settings = kept(forever, "compare") ?? {};
    for (const id of FIELDS) if (typeof settings[id] === "string") byId(id).value = settings[id];
    for (const input of modes()) if (settings.mode) input.checked = input.value === settings.mode;
  }

  changeMode() {
    const chat = this.mode === "chat";
    byId("prompt-label").textContent = chat ? "Your message" : "Text to continue";
    byId("compare-new").hidden = !chat;
    byId("system-field").hidden = !chat;
    this.restart();
  }

  restart() {
    this.running?.abort();
    for (const column of this.columns) column.clear();
  }

  recolor() {
    for (const column of this.columns) column.colorBy(byId("color").value);
  }

  settings() {
    const seed = byId("seed").value;
    const chosen = { temperature: Number(byId("temperature").value), max_tokens: Number(byId("most").value) };
    return seed === "" ? chosen : { ...chosen, seed: Number(seed) };
  }

  async generate() {
    const prompt = byId("prompt").value;
    complain(byId("compare-error"), this.mistake(prompt));
    if (this.running || this.mistake(prompt)) return;
    this.running = new AbortController();
    this.busy(true);
    const asked = { mode: this.mode, prompt, system: byId("system").value.trim(), settings: this.settings() };
    if (asked.mode === "chat") byId("prompt").value = "";
    await Promise.all(this.columns.map((column) => column.write(asked, this.running.signal)));
    this.running = null;
    this.busy(false);
  }

  mistake(prompt) {
    if (!this.served) return "The list of models is still loading: wait a moment.";
    if (this.columns.length === 0) return "There is no model: add one.";
    return prompt.trim() ? "" : "The text is empty: write one first.";
  }

  busy(is) {
    const focused = document.activeElement;
    byId("generate").disabled = is;
    byId("stop").disabled = !is;
    if (is && focused === byId("generate")) byId("stop").focus();
    if (!is && focused === byId("stop")) byId("generate").focus();
  }
}

const FIELDS = ["system", "temperature", "most", "seed", "color"];

/** Return whether a key sends the text: Enter, except with Shift, during text composition, or on touch screens, which have no Shift+Enter. */
function sends(event) {
  if (event.key !== "Enter" || event.isComposing) return false;
  return event.ctrlKey || event.metaKey || !(event.shiftKey || matchMedia("(pointer: coarse)").matches);
}

const modes = () => [...document.querySelectorAll("input[name=mode]")];
