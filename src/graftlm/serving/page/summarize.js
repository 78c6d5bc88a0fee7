// A summary beside its source: each sentence leads to the passage that it rests on, and back.

import { ask } from "./api.js";
import { byId, complain, count, h, many } from "./dom.js";

const MOST_BYTES = 1_600_000;
const FORMATS = { md: "markdown", markdown: "markdown", html: "html", htm: "html", xhtml: "html", tex: "latex" };
const TEXTS = ["txt", "text", "rst", ...Object.keys(FORMATS)];

export class Summarize {
  constructor() {
    this.running = null;
    byId("summarize-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.summarize();
    });
    byId("summarize-stop").addEventListener("click", () => this.running?.abort());
    byId("file").addEventListener("change", (event) => this.take(event.target.files[0]));
    const drop = byId("drop");
    drop.addEventListener("dragover", (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      this.take(event.dataTransfer.files[0], event.dataTransfer.getData("text/plain"));
    });
    byId("writer").addEventListener("change", () => this.shown());
  }

  serve() {
    this.shown();
    if (!this.running) this.busy("");
  }

  shown() {
    byId("summary-most").disabled = !byId("writer").value;
  }

  /** A file's text into the field. */
  async take(file, text = "") {
    complain(byId("summarize-error"));
    byId("file").value = "";
    if (!file) {
      if (text) byId("source-text").value = text;
      return;
    }
    const suffix = file.name.split(".").at(-1).toLowerCase();
    const mistake = await misfit(file, suffix);
    if (mistake) return complain(byId("summarize-error"), mistake);
    byId("source-text").value = await file.text();
    byId("format").value = FORMATS[suffix] ?? "text";
    byId("summarize-status").textContent = `${file.name} was read: ${many(byId("source-text").value.length, "character")}.`;
  }

  async summarize() {
    if (this.running) return;
    this.running = new AbortController();
    const text = byId("source-text").value;
    const body = { text, format: byId("format").value, sentences: Number(byId("sentences").value) };
    if (byId("writer").value) Object.assign(body, { model: byId("writer").value, max_tokens: Number(byId("summary-most").value) });
    complain(byId("summarize-error"));
    this.busy("The text is being read …");
    try {
      this.draw(text, await ask("v1/graftlm/summarize", body, this.running.signal));
    } catch (error) {
      complain(byId("summarize-error"), error.name === "AbortError" ? "You stopped it." : error.message);
    } finally {
      this.running = null;
      this.busy("");
    }
  }

  busy(sentence) {
    byId("summarize-status").textContent = sentence;
    byId("summarize-stop").disabled = !sentence;
    document.querySelector("#summarize-form [type=submit]").disabled = Boolean(sentence);
  }

  draw(text, found) {
    const linked = passagesOf(found);
    const sentences = sentencesOf(found, linked);
    const panes = h(
      "div",
      { class: "panes" },
      h("article", { class: "sheet", "aria-labelledby": "summary-title" }, h("h2", { id: "summary-title", tabindex: -1 }, "Summary"), body(sentences), ...notes(found)),
      h(
        "article",
        { class: "sheet", "aria-labelledby": "source-title" },
        h("h2", { id: "source-title" }, "Source"),
        h("div", { class: "source", tabindex: 0, role: "region", "aria-labelledby": "source-title" }, ...passages(text, linked, sentences)),
      ),
    );
    for (const kind of ["pointerover", "focusin"]) panes.addEventListener(kind, (event) => light(panes, event.target));
    panes.addEventListener("pointerleave", () => light(panes, null));
    panes.addEventListener("click", follow);
    byId("summary").hidden = false;
    byId("summary").replaceChildren(panes);
    byId("summary-title").focus({ preventScroll: true });
    panes.scrollIntoView({ block: "nearest" });
  }
}

/** What is wrong with a file, in a sentence, or null. */
async function misfit(file, suffix) {
  if (!TEXTS.includes(suffix)) return `${file.name} is no text that can be read here: one that ends in ${TEXTS.map((one) => `.${one}`).join(" ")} is expected.`;
  if (file.size > MOST_BYTES) return `${file.name} has ${count(file.size)} bytes, and ${count(MOST_BYTES)} are the most: split it into its chapters.`;
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return null;
  } catch {
    return `${file.name} is not UTF-8 text: convert it first.`;
  }
}

