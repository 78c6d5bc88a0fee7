// A summary next to its source: each sentence is linked to its passage, and back.

import { stream } from "./api.js";
import { byId, complain, count, entitle, excess, h, many } from "./dom.js";
import { markdown, sentence } from "./markdown.js";

const FORMATS = { md: "markdown", markdown: "markdown", html: "html", htm: "html", xhtml: "html", tex: "latex" };
const TEXTS = ["txt", "text", "rst", ...Object.keys(FORMATS)];

export class Summarize {
  constructor() {
    this.running = null;
    this.pdf = null; // the bytes of a file, in base64
    this.limits = { text: Infinity, document_bytes: Infinity }; // until the server has sent its limits
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
    byId("source-file").querySelector("button").addEventListener("click", () => this.setSource(null));
  }

  serve(served) {
    this.limits = served.limits;
    this.shown();
    if (!this.running) this.busy("");
  }

  shown() {
    byId("summary-most").disabled = !byId("writer").value;
  }

  /** Put the text of a file into the field, or use a PDF file instead. */
  async take(file, text = "") {
    complain(byId("summarize-error"));
    byId("file").value = "";
    if (!file) {
      if (text) this.setSource(null, text);
      return;
    }
    const suffix = file.name.split(".").at(-1).toLowerCase();
    const mistake = await misfit(file, suffix, this.limits);
    if (mistake) return complain(byId("summarize-error"), mistake);
    if (suffix === "pdf") return this.setSource(await base64(file), "", "pdf", `${file.name}, ${many(file.size, "byte")}`);
    this.setSource(null, await file.text(), FORMATS[suffix] ?? "text");
    byId("summarize-status").textContent = `${file.name} was read: ${many(byId("source-text").value.length, "character")}.`;
  }

  /** Use a PDF file or a text as the source. */
  setSource(pdf, text = "", format = "text", name = "") {
    this.pdf = pdf;
    byId("source-text").value = text;
    byId("source-text").required = !pdf;
    byId("source-text").hidden = Boolean(pdf);
    byId("source-file").hidden = !pdf;
    byId("source-file").firstElementChild.textContent = name;
    byId("format").value = format;
    byId("format").disabled = Boolean(pdf);
    byId("summarize-status").textContent = "";
    entitle();
  }

  async summarize() {
    const text = byId("source-text").value;
    const mistake = excess(text, this.limits.text);
    complain(byId("summarize-error"), mistake);
    if (this.running || mistake) return;
    this.running = new AbortController();
    const source = this.pdf ? { pdf: this.pdf } : { text, format: byId("format").value };
    const body = { ...source, sentences: Number(byId("sentences").value), stream: true };
    const model = byId("writer").value;
    if (model) Object.assign(body, { model, max_tokens: Number(byId("summary-most").value) });
    this.busy("The text is being read …");
    try {
      await this.listen(body, text);
    } catch (error) {
      complain(byId("summarize-error"), error.name === "AbortError" ? "You stopped it." : error.message);
      byId("draft")?.removeAttribute("aria-busy");
    } finally {
      this.running = null;
      this.busy("");
    }
  }

  /** Show the extract first, then the text while the model writes it, and the links at the end. */
  async listen(body, text) {
    let [read, draft] = [{}, ""];
    for await (const event of stream("v1/graftlm/summarize", body, this.running.signal)) {
      const pages = event.pages ?? read.pages ?? [text];
      if (event.summary !== undefined) this.draw(pages, event);
      else if (event.text !== undefined) byId("draft").replaceChildren(...markdown((draft += event.text)));
      else if (event.extract) this.draw(pages, { ...read, extract: event.extract, writer: body.model, links: [], draft: true });
      else read = event;
      if (event.extract && event.summary === undefined) this.busy(`${body.model} is writing …`);
    }
  }

  busy(sentence) {
    byId("summarize-status").textContent = sentence;
    byId("summarize-stop").disabled = !sentence;
    document.querySelector("#summarize-form [type=submit]").disabled = Boolean(sentence);
  }

