"""Measurements, grafts, adapters and methods as terminal tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graftlm.evaluation.metric_text import ABSENT, format_metric, metric_title
from graftlm.evaluation.results import Metric
from graftlm.evaluation.terminal_tables import print_columns
from graftlm.files.model_files import named_model
from graftlm.generation.adapters import AdapterInspection
from graftlm.generation.inspect import Inspection, TensorGroup
from graftlm.generation.methods import Method

_PIPE_WIDTH = 100
_MAX_ITEMS = 6  # of a list


class _LayerColumn(NamedTuple):
    """A quantity with one value per layer or other place, or with a single value for the whole graft."""

    head: str
    values: Sequence[float]

    def cell(self, layer: int) -> str:
        if layer >= len(self.values):
            return ABSENT
        return f"{self.values[layer]:.3g}"


def stdout_console() -> Console:
    """Return a console for stdout, with the width of the terminal, or of 100 columns for files and pipes."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, width=width)


def print_inspection(inspection: Inspection) -> None:
    """Print the summary, metrics, tensors and layers of a graft."""
    console = stdout_console()
    _print_pairs(_summary(inspection), console)
    if inspection.measured:
        _print_metrics(inspection.measured, console)
    _print_tensors(inspection.tensors, console)
    _print_layers(inspection.layers, inspection.place, console)


def print_adapter(adapter: AdapterInspection) -> None:
    """Print the contents of a PEFT adapter, the recipes that can use it, and the code that merges it."""
    console = stdout_console()
    _print_pairs(_adapter_summary(adapter), console)
    _print_tensors(adapter.tensors, console)


def print_methods(methods: Sequence[Method]) -> None:
    """Print the kinds of grafts with their summaries and config keys."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column("kind", overflow="fold", no_wrap=True)
    for head in ("label", "summary", "presets", "keys and defaults"):
        table.add_column(head, overflow="fold")
    for method in methods:
        keys = _format_pairs(method.config, show_unset=True)
        table.add_row(method.kind, method.label, method.summary, ", ".join(method.presets), keys)
    stdout_console().print(table, highlight=False, markup=False)


def _summary(inspection: Inspection) -> Iterator[tuple[str, str]]:
    yield "graft", f"{inspection.folder}, written by graftlm {inspection.library}"
    yield "kind", f"{inspection.kind} ({inspection.label})"
    config = {key: value for key, value in inspection.config.items() if key != "kind"}
    if config:
        yield "config", _format_pairs(config)
    backbone = inspection.backbone
    yield "backbone", f"{backbone['name']} ({backbone['model_type']}), fingerprint {backbone['fingerprint']}"
    yield "parameters", f"{inspection.parameters:,}"
    plain = {}
    sections = {}
    for key, value in inspection.training.items():
        if isinstance(value, dict):
            sections[key] = value
        else:
            plain[key] = value
    if plain:
        yield "trained", _format_pairs(plain)
    for key, section in sections.items():
        yield key, _format_pairs(section)
    if inspection.described:
        yield "details", _format_pairs(inspection.described)


def _adapter_summary(adapter: AdapterInspection) -> Iterator[tuple[str, str]]:
    config = {"rank": adapter.rank, "alpha": adapter.alpha, "targets": adapter.targets}
    yield "folder", f"{adapter.folder}, {adapter.method}"
    yield "model", adapter.base or "not named"
    yield "config", _format_pairs(config)
    yield "size", f"{adapter.parameters:,} parameters, {adapter.size / 1e6:,.1f} MB"
    for kind, section in adapter.sections.items():
        yield kind, f"graft: {json.dumps(section)}"
        if kind in adapter.hints:
            yield "", adapter.hints[kind]
    for kind, reason in adapter.refusals.items():
        yield kind, f"does not accept it. {reason}"
    if adapter.mergeable:
        merge = f"PeftModel.from_pretrained(model, {adapter.folder!r}).merge_and_unload()"
        yield "merge", "; ".join([*adapter.preparation, merge])
    else:
        yield "merge", "PEFT can't"
    base = named_model(adapter.base or "BASE")
    yield "audit", f"graft audit {base} {adapter.folder}"


def _print_pairs(rows: Iterable[tuple[str, str]], console: Console) -> None:
    grid = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for head, text in rows:
        grid.add_row(head, escape(text))
    console.print(grid, highlight=False)


def _print_metrics(measured: Mapping[str, Metric], console: Console) -> None:
    lines = []
    for name, value in measured.items():
        title = metric_title(name, measured)
        lines.append([title, format_metric(name, value)])
    print_columns(["measured", ""], lines, console, gap=True)


def _print_tensors(groups: Iterable[TensorGroup], console: Console) -> None:
    lines = []
    for group in groups:
        shape = " × ".join(str(size) for size in group.shape)
        lines.append([group.name, str(group.count), shape, f"{group.parameters:,}", _rank_cell(group)])
    heads = ["tensors", "count", "shape", "parameters", "effective rank"]
    print_columns(heads, lines, console, gap=True)


def _rank_cell(group: TensorGroup) -> str:
    """Return the range of effective ranks, unless the tensors have no rank or only rank 1."""
    ranks = group.effective_rank
    largest = min(group.shape, default=0)
    if not ranks or largest <= 1:
        return ABSENT
    return f"{min(ranks):.1f} to {max(ranks):.1f} of {largest}"


def _print_layers(layers: Mapping[str, Mapping[str, Sequence[float]]], place: str, console: Console) -> None:
    """Print the values of the whole graft as pairs, and those of its layers as tables that fit the width."""
    whole = []
    by_layer = []
    for quantity, by_name in layers.items():
        title = quantity.replace("_", " ")
        for name, values in by_name.items():
            column = _LayerColumn(f"{title}, {name}", values)
            if len(values) == 1:
                whole.append(column)
            else:
                by_layer.append(column)
    _print_pairs([(column.head, column.cell(0)) for column in whole], console)
    for columns in _fit_columns(by_layer, console.width):
        heads = [column.head for column in columns]
        lines = []
        for layer in range(max(len(column.values) for column in columns)):
            cells = [column.cell(layer) for column in columns]
            lines.append([str(layer), *cells])
        print_columns([place, *heads], lines, console, gap=True)


def _fit_columns(columns: Sequence[_LayerColumn], width: int) -> Iterator[list[_LayerColumn]]:
    """Yield groups of columns whose heads fit next to each other."""
    group: list[_LayerColumn] = []
    used = len("layer ")
    for column in columns:
        column_width = len(column.head) + 2
        if group and used + column_width > width:
            yield group
            group = []
            used = len("layer ")
        group.append(column)
        used += column_width
    if group:
        yield group


def _format_pairs(values: Mapping[str, object], *, show_unset: bool = False) -> str:
    """Return keys with their values as text.

    Args:
        values: the values; None marks a key without a value.
        show_unset: also list the keys without a value.
    """
    parts = []
    for key, value in values.items():
        if value is not None:
            parts.append(f"{key} {_format_value(value)}")
        elif show_unset:
            parts.append(key)
    return ", ".join(parts)


def _format_value(value: object) -> str:
    """Return a value as text. A list of more than six items is shortened to the first six and the length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return f"{{{_format_pairs(value)}}}"
    if isinstance(value, list):
        shown = ", ".join(_format_value(item) for item in value[:_MAX_ITEMS])
        if len(value) > _MAX_ITEMS:
            shown += f", … {len(value)} in all"
        return f"[{shown}]"
    return str(value)
