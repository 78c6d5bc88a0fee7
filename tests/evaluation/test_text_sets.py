"""Named sets: learned and forgotten of each, and their means with equal shares, with intervals over each set's text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graftlm.data.text_sets import ONE_SET, TextSets
from graftlm.evaluation import Interval, Results, Row, Scores, learning_and_forgetting, plots
from graftlm.evaluation.differences import paired_differences
from graftlm.evaluation.frontier import Frontier
from graftlm.evaluation.report_tables import render_markdown
from graftlm.evaluation.scores import mean_of_sets
from graftlm.evaluation.strengths import changes_by_window, windows_of

SETS = TextSets(new=("da", "sk"), old=("wiki", "code"))
SIZES = {"da": 200, "sk": 20, "wiki": 50, "code": 5}  # windows
LEARNED = {"da": 2.0, "sk": 1.0, "wiki": -0.5, "code": -0.1}  # nats per token


def scores(nats: np.ndarray, kl: np.ndarray | None = None) -> Scores:
    tokens = np.full(len(nats), 10)
    return Scores(nats=nats, tokens=tokens, bytes=tokens * 4, document=np.arange(len(nats)), kl=kl)


def backbone() -> dict[str, Scores]:
    generator = np.random.default_rng(0)
    return {name: scores(generator.uniform(30, 60, size)) for name, size in SIZES.items()}


def trained(factor: float = 1.0, noise: float = 0.0) -> dict[str, Scores]:
    """Scores of a method that learned `factor` times LEARNED."""
    generator = np.random.default_rng(1)
    found = {}
    for name, before in backbone().items():
        change = 10 * factor * LEARNED[name] + noise * generator.normal(size=SIZES[name])
        found[name] = scores(before.nats - change, kl=np.ones(SIZES[name]) if name in SETS.new else None)
    return found


def windows(factor: float = 1.0, noise: float = 0.0) -> dict[str, Any]:
    return windows_of(changes_by_window(backbone(), trained(factor, noise), None, SETS))


def test_each_set_has_a_metric_and_the_means_have_equal_shares() -> None:
    metrics = learning_and_forgetting(backbone(), trained(), SETS)
    expected = {"learned_da": 2.0, "learned_sk": 1.0, "forgotten_wiki": 0.5, "forgotten_code": 0.1}
    expected |= {"learned": 1.5, "forgotten": 0.3, "new_kl": 0.1}
    assert {name: metrics[name].mean for name in expected} == pytest.approx(expected)
    for domain, names in (("new", SETS.new), ("old", SETS.old)):
        for suffix in ("", "_bpb"):
            mean = np.mean([metrics[f"{name}{suffix}"].mean for name in names])
            assert metrics[f"{domain}{suffix}"].mean == pytest.approx(mean)
    assert "old_kl" not in metrics


def test_the_interval_of_a_mean_is_over_the_windows_of_each_set() -> None:
    """Sets differ, and no window of a set does: there is nothing that resampling could change."""
    metrics = learning_and_forgetting(backbone(), trained(), SETS)
    assert (metrics["learned"].low, metrics["learned"].high) == pytest.approx((1.5, 1.5))
    loss = mean_of_sets([scores(np.full(30, 20.0)), scores(np.full(5, 60.0))])
    assert (loss.low, loss.mean, loss.high) == pytest.approx((4, 4, 4))
    noisy = learning_and_forgetting(backbone(), trained(noise=5.0), SETS)
    widths = {name: noisy[name].high - noisy[name].low for name in ("learned", "learned_da", "learned_sk")}
    expected = np.hypot(widths["learned_da"], widths["learned_sk"]) / 2
    assert widths["learned"] == pytest.approx(expected, rel=0.15)


def test_methods_differ_in_their_means_on_the_same_windows() -> None:
    difference = paired_differences(windows(1.0), windows(0.5))
    assert difference["learned"].mean == pytest.approx(0.75)
    assert (difference["learned"].low, difference["learned"].high) == pytest.approx((0.75, 0.75))
    assert difference["forgotten_code"].mean == pytest.approx(0.05)
    noisy = paired_differences(windows(noise=5.0), windows(0.5))
    assert noisy["learned"].low < noisy["learned"].mean < noisy["learned"].high


def test_a_frontier_is_of_the_means() -> None:
    points = [{"strength": factor, "windows": windows(factor)} for factor in (0.5, 1.0)]
    frontier = Frontier({"one": [points]})
    assert frontier.reach("one") == pytest.approx(1.5)
    lost = frontier.at_level(0.75)["one"]["forgotten"]
    assert (lost.low, lost.mean, lost.high) == pytest.approx((0.15, 0.15, 0.15))


def test_some_sets_may_have_no_test_text() -> None:
    names = ("da", "wiki")
    before = {name: backbone()[name] for name in names}
    after = {name: trained()[name] for name in names}
    metrics = learning_and_forgetting(before, after, TextSets(new=("da", "sk")))
    assert metrics["learned"].mean == pytest.approx(2.0)
    assert "forgotten" not in metrics
    assert "learned_wiki" in metrics, "old text has no named sets, so this is a text of another name"
    assert learning_and_forgetting({}, after, SETS)["old"].mean == pytest.approx(metrics["wiki"].mean)


def test_without_names_nothing_changes() -> None:
    before = {"new": backbone()["da"], "old": backbone()["wiki"], "third": backbone()["sk"]}
    after = {"new": trained()["da"], "old": trained()["wiki"], "third": trained()["sk"]}
    metrics = learning_and_forgetting(before, after, ONE_SET)
    assert {"learned", "forgotten", "learned_third"} <= metrics.keys()
    assert not {name for name in metrics if name.startswith("forgotten_")}


@pytest.mark.parametrize(
    ("sets", "tests", "named"),
    [
        (TextSets(new=("da",), old=("da",)), (), "da"),
        (TextSets(new=("new",)), (), "new"),
        (TextSets(old=("own",)), (), "own"),
        (TextSets(new=("danish",)), ("danich",), "did you mean danish"),
        (TextSets(new=("da",)), ("new",), "new"),
    ],
)
def test_names_that_do_not_fit(sets: TextSets, tests: tuple[str, ...], named: str) -> None:
    (problem,) = sets.problems(tests)
    assert named in problem


@pytest.mark.parametrize("sets", [ONE_SET, TextSets(new=("da", "sk")), TextSets(old=("wiki",))])
def test_names_that_fit(sets: TextSets) -> None:
    tests = [*(sets.new or ("new",)), *(sets.old or ("old",))]
    assert not list(sets.problems(tests if sets.are_named else [*tests, "any"]))


def results() -> Results:
    metrics = learning_and_forgetting(backbone(), trained(), SETS)
    before = learning_and_forgetting({}, backbone(), SETS)
    rows = [Row(id="backbone", label="backbone", metrics={**before}), Row(id="lora", label="LoRA", metrics={**metrics})]
    sets = {"new": list(SETS.new), "old": list(SETS.old)}
    return Results.here("train", rows, details={"text_sets": {"backbone": sets, "lora": sets}})


def test_a_report_has_a_table_by_set_and_its_means_in_the_first() -> None:
    markdown = render_markdown(results())
    first, by_set = markdown.split("## Learned and forgotten by set")
    assert "+1.500" in first
    (further,) = (line for line in markdown.splitlines() if line.startswith("| method | new KL"))
    assert "da" not in further, "the table by set has it"
    lines = {tuple(line.split(" | ")[:2]): line for line in by_set.splitlines() if line.startswith("| ")}
    assert "+2.000" in lines["| da", "learned"]
    assert "+0.100" in lines["| code", "forgotten"]
    assert ("| sk", "bits per byte") in lines


def test_a_plot_has_each_set_of_each_row() -> None:
    changes = ["learned_da", "learned_sk", "forgotten_wiki"]
    figure = plots.by_set(results().rows, changes)
    (axes,) = figure.axes
    assert [label.get_text().replace("\n", "_") for label in axes.get_xticklabels()] == changes
    heights = [bar[0].get_ydata()[0] for bar in axes.containers]
    assert heights == pytest.approx([2.0, 1.0, 0.5])
    assert isinstance(results().row("lora").metrics["learned_da"], Interval)
