"""The figures of a report. Each function returns a new matplotlib `Figure`; global state stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from graftlm.evaluation.results import Interval, Metric, Row, value_of
from graftlm.files.writing import write_atomically

# Okabe and Ito's palette, which readers with colour blindness can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#4D4D4D")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_GREY = "#8A8A8A"
_STYLE = partial(rc_context, fname=Path(__file__).with_name("plots.mplstyle"))


def learn_against_forget(rows: Sequence[Row]) -> Figure:
    """One marker with intervals per row that has both metrics; up and left is better."""
    complete = [row for row in rows if {"learned", "forgotten"} <= row.metrics.keys()]
    x_label, y_label = "forgotten: nats per token lost on the old domain", "learned: nats per token gained"
    figure, axes = _figure("Learned against forgotten", x_label, y_label)
    axes.axvline(0, color=_GREY, linewidth=0.9, zorder=1)
    for index, row in enumerate(complete):
        style = _style(index)
        x, y = row.metrics["forgotten"], row.metrics["learned"]
        axes.errorbar(
            value_of(x), value_of(y), xerr=_errors(x), yerr=_errors(y), **style, elinewidth=1.3, capsize=2.5,
            markersize=8.5, markeredgecolor="white", markeredgewidth=0.9, linestyle="none", zorder=4, label=row.label,
        )  # fmt: skip
    axes.margins(0.16, 0.16)
    axes.text(
        0.985, 0.02, "better: up and left", transform=axes.transAxes, ha="right", va="bottom", color=_GREY, fontsize=8.5
    )
    return _with_legend(figure, axes)


def frontier_curves(paths: Mapping[str, Sequence[Sequence[Sequence[float]]]], name: str) -> Figure:
    """What each method loses while it learns, in nats per token, at all that was measured; down and right is better.

    Args:
        paths: by method, for each of its trainings the points (learned, lost) at rising strengths.
        name: what is lost: `forgotten` or `own_kl`.
    """
    lost = {"forgotten": "forgotten", "own_kl": "divergence from the backbone on its own text"}.get(name, name)
    figure, axes = _figure("Lost while learning", "learned: nats per token", f"{lost}: nats per token")
    axes.axhline(0, color=_GREY, linewidth=0.9, zorder=1)
    for index, (method, of_method) in enumerate(paths.items()):
        for number, points in enumerate(of_method):
            label = "_" if number else method
            axes.plot(*zip(*points, strict=True), **_style(index), markersize=6, linewidth=1.4, label=label)
    return _with_legend(figure, axes)


def open_share(shares: Mapping[str, Sequence[float]], *, title: str = "Open gates") -> Figure:
    """The share of tokens with an open gate per layer; `shares` maps a domain to one value per layer."""
    figure, axes = _figure(title, "layer", "share of tokens with an open gate")
    for index, (domain, values) in enumerate(shares.items()):
        name = f"{domain} (mean {np.mean(values):.0%})" if len(values) else domain
        _line(axes, index, range(len(values)), values, name)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _with_legend(figure, axes)


def spectrum(spectra: Mapping[str, Any], *, title: str = "Singular values of the gating matrices") -> Figure:
    """Singular values over the largest, against their rank as a share of all.

    `spectra` maps a name, such as graft or backbone, to the values of one matrix or of one matrix per layer. Layers are
    thin lines, their mean is a thick line.
    """
    figure, axes = _figure(title, "rank, as a share of all singular values", "singular value / largest")
    for index, (name, values) in enumerate(spectra.items()):
        colour, grid = PALETTE[index % len(PALETTE)], np.linspace(0, 1, 200)
        nested = len(values) > 0 and isinstance(values[0], Sequence | np.ndarray)
        layers = [np.sort(np.asarray(layer, dtype=np.float64))[::-1] for layer in (values if nested else [values])]
        curves = [
            np.interp(grid, np.linspace(0, 1, len(layer)), layer / layer[0] if layer[0] > 0 else layer)
            for layer in layers
            if len(layer)
        ]
        if len(curves) > 1:
            axes.plot(grid, np.transpose(curves), color=colour, linewidth=0.7, alpha=0.35)
        if curves:
            axes.plot(grid, np.mean(curves, axis=0), color=colour, linewidth=2.2, label=name)
    axes.set_ylim(-0.02, 1.04)
    axes.set_xlim(-0.015, 1.015)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return _with_legend(figure, axes)


def loss_curves(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Training losses with their running means; `curves` maps a label to (step, loss) pairs."""
    figure, axes = _figure("Training loss", "step", "loss, nats per token")
    for index, (name, pairs) in enumerate(curves.items()):
        colour = PALETTE[index % len(PALETTE)]
        if not len(pairs):
            continue
        steps, losses = np.asarray(pairs, dtype=np.float64)[:, :2].T
        window = max(1, len(losses) // 40)
        counts = np.minimum(np.arange(1, len(losses) + 1), window)
        smooth = np.convolve(losses, np.ones(window))[: len(losses)] / counts
        if len(losses) >= 40:
            axes.plot(steps, losses, color=colour, linewidth=0.7, alpha=0.25)
        axes.plot(steps, smooth, color=colour, linewidth=1.9, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _with_legend(figure, axes)


def by_length(
    curves: Mapping[str, Sequence[tuple[int, Metric]]], *, trained: int | None = None, title: str = "Length"
) -> Figure:
    """Bits per byte against the window's length in tokens; a dotted line marks the trained length."""
    figure, axes = _figure(title, "tokens of a window", "bits per byte")
    for index, (name, points) in enumerate(curves.items()):
        _line(axes, index, [length for length, _ in points], [value_of(value) for _, value in points], name)
    if trained is not None:
        axes.axvline(trained, color=_GREY, linewidth=1.2, linestyle=":", zorder=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return _with_legend(figure, axes)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG at 150 dots per inch; returns its path. Raises EvaluationError if the path can't be written to."""
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150, facecolor="white")
    return write_atomically(Path(path), picture.getvalue())


def _figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    with _STYLE():
        figure = Figure()
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure, axes


def _style(index: int) -> dict[str, Any]:
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}


def _line(axes: Axes, index: int, xs: Sequence[float], ys: Sequence[float], label: str) -> None:
    axes.plot(xs, ys, **_style(index), markersize=6, linewidth=1.8, label=label)


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    if axes.get_legend_handles_labels()[0]:
        with _STYLE():
            axes.legend()
    return figure


def _errors(metric: Metric) -> list[list[float]] | None:
    if not isinstance(metric, Interval):
        return None
    return [[max(0.0, metric.mean - metric.low)], [max(0.0, metric.high - metric.mean)]]
