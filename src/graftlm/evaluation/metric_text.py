"""Metrics as text: titles and values with their units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from graftlm.evaluation.results import Interval, Metric, Results, Row, value_of

ABSENT = "–"
LEARNING_METRICS = {"old", "new", "learned", "forgotten", "old_bpb", "new_bpb"}
_DIFFERENCES = ("learned", "forgotten")
_SIGNED = (*_DIFFERENCES, "learned_", "lost_")
SPEEDS = {"train_tokens_per_s", "decode_old_tokens_per_s", "decode_new_tokens_per_s"}
_SIZES = {"trainable_parameters", "total_parameters", "peak_memory_bytes"}
_BUDGET = {"train_tokens", "train_seconds"}
USUAL_METRICS = LEARNING_METRICS | SPEEDS | _SIZES | _BUDGET
"""The metrics of the main table; others get tables of further metrics."""

_COUNT_UNITS = {"B": 1e9, "M": 1e6, "k": 1e3}
_BYTE_UNITS = {" GiB": 2**30, " MiB": 2**20, " KiB": 2**10}


def metric_names(results: Results) -> list[str]:
    """Return the names of the metrics of all rows, each once, beginning with those of the row that has most."""
    rows = sorted(results.rows, key=lambda row: len(row.metrics), reverse=True)
    return _distinct_metrics(rows)


def present_metrics(results: Results) -> list[str]:
    """Return the names of the metrics of all rows, each once, in the order of the rows."""
    return _distinct_metrics(results.rows)


def _distinct_metrics(rows: Iterable[Row]) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row.metrics))
    return list(names)


def metric_title(name: str, names: Collection[str] = ()) -> str:
    """Return a metric's title with its unit.

    Args:
        name: the metric's name in `results.json`.
        names: the names of all metrics. A test set's loss, such as `new`, is in nats per token if they include its
            bits per byte, `new_bpb`.
    """
    if name.endswith("_bpb"):
        return f"{name.removesuffix('_bpb')}, bits per byte"
    if name.endswith("_kl"):
        return f"{name.removesuffix('_kl')} KL, nats per token"
    text_set = name.removesuffix("_lost")
    in_nats = name.startswith(_SIGNED) or f"{text_set}_bpb" in names
    title = name if f"{name}_bpb" in names else name.replace("_", " ")
    return f"{title}, nats per token" if in_nats else title


def format_metric(name: str, metric: Metric | None) -> str:
    """Return a metric with the unit that its name implies, and with its interval if it has one.

    Args:
        name: the metric's name in `results.json`, which implies its unit.
        metric: its value; None for a metric that was not measured, which becomes a dash.
    """
    if not isinstance(metric, Interval) or metric.low == metric.high:
        return format_mean(name, metric)
    mean = format_value(name, metric.mean)
    low = format_value(name, metric.low)
    high = format_value(name, metric.high)
    return f"{mean} [{low}, {high}]"


def format_mean(name: str, metric: Metric | None) -> str:
    """Return a metric with its unit and without its interval; None, for one that was not measured, becomes a dash."""
    if metric is None:
        return ABSENT
    return format_value(name, value_of(metric))


def format_value(name: str, value: float) -> str:
    """Return a value as text with the unit that the metric's name implies, such as GiB for `_bytes`.

    Args:
        name: the metric's name in `results.json`.
        value: a single value of it.
    """
    if name.endswith("parameters") or name == "train_tokens":
        return _with_unit(value, _COUNT_UNITS)
    if name == "train_seconds":
        return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
    if name.endswith("_bytes"):
        return _with_unit(value, _BYTE_UNITS)
    if name.endswith("_per_s"):
        if value >= 10:
            return f"{value:,.0f}"
        return f"{value:.1f}"
    if name.endswith("_without_target"):
        return f"{value:,.0f}"
    is_signed = name.startswith(_SIGNED) or name.endswith(("_gain", "_change"))
    if is_signed:
        return f"{value:+.3f}"
    return f"{value:z.3f}"  # never -0.000


def format_number(value: float | None) -> str:
    """Return a number with four significant digits; None, for one that was not measured, becomes a dash."""
    if value is None:
        return ABSENT
    return f"{value:.4g}"


def _with_unit(value: float, units: Mapping[str, float]) -> str:
    for unit, size in units.items():
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.3g}{unit}"
    return f"{value:.0f}"
