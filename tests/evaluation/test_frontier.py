"""Losses at equal learning, against a loop that reads the definition aloud."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.errors import EvaluationError
from graftlm.evaluation.frontier import Frontier

WINDOWS = 12


def points(learned: Sequence[float], lost: Sequence[float], seed: int = 0) -> list[dict[str, Any]]:
    """Points whose means are as given, spread over windows of unequal sizes."""
    random = np.random.default_rng(seed)
    tokens = np.arange(5, 5 + WINDOWS)

    def windows(mean: float) -> dict[str, Any]:
        noise = random.normal(0, 0.1 * abs(mean), WINDOWS)
        noise -= (noise * tokens).sum() / tokens.sum()
        return {"nats": ((mean + noise) * tokens).tolist(), "tokens": tokens.tolist()}

    return [{"windows": {"learned": windows(x), "forgotten": windows(y)}} for x, y in zip(learned, lost, strict=True)]


def slow_loss(paths: Sequence[tuple[Sequence[float], Sequence[float]]], level: float) -> float:
    """The lowest loss of the paths that reach a level."""
    found = []
    for learned, lost in paths:
        before = (0.0, 0.0)
        for x, y in zip(learned, lost, strict=True):
            if x >= level:
                share = (level - before[0]) / (x - before[0])
                found.append(before[1] + share * (y - before[1]))
                break
            before = (x, y)
    return min(found)


CURVE = st.lists(st.tuples(st.floats(0.01, 2), st.floats(-1, 2)), min_size=1, max_size=4)


@given(st.lists(CURVE, min_size=1, max_size=3), st.floats(0.05, 0.95))
@settings(max_examples=60, deadline=None)
def test_the_loss_is_that_of_the_best_path_where_it_first_reaches_the_level(
    paths: list[list[tuple[float, float]]], share: float
) -> None:
    plain = [([x for x, _ in path], [y for _, y in path]) for path in paths]
    frontier = Frontier({"a": [points(*path, seed=number) for number, path in enumerate(plain)]})
    level = share * max(max(learned) for learned, _ in plain)
    expected = slow_loss(plain, level)
    assert frontier.at_level(level)["a"]["forgotten"].mean == pytest.approx(expected, abs=1e-6)
    for path, measured in zip(paths, frontier.measured("a", "forgotten"), strict=True):
        np.testing.assert_allclose(measured, [(0, 0), *path], atol=1e-6)


def test_methods_are_compared_where_all_of_them_arrive() -> None:
    frontier = Frontier({"far": [points([0.5, 1.0], [0.2, 0.6])], "near": [points([0.2], [0.3]), points([0.4], [0.1])]})
    assert frontier.level() == pytest.approx(0.9 * 0.4)
    assert frontier.at_level(0.5)["near"]["forgotten"].mean == pytest.approx(0.1), "the end of the furthest path"


def test_a_difference_is_over_the_same_windows() -> None:
    def shifted(by: float) -> list[dict[str, Any]]:
        (point,) = points([1.0], [0.5])
        nats, tokens = (np.array(point["windows"]["forgotten"][name]) for name in ("nats", "tokens"))
        changed = {"nats": (nats + by * tokens).tolist(), "tokens": tokens.tolist()}
        learned = {"nats": tokens.tolist(), "tokens": tokens.tolist()}  # one nat on every token
        return [{"windows": {"learned": learned, "forgotten": changed}}]

    frontier = Frontier({"a": [shifted(0.1)], "b": [shifted(0.0)]})
    alone, paired = frontier.at_level(1.0)["a"]["forgotten"], frontier.difference("a", "b", "forgotten", 1.0)
    assert alone.low < alone.mean < alone.high
    assert paired.low == pytest.approx(0.1, abs=1e-9)
    assert paired.high == pytest.approx(0.1, abs=1e-9)
    again = Frontier({"a": [shifted(0.1)]}).at_level(1.0)["a"]["forgotten"]
    assert again.low == pytest.approx(alone.low, abs=1e-9), "the same resamples in every call"


def without(point: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"windows": {key: value for key, value in point["windows"].items() if key != name}}


def test_points_without_a_loss_or_from_other_windows_are_refused() -> None:
    (point,) = points([1.0], [0.5])
    broken = {"points": [], "forgotten": [[without(point, "forgotten")]], "learned": [[without(point, "learned")]]}
    for missing, trainings in broken.items():
        with pytest.raises(EvaluationError, match=missing):
            Frontier({"a": trainings})
    other = points([1.0], [0.5])
    other[0]["windows"]["learned"]["tokens"][0] += 1
    with pytest.raises(EvaluationError) as caught:
        Frontier({"a": [[point]], "b": [other]})
    assert "learned" in str(caught.value)
