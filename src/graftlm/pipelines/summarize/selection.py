"""Sentence selection: a selector ranks sentences, and a budget limits the extract."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.pipelines.summarize.document import Sentence, SourceDocument
from graftlm.pipelines.summarize.text import split_words

BudgetUnit = Literal["sentences", "words", "characters", "tokens"]
_BUDGET = re.compile(r"\s*(\d+)\s*(s|sentences?|w|words?|c|characters?|t|tokens?)?\s*", re.IGNORECASE)
_UNITS: dict[str, BudgetUnit] = {
    "s": "sentences",
    "w": "words",
    "c": "characters",
    "t": "tokens",
}
_LONG = 100  # sentences above which `per_section` applies
_MAX_REJECTED = 200  # sentences that do not fit, after which the rest of a budget is left unused


@dataclass(frozen=True, slots=True)
class RankedSentence:
    """A sentence with its score.

    Attributes:
        index: index of the sentence in its document.
        score: score in the unit of the selector; higher is better.
    """

    index: int
    score: float


class Selector(Protocol):
    """Ranks the sentences of a document."""

    @property
    def name(self) -> str:
        """Human-readable name."""
        ...

    def rank(self, document: SourceDocument) -> Sequence[RankedSentence]:
        """Return sentences of `document.selectable`, best first. A selector may omit sentences."""
        ...


class Budget(Config):
    """Upper limit of an extract.

    Args:
        amount: maximum size.
        unit: unit of the size. Characters include the single spaces between sentences.
    """

    amount: int = Field(10, ge=1)
    unit: BudgetUnit = "sentences"

    @classmethod
    def read(cls, text: str) -> Budget:
        """Parse a budget of the command line.

        Args:
            text: a number and a unit, such as `10s`, `200w`, `1200 characters` or `300t`. A number alone counts
                sentences.

        Raises:
            RecipeError: the text has another form, or the number is 0.
        """
        match = _BUDGET.fullmatch(text)
        if match is None or int(match[1]) < 1:
            raise RecipeError(
                f"{text!r} is not a budget: give a number above 0 and a unit, such as 10s (sentences), "
                "200w (words), 1200c (characters) or 300t (tokens)."
            )
        initial = (match[2] or "s")[0].lower()
        return cls(amount=int(match[1]), unit=_UNITS[initial])

    def __str__(self) -> str:
        unit = self.unit if self.amount > 1 else self.unit.removesuffix("s")
        return f"{self.amount:,} {unit}"


@dataclass(frozen=True)
class Extract:
    """Selected sentences of a document, in document order.

    Attributes:
        document: the document.
        indices: indices of the sentences in the document.
        scores: score of each sentence.
        selector: name of the selector.
        budget: limit of the extract.
        used: size of the extract in the budget's unit.
        notes: remarks for the user, as sentences.
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

    def to_json(self) -> dict[str, object]:
        """Return the sentences with their positions and scores, the selector and the budget."""
        rows = []
        for index, sentence, score in zip(self.indices, self.sentences, self.scores, strict=True):
            row = {
                "index": index,
                **sentence.to_json(),
                "section": self.document.sections[sentence.section].title,
                "score": score,
            }
            rows.append(row)
        return {
            "selector": self.selector,
            "budget": {**self.budget.model_dump(mode="json"), "used": self.used},
            "sentences": rows,
        }


def select(
    document: SourceDocument,
    selector: Selector,
    budget: Budget,
    count_tokens: Callable[[str], int] | None = None,
    *,
    min_filler: int = 0,
    per_section: int | None = None,
) -> Extract:
    """Take sentences in ranked order until the budget is used.

    Sentences that do not fit, and sentences with the same text as an earlier one, are skipped. After 200 sentences that
    do not fit, the rest of the budget is left unused.

    Args:
        document: the document.
        selector: ranks its sentences.
        budget: limit of the extract.
        count_tokens: returns the number of tokens of a text; a budget in tokens needs it.
        min_filler: minimum number of words of a sentence that is taken after another did not fit. Short sentences fill
            the budget, but have little content.
        per_section: in a ranking of more than 100 sentences, number of best sentences of each section that come first;
            None keeps the ranking.

    Returns:
        The extract; it is empty if the selector ranks no sentence.

    Raises:
        RecipeError: none of the ranked sentences fits, or the budget is in tokens and `count_tokens` is None.
    """
    if budget.unit == "tokens" and count_tokens is None:
        raise RecipeError("A budget in tokens needs a model's tokenizer: name a writer, or count in words.")
    ranking = selector.rank(document)
    if per_section is not None and len(ranking) > _LONG:
        ranking = _best_of_sections_first(document, ranking, per_section)
    filling = _Filling(budget, count_tokens, min_filler)
    for ranked in ranking:
        filling.offer(ranked, document.sentences[ranked.index].text)
        if filling.is_complete:
            break
    if filling.rejected and not filling.scores:
        raise RecipeError(
            f"No sentence of {document.name} fits into a budget of {budget}: raise the budget, or give it in sentences."
        )
    indices = sorted(filling.scores)
    return Extract(
        document=document,
        indices=tuple(indices),
        scores=tuple(filling.scores[index] for index in indices),
        selector=selector.name,
        budget=budget,
        used=filling.used,
        notes=_selection_notes(document, len(indices)),
    )


