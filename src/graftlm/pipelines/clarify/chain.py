"""Interactive-chain prompting: propose a question, let the user answer it, write the output.

Each step adds a turn to an immutable `Conversation`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from graftlm.config import read_yaml
from graftlm.errors import GraftError
from graftlm.pipelines.clarify import prompts
from graftlm.pipelines.clarify.ambiguity import word_list
from graftlm.pipelines.clarify.conversation import (
    LANGUAGES,
    AnsweredTurn,
    AskedTurn,
    Conversation,
    Question,
    SkippedTurn,
    Turn,
    WrittenTurn,
)
from graftlm.pipelines.clarify.costs import Cost
from graftlm.pipelines.clarify.gain import GainEstimator, normalize_text
from graftlm.pipelines.clarify.models import ChatModel
from graftlm.pipelines.clarify.templates import Exemplar, InstructionName, load_template

_QUOTED = re.compile(r"[\"“„«]([^\"“”„«»]+)[\"”“»]")
_ASKS_FOR = re.compile(r"^(?:what|who|which)\b.*\b(?:is|are|was|were) (\w+)\?$", re.IGNORECASE)


class User(Protocol):
    """Answers the questions of a chain."""

    @property
    def name(self) -> str:
        """Who answers, as conversations record it."""
        ...

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        """Answer the open question of a conversation, which must have one.

        Returns:
            The answer and its cost. None as the answer refuses.
        """
        ...


class HumanUser:
    """A person.

    Args:
        ask: shows a question with its possible answers and returns the answer; None or white space refuses.
    """

    name = "person"

    def __init__(self, ask: Callable[[str, Sequence[str]], str | None]) -> None:
        self._ask = ask

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        """Ask the person the open question. The cost is 0."""
        question = _open_question(conversation)
        answer = self._ask(question.text, question.answers)
        return answer, Cost()


class SimulatedUser:
    """A model that answers from a context, and refuses if the context gives no answer.

    Args:
        model: the model.
        context: what the simulated user knows.
        template: name or file of the template whose exemplars the model sees; by default the conversation's.
    """

    def __init__(self, model: ChatModel, context: str, template: str | None = None) -> None:
        self._model = model
        self._context = context
        self._template = template

    @property
    def name(self) -> str:
        """The name of the model, marked as that of a simulated user."""
        return f"simulated by {self._model.name}"

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        """Answer the open question with the first line of the model's reply, or refuse if it is `no_answer`.

        Raises:
            GraftError: the model can't reply, or the template can't be loaded.
        """
        question = _open_question(conversation)
        template = conversation.task if self._template is None else load_template(self._template)
        prompt = prompts.build_prompt(
            template,
            "user",
            conversation.target,
            conversation.text,
            context=self._context,
            question=question.text,
        )
        reply = self._model.generate(prompt)
        first_line = reply.text.strip().partition("\n")[0]
        answer = prompt.without_label(first_line)
        if prompts.is_word(answer, template.no_answer):
            return None, reply.cost
        return answer, reply.cost


class RecordedUser:
    """Gives answers that were recorded in advance, and refuses a question without an answer.

    Args:
        answers: answers by the text of the question, or in the order of the questions. If a resumed conversation ends
            with the first answers of the sequence, these are not given again.
    """

    name = "recorded"

    def __init__(self, answers: Mapping[str, str] | Sequence[str]) -> None:
        # Conversations record answers without outer white space.
        self._answers = answers if isinstance(answers, Mapping) else [answer.strip() for answer in answers]

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        """Return the next recorded answer, or that to the open question. The cost is 0."""
        question = _open_question(conversation)
        if isinstance(self._answers, Mapping):
            return self._answers.get(question.text), Cost()
        given = [answer for _, answer in conversation.exchanges]
        used = _overlap(given, self._answers)
        if used < len(self._answers):
            return self._answers[used], Cost()
        return None, Cost()

    def unused(self, conversation: Conversation) -> list[str]:
        """Return the answers that no question of a conversation has asked for.

        Args:
            conversation: the conversation after this user's last answer.
        """
        if isinstance(self._answers, Mapping):
            asked = {turn.question.text for turn in conversation.turns if isinstance(turn, AskedTurn)}
            return [answer for question, answer in self._answers.items() if question not in asked]
        given = [answer for _, answer in conversation.exchanges]
        left = self._answers[_overlap(given, self._answers) :]
        return [answer for answer in left if answer]


def _overlap(given: Sequence[str], answers: Sequence[str]) -> int:
    """Return the length of the longest beginning of `answers` with which `given` ends."""
    for count in range(min(len(given), len(answers)), 0, -1):
        if list(given[-count:]) == list(answers[:count]):
            return count
    return 0


def _open_question(conversation: Conversation) -> Question:
    assert conversation.open_question is not None, "no question is open"
    return conversation.open_question


class Chain:
    """Adds turns to conversations, with a model that proposes questions and writes outputs.

    Args:
        translator: proposes questions and writes outputs.
        user: answers the questions; None if answers come from outside (`Conversation.reply`).
        gain_estimator: estimates the gain of questions if the conversation has a threshold; by default from greedy
            outputs of the translator.
        detector: called with a text and the code of its output language; returns the ambiguities that it finds. If it
            finds none, nothing is asked. None lets the translator decide.
        on_text: called with each new piece of the reply that becomes the output, its label included, or once with the
            whole reply if the translator can't stream. It is not called if the output is already known from the
            estimate of a gain.
    """

    def __init__(
        self,
        translator: ChatModel,
        user: User | None = None,
        *,
        gain_estimator: GainEstimator | None = None,
        detector: Callable[[str, str], Sequence[object]] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._translator = translator
        self._user = user
        self._gain_estimator = gain_estimator or GainEstimator(translator)
        self._detector = detector
        self._on_text = on_text

    def run(self, conversation: Conversation, keep: str | Path | None = None) -> Conversation:
        """Add turns until the output is written, or until an answer is due and there is no user.

        Args:
            conversation: the conversation so far.
            keep: a file to which the conversation is saved after every turn.

        Raises:
            EndpointError: the server of a model failed. Turns that were saved to `keep` before are not lost.
            DataError: a prompt does not fit a model on this machine.
            EvaluationError: `keep` can't be written, or the gain of a question can't be estimated.
            RecipeError: the template can't be loaded.
        """
        while not self._has_to_stop(conversation):
            conversation = self.advance(conversation)
            if keep is not None:
                conversation.save(keep)
        return conversation

    def _has_to_stop(self, conversation: Conversation) -> bool:
        waits_for_answer = conversation.step == "answer" and self._user is None
        return conversation.step == "done" or waits_for_answer

    def advance(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its next turn.

        Args:
            conversation: the conversation so far.

        Raises:
            GraftError: the conversation is done, or waits for an answer and the chain has no user.
            EndpointError: the server of a model failed.
            DataError: a prompt does not fit a model on this machine.
            EvaluationError: the gain of a question can't be estimated.
            RecipeError: the template can't be loaded.
        """
        if conversation.step == "propose":
            return conversation.after(self._propose(conversation))
        if conversation.step == "write":
            return conversation.after(self._write(conversation))
        if conversation.step == "answer" and self._user is not None:
            answer, cost = self._user.answer(conversation)
            return conversation.reply(answer, author=self._user.name, cost=cost)
        if conversation.step == "done":
            raise GraftError("The conversation has its output, so no turn can be added: start a new conversation.")
        raise GraftError(
            "The conversation waits for an answer, but the chain has no user: add the answer with Conversation.reply, "
            "or give the chain a user."
        )

    def _propose(self, conversation: Conversation) -> Turn:
        """Let the translator propose a question, and decide whether to ask it."""
        if self._detector is not None and not self._detector(conversation.text, conversation.target):
            return SkippedTurn(reason="nothing", reply="no ambiguity found by rules")
        prompt = _prompt(conversation, "ask")
        reply = self._translator.generate(prompt)
        text = reply.text.strip()
        parsed = prompts.parse_question(text, prompt.label)
        if parsed is None:
            no_question = conversation.task.no_question
            has_nothing = prompts.is_word(prompt.without_label(text), no_question)
            return SkippedTurn(
                reason="nothing" if has_nothing else "no-question",
                reply=text,
                cost=reply.cost,
            )
        question_text, answers = parsed
        question = Question(text=question_text, answers=answers)
        earlier = {normalize_text(proposed.text) for proposed in conversation.questions}
        if normalize_text(question.text) in earlier:
            return SkippedTurn(reason="repeated", reply=text, cost=reply.cost)
        usable = usable_question(conversation, question)
        if usable is None:
            return SkippedTurn(reason="unusable", reply=text, question=question, cost=reply.cost)
        return self._judge(conversation, usable, text, reply.cost)

    def _judge(self, conversation: Conversation, question: Question, reply: str, cost: Cost) -> Turn:
        """Ask the question, or skip it if its gain does not exceed the conversation's threshold."""
        if conversation.threshold is None:
            return AskedTurn(question=question, cost=cost)
        gain, gain_cost = self._gain_estimator.estimate(conversation, question)
        total = cost + gain_cost
        if gain is None or gain.bits > conversation.threshold:
            return AskedTurn(question=question, gain=gain, cost=total)
        return SkippedTurn(
            reason="not-needed",
            reply=reply,
            question=question,
            gain=gain,
            cost=total,
        )

    def _write(self, conversation: Conversation) -> WrittenTurn:
        """Write the output, or take it from the estimate of a gain if it was generated there."""
        author = self._translator.name
        if conversation.settled is not None:
            return WrittenTurn(output=conversation.settled.likeliest, mode="settled", author=author)
        judged = _judged_output(conversation)
        if judged is not None:
            return WrittenTurn(output=judged, mode="informed", author=author)
        is_informed = bool(conversation.exchanges)
        prompt = _prompt(conversation, "write" if is_informed else "plain")
        reply = self._translator.generate(prompt, on_text=self._on_text)
        return WrittenTurn(
            output=prompt.without_label(reply.text),
            mode="informed" if is_informed else "plain",
            author=author,
            truncated=reply.truncated,
            cost=reply.cost,
        )


