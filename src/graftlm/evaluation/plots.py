"""The figures of a report. Each function returns a new matplotlib `Figure`; global state stays unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
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

# Okabe and Ito's palette, which readers with color blindness can distinguish.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#4D4D4D")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_GREY = "#8A8A8A"
_STYLE_FILE = Path(__file__).with_name("plots.mplstyle")
_MEANS = 40  # running means per curve of training losses
_LOST = {"forgotten": "forgotten", "own_kl": "divergence from the backbone on its own text"}


def learn_against_forget(rows: Sequence[Row]) -> Figure:
    """Draw what rows learned against what they forgot; up and left is better.

    Args:
        rows: each row that has both metrics gets one marker with intervals.
    """
    figure, axes = _figure(
        "Learned against forgotten",
        x_label="forgotten: nats per token lost on the old domain",
        y_label="learned: nats per token gained",
    )
    axes.axvline(0, color=_GREY, linewidth=0.9, zorder=1)
    complete = [row for row in rows if {"learned", "forgotten"} <= row.metrics.keys()]
    for index, row in enumerate(complete):
        forgotten = row.metrics["forgotten"]
        learned = row.metrics["learned"]
        axes.errorbar(
            value_of(forgotten),
            value_of(learned),
            xerr=_errors(forgotten),
            yerr=_errors(learned),
            label=row.label,
            elinewidth=1.3,
            capsize=2.5,
            markersize=8.5,
            markeredgecolor="white",
            markeredgewidth=0.9,
            linestyle="none",
            zorder=4,
            **_style(index),
        )
    axes.margins(0.16, 0.16)
    axes.text(
        0.985,
        0.02,
        "better: up and left",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        color=_GREY,
        fontsize=8.5,
    )
    return _with_legend(figure, axes)


def by_set(rows: Sequence[Row], changes: Sequence[str]) -> Figure:
    """Draw what rows learned and forgot of each named set of texts.

    Args:
        rows: the rows; those without any of the metrics are left out.
        changes: metrics such as `learned_da` and `forgotten_wiki`, from left to right.
    """
    figure, axes = _figure("Learned and forgotten by set", x_label="", y_label="nats per token")
    axes.axhline(0, color=_GREY, linewidth=0.9, zorder=1)
    measured = [row for row in rows if any(change in row.metrics for change in changes)]
    for index, row in enumerate(measured):
        shift = 0.6 * ((index + 0.5) / len(measured) - 0.5)  # so that intervals do not cover each other
        label = row.label
        for place, change in enumerate(changes):
            metric = row.metrics.get(change)
            if metric is None:
                continue
            axes.errorbar(
                place + shift,
                value_of(metric),
                yerr=_errors(metric),
                label=label,
                elinewidth=1.3,
                capsize=2.5,
                markersize=6.5,
                linestyle="none",
                **_style(index),
            )
            label = "_"  # One entry of the legend per row.
    axes.set_xticks(range(len(changes)), [change.replace("_", "\n", 1) for change in changes])
    return _with_legend(figure, axes)


def frontier_curves(paths: Mapping[str, Sequence[Sequence[Sequence[float]]]], name: str) -> Figure:
    """Draw what each method loses while it learns, in nats per token; down and right is better.

    Args:
        paths: by method, for each of its trainings the points (learned, lost) at rising strengths.
        name: what is lost: `forgotten` or `own_kl`.
    """
    figure, axes = _figure(
        "Lost while learning",
        x_label="learned: nats per token",
        y_label=f"{_LOST.get(name, name)}: nats per token",
    )
    axes.axhline(0, color=_GREY, linewidth=0.9, zorder=1)
    for index, (method, trainings) in enumerate(paths.items()):
        for number, points in enumerate(trainings):
            learned, lost = np.transpose(points)
            label = "_" if number else method  # One entry of the legend per method.
            axes.plot(learned, lost, label=label, markersize=6, linewidth=1.4, **_style(index))
    return _with_legend(figure, axes)


def open_share(shares: Mapping[str, Sequence[float]], *, title: str = "Open gates") -> Figure:
    """Draw the share of tokens with an open gate in each layer.

    Args:
        shares: by domain, one share per layer.
        title: heading of the figure.
    """
    figure, axes = _figure(title, x_label="layer", y_label="share of tokens with an open gate")
    for index, (domain, values) in enumerate(shares.items()):
        label = f"{domain} (mean {np.mean(values):.0%})" if len(values) else domain
        _line(axes, index, range(len(values)), values, label)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _with_legend(figure, axes)


def spectrum(spectra: Mapping[str, Any], *, title: str = "Singular values of the gating matrices") -> Figure:
    """Draw singular values over the largest, against their rank as a share of all.

    Args:
        spectra: by name, such as graft or backbone, the values of one matrix or of one matrix per layer. Layers are
            thin lines, their mean is a thick line.
        title: heading of the figure.
    """
    figure, axes = _figure(
        title,
        x_label="rank, as a share of all singular values",
        y_label="singular value / largest",
    )
    grid = np.linspace(0, 1, 200)
    for index, (name, values) in enumerate(spectra.items()):
        color = PALETTE[index % len(PALETTE)]
        is_nested = len(values) > 0 and isinstance(values[0], Sequence | np.ndarray)
        layers = values if is_nested else [values]
        curves = [_spectrum_curve(layer, grid) for layer in layers if len(layer)]
        if len(curves) > 1:
            axes.plot(grid, np.transpose(curves), color=color, linewidth=0.7, alpha=0.35)
        if curves:
            axes.plot(grid, np.mean(curves, axis=0), color=color, linewidth=2.2, label=name)
    axes.set_ylim(-0.02, 1.04)
    axes.set_xlim(-0.015, 1.015)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return _with_legend(figure, axes)


def _spectrum_curve(values: Sequence[float], grid: np.ndarray) -> np.ndarray:
    """Return singular values over the largest at shares of the rank."""
    descending = np.sort(np.asarray(values, dtype=np.float64))[::-1]
    if descending[0] > 0:
        descending = descending / descending[0]
    ranks = np.linspace(0, 1, len(descending))
    return np.interp(grid, ranks, descending)


def loss_curves(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Draw training losses with their running means.

    Args:
        curves: by label, (step, loss) pairs.
    """
    figure, axes = _figure("Training loss", x_label="step", y_label="loss, nats per token")
    for index, (name, pairs) in enumerate(curves.items()):
        if not len(pairs):
            continue
        color = PALETTE[index % len(PALETTE)]
        steps, losses = np.asarray(pairs, dtype=np.float64)[:, :2].T
        if len(losses) >= _MEANS:
            axes.plot(steps, losses, color=color, linewidth=0.7, alpha=0.25)
        axes.plot(steps, _running_mean(losses), color=color, linewidth=1.9, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _with_legend(figure, axes)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it, over a fortieth of all."""
    window = max(1, len(values) // _MEANS)
    counts = np.minimum(np.arange(1, len(values) + 1), window)
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return sums / counts


def by_length(
    curves: Mapping[str, Sequence[tuple[int, Metric]]], *, trained: int | None = None, title: str = "Length"
) -> Figure:
    """Draw bits per byte against the length of the window in tokens.

    Args:
        curves: by label, (length, bits per byte) pairs.
        trained: the length in tokens with which the models were trained, which a dotted line marks; None for no line.
        title: heading of the figure.
    """
    figure, axes = _figure(title, x_label="tokens of a window", y_label="bits per byte")
    for index, (name, points) in enumerate(curves.items()):
        lengths = [length for length, _ in points]
        values = [value_of(value) for _, value in points]
        _line(axes, index, lengths, values, name)
    if trained is not None:
        axes.axvline(trained, color=_GREY, linewidth=1.2, linestyle=":", zorder=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(_whole_number))
    return _with_legend(figure, axes)


def _whole_number(value: float, _: int | None) -> str:
    return f"{value:,.0f}"


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG at 150 dots per inch.

    Args:
        figure: a figure of this module, or any other of matplotlib.
        path: the file to write; missing folders are created.

    Returns:
        The path.

    Raises:
        EvaluationError: the path can't be written to.
    """
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150, facecolor="white")
    return write_atomically(Path(path), picture.getvalue())


def _figure(title: str, *, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    with _report_style():
        figure = Figure()
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure, axes


def _report_style() -> AbstractContextManager[None]:
    return rc_context(fname=_STYLE_FILE)


def _style(index: int) -> dict[str, Any]:
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}


def _line(axes: Axes, index: int, xs: Sequence[float], ys: Sequence[float], label: str) -> None:
    axes.plot(xs, ys, label=label, markersize=6, linewidth=1.8, **_style(index))


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        with _report_style():
            axes.legend()
    return figure


def _errors(metric: Metric) -> list[list[float]] | None:
    """Return the distances from a mean to the ends of its interval, in the form of matplotlib's `errorbar`."""
    if not isinstance(metric, Interval):
        return None
    below = max(0.0, metric.mean - metric.low)
    above = max(0.0, metric.high - metric.mean)
    return [[below], [above]]
