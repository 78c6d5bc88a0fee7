"""Measurements, grafts and methods as terminal tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graftlm.evaluation.metric_text import ABSENT, format_metric, metric_title
from graftlm.evaluation.terminal_tables import print_columns
from graftlm.files.model_files import named_model
from graftlm.generation.adapters import AdapterInspection
from graftlm.generation.inspect import Inspection, TensorGroup
from graftlm.generation.methods import Method

_MAX_ITEMS = 6  # of a list

Column = tuple[str, Sequence[float]]


def stdout_console() -> Console:
    """The console for results; files and pipes, which have no width, get 100 columns."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)


def print_inspection(inspection: Inspection) -> None:
    """A graft's summary, metrics, tensors and layers."""
    console = stdout_console()
    _print_pairs(_summary(inspection), console)
    if measured := inspection.measured:
        lines = [[metric_title(name, measured), format_metric(name, value)] for name, value in measured.items()]
        print_columns(["measured", ""], lines, console, gap=True)
    _print_tensors(inspection.tensors, console)
    columns = [
        (f"{quantity.replace('_', ' ')}, {name}", values)
        for quantity, by_name in inspection.layers.items()
        for name, values in by_name.items()
    ]
    single = [(head, values) for head, values in columns if len(values) == 1]  # of the whole graft, not of a layer
    _print_pairs(((head, _layer_cell(values, 0)) for head, values in single), console)
    for group in _fit_columns([column for column in columns if column not in single], console.width):
        count = max(len(values) for _, values in group)
        lines = [[str(layer), *(_layer_cell(values, layer) for _, values in group)] for layer in range(count)]
        print_columns(["layer", *(head for head, _ in group)], lines, console, gap=True)


def _print_pairs(rows: Iterable[tuple[str, str]], console: Console) -> None:
    grid = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for head, text in rows:
        grid.add_row(head, escape(text))
    console.print(grid, highlight=False)


def _print_tensors(tensors: Iterable[TensorGroup], console: Console) -> None:
    rows = []
    for group in tensors:
        ranks, largest = group.effective_rank, min(group.shape, default=0)
        rank = f"{min(ranks):.1f} to {max(ranks):.1f} of {largest}" if ranks and largest > 1 else ABSENT
        rows.append([group.name, str(group.count), " × ".join(map(str, group.shape)), f"{group.parameters:,}", rank])
    print_columns(["tensors", "count", "shape", "parameters", "effective rank"], rows, console, gap=True)


def print_adapter(adapter: AdapterInspection) -> None:
    """What is in a PEFT adapter, and how it is used here."""
    console, folder = stdout_console(), adapter.folder
    base = named_model(adapter.base or "BASE")
    values = {"rank": adapter.rank, "alpha": adapter.alpha, "targets": adapter.targets}
    rows = [("folder", f"{folder}, {adapter.method}"), ("model", adapter.base or "not named")]
    size = f"{adapter.parameters:,} parameters, {adapter.size / 1e6:,.1f} MB"
    rows += [("config", _pairs(values)), ("size", size)]
    rows += [(kind, f"graft: {json.dumps(section)}") for kind, section in adapter.sections.items()]
    rows += [(kind, f"does not take it. {reason}") for kind, reason in adapter.refusals.items()]
    merge = f"PeftModel.from_pretrained(model, {folder!r}).merge_and_unload()"
    rows += [("merge", merge if adapter.mergeable else "PEFT can't"), ("audit", f"graft audit {base} {folder}")]
    _print_pairs(rows, console)
    _print_tensors(adapter.tensors, console)


def print_methods(methods: Sequence[Method]) -> None:
    """The kinds of graft with their summaries and config keys."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for head in ("kind", "label", "summary", "keys and defaults"):
        table.add_column(head, overflow="fold", no_wrap=head == "kind")
    for method in methods:
        table.add_row(method.kind, method.label, method.summary, _pairs(method.config, unset=True))
    stdout_console().print(table, highlight=False, markup=False)


def _fit_columns(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Groups of columns whose heads fit side by side."""
    group: list[Column] = []
    for column in columns:
        if group and len("layer ") + sum(len(head) + 2 for head, _ in [*group, column]) > width:
            yield group
            group = []
        group.append(column)
    if group:
        yield group


def _summary(inspection: Inspection) -> Iterator[tuple[str, str]]:
    yield "graft", f"{inspection.folder}, written by graftlm {inspection.library}"
    yield "kind", f"{inspection.kind} ({inspection.label})"
    if len(inspection.config) > 1:
        yield "config", _pairs({key: value for key, value in inspection.config.items() if key != "kind"})
    yield "backbone", "{name} ({model_type}), fingerprint {fingerprint}".format(**inspection.backbone)
    yield "parameters", f"{inspection.parameters:,}"
    nested = {key: value for key, value in inspection.training.items() if isinstance(value, dict)}
    if plain := {key: value for key, value in inspection.training.items() if key not in nested}:
        yield "trained", _pairs(plain)
    yield from ((key, _pairs(value)) for key, value in nested.items())
    if inspection.described:
        yield "details", _pairs(inspection.described)


def _pairs(values: dict[str, Any], *, unset: bool = False) -> str:
    """Keys with their values; with `unset` also the keys without a value."""
    shown = {key: value for key, value in values.items() if unset or value is not None}
    return ", ".join(key if value is None else f"{key} {_plain(value)}" for key, value in shown.items())


def _plain(value: Any) -> str:
    """A value as text; a long list as its beginning and its length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{_pairs(value)}}}"
    if isinstance(value, list):
        first = ", ".join(map(_plain, value[:_MAX_ITEMS]))
        return f"[{first}, … {len(value)} in all]" if len(value) > _MAX_ITEMS else f"[{first}]"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _layer_cell(values: Sequence[float], layer: int) -> str:
    return f"{values[layer]:.3g}" if layer < len(values) else ABSENT
