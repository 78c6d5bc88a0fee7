"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const place = (id) => document.getElementById(id);
const STORE = `graft-rate-${data.page}`;
const state = { rater: "", at: 0, theme: null, ratings: {} };
const CRITERIA = Object.keys(data.criteria);
const total = data.documents.reduce((sum, one) => sum + one.summaries.length, 0) * CRITERIA.length;

/* What was chosen before comes back, as far as it fits this page. */
function restore() {
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem(STORE));
  } catch {
    return;
  }
  if (kept === null || typeof kept !== "object") return;
  if (typeof kept.rater === "string") state.rater = kept.rater;
  if (Number.isInteger(kept.at) && data.documents[kept.at]) state.at = kept.at;
  if (kept.theme === "dark" || kept.theme === "light") state.theme = kept.theme;
  for (const one of data.documents.flatMap((document) => document.summaries)) {
    for (const name of CRITERIA) {
      const value = kept.ratings?.[one.id]?.[name];
      if (Number.isInteger(value) && value >= 1 && value <= data.scale) choose(one.id, name, value);
    }
  }
}

function keep() {
  try {
    localStorage.setItem(STORE, JSON.stringify(state));
  } catch {
    say("This browser keeps nothing for this page: download your ratings before you close or reload it.");
  }
}

const say = (text) => { place("message").textContent = text; };

function choose(id, name, value) {
  state.ratings[id] = { ...state.ratings[id], [name]: value };
}

const made = (summaries) =>
  summaries.reduce((sum, one) => sum + Object.keys(state.ratings[one.id] ?? {}).length, 0);

function element(name, attributes = {}, ...inside) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...inside);
  return found;
}

function scale(summary, name) {
  const ends = { 1: "worst", [data.scale]: "best" };
  const row = element("div", { class: "scale" });
  for (let value = 1; value <= data.scale; value += 1) {
    const input = element("input", { type: "radio", name: `${summary.id} ${name}`, value: String(value) });
    input.checked = state.ratings[summary.id]?.[name] === value;
    input.addEventListener("change", () => {
      choose(summary.id, name, value);
      keep();
      count();
    });
    const told = ends[value] ? element("i", {}, ` ${ends[value]}`) : "";
    row.append(element("label", {}, input, element("span", {}, String(value), told)));
  }
  const [title, question] = data.criteria[name];
  return element("fieldset", {}, element("legend", {}, title, " ", element("small", {}, question)), row);
}

function show(focus) {
  const current = data.documents[state.at];
  place("document-title").textContent = `Document ${state.at + 1} of ${data.documents.length}`;
  const language = current.language ? { lang: current.language } : {};
  place("text").replaceChildren(...current.passages.flatMap(([title, text]) => [
    ...(title ? [element("h3", { dir: "auto", ...language }, title)] : []),
    ...(text ? [element("p", { dir: "auto", ...language }, text)] : []),
  ]));
  place("summaries").replaceChildren(...current.summaries.map((summary, index) => {
    const name = `summary-${index}`;
    const title = element("h2", { id: name }, `Summary ${String.fromCharCode(65 + index)}`);
    const text = element("p", { dir: "auto", ...language }, summary.text);
    return element("article", { "aria-labelledby": name }, title, text, ...CRITERIA.map((one) => scale(summary, one)));
  }));
  place("before").disabled = state.at === 0;
  place("after").disabled = state.at === data.documents.length - 1;
  place("document").scrollTop = 0;
  count();
  if (focus) {
    scrollTo(0, 0);
    place("document-title").focus();
  }
}

function count() {
  const all = data.documents.flatMap((one) => one.summaries);
  place("progress").textContent = `${made(all)} of ${total} ratings made.`;
  place("place").replaceChildren(...data.documents.map((one, index) => {
    const whole = made(one.summaries) === one.summaries.length * CRITERIA.length;
    return element("option", { value: String(index) }, `${index + 1}${whole ? " ✓" : ""}`);
  }));
  place("place").value = String(state.at);
}

function go(to) {
  state.at = Math.min(Math.max(to, 0), data.documents.length - 1);
  keep();
  show(true);
}

/* In a row of ratings, a digit chooses and goes on to the next row. */
function type(event) {
  const row = event.target.closest?.("fieldset");
  const value = Number(event.key);
  if (!row || event.ctrlKey || event.altKey || event.metaKey) return;
  if (!Number.isInteger(value) || value < 1 || value > data.scale) return;
  event.preventDefault();
  row.querySelector(`input[value="${value}"]`).click();
  const rows = [...document.querySelectorAll("fieldset")];
  const next = rows[rows.indexOf(row) + 1];
  if (next) (next.querySelector("input:checked") ?? next.querySelector("input")).focus();
  else (place("after").disabled ? place("download") : place("after")).focus();
}

function paint() {
  const dark = state.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark;
  place("theme").textContent = dark === "dark" ? "Light colours" : "Dark colours";
}

function download() {
  const rater = state.rater.trim();
  if (!rater) {
    say("Enter your name first: it tells your ratings from those of others.");
    place("rater").focus();
    return;
  }
  const found = { form: data.form, page: data.page, rater, ratings: state.ratings };
  const link = element("a", { download: `ratings-${data.page}-${rater.replace(/[^\p{L}\p{N}]+/gu, "-")}.json` });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(found, null, 1) + "\n"], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  const missing = total - made(data.documents.flatMap((one) => one.summaries));
  say(missing ? `Saved; ${missing} of ${total} ratings are still missing.` : "Saved, with all ratings.");
}

restore();
paint();
place("rater").value = state.rater;
place("rater").addEventListener("input", () => {
  state.rater = place("rater").value;
  say("");
  keep();
});
place("before").addEventListener("click", () => go(state.at - 1));
place("after").addEventListener("click", () => go(state.at + 1));
place("place").addEventListener("change", () => go(Number(place("place").value)));
place("download").addEventListener("click", download);
place("theme").addEventListener("click", () => {
  state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  keep();
  paint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
addEventListener("keydown", type);
show(false);
