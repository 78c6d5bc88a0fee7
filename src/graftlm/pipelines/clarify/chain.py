"""Interactive-chain prompting: propose a question, let the user answer, write. Each step adds one turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from graftlm.config import read_yaml
from graftlm.errors import GraftError
from graftlm.pipelines.clarify import prompts
from graftlm.pipelines.clarify.ambiguity import word_list
from graftlm.pipelines.clarify.conversation import (
    LANGUAGES,
    AnsweredTurn,
    AskedTurn,
    Conversation,
    Cost,
    Question,
    SkippedTurn,
    Turn,
    WrittenTurn,
)
from graftlm.pipelines.clarify.gain import GainEstimator, normalize_text
from graftlm.pipelines.clarify.models import ChatModel
from graftlm.pipelines.clarify.templates import InstructionName, load_template

_QUOTED = re.compile(r"[\"“„«]([^\"“”„«»]+)[\"”“»]")
_ASKS_FOR = re.compile(r"^(?:what|who|which)\b.*\b(?:is|are|was|were) (\w+)\?$", re.IGNORECASE)


class User(Protocol):
    """Answers questions."""

    @property
    def name(self) -> str: ...

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        """The answer to the conversation's open question, or None; and its cost."""
        ...


class HumanUser:
    """A person. `ask` shows a question with its possible answers and returns the answer; None or blanks refuse."""

    name = "person"

    def __init__(self, ask: Callable[[str, Sequence[str]], str | None]) -> None:
        self._ask = ask

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        question = _open_question(conversation)
        return self._ask(question.text, question.answers), Cost()


class SimulatedUser:
    """A model that answers from a context, and refuses where the context gives no answer.

    It sees the exemplars of `template`, by default the conversation's.
    """

    def __init__(self, model: ChatModel, context: str, template: str | None = None) -> None:
        self._model, self._context, self._template = model, context, template

    @property
    def name(self) -> str:
        return f"simulated by {self._model.name}"

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        question, template = _open_question(conversation), load_template(self._template or conversation.template)
        prompt = prompts.build_prompt(
            template, "user", conversation.target, conversation.text, context=self._context, question=question.text
        )
        reply = self._model.generate(prompt)
        answer = prompt.without_label(reply.text.strip().partition("\n")[0])
        return (None if prompts.is_word(answer, template.no_answer) else answer), reply.cost


class RecordedUser:
    """Answers that were given in advance, by question or in order. A question without an answer is refused.

    Answers in order that a resumed conversation ends with are taken as given already.
    """

    name = "recorded"

    def __init__(self, answers: Mapping[str, str] | Sequence[str]) -> None:
        self._answers = answers

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        question = _open_question(conversation)
        if isinstance(self._answers, Mapping):
            return self._answers.get(question.text), Cost()
        given = [answer for _, answer in conversation.exchanges]
        counts = range(min(len(given), len(self._answers)), 0, -1)
        used = next((count for count in counts if given[-count:] == list(self._answers[:count])), 0)
        return next(iter(self._answers[used:]), None), Cost()


def _open_question(conversation: Conversation) -> Question:
    assert conversation.open_question is not None, "no question is open"
    return conversation.open_question


