// The page of an audit inside of this page: only its texts and figures, in new elements.

import { decimals, h } from "./dom.js";
import { hideTip, tipAt } from "./tokens.js";

const TAGS = { H1: "h3", H2: "h4", H3: "h5", H4: "h6", P: "p", TABLE: "table", THEAD: "thead", TBODY: "tbody", TR: "tr", TH: "th", TD: "td", UL: "ul", LI: "li", DIV: "div", SECTION: "div", ARTICLE: "div", SPAN: "span" };
const CLASSES = ["soft", "text", "tokens", "token", "pair"];

/** Return the elements of a page of `graft audit`. No script runs, and only the elements and attributes above are kept. */
export function auditOf(page) {
  const read = new DOMParser().parseFromString(page.replaceAll(/<style\b.*?<\/style>/gs, "").replaceAll(' style="--s:', ' data-s="'), "text/html");
  const choices = JSON.parse(read.getElementById("choices")?.textContent ?? "[]");
  const place = h("div", { class: "audit" }, ...[...(read.querySelector("main")?.childNodes ?? [])].flatMap(copy));
  for (const text of place.querySelectorAll(".audit-tokens")) explain(text, choices);
  return place;
}

function copy(node) {
  if (node.nodeType === Node.TEXT_NODE) return [node.data];
  const tag = TAGS[node.nodeName];
  if (!tag) return [];
  const kept = CLASSES.filter((name) => node.classList.contains(name)).map((name) => `audit-${name}`);
  if (node.nodeName === "DIV" && node.classList.contains("wide")) kept.push("scroll");
  const region = kept.includes("scroll") ? { tabindex: 0, role: "region", "aria-label": "Measurements of the audit" } : {};
  const element = h(tag, { class: kept.join(" ") || null, "data-i": node.dataset.i, scope: node.getAttribute("scope"), ...region }, ...[...node.childNodes].flatMap(copy));
  if (node.dataset.s) element.style.setProperty("--s", node.dataset.s);
  return [element];
}

/** Show both models' choices at the token under the pointer or at the arrow keys' position. */
function explain(text, choices) {
  const tokens = [...text.querySelectorAll(".audit-token")];
  tokens.forEach((token, place) => token.setAttribute("tabindex", place ? -1 : 0));
  const show = (event) => {
    const choice = choices[event.target.dataset?.i];
    if (choice) tipAt(event.target, ...detailsOf(event.target.textContent, choice));
  };
  text.addEventListener("pointerover", show);
  text.addEventListener("focusin", show);
  text.addEventListener("pointerleave", hideTip);
  text.addEventListener("focusout", hideTip);
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && tokens[tokens.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

const quoted = (text) => JSON.stringify(text).slice(1, -1) || "(nothing)";

function detailsOf(text, [divergence, ...models]) {
  const likely = ([word, share]) => `${quoted(word)} ${(100 * share).toFixed(1)}%`;
  const rows = ["base", "tuned"].map((name, place) => h("div", {}, h("dt", {}, name), h("dd", {}, models[place].map(likely).join(", "))));
  return [h("p", { class: "which" }, quoted(text)), h("dl", { class: "words" }, ...rows), h("p", { class: "others" }, `${decimals(divergence)} nats of divergence`)];
}
