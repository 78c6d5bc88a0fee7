"""Rivals of the default selector: sumy's LexRank, LSA and SumBasic, TextRank, and a random order.

sumy's LexRank compares each pair of sentences in Python; here one matrix product gives the same numbers. Long documents
are ranked in blocks, then the best sentences of all blocks together, so memory is bounded.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

from graftlm.pipelines.summarize import RankedSentence, SourceDocument
from graftlm.pipelines.summarize.text import import_extra, split_words

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


@dataclass(frozen=True)
class RandomSelector:
    """Ranks sentences in a random order, which seed and document decide."""

    seed: int
    name: str = "random"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences."""
        order = random.Random(f"{self.seed} {document.name}").sample(document.selectable, len(document.selectable))
        return [RankedSentence(index, -float(rank)) for rank, index in enumerate(order)]


@dataclass(frozen=True)
class TextRankSelector:
    """Mihalcea and Tarau's TextRank: PageRank over the common words of sentences, by the log of their lengths."""

    name: str = "TextRank"
    damping: float = 0.85
    steps: int = 50

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return all selectable sentences."""
        indices = document.selectable
        texts = [document.sentences[index].text for index in indices]
        vectorizer: Any = CountVectorizer  # takes a function as analyzer, which its annotation lacks
        words: Any = vectorizer(analyzer=lambda text: split_words(text) or [text], binary=True).fit_transform(texts)
        lengths = np.log(np.maximum(np.asarray(words.sum(axis=1)).ravel(), 1))
        scale = np.maximum(lengths[:, None] + lengths[None, :], 1e-9)
        edges = (words @ words.T).toarray() / scale
        np.fill_diagonal(edges, 0)
        edges /= np.maximum(edges.sum(axis=1, keepdims=True), 1e-9)
        scores = np.full(len(indices), 1 / max(len(indices), 1))
        for _ in range(self.steps):
            scores = (1 - self.damping) / len(indices) + self.damping * edges.T @ scores
        order = np.argsort(-scores, kind="stable")
        return [RankedSentence(indices[position], float(scores[position])) for position in order]


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
