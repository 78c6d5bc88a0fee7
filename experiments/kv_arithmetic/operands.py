"""Operands of an expression, drawn uniformly over those whose results stay in range.

To draw operands freely and try again is exact, and hopeless for products: of two operands up to 25,000 one product in
2,400 stays in range, of three one in 10^7. So a run of products is drawn as a whole. Of its

    count_m(limit) = sum over v of count_{m-1}(limit // v),    count_0 = 1

ways to put in m operands with a product up to `limit`, count_{m-1}(limit // v) begin with v, and what follows has
limit // v left: at most 2 sqrt(limit) different limits, whose counts are kept. Runs do not depend on each other, so
only their sums and differences are tried again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_BATCH = 512
_BATCHES = 64  # six operands up to 25,000 of which none is multiplied take some 720 draws


class Operands:
    """Draws of operands for given operations; all that were ever drawn are independent of each other.

    Args:
        values: (N,) of the operands there are, positive and up to `largest`.
        largest: number that may come up on the way to the result; the least is 1.
        seed: of the draws.
    """

    def __init__(self, values: Sequence[int], largest: int, seed: int) -> None:
        found = np.asarray(values, dtype=np.int64)
        self.largest = largest
        self._order: Ints = np.argsort(found, kind="stable")
        self._values: Ints = found[self._order]
        self._source = np.random.default_rng(seed)
        self._sums: dict[tuple[int, int], Ints] = {}
        self._ready: dict[str, list[list[int]]] = {}
        self._without: set[str] = set()

    def draw(self, operations: str) -> list[int] | None:
        """Places in `values` of one operand more than there are operations; None where none were found."""
        ready = self._ready.setdefault(operations, [])
        if not ready and operations not in self._without:
            ready += self._several(operations)
            if not ready:
                self._without.add(operations)
        return ready.pop() if ready else None

    def _several(self, operations: str) -> list[list[int]]:
        lengths, signs = _runs(operations)
        if not all(self._count(length, self.largest) for length in lengths):
            return []
        for _ in range(_BATCHES):
            runs = [self._run(length) for length in lengths]
            terms = np.stack([self._values[places].prod(axis=1) for places in runs], axis=1)
            sums_BT = np.cumsum(terms * np.asarray(signs), axis=1)
            within_B = ((sums_BT >= 1) & (sums_BT <= self.largest)).all(axis=1)
            if within_B.any():
                return self._order[np.concatenate(runs, axis=1)[within_B]].tolist()
        return []

    def _run(self, length: int) -> Ints:
        """(B, length) places in the ordered values of operands whose product stays in range."""
        left_B = np.full(_BATCH, self.largest)
        drawn = np.empty((_BATCH, length), dtype=np.int64)
        for place in range(length):
            drawn[:, place] = self._first(left_B, length - place)
            left_B //= self._values[drawn[:, place]]
        return drawn

    def _first(self, limits_B: Ints, length: int) -> Ints:
        """(B,) the first place of a run of this length, whose product stays within each row's limit."""
        if length == 1:
            return self._source.integers(np.searchsorted(self._values, limits_B, side="right"))
        drawn = np.empty(len(limits_B), dtype=np.int64)
        for limit in np.unique(limits_B):
            rows = np.flatnonzero(limits_B == limit)
            sums = self._summed(length, int(limit))
            drawn[rows] = np.searchsorted(sums, self._source.integers(sums[-1], size=len(rows)), side="right")
        return drawn

    def _summed(self, length: int, limit: int) -> Ints:
        """How many runs within a limit begin with the smallest value, the two smallest, and so on."""
        if (length, limit) not in self._sums:
            values = self._values[: np.searchsorted(self._values, limit, side="right")]
            left, which = np.unique(limit // values, return_inverse=True)
            counts = np.array([self._count(length - 1, int(one)) for one in left], dtype=np.int64)
            self._sums[length, limit] = np.cumsum(counts[which])
        return self._sums[length, limit]

    def _count(self, length: int, limit: int) -> int:
        """count_m(limit)."""
        if length == 0:
            return 1
        sums = self._summed(length, limit)
        return int(sums[-1]) if len(sums) else 0


def _runs(operations: str) -> tuple[list[int], list[int]]:
    """How many operands each run of products has, and the sign before it."""
    lengths, signs = [1], [1]
    for operation in operations:
        if operation == "*":
            lengths[-1] += 1
        else:
            lengths.append(1)
            signs.append(1 if operation == "+" else -1)
    return lengths, signs
