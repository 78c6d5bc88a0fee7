"""Accuracy by row, as bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from graftlm.evaluation import Interval, Row, value_of
from graftlm.evaluation.plots import PALETTE

SHOWN = {
    "subs_held_out": "values of keys held out",
    "num_math": "sums of numbers",
    "kv_math_held_in": "sums of keys held in, scratchpad",
    "kv_math_held_out": "sums of keys held out, scratchpad",
    "kv_math_direct_held_out": "sums of keys held out, direct",
}


def accuracy(rows: Sequence[Row]) -> Figure:
    """A group of bars for each row, a bar for each metric; the lines on them are intervals over seeds."""
    figure = Figure(figsize=(9.2, 4.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(SHOWN)
    positions = np.arange(len(rows))
    for index, (metric, label) in enumerate(SHOWN.items()):
        means = [value_of(row.metrics[metric]) for row in rows]
        at = positions + (index - (len(SHOWN) - 1) / 2) * width
        axes.bar(at, means, width * 0.92, color=PALETTE[index], label=label, zorder=2)
        axes.errorbar(at, means, yerr=_reach(rows, metric), fmt="none", ecolor="#222222", elinewidth=1, zorder=3)
    axes.set_xticks(positions, [row.label for row in rows])
    axes.set_ylim(0, 105)
    axes.set_ylabel("right answers, %")
    axes.set_title("Key-value arithmetic", loc="left", fontweight="bold")
    axes.grid(visible=True, axis="y", color="#E6E6E6", zorder=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _reach(rows: Sequence[Row], metric: str) -> list[list[float]]:
    """How far the intervals reach below and above the means, within 0 and 100."""
    metrics = [row.metrics[metric] for row in rows]
    pairs = [
        (metric_value.mean, metric_value.low, metric_value.high)
        if isinstance(metric_value, Interval)
        else (value_of(metric_value),) * 3
        for metric_value in metrics
    ]
    return [
        [mean - max(0.0, low) for mean, low, _ in pairs],
        [min(100.0, high) - mean for mean, _, high in pairs],
    ]
