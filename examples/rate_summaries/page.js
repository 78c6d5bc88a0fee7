"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const STORE = `graft-rate-${data.page}`;
const state = { rater: "", at: 0, theme: null, ratings: {} };
const CRITERIA = Object.keys(data.criteria);
const total = data.documents.reduce((sum, entry) => sum + entry.summaries.length, 0) * CRITERIA.length;

/* Restore the ratings that the browser stored, as far as they fit this page. */
function restore() {
  let stored = null;
  try {
    stored = JSON.parse(localStorage.getItem(STORE));
  } catch {
    return;
  }
  if (stored === null || typeof stored !== "object") return;
  if (typeof stored.rater === "string") state.rater = stored.rater;
  if (Number.isInteger(stored.at) && data.documents[stored.at]) state.at = stored.at;
  if (stored.theme === "dark" || stored.theme === "light") state.theme = stored.theme;
  for (const summary of data.documents.flatMap((entry) => entry.summaries)) {
    for (const name of CRITERIA) {
      const value = stored.ratings?.[summary.id]?.[name];
      if (Number.isInteger(value) && value >= 1 && value <= data.scale) setRating(summary.id, name, value);
    }
  }
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(state));
  } catch {
    showMessage("This browser keeps nothing for this page: download your ratings before you close or reload it.");
  }
}

const showMessage = (text) => { byId("message").textContent = text; };

function setRating(id, name, value) {
  state.ratings[id] = { ...state.ratings[id], [name]: value };
}

const countRatings = (summaries) =>
  summaries.reduce((sum, summary) => sum + Object.keys(state.ratings[summary.id] ?? {}).length, 0);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function ratingRow(summary, name) {
  const ends = { 1: "worst", [data.scale]: "best" };
  const row = element("div", { class: "scale" });
  for (let value = 1; value <= data.scale; value += 1) {
    const input = element("input", { type: "radio", name: `${summary.id} ${name}`, value: String(value) });
    input.checked = state.ratings[summary.id]?.[name] === value;
    input.addEventListener("change", () => {
      setRating(summary.id, name, value);
      save();
      showProgress();
    });
    const label = ends[value] ? element("i", {}, ` ${ends[value]}`) : "";
    row.append(element("label", {}, input, element("span", {}, String(value), label)));
  }
  const [title, question] = data.criteria[name];
  return element("fieldset", {}, element("legend", {}, title, " ", element("small", {}, question)), row);
}

function show(focus) {
  const current = data.documents[state.at];
  byId("document-title").textContent = `Document ${state.at + 1} of ${data.documents.length}`;
  const language = current.language ? { lang: current.language } : {};
  byId("text").replaceChildren(...current.passages.flatMap(([title, text]) => [
    ...(title ? [element("h3", { dir: "auto", ...language }, title)] : []),
    ...(text ? [element("p", { dir: "auto", ...language }, text)] : []),
  ]));
  byId("summaries").replaceChildren(...current.summaries.map((summary, index) => {
    const name = `summary-${index}`;
    const title = element("h2", { id: name }, `Summary ${String.fromCharCode(65 + index)}`);
    const text = element("p", { dir: "auto", ...language }, summary.text);
    return element("article", { "aria-labelledby": name }, title, text, ...CRITERIA.map((criterion) => ratingRow(summary, criterion)));
  }));
  byId("before").disabled = state.at === 0;
  byId("after").disabled = state.at === data.documents.length - 1;
  byId("document").scrollTop = 0;
  showProgress();
  if (focus) {
    scrollTo(0, 0);
    byId("document-title").focus();
  }
}

function showProgress() {
  const all = data.documents.flatMap((entry) => entry.summaries);
  byId("progress").textContent = `${countRatings(all)} of ${total} ratings made.`;
  byId("document-select").replaceChildren(...data.documents.map((entry, index) => {
    const complete = countRatings(entry.summaries) === entry.summaries.length * CRITERIA.length;
    return element("option", { value: String(index) }, `${index + 1}${complete ? " ✓" : ""}`);
  }));
  byId("document-select").value = String(state.at);
}

function goTo(index) {
  state.at = Math.min(Math.max(index, 0), data.documents.length - 1);
  save();
  show(true);
}

/* In a row of ratings, a digit sets the rating and focuses the next row. */
function handleKey(event) {
  const row = event.target.closest?.("fieldset");
  const value = Number(event.key);
  if (!row || event.ctrlKey || event.altKey || event.metaKey) return;
  if (!Number.isInteger(value) || value < 1 || value > data.scale) return;
  event.preventDefault();
  row.querySelector(`input[value="${value}"]`).click();
  const rows = [...document.querySelectorAll("fieldset")];
  const next = rows[rows.indexOf(row) + 1];
  if (next) (next.querySelector("input:checked") ?? next.querySelector("input")).focus();
  else (byId("after").disabled ? byId("download") : byId("after")).focus();
}

function applyTheme() {
  const dark = state.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark;
  byId("theme").textContent = dark === "dark" ? "Light colors" : "Dark colors";
}

function download() {
  const rater = state.rater.trim();
  if (!rater) {
    showMessage("Enter your name first: it tells your ratings from those of others.");
    byId("rater").focus();
    return;
  }
  const ratings = { format: data.format, page: data.page, rater, ratings: state.ratings };
  const link = element("a", { download: `ratings-${data.page}-${rater.replace(/[^\p{L}\p{N}]+/gu, "-")}.json` });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(ratings, null, 1) + "\n"], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  const missing = total - countRatings(data.documents.flatMap((entry) => entry.summaries));
  showMessage(missing ? `Saved; ${missing} of ${total} ratings are still missing.` : "Saved, with all ratings.");
}

restore();
applyTheme();
byId("rater").value = state.rater;
byId("rater").addEventListener("input", () => {
  state.rater = byId("rater").value;
  showMessage("");
  save();
});
byId("before").addEventListener("click", () => goTo(state.at - 1));
byId("after").addEventListener("click", () => goTo(state.at + 1));
byId("document-select").addEventListener("change", () => goTo(Number(byId("document-select").value)));
byId("download").addEventListener("click", download);
byId("theme").addEventListener("click", () => {
  state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  save();
  applyTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
addEventListener("keydown", handleKey);
show(false);
