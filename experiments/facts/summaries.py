"""Metrics over seeds with their intervals, aims, and the plot of what was learned against what was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from experiments.facts.metrics import Items, shares
from experiments.facts.rows import AIMS, MAX_SECONDS, MAX_SPILL
from experiments.protocol import RateSearch, as_table, crossed_bootstrap
from experiments.study import aim
from graftlm.evaluation import Aim, Metric, Row, value_of
from graftlm.evaluation.intervals import percentile_interval, share_interval
from graftlm.evaluation.plots import PALETTE


def search_score(items: Items, searched_by: Literal["both", "learned"] = "both") -> float:
    """Return what a search maximizes.

    `learned`: facts right. `both`: facts right and near answers kept, less the answers that name a taught thing.
    """
    values = shares(items)
    if searched_by == "learned":
        return values["generalization"]
    return values["generalization"] + values.get("locality_near", 0.0) - values["spill"]


def over_seeds(tables: Sequence[Items]) -> dict[str, Metric]:
    """Return the mean of each metric with its 95% interval.

    The interval is that of a crossed bootstrap over seeds and items. A bootstrap of equal values has no width: a share
    of 0 or 1 gets Wilson's interval, for the number of different items.
    """
    metrics: dict[str, Metric] = {}
    for name in tables[0]:
        array = as_table([table[name] for table in tables if name in table])
        mean = float(np.nanmean(array))
        if mean in (0.0, 1.0):
            items = array.shape[1]
            metrics[name] = share_interval(int(mean) * items, items)
        else:
            samples = crossed_bootstrap(array, resamples=2000)
            metrics[name] = percentile_interval(mean, samples)
    return metrics


def aims_of(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims of the default recipe: with its own rate if that was measured, else with the searched one."""
    by_id = {row.id: row for row in rows}
    for name in ("default", "routed"):
        if name in by_id:
            return _aims_of_row(by_id[name])
    return []


def _aims_of_row(row: Row) -> list[Aim]:
    aims = []
    for name, bound in AIMS.items():
        if name in row.metrics:
            value = value_of(row.metrics[name])
            aims.append(aim(f"{name} of {row.id}", name, bound, value, lambda measured, least: measured >= least))
    for name, bound in (("spill", MAX_SPILL), ("seconds", MAX_SECONDS)):
        if name in row.metrics:
            value = value_of(row.metrics[name])
            aims.append(aim(f"{name} of {row.id}", name, bound, value, lambda measured, most: measured <= most))
    return aims


def plots_of(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return a plot of what was learned against what was kept."""
    shown = [row for row in rows if {"generalization", "locality_near"} <= row.metrics.keys()]
    if not shown:
        return {}
    figure = Figure(figsize=(7, 4 + 0.25 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(shown):
        kept = row.metrics["locality_near"]
        learned = row.metrics["generalization"]
        axes.errorbar(
            value_of(kept),
            value_of(learned),
            xerr=_sides(kept),
            yerr=_sides(learned),
            fmt="o",
            color=PALETTE[number % len(PALETTE)],
            label=row.label,
            capsize=2,
        )
    axes.set_xlabel("near answers kept")
    axes.set_ylabel("facts right in unseen phrasings")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False)
    return {"generalization-against-locality": figure}


def _sides(value: Metric) -> list[list[float]]:
    """Return the lengths of an interval below and above its mean, as matplotlib expects them."""
    if isinstance(value, float | int):
        return [[0.0], [0.0]]
    return [[max(0.0, value.mean - value.low)], [max(0.0, value.high - value.mean)]]


def rounded_scores(searches: Mapping[str, RateSearch]) -> dict[str, dict[str, float]]:
    """Return the scores of each row's rates."""
    scores = {}
    for name, search in searches.items():
        scores[name] = {f"{rate:g}": round(value, 4) for rate, value in search.scores.items()}
    return scores
