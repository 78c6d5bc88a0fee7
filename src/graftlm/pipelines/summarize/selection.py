"""Selection: a selector ranks sentences, a hard budget says how many of them there may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field

from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.pipelines.summarize.document import Sentence, SourceDocument

Unit = Literal["sentences", "characters", "tokens"]
_BUDGET = re.compile(r"\s*(\d+)\s*(s|sentences?|c|characters?|t|tokens?)?\s*", re.IGNORECASE)
_PATIENCE = 200  # sentences that may turn out too long before what is left of a budget stays unused
_UNITS: dict[str, Unit] = {"s": "sentences", "c": "characters", "t": "tokens"}


@dataclass(frozen=True, slots=True)
class RankedSentence:
    """A sentence's index in the document, and how much it matters to the selector, in the selector's own unit."""

    index: int
    score: float


class Selector(Protocol):
    """What chooses sentences."""

    @property
    def name(self) -> str:
        """As it is told to the user."""
        ...

    def rank(self, document: SourceDocument) -> Sequence[RankedSentence]:
        """Sentences of `document.selectable`, what matters most first; those it would never take are left out."""
        ...


class Budget(Config):
    """How large an extract may be; it is never larger.

    Args:
        amount: how many.
        unit: of what; characters are those of the sentences as they read, joined by single spaces.
    """

    amount: int = Field(10, ge=1)
    unit: Unit = "sentences"

    @classmethod
    def read(cls, text: str) -> Budget:
        """A budget as the command line takes it: `10`, `10s`, `1200 characters`, `300t`.

        Raises:
            RecipeError: it is none.
        """
        match = _BUDGET.fullmatch(text)
        if match is None or int(match[1]) < 1:
            raise RecipeError(
                f"{text!r} is no budget: a number above 0 and a unit are expected, as 10s (sentences), "
                "1200c (characters) or 300t (tokens)."
            )
        return cls(amount=int(match[1]), unit=_UNITS[(match[2] or "s")[0].lower()])

    def __str__(self) -> str:
        return f"{self.amount:,} {self.unit if self.amount > 1 else self.unit[:-1]}"


@dataclass(frozen=True)
class Extract:
    """Sentences of a document, in its order.

    Attributes:
        document: where they come from.
        indices: of the sentences.
        scores: what the selector gave each.
        selector: its name.
        budget: what was allowed.
        used: how much of it they take, in its unit.
        notes: what the user should know, a sentence each.
    """

    document: SourceDocument
    indices: tuple[int, ...]
    scores: tuple[float, ...]
    selector: str
    budget: Budget
    used: int
    notes: tuple[str, ...] = field(default=())

    @property
    def sentences(self) -> list[Sentence]:
        """The chosen sentences."""
        return [self.document.sentences[index] for index in self.indices]

    @property
    def text(self) -> str:
        """As one paragraph."""
        return " ".join(sentence.text for sentence in self.sentences)

    def to_json(self) -> dict[str, Any]:
        """The sentences with their places, and how they were chosen."""
        sections = self.document.sections
        rows = [
            {"index": index, **sentence.to_json(), "section": sections[sentence.section].title, "score": score}
            for index, sentence, score in zip(self.indices, self.sentences, self.scores, strict=True)
        ]
        budget = {"amount": self.budget.amount, "unit": self.budget.unit, "used": self.used}
        return {"selector": self.selector, "budget": budget, "sentences": rows}


def select(
    document: SourceDocument, selector: Selector, budget: Budget, count_tokens: Callable[[str], int] | None = None
) -> Extract:
    """Take sentences as they are ranked, as long as they fit; one that does not fit is passed over, as is a repetition.

    Args:
        document: the document.
        selector: ranks its sentences.
        budget: never exceeded.
        count_tokens: how many tokens a text has, for a budget in tokens.

    Raises:
        RecipeError: the budget is in tokens, and nothing counts them; or no sentence fits into it.
    """
    grown = _growth(budget, count_tokens)
    taken: dict[int, float] = {}
    texts: dict[int, str] = {}
    had: set[str] = set()
    used = passed = 0
    for ranked in selector.rank(document):
        text = document.sentences[ranked.index].text
        if text in had:
            continue
        needed = grown(used, texts, ranked.index, text)
        if needed > budget.amount:
            passed += 1
            if passed == _PATIENCE:
                break
            continue
        taken[ranked.index], texts[ranked.index], used = ranked.score, text, needed
        had.add(text)
        if used == budget.amount:
            break
    if not taken and passed:
        raise RecipeError(
            f"No sentence of {document.where} fits into a budget of {budget}: allow more, or count in sentences."
        )
    order = tuple(sorted(taken))
    notes = _notes(document, order)
    return Extract(document, order, tuple(taken[index] for index in order), selector.name, budget, used, notes)


Growth = Callable[[int, dict[int, str], int, str], int]


def _growth(budget: Budget, count_tokens: Callable[[str], int] | None) -> Growth:
    """How much of the budget is used with one more sentence: of what is used, the texts, its index and its text."""
    if budget.unit == "sentences":
        return lambda used, texts, index, text: used + 1
    if budget.unit == "characters":
        return lambda used, texts, index, text: used + len(text) + bool(texts)
    if count_tokens is None:
        raise RecipeError("A budget in tokens needs a model's tokenizer: name a writer, or count in characters.")
    return lambda used, texts, index, text: count_tokens(_joined(texts | {index: text}))


def _joined(texts: dict[int, str]) -> str:
    return " ".join(texts[index] for index in sorted(texts))


def _notes(document: SourceDocument, order: tuple[int, ...]) -> tuple[str, ...]:
    if len(document.sentences) == 1:
        return (f"{document.where} is one sentence long: its summary is that sentence.",)
    if len(order) == len(document.sentences):
        return (f"{document.where} is no longer than the summary asked for: the extract is all of it.",)
    return ()
