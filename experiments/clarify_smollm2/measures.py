"""Measures of pairs: how often the right form is likelier, and whether a predicted gain predicts the gain of an answer.

Shapes: P pairs. Log-probabilities are in nats, gains in bits, shares in percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from graftlm.evaluation import Metric
from graftlm.evaluation.intervals import bootstrap, percentile_interval
from graftlm.evaluation.plots import PALETTE
from graftlm.pipelines.clarify.gain import distributions_from_log_likelihoods, information_gain

CONDITIONS = ("nothing", "context", "answer", "word", "other")
DIFFERENCES = (("answer", "context"), ("context", "nothing"), ("answer", "word"))
NEEDED = 0.1  # bits that an answer must bring to be worth its question
RESAMPLES = 500
BINS = 5

Pair = Mapping[str, Any]
Pairs = Sequence[Pair]


def shares(pair: Pair) -> dict[str, float]:
    """Compute the measures of a pair, with either form as the right one.

    Args:
        pair: a scored pair. `nats` has log-probabilities of both forms, by condition and, if the condition depends on
            the right form, by that form, as in `answer:1`.

    Returns:
        Percent by measure: 0, 50 or 100.
    """
    nats = pair["nats"]
    given = _nats_by_condition(nats)
    gaps = {condition: _gaps(by_form) for condition, by_form in given.items()}
    values: dict[str, float] = {}
    for condition, of_condition in gaps.items():
        values[f"right_form_{condition}"] = _share_above_0(of_condition)
    for condition, of_condition in gaps.items():
        if condition != "nothing":
            values[f"moved_{condition}"] = float(sum(of_condition) > 0)
    right = pair["right"]
    for condition in ("nothing", "context", "answer"):
        own_gap = gaps[condition][right]
        values[f"own_form_{condition}"] = float(own_gap > 0)
    for condition in ("nothing", "question"):
        first, second = nats[condition]
        values[f"first_form_{condition}"] = float(first > second)
    per_token = np.array(given["answer"]) / pair["tokens"]
    values["per_token_answer"] = _share_above_0(_gaps(per_token.tolist()))
    if_answer_is_wrong = [-gap for gap in gaps["answer"]]
    values["right_form_wrong_answer"] = _share_above_0(if_answer_is_wrong)
    return {name: 100.0 * value for name, value in values.items()}


def _nats_by_condition(nats: Mapping[str, list[float]]) -> dict[str, list[list[float]]]:
    """Return the log-probabilities of both forms by condition and right form."""
    given = {}
    for condition in CONDITIONS:
        if f"{condition}:0" in nats:
            given[condition] = [nats[f"{condition}:0"], nats[f"{condition}:1"]]
        elif condition in nats:
            given[condition] = [nats[condition], nats[condition]]
    return given


def _gaps(by_form: Sequence[Sequence[float]]) -> list[float]:
    """Return by how much the right form is likelier than the other, for either form as the right one."""
    if_first, if_second = by_form
    first, second = if_first
    gap_of_first = first - second
    first, second = if_second
    gap_of_second = second - first
    return [gap_of_first, gap_of_second]


def _share_above_0(gaps: Sequence[float]) -> float:
    return float(np.mean([gap > 0 for gap in gaps]))


def values_of(runs: Sequence[Pairs], group: str, ids: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Compute the measures of the test pairs of a group.

    Args:
        runs: the scored pairs of each run.
        group: the group, or `all`.
        ids: ids of the pairs to use; all by default.

    Returns:
        Percent by measure, (P,), means over the runs. Differences between conditions are named as in
        `right_form_answer_minus_context`.
    """
    scored = []
    for pairs in runs:
        kept = [pair for pair in pairs if _is_selected(pair, group, ids)]
        scored.append([shares(pair) for pair in kept])
    values: dict[str, np.ndarray] = {}
    for name in _common_names(scored[0]):
        by_run = [[measures[name] for measures in of_run] for of_run in scored]
        values[name] = np.mean(by_run, axis=0)
    for first, second in DIFFERENCES:
        for measure in ("right_form", "moved"):
            minuend = f"{measure}_{first}"
            subtrahend = f"{measure}_{second}"
            if subtrahend in values:
                values[f"{minuend}_minus_{second}"] = values[minuend] - values[subtrahend]
    return values


