"""Sentence selection: a selector ranks sentences, and a hard budget limits the extract.

Untrained selectors are the first sentences, given sentences, and sumy's LexRank, LSA and SumBasic. LexRank is the
default. sumy compares each pair of sentences in Python; here one matrix product gives the same numbers. Long documents
are ranked in blocks, then the best sentences of all blocks together, so memory is bounded.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.pipelines.summarize.document import Sentence, SourceDocument
from graftlm.pipelines.summarize.text import import_extra, split_words

BudgetUnit = Literal["sentences", "characters", "tokens"]
_BUDGET = re.compile(r"\s*(\d+)\s*(s|sentences?|c|characters?|t|tokens?)?\s*", re.IGNORECASE)
_UNITS: dict[str, BudgetUnit] = {"s": "sentences", "c": "characters", "t": "tokens"}
_MAX_REJECTED = 200  # sentences tried without success before the rest of a budget stays unused

SumyMethod = Literal["lexrank", "lsa", "sumbasic"]
_SUMY_METHODS: dict[SumyMethod, tuple[str, str, str]] = {  # label, sumy's module and class
    "lexrank": ("LexRank", "lex_rank", "LexRankSummarizer"),
    "lsa": ("LSA", "lsa", "LsaSummarizer"),
    "sumbasic": ("SumBasic", "sum_basic", "SumBasicSummarizer"),
}
_SUMY_LANGUAGES = {
    "cs": "czech", "de": "german", "en": "english", "es": "spanish", "fr": "french", "it": "italian",
    "pt": "portuguese", "sk": "slovak",
}  # fmt: skip


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
        """Parse a budget of the command line: `10`, `10s`, `1200 characters`, `300t`.

        Raises:
            RecipeError: the text is no budget.
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
    """Selected sentences of a document by their indices and scores, in document order.

    Attributes:
        selector: name of the selector.
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
    document: SourceDocument, selector: Selector, budget: Budget, count_tokens: Callable[[str], int] | None = None
) -> Extract:
    """Take sentences in ranked order while they fit. Sentences that do not fit and repeated sentences are skipped.

    Raises:
        RecipeError: no sentence fits, or the budget is in tokens and `count_tokens` is missing.
    """
    if budget.unit == "tokens" and count_tokens is None:
        raise RecipeError("A budget in tokens needs a model's tokenizer: name a writer, or count in characters.")

    def size_with(index: int, text: str) -> int:
        """Return the size of the extract with one more sentence."""
        if budget.unit == "sentences":
            return used + 1
        if count_tokens is None or budget.unit == "characters":
            return used + len(text) + bool(texts)
        return count_tokens(" ".join(text for _, text in sorted((texts | {index: text}).items())))

    scores: dict[int, float] = {}
    texts: dict[int, str] = {}
    seen: set[str] = set()
    used = rejected = 0
    for ranked in selector.rank(document):
        text = document.sentences[ranked.index].text
        if text in seen:
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


@dataclass(frozen=True)
class SumySelector:
    """A summarizer of sumy, with stop words and a stemmer for the languages that sumy knows."""

    method: SumyMethod = "lexrank"
    block_size: int = 1000  # sentences ranked at a time
    pairwise: bool = False  # LexRank compares pairs of sentences with sumy's own code instead of a matrix product

    @property
    def name(self) -> str:
        return f"{_SUMY_METHODS[self.method][0]} (sumy)"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Rank all selectable sentences; of a long document only the best of each block, half a block in all."""
        summarizer = _summarizer(self.method, document.language, self.pairwise)
        candidates = document.selectable
        texts = {index: document.sentences[index].text for index in candidates}
        while len(candidates) > self.block_size:
            blocks = [candidates[i : i + self.block_size] for i in range(0, len(candidates), self.block_size)]
            share = max(self.block_size // 2 // len(blocks), 1)
            best = [_rank(summarizer, block, texts)[:share] for block in blocks]
            candidates = sorted(ranked.index for block in best for ranked in block)
        return _rank(summarizer, candidates, texts)


def _rank(summarizer: Any, indices: list[int], texts: dict[int, str]) -> list[RankedSentence]:
    """Rank sentences by a summarizer's rating. sumy passes its rated sentences, best first, to a `count` function."""
    dom: Any = import_extra("sumy.models.dom", "Ranking sentences")
    sentences = [dom.Sentence(texts[index], _SumyTokenizer()) for index in indices]
    infos: list[Any] = []
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")  # sumy warns when there are fewer words than sentences
        summarizer(dom.ObjectDocumentModel([dom.Paragraph(sentences)]), lambda rated: infos.extend(rated) or rated)
    if not infos:  # all words are stop words
        return [RankedSentence(index, 0.0) for index in indices]
    # Ratings are nan when no two sentences share a word; document order stays.
    ratings = [0.0 if math.isnan(info.rating) else float(info.rating) for info in infos]
    return [RankedSentence(indices[info.order], rating) for info, rating in zip(infos, ratings, strict=True)]


class _SumyTokenizer:
    """The tokenizer interface that sumy expects."""

    def to_words(self, sentence: str) -> list[str]:
        return split_words(sentence) or [sentence]


@cache
def _summarizer(method: SumyMethod, language: str, pairwise: bool) -> Any:
    stemmers: Any = import_extra("sumy.nlp.stemmers", "Ranking sentences")
    utils: Any = import_extra("sumy.utils", "Ranking sentences")
    sumy_language = _SUMY_LANGUAGES.get(language)
    stemmer = stemmers.Stemmer(sumy_language) if sumy_language else stemmers.null_stemmer
    _, module, name = _SUMY_METHODS[method]
    summarizer_class = getattr(import_extra(f"sumy.summarizers.{module}", "Ranking sentences"), name)
    if method == "lexrank" and not pairwise:
        summarizer_class = _matrix_lexrank(summarizer_class)
    summarizer = summarizer_class(stemmer)
    if sumy_language:
        summarizer.stop_words = utils.get_stop_words(sumy_language)
    return summarizer


def _matrix_lexrank(base: Any) -> Any:
    """Return sumy's LexRank with one matrix product in place of the comparison of all pairs."""

    class MatrixLexRank(base):
        @staticmethod
        def _compute_idf(sentences: list[list[str]]) -> dict[str, float]:
            document_counts = Counter(term for sentence in sentences for term in set(sentence))
            return {term: math.log(len(sentences) / (1 + count)) for term, count in document_counts.items()}

        def _create_matrix(self, sentences: Any, threshold: float, tf_metrics: Any, idf_metrics: Any) -> Any:
            columns = {term: column for column, term in enumerate(idf_metrics)}
            weights = np.zeros((len(sentences), max(len(columns), 1)))
            for row, frequencies in enumerate(tf_metrics):
                for term, frequency in frequencies.items():
                    weights[row, columns[term]] = frequency * idf_metrics[term]
            norms = np.sqrt(np.square(weights).sum(axis=1, keepdims=True))
            weights = np.divide(weights, norms, out=np.zeros_like(weights), where=norms > 0)
            edges = (weights @ weights.T > threshold).astype(float)
            return edges / np.maximum(edges.sum(axis=1, keepdims=True), 1)

    return MatrixLexRank
