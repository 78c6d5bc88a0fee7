"""The protocol of experiments: rivals, searches, comparisons, conditions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.protocol import (
    BigramTable,
    Comparison,
    Evidence,
    RateSearch,
    bootstrap_p,
    conditions,
    crossed_bootstrap,
    decide,
    holm,
    is_decided,
    p_value,
    search_rate,
)


def test_a_bigram_table_has_probabilities_that_sum_to_one() -> None:
    table = BigramTable([[0, 1, 2], [0, 1, 3], [4, 1, 2]], vocabulary=6)
    for before in range(6):
        total = sum(table.probability(before, token) for token in range(6))
        assert total == pytest.approx(1)
    # After 1 come two different tokens in three pairs; the table has 6 pairs, of which 2 end in token 2.
    assert table.probability(1, 2) == pytest.approx((2 + 2 * 3 / 12) / 5)


def test_a_bigram_table_scores_all_tokens_but_the_first() -> None:
    table = BigramTable([[0, 1], [0, 1]], vocabulary=4)
    expected = -math.log(table.probability(0, 1))
    assert table.nats_per_token([[0, 1]]) == pytest.approx(expected)
    assert table.nats_per_token([[0, 1]]) < BigramTable([], vocabulary=4).nats_per_token([[0, 1]])


def test_a_search_extends_until_the_best_rate_is_inside() -> None:
    tried = []

    def score(rate: float) -> float:
        tried.append(rate)
        return -abs(math.log2(rate) - 5)

    search = search_rate(score, (1.0, 2.0, 4.0))
    assert search.best == 32
    assert search.is_interior
    assert tried == [1, 2, 4, 8, 16, 32, 64]


def test_a_search_extends_downwards_too() -> None:
    search = search_rate(lambda rate: -abs(math.log2(rate) + 1), (1.0, 2.0))
    assert search.best == 0.5
    assert min(search.scores) == 0.25


def test_a_search_that_reaches_its_limit_is_at_an_edge() -> None:
    search = search_rate(lambda rate: rate, (1.0, 2.0), limit=4)
    assert len(search.scores) == 4
    assert not search.is_interior


def test_of_equal_scores_the_smaller_rate_is_best() -> None:
    assert RateSearch({4.0: 1.0, 2.0: 1.0, 1.0: 0.0}).best == 2


def test_the_crossed_bootstrap_covers_seeds_and_items() -> None:
    generator = np.random.default_rng(1)
    seeds = generator.normal(0, 1, (6, 1))
    items = generator.normal(0, 1, (1, 40))
    both = crossed_bootstrap(seeds + items)
    only_items = crossed_bootstrap(np.repeat(items, 6, axis=0))
    assert np.std(only_items) == pytest.approx(1 / math.sqrt(40), rel=0.35)
    assert np.std(both) > 1.5 * np.std(only_items)


def test_the_crossed_bootstrap_leaves_out_missing_items() -> None:
    table = np.array([[1.0, np.nan, 1.0], [np.nan, 1.0, 1.0]])
    samples = crossed_bootstrap(table, resamples=200)
    assert np.nanmin(samples) == np.nanmax(samples) == 1


def test_holms_correction() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


OfSeeds = dict[int, dict[str, dict[str, float]]]


def rows_with(difference: float, items: int = 60, seeds: int = 3) -> dict[str, OfSeeds]:
    """Return items of two rows; the first is right on a larger share of them."""
    better = int(items * difference)
    ours = {f"q{number}": 1.0 for number in range(items)}
    theirs = {f"q{number}": 0.0 if number < better else 1.0 for number in range(items)}
    return {
        "ours": {seed: {"kept": ours} for seed in range(seeds)},
        "theirs": {seed: {"kept": theirs} for seed in range(seeds)},
    }


def test_a_clear_difference_is_decided() -> None:
    (decision,) = decide([Comparison("ours", "theirs", "kept")], rows_with(0.5))
    assert decision.verdict == "better"
    assert decision.difference.mean == pytest.approx(0.5)
    assert (decision.seeds, decision.items) == (3, 60)
    (reverse,) = decide([Comparison("theirs", "ours", "kept")], rows_with(0.5))
    assert reverse.verdict == "worse"


def test_below_three_seeds_nothing_is_decided() -> None:
    for seeds in (1, 2):
        (decision,) = decide([Comparison("ours", "theirs", "kept")], rows_with(0.5, seeds=seeds))
        assert decision.verdict == "undecided"
        assert decision.difference.mean == pytest.approx(0.5)
        assert decision.corrected == 1


def test_rows_are_paired_by_seed() -> None:
    """With seed 7 the rows have other items; a row without a seed, in another order, must not be compared with it."""
    rows = rows_with(0.5)
    other = {f"q{number}": 0.0 for number in range(60)}
    rows["ours"] = {7: {"kept": other}, **dict(reversed(rows["ours"].items()))}
    (decision,) = decide([Comparison("ours", "theirs", "kept")], rows)
    assert decision.seeds == 3
    assert decision.difference.mean == pytest.approx(0.5)
    rows["theirs"].pop(1)
    (decision,) = decide([Comparison("ours", "theirs", "kept")], rows)
    assert (decision.seeds, decision.verdict) == (2, "undecided")


def test_a_margin_asks_for_equivalence_only() -> None:
    """A small difference without noise is both significant and inside the margin: the verdict is equivalence."""
    small = rows_with(0.02, items=300)
    (decision,) = decide([Comparison("ours", "theirs", "kept", margin=0.05)], small)
    assert decision.verdict == "equivalent"
    assert decision.difference.mean == pytest.approx(0.02)
    assert decision.difference.low > 0
    large = rows_with(0.5)
    assert decide([Comparison("ours", "theirs", "kept", margin=0.05)], large)[0].verdict == "no equivalence shown"
    assert decide([Comparison("ours", "theirs", "kept")], rows_with(0.0))[0].verdict == "no significant difference"


def test_equivalence_is_corrected_by_holm_too() -> None:
    """Alone it is shown, among many comparisons it is not: 0.95^75 = 0.021."""
    rows = rows_with(0.0, items=75)
    equal = Comparison("ours", "theirs", "kept", margin=0.05)
    (alone,) = decide([equal], rows)
    assert alone.p == pytest.approx(0.95**75)
    assert alone.verdict == "equivalent"
    missing = [Comparison("ours", f"other{number}", "kept") for number in range(9)]
    (among_others,) = decide([equal, *missing], rows)
    assert among_others.corrected == pytest.approx(10 * alone.p)
    assert among_others.verdict == "no equivalence shown"


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_a_table_without_variation_has_the_p_value_of_its_number_of_items(value: float) -> None:
    few = np.full((3, 4), value)
    many = np.full((3, 60), value)
    if value == 0:
        assert p_value(many) == 1
        assert p_value(few, 0.05) == pytest.approx(0.95**4)
        assert p_value(many, 0.05) == pytest.approx(0.95**60)
    else:
        assert p_value(few) == pytest.approx(2 * 0.5**4)
        assert p_value(many) < 1e-6
        assert p_value(many, 0.05) == 1


def test_a_difference_without_variation_has_an_interval() -> None:
    """No difference in 60 items: at the ends of +/-(1 - 0.025^(1/60)) it has a probability of 2.5%."""
    (decision,) = decide([Comparison("ours", "theirs", "kept")], rows_with(0.0))
    assert decision.difference.high == pytest.approx(0.0596, abs=1e-4)
    assert decision.difference.low == pytest.approx(-0.0596, abs=1e-4)


def noise_of_seeds(mean: float, spread: float, tables: int = 400) -> list[np.ndarray]:
    """Return tables of 3 seeds and 100 items whose mean varies between seeds, and hardly between items."""
    generator = np.random.default_rng(20)
    seeds = generator.normal(mean, spread, (tables, 3, 1))
    items = generator.normal(0, 0.01 * spread, (tables, 3, 100))
    return list(seeds + items)


@pytest.mark.parametrize(("mean", "margin"), [(0.0, None), (0.05, 0.05)])
def test_noise_between_seeds_is_seldom_taken_for_an_effect(mean: float, margin: float | None) -> None:
    """At the null hypothesis 5% of tables may reject it; the bootstrap alone rejects it far more often."""
    tables = noise_of_seeds(mean, spread=0.01)
    rejected = [p_value(table, margin, resamples=100) < 0.05 for table in tables]
    by_bootstrap = [bootstrap_p(table, margin, resamples=100) < 0.05 for table in tables]
    assert np.mean(rejected) <= 0.08
    assert np.mean(by_bootstrap) > 0.15


def test_the_interval_of_a_difference_covers_noise_between_seeds() -> None:
    rows = rows_with(0.0)
    for seed, right in enumerate((57, 58, 60)):
        rows["theirs"][seed] = {"kept": {f"q{number}": float(number < right) for number in range(60)}}
    (decision,) = decide([Comparison("ours", "theirs", "kept")], rows)
    assert decision.verdict == "no significant difference"
    assert decision.difference.low < 0 < decision.difference.mean


def test_declared_comparisons_without_rows_count_in_the_correction() -> None:
    measured = Comparison("ours", "theirs", "kept")
    missing = [Comparison("ours", f"other{number}", "kept") for number in range(4)]
    alone = decide([measured], rows_with(0.1))[0]
    among_others = decide([measured, *missing], rows_with(0.1))[0]
    assert among_others.corrected == pytest.approx(min(1.0, 5 * alone.corrected))


COMPARISON = Comparison("ours", "theirs", "kept")
INTERIOR = RateSearch({1.0: 0.0, 2.0: 1.0, 4.0: 0.5})
AT_EDGE = RateSearch({1.0: 0.0, 2.0: 1.0})


def evidence(**changes: object) -> Evidence:
    fields: dict[str, object] = {
        "nats": {"ours": 1.0, "theirs": 2.0},
        "bigram_nats": 3.0,
        "lost_shares": {"near": 0.5},
        "searches": {"ours": INTERIOR, "theirs": INTERIOR},
        "declared": [COMPARISON],
        "decisions": decide([COMPARISON], rows_with(0.5)),
    }
    return Evidence(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, [True, True, True, True]),
        ({"bigram_nats": 1.5}, [False, True, True, True]),
        ({"nats": {}}, [None, True, True, True]),
        ({"lost_shares": {"near": 0.04}}, [True, False, True, True]),
        ({"lost_shares": {}}, [True, None, True, True]),
        ({"lost_shares": {}, "lost_nats": {"old": 0.2}}, [True, True, True, True]),
        ({"searches": {"ours": INTERIOR, "theirs": AT_EDGE}}, [True, True, False, True]),
        ({"searches": {}}, [True, True, None, True]),
        ({"searches": {"ours": INTERIOR, "other": INTERIOR}}, [True, True, False, True]),
        ({"amended": "after the first results"}, [True, True, True, False]),
        ({"decisions": decide([COMPARISON], rows_with(0.5, seeds=2))}, [True, True, True, False]),
        ({"declared": []}, [True, True, True, False]),
        ({"decisions": []}, [True, True, True, False]),
    ],
)
def test_conditions(changes: dict[str, object], met: list[bool | None]) -> None:
    judged = conditions(evidence(**changes))
    assert [condition.met for condition in judged] == met
    assert all(condition.reason for condition in judged)
    assert is_decided(evidence(**changes)) == all(met)
