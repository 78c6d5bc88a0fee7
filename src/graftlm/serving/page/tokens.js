// Generated tokens, colored by the activity of grafts or by surprise, with the figures in a tooltip.

import { decimals, h, many, visible } from "./dom.js";

const PATTERNS = 8; // number of combinations of color and underline in parts.css
const NOTHING = "none"; // the label of the bare backbone

/**
 * A text that grows token by token.
 *
 * A token is {text, values, p, others}: what grafts did by label, its probability and the likeliest ones, [text, p].
 */
export class TokenText {
  constructor(labels) {
    this.tokens = [];
    this.labels = labels;
    this.mode = "trace";
    this.current = -1;
    this.element = h("div", { class: "tokens", tabindex: 0, role: "group" });
    this.element.addEventListener("pointerover", (event) => this.point(event.target));
    this.element.addEventListener("pointerleave", (event) => {
      if (!tip.contains(event.relatedTarget)) this.leave();
    });
    this.element.addEventListener("click", (event) => this.go(this.placeOf(event.target)));
    this.element.addEventListener("keydown", (event) => this.press(event));
    this.element.addEventListener("focus", () => this.go(this.current));
    this.element.addEventListener("blur", () => this.leave());
  }

  name(model) {
    this.element.setAttribute("aria-label", `Text of ${model}; arrow keys go from token to token`);
  }

  lead(text) {
    this.element.append(h("span", { class: "prompt" }, text));
  }

  add(token) {
    this.tokens.push(token);
    token.element = h("span", { class: "token" }, token.text);
    this.paint(token);
    this.element.append(token.element);
  }

  colorBy(mode) {
    this.mode = mode;
    for (const token of this.tokens) this.paint(token);
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  paint(token) {
    const [pattern, strength] = this.look(token);
    token.element.className = pattern === null ? "token" : `token ${pattern}`;
    token.element.style.setProperty("--s", `${Math.round(12 + 34 * strength)}%`);
    token.element.style.setProperty("--t", `${(1 + 2 * strength).toFixed(1)}px`);
  }

  /** Return the CSS class of a token and its strength, from 0 to 1. */
  look(token) {
    if (this.mode === "surprise") {
      return token.p === null || token.p > 0.9 ? [null, 0] : ["surprise", 1 - token.p];
    }
    const most = this.mode === "trace" ? largest(token.values) : null;
    if (most === null || most === NOTHING || token.values[most] <= 0) return [null, 0];
    return [`pattern-${this.labels.of(most)}`, Math.min(1, token.values[most])];
  }

  placeOf(element) {
    return this.tokens.findIndex((token) => token.element === element);
  }

  point(element) {
    const place = this.placeOf(element);
    if (place >= 0) this.show(place);
  }

  press(event) {
    const last = this.tokens.length - 1;
    const to = { ArrowRight: this.current + 1, ArrowLeft: this.current - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.leave();
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey || last < 0) return;
    event.preventDefault();
    this.go(Math.max(0, Math.min(last, to)));
    said.textContent = spoken(this.tokens[this.current]);
  }

  go(place) {
    if (place < 0) return;
    this.current = place;
    this.tokens[place].element.scrollIntoView({ block: "nearest" });
    this.show(place);
  }

  show(place) {
    this.mark(place);
    tipAt(this.tokens[place].element, ...described(this.tokens[place], this.labels));
  }

  leave() {
    this.mark(-1);
    hideTip();
  }

  mark(place) {
    this.element.querySelector(".here")?.classList.remove("here");
    if (place >= 0) this.tokens[place].element.classList.add("here");
  }

  /** Return the legend of the colors, or null. */
  legend() {
    if (this.mode === "surprise") return surpriseLegend(this.tokens);
    const names = Object.keys(this.tokens.find((token) => largest(token.values) !== null)?.values ?? {});
    if (this.mode !== "trace" || names.length === 0) return null;
    const traced = this.tokens.filter((token) => largest(token.values) !== null);
    const rows = names.map((name) => {
      const mean = traced.reduce((sum, token) => sum + (token.values[name] ?? 0), 0) / traced.length;
      const led = traced.filter((token) => largest(token.values) === name).length;
      return h("li", {}, this.labels.swatch(name), `${name} `, h("span", { class: "figure" }, share(mean, led, names)));
    });
    return h("ul", { class: "legend", "aria-label": "Legend: the mean over all tokens" }, ...rows);
  }
}

const share = (mean, led, names) =>
  names.length > 1 ? `${Math.round(100 * mean)}%, most in ${many(led, "token")}` : `${Math.round(100 * mean)}% on average`;

/** Assigns a pattern to each label, the same in all columns. */
export class Labels {
  constructor() {
    this.known = [];
  }

