// Elements out of values. Every text becomes a text node, so that nothing a server says is ever read as HTML.

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

/** Put a sentence into an error's place, or hide the place without one. */
export function complain(place, sentence = "") {
  place.textContent = sentence;
  place.hidden = !sentence;
}

/** 12345 as 12,345. */
export const count = (number) => number.toLocaleString("en");

/** One token, 2 tokens. */
export const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** A number with so many decimals, with a true minus sign. */
export const decimals = (number, places = 3) => number.toFixed(places).replace(/^-/, "−");

/** What is wrong with a text that is longer than the server takes, or nothing. */
export function excess(text, most) {
  const length = Array.from(text).length; // the server counts characters, not units of two bytes
  return length > most ? `The text has ${many(length, "character")}, and ${count(most)} are the most: shorten it.` : "";
}

/** Every choice has its whole name as a title, since a narrow field cuts it. */
export function entitle() {
  for (const select of document.querySelectorAll("select")) select.title = select.selectedOptions[0]?.textContent ?? "";
}

/** White space that one can see. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");

/** What a browser keeps, where it keeps anything at all. */
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
    // storage is full or switched off: the page works on, and forgets
  }
}

export const forever = () => localStorage;
export const tab = () => sessionStorage;
