"""The chain: propose a question, let the user answer, write. Each step is one turn, and each turn is kept at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graftlm.errors import GraftError
from graftlm.pipelines.clarify import needed, prompts
from graftlm.pipelines.clarify.conversation import Conversation
from graftlm.pipelines.clarify.roles import Reply, User, Writer
from graftlm.pipelines.clarify.templates import Template, load_template
from graftlm.pipelines.clarify.turns import Answered, Asked, Cost, Gain, How, Question, Skipped, Turn, Written


class Meter:
    """Measures what the answer to a question would change, by writing under each candidate answer.

    Args:
        writer: the translator.
        draws: outputs under each answer; 1 takes the likeliest, more are drawn at random and corrected for chance.
        temperature: of those draws.
        prior: the share of each candidate answer, given their texts; by default all the same.
        seed: of random choices.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        draws: int = 1,
        temperature: float = 1.0,
        prior: Callable[[Sequence[str]], Sequence[float]] | None = None,
        seed: int = 0,
    ) -> None:
        self._writer, self._draws, self._temperature, self._prior, self._seed = writer, draws, temperature, prior, seed

    def measure(self, conversation: Conversation, question: Question) -> tuple[Gain | None, Cost]:
        """The gain of a question, or None where it has less than two candidate answers; and the cost of measuring."""
        if len(question.answers) < 2:
            return None, Cost()
        template = load_template(conversation.template)
        told, language, text = conversation.told, conversation.target, conversation.text
        asked = [prompts.write(template, language, text, [*told, (question.text, one)]) for one in question.answers]
        replies = [[self._write(prompt, draw) for draw in range(self._draws)] for prompt in asked]
        outputs = [[_without_label(reply, prompt) for reply in row] for row, prompt in zip(replies, asked, strict=True)]
        cost = sum((reply.cost for row in replies for reply in row), Cost())
        return self._gain(question, asked, outputs), cost

    def _write(self, prompt: prompts.Prompt, draw: int) -> Reply:
        if self._draws == 1:
            return self._writer.write(prompt)
        return self._writer.write(prompt, temperature=self._temperature, seed=self._seed + draw)

    def _gain(self, question: Question, asked: Sequence[prompts.Prompt], outputs: Sequence[Sequence[str]]) -> Gain:
        count = len(question.answers)
        prior = tuple(self._prior(question.answers)) if self._prior else (1 / count,) * count
        known, given_KY = needed.shares(outputs)
        score = getattr(self._writer, "score", None)
        if score is not None and self._draws == 1:
            given_KY = needed.from_likelihoods([score(prompt, known) for prompt in asked])
        bits = needed.information_gain(prior, given_KY)
        if self._draws > 1:
            bits, _ = needed.beyond_chance(prior, outputs, seed=self._seed)
        return Gain(
            bits=bits,
            prior=prior,
            outputs=tuple(tuple(row) for row in outputs),
            by_answer=tuple(needed.gains_by_answer(prior, given_KY)),
            likeliest=known[int(np.argmax(np.asarray(prior) @ given_KY))],
            estimator="likelihood" if score is not None and self._draws == 1 else "decoded",
        )


