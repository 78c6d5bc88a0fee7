"""Rows of several sources, interleaved so that each source has an exact share of the tokens.

Row n comes from one of the sources whose tokens so far are below their share after one more row. Of these it is the one
whose next row must come first:

    allowed   t_i < (t + L) p_i                    t_i: tokens of source i so far, t: of all sources, L: of a full row
    chosen    the allowed i with the smallest (t_i + L) / p_i, and of equal ones the first

No source is ever more than a row ahead: t_i - t p_i < L. If all rows are full, none is a row behind either. Each row of
a source then has a window in which it must be drawn, and choosing the earliest end meets all of them (Baruah et al.,
Proportionate progress, 1996):

    |x_i - n p_i| < 1                              x_i: rows of source i among the first n

Each source repeats by itself, every time in a new order.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TypedDict, cast

import numpy as np

from graftlm.data.blocks import Digest, RowsWithoutTarget, TokenBlocks
from graftlm.data.boundaries import Boundaries
from graftlm.data.marked_ids import PADDING
from graftlm.data.streams import StreamingBlocks, TextRead
from graftlm.errors import DataError

_MAX_PERIOD = 1 << 18  # rows after which an interleaving of rows in memory repeats
_ROUNDING = 0.05  # largest change of a share, relative to it, by the rounding to such a period
_CHUNK = 1 << 12  # rows whose sources are looked up together


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """Return the smallest whole numbers in the proportions of positive weights."""
    factor = math.lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * factor) for weight in weights]
    divisor = math.gcd(*numbers)
    return [number // divisor for number in numbers]


class Choice:
    """The rule that chooses the source of the next row.

    Args:
        weights: a positive whole number for each source, in the proportions of their shares.
        row: number of tokens of a full row.
    """

    def __init__(self, weights: Sequence[int], row: int) -> None:
        self.weights = list(weights)
        self.row = row
        self._total = sum(weights)
        common = math.lcm(*weights)
        self._costs = [common // weight for weight in weights]  # in the proportions of 1 / p_i

    def next(self, tokens: Sequence[int]) -> int:
        """Return the number of the source of the next row.

        Args:
            tokens: number of tokens of each source so far.
        """
        limit = sum(tokens) + self.row
        best, lowest = -1, 0
        for number, weight in enumerate(self.weights):
            if tokens[number] * self._total < limit * weight:
                end = (tokens[number] + self.row) * self._costs[number]
                if best < 0 or end < lowest:
                    best, lowest = number, end
        assert best >= 0, "the tokens of all sources can't exceed their shares together"
        return best


class InterleavedBlocks:
    """Packed rows of several sources in memory. Rows can be drawn in any order.

    Rows of a source that are padded have fewer tokens than those of another. The rows are therefore shared out so that
    the weights are those of tokens over whole epochs.

    Args:
        parts: the rows of each source, of the same form.
        weights: the weight of each source, above 0. The shares of rows are rounded to multiples of about 1/262,144
            where whole numbers of at most this sum do not express them.

    Raises:
        DataError: the weights are so unequal that a share would be rounded by more than 5% of it.
    """

    def __init__(self, parts: Sequence[TokenBlocks], weights: Sequence[Fraction]) -> None:
        _check_form(parts)
        first = parts[0]
        self.length = first.length
        self.pad_id = first.pad_id
        self.boundaries: Boundaries = first.boundaries
        self.parts = list(parts)
        self.marked = np.concatenate([part.marked for part in parts])
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        # Views, so that the rows are in memory once.
        for part, (start, stop) in zip(self.parts, pairwise(self._starts), strict=True):
            part.marked = self.marked[start:stop]
        by_row = [weight * len(part) / part.n_tokens() for weight, part in zip(weights, parts, strict=True)]
        names = [", ".join(part.tokens_by_source) for part in parts]
        self.weights = limited_weights(by_row, names)
        self._sources = _period(self.weights)
        ones = self._sources[:, None] == np.arange(len(parts))
        self._counts = np.concatenate([np.zeros((1, len(parts)), dtype=np.int64), np.cumsum(ones, axis=0)])
        self._chunks: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.marked)

    @property
    def ignored_keys(self) -> Mapping[str, int]:
        """How often each key of messages and column beside them was not read; see `RowPacker`."""
        return _sum(part.ignored_keys for part in self.parts)

    def without_target(self) -> RowsWithoutTarget:
        """Return the numbers of rows that have no predicted token."""
        parts = [part.without_target() for part in self.parts]
        return RowsWithoutTarget(
            unscored=sum(part.unscored for part in parts),
            single=sum(part.single for part in parts),
        )

    def text_read(self, rows: int) -> list[TextRead]:
        """Return how much of each source was read in the first `rows` rows of `take`."""
        counts = self.counts(rows)
        return [read for part, count in zip(self.parts, counts, strict=True) for read in part.text_read(count)]

    def add_to_digest(self, digest: Digest) -> None:
        """Add everything that determines the rows of `take`, besides its key, to a digest."""
        sizes = [len(part) for part in self.parts]
        digest.update(f"interleaved {self.weights} {sizes}".encode())
        digest.update(self.marked.tobytes())

    def counts(self, rows: int) -> list[int]:
        """Return the number of rows of each source among the first `rows` rows."""
        periods, rest = divmod(rows, len(self._sources))
        return (periods * self._counts[-1] + self._counts[rest]).tolist()

    def take(self, first: int, count: int, key: tuple[int, ...]) -> np.ndarray:
        """Return rows of an endless sequence.

        Args:
            first: position of the first returned row in the sequence, from 0.
            count: number of rows to return.
            key: the seed and the domain, which determine the orders of the rows of each source.

        Returns:
            Marked ids, int32, (count, length).
        """
        return self.draw(first, count, key)[0]

    def draw(self, first: int, count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of `take`, and the number of the source of each, int64, (count,)."""
        rows = [np.empty(0, dtype=np.int64)]
        sources = [np.empty(0, dtype=np.int64)]
        position = first
        while position < first + count:
            chunk, place = divmod(position, _CHUNK)
            stop = min(_CHUNK, place + first + count - position)
            rows_of_chunk, sources_of_chunk = self._chunk(chunk, key)
            rows.append(rows_of_chunk[place:stop])
            sources.append(sources_of_chunk[place:stop])
            position += stop - place
        return self.marked[np.concatenate(rows)], np.concatenate(sources)

    def _chunk(self, chunk: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at the positions of a chunk and the source of each, int64, (_CHUNK,).

        The last chunks are kept.
        """
        found = self._chunks.get((chunk, *key))
        if found is not None:
            return found
        first = chunk * _CHUNK
        before = self.counts(first)
        after = self.counts(first + _CHUNK)
        places = np.arange(first, first + _CHUNK) % len(self._sources)
        sources = self._sources[places]
        rows = np.empty(_CHUNK, dtype=np.int64)
        for number, part in enumerate(self.parts):
            order = part.order(before[number], after[number] - before[number], (*key, number + 1))
            rows[sources == number] = self._starts[number] + order
        if len(self._chunks) > 1:
            self._chunks.pop(next(iter(self._chunks)))
        self._chunks[chunk, *key] = (rows, sources)
        return rows, sources


class _State(TypedDict, total=False):
    """The state of interleaved streams: rows and tokens of each source so far, and the states of streams by number."""

    rows: list[int]
    tokens: list[int]
    streams: dict[str, dict[str, object]]


class InterleavedStreams:
    """Packed rows of several sources, of which some are streams. Rows are drawn in order.

    The shares are those of tokens, counted in the rows that were drawn, since rows may be padded.

    Args:
        parts: the rows of each source, of the same form. Streams are advanced by `take`.
        weights: the weight of each source, above 0.
    """

    def __init__(self, parts: Sequence[TokenBlocks | StreamingBlocks], weights: Sequence[Fraction]) -> None:
        _check_form(parts)
        first = parts[0]
        self.length = first.length
        self.pad_id = first.pad_id
        self.boundaries: Boundaries = first.boundaries
        self.parts = list(parts)
        self._choice = Choice(whole_weights(weights), self.length)
        self._rows = [0] * len(parts)
        self._tokens = [0] * len(parts)

    @property
    def ignored_keys(self) -> Mapping[str, int]:
        """How often each key of messages and column beside them was not read so far; see `RowPacker`."""
        return _sum(part.ignored_keys for part in self.parts)

    def add_to_digest(self, digest: Digest) -> None:
        """Add the weights and the rows in memory to a digest; the text of streams is not known."""
        digest.update(f"interleaved streams {self._choice.weights} {sorted(self._streams())}".encode())
        for part in self.parts:
            if isinstance(part, TokenBlocks):
                part.add_to_digest(digest)

    def text_read(self, rows: int) -> list[TextRead]:
        """Return how much of each source was read; `rows`, the number of drawn rows, is known already."""
        counts = zip(self.parts, self._rows, self._tokens, strict=True)
        return [replace(read, drawn=tokens) for part, n_rows, tokens in counts for read in part.text_read(n_rows)]

    def take(self, first: int, count: int, key: tuple[int, ...]) -> np.ndarray:
        """Draw the next `count` rows.

        Args:
            first: number of the first row, from 0; it must be the number of rows drawn so far.
            count: number of rows to draw.
            key: the seed and the domain, which determine the orders of the rows of each source.

        Returns:
            Marked ids, int32, (count, length).

        Raises:
            DataError: `first` is not the next row, or a stream can't read or pack its next documents.
        """
        return self.draw(first, count, key)[0]

    def draw(self, first: int, count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Draw the rows of `take`, and return them with the number of the source of each, int64, (count,)."""
        if first != sum(self._rows):
            raise DataError(
                f"The streams are at row {sum(self._rows)}, but row {first} was requested: streams only go forward, so "
                "load the state that was saved at that step."
            )
        rows = np.empty((count, self.length), dtype=np.int32)
        sources = np.empty(count, dtype=np.int64)
        for place in range(count):
            number = self._choice.next(self._tokens)
            sources[place] = number
            rows[place] = self.parts[number].take(self._rows[number], 1, (*key, number + 1))[0]
            self._rows[number] += 1
            self._tokens[number] += int(np.count_nonzero(rows[place] != PADDING))
        return rows, sources

    def state_dict(self) -> dict[str, object]:
        """Return everything that determines the next rows, as plain JSON values."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the present `state_dict()`, even after later rows have been drawn."""
        rows = list(self._rows)
        tokens = list(self._tokens)
        streams = {str(number): stream.snapshot() for number, stream in self._streams().items()}

        def state_dict() -> dict[str, object]:
            states = {number: snapshot() for number, snapshot in streams.items()}
            return {"rows": rows, "tokens": tokens, "streams": states}

        return state_dict

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from the `state_dict()` of the same sources.

        Raises:
            DataError: the state has other streams, or a stream's buffer has another size.
        """
        streams = {str(number): stream for number, stream in self._streams().items()}
        found = cast("_State", state)
        saved = found.get("streams", {})
        rows = found.get("rows", [])
        if saved.keys() != streams.keys() or len(rows) != len(self.parts):
            raise DataError(
                f"The saved data state has {len(saved)} streams among its sources, but this domain has {len(streams)} "
                f"among {len(self.parts)}: resume with the data settings of the run that saved it."
            )
        for number, stream in streams.items():
            stream.load_state_dict(saved[number])
        self._rows = list(rows)
        self._tokens = list(found.get("tokens", []))

    def _streams(self) -> dict[int, StreamingBlocks]:
        return {number: part for number, part in enumerate(self.parts) if isinstance(part, StreamingBlocks)}


def _check_form(parts: Sequence[TokenBlocks | StreamingBlocks]) -> None:
    forms = {(part.length, part.boundaries, part.pad_id) for part in parts}
    assert len(forms) == 1, f"sources of one domain are packed with the same settings, not {forms}"


def _sum(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def limited_weights(weights: Sequence[Fraction], names: Sequence[str]) -> list[int]:
    """Return whole numbers in the proportions of positive weights, rounded if their sum would be large.

    Args:
        weights: the weight of the rows of each source.
        names: the name of each source, for error messages.

    Raises:
        DataError: a share is too small for the rounding.
    """
    numbers = whole_weights(weights)
    total = sum(numbers)
    if total <= _MAX_PERIOD:
        return numbers
    exact = [Fraction(number * _MAX_PERIOD, total) for number in numbers]
    rounded = [round(number) for number in exact]
    for number, whole, name in zip(exact, rounded, names, strict=True):
        if abs(whole - number) > _ROUNDING * number:
            raise DataError(
                f"{name}: its weight gives it {float(number / _MAX_PERIOD):.2g} of the rows, but shares of less than "
                f"{10 / _MAX_PERIOD:.2g} can't be interleaved: raise the weight, or leave the source out."
            )
    return rounded


def _period(weights: Sequence[int]) -> np.ndarray:
    """Return the source of each row of a period, int64, (sum of the weights,).

    These are the sources that `Choice` chooses where all rows are full. Row k of a source of share p may then be drawn
    from row floor(k / p) on, and its window ends at (k + 1) / p. The sources whose next row may be drawn are in a heap,
    so that a period of n rows of s sources takes O(n log s).
    """
    total = sum(weights)
    common = math.lcm(*weights)
    costs = [common // weight for weight in weights]  # in the proportions of 1 / p
    rows = [0] * len(weights)
    # The end of the next row and the number of the source, of those whose next row may be drawn.
    allowed = [(cost, number) for number, cost in enumerate(costs)]
    heapq.heapify(allowed)
    # The first position of the next row and the number of the source, of all others.
    waiting: list[tuple[int, int]] = []
    sources = np.empty(total, dtype=np.int64)
    for position in range(total):
        while waiting and waiting[0][0] <= position:
            _, number = heapq.heappop(waiting)
            heapq.heappush(allowed, ((rows[number] + 1) * costs[number], number))
        _, number = heapq.heappop(allowed)
        sources[position] = number
        rows[number] += 1
        first = rows[number] * total // weights[number]
        heapq.heappush(waiting, (first, number))
    return sources
