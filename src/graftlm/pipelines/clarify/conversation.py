"""A clarifying conversation: an immutable sequence of turns about one text.

    propose ─► asked ─► answered ─► propose again, or write
       │          └───► refused ──► write
       ├─► skipped (the answer would change too little) ─► propose again, or write
       └─► skipped (nothing to ask) ─► write

All questions come before the output, and at most `budget` questions are proposed. A conversation never changes: each
turn makes a new one. Its JSON form holds the whole state.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from graftlm.config import Config, read_yaml
from graftlm.errors import DataError, RecipeError
from graftlm.files.reading import read_text
from graftlm.files.writing import write_atomically
from graftlm.pipelines.clarify.prompts import Exchange
from graftlm.pipelines.clarify.templates import load_template

FORMAT = 2
OutputMode = Literal["informed", "settled", "plain"]
Step = Literal["propose", "answer", "write", "done"]
LANGUAGES = Path(__file__).parent / "word_lists" / "languages.yaml"


class Cost(Config):
    """Calls of a model and tokens, as its server or tokenizer counts them."""

    calls: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: value + getattr(other, name) for name, value in self})


class Question(Config):
    """A question, and the answers that its author considers possible."""

    text: str = Field(min_length=1)
    answers: tuple[str, ...] = ()


class Gain(Config):
    """The estimated information gain of a question.

    Args:
        bits: the expected gain (equation 1.19, see `gain`).
        prior: the probability of each candidate answer.
        outputs: the outputs under each answer; several where outputs were sampled.
        by_answer: the gain of each answer, in bits.
        likeliest: the output with the largest probability over all answers.
        estimator: decoded counts outputs; likelihood compares their probabilities.
    """

    bits: float = Field(ge=0)
    prior: tuple[float, ...]
    outputs: tuple[tuple[str, ...], ...]
    by_answer: tuple[float, ...]
    likeliest: str
    estimator: Literal["decoded", "likelihood"] = "decoded"


class AskedTurn(Config):
    """A question was put to the user."""

    kind: Literal["asked"] = "asked"
    question: Question
    gain: Gain | None = None
    cost: Cost = Cost()


class SkippedTurn(Config):
    """No question was put to the user.

    Args:
        reason: nothing: the translator or the rules found nothing to ask. no-question: the reply is no question.
            repeated: the question was asked before. unusable: it fits another text (see `questions`).
            not-needed: the gain is not above the threshold.
        reply: the translator's reply.
    """

    kind: Literal["skipped"] = "skipped"
    reason: Literal["nothing", "no-question", "repeated", "unusable", "not-needed"]
    reply: str = ""
    question: Question | None = None
    gain: Gain | None = None
    cost: Cost = Cost()

    def _problems(self) -> Iterator[str]:
        if self.reason == "not-needed" and (self.question is None or self.gain is None):
            yield "a question that was not needed comes with its gain"


class AnsweredTurn(Config):
    """The user answered."""

    kind: Literal["answered"] = "answered"
    answer: str = Field(min_length=1)
    author: str
    cost: Cost = Cost()


class RefusedTurn(Config):
    """The user gave no answer, or did not know one."""

    kind: Literal["refused"] = "refused"
    author: str
    cost: Cost = Cost()


class WrittenTurn(Config):
    """The output.

    Args:
        mode: informed: from answers. plain: from the text alone. settled: the likeliest output over all answers to a
            question that was not needed.
        author: the model's name.
        truncated: the model stopped at its limit of tokens.
    """

    kind: Literal["written"] = "written"
    output: str
    mode: OutputMode
    author: str
    truncated: bool = False
    cost: Cost = Cost()


Turn = Annotated[AskedTurn | SkippedTurn | AnsweredTurn | RefusedTurn | WrittenTurn, Field(discriminator="kind")]


class Conversation(Config):
    """One text and all turns about it so far.

    Args:
        format: version of the file format.
        template: name or file of the task's template.
        template_sha256: the template's hash at the start of the conversation.
        target: code of the output language.
        text: the user's query.
        budget: largest number of proposed questions (J in the paper).
        threshold: a question is asked if its expected gain in bits is larger; None asks every question.
    """

    format: Literal[2] = FORMAT
    template: str
    template_sha256: str
    target: str
    text: str
    budget: int = Field(1, ge=0)
    threshold: float | None = Field(None, ge=0, allow_inf_nan=False)
    turns: tuple[Turn, ...] = ()

    def _problems(self) -> Iterator[str]:
        for index, turn in enumerate(self.turns):
            expected = _TURNS[_next_step(self.turns[:index], self.budget)]
            if turn.kind not in expected:
                yield f"turn {index + 1} is {turn.kind}, but {' or '.join(expected)} is due there"

    @classmethod
    def start(
        cls,
        text: str,
        template: str,
        target: str | None = None,
        *,
        budget: int = 1,
        threshold: float | None = None,
        any_language: bool = False,
    ) -> Self:
        """A conversation before its first turn.

        Args:
            template: the name of a template, or its YAML file.
            target: code of the output language; optional if the template has one language.
            any_language: skip the check that the text is in the template's source language.

        Raises DataError if the text is empty, or clearly in another language than the template's source language, and
        RecipeError if the template does not exist, or does not write the language.
        """
        task = load_template(template)
        if not text.strip():
            raise DataError("The text is empty: give at least one word.")
        if not any_language:
            _check_language(text, task.source)
        values = {"template_sha256": task.sha256, "target": task.target(target), "budget": budget}
        return cls(template=template, text=text, threshold=threshold, **values)

    @property
    def step(self) -> Step:
        """The kind of the next turn."""
        return _next_step(self.turns, self.budget)

    @property
    def exchanges(self) -> list[Exchange]:
        """Questions and their answers, in order."""
        return [(turn.question.text, reply.answer) for turn, reply in self._answered()]

    @property
    def open_question(self) -> Question | None:
        """The question that waits for an answer."""
        last = self.turns[-1] if self.turns else None
        return last.question if isinstance(last, AskedTurn) else None

    @property
    def questions(self) -> list[Question]:
        """All proposed questions, asked or skipped."""
        turns = (turn for turn in self.turns if isinstance(turn, AskedTurn | SkippedTurn))
        return [turn.question for turn in turns if turn.question is not None]

    @property
    def settled(self) -> Gain | None:
        """The gain of the last question that was not needed, unless the user replied since then."""
        recent = itertools.takewhile(lambda turn: turn.kind not in ("answered", "refused"), reversed(self.turns))
        return next((turn.gain for turn in recent if isinstance(turn, SkippedTurn) and turn.gain is not None), None)

    @property
    def written(self) -> WrittenTurn | None:
        """The turn with the output, if there is one."""
        last = self.turns[-1] if self.turns else None
        return last if isinstance(last, WrittenTurn) else None

    @property
    def cost(self) -> Cost:
        """The sum over all turns."""
        return sum((turn.cost for turn in self.turns), Cost())

    def after(self, turn: Turn) -> Self:
        """The conversation with one more turn. Raises RecipeError if a turn of another kind is due."""
        return type(self).parse(dict(self) | {"turns": (*self.turns, turn)}, where="the conversation")

    def reply(self, answer: str | None, *, author: str = "person", cost: Cost | None = None) -> Self:
        """The conversation with the user's answer. None or white space counts as a refusal."""
        cost, text = cost or Cost(), (answer or "").strip()
        turn = AnsweredTurn(answer=text, author=author, cost=cost) if text else RefusedTurn(author=author, cost=cost)
        return self.after(turn)

    def _answered(self) -> Iterator[tuple[AskedTurn, AnsweredTurn]]:
        for turn, reply in zip(self.turns, self.turns[1:], strict=False):
            if isinstance(turn, AskedTurn) and isinstance(reply, AnsweredTurn):
                yield turn, reply

    def summary(self) -> dict[str, Any]:
        """Counts of questions, their gains in bits, the output and the cost, as JSON values.

        `gained_bits` has one value per answer: None where it was not measured, or the answer is no candidate.
        """
        turns, kinds = self.turns, Counter(turn.kind for turn in self.turns)
        gains = [
            dict(zip(turn.question.answers, turn.gain.by_answer, strict=True)).get(reply.answer) if turn.gain else None
            for turn, reply in self._answered()
        ]
        return {
            **{kind: kinds[kind] for kind in ("asked", "answered", "refused")},
            "saved": sum(isinstance(turn, SkippedTurn) and turn.reason == "not-needed" for turn in turns),
            "expected_bits": [
                turn.gain.bits for turn in turns if isinstance(turn, AskedTurn | SkippedTurn) and turn.gain
            ],
            "gained_bits": gains,
            "output": self.written.output if self.written else None,
            "mode": self.written.mode if self.written else None,
            "cost": self.cost.model_dump(),
        }

    def to_json(self) -> dict[str, Any]:
        """The conversation, its next step, its open question and its summary, as JSON values."""
        question = self.open_question
        return {
            "conversation": self.model_dump(mode="json"),
            "step": self.step,
            "question": question.model_dump(mode="json") if question else None,
            "summary": self.summary(),
        }

    def save(self, path: str | Path) -> Path:
        """Write the conversation to a file, atomically. Raises EvaluationError if the file can't be written."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False)
        return write_atomically(Path(path), text.encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a saved conversation.

        Raises DataError if the file is missing, invalid, or of another format version, and RecipeError if its template
        is missing, or was changed since the conversation began.
        """
        values = _read_json(Path(path))
        if values.get("format") != FORMAT:
            raise DataError(
                f"{path} is a conversation of format {values.get('format')!r}, but {FORMAT} is read here: go on with "
                "the version of graftlm that wrote it."
            )
        try:
            conversation = cls.parse(values, where=str(path))
        except RecipeError as error:
            raise DataError(f"{str(error).rstrip('.')}: this is no conversation that graft clarify wrote.") from None
        if load_template(conversation.template).sha256 != conversation.template_sha256:
            raise RecipeError(
                f"The template {conversation.template} was changed since {path} was begun: put it back, or begin anew."
            )
        return conversation