  /** Draw both panes. The source is scrolled to its first passage once, and then left at the reader's position. */
  draw(pages, found) {
    const linked = passagesOf(found);
    const sentences = found.draft ? [] : sentencesOf(found, linked);
    const before = byId("summary").querySelector("[data-drawn=draft] .source")?.scrollTop;
    const source = h("div", { class: "source", tabindex: 0, role: "region", "aria-labelledby": "source-title" }, ...sourceOf(pages, found.format, linked, sentences));
    const panes = h(
      "div",
      { class: "panes", "data-drawn": found.draft ? "draft" : "whole" },
      h(
        "article",
        { class: "sheet", "aria-labelledby": "summary-title" },
        h("h2", { id: "summary-title", tabindex: -1 }, "Summary"),
        ...(found.draft ? [h("div", { id: "draft", class: "draft", "aria-busy": "true" })] : [body(sentences, found.writer), ...notes(found)]),
      ),
      h("article", { class: "sheet", "aria-labelledby": "source-title" }, h("h2", { id: "source-title" }, "Source"), source),
    );
    number(source);
    for (const kind of ["pointerover", "focusin"]) panes.addEventListener(kind, (event) => light(panes, event.target));
    panes.addEventListener("pointerleave", () => light(panes, null));
    panes.addEventListener("click", follow);
    byId("summary").hidden = false;
    byId("summary").replaceChildren(panes);
    source.scrollTop = before ?? firstPassage(source);
    if (before !== undefined) return;
    byId("summary-title").focus({ preventScroll: true });
    panes.scrollIntoView({ block: "nearest" });
  }
}

/** Return the position of the first passage in a source, with two lines before it. */
function firstPassage(source) {
  const mark = source.querySelector("mark");
  return mark ? mark.getBoundingClientRect().top - source.getBoundingClientRect().top - 2 * parseFloat(getComputedStyle(source).lineHeight) : 0;
}

/** Return the error of an unsuitable file; null if it is suitable. */
async function misfit(file, suffix, limits) {
  const known = [...TEXTS, "pdf"];
  if (!known.includes(suffix)) return `${file.name} can’t be read here: choose a file that ends in ${known.map((one) => `.${one}`).join(", ")}.`;
  const most = Math.floor((suffix === "pdf" ? 3 / 4 : 1) * (limits.document_bytes - 2048)); // base64 has four characters for three bytes
  if (file.size > most) return `${file.name} has ${count(file.size)} bytes, but at most ${count(most)} are accepted: split it into chapters.`;
  if (suffix === "pdf") return null;
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return null;
  } catch {
    return `${file.name} is not UTF-8 text: convert it first.`;
  }
}

/** Return the bytes of a file in base64. */
async function base64(file) {
  const reader = new FileReader();
  await new Promise((resolve, reject) => {
    reader.onload = resolve;
    reader.onerror = reject;
    reader.readAsDataURL(file);
  });
  return reader.result.slice(reader.result.indexOf(",") + 1);
}

/** Return the linked passages in the order of the source: the extract, and the support of written sentences. */
function passagesOf(found) {
  const linked = new Map(found.extract.sentences.map((one) => [one.index, one]));
  for (const link of found.links) if (link.mark !== "unsupported") linked.set(link.nearest, { index: link.nearest, ...link.source });
  return [...linked.values()].sort((one, other) => one.index - other.index);
}

/** Return the summary's sentences with mark and number of passage, from 1; null without support. */
function sentencesOf(found, linked) {
  const numbers = new Map(linked.map((one, place) => [one.index, place + 1]));
  if (!found.writer || found.links.length === 0) return found.extract.sentences.map((one) => ({ text: one.text, mark: "", passage: numbers.get(one.index) }));
  return found.links.map(({ text, mark, nearest }) => ({ text, mark, passage: mark === "unsupported" ? null : numbers.get(nearest) }));
}

function body(sentences, writer) {
  const nodes = (text) => (writer ? sentence(text) : [text]); // a model may write Markdown; an extract has none left
  const items = sentences.map(({ text, mark, passage }, place) => {
    if (passage === null) return h("li", {}, ...nodes(text), " ", h("span", { class: "unsupported" }, mark));
    const link = h("a", { href: `#source-${passage}`, id: `summary-${place + 1}`, "data-passage": passage }, ...nodes(text));
    return h("li", {}, link, h("sup", { "aria-hidden": "true" }, passage), mark ? h("small", {}, ` ${mark}`) : "");
  });
  return h("ol", { class: "sentences" }, ...items);
}

