"""Sentence selection: a selector ranks sentences, and a hard budget limits the extract."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import Any, Literal, Protocol

from pydantic import Field

from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.pipelines.summarize.document import Sentence, SourceDocument
from graftlm.pipelines.summarize.text import split_words

BudgetUnit = Literal["sentences", "words", "characters", "tokens"]
_BUDGET = re.compile(r"\s*(\d+)\s*(s|sentences?|w|words?|c|characters?|t|tokens?)?\s*", re.IGNORECASE)
_UNITS: dict[str, BudgetUnit] = {"s": "sentences", "w": "words", "c": "characters", "t": "tokens"}
_LONG = 100  # sentences from which sections matter
_MAX_REJECTED = 200  # sentences tried without success before the rest of a budget stays unused


@dataclass(frozen=True, slots=True)
class RankedSentence:
    """Index of a sentence in its document, and its score in the selector's own unit; higher is better."""

    index: int
    score: float


class Selector(Protocol):
    """Ranks the sentences of a document."""

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    def rank(self, document: SourceDocument) -> Sequence[RankedSentence]:
        """Return sentences of `document.selectable`, best first. A selector may leave sentences out."""
        ...


class Budget(Config):
    """Upper limit of an extract. Characters are those of the extract, with single spaces between sentences."""

    amount: int = Field(10, ge=1)
    unit: BudgetUnit = "sentences"

    @classmethod
    def read(cls, text: str) -> Budget:
        """Parse a budget of the command line, as `10s`, `200w`, `1200 characters`, `300t`, or raise `RecipeError`."""
        match = _BUDGET.fullmatch(text)
        if match is None or int(match[1]) < 1:
            raise RecipeError(
                f"{text!r} is no budget: a number above 0 and a unit are expected, as 10s (sentences), "
                "200w (words), 1200c (characters) or 300t (tokens)."
            )
        return cls(amount=int(match[1]), unit=_UNITS[(match[2] or "s")[0].lower()])

    def __str__(self) -> str:
        return f"{self.amount:,} {self.unit if self.amount > 1 else self.unit[:-1]}"


@dataclass(frozen=True)
class Extract:
    """Selected sentences of a document by their indices and scores, in document order.

    Attributes:
        used: size of the extract in the budget's unit.
        notes: remarks for the user, one sentence each.
    """

    document: SourceDocument
    indices: tuple[int, ...]
    scores: tuple[float, ...]
    selector: str
    budget: Budget
    used: int
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[Sentence]:
        """The selected sentences."""
        return [self.document.sentences[index] for index in self.indices]

    @property
    def text(self) -> str:
        """The selected sentences as one paragraph."""
        return " ".join(sentence.text for sentence in self.sentences)

    def to_json(self) -> dict[str, Any]:
        """Return the sentences with their positions and scores, the selector and the budget."""
        sections = self.document.sections
        rows = [
            {"index": index, **sentence.to_json(), "section": sections[sentence.section].title, "score": score}
            for index, sentence, score in zip(self.indices, self.sentences, self.scores, strict=True)
        ]
        budget = self.budget.model_dump(mode="json") | {"used": self.used}
        return {"selector": self.selector, "budget": budget, "sentences": rows}


def select(
    document: SourceDocument,
    selector: Selector,
    budget: Budget,
    count_tokens: Callable[[str], int] | None = None,
    *,
    min_filler: int = 0,
    per_section: int | None = None,
) -> Extract:
    """Take sentences in ranked order while they fit. Sentences that do not fit and repeated sentences are skipped.

    Once one did not fit, those with fewer than `min_filler` words are skipped too: they fill the budget and say little.
    Of more than 100 sentences, the `per_section` best of each section come first.

    Raises `RecipeError` if no sentence fits, or the budget is in tokens and `count_tokens` is missing.
    """
    if budget.unit == "tokens" and count_tokens is None:
        raise RecipeError("A budget in tokens needs a model's tokenizer: name a writer, or count in words.")

    def size_with(index: int, text: str) -> int:
        """Return the size of the extract with one more sentence."""
        if budget.unit == "sentences":
            return used + 1
        if budget.unit == "words":
            return used + len(split_words(text))
        if count_tokens is None or budget.unit == "characters":
            return used + len(text) + bool(texts)
        return count_tokens(" ".join(text for _, text in sorted((texts | {index: text}).items())))

    scores: dict[int, float] = {}
    texts: dict[int, str] = {}
    seen: set[str] = set()
    used = rejected = 0
    ranking = selector.rank(document)
    if per_section is not None and len(ranking) > _LONG:
        numbers: defaultdict[int, count[int]] = defaultdict(count)  # by section
        sections = [document.sentences[ranked.index].section for ranked in ranking]
        is_late = [next(numbers[section]) >= per_section for section in sections]
        ranking = [ranked for _, ranked in sorted(zip(is_late, ranking, strict=True), key=itemgetter(0))]
    for ranked in ranking:
        text = document.sentences[ranked.index].text
        if text in seen:
            continue
        if rejected and scores and len(split_words(text)) < min_filler:
            continue
        size = size_with(ranked.index, text)
        if size > budget.amount:
            rejected += 1
            if rejected == _MAX_REJECTED:
                break
            continue
        scores[ranked.index], texts[ranked.index], used = ranked.score, text, size
        seen.add(text)
        if used == budget.amount:
            break
    if not scores and rejected:
        raise RecipeError(
            f"No sentence of {document.name} fits into a budget of {budget}: allow more, or count in sentences."
        )
    notes = ()
    if len(document.sentences) == 1:
        notes = (f"{document.name} is one sentence long: its summary is that sentence.",)
    elif len(scores) == len(document.sentences):
        notes = (f"{document.name} is no longer than the requested summary: the extract is all of it.",)
    indices = tuple(sorted(scores))
    return Extract(document, indices, tuple(scores[index] for index in indices), selector.name, budget, used, notes)


@dataclass(frozen=True)
class LeadSelector:
    """Ranks sentences in document order."""

    name: str = "Lead"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences in order."""
        return FixedSelector(document.selectable).rank(document)


@dataclass(frozen=True)
class FixedSelector:
    """Returns given sentences in the given order, such as an oracle extract."""

    indices: Sequence[int]
    name: str = "gold extract"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return the given sentences; scores fall from 0."""
        return [RankedSentence(index, -float(rank)) for rank, index in enumerate(self.indices)]
