"""Methods are compared on the same windows, for test texts of any name."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from graftlm.evaluation import Interval, Results, Row, Scores, learning_and_forgetting, print_table
from graftlm.evaluation.differences import differences_between, paired_differences
from graftlm.evaluation.remarks import remarks
from graftlm.evaluation.report_tables import render_markdown
from graftlm.evaluation.strengths import changes_by_window, windows_of
from graftlm.runs.recipe import Recipe, compare_recipe
from tests.runs.test_recipe import values


def scores(nats: np.ndarray) -> Scores:
    tokens = np.full(len(nats), 10)
    return Scores(nats=nats, tokens=tokens, bytes=tokens * 4, document=np.arange(len(nats)))


def windows(bare: np.ndarray, nats: np.ndarray) -> dict:
    return windows_of(changes_by_window({"danish": scores(bare)}, {"danish": scores(nats)}, None))


def test_a_test_of_any_name_has_a_paired_difference() -> None:
    bare = np.random.default_rng(0).uniform(20, 60, 200)
    metrics = learning_and_forgetting({"danish": scores(bare)}, {"danish": scores(bare - 2)})
    learned = metrics["learned_danish"]
    assert (learned.low, learned.mean, learned.high) == pytest.approx((0.2, 0.2, 0.2))
    assert not {"learned", "forgotten"} & metrics.keys()


def test_a_difference_of_methods_is_paired() -> None:
    """Windows differ by far more than the methods do, so only a paired interval excludes 0."""
    bare = np.random.default_rng(0).uniform(20, 60, 200)
    first = windows(bare, np.random.default_rng(1).uniform(10, 50, 200))
    second = {"learned_danish": {**first["learned_danish"]}}
    second["learned_danish"]["nats"] = [nats - 1 for nats in first["learned_danish"]["nats"]]
    difference = paired_differences(first, second)["learned_danish"]
    assert (difference.low, difference.mean, difference.high) == pytest.approx((0.1, 0.1, 0.1))
    other_text = {"learned_danish": {"nats": [1.0], "tokens": [10]}}
    assert not paired_differences(first, other_text)
    assert [(each["first"], each["second"]) for each in differences_between({"a": first, "b": second, "c": first})] == [
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    ]


def test_a_comparison_reports_differences_and_what_was_trained(tmp_path: Path, tiny_backbone) -> None:
    methods = {
        "low": {"graft": {"kind": "lora", "rank": 1}, "training": {"learning_rate": 1e-4}},
        "high": {"graft": {"kind": "lora", "rank": 1}, "training": {"learning_rate": 1e-2}},
    }
    changed = values(tmp_path, tiny_backbone("llama"), methods=methods)
    changed["data"]["test"]["danish"] = changed["data"]["test"].pop("new")
    changed["evaluation"]["decode_prompts"] = 0
    results = compare_recipe(Recipe.parse(changed), progress=False, log=lambda _: None)
    low, high = (results.row(name).metrics["learned_danish"] for name in ("low", "high"))
    assert isinstance(low, Interval)
    assert isinstance(high, Interval)
    (difference,) = results.details["method_differences"]  # type: ignore[misc]
    assert {"learned_danish", "forgotten", "own_kl"} <= difference["metrics"].keys()  # type: ignore[call-overload, index, union-attr]
    found = difference["metrics"]["learned_danish"]["mean"]  # type: ignore[call-overload, index]
    assert found == pytest.approx(low.mean - high.mean, abs=1e-6)
    markdown = render_markdown(results)
    assert "1 minus" not in markdown
    training = [line for line in markdown.splitlines() if line.startswith("|") and "new.txt" in line]
    assert ["| 0.0001 |" in line for line in training] == [True, False]
    assert ["| 0.01 |" in line for line in training] == [False, True]
    read = {source["domain"]: source for source in results.details["trained"]["low"]["read"]}  # type: ignore[call-overload, index, union-attr]
    rows = {"new": 6 * 4 * 0.75, "old": 6 * 4 * 0.25}
    for domain, source in read.items():
        assert source["source"] == str(tmp_path / f"{domain}.txt")
        in_rows = source["tokens"] * source["passes"]
        assert in_rows == pytest.approx(16 * rows[domain], rel=0.05), "tokens that were read, up to padding"
    out = io.StringIO()
    print_table(results, Console(file=out, width=100))
    text = out.getvalue()
    assert " minus " in text
    assert f"[{low.low:+.3f}, {low.high:+.3f}]" in text


@pytest.mark.parametrize(("share", "is_told"), [(0.999, True), (0.6, False)])
def test_gates_that_are_always_open_are_remarked_on(share: float, is_told: bool) -> None:
    row = Row(id="gated", label="a gated method", metrics={})
    statistics = {"gated": {"open_share": {"old": [1.0, share], "new": [1.0, 1.0]}}}
    found = remarks(Results.here("train", [row], details={"statistics": statistics}))
    assert [("a gated method" in remark) for remark in found] == [True] * is_told


def test_speeds_are_said_to_be_those_of_this_run() -> None:
    timed = Row(id="a", label="a", metrics={"train_tokens_per_s": 100.0})
    (remark,) = remarks(Results.here("train", [timed]))
    assert "this run" in remark
    assert not remarks(Results.here("train", [Row(id="a", label="a", metrics={"old": 1.0})]))


@pytest.mark.parametrize(("asked", "told"), [(3, 1), (24, 0)])
def test_fewer_questions_than_there_should_be_are_told(asked: int, told: int) -> None:
    row = Row(id="a", label="a", metrics={})
    counts = {"a": {"asked": asked, "wanted": 24}}
    found = remarks(Results.here("train", [row], details={"asked_questions": counts}))
    assert len(found) == told
    assert all("3 instead of 24" in remark for remark in found)
