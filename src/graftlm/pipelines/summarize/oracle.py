"""Oracle labels: for each sentence of a summary, the most similar sentences of the document.

The score of a pair is the mean of ROUGE-1, 2 and L (F1), bit for bit as rouge-score computes it. Here all pairs are
scored at once. N-grams are counted in matrices. Longest common subsequences use Hyyrö's bit-parallel recurrence
V ← (V + (V ∧ M)) ∨ (V ∧ ¬M), with one 64-bit word for each pair, over all pairs in lockstep.

Shape suffixes: N sentences of the document, M of the summary, U distinct n-grams of the summary, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.pipelines.summarize.text import ngrams, rouge_tokens

_WORD_BITS = 64
_MAX_CELLS = 4_000_000  # size of a temporary array

TokenLists = Sequence[Sequence[str]]
FloatArray = NDArray[np.float64]


def oracle_labels(document: Sequence[str], summary: Sequence[str], per_sentence: int = 2) -> list[list[int]]:
    """Return for each sentence of the summary the `per_sentence` best sentences of the document.

    Ties go to the earlier sentence. A document with fewer sentences gives all of them.

    Returns:
        M lists of indices, best first.
    """
    scores_NM = rouge_scores(document, summary)
    best_NM = np.argsort(-scores_NM, axis=0, kind="stable")[:per_sentence]
    return [[int(index) for index in column] for column in best_NM.T]


def oracle_extract(document: Sequence[str], summary: Sequence[str], per_sentence: int = 2) -> list[int]:
    """Return the distinct sentences of `oracle_labels` in document order."""
    return sorted({index for labels in oracle_labels(document, summary, per_sentence) for index in labels})


def rouge_scores(document: Sequence[str], summary: Sequence[str]) -> FloatArray:
    """Return the mean of ROUGE-1, 2 and L (F1) of each pair of sentences, shape (N, M)."""
    tokens_N = [rouge_tokens(sentence) for sentence in document]
    tokens_M = [rouge_tokens(sentence) for sentence in summary]
    if not tokens_N or not tokens_M:
        return np.zeros((len(tokens_N), len(tokens_M)))
    unigrams, bigrams = (_ngram_f1(tokens_N, tokens_M, n) for n in (1, 2))
    return (unigrams + bigrams + _subsequence_f1(tokens_N, tokens_M)) / 3


def _ngram_f1(tokens_N: TokenLists, tokens_M: TokenLists, n: int) -> FloatArray:
    grams_N, grams_M = ([ngrams(tokens, n) for tokens in side] for side in (tokens_N, tokens_M))
    vocabulary: dict[tuple[str, ...], int] = {}
    for gram in (gram for grams in grams_M for gram in grams):
        vocabulary.setdefault(gram, len(vocabulary))
    counts_NU, counts_MU = (_count_ngrams(grams, vocabulary) for grams in (grams_N, grams_M))
    common_NM = np.empty((len(tokens_N), len(tokens_M)))
    for column, counts_U in enumerate(counts_MU):
        (present,) = np.nonzero(counts_U)
        common_NM[:, column] = np.minimum(counts_NU[:, present], counts_U[present]).sum(axis=1)
    return _f1(common_NM, _lengths(grams_N), _lengths(grams_M))


def _count_ngrams(
    sentences: Sequence[Sequence[tuple[str, ...]]], vocabulary: dict[tuple[str, ...], int]
) -> NDArray[np.int32]:
    """Count each n-gram of the vocabulary in each sentence, shape (sentences, U)."""
    width = max(len(vocabulary), 1)
    cells = [
        row * width + vocabulary[gram] for row, grams in enumerate(sentences) for gram in grams if gram in vocabulary
    ]
    counts = np.bincount(np.asarray(cells, dtype=np.int64), minlength=len(sentences) * width)
    return counts.reshape(len(sentences), width).astype(np.int32)


def _subsequence_f1(tokens_N: TokenLists, tokens_M: TokenLists) -> FloatArray:
    common_NM = np.empty((len(tokens_N), len(tokens_M)))
    short = [column for column, tokens in enumerate(tokens_M) if len(tokens) <= _WORD_BITS]
    if short:
        common_NM[:, short] = _common_lengths(tokens_N, [tokens_M[column] for column in short])
    for column in set(range(len(tokens_M))) - set(short):
        common_NM[:, column] = [_common_length(tokens, tokens_M[column]) for tokens in tokens_N]
    return _f1(common_NM, _lengths(tokens_N), _lengths(tokens_M))


def _common_lengths(tokens_N: TokenLists, tokens_M: TokenLists) -> NDArray[np.int64]:
    """Return lengths of longest common subsequences, shape (N, M); sentences of the summary have up to 64 tokens."""
    vocabulary = {token: row for row, token in enumerate(dict.fromkeys(token for row in tokens_M for token in row))}
    masks_UM = np.zeros((len(vocabulary) + 1, len(tokens_M)), dtype=np.uint64)  # last row: padding, matches nothing
    for column, tokens in enumerate(tokens_M):
        for bit, token in enumerate(tokens):
            masks_UM[vocabulary[token], column] |= np.uint64(1 << bit)
    ids_N = [[vocabulary[token] for token in tokens if token in vocabulary] for tokens in tokens_N]
    longest_first = sorted(range(len(ids_N)), key=lambda row: -len(ids_N[row]))
    lengths_NM = np.zeros((len(tokens_N), len(tokens_M)), dtype=np.int64)
    step = max(1, _MAX_CELLS // len(tokens_M))
    for first in range(0, len(longest_first), step):
        rows = longest_first[first : first + step]
        lengths_NM[rows] = _common_lengths_in_lockstep([ids_N[row] for row in rows], masks_UM)
    return lengths_NM


def _common_lengths_in_lockstep(ids_N: Sequence[Sequence[int]], masks_UM: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return common lengths, shape (N, M), of sentences sorted longest first and given as rows of `masks_UM`."""
    longest = len(ids_N[0]) if ids_N else 0
    ids_NT = np.full((len(ids_N), longest), len(masks_UM) - 1)
    for row, ids in enumerate(ids_N):
        ids_NT[row, : len(ids)] = ids
    state_NM = np.full((len(ids_N), masks_UM.shape[1]), ~np.uint64(0))
    lengths_N = np.array([len(ids) for ids in ids_N])
    for position in range(longest):
        active = int(np.searchsorted(-lengths_N, -position, side="left"))  # sentences with more tokens
        state, mask = state_NM[:active], masks_UM[ids_NT[:active, position]]
        matched = state & mask
        state_NM[:active] = (state + matched) | (state - matched)
    return np.bitwise_count(~state_NM).astype(np.int64)


def _common_length(tokens: Sequence[str], other: Sequence[str]) -> int:
    """Return the common length of one pair, with an integer of any width as the bit vector."""
    masks: dict[str, int] = {}
    for bit, token in enumerate(other):
        masks[token] = masks.get(token, 0) | 1 << bit
    all_bits = (1 << len(other)) - 1
    state = all_bits
    for mask in (masks[token] for token in tokens if token in masks):
        matched = state & mask
        state = ((state + matched) | (state - matched)) & all_bits
    return len(other) - state.bit_count()


def _f1(common_NM: NDArray[np.generic], length_N: FloatArray, length_M: FloatArray) -> FloatArray:
    """Return F1 = 2PR / (P + R) from common counts, in rouge-score's order of operations."""
    precision = common_NM / np.maximum(length_N, 1)[:, None]
    recall = common_NM / np.maximum(length_M, 1)
    total = precision + recall
    return np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)


def _lengths(sentences: Iterable[Sequence[object]]) -> FloatArray:
    return np.array([len(sentence) for sentence in sentences], dtype=np.float64)
