// Markdown as elements and text nodes: HTML in the text is not parsed, and addresses are not followed.

import { h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}>[ \t]?/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const DASHES = /^:?-+:?$/; // a cell below a table's head
const BAR = /\\.|\|/g; // or an escaped character
const MOST_DEPTH = 8;
const MOST_INLINE = 20_000; // characters of a paragraph, above which its marks are not interpreted

// An escaped character; code; a link or an image; strong; emphasis by asterisks, and by underscores between words. An
// element ends where another of its kind begins, so that the time is proportional to the length of any text.
const INLINE =
  /\\([\\`*_{}[\]()#+.!>|~-])|(?<!`)(`+)(?!`)(.{1,2000}?)(?<!`)\2(?!`)|!?\[([^[\]]{0,2000})\]\(((?:[^()\s]|\([^()\s]{0,2000}\)){0,2000})(?:\s[^()]{0,200})?\)|(\*\*|__)(?=\S)((?:(?!\s\6\S).){0,2000}?\S)\6|(?<!\*)\*(?=[^\s*])((?:(?!\s\*[^\s*]).){0,2000}?[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])((?:(?!(?<!\w)_[^\s_]).){0,2000}?[^\s_])_(?!\w)/gs;

/** Return the blocks of a text. `paint(start, end)` returns the nodes of a range of characters, by default their text. */
export function markdown(text, paint = plain(text)) {
  const lines = [...text.matchAll(/([^\r\n]*)(\r\n|\r|\n|$)/g)].map((match) => ({ text: match[1], start: match.index, end: match.index + match[1].length }));
  const blocks = [];
  const state = { level: 2 }; // level of the last heading; the next one may be at most one level deeper
  for (let place = 0; place < lines.length; ) {
    const [nodes, next] = block(text, lines, place, paint, state);
    blocks.push(...nodes);
    place = next;
  }
  return blocks;
}

/** Return the nodes of one line or sentence. */
export const sentence = (text) => inline(text, 0, text.length, plain(text));

const plain = (text) => (start, end) => [text.slice(start, end)];

function block(text, lines, place, paint, state) {
  const line = lines[place];
  const fence = FENCE.exec(line.text);
  if (!line.text.trim()) return [[], place + 1];
  if (fence) return code(lines, place, fence[1], paint);
  const heading = HEADING.exec(line.text);
  if (heading) {
    const [start, end] = [heading[0].length, headingEnd(line.text, heading[0].length)];
    return [[title(state, heading[1].length, inline(text, line.start + start, line.start + end, paint))], place + 1];
  }
  if (RULE.test(line.text)) return [[h("hr")], place + 1];
  if (ITEM.test(line.text)) return list(text, lines, place, paint);
  if (QUOTE.test(line.text)) return quote(text, lines, place, paint);
  if (line.text.includes("|") && rules(lines[place + 1]?.text ?? "")) return grid(text, lines, place, paint);
  return paragraph(text, lines, place, paint, state);
}

const begins = (line) => !line.text.trim() || [FENCE, HEADING, RULE, ITEM, QUOTE].some((pattern) => pattern.test(line.text));

/** Return the first line after `place` that begins another block. */
function endOf(lines, place) {
  while (place < lines.length && !begins(lines[place])) place += 1;
  return place;
}

/** Return the end of a heading's text, without trailing blanks and number signs after a blank. */
function headingEnd(line, start) {
  const end = line.trimEnd().length;
  let sign = end;
  while (line[sign - 1] === "#") sign -= 1;
  const closed = sign < end && (sign <= start || /\s/.test(line[sign - 1]));
  return Math.max(start, closed ? line.slice(0, sign).trimEnd().length : end);
}

function title(state, depth, nodes) {
  state.level = Math.min(depth + 2, state.level + 1, 6);
  return h(`h${state.level}`, {}, ...nodes);
}

function code(lines, place, fence, paint) {
  let end = place + 1;
  while (end < lines.length && !lines[end].text.trim().startsWith(fence)) end += 1;
  const inside = lines.slice(place + 1, end);
  const nodes = inside.length ? paint(inside[0].start, inside.at(-1).end) : [];
  return [[h("pre", {}, h("code", {}, ...nodes))], end + 1];
}

function list(text, lines, place, paint) {
  const ordered = /\d/.test(ITEM.exec(lines[place].text)[2]);
  const items = [];
  for (let match; place < lines.length && (match = ITEM.exec(lines[place].text)); ) {
    const next = endOf(lines, place + 1);
    const depth = Math.min(3, Math.floor(match[1].replaceAll("\t", "    ").length / 2));
    const value = ordered && /\d/.test(match[2]) ? parseInt(match[2], 10) : null;
    items.push(h("li", { class: `deep-${depth}`, value }, ...inline(text, lines[place].start + match[0].length, lines[next - 1].end, paint)));
    place = next;
    if (place < lines.length - 1 && !lines[place].text.trim() && ITEM.test(lines[place + 1].text)) place += 1; // a loose list
  }
  return [[h(ordered ? "ol" : "ul", {}, ...items)], place];
}

function quote(text, lines, place, paint) {
  const parts = [];
  for (let match; place < lines.length && (match = QUOTE.exec(lines[place].text)); place += 1) {
    parts.push(h("div", {}, ...inline(text, lines[place].start + match[0].length, lines[place].end, paint)));
  }
  return [[h("blockquote", {}, ...parts)], place];
}

/** Return start and end of each cell of a row, including empty cells; bars at its edges are ignored. */
function cells(row) {
  const bars = [...row.matchAll(BAR)].filter((match) => match[0] === "|").map((match) => match.index);
  const all = [-1, ...bars].map((bar, place) => [bar + 1, bars[place] ?? row.length]);
  return all.filter(([start, end], place) => (place > 0 && place < bars.length) || row.slice(start, end).trim());
}

/** Return whether all cells of a line are dashes, as in the line below a table's head. */
function rules(row) {
  const dashes = cells(row).map(([start, end]) => row.slice(start, end).trim());
  return dashes.length > 0 && dashes.every((one) => DASHES.test(one));
}

function grid(text, lines, place, paint) {
  const rows = [];
  for (let row = place; row < lines.length && lines[row].text.includes("|"); row += row === place ? 2 : 1) rows.push(lines[row]);
  const drawn = rows.map((line, number) => h("tr", {}, ...cells(line.text).map(([start, end]) => h(number ? "td" : "th", {}, ...inline(text, line.start + start, line.start + end, paint)))));
  return [[h("table", { class: "words" }, h("thead", {}, drawn[0]), h("tbody", {}, ...drawn.slice(1)))], place + rows.length + 1];
}

function paragraph(text, lines, place, paint, state) {
  let end = endOf(lines, place + 1);
  const ruled = lines.slice(place + 1, end + 1).findIndex((line) => UNDERLINE.test(line.text));
  if (ruled >= 0) end = place + 1 + ruled;
  const nodes = inline(text, lines[place].start, lines[end - 1].end, paint);
  if (ruled >= 0) return [[title(state, lines[end].text.includes("=") ? 1 : 2, nodes)], end + 1];
  return [[h("p", {}, ...nodes)], end];
}

function inline(text, start, end, paint, depth = 0) {
  const nodes = [];
  let place = start;
  const put = (to) => {
    if (to > place) nodes.push(...paint(place, to));
  };
  if (depth < MOST_DEPTH && end - start <= MOST_INLINE) {
    for (const match of text.slice(start, end).matchAll(INLINE)) {
      const from = start + match.index;
      put(from);
      place = from + match[0].length;
      nodes.push(...marked(text, match, from, paint, depth));
    }
  }
  put(end);
  return nodes;
}

/** Return the nodes of one match of INLINE. */
function marked(text, match, from, paint, depth) {
  const [whole, escaped, ticks, inside, label, address, strong] = match;
  const within = (before, after) => inline(text, from + before, from + whole.length - after, paint, depth + 1);
  if (escaped) return paint(from + 1, from + 2);
  if (ticks) return [h("code", {}, ...paint(from + ticks.length, from + ticks.length + inside.length))];
  if (address !== undefined) {
    const before = whole.indexOf("[") + 1;
    return [h("span", { class: "address", title: address }, ...(label ? within(before, whole.length - before - label.length) : ["image"]))];
  }
  return strong ? [h("strong", {}, ...within(2, 2))] : [h("em", {}, ...within(1, 1))];
}
