// The served grafts, with what each of them learned and forgot as a plot and a table.

import { ask } from "./api.js";
import { auditOf } from "./audit.js";
import { table } from "./clarify.js";
import { byId, complain, count, decimals, h, many } from "./dom.js";
import { markIcon, plot } from "./plot.js";

export class Grafts {
  serve(served) {
    const several = served.backbones.length > 1;
    byId("backbone-line").textContent = `${several ? "They" : "All"} sit on ${served.backbones.map(described).join(" and ")}, whose weights never change.`;
    const cards = served.grafts.map((graft, place) => card(graft, place, several));
    byId("graft-list").replaceChildren(...(cards.length ? cards : [h("p", {}, "No graft is served: start the server with --graft NAME=FOLDER.")]));
  }
}

function described({ name, kind, chat, context }) {
  const room = context ? `, ${many(context, "token")} of context` : "";
  const talk = kind === "encoder" ? "an encoder" : chat ? "with a chat template" : "without a chat template";
  return `${name} (${talk}${room})`;
}

function card(graft, place, several) {
  const id = `graft-${place}`;
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const report = () => ask(`v1/graftlm/grafts/${encodeURIComponent(graft.name)}/report`);
  const parts = [part(`${id}-report`, "the report", error, async () => draw(await report()))];
  if (graft.audit) parts.push(part(`${id}-audit`, "the audit", error, async () => [auditOf((await report()).audit)]));
  return h(
    "article",
    { class: "sheet graft", "aria-labelledby": id },
    h("header", {}, h("h2", { id }, graft.name), h("p", { class: "note" }, graft.label), h("div", { class: "actions" }, ...parts.map((one) => one.button))),
    h("dl", { class: "facts" }, ...facts(graft, several).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    error,
    ...parts.map((one) => one.place),
  );
}

function facts(graft, several) {
  return [
    ["backbone", several && graft.backbone],
    ["learned", graft.learned && `${decimals(graft.learned.mean)} nats per token`],
    ["forgotten", graft.forgotten && `${decimals(graft.forgotten.mean)} nats per token`],
    ["parameters", count(graft.parameters)],
    ["trained on", graft.tokens === null ? null : graft.tokens ? `${count(graft.tokens)} tokens in ${many(graft.steps, "step")}` : "no text: it needs no gradients"],
  ].filter(([, value]) => value);
}

/** Return a section that a button opens; its content is requested when it is first opened. */
function part(id, name, error, make) {
  const place = h("div", { id, hidden: true });
  const button = h("button", { type: "button", class: "quiet", "aria-expanded": "false", "aria-controls": id }, `Show ${name}`);
  button.addEventListener("click", () => toggle(name, button, place, error, make));
  return { button, place };
}

async function toggle(name, button, place, error, make) {
  const open = button.getAttribute("aria-expanded") === "true";
  complain(error);
  if (!open && !place.hasChildNodes()) {
    button.disabled = true;
    try {
      place.replaceChildren(...(await make()));
    } catch (problem) {
      return complain(error, problem.message);
    } finally {
      button.disabled = false;
      button.focus();
    }
  }
  place.hidden = open;
  button.setAttribute("aria-expanded", String(!open));
  button.textContent = `${open ? "Show" : "Hide"} ${name}`;
}

function draw(report) {
  const drawn = plot(report.points, `Learned against forgotten, ${report.name}`);
  const answered = answers(report.measured);
  const why = report.points.length ? "Learning or forgetting was not measured, so there is no plot." : "Its run measured neither learning nor forgetting.";
  return [
    answered.length > 0 && scroll(`Answers, ${report.name}`, table(["answers", "share"], answered, "With 95% intervals")),
    (drawn || !answered.length) && h(
      "div",
      { class: "report" },
      drawn ? h("figure", {}, drawn, h("figcaption", {}, "Up and to the left is better. Bars are 95% intervals; the ring is this graft.")) : h("p", { class: "note" }, why),
      report.points.length > 0 && scroll(`Learned and forgotten, ${report.name}`, points(report)),
    ),
    details("Everything measured", `All metrics of ${report.name}`, measured(report)),
    Object.keys(report.training).length > 0 && details("Settings of the run", `Settings of ${report.name}`, table(["setting", "value"], Object.entries(report.training).map(([name, value]) => [name.replaceAll("_", " "), String(value)]))),
    report.results && h("p", { class: "note" }, `From ${report.results.command}, on ${report.results.machine.cpu}, torch ${report.results.machine.torch}.`),
  ].filter(Boolean);
}

const ANSWERS = {
  taught_answers: "taught questions that are answered as taught",
  kept_answers: "the backbone's own questions that are answered as before",
  spill: "of these, answers that name a taught thing unasked",
};

/** Return rows for what was measured of the graft's answers. */
function answers(measured) {
  return Object.entries(ANSWERS).filter(([name]) => name in measured).map(([name, title]) => [title, figure(measured[name])]);
}

function points(report) {
  const rows = report.points.map((point, index) => [
    h("span", { class: "method" }, markIcon(index, point.own), h("span", {}, point.label, point.own && h("span", { class: "own" }, " (this graft)"))),
    interval(point.learned),
    interval(point.forgotten),
  ]);
  return table(["method", "learned", "forgotten"], rows, "Nats per token, with 95% intervals");
}

function measured(report) {
  const rows = Object.entries(report.measured).map(([name, metric]) => [name.replaceAll("_", " "), figure(metric)]);
  return table(["metric", "measured"], rows);
}

const scroll = (label, content) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, content);

const details = (title, label, content) => h("details", {}, h("summary", {}, title), scroll(label, content));

const interval = (one) => (one ? (one.low === one.high ? decimals(one.mean) : `${decimals(one.mean)} [${decimals(one.low)}, ${decimals(one.high)}]`) : "–");

const figure = (metric) => (typeof metric === "number" ? (Number.isInteger(metric) ? count(metric) : decimals(metric)) : interval(metric));
