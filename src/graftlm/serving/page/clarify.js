// The clarifying conversation as a form. Its state is the pipeline's JSON, stored here to survive a reload.

import { ask } from "./api.js";
import { byId, complain, decimals, entitle, excess, forever, h, keep, kept, many } from "./dom.js";

const SKIPPED = {
  nothing: "The model asked nothing.",
  "no-question": "The model’s reply is not a question, so nothing was asked.",
  repeated: "The model repeated its question, so nothing was asked.",
  unusable: "The model’s question does not fit the text, so nothing was asked.",
};
const HOW = {
  informed: "Written with your answers",
  settled: "Written without asking: all likely answers lead to this text",
  plain: "Written from the text alone",
};

export class Clarify {
  constructor() {
    this.running = null;
    this.state = kept(forever, "clarify"); // {asked: what every turn says, found: what the last one gave}
    byId("clarify-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.begin();
    });
    byId("template").addEventListener("change", () => this.offerTargets());
    byId("clarify-stop").addEventListener("click", () => this.running?.abort());
  }

  async serve(served) {
    this.limits = served.limits;
    if (!this.templates) {
      try {
        this.templates = (await ask("v1/graftlm/clarify")).data;
      } catch (error) {
        return complain(byId("clarify-error"), error.message);
      }
    }
    byId("template").replaceChildren(...this.templates.map((one) => h("option", { value: one.name }, one.name.replaceAll("-", ", "))));
    byId("template").value = "translate";
    this.offerTargets();
    this.refill();
    if (this.state?.found) this.draw();
    if (!this.running) this.busy("");
    entitle();
  }

  offerTargets() {
    const languages = this.templates.find((one) => one.name === byId("template").value)?.languages ?? {};
    byId("target").replaceChildren(...Object.entries(languages).map(([code, name]) => h("option", { value: code }, name)));
    byId("target-field").hidden = Object.keys(languages).length < 2;
  }

  /** Fill the fields with the values from before a reload. */
  refill() {
    const asked = this.state?.asked;
    if (!asked) return;
    byId("clarify-text").value = asked.start.text;
    byId("template").value = asked.start.template;
    this.offerTargets();
    byId("target").value = asked.start.target;
    byId("clarify-model").value = asked.model;
    byId("budget").value = asked.start.budget;
    byId("threshold").value = asked.start.threshold ?? "";
    byId("rules").checked = asked.rules;
    byId("clarify-most").value = asked.max_tokens;
  }

  begin() {
    const mistake = excess(byId("clarify-text").value, this.limits.query);
    if (mistake) return complain(byId("clarify-error"), mistake);
    const threshold = byId("threshold").value;
    const start = {
      text: byId("clarify-text").value,
      template: byId("template").value,
      target: byId("target").value,
      budget: Number(byId("budget").value),
      threshold: threshold === "" ? null : Number(threshold),
    };
    const most = Number(byId("clarify-most").value);
    const asked = { start, model: byId("clarify-model").value, rules: byId("rules").checked, max_tokens: most };
    this.turn(asked, { start });
  }

  answer(text) {
    this.turn(this.state.asked, { conversation: this.state.found.conversation, answer: text });
  }

  async turn(asked, more) {
    if (this.running) return;
    this.running = new AbortController();
    complain(byId("clarify-error"));
    this.busy("The model is at work …");
    const { model, rules, max_tokens } = asked;
    try {
      const found = await ask("v1/graftlm/clarify", { model, rules, max_tokens, ...more }, this.running.signal);
      this.state = { asked, found };
      keep(forever, "clarify", this.state);
      this.draw();
      byId("conversation").querySelector("[tabindex='-1']")?.focus();
    } catch (error) {
      complain(byId("clarify-error"), error.name === "AbortError" ? "You stopped it; the turn was discarded." : error.message);
    } finally {
      this.running = null;
      this.busy("");
    }
  }

  busy(sentence) {
    byId("clarify-status").textContent = sentence;
    byId("clarify-stop").disabled = !sentence;
    for (const button of document.querySelectorAll("#clarify-form [type=submit], #conversation button")) button.disabled = Boolean(sentence);
  }

  draw() {
    const { conversation, question, step } = this.state.found;
    const place = byId("conversation");
    const turns = conversation.turns.filter((turn, index) => !(turn.kind === "asked" && index === conversation.turns.length - 1));
    place.hidden = false;
    const talk = h("ol", { class: "talk", "aria-label": "The conversation so far" }, said("Your text", conversation.text), ...turns.map(turnOf));
    const next = question ? this.form(question, conversation.turns.at(-1).gain) : step === "done" ? this.result() : "";
    place.replaceChildren(talk, next);
  }

  form(question, gain) {
    const answers = question.answers.map((text) => choice(text, text));
    const own = h("input", { type: "text", id: "own-words", maxlength: this.limits.answer, autocomplete: "off" });
    own.addEventListener("input", () => {
      for (const input of form.elements.answer instanceof RadioNodeList ? form.elements.answer : []) input.checked = false;
    });
    const form = h(
      "form",
      { class: "sheet question", "aria-labelledby": "question" },
      h("h2", { id: "question", tabindex: -1 }, question.text),
      h("p", { class: "note" }, why(gain)),
      answers.length > 0 && h("fieldset", { class: "answers" }, h("legend", {}, "Likely answers"), ...answers),
      h("div", { class: "field" }, h("label", { for: "own-words" }, answers.length ? "Or in your own words" : "Your answer"), own),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "submit", class: "primary" }, "Answer"),
        h("button", { type: "button", class: "quiet", onclick: () => this.answer(null) }, "Skip the question"),
      ),
      outcomes(question, gain),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = own.value.trim() || new FormData(form).get("answer");
      if (text) this.answer(text);
      else complain(byId("clarify-error"), "The answer is missing: choose one, write one, or skip the question.");
    });
    return form;
  }

  result() {
    const { conversation, summary } = this.state.found;
    const written = conversation.turns.at(-1);
    const { calls, prompt_tokens, new_tokens } = summary.cost;
    return h(
      "article",
      { class: "sheet result", "aria-labelledby": "result" },
      h("h2", { id: "result", tabindex: -1 }, "The result"),
      h("p", { class: "written" }, summary.output || "The model wrote nothing."),
      h("p", { class: "note" }, `${HOW[written.mode]}${written.truncated ? ", and cut off at the most tokens" : ""}${gained(summary)}`),
      h("p", { class: "note" }, `It cost ${many(calls, "call")}, ${many(prompt_tokens, "token")} read and ${many(new_tokens, "token")} written. The conversation is finished.`),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", class: "quiet", onclick: () => this.forget() }, "Start again"),
        h("button", { type: "button", class: "quiet", onclick: () => download(conversation) }, "Save the conversation"),
      ),
    );
  }

  forget() {
    this.state = null;
    keep(forever, "clarify", null);
    byId("conversation").replaceChildren();
    byId("conversation").hidden = true;
    byId("clarify-text").value = "";
    byId("clarify-text").focus();
  }
}

