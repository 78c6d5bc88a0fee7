"""Interleaved sources: exact shares after any number of rows, from memory and streams alike, resumed at any row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.data import NEW, OLD, DataConfig, Document, Mixture, RowPacker, StreamingBlocks, TokenBlocks, build_mixture
from graftlm.data.interleaving import Choice, InterleavedBlocks, InterleavedStreams
from graftlm.data.marked_ids import PADDING
from graftlm.data.mixture import SourceRead, check_weights
from graftlm.errors import DataError, RecipeError
from tiny import tiny_tokenizer

LENGTH = 8
KEY = (0, NEW)
weights_of_sources = st.lists(st.integers(1, 40), min_size=1, max_size=6)
some_weights = st.lists(st.integers(1, 9), min_size=2, max_size=4)


def blocks(source: int, rows: int, tokens: Sequence[int] = ()) -> TokenBlocks:
    """Rows whose every token is 1,000 times the source and the row's own number.

    Args:
        source: number of the source.
        rows: number of rows.
        tokens: numbers of tokens of the rows, which the rest of a row pads; without them all rows are full.
    """
    marked = np.repeat(1000 * source + np.arange(rows, dtype=np.int32)[:, None], LENGTH, axis=1)
    for row, count in enumerate(tokens):
        marked[row, count:] = PADDING
    return TokenBlocks(marked, tokens_by_source={str(source): int((marked != PADDING).sum())})


def fractions(weights: Sequence[int]) -> list[Fraction]:
    return [Fraction(weight) for weight in weights]


def in_memory(weights: Sequence[int], rows: Sequence[int] = (5, 3, 7, 2, 4, 6)) -> InterleavedBlocks:
    parts = [blocks(source, rows[source]) for source in range(len(weights))]
    return InterleavedBlocks(parts, fractions(weights))


def text_of(source: int, documents: int) -> list[Document]:
    words = ("river", "garden", "moon", "house")
    return [
        Document(f"{words[source]} {number} " + "word " * (number % 5), source=str(source))
        for number in range(documents)
    ]


def stream(source: int, documents: int = 20, boundaries: Any = "separate") -> StreamingBlocks:
    packer = RowPacker(lambda: text_of(source, documents), tiny_tokenizer(), LENGTH, boundaries, repeat=True)
    return StreamingBlocks(packer, buffer_rows=4)


def sources_of(rows: np.ndarray) -> list[int]:
    return (rows[:, 0] // 1000).tolist()


@settings(deadline=None)
@given(weights_of_sources, st.integers(1, 300))
def test_each_source_is_less_than_a_row_from_its_share_after_any_number_of_rows(weights: list[int], n: int) -> None:
    choice = Choice(weights, row=LENGTH)
    rows = [0] * len(weights)
    for total in range(1, n + 1):
        rows[choice.next([count * LENGTH for count in rows])] += 1
        for count, weight in zip(rows, weights, strict=True):
            assert abs(count - Fraction(total * weight, sum(weights))) < 1


@settings(deadline=None)
@given(some_weights, st.integers(0, 400), st.integers(0, 60))
def test_rows_in_memory_have_these_shares_at_any_position(weights: list[int], first: int, count: int) -> None:
    mixed = in_memory(weights)
    before = mixed.counts(first)
    drawn = Counter(sources_of(mixed.take(first, count, KEY)))
    for source, weight in enumerate(weights):
        so_far = before[source] + drawn[source]
        assert abs(so_far - Fraction((first + count) * weight, sum(weights))) < 1


@settings(deadline=None, max_examples=30)
@given(some_weights, st.integers(0, 40), st.integers(0, 12), st.sampled_from([5, 4096]))
def test_rows_in_memory_can_be_drawn_in_any_order(weights: list[int], first: int, count: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graftlm.data.interleaving._CHUNK", chunk)
        drawn = in_memory(weights).take(first, count, KEY)
    np.testing.assert_array_equal(drawn, in_memory(weights).take(0, first + count, KEY)[first:])


def test_an_exhausted_source_begins_again_in_a_new_order_and_the_others_go_on() -> None:
    mixed = InterleavedBlocks([blocks(0, 3), blocks(1, 40)], fractions([1, 1]))
    rows = mixed.take(0, 60, KEY)[:, 0]
    short = [row for row in rows.tolist() if row < 1000]
    epochs = [tuple(short[start : start + 3]) for start in range(0, 30, 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len(set(epochs)) > 1
    assert len({row for row in rows.tolist() if row >= 1000}) == 30, "no row of the long source comes twice"
    assert [read.passes for read in mixed.text_read(60)] == [10, 0.75]


@pytest.mark.parametrize("kind", [InterleavedBlocks, InterleavedStreams])
def test_orders_depend_on_the_seed_and_on_the_source(kind: Any) -> None:
    orders = []
    for seed in (0, 1):
        mixed = kind([blocks(0, 20), blocks(1, 20)], fractions([1, 1]))
        rows = mixed.take(0, 40, (seed, NEW))[:, 0]
        orders += [tuple(rows[rows // 1000 == source] % 1000) for source in (0, 1)]
    assert len(set(orders)) == 4


padded = st.lists(st.integers(1, LENGTH), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), padded), min_size=2, max_size=4), st.integers(1, 120))
def test_shares_are_of_tokens_where_rows_are_padded(parts: list[tuple[int, list[int]]], n: int) -> None:
    """No source is more than a row ahead of its share of the tokens; together the others may be as much behind."""
    weights = [weight for weight, _ in parts]
    rows = [blocks(source, len(tokens), tokens) for source, (_, tokens) in enumerate(parts)]
    mixed = InterleavedStreams(rows, fractions(weights))
    drawn = Counter()
    for position in range(n):
        (row,) = mixed.take(position, 1, KEY)
        drawn[int(row[0]) // 1000] += int((row != PADDING).sum())
        for source, weight in enumerate(weights):
            ahead = drawn[source] - Fraction(drawn.total() * weight, sum(weights))
            assert -LENGTH * (len(parts) - 1) < ahead <= LENGTH
    shares = {read.source: read.drawn for read in mixed.text_read(n)}
    assert shares == {str(source): drawn[source] for source in range(len(parts))}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), padded), min_size=2, max_size=4))
def test_padded_rows_in_memory_have_shares_of_tokens_over_epochs(parts: list[tuple[int, list[int]]]) -> None:
    weights = [weight for weight, _ in parts]
    rows = [blocks(source, len(tokens), tokens) for source, (_, tokens) in enumerate(parts)]
    mixed = InterleavedBlocks(rows, fractions(weights))
    reads = mixed.text_read(100_000)
    total = sum(read.drawn for read in reads)
    for read, weight in zip(reads, weights, strict=True):
        assert read.drawn / total == pytest.approx(weight / sum(weights), abs=0.002)


@pytest.mark.parametrize("weights", [[1, 1], [2, 1, 1], [3, 5, 7]])
def test_streams_and_memory_have_the_same_order_of_sources(weights: list[int]) -> None:
    parts = [blocks(source, 5) for source in range(len(weights))]
    from_streams = InterleavedStreams(parts, fractions(weights)).take(0, 90, KEY)
    assert sources_of(from_streams) == sources_of(in_memory(weights).take(0, 90, KEY))


@settings(deadline=None)
@given(weights_of_sources)
def test_rows_in_memory_come_from_the_sources_that_the_rule_chooses(weights: list[int]) -> None:
    choice = Choice(weights, row=LENGTH)
    rows = [0] * len(weights)
    _, sources = in_memory(weights).draw(0, 2 * sum(weights), KEY)
    for source in sources.tolist():
        assert source == choice.next([count * LENGTH for count in rows])
        rows[source] += 1


def mixture(boundaries: Any = "separate") -> Mixture:
    """A streaming source beside one in memory as new text, and old text in memory."""
    packed = TokenBlocks(np.full((3, LENGTH), 7, dtype=np.int32), boundaries, tokens_by_source={"memory": 24})
    old = TokenBlocks(np.full((3, LENGTH), 9, dtype=np.int32), boundaries)
    new = InterleavedStreams([stream(0, 3, boundaries), packed, stream(1, 30, boundaries)], fractions([2, 1, 1]))
    return Mixture({OLD: old, NEW: new}, {OLD: 0.25, NEW: 0.75}, 6, seed=3)


@pytest.mark.parametrize("stop", [0, 1, 7, 19])
@pytest.mark.parametrize("boundaries", ["separate", "whole"])
def test_streams_beside_memory_resume_at_any_step(stop: int, boundaries: str) -> None:
    unbroken, broken, resumed = mixture(boundaries), mixture(boundaries), mixture(boundaries)
    expected = [unbroken.batch(step) for step in range(30)]
    for step in range(stop):
        broken.batch(step)
    snapshot = broken.snapshot()
    state = json.loads(json.dumps(broken.state_dict()))
    broken.batch(stop)
    assert snapshot() == state
    resumed.load_state_dict(state)
    for step in range(stop, 30):
        assert resumed.batch(step).input_ids.tolist() == expected[step].input_ids.tolist()
    assert resumed.text_read(30) == unbroken.text_read(30)


def test_a_short_stream_is_read_again_and_its_passes_are_told() -> None:
    mixed = mixture()
    for step in range(20):
        mixed.batch(step)
    short, memory, long = [read for read in mixed.text_read(20) if read["domain"] == "new"]
    assert short.get("passes", 0) > 2
    assert memory.get("passes") == pytest.approx(23 / 3, abs=0.5)
    fresh = mixture()
    fresh.batch(0)
    (begun,) = (read for read in fresh.text_read(1) if read["source"] == "1")
    assert "passes" not in begun, "the stream has not come to its end"
    assert [read.get("share") for read in (short, memory, long)] == pytest.approx([0.5, 0.25, 0.25], abs=0.02)


def test_every_process_draws_the_same_batch() -> None:
    """A process takes its rows from the batch of all, so their rows together are the batch of one process."""
    one, first, second = mixture(), mixture(), mixture()
    for step in range(8):
        halves = [first.batch(step).rows(slice(0, 3)), second.batch(step).rows(slice(3, 6))]
        together = [row for half in halves for row in half.input_ids.tolist()]
        assert together == one.batch(step).input_ids.tolist()


def test_states_that_do_not_fit() -> None:
    mixed = InterleavedStreams([stream(0), stream(1)], fractions([1, 1]))
    mixed.take(0, 3, KEY)
    with pytest.raises(DataError) as error:
        mixed.take(0, 3, KEY)
    assert "row 3" in str(error.value)
    for parts in ([stream(0), blocks(1, 2)], [stream(0), stream(1), blocks(2, 2)]):
        other = InterleavedStreams(parts, fractions([1] * len(parts)))
        with pytest.raises(DataError) as error:
            other.load_state_dict(mixed.state_dict())
        assert "streams" in str(error.value)
    with pytest.raises(DataError):
        mixed.load_state_dict(stream(0).state_dict())


def test_the_fingerprint_tells_weights_and_the_division_into_sources_apart() -> None:
    def of(sizes: Sequence[int], weights: Sequence[int]) -> str:
        rows = np.arange(8, dtype=np.int32).repeat(LENGTH).reshape(8, LENGTH)
        parts = [TokenBlocks(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
        return Mixture({NEW: InterleavedBlocks(parts, fractions(weights))}, {NEW: 1}, 4).fingerprint()

    assert of([4, 4], [2, 1]) == of([4, 4], [4, 2])
    assert len({of([4, 4], [2, 1]), of([4, 4], [1, 1]), of([5, 3], [2, 1])}) == 3

    def of_streams(weights: Sequence[int], rows: int) -> str:
        parts = [stream(0), blocks(1, rows)]
        return Mixture({NEW: InterleavedStreams(parts, fractions(weights))}, {NEW: 1}, 4).fingerprint()

    assert of_streams([2, 1], 3) == of_streams([4, 2], 3)
    assert len({of_streams([2, 1], 3), of_streams([1, 1], 3), of_streams([2, 1], 4)}) == 3


# From a recipe


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three texts of very different sizes."""
    paths = []
    for source, size in enumerate((30, 300, 90)):
        path = tmp_path / f"{source}.txt"
        path.write_text(" ".join(document.full_text for document in text_of(source, size)))
        paths.append(str(path))
    return paths