def _prompt(conversation: Conversation, name: InstructionName) -> prompts.Prompt:
    template = conversation.task
    return prompts.build_prompt(
        template,
        name,
        conversation.target,
        conversation.text,
        exchanges=conversation.exchanges,
    )


def _judged_output(conversation: Conversation) -> str | None:
    """Return the output that the gain estimate generated for the last answer, if there is exactly one."""
    if len(conversation.turns) < 2:
        return None
    asked, answered = conversation.turns[-2:]
    if not isinstance(asked, AskedTurn) or not isinstance(answered, AnsweredTurn) or asked.gain is None:
        return None
    by_answer = dict(zip(asked.question.answers, asked.gain.outputs, strict=True))
    outputs = by_answer.get(answered.answer, ())
    return outputs[0] if len(outputs) == 1 else None


def usable_question(conversation: Conversation, question: Question) -> Question | None:
    """Remove the options of a question that fit another text, since small models copy questions from the exemplars.

    A question that quotes words from elsewhere, or repeats the text, is not asked. An option is kept if all of its
    words are words of the text, if it names a gender, or under the condition of the first row that applies:

    | option | condition |
    |---|---|
    | from an exemplar about formality | the text has *you* |
    | of a question about a pronoun | never |
    | from another exemplar | the option or the text of the exemplar shares a word with the text |
    | any other | the option or the question shares a word with the text |

    The words of the text include those of earlier answers. The most frequent words of English do not count, and an
    option that has no other words is removed. If fewer than two options remain, a question that quotes the text is
    asked without options, and any other question is not asked.

    Args:
        conversation: the conversation so far.
        question: the proposed question.

    Returns:
        The question with the remaining options, or None if it should not be asked.
    """
    known = [conversation.text, *(answer for _, answer in conversation.exchanges)]
    known_words = _words(" ".join(known))
    quoted = set()
    for quotation in _QUOTED.findall(question.text):
        quoted |= _words(quotation)
    if not quoted <= known_words or question.text.strip() == conversation.text.strip():
        return None
    exemplars = conversation.task.exemplars
    answers = [answer for answer in question.answers if _fits(answer, question, quoted, known_words, exemplars)]
    if question.answers and len(answers) < 2:
        return Question(text=question.text) if quoted else None
    return Question(text=question.text, answers=tuple(answers))


