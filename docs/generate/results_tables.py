"""Values and tables from `results.json` files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from docs.generate.markdown import table

ROOT = Path(__file__).parents[2]


@cache
def load_results(folder: Path) -> Mapping[str, Any]:
    """Return the `results.json` of a folder."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def value_at(results: Mapping[str, Any], path: str) -> Any:
    """Return a value of the results.

    Args:
        results: The content of a `results.json`.
        path: Keys separated by slashes. `rows/ID/METRIC` is a metric of a row; any other path starts at the top.

    Raises:
        KeyError: There is no such value.
    """
    keys = path.split("/")
    value: Any = results
    if keys[0] == "rows":
        value = {row["id"]: row["metrics"] for row in results["rows"]}
        keys = keys[1:]
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(f"{path}: there is no {key!r}")
        value = value[key]
    return value


def show(value: Any, spec: str) -> str:
    """Return a number, or the mean of an estimate; a spec that ends with `i` adds the interval.

    Args:
        value: A number, or a mapping with `mean`, `low` and `high`.
        spec: A format of Python, such as `.3f`, or `.3fi` with the interval.
    """
    number_spec = spec.removesuffix("i")
    if not isinstance(value, Mapping):
        return _number(value, number_spec)
    shown = _number(value["mean"], number_spec)
    if spec.endswith("i"):
        low = _number(value["low"], number_spec)
        high = _number(value["high"], number_spec)
        shown = f"{shown} [{low}, {high}]"
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


def _cell(metrics: Mapping[str, Any], name: str, spec: str) -> str:
    return show(metrics[name], spec) if name in metrics else ""