def _is_selected(pair: Pair, group: str, ids: Sequence[str]) -> bool:
    if pair["part"] != "test" or group not in ("all", pair["group"]):
        return False
    return not ids or pair["id"] in ids


def _common_names(scored: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the measures that all pairs have."""
    common = list(scored[0])
    for measures in scored:
        common = [name for name in common if name in measures]
    return common


def median_nats(runs: Sequence[Pairs]) -> dict[str, float]:
    """Compute medians over the test pairs of all runs.

    Args:
        runs: the scored pairs of each run.

    Returns:
        In nats: under `nothing`, by how much one form is likelier than the other; under each other condition, how far
        it moves this difference towards the right form.
    """
    nats = [pair["nats"] for pairs in runs for pair in pairs if pair["part"] == "test"]

    def gaps(condition: str) -> np.ndarray:
        forms = np.array([of_pair[condition] for of_pair in nats])
        return forms @ [1, -1]

    differences = {"nothing": gaps("nothing")}
    for condition in ("context", "answer", "word"):
        if_first = gaps(f"{condition}:0")
        if_second = gaps(f"{condition}:1")
        differences[condition] = (if_first - if_second) / 2
    medians = {}
    for condition, nats_P in differences.items():
        medians[condition] = float(np.median(abs(nats_P)))
    return medians


def gains(pair: Pair) -> tuple[float, float, float]:
    """Compute the gains of a pair's question.

    Args:
        pair: a scored pair.

    Returns:
        In bits: the predicted gain of the question, the gain of its right answer, and the entropy of the forms without
        a question.
    """
    nats = [pair["nats"][condition] for condition in ("answer:0", "answer:1", "nothing")]
    given = distributions_from_log_likelihoods(nats)
    without_question = given[2]
    right = pair["right"]
    predicted = information_gain((0.5, 0.5), given[:2])
    brought = np.log2(given[right, right] / without_question[right])
    entropy = -np.sum(without_question * np.log2(without_question))
    return predicted, float(brought), float(entropy)


class _Thresholds(NamedTuple):
    """The thresholds of asking with the best F1 on dev texts, in bits."""

    predicted: float
    entropy: float


def calibration(runs: Sequence[Pairs]) -> dict[str, Metric]:
    """Compute rank correlations and decisions to ask on the test texts.

    The thresholds of a run have the best F1 on its dev texts. An answer was needed if it brought more than `NEEDED`.

    Args:
        runs: the scored pairs of each run.

    Returns:
        Means over the runs with bootstrap intervals over the pairs.
    """
    tests = [_gains_table(pairs, is_dev=False) for pairs in runs]
    thresholds = [_best_thresholds(_gains_table(pairs, is_dev=True)) for pairs in runs]
    parts = [pair["part"] for pair in runs[0]]
    clear = np.array([part == "clear" for part in parts if "dev" not in part])

    def statistics(rows: np.ndarray) -> dict[str, float]:
        of_runs = []
        for table, limits in zip(tests, thresholds, strict=True):
            of_runs.append(_statistics(table[rows], clear[rows], limits))
        means = {}
        for name in of_runs[0]:
            means[name] = float(np.mean([of_run[name] for of_run in of_runs]))
        return means

    count = len(clear)
    measured = statistics(np.arange(count))
    random = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        rows = random.integers(count, size=count)
        resampled.append(statistics(rows))
    metrics: dict[str, Metric] = {}
    for name, value in measured.items():
        samples = [sample[name] for sample in resampled]
        metrics[name] = percentile_interval(value, samples)
    metrics["threshold_bits"] = float(np.mean([limits.predicted for limits in thresholds]))
    return metrics


def _gains_table(pairs: Pairs, *, is_dev: bool) -> np.ndarray:
    """Return the gains of the dev or of the test texts, (P, 3)."""
    kept = [pair for pair in pairs if ("dev" in pair["part"]) == is_dev]
    rows = [gains(pair) for pair in kept]
    return np.array(rows)


def _best_thresholds(table: np.ndarray) -> _Thresholds:
    predicted, brought, entropy = table.T
    needed = brought > NEEDED
    return _Thresholds(
        predicted=_best_threshold(predicted, needed),
        entropy=_best_threshold(entropy, needed),
    )


def _best_threshold(predicted: np.ndarray, needed: np.ndarray) -> float:
    def f1(limit: float) -> float:
        return _f1(predicted > limit, needed)

    return max([-1.0, *predicted.tolist()], key=f1)


def _f1(ask: np.ndarray, needed: np.ndarray) -> float:
    """Return F1 in percent; 0 if nothing is asked and nothing needed."""
    hits = (ask & needed).sum()
    total = ask.sum() + needed.sum()
    return float(200 * hits / max(1, total))


def _rank(predicted: np.ndarray, brought: np.ndarray) -> float:
    """Return Spearman's rank correlation; 0 if one of the variables is constant."""
    for values in (predicted, brought):
        if len(np.unique(values)) < 2:
            return 0.0
    result: Any = spearmanr(predicted, brought)
    return float(result.statistic)


def _statistics(table: np.ndarray, clear: np.ndarray, limits: _Thresholds) -> dict[str, float]:
    """Compute rank correlations, decisions in percent, and gains in bits, (P, 3) and (P,)."""
    predicted, brought, entropy = table.T
    needed = brought > NEEDED
    ask = predicted > limits.predicted
    hits = 100 * (ask & needed).sum()
    f1 = _f1(ask, needed)
    f1_always = _f1(np.ones_like(needed), needed)
    f1_entropy = _f1(entropy > limits.entropy, needed)
    values = {
        "precision": hits / max(1, ask.sum()),
        "recall": hits / max(1, needed.sum()),
        "f1": f1,
        "f1_always": f1_always,
        "f1_minus_always": f1 - f1_always,
        "f1_entropy": f1_entropy,
        "f1_minus_entropy": f1 - f1_entropy,
        "rank_entropy": _rank(entropy, brought),
    }
    parts = {"all": np.ones_like(clear), "ambiguous": ~clear, "clear": clear}
    for name, kept in parts.items():
        of_part = {
            "rank": _rank(predicted[kept], brought[kept]),
            "asked": 100 * ask[kept].mean(),
            "needed": 100 * needed[kept].mean(),
            "predicted_bits": predicted[kept].mean(),
            "brought_bits": brought[kept].mean(),
        }
        for measure, value in of_part.items():
            values[f"{measure}_{name}"] = value
    return values


def reliability(models: Mapping[str, Sequence[Pairs]]) -> Figure:
    """Plot the gain of answers against the predicted gain: means of five bins with equally many texts.

    Args:
        models: the scored pairs of each run, by the name of the model.
    """
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(models))
    for axes, (name, runs) in zip(all_axes, models.items(), strict=True):
        _plot_bins(axes, runs, "test", PALETTE[0], label="ambiguous")
        _plot_bins(axes, runs, "clear", PALETTE[1], label="clear")
        axes.set(title=name, xlabel="predicted gain, bits", ylabel="brought by the answer, bits", xscale="log")
    all_axes[-1].legend(frameon=False)
    return figure


def _plot_bins(axes: Axes, runs: Sequence[Pairs], part: str, color: str, *, label: str) -> None:
    """Plot the mean and its interval of each bin of the texts of a part."""
    rows = []
    for pairs in runs:
        for pair in pairs:
            if pair["part"] == part:
                predicted, brought, _ = gains(pair)
                rows.append((predicted, brought))
    table = np.array(sorted(rows))
    centres = []
    intervals = []
    for texts in np.array_split(table, BINS):
        if len(texts):
            predicted_P, brought_P = texts.T
            centres.append(predicted_P.mean())
            intervals.append(bootstrap(brought_P.tolist()))
    means = [interval.mean for interval in intervals]
    lows = [interval.low for interval in intervals]
    highs = [interval.high for interval in intervals]
    axes.plot(centres, means, "o-", color=color, label=label)
    axes.vlines(centres, lows, highs, color=color)