_TURNS: dict[Step, tuple[str, ...]] = {
    "propose": ("asked", "skipped"),
    "answer": ("answered", "refused"),
    "write": ("written",),
    "done": (),
}


def _next_step(turns: Sequence[Turn], budget: int) -> Step:
    last = turns[-1] if turns else None
    if isinstance(last, WrittenTurn):
        return "done"
    if isinstance(last, AskedTurn):
        return "answer"
    if isinstance(last, RefusedTurn) or (isinstance(last, SkippedTurn) and last.reason != "not-needed"):
        return "write"
    proposed = sum(isinstance(turn, AskedTurn | SkippedTurn) for turn in turns)
    return "propose" if proposed < budget else "write"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DataError(f"There is no conversation {path}: name the file of one, or begin one.")
    try:
        values = json.loads(read_text(path))
    except ValueError:
        raise DataError(f"{path} is not valid JSON, but a conversation is expected: begin it anew.") from None
    if not isinstance(values, dict):
        raise DataError(f"{path} holds no conversation: begin it anew.")
    return values


def _check_language(text: str, source: str) -> None:
    """Reject a text that is clearly not in the source language; single words and unknown languages pass.

    A text is rejected if most letters are not Latin, or another language has at least two more of its small words.

    Raises DataError if the text is in another language.
    """
    languages = read_yaml(LANGUAGES)
    if source not in languages:
        return
    letters = [char for char in text if char.isalpha()]
    latin = sum(unicodedata.name(char, "").startswith("LATIN") for char in letters)
    words = set(re.findall(r"[^\W\d_]+", text.casefold()))
    counts = {code: len(words & set(language["words"].split())) for code, language in languages.items()}
    best = max(counts, key=lambda code: counts[code])
    if latin < len(letters) / 2:
        language = "in other letters"
    elif counts[best] >= counts[source] + 2:
        language = languages[best]["name"]
    else:
        return
    raise DataError(
        f"The text looks as if it were {language}, but {languages[source]['name']} is expected: begin with that, or "
        "use a template of your own with another source."
    )