Sources = list[dict[str, Any]] | dict[str, list[dict[str, Any]]]


def read_by_recipe(sources: Sources, steps: int = 200, **data: Any) -> list[SourceRead]:
    """How much of the sources of a mixture of rows of 16 tokens was read after some steps of 4 rows."""
    config = DataConfig.parse({"new": sources, "replay_fraction": 0, "length": 16} | data)
    mixed = build_mixture(config, tiny_tokenizer(), 4)
    for step in range(steps):
        mixed.batch(step)
    return mixed.text_read(steps)


def of_recipe(sources: Sources, steps: int = 200, **data: Any) -> list[float]:
    """The shares of the sources of a mixture after some steps."""
    return [read.get("share", 0) for read in read_by_recipe(sources, steps, **data)]


@pytest.mark.parametrize("streaming", [(False, False, False), (True, True, True), (True, False, False)])
@pytest.mark.parametrize("boundaries", ["separate", "joined", "whole"])
def test_weights_are_shares_of_tokens(files: list[str], streaming: tuple[bool, ...], boundaries: str) -> None:
    sources: list[dict[str, Any]] = [
        {"path": path, "weight": weight, "streaming": streams}
        for path, weight, streams in zip(files, (0.5, 0.25, 0.25), streaming, strict=True)
    ]
    assert of_recipe(sources, boundaries=boundaries) == pytest.approx([0.5, 0.25, 0.25], abs=0.01)