/** The passages that are linked, in the order of the source: the extract, and what supports a written sentence. */
function passagesOf(found) {
  const linked = new Map(found.extract.sentences.map((one) => [one.index, one]));
  for (const link of found.links) if (link.mark !== "unsupported") linked.set(link.nearest, { index: link.nearest, ...link.source });
  return [...linked.values()].sort((one, other) => one.index - other.index);
}

/** The summary's sentences, each with its mark and the number of its passage, from 1; null where nothing supports it. */
function sentencesOf(found, linked) {
  const numbers = new Map(linked.map((one, place) => [one.index, place + 1]));
  if (!found.writer || found.links.length === 0) return found.extract.sentences.map((one) => ({ text: one.text, mark: "", passage: numbers.get(one.index) }));
  return found.links.map(({ text, mark, nearest }) => ({ text, mark, passage: mark === "unsupported" ? null : numbers.get(nearest) }));
}

function body(sentences) {
  const items = sentences.map(({ text, mark, passage }, place) => {
    if (passage === null) return h("li", {}, `${text} `, h("span", { class: "unsupported" }, mark));
    const link = h("a", { href: `#source-${passage}`, id: `summary-${place + 1}`, "data-passage": passage }, text);
    return h("li", {}, link, h("sup", { "aria-hidden": "true" }, passage), mark ? h("small", {}, ` ${mark}`) : "");
  });
  return h("ol", { class: "sentences" }, ...items);
}

/** The source's text, with its passages as links back; offsets count characters, which in JavaScript may be two units. */
function passages(text, linked, sentences) {
  const characters = Array.from(text);
  const slice = (from, to) => characters.slice(from, to).join("");
  const parts = [];
  let place = 0;
  for (const [index, { start, end }] of linked.entries()) {
    if (start < place) continue;
    parts.push(slice(place, start), mark(slice(start, end), index + 1, sentences));
    place = end;
  }
  return [...parts, slice(place)];
}

function mark(text, passage, sentences) {
  const back = sentences.findIndex((one) => one.passage === passage) + 1;
  const target = back ? { href: `#summary-${back}`, "data-passage": passage } : {};
  const inside = back ? h("a", { ...target, id: `source-${passage}` }, text) : h("span", { id: `source-${passage}` }, text);
  return h("mark", { class: back ? null : "unused" }, inside, h("sup", { "aria-hidden": "true" }, passage));
}

/** Let a sentence and its passage stand out together. */
function light(panes, element) {
  const passage = element?.closest?.("[data-passage]")?.dataset.passage;
  for (const one of panes.querySelectorAll("[data-passage]")) one.classList.toggle("lit", one.dataset.passage === passage);
}

/** Go to the other end of a link, without the address changing. */
function follow(event) {
  const link = event.target.closest("a[data-passage]");
  if (!link) return;
  event.preventDefault();
  const target = byId(link.hash.slice(1));
  target.focus({ preventScroll: true });
  target.scrollIntoView({ block: "nearest" });
}

function notes(found) {
  const figures = found.faithfulness;
  const shares = [["words", figures.words], ["pairs of words", figures.bigrams], ["numbers", figures.numbers], ["names", figures.names]];
  const told = shares.filter(([, value]) => value !== null && value !== undefined).map(([what, value]) => `${Math.round(100 * value)}% of its ${what}`);
  const lines = [...found.notes];
  if (found.writer && told.length) lines.push(`The source has ${told.join(", ")}.`);
  if (figures.missing?.length) lines.push(`Not in the source: ${figures.missing.join(", ")}.`);
  const by = found.writer ? `Written by ${found.writer} from ` : "";
  lines.push(`${by}${many(found.extract.sentences.length, "sentence")} chosen by ${found.extract.selector}.`);
  return [h("ul", { class: "notes" }, ...lines.map((line) => h("li", {}, line)))];
}