function choice(text, value) {
  return h("label", {}, h("input", { type: "radio", name: "answer", value }), h("span", {}, text));
}

const said = (who, text, note = null) =>
  h("li", {}, h("span", { class: "who" }, who), h("p", {}, text), note && h("p", { class: "note" }, note));

function turnOf(turn) {
  if (turn.kind === "asked") return said("The model asked", turn.question.text, turn.gain && why(turn.gain));
  if (turn.kind === "answered") return said("You answered", turn.answer);
  if (turn.kind === "refused") return said("You", "skipped the question.");
  if (turn.kind === "written") return null;
  if (turn.reason !== "not-needed") return said("No question", SKIPPED[turn.reason] ?? turn.reason, turn.reply);
  const bits = decimals(turn.gain.bits, 2);
  return said("No question", turn.question.text, `Not asked: its answer would bring ${bits} bits, which is not above the limit.`);
}

function why(gain) {
  if (!gain) return "Asked because the text is ambiguous; the effect of an answer was not measured.";
  return `Asked because the answer changes what is written: it is expected to bring ${decimals(gain.bits, 2)} bits.`;
}

function outcomes(question, gain) {
  if (!gain) return null;
  const rows = question.answers.map((answer, place) => [answer, gain.outputs[place].join(" / "), decimals(gain.by_answer[place], 2)]);
  return h(
    "details",
    {},
    h("summary", {}, "What would be written under each answer"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "What would be written under each answer" }, table(["answer", "output", "bits"], rows, null, "words")),
  );
}

/** Return a table whose first cells are row headers. */
export function table(head, rows, caption = null, kind = null) {
  return h(
    "table",
    { class: kind },
    caption && h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, first), ...rest.map((cell) => h("td", {}, cell))))),
  );
}

function gained(summary) {
  const bits = summary.gained_bits.filter((one) => one !== null);
  return bits.length ? `; your answer brought ${decimals(bits.reduce((sum, one) => sum + one, 0), 2)} bits.` : ".";
}

function download(conversation) {
  const blob = new Blob([`${JSON.stringify(conversation, null, 2)}\n`], { type: "application/json" });
  const link = h("a", { href: URL.createObjectURL(blob), download: "conversation.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}
