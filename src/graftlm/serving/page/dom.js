// Elements from values. Every text becomes a text node, so that nothing from the server is parsed as HTML.

/** An element with attributes, `on…` handlers and children; null and false children are left out. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Show a message in an error's element, or hide the element without one. */
export function complain(place, sentence = "") {
  place.textContent = sentence;
  place.hidden = !sentence;
}

/** 12345 as 12,345. */
export const count = (number) => number.toLocaleString("en");

/** One token, 2 tokens. */
export const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Format a number with a typographic minus sign. */
export const decimals = (number, places = 3) => number.toFixed(places).replace(/^-/, "−");

/** Return the error of a text that is longer than the server's limit, or an empty string. */
export function excess(text, most) {
  const length = Array.from(text).length; // the server counts characters, not units of two bytes
  return length > most ? `The text has ${many(length, "character")}, but at most ${count(most)} are accepted: shorten it.` : "";
}

/** Set the full name of each choice as its title, because a narrow field truncates it. */
export function entitle() {
  for (const select of document.querySelectorAll("select")) select.title = select.selectedOptions[0]?.textContent ?? "";
}

/** Make white space visible. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");

/** Read a stored value; null if there is none or storage is disabled. */
export function kept(storage, key) {
  try {
    return JSON.parse(storage().getItem(`graftlm.${key}`));
  } catch {
    return null;
  }
}

export function keep(storage, key, value) {
  try {
    if (value === null) storage().removeItem(`graftlm.${key}`);
    else storage().setItem(`graftlm.${key}`, JSON.stringify(value));
  } catch {
    // storage is full or disabled: the page works without it
  }
}

export const forever = () => localStorage;
export const tab = () => sessionStorage;
