"""Rivals of the default selector: sumy's LexRank, LSA and SumBasic, TextRank, and a random order.

sumy's LexRank compares each pair of sentences in Python; here one matrix product gives the same numbers. Long documents
are ranked in blocks, then the best sentences of all blocks together, so that memory is bounded.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import CountVectorizer

from graftlm.pipelines.summarize import RankedSentence, SourceDocument
from graftlm.pipelines.summarize.text import import_extra, split_words

SumyMethod = Literal["lexrank", "lsa", "sumbasic"]
# Label, and module and class of sumy.
_SUMY_METHODS: dict[SumyMethod, tuple[str, str, str]] = {
    "lexrank": ("LexRank", "lex_rank", "LexRankSummarizer"),
    "lsa": ("LSA", "lsa", "LsaSummarizer"),
    "sumbasic": ("SumBasic", "sum_basic", "SumBasicSummarizer"),
}
_SUMY_LANGUAGES = {
    "cs": "czech",
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "pt": "portuguese",
    "sk": "slovak",
}


@dataclass(frozen=True)
class RandomSelector:
    """Ranks sentences in a random order, which depends on the seed and the name of the document."""

    seed: int
    name: str = "random"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences."""
        rng = random.Random(f"{self.seed} {document.name}")
        indices = document.selectable
        order = rng.sample(indices, len(indices))
        return [RankedSentence(index, -float(rank)) for rank, index in enumerate(order)]


@dataclass(frozen=True)
class TextRankSelector:
    """TextRank (Mihalcea and Tarau, 2004): PageRank over the common words of sentences, by the log of their lengths.

    Args:
        name: human-readable name.
        damping: probability of following an edge.
        steps: number of power iterations.
    """

    name: str = "TextRank"
    damping: float = 0.85
    steps: int = 50

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences."""
        indices = document.selectable
        edges = _common_word_edges([document.sentences[index].text for index in indices])
        scores = np.full(len(indices), 1 / max(len(indices), 1))
        for _ in range(self.steps):
            scores = (1 - self.damping) / len(indices) + self.damping * edges.T @ scores
        order = np.argsort(-scores, kind="stable")
        return [RankedSentence(indices[position], float(scores[position])) for position in order]


def _common_word_edges(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the weights of the edges between sentences; those of each sentence sum to 1."""
    words = [split_words(text) or [text] for text in texts]
    # The annotation of the vectorizer does not allow a function as analyzer.
    vectorizer: Any = CountVectorizer
    counts = vectorizer(analyzer=list, binary=True).fit_transform(words)
    totals = np.asarray(counts.sum(axis=1)).ravel()
    lengths = np.log(np.maximum(totals, 1))
    scale = np.maximum(lengths[:, None] + lengths[None, :], 1e-9)
    edges = (counts @ counts.T).toarray() / scale
    np.fill_diagonal(edges, 0)
    return edges / np.maximum(edges.sum(axis=1, keepdims=True), 1e-9)


@dataclass(frozen=True)
class SumySelector:
    """A summarizer of sumy, with stop words and a stemmer for the languages that sumy supports.

    Args:
        method: the summarizer.
        block_size: number of sentences that are ranked at a time.
        pairwise: whether LexRank compares pairs of sentences with sumy's own code instead of a matrix product.
    """

    method: SumyMethod = "lexrank"
    block_size: int = 1000
    pairwise: bool = False

    @property
    def name(self) -> str:
        label, _, _ = _SUMY_METHODS[self.method]
        return f"{label} (sumy)"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Rank all selectable sentences; for a long document, only the best of each block, half a block in total."""
        summarizer = _summarizer(self.method, document.language, self.pairwise)
        candidates = document.selectable
        texts = {index: document.sentences[index].text for index in candidates}
        while len(candidates) > self.block_size:
            candidates = self._best_of_blocks(summarizer, candidates, texts)
        return _rank(summarizer, candidates, texts)

    def _best_of_blocks(self, summarizer: Any, candidates: list[int], texts: Mapping[int, str]) -> list[int]:
        """Return the best sentences of each block, in document order."""
        starts = range(0, len(candidates), self.block_size)
        share = max(self.block_size // 2 // len(starts), 1)
        best: list[int] = []
        for start in starts:
            block = candidates[start : start + self.block_size]
            ranking = _rank(summarizer, block, texts)
            best.extend(ranked.index for ranked in ranking[:share])
        return sorted(best)


def _rank(summarizer: Any, indices: list[int], texts: Mapping[int, str]) -> list[RankedSentence]:
    """Rank sentences by a summarizer's rating."""
    dom = import_extra("sumy.models.dom", "Ranking sentences")
    tokenizer = _SumyTokenizer()
    sentences = [dom.Sentence(texts[index], tokenizer) for index in indices]
    document = dom.ObjectDocumentModel([dom.Paragraph(sentences)])
    rated: list[Any] = []

    def keep_all(infos: Any) -> Any:
        """Return all rated sentences, best first; replaces sumy's function that selects some of them."""
        rated.extend(infos)
        return infos

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")  # sumy warns if there are fewer words than sentences
        summarizer(document, keep_all)
    if not rated:  # All words are stop words.
        return [RankedSentence(index, 0.0) for index in indices]
    return [RankedSentence(indices[info.order], _finite(info.rating)) for info in rated]


def _finite(rating: float) -> float:
    """Return a rating. It is NaN if no two sentences share a word; the order is then that of the document."""
    return 0.0 if math.isnan(rating) else float(rating)


class _SumyTokenizer:
    """The tokenizer interface that sumy expects."""

    def to_words(self, sentence: str) -> list[str]:
        return split_words(sentence) or [sentence]


@cache
def _summarizer(method: SumyMethod, language: str, pairwise: bool) -> Any:
    stemmers = import_extra("sumy.nlp.stemmers", "Ranking sentences")
    utils = import_extra("sumy.utils", "Ranking sentences")
    _, module_name, class_name = _SUMY_METHODS[method]
    module = import_extra(f"sumy.summarizers.{module_name}", "Ranking sentences")
    summarizer_class = getattr(module, class_name)
    if method == "lexrank" and not pairwise:
        summarizer_class = _matrix_lexrank(summarizer_class)
    sumy_language = _SUMY_LANGUAGES.get(language)
    if sumy_language is None:
        return summarizer_class(stemmers.null_stemmer)
    summarizer = summarizer_class(stemmers.Stemmer(sumy_language))
    summarizer.stop_words = utils.get_stop_words(sumy_language)
    return summarizer


def _matrix_lexrank(base: Any) -> Any:
    """Return sumy's LexRank with one matrix product instead of the comparison of all pairs."""

    class MatrixLexRank(base):
        @staticmethod
        def _compute_idf(sentences: list[list[str]]) -> dict[str, float]:
            counts = Counter[str]()
            for sentence in sentences:
                counts.update(set(sentence))
            return {term: math.log(len(sentences) / (1 + count)) for term, count in counts.items()}

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
