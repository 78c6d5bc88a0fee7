// The column of one model: its grafts, its text, its speed, and the activity of each graft.

import { stream } from "./api.js";
import { complain, decimals, h, many } from "./dom.js";
import { TokenText } from "./tokens.js";

let columns = 0; // number of columns created so far, for ids

export class Column {
  /** `chosen` are the grafts at the start; `changed` and `removed` are called after these actions of the user. */
  constructor(served, labels, chosen, changed, removed) {
    this.labels = labels;
    this.writers = served.backbones.filter((one) => one.kind !== "encoder").map((one) => one.name);
    const grafts = served.grafts.filter((graft) => this.writers.includes(graft.backbone));
    this.backbone = grafts.find((graft) => chosen.includes(graft.name))?.backbone ?? this.writers[0] ?? served.backbones[0].name;
    this.answers = []; // TokenTexts
    this.history = []; // messages of a chat
    this.color = "trace";
    this.id = `column-${++columns}`;
    this.title = h("h2", { id: this.id });
    this.boxes = grafts.map((graft) => this.box(graft, chosen.includes(graft.name), changed));
    this.remove = h("button", { type: "button", class: "quiet", onclick: () => removed(this) }, "Remove");
    this.output = h("div", { class: "output" });
    this.status = h("p", { class: "status", role: "status" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.legend = h("div");
    this.element = h(
      "article",
      { class: "column sheet", "aria-labelledby": this.id },
      h("header", {}, this.title, this.remove),
      this.choices(changed),
      this.output,
      this.error,
      this.legend,
      this.status,
    );
    this.rename();
  }

  box(graft, checked, changed) {
    const input = h("input", { type: "checkbox", value: graft.name, checked });
    input.addEventListener("change", () => {
      this.rename();
      changed();
    });
    return { input, backbone: graft.backbone, label: h("label", { class: "chip", title: `${graft.name}: ${graft.label}` }, input, h("span", {}, graft.name)) };
  }

  choices(changed) {
    if (this.boxes.length === 0 && this.writers.length < 2) return h("p", { class: "note" }, "No graft is served: this is the bare backbone.");
    const labels = this.boxes.map((box) => box.label);
    if (this.writers.length < 2) return h("fieldset", { class: "chips" }, h("legend", {}, `Grafted on ${this.backbone}`), ...labels);
    const select = h("select", { "aria-label": "Backbone" }, ...this.writers.map((name) => h("option", { value: name, selected: name === this.backbone }, name)));
    select.addEventListener("change", () => {
      this.backbone = select.value;
      this.showOwn();
      this.rename();
      changed();
    });
    this.showOwn();
    return h("fieldset", { class: "chips" }, h("legend", {}, "Grafted on ", select), ...labels);
  }

  /** Show only the grafts of the chosen backbone, and deselect others. */
  showOwn() {
    for (const { input, label, backbone } of this.boxes) {
      label.hidden = backbone !== this.backbone;
      input.checked &&= !label.hidden;
    }
  }

  get chosen() {
    return this.boxes.filter((box) => box.input.checked).map((box) => box.input.value);
  }

  get model() {
    return this.chosen.join("+") || this.backbone;
  }

  rename() {
    const names = this.chosen;
    this.title.textContent = names.join(" + ") || (this.writers.length > 1 ? `bare ${this.backbone}` : "bare backbone");
    this.remove.setAttribute("aria-label", `Remove ${this.title.textContent}`);
    for (const answer of this.answers) answer.name(this.title.textContent);
  }

  clear() {
    this.answers = [];
    this.history = [];
    this.output.replaceChildren();
    this.legend.replaceChildren();
    this.status.textContent = "";
    complain(this.error);
  }

  colorBy(mode) {
    this.color = mode;
    for (const answer of this.answers) answer.colorBy(mode);
    this.showLegend();
  }

  showLegend() {
    const legend = this.answers.at(-1)?.legend();
    this.legend.replaceChildren(...(legend ? [legend] : []));
  }

  /** Generate the continuation of a prompt or the next message of a chat; errors of the server are shown, not thrown. */
  async write(asked, signal) {
    const { mode, prompt } = asked;
    complain(this.error);
    if (mode === "completion") this.clear();
    const history = this.history; // replaced when the column is cleared, which discards this answer
    const answer = new TokenText(this.labels);
    answer.mode = this.color;
    answer.name(this.title.textContent);
    this.answers.push(answer);
    this.show(mode, prompt, answer);
    const clock = { begun: performance.now(), first: null };
    this.element.setAttribute("aria-busy", "true");
    this.status.textContent = "Waiting for the first token …";
    try {
      const finish = await this.listen(asked, answer, clock, signal);
      this.end(asked, answer, history, endMessage(answer, clock, finish));
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.end(asked, answer, history, stopped ? endMessage(answer, clock, "stopped") : "", stopped ? "" : error.message);
    } finally {
      this.element.removeAttribute("aria-busy");
      this.showLegend();
    }
  }

  show(mode, prompt, answer) {
    if (mode === "completion") answer.lead(prompt);
    else this.output.append(h("p", { class: "you" }, h("span", { class: "who" }, "You"), prompt));
    this.output.append(answer.element);
  }

  async listen(asked, answer, clock, signal) {
    let finish = null;
    const chat = asked.mode === "chat";
    const path = chat ? "v1/chat/completions" : "v1/completions";
    for await (const chunk of stream(path, this.request(asked), signal)) {
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      for (const token of (chat ? chatTokens : completionTokens)(choice)) answer.add(token);
      if (answer.tokens.length && clock.first === null) clock.first = performance.now();
      if (answer.tokens.length) this.status.textContent = `${many(answer.tokens.length, "token")} so far`;
      finish = choice.finish_reason ? (choice.graftlm?.ended ?? choice.finish_reason) : finish;
    }
    return finish;
  }

  request({ mode, prompt, system, settings }) {
    const shared = { model: this.model, stream: true, graftlm: { trace: true }, ...settings };
    if (mode !== "chat") return { ...shared, prompt, logprobs: 3 };
    const first = system ? [{ role: "system", content: system }] : [];
    return { ...shared, messages: [...first, ...this.history, { role: "user", content: prompt }], logprobs: true, top_logprobs: 3 };
  }

  /** Show how an answer ended, and store it in the chat; `history` is the chat at its beginning. */
  end({ mode, prompt }, answer, history, status, mistake = "") {
    if (this.history !== history) return;
    this.status.textContent = status;
    complain(this.error, mistake);
    if (mode === "chat" && !mistake) history.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
  }
}

const ENDS = {
  stop: "The model ended the text",
  length: "The maximum length was reached",
  time: "The server’s time limit ended it",
  stopped: "You stopped it",
};

function endMessage(answer, clock, finish) {
  const tokens = answer.tokens.length;
  const end = ENDS[finish] ?? "It ended";
  if (tokens === 0) return `${end} before it wrote a token.`;
  const seconds = (performance.now() - clock.first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `, ${decimals((tokens - 1) / seconds, 0)} a second` : "";
  return `${end}: ${many(tokens, "token")}${rate}, the first after ${decimals((clock.first - clock.begun) / 1000, 2)} s.`;
}

/** Return the tokens of a chunk of a chat. */
function chatTokens(choice) {
  const likely = choice.logprobs?.content?.map((token) => ({
    text: token.token,
    p: Math.exp(token.logprob),
    others: (token.top_logprobs ?? []).map((other) => [other.token, Math.exp(other.logprob)]),
  }));
  return tokensOf(choice.delta?.content ?? "", likely ?? [], choice.graftlm?.trace ?? []);
}

/** Return the tokens of a chunk of a completion. */
function completionTokens(choice) {
  const found = choice.logprobs;
  const likely = found?.tokens?.map((text, place) => ({
    text,
    p: Math.exp(found.token_logprobs[place]),
    others: Object.entries(found.top_logprobs?.[place] ?? {}).map(([other, value]) => [other, Math.exp(value)]),
  }));
  return tokensOf(choice.text ?? "", likely ?? [], choice.graftlm?.trace ?? []);
}

/**
 * Return a chunk's text as tokens. If the reported tokens do not spell the text, as with parts of one character, or if
 * a stop string truncated it, the whole text is one token with the figures of the last one.
 */
function tokensOf(text, likely, traced) {
  if (!text) return [];
  const reported = traced.length ? traced.map((token) => token.token) : likely.map((token) => token.text);
  const pieces = reported.join("") === text ? reported : [text];
  const shift = reported.length - pieces.length;
  return pieces.map((piece, place) => ({
    text: piece,
    values: traced[place + shift]?.values ?? {},
    p: likely[place + shift]?.p ?? null,
    others: likely[place + shift]?.others ?? [],
  }));
}
