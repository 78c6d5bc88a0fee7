"""The protocol of experiments: what an experiment needs so that it decides something.

    Four conditions make a comparison decisive:
    1. something was learned: a row beats a table of bigrams, counted on the text that the row was trained on
    2. something was lost: the reference row loses at least 0.1 nats, or 5 points of a retained skill
    3. the rate of every row was found by the same search, and the best rate is not at an edge
    4. the primary comparisons were declared before the run, and Holm's correction is applied to them

A comparison tests one hypothesis. Without a margin, it is that the rows are equal, tested on both sides. With a margin,
it is that they differ by more than the margin on either side (two one-sided tests: Schuirmann, 1987), so that a
significant result shows equivalence. Both sorts of p-values are corrected together.

Each p-value is the larger one of two tests:

- A crossed bootstrap draws seeds and items with replacement, independently of each other (Owen and Eckles, 2012, arXiv
  1106.2125). Three drawn seeds vary too little, so it rejects too often if rows differ between seeds alone.
- Student's t-test of the seeds' mean differences. It is undefined where they are all equal.

A difference that is the same for all items has a bootstrap without width. Its p-value follows from the number of items.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from graftlm.evaluation import Interval, combine_seeds
from graftlm.evaluation.intervals import equal_differences_interval, percentile_interval

RESAMPLES = 10_000
LEVEL = 0.05
LEAST_SEEDS = 3
"""Number of seeds below which no comparison is decided."""
LOST_NATS = 0.1
LOST_SHARE = 0.05

Verdict = Literal[
    "better",
    "worse",
    "no significant difference",
    "equivalent",
    "no equivalence shown",
    "undecided",
]
Items = Mapping[str, float]
"""A value for each item, by the item's id."""
BySeed = Mapping[int, Mapping[str, Items]]
"""For each seed, the values of the items by metric."""

_SAME = 1e-9  # differences of means that are rounding errors