/** Return the source page by page, with links from its passages. Markdown is rendered if all passages are kept. */
function sourceOf(pages, format, linked, sentences) {
  return pages.flatMap((text, index) => {
    const ranges = rangesOf(text, linked, pages.length > 1 || format === "pdf" ? index + 1 : null);
    const whole = painter(text, ranges, sentences);
    if (format === "pdf") return [h("p", { class: "page" }, `Page ${index + 1}`), ...whole.paint(0, text.length)];
    if (format !== "markdown") return whole.paint(0, text.length);
    const drawn = painter(text, ranges, sentences);
    const blocks = markdown(text, drawn.paint);
    return ranges.every((range) => drawn.seen.has(range.passage)) ? [h("div", { class: "drawn" }, ...blocks)] : whole.paint(0, text.length);
  });
}

/** Return the linked passages of a page without overlaps. Offsets count characters, which may be two units in JavaScript. */
function rangesOf(text, linked, page) {
  const units = [0];
  for (const character of text) units.push(units.at(-1) + character.length);
  const ranges = linked.map(({ start, end, page: its }, place) => ({ start: units[start], end: units[end], passage: place + 1, page: its }));
  const here = ranges.filter((range) => page === null || range.page === page).sort((one, other) => one.start - other.start);
  return here.filter((range, place) => here.slice(0, place).every((before) => before.end <= range.start));
}

/** Return a function from a range of characters to its nodes, with marked passages. */
function painter(text, ranges, sentences) {
  const seen = new Set(); // the passages that have been painted, of which the first part has the id
  const paint = (start, end) => {
    const nodes = [];
    for (const range of ranges.filter((one) => one.start < end && one.end > start)) {
      const [from, to] = [Math.max(start, range.start), Math.min(end, range.end)];
      nodes.push(text.slice(start, from), mark(text.slice(from, to), range.passage, sentences, !seen.has(range.passage)));
      seen.add(range.passage);
      start = to;
    }
    return [...nodes, text.slice(start, end)];
  };
  return { paint, seen };
}

function mark(text, passage, sentences, first) {
  const back = sentences.findIndex((one) => one.passage === passage) + 1;
  const id = first ? `source-${passage}` : null;
  const inside = back ? h("a", { href: `#summary-${back}`, "data-passage": passage, id, tabindex: first ? null : -1 }, text) : h("span", { id }, text);
  return h("mark", { class: back || sentences.length === 0 ? null : "unused", "data-number": passage }, inside);
}

/** Add the number of each passage after its last part. */
function number(source) {
  const last = new Map([...source.querySelectorAll("mark")].map((one) => [one.dataset.number, one]));
  for (const [passage, one] of last) one.append(h("sup", { "aria-hidden": "true" }, passage));
}

/** Highlight a sentence together with its passage. */
function light(panes, element) {
  const passage = element?.closest?.("[data-passage]")?.dataset.passage;
  for (const one of panes.querySelectorAll("[data-passage]")) one.classList.toggle("lit", one.dataset.passage === passage);
}

/** Go to the target of a link without a change of the address. */
function follow(event) {
  const link = event.target.closest("a[data-passage]");
  if (!link) return;
  event.preventDefault();
  const target = byId(link.hash.slice(1));
  if (!target) return; // it overlaps another passage
  target.focus({ preventScroll: true });
  target.scrollIntoView({ block: "nearest" });
}

function notes(found) {
  const figures = found.faithfulness;
  const shares = [["words", figures.words], ["pairs of words", figures.bigrams], ["numbers", figures.numbers], ["names", figures.names]];
  const supported = shares.filter(([, value]) => value !== null && value !== undefined).map(([what, value]) => `${Math.round(100 * value)}% of its ${what}`);
  const lines = [...found.notes];
  if (found.writer && supported.length) lines.push(`The source has ${supported.join(", ")}.`);
  if (figures.missing?.length) lines.push(`Not in the source: ${figures.missing.join(", ")}.`);
  const by = found.writer ? `Written by ${found.writer} from ` : "";
  lines.push(`${by}${many(found.extract.sentences.length, "sentence")} chosen by ${found.extract.selector}.`);
  return [h("ul", { class: "notes" }, ...lines.map((line) => h("li", {}, line)))];
}