  of(label) {
    if (!this.known.includes(label)) this.known.push(label);
    return this.known.indexOf(label) % PATTERNS;
  }

  swatch(label) {
    if (label === NOTHING) return h("span", { class: "swatch token", "aria-hidden": "true" }, "ab");
    return h("span", { class: `swatch token pattern-${this.of(label)}`, "aria-hidden": "true" }, "ab");
  }
}

function surpriseLegend(tokens) {
  const known = tokens.filter((token) => token.p !== null);
  if (known.length === 0) return null;
  const bits = known.reduce((sum, token) => sum - Math.log2(token.p || 1e-12), 0) / known.length;
  const swatch = h("span", { class: "swatch token surprise", "aria-hidden": "true" }, "ab");
  const text = `the model gave it little probability; ${decimals(bits, 2)} bits a token on average`;
  return h("ul", { class: "legend", "aria-label": "Legend" }, h("li", {}, swatch, text));
}

function largest(values) {
  const names = Object.keys(values);
  return names.length ? names.reduce((best, name) => (values[name] > values[best] ? name : best)) : null;
}

const percent = (p) => (p < 0.0005 ? "under 0.1%" : `${(100 * p).toFixed(1)}%`);

function spoken(token) {
  const values = Object.entries(token.values).map(([name, value]) => `${name} ${decimals(value, 2)}`);
  const sure = token.p === null ? [] : [`probability ${percent(token.p)}`];
  return [visible(token.text), ...values, ...sure].join(", ");
}

// One tooltip for the whole page, and the text for screen readers at the token of the arrow keys.

const tip = h("div", { class: "tip", id: "tip", role: "tooltip", hidden: true });
const said = h("p", { class: "hidden", role: "status" });
document.getElementById("main").append(tip, said);
let anchor = null;
tip.addEventListener("pointerleave", hideTip);
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", () => anchor && placeTip(anchor), { passive: true, capture: true });

export function hideTip() {
  tip.hidden = true;
  anchor = null;
}

/** Show nodes next to an element. */
export function tipAt(element, ...nodes) {
  tip.replaceChildren(...nodes);
  placeTip(element);
}

function described(token, labels) {
  const rows = Object.entries(token.values).map(([name, value]) => [labels.swatch(name), name, decimals(value, 2), value]);
  if (token.p !== null) rows.push([null, "probability", percent(token.p), token.p]);
  const others = token.others.filter(([text]) => text !== token.text).slice(0, 3);
  return [
    h("p", { class: "which" }, visible(token.text)),
    h("dl", {}, ...rows.map(([swatch, name, figure, value]) => row(swatch, name, figure, value))),
    h("p", { class: "others" }, others.length ? `or ${others.map(([text, p]) => `${visible(text)} ${percent(p)}`).join(", ")}` : ""),
  ];
}

function row(swatch, name, figure, value) {
  const bar = h("span", { class: "bar-fill" });
  bar.style.width = `${Math.max(0, Math.min(100, 100 * value))}%`;
  return h("div", {}, h("dt", {}, swatch, name), h("dd", {}, h("span", { class: "bar-line", "aria-hidden": "true" }, bar), figure));
}

function placeTip(element) {
  const box = element.getClientRects()[0];
  if (!box) return hideTip();
  anchor = element;
  tip.hidden = false;
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
  const below = box.bottom + tip.offsetHeight + 6 < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom : Math.max(4, box.top - tip.offsetHeight)}px`;
}