class BigramTable:
    """A table of token pairs, a rival that any trained row should beat.

    The probability of a token after another is interpolated with the token's own frequency, by Witten and Bell's rule:

        P(b | a) = (n(ab) + d(a) P(b)) / (n(a) + d(a)),   P(b) = (n(b) + 1) / (n + V)

    n counts occurrences, d(a) is the number of different tokens that follow a, and V is the size of the vocabulary.

    Args:
        sequences: training sequences of token ids. The first token of each is only a context.
        vocabulary: number of tokens of the vocabulary.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._pairs: dict[int, Counter[int]] = {}
        self._single: Counter[int] = Counter()
        for sequence in sequences:
            for before, token in itertools.pairwise(sequence):
                followers = self._pairs.setdefault(before, Counter())
                followers[token] += 1
                self._single[token] += 1

    def probability(self, before: int, token: int) -> float:
        """Return the probability of a token after another."""
        alone = (self._single[token] + 1) / (self._single.total() + self._vocabulary)
        followers = self._pairs.get(before)
        if followers is None:
            return alone
        different = len(followers)
        expected = followers[token] + different * alone
        return expected / (followers.total() + different)

    def nats_per_token(self, sequences: Sequence[Sequence[int]]) -> float:
        """Return the mean negative log-probability of all tokens but the first of each sequence."""
        nats = []
        for sequence in sequences:
            for before, token in itertools.pairwise(sequence):
                probability = self.probability(before, token)
                nats.append(-math.log(probability))
        return float(np.mean(nats))


@dataclass(frozen=True)
class RateSearch:
    """The result of a search for a rate.

    Attributes:
        scores: the score of each rate that was tried; a higher score is better.
    """

    scores: Mapping[float, float]

    @property
    def best(self) -> float:
        """The rate with the highest score, and the smaller of two equal ones."""
        return min(self.scores, key=lambda rate: (-self.scores[rate], rate))

    @property
    def is_interior(self) -> bool:
        """Whether a smaller and a larger rate were tried than the best one."""
        return min(self.scores) < self.best < max(self.scores)

    def details(self) -> dict[str, Any]:
        """Return what `results.json` keeps of the search."""
        scores = {f"{rate:g}": round(value, 4) for rate, value in self.scores.items()}
        return {"scores": scores, "is_interior": self.is_interior}


def search_rate(
    score: Callable[[float], float],
    rates: Sequence[float],
    *,
    factor: float = 2.0,
    limit: int = 8,
) -> RateSearch:
    """Try rates of a ladder; it extends beyond an edge as long as the best rate is at that edge.

    Args:
        score: trains at a rate and returns the score on validation questions.
        rates: the rates to begin with.
        factor: ratio of neighbouring rates beyond the ends.
        limit: maximum number of rates. A search that ends there may have its best rate at an edge.
    """
    scores = {rate: score(rate) for rate in rates}
    search = RateSearch(scores)
    while not search.is_interior and len(scores) < limit:
        smallest = min(scores)
        rate = smallest / factor if search.best == smallest else max(scores) * factor
        scores[rate] = score(rate)
        search = RateSearch(scores)
    return search


@dataclass(frozen=True)
class Comparison:
    """A comparison of two rows that is declared before the run.

    Attributes:
        row: id of the row.
        rival: id of the row that it is compared with.
        metric: name of the metric, of which a higher value is better.
        margin: the comparison tests whether the difference lies within this margin; None to test whether there is one.
    """

    row: str
    rival: str
    metric: str
    margin: float | None = None

    @property
    def name(self) -> str:
        """The comparison in one line."""
        return f"{self.metric}: {self.row} less {self.rival}"


@dataclass(frozen=True)
class Decision:
    """A decided comparison.

    Attributes:
        comparison: the comparison.
        difference: the row's mean less the rival's, with its 95% interval: the wider ends of the bootstrap's interval
            and of Student's over seeds. It is not corrected.
        p: p-value of the comparison's hypothesis, without correction.
        corrected: the p-value after Holm's correction over all declared comparisons.
        verdict: what the comparison shows.
        seeds: number of seeds that both rows have.
        items: number of items.
    """

    comparison: Comparison
    difference: Interval
    p: float
    corrected: float
    verdict: Verdict
    seeds: int
    items: int


def described(decision: Decision, *, is_decided: bool) -> dict[str, Any]:
    """Return a decided comparison as JSON values; `decided` says whether its verdict counts."""
    values = asdict(decision)
    values["difference"] = decision.difference.model_dump()
    values["name"] = decision.comparison.name
    values["decided"] = is_decided
    return values


def crossed_bootstrap(differences: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return bootstrap samples of a mean over seeds and items, (resamples,).

    Args:
        differences: (seeds, items); NaN where a seed lacks an item.
        resamples: number of samples.
        seed: seed of the draws.
    """
    n_seeds, n_items = differences.shape
    generator = np.random.default_rng(seed)
    seed_weights = _draws(generator, n_seeds, resamples)
    item_weights = _draws(generator, n_items, resamples)
    is_there = ~np.isnan(differences)
    values = np.where(is_there, differences, 0.0)
    sums = _weighted_sums(values, seed_weights, item_weights)
    counts = _weighted_sums(is_there.astype(float), seed_weights, item_weights)
    with np.errstate(invalid="ignore"):
        return sums / counts


def _draws(generator: np.random.Generator, units: int, resamples: int) -> np.ndarray:
    """Return how often each unit is drawn in each sample, (resamples, units)."""
    probabilities = np.full(units, 1 / units)
    return generator.multinomial(units, probabilities, size=resamples)


