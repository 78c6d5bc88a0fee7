"""Mixtures: exact shares, whole epochs, and the same batches after any interruption."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import rotated
from graftlm.data import (
    NEW,
    OLD,
    Batch,
    DataConfig,
    Document,
    Mixture,
    RowPacker,
    StreamingBlocks,
    TokenBlocks,
    build_mixture,
    pack,
)
from graftlm.data.boundaries import Boundaries
from graftlm.data.marked_ids import PADDING
from graftlm.data.mixture import passes_text
from graftlm.errors import DataError
from tiny import tiny_tokenizer

LENGTH = 8
shares = st.integers(0, 20).map(lambda n: n / 20) | st.floats(0, 1).map(lambda x: round(x, 4))


def blocks(rows: int, first: int = 0) -> TokenBlocks:
    """Rows whose every token is the row's own number."""
    return TokenBlocks(np.repeat(np.arange(first, first + rows, dtype=np.int32)[:, None], LENGTH, axis=1))


def mixture(p: float, batch_size: int, *, old: int = 5, new: int = 7, seed: int = 0) -> Mixture:
    return Mixture({OLD: blocks(old), NEW: blocks(new, 100)}, {OLD: p, NEW: 1 - p}, batch_size, seed)


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.input_ids, b.input_ids) and torch.equal(a.domain, b.domain)


@settings(deadline=None)
@given(shares, st.integers(1, 9), st.integers(1, 30))
def test_shares_are_exact_in_the_long_run(p: float, batch_size: int, steps: int) -> None:
    mixed = mixture(p, batch_size)
    old = 0
    for step in range(steps):
        batch = mixed.batch(step)
        here = int((batch.domain == OLD).sum())
        old += here
        assert len(batch) == batch_size
        assert abs(here - p * batch_size) < 1 + 1e-9
    assert old == math.floor(steps * batch_size * p + 1e-9)


