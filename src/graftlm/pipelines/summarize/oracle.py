"""Oracle labels: for each sentence of a summary, the most similar sentences of the document.

The score of a pair is the mean of ROUGE-1, 2 and L (F1), bit for bit as rouge-score computes it. An integer represents
all sentences of the summary, with one bit for each item, so that a sentence of the document is compared with all of
them at once. Longest common subsequences use Hyyrö's bit-parallel recurrence V ← (V + (V ∧ M)) ∨ (V − (V ∧ M)).

Shape suffixes: N sentences of the document, M of the summary.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from graftlm.pipelines.summarize.text import import_extra, ngrams

_TOKEN = re.compile(r"[a-z0-9]+")
_STEM_CACHE = 100_000  # number of cached words, which bounds the memory for any number of documents
_MIN_STEMMED = 4  # minimum length of a token that is stemmed

Floats = NDArray[np.float64]
Items = Sequence[Sequence[Hashable]]


def oracle_labels(document: Sequence[str], summary: Sequence[str], per_sentence: int = 2) -> list[list[int]]:
    """Return the best sentences of a document for each sentence of its summary.

    Args:
        document: sentences of the document.
        summary: sentences of the summary.
        per_sentence: number of best sentences; a shorter document gives all of its sentences.

    Returns:
        For each sentence of the summary, indices into `document`, best first. Ties go to the earlier sentence.

    Raises:
        MissingExtraError: NLTK is not installed.
    """
    return best_sentences(rouge_scores(document, summary), per_sentence)


def best_sentences(scores_NM: Floats, per_sentence: int) -> list[list[int]]:
    """Return the sentences of a document with the highest scores for each sentence of its summary.

    Args:
        scores_NM: scores of N sentences of the document for M sentences of the summary, (N, M).
        per_sentence: number of best sentences.

    Returns:
        For each sentence of the summary, indices of sentences of the document, best first.
    """
    order_NM = np.argsort(-scores_NM, axis=0, kind="stable")
    return order_NM[:per_sentence].T.tolist()


def oracle_extract(document: Sequence[str], summary: Sequence[str], per_sentence: int = 2) -> list[int]:
    """Return the indices of the sentences of `oracle_labels`, without duplicates and in document order.

    Arguments and errors are those of `oracle_labels`.
    """
    extract: set[int] = set()
    for labels in oracle_labels(document, summary, per_sentence):
        extract.update(labels)
    return sorted(extract)


def rouge_scores(document: Sequence[str], summary: Sequence[str]) -> Floats:
    """Return the mean of ROUGE-1, 2 and L (F1, 0 to 1) of each pair of sentences, float64, (N, M).

    Args:
        document: N sentences.
        summary: M sentences.

    Raises:
        MissingExtraError: NLTK is not installed.
    """
    tokens_N = [rouge_tokens(sentence) for sentence in document]
    tokens_M = [rouge_tokens(sentence) for sentence in summary]
    rouge_1 = _ngram_f1(tokens_N, tokens_M, 1)
    rouge_2 = _ngram_f1(tokens_N, tokens_M, 2)
    rouge_l = _f1(tokens_N, tokens_M, in_order=True)
    return (rouge_1 + rouge_2 + rouge_l) / 3


def rouge_tokens(text: str) -> list[str]:
    """Tokenize as rouge-score does: runs of a–z and 0–9 in lower case; tokens of four and more characters are stemmed.

    Raises:
        MissingExtraError: NLTK is not installed.
    """
    stem = _stemmer()
    tokens = _TOKEN.findall(text.lower())
    return [stem(token) if len(token) >= _MIN_STEMMED else token for token in tokens]


@cache
def _stemmer() -> Callable[[str], str]:
    porter = import_extra("nltk.stem.porter", "ROUGE")
    return lru_cache(_STEM_CACHE)(porter.PorterStemmer().stem)


def _ngram_f1(tokens_N: Sequence[Sequence[str]], tokens_M: Sequence[Sequence[str]], n: int) -> Floats:
    """Return the F1 of the common n-grams of each pair of sentences, shape (N, M)."""
    rows_N = [_numbered(ngrams(tokens, n)) for tokens in tokens_N]
    rows_M = [_numbered(ngrams(tokens, n)) for tokens in tokens_M]
    return _f1(rows_N, rows_M)


def _numbered(items: Iterable[Hashable]) -> list[Hashable]:
    """Number the occurrences of each item, so that a set intersection counts the common occurrences."""
    counts: defaultdict[Hashable, int] = defaultdict(int)
    numbered: list[Hashable] = []
    for item in items:
        numbered.append((item, counts[item]))
        counts[item] += 1
    return numbered


class _BitFields:
    """All rows of a summary as one integer: a field of bits for each row, with one bit for each item.

    A zero bit above each field takes the carry of additions.
    """

    def __init__(self, rows: Items) -> None:
        self.all_bits = 0
        self.masks: defaultdict[Hashable, int] = defaultdict(int)  # bits at which each item occurs
        self._fields: list[tuple[int, int]] = []  # first bit and mask of each field
        start = 0
        for row in rows:
            ones = (1 << len(row)) - 1
            self._fields.append((start, ones))
            self.all_bits |= ones << start
            for bit, item in enumerate(row, start):
                self.masks[item] |= 1 << bit
            start += len(row) + 1

    def count(self, bits: int) -> list[int]:
        """Return the number of ones in each field."""
        return [(bits >> start & ones).bit_count() for start, ones in self._fields]


def _f1(rows_N: Items, rows_M: Items, *, in_order: bool = False) -> Floats:
    """Return F1 = 2PR / (P + R) of the common items, in rouge-score's order of operations, shape (N, M).

    Args:
        rows_N: items of each sentence of the document.
        rows_M: items of each sentence of the summary.
        in_order: count the items of a longest common subsequence, instead of all common items.
    """
    common_NM = _common_items(rows_N, rows_M, in_order=in_order)
    precision_NM = common_NM / _lengths(rows_N)[:, None]
    recall_NM = common_NM / _lengths(rows_M)
    total_NM = precision_NM + recall_NM
    return np.divide(
        2 * precision_NM * recall_NM,
        total_NM,
        out=np.zeros_like(total_NM),
        where=total_NM > 0,
    )


def _common_items(rows_N: Items, rows_M: Items, *, in_order: bool) -> Floats:
    """Return the number of common items of each pair of rows, shape (N, M)."""
    fields = _BitFields(rows_M)
    common_NM = np.empty((len(rows_N), len(rows_M)))
    for index, row in enumerate(rows_N):
        unmatched = fields.all_bits
        for item in row:
            if item not in fields.masks:
                continue
            matched = unmatched & fields.masks[item]
            if in_order:
                unmatched = ((unmatched + matched) | (unmatched - matched)) & fields.all_bits
            else:
                unmatched -= matched
        common_NM[index] = fields.count(fields.all_bits ^ unmatched)
    return common_NM


def _lengths(rows: Items) -> Floats:
    """Return the number of items of each row, or 1 for an empty row."""
    return np.array([max(len(row), 1) for row in rows], dtype=float)