class Chain:
    """Leads conversations from one turn to the next.

    Args:
        translator: asks and writes.
        user: answers; None where answers come from outside (`Conversation.reply`).
        meter: measures questions where a conversation has a threshold; by default by its likeliest outputs.
        detector: finds what may be ambiguous in a text for a language; where it finds nothing, nothing is asked.
        on_text: called with each piece of the output as soon as it is known, where the translator can.
    """

    def __init__(
        self,
        translator: Writer,
        user: User | None = None,
        *,
        meter: Meter | None = None,
        detector: Callable[[str, str], Sequence[Any]] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._translator, self._user = translator, user
        self._meter = meter or Meter(translator)
        self._detector, self._on_text = detector, on_text

    def run(self, conversation: Conversation, keep: str | Path | None = None) -> Conversation:
        """Go on until the output is there, or until an answer is due and there is no user.

        Args:
            keep: a file that holds the conversation after every turn.

        Raises:
            EndpointError: the translator's server can't be used; what was said until then is kept.
        """
        while conversation.step != "done" and not (conversation.step == "answer" and self._user is None):
            conversation = self.advance(conversation)
            if keep is not None:
                conversation.save(keep)
        return conversation

    def advance(self, conversation: Conversation) -> Conversation:
        """One turn more."""
        template = load_template(conversation.template)
        if conversation.step == "propose":
            return conversation.after(self._propose(conversation, template))
        if conversation.step == "write":
            return conversation.after(self._written(conversation, template))
        if conversation.step == "answer" and self._user is not None:
            answer, cost = self._user.answer(conversation)
            return conversation.reply(answer, by=self._user.name, cost=cost)
        raise GraftError(f"The conversation is {conversation.step}: there is no turn to add.")

    def _propose(self, conversation: Conversation, template: Template) -> Turn:
        if self._detector is not None and not self._detector(conversation.text, conversation.target):
            return Skipped(reason="nothing", said="no ambiguity found by rules")
        prompt = prompts.ask(template, conversation.target, conversation.text, conversation.told)
        reply = self._translator.write(prompt)
        said = reply.text.strip()
        found = prompts.read_question(said, prompt.label)
        if found is None:
            nothing = prompts.same_word(said.removeprefix(f"{prompt.label}:"), template.nothing)
            return Skipped(reason="nothing" if nothing else "no-question", said=said, cost=reply.cost)
        question = Question(text=found[0], answers=found[1])
        if any(needed.same_form(one.text) == needed.same_form(question.text) for one in conversation.questions):
            return Skipped(reason="repeated", said=said, cost=reply.cost)
        return self._judged(conversation, question, said, reply.cost)

    def _judged(self, conversation: Conversation, question: Question, said: str, cost: Cost) -> Turn:
        """The question put, or skipped where its answer would change too little."""
        if conversation.threshold is None:
            return Asked(question=question, cost=cost)
        gain, more = self._meter.measure(conversation, question)
        if gain is None or gain.bits > conversation.threshold:
            return Asked(question=question, gain=gain, cost=cost + more)
        return Skipped(reason="not-needed", said=said, question=question, gain=gain, cost=cost + more)

    def _written(self, conversation: Conversation, template: Template) -> Written:
        if (judged := conversation.settled) is not None:  # it was written already, when the question was judged
            return Written(output=judged.likeliest, how="settled", by=self._translator.name)
        if (known := _written_before(conversation)) is not None:
            return Written(output=known, how="informed", by=self._translator.name)
        prompt = prompts.write(template, conversation.target, conversation.text, conversation.told)
        how: How = "informed" if conversation.told else "plain"
        return self._write(prompt, how)

    def _write(self, prompt: prompts.Prompt, how: How) -> Written:
        reply = self._translator.write(prompt, on_text=self._on_text)
        output = _without_label(reply, prompt)
        return Written(output=output, how=how, by=self._translator.name, cut=reply.cut, cost=reply.cost)


def _written_before(conversation: Conversation) -> str | None:
    """What was written under the last answer when its question was judged, if it is one of the candidates."""
    asked, answered = conversation.turns[-2:] if len(conversation.turns) > 1 else (None, None)
    if not (isinstance(asked, Asked) and isinstance(answered, Answered) and asked.gain is not None):
        return None
    known = dict(zip(asked.question.answers, asked.gain.outputs, strict=True)).get(answered.answer, ())
    return known[0] if len(known) == 1 else None


def _without_label(reply: Reply, prompt: prompts.Prompt) -> str:
    """What a model wrote, without the word that stands before replies in exemplars."""
    return reply.text.strip().removeprefix(f"{prompt.label}:").strip()


def baseline(
    translator: Writer,
    text: str,
    template: str,
    target: str | None = None,
    *,
    context: str | None = None,
    any_language: bool = False,
) -> Written:
    """The text written without a conversation: with its context (LLMwCXT), or with nothing more (LLMnoExtra).

    Raises:
        DataError: the text is empty.
        RecipeError: the template does not write that language.
    """
    found = load_template(template)
    conversation = Conversation.start(text, template, target, budget=0, any_language=any_language)
    if context is None:
        prompt = prompts.plain(found, conversation.target, text)
    else:
        prompt = prompts.with_context(found, conversation.target, text, context)
    return Chain(translator)._write(prompt, "plain" if context is None else "informed")