@settings(deadline=None, max_examples=30)
@given(shares, st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_holds_every_row_once(p: float, batch_size: int, seed: int) -> None:
    mixed = mixture(p, batch_size, seed=seed)
    seen: dict[int, list[int]] = {OLD: [], NEW: []}
    for step in range(40):
        batch = mixed.batch(step)
        for domain, row in zip(batch.domain.tolist(), batch.input_ids[:, 0].tolist(), strict=True):
            seen[domain].append(row)
    for domain, size in ((OLD, 5), (NEW, 7)):
        times = Counter(seen[domain]).values()
        assert not times or max(times) - (min(times) if len(times) == size else 0) <= 1


def test_epochs_have_different_orders_and_rows_are_shuffled_in_the_batch() -> None:
    whole = mixture(0, 7)
    orders = {tuple(whole.batch(step).input_ids[:, 0].tolist()) for step in range(6)}
    assert len(orders) == 6
    marks = {tuple(mixture(0.5, 8).batch(step).domain.tolist()) for step in range(6)}
    assert len(marks) > 1


@settings(deadline=None, max_examples=20)
@given(shares, st.integers(1, 9), st.integers(0, 50))
def test_any_step_can_be_drawn_first(p: float, batch_size: int, step: int) -> None:
    going = mixture(p, batch_size)
    for earlier in range(step):
        going.batch(earlier)
    assert same(going.batch(step), mixture(p, batch_size).batch(step))
    assert going.state_dict() == {}


def test_seeds_differ() -> None:
    assert not same(mixture(0.5, 8, seed=1).batch(0), mixture(0.5, 8, seed=2).batch(0))


def test_batches_are_the_same_in_every_process() -> None:
    assert mixture(0.5, 6).batch(9).input_ids[:, 0].tolist() == [1, 100, 103, 101, 0, 4]


def test_three_domains() -> None:
    mixed = Mixture({d: blocks(3, 10 * d) for d in range(3)}, {0: 0.3, 1: 0.3, 2: 0.4}, 7)
    found = Counter(mark for step in range(10) for mark in mixed.batch(step).domain.tolist())
    assert found == {0: 21, 1: 21, 2: 28}


def test_a_share_of_zero_needs_no_data() -> None:
    assert set(Mixture({NEW: blocks(3)}, {OLD: 0, NEW: 1}, 4).batch(0).domain.tolist()) == {NEW}


def test_bad_mixtures() -> None:
    with pytest.raises(DataError) as error:
        Mixture({NEW: blocks(3)}, {OLD: 0.1, NEW: 0.9}, 4)
    assert "old domain" in str(error.value)
    with pytest.raises(DataError) as error:
        Mixture({NEW: blocks(3)}, {OLD: 0.1, NEW: 0.8}, 4)
    assert "sum to 1" in str(error.value)
    other = TokenBlocks(np.ones((2, 4), dtype=np.int32))
    with pytest.raises(DataError, match="4 tokens"):
        Mixture({OLD: blocks(3), NEW: other}, {OLD: 0.5, NEW: 0.5}, 4)


# Streams


def corpus() -> list[Document]:
    return [Document(f"document {i} " + "word " * (i % 5)) for i in range(20)]


def stream(
    documents: Callable[[], Iterable[Document]] = corpus, buffer_rows: int = 4, length: int = LENGTH
) -> StreamingBlocks:
    return StreamingBlocks(RowPacker(documents, tiny_tokenizer(), length, repeat=True), buffer_rows=buffer_rows)


def streaming_mixture() -> Mixture:
    return Mixture({OLD: blocks(5), NEW: stream()}, {OLD: 0.25, NEW: 0.75}, 6, seed=3)


@pytest.mark.parametrize(("stop", "group"), rotated([0, 1, 7, 30], [1, 60, 10**6]))
def test_a_stream_resumes(stop: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.data.streams.STREAM_GROUP_CHARACTERS", group)
    unbroken = streaming_mixture()
    broken = streaming_mixture()
    expected = [unbroken.batch(step) for step in range(40)]
    for step in range(stop):
        broken.batch(step)
    state = json.loads(json.dumps(broken.state_dict()))
    snapshot = broken.snapshot()
    broken.batch(stop)
    assert snapshot() == state
    resumed = streaming_mixture()
    resumed.load_state_dict(state)
    assert all(same(resumed.batch(step), expected[step]) for step in range(stop, 40))
    assert resumed.state_dict()[str(NEW)]["epoch"] > 1
    assert resumed.text_read(40) == unbroken.text_read(40), "what was read before the stop counts too"


def test_a_stream_shuffles_and_loses_nothing() -> None:
    shuffled = stream()
    plain = stream(buffer_rows=1)
    rows = shuffled.take(0, 40, (0, NEW))
    ordered = plain.take(0, 44, (0, NEW))
    assert not np.array_equal(rows, ordered[:40])
    drawn = Counter(bytes(row) for row in rows)
    packed = Counter(bytes(row) for row in ordered)
    assert drawn <= packed


@pytest.mark.parametrize("rows", [20, 21, 90])
@pytest.mark.parametrize("boundaries", ["separate", "whole"])
def test_what_is_read_of_a_stream_is_what_was_drawn(rows: int, boundaries: Boundaries) -> None:
    """The buffer alone holds the text many times, which is not training on it."""
    packed = pack(corpus(), tiny_tokenizer(), LENGTH, boundaries=boundaries)
    packer = RowPacker(corpus, tiny_tokenizer(), LENGTH, boundaries, repeat=True)
    streamed = StreamingBlocks(packer, buffer_rows=10 * len(packed))
    drawn = streamed.take(0, rows, (0, NEW))
    (read,) = streamed.text_read(rows)
    (expected,) = packed.text_read(rows)
    assert read.tokens == expected.tokens
    assert read.drawn == np.count_nonzero(drawn != PADDING)
    assert read.passes == pytest.approx(read.drawn / expected.tokens)
    if boundaries == "separate":  # a stream has no padded last row
        assert read.passes == pytest.approx(expected.passes, abs=(1 + rows / len(packed)) * LENGTH / expected.tokens)


def test_a_stream_before_its_end_has_the_tokens_that_were_drawn() -> None:
    streamed = stream()
    assert streamed.text_read(0) == []
    streamed.take(0, 3, (0, NEW))
    (read,) = streamed.text_read(3)
    assert (read.tokens, read.passes, read.drawn) == (3 * LENGTH, None, 3 * LENGTH)


def test_streams_go_forward_only() -> None:
    mixed = streaming_mixture()
    mixed.batch(0)
    with pytest.raises(DataError) as error:
        mixed.batch(0)
    assert "row 5" in str(error.value)


def test_states_that_do_not_fit() -> None:
    one = stream()
    one.take(0, 1, (0, 1))
    with pytest.raises(DataError) as error:
        stream(length=16).load_state_dict(one.state_dict())
    assert "32 tokens" in str(error.value)
    with pytest.raises(DataError) as error:
        streaming_mixture().load_state_dict({})
    assert "domains new" in str(error.value)


@pytest.mark.parametrize("once", [list, iter])
def test_a_stream_without_text(once: Callable) -> None:
    empty = once([])
    with pytest.raises(DataError):
        stream(lambda: empty).take(0, 1, (0, 1))


# From a recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, document in enumerate(corpus()):
        (tmp_path / f"{i:02}.txt").write_text(document.text)
    return tmp_path


def test_a_recipe_makes_a_mixture(folder: Path) -> None:
    old = {"path": str(folder), "documents": "0:5"}
    config = DataConfig.parse({"new": [{"path": str(folder)}], "old": [old], "replay_fraction": 0.5, "length": 16})
    batch = build_mixture(config, tiny_tokenizer(), 4).batch(0)
    assert batch.input_ids.shape == (4, 16)
    assert batch.domain.sum() == 2


def test_a_recipe_may_stream(folder: Path) -> None:
    values = {"new": [{"path": str(folder), "streaming": True}], "replay_fraction": 0, "length": 16}
    mixed = build_mixture(DataConfig.parse(values), tiny_tokenizer(), 4)
    assert mixed.batch(0).input_ids.shape == (4, 16)
    assert list(mixed.state_dict()) == ["1"]


def test_a_share_without_old_sources(folder: Path) -> None:
    config = DataConfig.parse({"new": [{"path": str(folder)}]})
    with pytest.raises(DataError) as error:
        build_mixture(config, tiny_tokenizer(), 4)
    assert "replay_fraction" in str(error.value)


def test_too_little_text_names_the_source(folder: Path) -> None:
    config = DataConfig.parse({"new": [{"path": str(folder / "00.txt")}], "replay_fraction": 0})
    with pytest.raises(DataError) as error:
        build_mixture(config, tiny_tokenizer(), 4)
    assert "00.txt" in str(error.value)
    assert "256" in str(error.value)


def test_the_fingerprint_tells_texts_seeds_and_shares_apart() -> None:
    def mixture(text: str = "one two three four five six", seed: int = 0, share: float = 0.5) -> Mixture:
        blocks = pack([Document(text, "a")], tiny_tokenizer(), 4)
        return Mixture({0: blocks, 1: blocks}, {0: share, 1: 1 - share}, 2, seed)

    first = mixture().fingerprint()
    assert first == mixture().fingerprint()
    others = [mixture(text="one two three four five seven"), mixture(seed=1), mixture(share=0.25)]
    assert len({first, *(other.fingerprint() for other in others)}) == 4


@pytest.mark.parametrize(
    ("passes", "text"),
    [(0.04567, "0.0457 times"), (2.5, "2.5 times"), (99.44, "99.4 times"), (1083.4, "1,083 times")],
)
def test_a_number_of_passes_is_written_without_an_exponent(passes: float, text: str) -> None:
    assert passes_text(passes) == text