@pytest.mark.parametrize("weighted", [1, 3])
def test_a_stream_and_the_same_text_in_memory_report_the_same_passes(files: list[str], weighted: int) -> None:
    """What the stream has read ahead is not what was trained on. One source alone is not interleaved."""
    sources = [{"path": path, "weight": weight} for path, weight in zip(files[:weighted], (3, 1, 1), strict=False)]
    in_memory = read_by_recipe(sources, steps=500)
    streamed = read_by_recipe([{**source, "streaming": True} for source in sources], steps=500)
    padding = 16 / min(read["tokens"] for read in in_memory)  # last rows in memory are padded
    for read, expected in zip(streamed, in_memory, strict=True):
        assert read["tokens"] == expected["tokens"]
        assert read.get("passes") == pytest.approx(expected.get("passes"), rel=padding, abs=16 / read["tokens"])
        assert read.get("share") == pytest.approx(expected.get("share"), abs=0.005)


def test_a_source_without_a_weight_has_1_and_one_of_weight_0_is_left_out(files: list[str]) -> None:
    sources: list[dict[str, Any]] = [{"path": files[0], "weight": 3}, {"path": files[1]}]
    left_out = {"path": "no file", "weight": 0}
    assert of_recipe([*sources, left_out]) == pytest.approx([0.75, 0.25], abs=0.01)


