"""A conversation about one text, turn by turn: what was asked, what was answered, what was written.

    propose ─► asked ─► answered ─► propose again, or write
       │          └───► refused ──► write
       ├─► skipped (the answer would change nothing) ─► propose again, or write
       └─► skipped (nothing to ask) ─► write

Every question comes before anything is written, and at most `budget` are proposed. A conversation never changes: each
turn makes a new one. Its JSON is all there is to go on from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from graftlm.config import Config
from graftlm.errors import DataError, RecipeError
from graftlm.io import write_atomically
from graftlm.pipelines.clarify.language import check_language
from graftlm.pipelines.clarify.templates import load_template
from graftlm.pipelines.clarify.turns import Answered, Asked, Cost, Gain, Question, Refused, Skipped, Turn, Written

FORMAT = 1
Step = Literal["propose", "answer", "write", "done"]


class Conversation(Config):
    """One text, and everything said about it so far.

    Args:
        format: of the file.
        template: a template's name or file.
        template_sha256: of what it said when the conversation began.
        target: code of the language to write in.
        text: the query.
        budget: questions that may be proposed (J).
        threshold: bits that a question must be expected to bring; None puts every question.
    """

    format: Literal[1] = FORMAT
    template: str
    template_sha256: str
    target: str
    text: str
    budget: int = Field(1, ge=0)
    threshold: float | None = Field(None, ge=0)
    turns: tuple[Turn, ...] = ()

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for place, turn in enumerate(self.turns):
            due = _due(self.turns[:place], self.budget)
            if turn.kind not in _FITTING[due]:
                raise ValueError(f"turn {place + 1} is {turn.kind}, but {' or '.join(_FITTING[due])} is due there")
        return self

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
            template: a template's name, or its YAML file.
            target: code of the language to write in; not needed where the template has one alone.
            any_language: let a text pass that looks as if it were in another language than the template begins from.

        Raises:
            DataError: the text is empty, or clearly in another language than the template begins from.
            RecipeError: there is no such template, or it does not write that language.
        """
        found = load_template(template)
        if not text.strip():
            raise DataError("The text is empty: give at least one word.")
        if not any_language:
            check_language(text, found.source)
        return cls(
            template=template,
            template_sha256=found.sha256,
            target=found.target(target),
            text=text,
            budget=budget,
            threshold=threshold,
        )

    @property
    def step(self) -> Step:
        """What comes next."""
        return _due(self.turns, self.budget)

    @property
    def told(self) -> list[tuple[str, str]]:
        """Questions and their answers, in order."""
        return [(asked.question.text, answered.answer) for asked, answered in self._exchanges()]

    @property
    def open_question(self) -> Question | None:
        """The question that waits for an answer."""
        last = self.turns[-1] if self.turns else None
        return last.question if isinstance(last, Asked) else None

    @property
    def questions(self) -> Iterator[Question]:
        """All that were proposed."""
        return (turn.question for turn in self.turns if isinstance(turn, Asked | Skipped) and turn.question is not None)

    @property
    def settled(self) -> Gain | None:
        """Of the last question that was not needed, unless the user said something since."""
        for turn in reversed(self.turns):
            if isinstance(turn, Answered | Refused):
                return None
            if isinstance(turn, Skipped) and turn.gain is not None:
                return turn.gain
        return None

    @property
    def written(self) -> Written | None:
        """The output, once there is one."""
        last = self.turns[-1] if self.turns else None
        return last if isinstance(last, Written) else None

    @property
    def cost(self) -> Cost:
        """Of all turns."""
        return sum((turn.cost for turn in self.turns), Cost())

    def after(self, turn: Turn) -> Self:
        """The conversation with one more turn.

        Raises:
            RecipeError: another kind of turn is due.
        """
        return type(self).parse(dict(self) | {"turns": (*self.turns, turn)}, where="the conversation")

    def reply(self, answer: str | None, *, by: str = "person", cost: Cost | None = None) -> Self:
        """The conversation with the user's answer; nothing but blanks refuses."""
        cost = cost or Cost()
        told = (answer or "").strip()
        return self.after(Answered(answer=told, by=by, cost=cost) if told else Refused(by=by, cost=cost))

    def gained(self) -> list[float | None]:
        """Bits that each answer brought, in order; None where it was not measured, or none of the candidates."""
        return [
            dict(zip(asked.question.answers, asked.gain.by_answer, strict=True)).get(answered.answer)
            if asked.gain
            else None
            for asked, answered in self._exchanges()
        ]

    def _exchanges(self) -> Iterator[tuple[Asked, Answered]]:
        for asked, answered in zip(self.turns, self.turns[1:], strict=False):
            if isinstance(asked, Asked) and isinstance(answered, Answered):
                yield asked, answered

    def summary(self) -> dict[str, Any]:
        """What was asked, saved and gained, as plain JSON values."""
        turns = self.turns
        return {
            "asked": sum(isinstance(turn, Asked) for turn in turns),
            "answered": sum(isinstance(turn, Answered) for turn in turns),
            "refused": sum(isinstance(turn, Refused) for turn in turns),
            "saved": sum(isinstance(turn, Skipped) and turn.reason == "not-needed" for turn in turns),
            "expected_bits": [turn.gain.bits for turn in turns if isinstance(turn, Asked | Skipped) and turn.gain],
            "gained_bits": self.gained(),
            "output": self.written.output if self.written else None,
            "how": self.written.how if self.written else None,
            "cost": self.cost.model_dump(),
        }

    def save(self, path: str | Path) -> Path:
        """Write the conversation: all of it or nothing, even when the machine stops.

        Raises:
            EvaluationError: the place can't be written to.
        """
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False)
        return write_atomically(Path(path), text.encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a conversation that was saved.

        Raises:
            DataError: the file is missing, is of another form, or of a later format.
            RecipeError: its template is not there, or says something else by now.
        """
        values = _read(Path(path))
        if values.get("format") != FORMAT:
            raise DataError(
                f"{path} is a conversation of format {values.get('format')!r}, but {FORMAT} is read here: go on with "
                "the version of graftlm that wrote it."
            )
        try:
            found = cls.parse(values, where=str(path))
        except RecipeError as error:
            raise DataError(f"{str(error).rstrip('.')}: this is no conversation that graft clarify wrote.") from None
        if load_template(found.template).sha256 != found.template_sha256:
            raise RecipeError(
                f"The template {found.template} was changed since {path} was begun: put it back, or begin anew."
            )
        return found


_FITTING: dict[Step, tuple[str, ...]] = {
    "propose": ("asked", "skipped"),
    "answer": ("answered", "refused"),
    "write": ("written",),
    "done": (),
}


def _due(turns: Sequence[Any], budget: int) -> Step:
    """What comes after these turns."""
    last = turns[-1] if turns else None
    if isinstance(last, Written):
        return "done"
    if isinstance(last, Asked):
        return "answer"
    if isinstance(last, Refused) or (isinstance(last, Skipped) and last.reason != "not-needed"):
        return "write"
    proposed = sum(isinstance(turn, Asked | Skipped) for turn in turns)
    return "propose" if proposed < budget else "write"


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"There is no conversation {path}: name the file of one, or begin one.") from None
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): name a readable file.") from None
    except ValueError:
        raise DataError(f"{path} is not valid JSON, but a conversation is expected: begin it anew.") from None
    if not isinstance(values, dict):
        raise DataError(f"{path} holds no conversation: begin it anew.")
    return values
