"""The protocol of experiments: what an experiment needs so that it decides something.

    Four conditions make a comparison decisive:
    1. something was learned: a row beats a table of bigrams, counted on the text that the row was trained on
    2. something was lost: the reference row loses at least 0.1 nats, or 5 points of a retained skill
    3. the rate of every row was found by the same search, and the best rate is not at an edge
    4. the primary comparisons were declared before the run, and Holm's correction is applied to them

Intervals come from a crossed bootstrap: seeds and items are drawn with replacement, independently of each other, so
that an interval covers new seeds and new items (Owen and Eckles, 2012, arXiv 1106.2125).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from graftlm.evaluation import Interval
from graftlm.evaluation.intervals import percentile_interval

RESAMPLES = 10_000
LEVEL = 0.05
LEAST_SEEDS = 3
"""Number of seeds below which no comparison is decided."""
LOST_NATS = 0.1
LOST_SHARE = 0.05

Verdict = Literal["better", "worse", "equivalent", "no significant difference", "undecided"]
Items = Mapping[str, float]
"""A value for each item, by the item's id."""


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
        margin: differences within this margin count as equal, if equivalence is claimed.
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
        difference: the row's mean less the rival's, with its 95% interval.
        p: two-sided p-value of the bootstrap, without correction.
        corrected: the p-value after Holm's correction over all declared comparisons.
        verdict: what the comparison shows.
        seeds: number of seeds.
        items: number of items.
    """

    comparison: Comparison
    difference: Interval
    p: float
    corrected: float
    verdict: Verdict
    seeds: int
    items: int


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


def decide(
    comparisons: Sequence[Comparison],
    items: Mapping[str, Sequence[Mapping[str, Items]]],
) -> list[Decision]:
    """Decide the declared comparisons whose rows were measured.

    Holm's correction counts all declared comparisons, measured or not. Below three seeds a comparison is undecided.

    Args:
        comparisons: all declared comparisons.
        items: for each row and each seed, the values of the items by metric.
    """
    measured = [each for each in comparisons if _is_measured(each, items)]
    tables = [_differences(each, items) for each in measured]
    samples = [crossed_bootstrap(table) for table in tables]
    p_values = [_p_value(of_mean) for of_mean in samples]
    missing = len(comparisons) - len(measured)
    corrected = holm([*p_values, *[1.0] * missing])
    decisions = []
    for number, comparison in enumerate(measured):
        table = tables[number]
        difference = percentile_interval(float(np.nanmean(table)), samples[number])
        verdict: Verdict = "undecided"
        if table.shape[0] >= LEAST_SEEDS:
            verdict = _verdict(difference, samples[number], corrected[number], comparison.margin)
        decision = Decision(
            comparison=comparison,
            difference=difference,
            p=p_values[number],
            corrected=corrected[number],
            verdict=verdict,
            seeds=table.shape[0],
            items=table.shape[1],
        )
        decisions.append(decision)
    return decisions


def _is_measured(comparison: Comparison, items: Mapping[str, Sequence[Mapping[str, Items]]]) -> bool:
    for name in (comparison.row, comparison.rival):
        by_seed = items.get(name, ())
        has_metric = [comparison.metric in of_seed for of_seed in by_seed]
        if not has_metric or not all(has_metric):
            return False
    return True


def _differences(comparison: Comparison, items: Mapping[str, Sequence[Mapping[str, Items]]]) -> np.ndarray:
    """Return the differences of two rows, (seeds, items), of the items that both rows have for a seed."""
    by_seed = []
    for row, rival in zip(items[comparison.row], items[comparison.rival], strict=False):
        values = row[comparison.metric]
        rival_values = rival[comparison.metric]
        shared = values.keys() & rival_values.keys()
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


def _p_value(samples: np.ndarray) -> float:
    """Return the two-sided p-value of a bootstrap of a difference: twice the smaller share on one side of zero."""
    valid = samples[~np.isnan(samples)]
    total = len(valid) + 1
    below = (np.count_nonzero(valid <= 0) + 1) / total
    above = (np.count_nonzero(valid >= 0) + 1) / total
    smaller = min(below, above)
    return min(1.0, 2 * smaller)


def _verdict(difference: Interval, samples: np.ndarray, corrected: float, margin: float | None) -> Verdict:
    if corrected < LEVEL:
        return "better" if difference.mean > 0 else "worse"
    if margin is not None:
        # Two one-sided tests at 5% are a 90% interval inside the margin.
        low, high = np.nanquantile(samples, [LEVEL, 1 - LEVEL])
        if -margin < low and high < margin:
            return "equivalent"
    return "no significant difference"


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
        seeds: number of seeds.
        amended: why the declaration does not count, if it was changed after results of the same seeds; else empty.
    """

    nats: Mapping[str, float]
    bigram_nats: float
    lost_nats: Mapping[str, float] = field(default_factory=dict)
    lost_shares: Mapping[str, float] = field(default_factory=dict)
    searches: Mapping[str, RateSearch] = field(default_factory=dict)
    declared: Sequence[Comparison] = ()
    decisions: Sequence[Decision] = ()
    seeds: int = 0
    amended: str = ""


def conditions(evidence: Evidence) -> list[Condition]:
    """Return the four conditions, each with the figures that decide it."""
    return [_learned(evidence), _lost(evidence), _searched(evidence), _declared(evidence)]


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
    if evidence.seeds < LEAST_SEEDS:
        return Condition(name, False, f"{evidence.seeds} of {LEAST_SEEDS} seeds")
    figures = f"{len(evidence.declared)} comparisons, {evidence.seeds} seeds"
    if evidence.amended:
        return Condition(name, False, f"{figures}; {evidence.amended}")
    return Condition(name, True, figures)
