"""Values and tables from `results.json` files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from docs.generate.markdown import table
from graftlm.evaluation.intervals import combine_seeds

ROOT = Path(__file__).parents[2]


@cache
def load_results(folder: Path) -> Mapping[str, Any]:
    """Return the `results.json` of a folder."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def value_at(results: Mapping[str, Any], path: str) -> Any:
    """Return a value of the results.

    Args:
        results: The content of a `results.json`.
        path: Keys separated by slashes. `rows/ID/METRIC` is a metric of a row, and `minus/ID/OTHER/METRIC` the
            difference of two rows, paired over seeds; any other path starts at the top. The key of an item of a list
            is its name.

    Raises:
        KeyError: There is no such value.
    """
    keys = path.split("/")
    if keys[0] == "minus":
        row, other, metric = keys[1:]
        return difference_over_seeds(results, row, other, metric)
    value: Any = results
    if keys[0] == "rows":
        value = {row["id"]: row["metrics"] for row in results["rows"]}
        keys = keys[1:]
    for key in keys:
        if isinstance(value, list):
            value = {item["name"]: item for item in value}
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(f"{path}: there is no {key!r}")
        value = value[key]
    return value


def difference_over_seeds(results: Mapping[str, Any], row: str, other: str, metric: str) -> Mapping[str, float]:
    """Return the difference of two rows, paired over seeds, with Student's 95% interval.

    Args:
        results: The content of a `results.json` with `details.by_seed`.
        row: The row whose metric comes first.
        other: The row that is subtracted.
        metric: The metric of both rows.

    Raises:
        ValueError: The rows have different numbers of seeds.
    """
    by_seed = results["details"]["by_seed"]
    first = _values_by_seed(by_seed[row], metric)
    second = _values_by_seed(by_seed[other], metric)
    differences = [value - subtracted for value, subtracted in zip(first, second, strict=True)]
    interval = combine_seeds(differences)
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _values_by_seed(runs: Any, metric: str) -> list[float]:
    """Return a metric of the runs of a row, which are a list or a mapping, in the order of their seeds."""
    in_order = runs.values() if isinstance(runs, Mapping) else runs
    return [run[metric] for run in in_order]


def show(value: Any, spec: str) -> str:
    """Return a number, or the mean of an estimate, in a format.

    Args:
        value: A number, or a mapping with `mean`, `low` and `high`.
        spec: A format of Python, such as `.3f`. A final `i` adds the interval: `.3fi`. A final `p` clips the interval
            of a percentage to 0 and 100: `.1fip`.
    """
    is_percentage = spec.endswith("p")
    with_interval = spec.removesuffix("p").endswith("i")
    number_spec = spec.removesuffix("p").removesuffix("i")
    if not isinstance(value, Mapping):
        return _number(value, number_spec)
    shown = _number(value["mean"], number_spec)
    if with_interval:
        low = max(value["low"], 0.0) if is_percentage else value["low"]
        high = min(value["high"], 100.0) if is_percentage else value["high"]
        shown = f"{shown} [{_number(low, number_spec)}, {_number(high, number_spec)}]"
    return shown


def _number(value: float, spec: str) -> str:
    """Return a formatted number, without the sign of a zero."""
    shown = format(value, spec)
    if float(shown.replace(",", "")) == 0:
        return shown.removeprefix("-")
    return shown


def results(arguments: str, page: Path) -> str:
    """Return rows and metrics of the `results.json` of an experiment or a benchmark.

    Args:
        arguments: Folder of the results, then names of metrics, each with an optional format after a colon, such as
            `experiments/self_replay learned:.3fi own_kl:.3fi`. After the word `rows` follow the ids of the rows;
            without it all rows with one of the metrics are shown.
        page: The page that shows the table.
    """
    folder, _, selection = arguments.partition(" ")
    metrics_part, _, rows_part = selection.partition(" rows ")
    columns = []
    for column in metrics_part.split():
        name, _, spec = column.partition(":")
        columns.append((name, spec or ".3fi"))
    ids = rows_part.split()
    rows = []
    for row in load_results(ROOT / folder)["rows"]:
        metrics = row["metrics"]
        has_value = any(name in metrics for name, _ in columns)
        if has_value and (not ids or row["id"] in ids):
            cells = [_cell(metrics, name, spec) for name, spec in columns]
            rows.append([row["label"], *cells])
    names = [name for name, _ in columns]
    return table(["row", *names], rows)


def comparisons(folder: str, page: Path) -> str:
    """Return the declared comparisons in `details.comparisons` of the results in a folder."""
    rows = []
    for entry in load_results(ROOT / folder)["details"]["comparisons"]:
        comparison = entry["comparison"]
        metric, row, rival = comparison["metric"], comparison["row"], comparison["rival"]
        cells = [
            f"`{metric}`: `{row}` less `{rival}`",
            "" if comparison["margin"] is None else f"{comparison['margin']:g}",
            show(entry["difference"], ".2fi"),
            f"{entry['p']:.3f}",
            f"{entry['corrected']:.3f}",
            entry["verdict"],
        ]
        rows.append(cells)
    return table(["comparison", "equivalence within", "difference", "p", "p by Holm", "verdict"], rows)


def _cell(metrics: Mapping[str, Any], name: str, spec: str) -> str:
    return show(metrics[name], spec) if name in metrics else ""
