// Learned against forgotten: a mark for each method with its intervals; up and to the left is better.

import { decimals, s } from "./dom.js";

const WIDTH = 380;
const HEIGHT = 300;
const LEFT = 72; // the axis' title, then its numbers
const RIGHT = 14;
const TOP = 14;
const BOTTOM = 50;

const SHAPES = [
  (x, y, r) => s("circle", { cx: x, cy: y, r }),
  (x, y, r) => s("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r }),
  (x, y, r) => polygon([[x, y - 1.35 * r], [x + 1.35 * r, y], [x, y + 1.35 * r], [x - 1.35 * r, y]]),
  (x, y, r) => polygon([[x, y - 1.2 * r], [x + 1.2 * r, y + r], [x - 1.2 * r, y + r]]),
  (x, y, r) => polygon([[x, y + 1.2 * r], [x + 1.2 * r, y - r], [x - 1.2 * r, y - r]]),
];

const polygon = (points) => s("polygon", { points: points.map((point) => point.map((one) => one.toFixed(1)).join(",")).join(" ") });

/** Return the mark of the n-th method: shape, color and, for the graft itself, a ring. */
export function markOf(index, own, x, y) {
  const shape = SHAPES[index % SHAPES.length](x, y, 5.5);
  return s("g", { class: `mark series-${index % 8}` }, own && s("circle", { class: "ring", cx: x, cy: y, r: 11 }), shape);
}

/** Return a single mark, for a table. */
export function markIcon(index, own) {
  return s("svg", { class: "mark-icon", viewBox: "0 0 26 26", "aria-hidden": "true", focusable: "false" }, markOf(index, own, 13, 13));
}

/** Return the plot of points with both figures; null if there are none. */
export function plot(points, title) {
  const shown = points.map((point, index) => ({ ...point, index })).filter((point) => point.learned && point.forgotten);
  if (shown.length === 0) return null;
  const x = scale(spread(shown, "forgotten"), LEFT, WIDTH - RIGHT);
  const y = scale(spread(shown, "learned"), HEIGHT - BOTTOM, TOP);
  return s(
    "svg",
    { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}. ${shown.map(sentence).join(" ")}` },
    ...axes(x, y),
    ...shown.map((point) => interval(point, x, y)),
    ...shown.map((point) => markOf(point.index, point.own, x(point.forgotten.mean), y(point.learned.mean))),
  );
}

const sentence = (point) => `${point.label}: learned ${decimals(point.learned.mean)}, forgot ${decimals(point.forgotten.mean)}.`;

/** Return all numbers of one axis, including 0. */
const spread = (points, key) => [0, ...points.flatMap((point) => [point[key].low, point[key].high, point[key].mean])];

function scale(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = (high - low || 1) * 0.08;
  const [bottom, top] = [low - margin, high + margin];
  const map = (value) => from + ((value - bottom) / (top - bottom)) * (to - from);
  map.ticks = ticks(bottom, top);
  return map;
}

/** Return at most six round numbers of an interval. */
function ticks(low, high) {
  const rough = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * unit >= rough) * unit;
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push([n * step, decimals(n * step || 0, places)]);
  return found;
}

function axes(x, y) {
  const bottom = HEIGHT - BOTTOM;
  return [
    ...x.ticks.map(([value]) => s("line", { class: value ? "grid" : "zero", x1: x(value), x2: x(value), y1: TOP, y2: bottom })),
    ...y.ticks.map(([value]) => s("line", { class: value ? "grid" : "zero", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) })),
    ...x.ticks.map(([value, text]) => s("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, text)),
    ...y.ticks.map(([value, text]) => s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, text)),
    s("text", { class: "axis", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, "forgotten, nats per token"),
    s("text", { class: "axis", transform: `translate(12 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "learned, nats per token"),
  ];
}

function interval({ forgotten, learned, index }, x, y) {
  const [cx, cy] = [x(forgotten.mean), y(learned.mean)];
  return s(
    "g",
    { class: `interval series-${index % 8}` },
    s("line", { x1: x(forgotten.low), x2: x(forgotten.high), y1: cy, y2: cy }),
    s("line", { x1: cx, x2: cx, y1: y(learned.low), y2: y(learned.high) }),
  );
}