def _fits(
    answer: str,
    question: Question,
    quoted: set[str],
    known_words: set[str],
    exemplars: Sequence[Exemplar],
) -> bool:
    """Return whether an option fits the text, rather than being copied from an exemplar about another text.

    Args:
        answer: the option.
        question: the question that offers it.
        quoted: the words that the question quotes.
        known_words: the words of the text and of earlier answers.
        exemplars: the exemplars that the model has seen.
    """
    words = _words(answer)
    content = _content(words)
    is_known = bool(content) and content <= known_words
    if words <= word_list("no_answers") or is_known or words & word_list("question_genders"):
        return bool(content)
    sources = [exemplar for exemplar in exemplars if content <= _words(" ".join(exemplar.answers))]
    if any(exemplar.kind == "formality" for exemplar in sources):
        return "you" in known_words
    if _asks_for_pronoun(question, quoted):
        return False
    if content & known_words:
        return True
    if any(_content(_words(exemplar.text)) & known_words for exemplar in sources):
        return True
    if sources:
        return False
    return bool(quoted) or bool(_content(_words(question.text)) & known_words)


def _asks_for_pronoun(question: Question, quoted: set[str]) -> bool:
    """Return whether a question asks whom or what a pronoun refers to."""
    asked_for = set(quoted)
    match = _ASKS_FOR.match(question.text)
    if match is not None:
        asked_for |= _words(match[1])
    return not asked_for.isdisjoint(word_list("question_pronouns"))


def _words(text: str) -> set[str]:
    """Return the words of a text in lower case and without the s of plurals; all forms of *you* become "you"."""
    words = set()
    for word in re.findall(r"[^\W_]+", text.casefold()):
        if word in word_list("forms_of_you"):
            words.add("you")
        elif len(word) > 3:
            words.add(word.removesuffix("s"))
        else:
            words.add(word)
    return words


def _content(words: set[str]) -> set[str]:
    """Return the words that are not among the most frequent words of English."""
    return words - _small_words()


@cache
def _small_words() -> set[str]:
    frequent = _words(read_yaml(LANGUAGES)["en"]["words"])
    return frequent | word_list("no_answers")
