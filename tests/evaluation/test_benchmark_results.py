"""Intervals of benchmark results, and of their changes."""

from __future__ import annotations

import pytest

from graftlm.errors import EvaluationError
from graftlm.evaluation.benchmarks import BenchmarkResult


def test_a_change_is_paired_over_items() -> None:
    base = BenchmarkResult("acc", [0.0, 1.0] * 20)
    same = BenchmarkResult("acc", [0.0, 1.0] * 20)
    unchanged = same.change("arc", base)["arc_change"]
    assert unchanged.mean == 0
    # A share of 1 - 0.025^(1/40) of all items would leave 40 items unchanged with a probability of 2.5%.
    assert (unchanged.low, unchanged.high) == pytest.approx((-0.0881, 0.0881), abs=1e-4)
    other = BenchmarkResult("acc", [1.0, 0.0] * 20)
    change = other.change("arc", base)["arc_change"]
    assert change.low < 0 < change.high, "each item changed"
    better = BenchmarkResult("acc", [1.0, 1.0] * 20).change("arc", base)["arc_change"]
    assert better.mean == pytest.approx(0.5)
    assert better.low > 0
    with pytest.raises(EvaluationError):
        BenchmarkResult("acc", [1.0]).change("arc", base)


def test_shares_have_wilsons_interval_and_other_values_a_bootstrap() -> None:
    share = BenchmarkResult("acc", [1.0] * 10).metrics("arc")["arc"]
    assert share.high == 1
    assert share.low == pytest.approx(0.722, abs=1e-3)
    other = BenchmarkResult("rouge", [0.5] * 10).metrics("rouge")["rouge"]
    assert other.low == other.high == pytest.approx(0.5)