class _Filling:
    """The sentences of an extract that is being filled.

    Attributes:
        scores: score of each taken sentence by its index.
        used: size in the budget's unit.
        rejected: number of sentences that did not fit.
    """

    def __init__(self, budget: Budget, count_tokens: Callable[[str], int] | None, min_filler: int) -> None:
        self.scores: dict[int, float] = {}
        self.used = 0
        self.rejected = 0
        self._budget = budget
        self._count_tokens = count_tokens
        self._min_filler = min_filler
        self._texts: dict[int, str] = {}
        self._seen: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether the budget is used, or too many sentences did not fit."""
        return self.used == self._budget.amount or self.rejected == _MAX_REJECTED

    def offer(self, ranked: RankedSentence, text: str) -> None:
        """Take a sentence if it fits, and is neither repeated nor short filler."""
        if text in self._seen:
            return
        is_filler = bool(self.rejected and self.scores)
        if is_filler and len(split_words(text)) < self._min_filler:
            return
        size = self._size_with(ranked.index, text)
        if size > self._budget.amount:
            self.rejected += 1
            return
        self.scores[ranked.index] = ranked.score
        self.used = size
        self._texts[ranked.index] = text
        self._seen.add(text)

    def _size_with(self, index: int, text: str) -> int:
        """Return the size of the extract with one more sentence."""
        if self._budget.unit == "sentences":
            return self.used + 1
        if self._budget.unit == "words":
            return self.used + len(split_words(text))
        if self._budget.unit == "characters" or self._count_tokens is None:
            space = 1 if self._texts else 0
            return self.used + space + len(text)
        texts = {**self._texts, index: text}
        in_order = " ".join(texts[position] for position in sorted(texts))
        return self._count_tokens(in_order)


def _best_of_sections_first(
    document: SourceDocument,
    ranking: Sequence[RankedSentence],
    per_section: int,
) -> list[RankedSentence]:
    """Move the sentences after the `per_section` best of their section to the end of a ranking."""
    counts: defaultdict[int, int] = defaultdict(int)
    best: list[RankedSentence] = []
    rest: list[RankedSentence] = []
    for ranked in ranking:
        section = document.sentences[ranked.index].section
        if counts[section] < per_section:
            best.append(ranked)
        else:
            rest.append(ranked)
        counts[section] += 1
    return [*best, *rest]


def _selection_notes(document: SourceDocument, count: int) -> tuple[str, ...]:
    """Return a note if an extract of `count` sentences is the whole document."""
    if len(document.sentences) == 1:
        return (f"{document.name} is one sentence long: its summary is that sentence.",)
    if count == len(document.sentences):
        return (f"{document.name} is no longer than the requested summary: the extract is the whole document.",)
    return ()


@dataclass(frozen=True)
class LeadSelector:
    """Ranks sentences in document order."""

    name: str = "Lead"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences in document order, with the scores 0, -1, -2 and so on."""
        return FixedSelector(document.selectable).rank(document)


@dataclass(frozen=True)
class FixedSelector:
    """Returns given sentences in the given order, such as an oracle extract.

    Args:
        indices: indices of the sentences in the document, best first. They are not checked.
        name: human-readable name.
    """

    indices: Sequence[int]
    name: str = "gold extract"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return the given sentences, with the scores 0, -1, -2 and so on."""
        return [RankedSentence(index, -float(rank)) for rank, index in enumerate(self.indices)]