def _weighted_sums(values: np.ndarray, seed_weights: np.ndarray, item_weights: np.ndarray) -> np.ndarray:
    """Return the sum of (seeds, items) values for each sample, (resamples,)."""
    over_seeds = seed_weights @ values
    return (over_seeds * item_weights).sum(axis=1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's corrected p-values, in the order of the given ones (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    corrected = [1.0] * len(p_values)
    remaining = len(p_values)
    largest = 0.0
    for number in order:
        value = min(1.0, remaining * p_values[number])
        largest = max(largest, value)
        corrected[number] = largest
        remaining -= 1
    return corrected


def decide(comparisons: Sequence[Comparison], items: Mapping[str, BySeed]) -> list[Decision]:
    """Decide the declared comparisons whose rows were measured.

    Rows are paired by seed: seeds that one of two rows lacks are left out. Holm's correction counts all declared
    comparisons. One that is not measured, or over fewer than three seeds, is undecided and counts with a p-value of 1.

    Args:
        comparisons: all declared comparisons.
        items: for each row and each seed, the values of the items by metric.
    """
    tables = {}
    for number, comparison in enumerate(comparisons):
        table = _differences(comparison, items)
        if len(table):
            tables[number] = table
    p_values = {number: p_value(table, comparisons[number].margin) for number, table in tables.items()}
    family = [1.0] * len(comparisons)
    for number, table in tables.items():
        if len(table) >= LEAST_SEEDS:
            family[number] = p_values[number]
    corrected = holm(family)
    decisions = []
    for number, table in tables.items():
        difference = _interval(table)
        decision = Decision(
            comparison=comparisons[number],
            difference=difference,
            p=p_values[number],
            corrected=corrected[number],
            verdict=_verdict(comparisons[number], difference, corrected[number], len(table)),
            seeds=table.shape[0],
            items=table.shape[1],
        )
        decisions.append(decision)
    return decisions


def _differences(comparison: Comparison, items: Mapping[str, BySeed]) -> np.ndarray:
    """Return the differences of two rows, (seeds, items), of the seeds and items that both rows have."""
    rows = items.get(comparison.row, {})
    rivals = items.get(comparison.rival, {})
    by_seed = []
    for seed in sorted(rows.keys() & rivals.keys()):
        values = rows[seed].get(comparison.metric, {})
        rival_values = rivals[seed].get(comparison.metric, {})
        shared = values.keys() & rival_values.keys()
        if shared:
            by_seed.append({name: values[name] - rival_values[name] for name in shared})
    return as_table(by_seed)


def as_table(by_seed: Sequence[Items]) -> np.ndarray:
    """Return the values of all seeds as a table, (seeds, items), with NaN where a seed lacks an item."""
    ids: set[str] = set()
    for items in by_seed:
        ids.update(items)
    table = np.full((len(by_seed), len(ids)), np.nan)
    for row, items in enumerate(by_seed):
        for column, name in enumerate(sorted(ids)):
            table[row, column] = items.get(name, np.nan)
    return table


def p_value(differences: np.ndarray, margin: float | None = None, *, resamples: int = RESAMPLES) -> float:
    """Return the p-value of a comparison: the larger one of those of the bootstrap and of Student's t-test over seeds.

    Args:
        differences: (seeds, items); NaN where a seed lacks an item. Values of a table without variation are taken to be
            differences of shares, from -1 to 1.
        margin: test whether the mean lies within this margin; None to test whether it differs from zero.
        resamples: number of samples of the bootstrap.
    """
    return max(bootstrap_p(differences, margin, resamples=resamples), _student_p(differences, margin))


def bootstrap_p(differences: np.ndarray, margin: float | None = None, *, resamples: int = RESAMPLES) -> float:
    """Return the p-value of the crossed bootstrap alone, or that of the number of items if all differences are equal.

    Args:
        differences: (seeds, items); NaN where a seed lacks an item.
        margin: as in `p_value`.
        resamples: number of samples of the bootstrap.
    """
    if _is_constant(differences):
        value = float(np.nanmean(differences))
        items = differences.shape[1]
        return _combined(margin, lambda bound, side: _constant_p(value, items, bound, side))
    samples = crossed_bootstrap(differences, resamples=resamples)
    valid = samples[~np.isnan(samples)]

    def one_sided(bound: float, side: int) -> float:
        beyond = np.count_nonzero(side * (valid - bound) <= 0)
        return (beyond + 1) / (len(valid) + 1)

    return _combined(margin, one_sided)


def _combined(margin: float | None, one_sided: Callable[[float, int], float]) -> float:
    """Return a p-value that two one-sided tests give.

    Args:
        margin: as in `p_value`.
        one_sided: returns the p-value of the test whether the mean lies above a bound (side 1), or below it (side -1).
    """
    if margin is None:
        smaller = min(one_sided(0.0, 1), one_sided(0.0, -1))
        return min(1.0, 2 * smaller)
    return max(one_sided(-margin, 1), one_sided(margin, -1))


def _is_constant(differences: np.ndarray) -> bool:
    return float(np.nanmax(differences) - np.nanmin(differences)) < _SAME


def _constant_p(value: float, items: int, bound: float, side: int) -> float:
    """Return a one-sided p-value of n equal differences.

    If the mean of differences of shares lay at the bound, at least a share |value - bound| / (1 ± value) of the items
    would have another difference. The p-value is the probability that n items have none of them.
    """
    distance = side * (value - bound)
    if distance <= 0:
        return 1.0
    share = distance / (1 + side * value)
    return max(0.0, 1 - share) ** items


def _student_p(differences: np.ndarray, margin: float | None) -> float:
    """Return the p-value of Student's t-test of the seeds' means, or 0 where it is undefined."""
    from scipy.special import stdtr

    means = np.nanmean(differences, axis=1)
    count = len(means)
    if count < 2 or np.ptp(means) < _SAME:
        return 0.0  # the bootstrap's p-value is the larger one
    error = float(np.std(means, ddof=1)) / math.sqrt(count)
    mean = float(np.mean(means))
    return _combined(margin, lambda bound, side: float(stdtr(count - 1, -side * (mean - bound) / error)))


def _interval(differences: np.ndarray) -> Interval:
    """Return the mean difference with the wider ends of the bootstrap's interval and of Student's over seeds."""
    mean = float(np.nanmean(differences))
    if _is_constant(differences):
        # The ends at which `_constant_p` is 2.5%.
        return equal_differences_interval(mean, differences.shape[1])
    drawn = percentile_interval(mean, crossed_bootstrap(differences))
    if len(differences) < 2:
        return drawn
    over_seeds = combine_seeds(np.nanmean(differences, axis=1).tolist())
    return Interval(mean=mean, low=min(drawn.low, over_seeds.low), high=max(drawn.high, over_seeds.high))


def _verdict(comparison: Comparison, difference: Interval, corrected: float, seeds: int) -> Verdict:
    if seeds < LEAST_SEEDS:
        return "undecided"
    is_shown = corrected < LEVEL
    if comparison.margin is not None:
        return "equivalent" if is_shown else "no equivalence shown"
    if not is_shown:
        return "no significant difference"
    return "better" if difference.mean > 0 else "worse"


@dataclass(frozen=True)
class Condition:
    """One of the four conditions.

    Attributes:
        name: what the condition demands.
        met: whether it is met; None if it was not measured.
        reason: the figures that decide it.
    """

    name: str
    met: bool | None
    reason: str


@dataclass(frozen=True)
class Evidence:
    """What the conditions are judged by.

    Attributes:
        nats: nats per new token of each row on the new test text.
        bigram_nats: those of a bigram table that was counted on the training text.
        lost_nats: what the reference row loses on old text, in nats per token, by the name of the text.
        lost_shares: what it loses of retained skills, as shares from 0 to 1, by the name of the skill.
        searches: the search of each row that has a rate.
        declared: the comparisons that the README declared before the run.
        decisions: the comparisons that were decided.
        amended: why the declaration does not count, if it was changed after results of the same seeds; else empty.
    """

    nats: Mapping[str, float]
    bigram_nats: float
    lost_nats: Mapping[str, float] = field(default_factory=dict)
    lost_shares: Mapping[str, float] = field(default_factory=dict)
    searches: Mapping[str, RateSearch] = field(default_factory=dict)
    declared: Sequence[Comparison] = ()
    decisions: Sequence[Decision] = ()
    amended: str = ""


def conditions(evidence: Evidence) -> list[Condition]:
    """Return the four conditions, each with the figures that decide it."""
    return [_learned(evidence), _lost(evidence), _searched(evidence), _declared(evidence)]


def is_decided(evidence: Evidence) -> bool:
    """Return whether all four conditions are met, so that the verdicts of the comparisons count."""
    return all(condition.met is True for condition in conditions(evidence))


def _learned(evidence: Evidence) -> Condition:
    name = "every trained row beats a bigram table of its training text"
    if not evidence.nats:
        return Condition(name, None, "no trained row was measured")
    worse = [row for row, nats in evidence.nats.items() if nats >= evidence.bigram_nats]
    lowest = min(evidence.nats.values())
    highest = max(evidence.nats.values())
    figures = f"bigram table {evidence.bigram_nats:.2f} nats per token, rows {lowest:.2f} to {highest:.2f}"
    if worse:
        return Condition(name, False, f"{figures}; not better: {', '.join(worse)}")
    return Condition(name, True, figures)


def _lost(evidence: Evidence) -> Condition:
    name = "the reference row loses 0.1 nats, or 5 points of a retained skill"
    losses = []
    has_lost = False
    for text, nats in evidence.lost_nats.items():
        losses.append(f"{text} {nats:.2f} nats")
        has_lost = has_lost or nats >= LOST_NATS
    for skill, share in evidence.lost_shares.items():
        losses.append(f"{skill} {100 * share:.0f} points")
        has_lost = has_lost or share >= LOST_SHARE
    if not losses:
        return Condition(name, None, "no loss was measured")
    return Condition(name, has_lost, f"lost: {', '.join(losses)}")


def _searched(evidence: Evidence) -> Condition:
    name = "every row has its own rate, not at an edge of its search"
    if not evidence.searches:
        return Condition(name, None, "no rate was searched")
    unsearched = sorted(_compared_rows(evidence) & evidence.nats.keys() - evidence.searches.keys())
    if unsearched:
        return Condition(name, False, f"not searched: {', '.join(unsearched)}")
    at_edge = sorted(row for row, search in evidence.searches.items() if not search.is_interior)
    if at_edge:
        return Condition(name, False, f"at an edge: {', '.join(at_edge)}")
    rates = [f"{row} {search.best:g}" for row, search in evidence.searches.items()]
    return Condition(name, True, ", ".join(rates))


def _compared_rows(evidence: Evidence) -> set[str]:
    return {name for each in evidence.declared for name in (each.row, each.rival)}


def _declared(evidence: Evidence) -> Condition:
    name = "declared comparisons, corrected by Holm, over at least three seeds"
    missing = [each.name for each in evidence.declared]
    for decision in evidence.decisions:
        if decision.comparison not in evidence.declared:
            return Condition(name, False, f"not declared: {decision.comparison.name}")
        missing.remove(decision.comparison.name)
    if not evidence.declared:
        return Condition(name, False, "no comparison was declared")
    if missing:
        return Condition(name, False, f"declared and not measured: {'; '.join(missing)}")
    seeds = min(decision.seeds for decision in evidence.decisions)
    if seeds < LEAST_SEEDS:
        return Condition(name, False, f"{seeds} of {LEAST_SEEDS} seeds")
    figures = f"{len(evidence.declared)} comparisons, {seeds} seeds"
    if evidence.amended:
        return Condition(name, False, f"{figures}; {evidence.amended}")
    return Condition(name, True, figures)
