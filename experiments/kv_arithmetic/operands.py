"""Operands of an expression, drawn uniformly over those whose results stay in range.

Rejection sampling of single operands is exact, but too slow for products. Of two operands up to 25,000 one product in
2,400 stays in range; of three, one in 10^7. So a run of products is drawn jointly. Of its

    count_m(limit) = sum over v of count_{m-1}(limit // v),    count_0 = 1

runs of m operands with a product up to `limit`, count_{m-1}(limit // v) begin with v. The rest of the run has the limit
limit // v. There are at most 2 sqrt(limit) different limits, and their counts are cached. Runs are independent, so only
their sums and differences need rejection.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_BATCH = 512
_BATCHES = 64  # six operands up to 25,000 without a product take about 720 draws


class Operands:
    """Draws independent operands for given operations.

    Args:
        values: (N,) values of the available operands, from 1 to `largest`.
        largest: maximum of every intermediate number; the minimum is 1.
        seed: random seed.
    """

    def __init__(self, values: Sequence[int], largest: int, seed: int) -> None:
        array = np.asarray(values, dtype=np.int64)
        self.largest = largest
        self._order: Ints = np.argsort(array, kind="stable")
        self._values: Ints = array[self._order]
        self._source = np.random.default_rng(seed)
        self._counts_cache: dict[tuple[int, int], Ints] = {}
        self._pending: dict[str, list[list[int]]] = {}
        self._impossible: set[str] = set()

    def draw(self, operations: str) -> list[int] | None:
        """Indices into `values`, one more than operations; None if no operands stay in range."""
        ready = self._pending.setdefault(operations, [])
        if not ready and operations not in self._impossible:
            ready += self._draw_batch(operations)
            if not ready:
                self._impossible.add(operations)
        return ready.pop() if ready else None

    def _draw_batch(self, operations: str) -> list[list[int]]:
        lengths, signs = _runs(operations)
        if not all(self._count(length, self.largest) for length in lengths):
            return []
        for _ in range(_BATCHES):
            runs = [self._draw_run(length) for length in lengths]
            terms = np.stack([self._values[run].prod(axis=1) for run in runs], axis=1)
            sums_BT = np.cumsum(terms * np.asarray(signs), axis=1)
            within_B = ((sums_BT >= 1) & (sums_BT <= self.largest)).all(axis=1)
            if within_B.any():
                return self._order[np.concatenate(runs, axis=1)[within_B]].tolist()
        return []

    def _draw_run(self, length: int) -> Ints:
        """(B, length) indices into the ordered values, whose product stays in range."""
        left_B = np.full(_BATCH, self.largest)
        drawn = np.empty((_BATCH, length), dtype=np.int64)
        for index in range(length):
            drawn[:, index] = self._first_index(left_B, length - index)
            left_B //= self._values[drawn[:, index]]
        return drawn

    def _first_index(self, limits_B: Ints, length: int) -> Ints:
        """(B,) the first index of a run of this length whose product stays within each row's limit."""
        if length == 1:
            return self._source.integers(np.searchsorted(self._values, limits_B, side="right"))
        drawn = np.empty(len(limits_B), dtype=np.int64)
        for limit in np.unique(limits_B):
            rows = np.flatnonzero(limits_B == limit)
            sums = self._cumulative_counts(length, int(limit))
            drawn[rows] = np.searchsorted(sums, self._source.integers(sums[-1], size=len(rows)), side="right")
        return drawn

    def _cumulative_counts(self, length: int, limit: int) -> Ints:
        """Cumulative counts, over the ordered first values, of the runs within a limit."""
        if (length, limit) not in self._counts_cache:
            values = self._values[: np.searchsorted(self._values, limit, side="right")]
            left, which = np.unique(limit // values, return_inverse=True)
            counts = np.array([self._count(length - 1, int(remaining)) for remaining in left], dtype=np.int64)
            self._counts_cache[length, limit] = np.cumsum(counts[which])
        return self._counts_cache[length, limit]

    def _count(self, length: int, limit: int) -> int:
        """count_m(limit)."""
        if length == 0:
            return 1
        sums = self._cumulative_counts(length, limit)
        return int(sums[-1]) if len(sums) else 0


def _runs(operations: str) -> tuple[list[int], list[int]]:
    """The number of operands in each run of products, and the sign before it."""
    lengths, signs = [1], [1]
    for operation in operations:
        if operation == "*":
            lengths[-1] += 1
        else:
            lengths.append(1)
            signs.append(1 if operation == "+" else -1)
    return lengths, signs