def test_without_weights_streams_have_equal_shares_and_memory_those_of_its_sizes(files: list[str]) -> None:
    plain = [{"path": path} for path in files]
    streams = [{"path": path, "streaming": True} for path in files]
    assert of_recipe(streams) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert of_recipe([streams[0], *plain[1:]]) == pytest.approx([1 / 3] * 3, abs=0.01)
    small, large, _ = of_recipe(plain)
    assert large > 5 * small


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_temperature_flattens_sizes(files: list[str], temperature: float) -> None:
    plain = [{"path": path} for path in files]
    sizes = np.array(of_recipe(plain)) ** temperature
    shares = of_recipe(plain, weights={"temperature": temperature})
    assert shares == pytest.approx((sizes / sizes.sum()).tolist(), abs=0.01)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_temperature_flattens_the_sizes_of_sets_not_of_files(files: list[str], temperature: float) -> None:
    """Where a set's file is split, its parts share the set's tokens in proportion to theirs."""
    weights = {"temperature": temperature}
    small, large, medium = ([{"path": path}] for path in files)
    whole = of_recipe({"small": small, "large": large, "medium": medium}, weights=weights)
    text = Path(files[1]).read_text()
    cut = text.index(" ", len(text) // 4)
    halves = []
    for number, part in enumerate((text[:cut], text[cut:])):
        path = Path(files[1]).with_name(f"part-{number}.txt")
        path.write_text(part)
        halves.append({"path": str(path)})
    split = of_recipe({"small": small, "large": halves, "medium": medium}, weights=weights)
    assert [split[0], split[1] + split[2], split[3]] == pytest.approx(whole, abs=0.005)
    assert split[2] == pytest.approx(3 * split[1], rel=0.05)
    assert whole == pytest.approx(of_recipe([*small, *large, *medium], weights=weights), abs=1e-9)


def test_a_temperature_acts_on_tokens_where_rows_are_padded(tmp_path: Path) -> None:
    """One source has a short document in each row, and the other full rows."""
    short = {"path": str(tmp_path / "short.jsonl")}
    full = {"path": str(tmp_path / "full.txt")}
    rows = [{"text": "word moon"[: 8 + number]} for number in (0, 1)] * 60
    Path(short["path"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(full["path"]).write_text("word " * 100)
    data: dict[str, Any] = {"boundaries": "whole", "length": 16}
    tokens = np.array([read["tokens"] for read in read_by_recipe([short, full], steps=0, **data)])
    assert tokens[0] < 0.7 * 16 * len(rows), "its rows are padded"
    expected = tokens**0.5 / (tokens**0.5).sum()
    shares = of_recipe([short, full], weights={"temperature": 0.5}, **data)
    assert shares == pytest.approx(expected.tolist(), abs=0.005)


def test_text_that_the_backbone_sampled_has_a_weight(files: list[str]) -> None:
    old: list[dict[str, Any]] = [{"self": True, "weight": 3}, {"path": files[0]}, {"self": True, "seed": 1}]
    new = [{"path": files[1]}]
    config = DataConfig.parse({"new": new, "old": old, "replay_fraction": 0.5, "length": 16})
    own_text = [[np.full(40, 5, dtype=np.int32)], [np.full(64, 6, dtype=np.int32)]]
    mixed = build_mixture(config, tiny_tokenizer(), 4, own_text)
    shares = [read.get("share") for read in mixed.text_read(500) if read["domain"] == "old"]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.01)
    with pytest.raises(DataError) as error:
        build_mixture(config, tiny_tokenizer(), 4, own_text[:1])
    assert "own_text" in str(error.value)
    old[1]["streaming"] = True
    streamed = DataConfig.parse({"new": new, "old": old, "replay_fraction": 0.5, "length": 16})
    assert list(build_mixture(streamed, tiny_tokenizer(), 4, own_text).state_dict()) == [str(OLD)]


@pytest.mark.parametrize("share", [1e-6, 2.5 / 262_144, 9.5 / 262_144])
def test_a_share_that_rounding_would_change_is_refused_with_the_name_of_its_source(share: float) -> None:
    """Already before the texts are read, or the backbone samples text."""
    weights = [Fraction(repr(1 - share)), Fraction(repr(share))]
    with pytest.raises(DataError) as error:
        InterleavedBlocks([blocks(7, 4), blocks(8, 4)], weights)
    assert "8:" in str(error.value)
    sources = [{"path": "many", "weight": 1 - share}, {"path": "few", "weight": share}]
    with pytest.raises(DataError) as error:
        check_weights(DataConfig.parse({"new": sources}))
    assert "few" in str(error.value)
    own = {"self": True, "weight": share}
    with pytest.raises(DataError) as error:
        check_weights(DataConfig.parse({"new": [{"path": "a"}], "old": [sources[0], own]}))
    assert "own text" in str(error.value)


@pytest.mark.parametrize("share", [Fraction(3, 262_144), Fraction(1045, 26_214_400)])
def test_small_shares_are_kept_within_a_twentieth_of_them(share: Fraction) -> None:
    mixed = InterleavedBlocks([blocks(0, 4), blocks(1, 4)], [1 - share, share])
    assert mixed.counts(1 << 24)[1] / (1 << 24) == pytest.approx(float(share), rel=0.05)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"new": [{"path": "a", "weight": -1}]}, "new.0.weight"),
        ({"new": [{"path": "a", "weight": float("nan")}]}, "new.0.weight"),
        ({"new": [{"path": "a", "weight": float("inf")}]}, "new.0.weight"),
        ({"new": [{"path": "a", "weight": 0}, {"path": "b", "weight": 0}]}, "new: all weights"),
        ({"old": [{"self": True, "weight": 0}]}, "old: all weights"),
        ({"test": {"new": [{"path": "a", "weight": 1}]}}, "test text new"),
        ({"weights": {"temperature": 0}}, "weights.temperature"),
        ({"weights": {"temperature": 1.5}}, "weights.temperature"),
        ({"new": [{"path": "a", "streaming": True}], "weights": {"temperature": 0.5}}, "weights.temperature"),
        ({"new": [{"path": "a", "weight": 2}], "weights": {"temperature": 0.5}}, "weights.temperature"),
    ],
)
def test_weights_that_mean_nothing(data: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as error:
        DataConfig.parse(data)
    assert key in str(error.value)


def test_a_source_without_a_weight_is_written_as_before() -> None:
    """So that runs that finished before weights existed keep their keys."""
    config = DataConfig.parse({"new": [{"path": "a"}], "old": [{"self": True}]})
    dumped = config.model_dump()
    assert "weights" not in dumped
    assert not {"weight", "set"} & {*dumped["new"][0], *dumped["old"][0]}
