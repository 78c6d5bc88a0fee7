"""Long contexts in windows: nothing is left out, each learns its own place, the best span of all is predicted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlm.data.labelled import AnswerSpan, LabelledRow, TaskRows
from graftlm.data.labelled_batches import LabelledMixture
from graftlm.data.row_encoder import EncodedRow, RowEncoder
from graftlm.data.samplers import SamplerConfig
from graftlm.errors import DataError
from graftlm.evaluation.label_predictions import decode_prediction
from graftlm.grafts.heads import TaskSpec
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPAN = TaskSpec(type="span")
CONTEXT = "brown fox " * 12 + "moon"
MOON = AnswerSpan(CONTEXT.index("moon"), len(CONTEXT), ("moon",))


def rows(*targets: AnswerSpan | None, stride: int | None = 6, context: str = CONTEXT) -> TaskRows:
    made = [LabelledRow(("which", context), target, f"row {number}") for number, target in enumerate(targets, 1)]
    return TaskRows(SPAN, made, stride=stride)


def ranges_of(window: EncodedRow) -> np.ndarray:
    assert window.alignment is not None
    return window.alignment[window.alignment[:, 1] > 0]


@given(st.integers(1, 30), st.integers(12, 40), st.integers(0, 60))
def test_windows_cover_the_context_in_steps_of_the_stride(stride: int, length: int, words: int) -> None:
    context = "moon " + "lazy dog " * words
    encoder = RowEncoder(TOKENIZER, length)
    (row,) = encoder.encode(rows(None, stride=stride, context=context)).rows
    (whole,) = RowEncoder(TOKENIZER, 1000).encode(rows(None, context=context)).rows
    assert not row.truncated
    every = ranges_of(whole).tolist()
    covered = [tuple(place) for window in row.sequences for place in ranges_of(window).tolist()]
    assert sorted(set(covered)) == [tuple(place) for place in every]
    assert all(len(window.ids) <= length for window in row.sequences)
    outside = len(whole.ids) - len(every)
    step = min(stride, length - outside)
    starts = [every.index(ranges_of(window)[0].tolist()) for window in row.sequences]
    assert all(after - before == step for before, after in pairwise(starts))
    assert whole.alignment is not None
    first = int(np.flatnonzero(whole.alignment[:, 1] > 0)[0])
    for window in row.sequences:
        assert window.ids[:first].tolist() == whole.ids[:first].tolist(), "each window begins with the question"


def test_each_window_learns_the_answer_in_it_or_the_first_token() -> None:
    encoder = RowEncoder(TOKENIZER, 16)
    learned = encoder.encode(rows(MOON), training=True)
    assert learned.windowed == 1
    assert (learned.cut, learned.left_out) == (0, 0)
    found = 0
    for window in learned.rows:
        assert window.target is not None
        first, last = window.target.tolist()
        places = ranges_of(window)
        if places[:, 1].max() < MOON.end or places[:, 0].min() > MOON.start:
            assert (first, last) == (0, 0)
            assert window.alignment is not None
            assert window.alignment[0, 1] == -1, "the first token is not in the context"
            continue
        found += 1
        assert window.alignment is not None
        start, end = window.alignment[first, 0], window.alignment[last, 1]
        assert CONTEXT[start:end].strip() == "moon"
    assert found >= 1


def test_a_window_learns_another_place_of_the_answer() -> None:
    """And never a place of which only a part is in it."""
    second = (0, 5)
    target = AnswerSpan(MOON.start, MOON.end, ("moon", "brown"), (second,))
    learned = RowEncoder(TOKENIZER, 16).encode(rows(target), training=True).rows
    assert learned[0].target is not None
    first, last = learned[0].target.tolist()
    assert learned[0].alignment is not None
    assert (learned[0].alignment[first, 0], learned[0].alignment[last, 1]) == second
    cut_in_front = learned[1]
    assert cut_in_front.target is not None
    assert ranges_of(cut_in_front)[0, 0] > 0
    assert cut_in_front.target.tolist() == [0, 0]


def test_a_row_without_a_window_for_its_answer_is_left_out_and_counted() -> None:
    long = AnswerSpan(0, len(CONTEXT), (CONTEXT,))
    mixture = LabelledMixture({"t": rows(MOON, long)}, RowEncoder(TOKENIZER, 16), SamplerConfig(), 1)
    (note,) = mixture.notes
    assert "task t" in note
    assert "2 of 2" in note
    assert "marked place: 1." in note
    assert f"{len(mixture.tasks['t'])} rows in all" in note
    with pytest.raises(DataError) as error:
        RowEncoder(TOKENIZER, 16).encode(rows(long), training=True)
    assert "row 1" in str(error.value)
    with pytest.raises(DataError) as error:
        RowEncoder(TOKENIZER, 16).encode(TaskRows(SPAN, [LabelledRow(("which " * 30, CONTEXT), MOON, "row 1")], (), 6))
    assert "row 1 has" in str(error.value)


def test_windows_are_allowed_where_truncation_is_not() -> None:
    encoder = RowEncoder(TOKENIZER, 16, truncation=False)
    assert len(encoder.encode(rows(MOON)).rows[0].sequences) > 1
    with pytest.raises(DataError, match="truncation"):
        encoder.encode(rows(MOON, stride=None))


def literal_best(logits: list[list[list[float]]], places: list[list[list[int]]]) -> tuple[float, int, int]:
    """Return the pair with the largest product of probabilities of any window, over all tokens of that window."""
    best = (-1.0, 0, 0)
    for window, ranges in zip(logits, places, strict=True):
        values = torch.tensor(window, dtype=torch.double)
        starts, ends = values.softmax(0).T.tolist()
        for first, (start, _) in enumerate(ranges):
            for last, (_, end) in enumerate(ranges):
                allowed = start >= 0 and end >= 0 and first <= last < first + 30
                if allowed and starts[first] * ends[last] > best[0] + 1e-12:
                    best = (starts[first] * ends[last], start, end)
    return best


@given(st.integers(0, 10**6), st.integers(2, 4))
def test_the_best_span_is_that_of_all_windows(seed: int, count: int) -> None:
    size = 7
    context = "".join(chr(ord("a") + index % 26) for index in range(count * 3 + size))
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(count, size + 3, 2, generator=generator) * 3  # of each window a token is padding
    output[:, -1] = torch.finfo(torch.float32).min
    places = []
    windows = []
    for number in range(count):
        place = [[-1, -1], [-1, -1], *([index, index + 1] for index in range(number * 3, number * 3 + size))]
        places.append(place)
        windows.append(EncodedRow(np.zeros(size + 2, np.int32), None, None, np.asarray(place)))
    row = EncodedRow(windows[0].ids, None, None, windows[0].alignment, more=tuple(windows[1:]))
    found = decode_prediction(SPAN, LabelledRow(("which", context), None, "row"), row, output)
    real: list[Any] = output[:, :-1].tolist()
    probability, start, end = literal_best(real, places)
    assert (found.value.start, found.value.end) == (start, end)
    assert found.value.answers == (context[start:end],)
    assert found.probability == pytest.approx(probability, rel=1e-4)
