"""Selectors that learn nothing: the first sentences, and sumy's LexRank, LSA and SumBasic.

LexRank is what chooses for a user who names no trained selector. sumy compares each sentence with each other in Python;
here the same numbers come from one matrix product. Documents of more than `BLOCK` sentences are ranked block by block,
and the best of the blocks among themselves, so that memory is bounded.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import RankedSentence
from graftlm.pipelines.summarize.text import import_extra, split_words

BLOCK = 1000
Kind = Literal["lexrank", "lsa", "sumbasic"]
_NAMES: dict[Kind, str] = {"lexrank": "LexRank", "lsa": "LSA", "sumbasic": "SumBasic"}
_LANGUAGES = {
    "cs": "czech", "de": "german", "en": "english", "es": "spanish", "fr": "french", "it": "italian",
    "pt": "portuguese", "sk": "slovak",
}  # fmt: skip


@dataclass(frozen=True)
class LeadSelector:
    """The first sentences."""

    name: str = "Lead"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """All that may be taken, in order; the score falls from 0."""
        return [RankedSentence(index, -float(place)) for place, index in enumerate(document.selectable)]


@dataclass(frozen=True)
class FixedSelector:
    """Sentences that were chosen before, such as those of the oracle, in the order given."""

    indices: Sequence[int]
    name: str = "gold extract"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """The given sentences."""
        return [RankedSentence(index, -float(place)) for place, index in enumerate(self.indices)]


@dataclass(frozen=True)
class SumySelector:
    """A summariser of sumy, with its stop words and stemmer where it knows the language.

    Attributes:
        kind: lexrank, lsa or sumbasic.
        block: sentences that are ranked at a time.
        exact: let sumy compare sentences itself, pair by pair.
    """

    kind: Kind = "lexrank"
    block: int = BLOCK
    exact: bool = False

    @property
    def name(self) -> str:
        return f"{_NAMES[self.kind]} (sumy)"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """All sentences with words; from a long document the best of each block, half a block in all."""
        summariser, build = _summariser(self.kind, document.language, self.exact), _model()
        left = document.selectable
        texts = {index: document.sentences[index].text for index in left}
        while len(left) > self.block:
            blocks = [left[first : first + self.block] for first in range(0, len(left), self.block)]
            share = max(self.block // 2 // len(blocks), 1)
            ranks = [_rank(summariser, build, block, texts)[:share] for block in blocks]
            left = sorted(ranked.index for block in ranks for ranked in block)
        return _rank(summariser, build, left, texts)


def _rank(
    summariser: Any, build: Callable[[list[str]], Any], indices: list[int], texts: dict[int, str]
) -> list[RankedSentence]:
    """Sentences by a summariser's rating; it hands them to the `count` that it is given, best first.

    Where no sentence is like another the ratings are nan, and the document's order stays.
    """
    found: list[Any] = []

    def keep(infos: list[Any]) -> list[Any]:
        found.extend(infos)
        return infos

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")  # that there are fewer words than sentences
        summariser(build([texts[index] for index in indices]), keep)
    if not found:  # of stop words alone
        return [RankedSentence(index, 0.0) for index in indices]
    return [
        RankedSentence(indices[info.order], 0.0 if math.isnan(info.rating) else float(info.rating)) for info in found
    ]


class _Words:
    """As sumy asks for a tokenizer."""

    def to_words(self, sentence: str) -> list[str]:
        return split_words(sentence) or [sentence]


@cache
def _model() -> Callable[[list[str]], Any]:
    """Builds sumy's model of a document from sentences."""
    dom: Any = import_extra("sumy.models.dom", "Ranking sentences")
    tokenizer = _Words()

    def build(sentences: list[str]) -> Any:
        return dom.ObjectDocumentModel([dom.Paragraph([dom.Sentence(text, tokenizer) for text in sentences])])

    return build


@cache
def _summariser(kind: Kind, language: str, exact: bool) -> Any:
    stemmers: Any = import_extra("sumy.nlp.stemmers", "Ranking sentences")
    utils: Any = import_extra("sumy.utils", "Ranking sentences")
    known = _LANGUAGES.get(language)
    made = _class(kind, exact)(stemmers.Stemmer(known) if known else stemmers.null_stemmer)
    if known:
        made.stop_words = utils.get_stop_words(known)
    return made


def _class(kind: Kind, exact: bool) -> Any:
    if kind == "lsa":
        return import_extra("sumy.summarizers.lsa", "Ranking sentences").LsaSummarizer
    if kind == "sumbasic":
        return import_extra("sumy.summarizers.sum_basic", "Ranking sentences").SumBasicSummarizer
    theirs: Any = import_extra("sumy.summarizers.lex_rank", "Ranking sentences").LexRankSummarizer
    return theirs if exact else _matrix_form(theirs)


def _matrix_form(theirs: Any) -> Any:
    """sumy's LexRank with the comparisons of all pairs as one product of matrices."""

    class LexRank(theirs):
        @staticmethod
        def _compute_idf(sentences: list[list[str]]) -> dict[str, float]:
            held = Counter(term for sentence in sentences for term in set(sentence))
            return {term: math.log(len(sentences) / (1 + count)) for term, count in held.items()}

        def _create_matrix(self, sentences: Any, threshold: float, tf_metrics: Any, idf_metrics: Any) -> Any:
            columns = {term: column for column, term in enumerate(idf_metrics)}
            weights = np.zeros((len(sentences), max(len(columns), 1)))
            for row, frequencies in enumerate(tf_metrics):
                for term, frequency in frequencies.items():
                    weights[row, columns[term]] = frequency * idf_metrics[term]
            norms = np.sqrt(np.square(weights).sum(axis=1, keepdims=True))
            weights = np.divide(weights, norms, out=np.zeros_like(weights), where=norms > 0)
            near = (weights @ weights.T > threshold).astype(float)
            return near / np.maximum(near.sum(axis=1, keepdims=True), 1)

    return LexRank
