"""Oracle labels: for each sentence of a summary the sentences of the document that resemble it most.

The score of a document's sentence for a summary's sentence is the mean of ROUGE-1, 2 and L (F1), exactly as rouge-score
gives them, to the bit. Here they are counted for all pairs at once: n-grams in matrices, and common subsequences by
Hyyrö's bit-parallel recurrence V ← (V + (V ∧ M)) ∨ (V ∧ ¬M), one 64-bit word per pair, in lockstep over tokens.

Shapes: N sentences of the document, M of the summary, U different n-grams of the summary, T tokens of a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.pipelines.summarize.text import ngrams, rouge_tokens

_BITS = 64
_CELLS = 4_000_000  # of a temporary array

Tokens = Sequence[Sequence[str]]
Floats = NDArray[np.float64]


def oracle_labels(
    document: Sequence[str], summary: Sequence[str], each: int = 2, *, stem: bool = True
) -> list[list[int]]:
    """For each sentence of the summary the `each` sentences of the document with the largest mean of ROUGE-1, 2 and L.

    Of sentences that score the same the earlier comes first. Shorter documents give all they have.

    Returns:
        M lists of indices, best first.
    """
    scores_NM = rouge_scores(document, summary, stem=stem)
    best_NM = np.argsort(-scores_NM, axis=0, kind="stable")[:each]
    return [[int(index) for index in column] for column in best_NM.T]


def oracle_extract(document: Sequence[str], summary: Sequence[str], each: int = 2, *, stem: bool = True) -> list[int]:
    """The sentences of `oracle_labels`, once each and in the document's order."""
    return sorted({index for labels in oracle_labels(document, summary, each, stem=stem) for index in labels})


def rouge_scores(document: Sequence[str], summary: Sequence[str], *, stem: bool = True) -> Floats:
    """The mean of ROUGE-1, 2 and L (F1) of each document's sentence with each summary's sentence, (N, M)."""
    tokens_N = [rouge_tokens(sentence, stem) for sentence in document]
    tokens_M = [rouge_tokens(sentence, stem) for sentence in summary]
    if not tokens_N or not tokens_M:
        return np.zeros((len(tokens_N), len(tokens_M)))
    unigrams, bigrams = (_ngram_f1(tokens_N, tokens_M, n) for n in (1, 2))
    return (unigrams + bigrams + _subsequence_f1(tokens_N, tokens_M)) / 3


def _ngram_f1(tokens_N: Tokens, tokens_M: Tokens, n: int) -> Floats:
    grams_N, grams_M = ([ngrams(tokens, n) for tokens in side] for side in (tokens_N, tokens_M))
    known: dict[tuple[str, ...], int] = {}
    for gram in (gram for grams in grams_M for gram in grams):
        known.setdefault(gram, len(known))
    counts_NU, counts_MU = (_counts(grams, known) for grams in (grams_N, grams_M))
    common_NM = np.empty((len(tokens_N), len(tokens_M)))
    for column, counts_U in enumerate(counts_MU):
        (present,) = np.nonzero(counts_U)
        common_NM[:, column] = np.minimum(counts_NU[:, present], counts_U[present]).sum(axis=1)
    return _f1(common_NM, _lengths(grams_N), _lengths(grams_M))


def _counts(sentences: Sequence[Sequence[tuple[str, ...]]], known: dict[tuple[str, ...], int]) -> NDArray[np.int32]:
    """How often each known n-gram stands in each sentence, (sentences, U)."""
    width = max(len(known), 1)
    places = [row * width + known[gram] for row, grams in enumerate(sentences) for gram in grams if gram in known]
    found = np.bincount(np.asarray(places, dtype=np.int64), minlength=len(sentences) * width)
    return found.reshape(len(sentences), width).astype(np.int32)


def _subsequence_f1(tokens_N: Tokens, tokens_M: Tokens) -> Floats:
    common_NM = np.empty((len(tokens_N), len(tokens_M)))
    short = [column for column, tokens in enumerate(tokens_M) if len(tokens) <= _BITS]
    if short:
        common_NM[:, short] = _common_short(tokens_N, [tokens_M[column] for column in short])
    for column in set(range(len(tokens_M))) - set(short):
        common_NM[:, column] = [_common_long(tokens, tokens_M[column]) for tokens in tokens_N]
    return _f1(common_NM, _lengths(tokens_N), _lengths(tokens_M))


def _common_short(tokens_N: Tokens, tokens_M: Tokens) -> NDArray[np.int64]:
    """Lengths of longest common subsequences with sentences of at most 64 tokens, (N, M)."""
    known = {
        token: index for index, token in enumerate(dict.fromkeys(token for tokens in tokens_M for token in tokens))
    }
    masks_UM = np.zeros((len(known) + 1, len(tokens_M)), dtype=np.uint64)  # the last row: a token of no sentence
    for column, tokens in enumerate(tokens_M):
        for bit, token in enumerate(tokens):
            masks_UM[known[token], column] |= np.uint64(1 << bit)
    shared_N = [[known[token] for token in tokens if token in known] for tokens in tokens_N]
    order = sorted(range(len(shared_N)), key=lambda row: -len(shared_N[row]))
    lengths_NM = np.zeros((len(tokens_N), len(tokens_M)), dtype=np.int64)
    step = max(1, _CELLS // len(tokens_M))
    for first in range(0, len(order), step):
        rows = order[first : first + step]
        lengths_NM[rows] = _in_lockstep([shared_N[row] for row in rows], masks_UM)
    return lengths_NM


def _in_lockstep(shared_N: Sequence[Sequence[int]], masks_UM: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Common lengths of sentences, longest first, given as rows of `masks_UM`, (N, M)."""
    longest = len(shared_N[0]) if shared_N else 0
    ids_NT = np.full((len(shared_N), longest), len(masks_UM) - 1)
    for row, ids in enumerate(shared_N):
        ids_NT[row, : len(ids)] = ids
    state_NM = np.full((len(shared_N), masks_UM.shape[1]), ~np.uint64(0))
    lengths_N = np.array([len(ids) for ids in shared_N])
    for place in range(longest):
        active = int(np.searchsorted(-lengths_N, -place, side="left"))  # sentences longer than `place`
        state, mask = state_NM[:active], masks_UM[ids_NT[:active, place]]
        matched = state & mask
        state_NM[:active] = (state + matched) | (state - matched)
    return np.bitwise_count(~state_NM).astype(np.int64)


def _common_long(tokens: Sequence[str], other: Sequence[str]) -> int:
    """The same for one pair, in an integer of any length."""
    masks: dict[str, int] = {}
    for bit, token in enumerate(other):
        masks[token] = masks.get(token, 0) | 1 << bit
    whole = (1 << len(other)) - 1
    state = whole
    for mask in (masks[token] for token in tokens if token in masks):
        matched = state & mask
        state = ((state + matched) | (state - matched)) & whole
    return len(other) - state.bit_count()


def _f1(common_NM: NDArray[np.generic], length_N: Floats, length_M: Floats) -> Floats:
    """F1 = 2PR / (P + R) of common counts, in the order of operations of rouge-score."""
    precision = common_NM / np.maximum(length_N, 1)[:, None]
    recall = common_NM / np.maximum(length_M, 1)
    total = precision + recall
    return np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)


def _lengths(sentences: Iterable[Sequence[object]]) -> Floats:
    return np.array([len(sentence) for sentence in sentences], dtype=np.float64)
