"""Oracle labels: for each sentence of a summary, the most similar sentences of the document.

The score of a pair is the mean of ROUGE-1, 2 and L (F1), bit for bit as rouge-score computes it. One integer has a bit
for each item of the summary, so a sentence of the document meets all sentences of the summary at once. Longest common
subsequences use Hyyrö's bit-parallel recurrence V ← (V + (V ∧ M)) ∨ (V − (V ∧ M)).

Shape suffixes: N sentences of the document, M of the summary.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.pipelines.summarize.text import import_extra, ngrams

_TOKEN = re.compile(r"[a-z0-9]+")
_STEM_CACHE = 100_000  # the latest words, however many documents there are

Items = Sequence[Sequence[Hashable]]


def oracle_labels(document: Sequence[str], summary: Sequence[str], per_sentence: int = 2) -> list[list[int]]:
    """Return for each sentence of the summary the `per_sentence` best sentences of the document, best first.

    Ties go to the earlier sentence. A document with fewer sentences gives all of them.
    """
    scores_NM = rouge_scores(document, summary)
    return np.argsort(-scores_NM, axis=0, kind="stable")[:per_sentence].T.tolist()


def oracle_extract(document: Sequence[str], summary: Sequence[str], per_sentence: int = 2) -> list[int]:
    """Return the distinct sentences of `oracle_labels` in document order."""
    return sorted({index for labels in oracle_labels(document, summary, per_sentence) for index in labels})


def rouge_scores(document: Sequence[str], summary: Sequence[str]) -> NDArray[np.float64]:
    """Return the mean of ROUGE-1, 2 and L (F1) of each pair of sentences, shape (N, M)."""
    sides = [[rouge_tokens(sentence) for sentence in side] for side in (document, summary)]
    unigrams, bigrams = (_f1(*([_numbered(ngrams(row, n)) for row in side] for side in sides)) for n in (1, 2))
    return (unigrams + bigrams + _f1(*sides, in_order=True)) / 3


def rouge_tokens(text: str) -> list[str]:
    """Tokenize as rouge-score does: runs of a–z and 0–9 in lower case; tokens above three characters are stemmed."""
    stemmed = _stemmer()
    return [stemmed(token) if len(token) > 3 else token for token in _TOKEN.findall(text.lower())]


@cache
def _stemmer() -> Callable[[str], str]:
    porter: Any = import_extra("nltk.stem.porter", "ROUGE")
    return lru_cache(_STEM_CACHE)(porter.PorterStemmer().stem)


def _numbered(items: Iterable[Hashable]) -> list[Hashable]:
    """Number the occurrences of each item, so that a set intersection counts the common occurrences."""
    numbers: defaultdict[Hashable, count[int]] = defaultdict(count)
    return [(item, next(numbers[item])) for item in items]


def _f1(rows_N: Items, rows_M: Items, *, in_order: bool = False) -> NDArray[np.float64]:
    """Return F1 = 2PR / (P + R) of the common items in rouge-score's order of operations, shape (N, M).

    In order, the common items are a longest common subsequence. Each row of the summary has a field of bits, and behind
    it a bit of zero that takes the carry of additions.
    """
    starts = list(accumulate((len(row) + 1 for row in rows_M), initial=0))
    fields = [(start, (1 << len(row)) - 1) for start, row in zip(starts, rows_M, strict=False)]
    all_bits = sum(ones << start for start, ones in fields)
    masks: defaultdict[Hashable, int] = defaultdict(int)
    for start, row in zip(starts, rows_M, strict=False):
        for bit, item in enumerate(row, start):
            masks[item] |= 1 << bit
    common_NM = np.empty((len(rows_N), len(rows_M)))
    for index, row in enumerate(rows_N):
        rest = all_bits
        for mask in (masks[item] for item in row if item in masks):
            matched = rest & mask
            rest = ((rest + matched) | (rest - matched)) & all_bits if in_order else rest - matched
        common_NM[index] = [((all_bits ^ rest) >> start & ones).bit_count() for start, ones in fields]
    precision = common_NM / np.array([max(len(row), 1) for row in rows_N], dtype=float)[:, None]
    recall = common_NM / np.array([max(len(row), 1) for row in rows_M], dtype=float)
    total = precision + recall
    return np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