class Chain:
    """Leads conversations from one turn to the next.

    Args:
        translator: proposes questions and writes outputs.
        user: answers; None if answers come from outside (`Conversation.reply`).
        gain_estimator: judges questions if the conversation has a threshold; by default with greedy outputs.
        detector: finds ambiguities in a text for an output language. If it finds none, nothing is asked.
        on_text: called with each new part of the output, if the translator can stream.
    """

    def __init__(
        self,
        translator: ChatModel,
        user: User | None = None,
        *,
        gain_estimator: GainEstimator | None = None,
        detector: Callable[[str, str], Sequence[Any]] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._translator, self._user = translator, user
        self._gain_estimator = gain_estimator or GainEstimator(translator)
        self._detector, self._on_text = detector, on_text

    def run(self, conversation: Conversation, keep: str | Path | None = None) -> Conversation:
        """Add turns until the output is written, or until an answer is due and there is no user.

        `keep` is a file to save the conversation to after every turn.

        Raises EndpointError if the translator's server fails; earlier turns are kept.
        """
        while conversation.step != "done" and not (conversation.step == "answer" and self._user is None):
            conversation = self.advance(conversation)
            if keep is not None:
                conversation.save(keep)
        return conversation

    def advance(self, conversation: Conversation) -> Conversation:
        """The conversation with its next turn.

        Raises GraftError if the conversation is done, or waits for an answer from outside, and EndpointError if the
        translator's server fails.
        """
        if conversation.step == "propose":
            return conversation.after(self._propose(conversation))
        if conversation.step == "write":
            return conversation.after(self._output(conversation))
        if conversation.step == "answer" and self._user is not None:
            answer, cost = self._user.answer(conversation)
            return conversation.reply(answer, author=self._user.name, cost=cost)
        raise GraftError(f"The conversation is {conversation.step}: there is no turn to add.")

    def _propose(self, conversation: Conversation) -> Turn:
        if self._detector is not None and not self._detector(conversation.text, conversation.target):
            return SkippedTurn(reason="nothing", reply="no ambiguity found by rules")
        template = load_template(conversation.template)
        prompt = _prompt(conversation, "ask")
        reply = self._translator.generate(prompt)
        text = reply.text.strip()
        parsed = prompts.parse_question(text, prompt.label)
        if parsed is None:
            nothing = prompts.is_word(prompt.without_label(text), template.no_question)
            return SkippedTurn(reason="nothing" if nothing else "no-question", reply=text, cost=reply.cost)
        question = Question(text=parsed[0], answers=parsed[1])
        earlier = {normalize_text(proposed.text) for proposed in conversation.questions}
        if normalize_text(question.text) in earlier:
            return SkippedTurn(reason="repeated", reply=text, cost=reply.cost)
        if (usable := usable_question(conversation, question)) is None:
            return SkippedTurn(reason="unusable", reply=text, question=question, cost=reply.cost)
        return self._judge(conversation, usable, text, reply.cost)

    def _judge(self, conversation: Conversation, question: Question, reply: str, cost: Cost) -> Turn:
        """Asks the question, or skips it if its gain is not above the conversation's threshold."""
        if conversation.threshold is None:
            return AskedTurn(question=question, cost=cost)
        gain, gain_cost = self._gain_estimator.estimate(conversation, question)
        if gain is None or gain.bits > conversation.threshold:
            return AskedTurn(question=question, gain=gain, cost=cost + gain_cost)
        return SkippedTurn(reason="not-needed", reply=reply, question=question, gain=gain, cost=cost + gain_cost)

    def _output(self, conversation: Conversation) -> WrittenTurn:
        if (gain := conversation.settled) is not None:  # the output was generated when the question was judged
            return WrittenTurn(output=gain.likeliest, mode="settled", author=self._translator.name)
        if (output := _judged_output(conversation)) is not None:
            return WrittenTurn(output=output, mode="informed", author=self._translator.name)
        name, mode = ("write", "informed") if conversation.exchanges else ("plain", "plain")
        prompt = _prompt(conversation, name)
        reply = self._translator.generate(prompt, on_text=self._on_text)
        values = {"mode": mode, "author": self._translator.name, "truncated": reply.truncated, "cost": reply.cost}
        return WrittenTurn(output=prompt.without_label(reply.text), **values)


def _prompt(conversation: Conversation, name: InstructionName) -> prompts.Prompt:
    template = load_template(conversation.template)
    exchanges = conversation.exchanges
    return prompts.build_prompt(template, name, conversation.target, conversation.text, exchanges=exchanges)


def _judged_output(conversation: Conversation) -> str | None:
    """The output that was generated under the last answer when its question was judged, if there is one."""
    question, answer = conversation.turns[-2:] if len(conversation.turns) > 1 else (None, None)
    if not (isinstance(question, AskedTurn) and isinstance(answer, AnsweredTurn) and question.gain is not None):
        return None
    outputs = dict(zip(question.question.answers, question.gain.outputs, strict=True)).get(answer.answer, ())
    return outputs[0] if len(outputs) == 1 else None


def usable_question(conversation: Conversation, question: Question) -> Question | None:
    """The question without options that fit another text, or None if it should not be asked: README.md has the rule.

    Less than two options are no choice: then a question that quotes the text is asked without options, others are not.
    """
    case = _words(" ".join([conversation.text, *(answer for _, answer in conversation.exchanges)]))
    quoted = [word for text in _QUOTED.findall(question.text) for word in _words(text)]
    if not case.issuperset(quoted) or question.text.strip() == conversation.text.strip():
        return None
    answers = tuple(answer for answer in question.answers if _fits(answer, question, quoted, conversation, case))
    if len(answers) < 2 and question.answers:
        return Question(text=question.text) if quoted else None
    return Question(text=question.text, answers=answers)


def _fits(answer: str, question: Question, quoted: list[str], conversation: Conversation, case: set[str]) -> bool:
    words, exemplars = _words(answer), load_template(conversation.template).exemplars
    content, genders = _content(words), bool(words & word_list("question_genders"))
    if words <= word_list("no_answers") or (content and content <= case) or genders:
        return bool(content)
    sources = [exemplar for exemplar in exemplars if content <= _words(" ".join(exemplar.answers))]
    if any(exemplar.kind == "formality" for exemplar in sources):
        return "you" in case
    asked_for = _ASKS_FOR.match(question.text)
    if word_list("question_pronouns") & {*quoted, *([] if asked_for is None else _words(asked_for[1]))}:
        return False
    if content & case or any(_content(_words(exemplar.text)) & case for exemplar in sources):
        return True
    return not sources and bool(quoted or _content(_words(question.text)) & case)


def _words(text: str) -> set[str]:
    """The words of a text in lower case, without the s of plurals; all forms of *you* are one."""
    words = re.findall(r"[^\W_]+", text.casefold())
    return {
        "you" if word in word_list("forms_of_you") else word.removesuffix("s") if len(word) > 3 else word
        for word in words
    }


def _content(words: set[str]) -> set[str]:
    """The words that are no small words of English."""
    return words - _small_words()


@cache
def _small_words() -> set[str]:
    return _words(read_yaml(LANGUAGES)["en"]["words"]) | word_list("no_answers")
