"""Untrained selectors: the first sentences, given sentences, and sumy's LexRank, LSA and SumBasic.

LexRank is the default selector. sumy compares each pair of sentences in Python; here one matrix product gives the same
numbers. Long documents are ranked in blocks, then the best sentences of all blocks together, so memory is bounded.
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

BLOCK_SIZE = 1000
SumyMethod = Literal["lexrank", "lsa", "sumbasic"]
_LABELS: dict[SumyMethod, str] = {"lexrank": "LexRank", "lsa": "LSA", "sumbasic": "SumBasic"}
_SUMY_LANGUAGES = {
    "cs": "czech", "de": "german", "en": "english", "es": "spanish", "fr": "french", "it": "italian",
    "pt": "portuguese", "sk": "slovak",
}  # fmt: skip


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
    """A summarizer of sumy, with stop words and a stemmer for the languages that sumy knows.

    Attributes:
        method: summarizer.
        block_size: number of sentences ranked at a time.
        pairwise: for LexRank, compare pairs of sentences with sumy's own code instead of a matrix product.
    """

    method: SumyMethod = "lexrank"
    block_size: int = BLOCK_SIZE
    pairwise: bool = False

    @property
    def name(self) -> str:
        return f"{_LABELS[self.method]} (sumy)"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Rank all selectable sentences; of a long document only the best of each block, half a block in all."""
        summarizer, build = _summarizer(self.method, document.language, self.pairwise), _document_builder()
        candidates = document.selectable
        texts = {index: document.sentences[index].text for index in candidates}
        while len(candidates) > self.block_size:
            blocks = [candidates[i : i + self.block_size] for i in range(0, len(candidates), self.block_size)]
            share = max(self.block_size // 2 // len(blocks), 1)
            best = [_rank(summarizer, build, block, texts)[:share] for block in blocks]
            candidates = sorted(ranked.index for block in best for ranked in block)
        return _rank(summarizer, build, candidates, texts)


def _rank(
    summarizer: Any, build: Callable[[list[str]], Any], indices: list[int], texts: dict[int, str]
) -> list[RankedSentence]:
    """Rank sentences by a summarizer's rating. sumy passes its rated sentences, best first, to a `count` function."""
    infos: list[Any] = []

    def collect(rated: list[Any]) -> list[Any]:
        infos.extend(rated)
        return rated

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")  # sumy warns when there are fewer words than sentences
        summarizer(build([texts[index] for index in indices]), collect)
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
def _document_builder() -> Callable[[list[str]], Any]:
    """Return a function that builds sumy's document from sentences."""
    dom: Any = import_extra("sumy.models.dom", "Ranking sentences")
    tokenizer = _SumyTokenizer()
    return lambda sentences: dom.ObjectDocumentModel(
        [dom.Paragraph([dom.Sentence(text, tokenizer) for text in sentences])]
    )


@cache
def _summarizer(method: SumyMethod, language: str, pairwise: bool) -> Any:
    stemmers: Any = import_extra("sumy.nlp.stemmers", "Ranking sentences")
    utils: Any = import_extra("sumy.utils", "Ranking sentences")
    sumy_language = _SUMY_LANGUAGES.get(language)
    stemmer = stemmers.Stemmer(sumy_language) if sumy_language else stemmers.null_stemmer
    summarizer = _summarizer_class(method, pairwise)(stemmer)
    if sumy_language:
        summarizer.stop_words = utils.get_stop_words(sumy_language)
    return summarizer


def _summarizer_class(method: SumyMethod, pairwise: bool) -> Any:
    if method == "lsa":
        return import_extra("sumy.summarizers.lsa", "Ranking sentences").LsaSummarizer
    if method == "sumbasic":
        return import_extra("sumy.summarizers.sum_basic", "Ranking sentences").SumBasicSummarizer
    lexrank: Any = import_extra("sumy.summarizers.lex_rank", "Ranking sentences").LexRankSummarizer
    return lexrank if pairwise else _matrix_lexrank(lexrank)


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
