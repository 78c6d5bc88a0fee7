"""A clarifying conversation: an immutable sequence of turns about one text.

    propose ─► asked ─► answered ─► propose again, or write
       │          └───► refused ──► write
       ├─► skipped (the answer would change too little) ─► propose again, or write
       └─► skipped (nothing to ask) ─► write

All questions come before the output, and at most `budget` questions are proposed. Conversations are immutable: adding a
turn returns a new one. The JSON form contains the whole state.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_serializer

from graftlm.config import Config, read_yaml
from graftlm.data.table_files import type_name
from graftlm.errors import DataError, RecipeError, first_line
from graftlm.files.reading import read_text
from graftlm.files.writing import write_atomically
from graftlm.pipelines.clarify.costs import Cost
from graftlm.pipelines.clarify.prompts import Exchange
from graftlm.pipelines.clarify.templates import Template, load_template

FORMAT = 2
OutputMode = Literal["informed", "settled", "plain"]
Step = Literal["propose", "answer", "write", "done"]
LANGUAGES = Path(__file__).parent / "word_lists" / "languages.yaml"


class Question(Config):
    """A question.

    Args:
        text: the question.
        answers: the answers that the translator considers possible; empty for an open question.
    """

    text: str = Field(min_length=1)
    answers: tuple[str, ...] = ()


class Gain(Config):
    """The estimated information gain of a question.

    Args:
        bits: the expected gain in bits (equation 1.19, see `gain`).
        prior: the probability of each candidate answer.
        outputs: the outputs under each answer; several if outputs were sampled.
        by_answer: the gain of each answer, in bits.
        likeliest: the output with the largest probability over all answers.
        estimator: decoded uses frequencies of outputs, likelihood uses their probabilities.
    """

    bits: float = Field(ge=0)
    prior: tuple[float, ...]
    outputs: tuple[tuple[str, ...], ...]
    by_answer: tuple[float, ...]
    likeliest: str
    estimator: Literal["decoded", "likelihood"] = "decoded"


class AskedTurn(Config):
    """The user was asked a question.

    Args:
        question: the question.
        gain: its estimated gain, if the conversation has a threshold and the question has at least two answers.
        cost: the cost of the question and of the estimate.
    """

    kind: Literal["asked"] = "asked"
    question: Question
    gain: Gain | None = None
    cost: Cost = Cost()


class SkippedTurn(Config):
    """The user was not asked a question.

    Args:
        reason: one of

            - nothing: the translator or the rules found nothing to ask.
            - no-question: the translator's reply contains no question.
            - repeated: the question was proposed before.
            - unusable: the question fits another text (see `chain.usable_question`).
            - not-needed: the gain does not exceed the threshold.
        reply: the translator's reply.
        question: the proposed question, if it was judged.
        gain: its estimated gain, if the question was not needed.
        cost: the cost of the question and of the estimate.
    """

    kind: Literal["skipped"] = "skipped"
    reason: Literal["nothing", "no-question", "repeated", "unusable", "not-needed"]
    reply: str = ""
    question: Question | None = None
    gain: Gain | None = None
    cost: Cost = Cost()

    def _problems(self) -> Iterator[str]:
        if self.reason == "not-needed" and (self.question is None or self.gain is None):
            yield "a turn skipped as not-needed should have a question and its gain"


class AnsweredTurn(Config):
    """The user answered.

    Args:
        answer: the answer.
        author: who answered.
        cost: the cost of the answer.
    """

    kind: Literal["answered"] = "answered"
    answer: str = Field(min_length=1)
    author: str
    cost: Cost = Cost()


class RefusedTurn(Config):
    """The user gave no answer.

    Args:
        author: who refused.
        cost: the cost of the refusal.
    """

    kind: Literal["refused"] = "refused"
    author: str
    cost: Cost = Cost()


class WrittenTurn(Config):
    """The output was written.

    Args:
        output: the output.
        mode: informed uses answers, plain only the text; settled is the likeliest output over all answers to a question
            that was not needed.
        author: name of the model.
        truncated: whether the model stopped at its limit of tokens.
        cost: the cost of the output; 0 if it was generated when a question was judged.
    """

    kind: Literal["written"] = "written"
    output: str
    mode: OutputMode
    author: str
    truncated: bool = False
    cost: Cost = Cost()


Turn = Annotated[AskedTurn | SkippedTurn | AnsweredTurn | RefusedTurn | WrittenTurn, Field(discriminator="kind")]


class Conversation(Config):
    """A text and all turns about it so far.

    Args:
        format: version of the file format.
        template: name or file of the task's template.
        exemplars: file of exemplars that replace the template's; None keeps the template's own.
        template_sha256: hash of the template, with its exemplars, at the start of the conversation.
        target: code of the output language.
        text: the user's query.
        budget: maximum number of proposed questions (J in the paper).
        threshold: expected gain in bits above which a question is asked; None asks every question.
        turns: the turns so far.
    """

    format: Literal[2] = FORMAT
    template: str
    exemplars: str | None = None
    template_sha256: str
    target: str
    text: str
    budget: int = Field(1, ge=0)
    threshold: float | None = Field(None, ge=0, allow_inf_nan=False)
    turns: tuple[Turn, ...] = ()

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out the file of exemplars if there is none, so that earlier conversations keep their form."""
        values = serialize(self)
        if values.get("exemplars") is None:
            values.pop("exemplars", None)
        return {"format": self.format} | values

    def _problems(self) -> Iterator[str]:
        for index, turn in enumerate(self.turns):
            expected = _TURNS[_next_step(self.turns[:index], self.budget)]
            if turn.kind not in expected:
                yield f"turn {index + 1} is {turn.kind}, but {' or '.join(expected) or 'no turn'} is expected there"

    @classmethod
    def start(
        cls,
        text: str,
        template: str,
        target: str | None = None,
        *,
        budget: int = 1,
        threshold: float | None = None,
        exemplars: str | None = None,
        any_language: bool = False,
    ) -> Self:
        """Create a conversation without turns.

        Args:
            text: the user's query.
            template: name or YAML file of the template.
            target: code of the output language; optional if the template has a single language.
            budget: maximum number of proposed questions.
            threshold: expected gain in bits above which a question is asked; None asks every question.
            exemplars: YAML file of exemplars that replace the template's (`templates.ExemplarFile`).
            any_language: skip the check that the text is in the template's source language.

        Raises:
            DataError: the text is empty, or clearly not in the template's source language.
            RecipeError: the template or its exemplars can't be loaded, lack the output language, or have several and
                `target` is None; or `budget` or `threshold` is negative.
        """
        task = load_template(template, exemplars)
        if not text.strip():
            raise DataError("The text is empty: give at least one word.")
        if not any_language:
            _check_language(text, task.source)
        return cls(
            template=template,
            exemplars=exemplars,
            template_sha256=task.sha256,
            target=task.target(target),
            text=text,
            budget=budget,
            threshold=threshold,
        )

    @property
    def task(self) -> Template:
        """The template with the conversation's exemplars.

        Raises:
            RecipeError: it can't be loaded.
        """
        return load_template(self.template, self.exemplars)

    @property
    def step(self) -> Step:
        """The next step: propose, answer or write; done if the output is written."""
        return _next_step(self.turns, self.budget)

    @property
    def exchanges(self) -> list[Exchange]:
        """The answered questions with their answers, in order."""
        return [(turn.question.text, reply.answer) for turn, reply in self._answered()]

    @property
    def open_question(self) -> Question | None:
        """The question that waits for an answer; None if there is none."""
        last = self._last_turn
        return last.question if isinstance(last, AskedTurn) else None

    @property
    def questions(self) -> list[Question]:
        """All proposed questions, asked or skipped."""
        return [turn.question for turn in self._proposals if turn.question is not None]

    @property
    def settled(self) -> Gain | None:
        """The gain of the last question that was not needed, unless the user has replied since then."""
        for turn in reversed(self.turns):
            if isinstance(turn, AnsweredTurn | RefusedTurn):
                return None
            if isinstance(turn, SkippedTurn) and turn.gain is not None:
                return turn.gain
        return None

    @property
    def written(self) -> WrittenTurn | None:
        """The turn with the output; None if the output is not written yet."""
        last = self._last_turn
        return last if isinstance(last, WrittenTurn) else None

    @property
    def cost(self) -> Cost:
        """The total cost of all turns."""
        return sum((turn.cost for turn in self.turns), Cost())

    @property
    def user_cost(self) -> Cost:
        """The part of the cost that the answers and refusals of the user have."""
        answers = [turn for turn in self.turns if isinstance(turn, AnsweredTurn | RefusedTurn)]
        return sum((turn.cost for turn in answers), Cost())

    @property
    def translator_cost(self) -> Cost:
        """The part of the cost that the translator's questions, outputs and estimates have."""
        own = [turn for turn in self.turns if not isinstance(turn, AnsweredTurn | RefusedTurn)]
        return sum((turn.cost for turn in own), Cost())

    @property
    def _last_turn(self) -> Turn | None:
        return self.turns[-1] if self.turns else None

    @property
    def _proposals(self) -> list[AskedTurn | SkippedTurn]:
        return [turn for turn in self.turns if isinstance(turn, AskedTurn | SkippedTurn)]

    def after(self, turn: Turn) -> Self:
        """Return the conversation with another turn.

        Args:
            turn: the new turn.

        Raises:
            RecipeError: a turn of another kind is expected at this step.
        """
        values = dict(self)
        values["turns"] = (*self.turns, turn)
        return type(self).parse(values, where="the conversation")

    def reply(self, answer: str | None, *, author: str = "person", cost: Cost | None = None) -> Self:
        """Return the conversation with the user's answer.

        Args:
            answer: the answer; None or white space is a refusal.
            author: who answered.
            cost: the cost of the answer; 0 by default.

        Raises:
            RecipeError: no question is open.
        """
        cost = cost or Cost()
        text = (answer or "").strip()
        if text:
            return self.after(AnsweredTurn(answer=text, author=author, cost=cost))
        return self.after(RefusedTurn(author=author, cost=cost))

    def _answered(self) -> Iterator[tuple[AskedTurn, AnsweredTurn]]:
        for turn, reply in itertools.pairwise(self.turns):
            if isinstance(turn, AskedTurn) and isinstance(reply, AnsweredTurn):
                yield turn, reply

    def summary(self) -> dict[str, object]:
        """Return counts of questions, their gains in bits, the output and the cost, as JSON values.

        `gained_bits` has one value per answer: None if the gain was not estimated, or the answer is not a candidate.
        """
        kinds = Counter(turn.kind for turn in self.turns)
        skipped = [turn for turn in self.turns if isinstance(turn, SkippedTurn)]
        gains = [turn.gain for turn in self._proposals]
        written = self.written
        return {
            "asked": kinds["asked"],
            "answered": kinds["answered"],
            "refused": kinds["refused"],
            "saved": len([turn for turn in skipped if turn.reason == "not-needed"]),
            "expected_bits": [gain.bits for gain in gains if gain is not None],
            "gained_bits": [_gained_bits(turn, reply.answer) for turn, reply in self._answered()],
            "output": written.output if written else None,
            "mode": written.mode if written else None,
            "cost": self.cost.model_dump(),
        }

    def to_json(self) -> dict[str, object]:
        """Return the conversation, its next step, its open question and its summary, as JSON values."""
        question = self.open_question
        return {
            "conversation": self.model_dump(mode="json"),
            "step": self.step,
            "question": question.model_dump(mode="json") if question else None,
            "summary": self.summary(),
        }

    def save(self, path: str | Path) -> Path:
        """Write the conversation to a JSON file, atomically, and return the path.

        Args:
            path: the file. Its folder is created.

        Raises:
            EvaluationError: the file can't be written.
        """
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False)
        return write_atomically(Path(path), text.encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a saved conversation.

        Args:
            path: the file.

        Raises:
            DataError: the file is missing, invalid, or of another format version.
            RecipeError: the template is missing, or has changed since the conversation began.
        """
        values = _read_json(Path(path))
        if values.get("format") != FORMAT:
            raise DataError(
                f"{path} is a conversation of format {values.get('format')!r}, but {FORMAT} is expected: continue it "
                "with the version of graftlm that wrote it."
            )
        try:
            conversation = cls.parse(values, where=str(path))
        except RecipeError as error:
            raise DataError(f"{str(error).rstrip('.')}: name a file that graft clarify wrote.") from None
        if conversation.task.sha256 != conversation.template_sha256:
            raise RecipeError(
                f"The template {conversation.template} or its exemplars have changed since the conversation {path} "
                "began: restore them, or start a new conversation."
            )
        return conversation


# The kinds of turns that each step may add.
_TURNS: dict[Step, tuple[str, ...]] = {
    "propose": ("asked", "skipped"),
    "answer": ("answered", "refused"),
    "write": ("written",),
    "done": (),
}


def _next_step(turns: Sequence[Turn], budget: int) -> Step:
    """Return the step that follows the turns so far."""
    last = turns[-1] if turns else None
    if isinstance(last, WrittenTurn):
        return "done"
    if isinstance(last, AskedTurn):
        return "answer"
    if isinstance(last, RefusedTurn):
        return "write"
    if isinstance(last, SkippedTurn) and last.reason != "not-needed":
        return "write"
    proposed = [turn for turn in turns if isinstance(turn, AskedTurn | SkippedTurn)]
    return "propose" if len(proposed) < budget else "write"


def _gained_bits(turn: AskedTurn, answer: str) -> float | None:
    """Return the gain of an answer; None if it was not estimated, or the answer is not a candidate."""
    if turn.gain is None:
        return None
    by_answer = dict(zip(turn.question.answers, turn.gain.by_answer, strict=True))
    return by_answer.get(answer)


def _read_json(path: Path) -> dict[str, object]:
    if not path.exists():
        raise DataError(f"There is no conversation {path}: name an existing file, or start a new conversation.")
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({first_line(error)}), but a conversation is expected: name a file that graft "
            "clarify wrote, or start a new conversation."
        ) from None
    if not isinstance(values, dict):
        raise DataError(
            f"{path} contains {type_name(values)}, but the JSON object of a conversation is expected: name a file that "
            "graft clarify wrote, or start a new conversation."
        )
    return values


def _check_language(text: str, source: str) -> None:
    """Reject a text that is clearly not in the source language; single words and unknown languages pass.

    Raises:
        DataError: the text is in another language.
    """
    languages = read_yaml(LANGUAGES)
    if source not in languages:
        return
    found = _other_language(text, source, languages)
    if found is not None:
        raise DataError(
            f"The text seems to be {found}, but {languages[source]['name']} is expected: give a text in that language, "
            "or use a template with another source language."
        )


def _other_language(text: str, source: str, languages: Mapping[str, Mapping[str, str]]) -> str | None:
    """Describe the language of a text if it is not the source language.

    It is another language if most letters are not Latin, or if the text has at least two more of its frequent words.
    """
    letters = [char for char in text if char.isalpha()]
    latin = [char for char in letters if unicodedata.name(char, "").startswith("LATIN")]
    if len(latin) < len(letters) / 2:
        return "in another script"
    words = set(re.findall(r"[^\W\d_]+", text.casefold()))
    counts = {}
    for code, language in languages.items():
        frequent = set(language["words"].split())
        counts[code] = len(words & frequent)
    best = max(counts, key=counts.__getitem__)
    if counts[best] >= counts[source] + 2:
        return languages[best]["name"]
    return None
