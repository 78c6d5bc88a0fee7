"""Graft folders, measurements and methods as tables of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from graftlm.evaluation import Results
from graftlm.evaluation.tables import format_metric
from graftlm.generation.inspect import Inspection, Method, TensorGroup

_ABSENT = "–"
_LISTED = 6  # of a list that are shown


def print_side_by_side(results: Results, console: Console | None = None) -> None:
    """One line a metric, one column a method: for few methods and many texts."""
    names = dict.fromkeys(chain.from_iterable(row.metrics for row in results.rows))
    lines = [
        [_title(name, names), *(format_metric(name, row.metrics.get(name)) for row in results.rows)] for name in names
    ]
    _print(["", *(row.label for row in results.rows)], lines, console)


def print_inspection(found: Inspection, console: Console | None = None) -> None:
    """What a graft is, what it measured, its tensors and its layers."""
    console = console or Console()
    grid = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for head, text in _summary(found):
        grid.add_row(head, text)
    console.print(grid, highlight=False)
    if found.measured:
        lines = [[_title(name, found.measured), format_metric(name, value)] for name, value in found.measured.items()]
        _print(["measured", ""], lines, console, title=True)
    _print(
        ["tensors", "count", "shape", "parameters", "effective rank"], map(_tensors, found.tensors), console, title=True
    )
    columns = [
        (f"{key.replace('_', ' ')}, {whose}", values)
        for key, by in found.layers.items()
        for whose, values in by.items()
    ]
    for fitting in _abreast(columns, console.width):
        count = max(len(values) for _, values in fitting)
        lines = [[str(layer), *(_at(values, layer) for _, values in fitting)] for layer in range(count)]
        _print(["layer", *(head for head, _ in fitting)], lines, console, title=True)


def _abreast(columns: Sequence[tuple[str, Sequence[float]]], width: int) -> Iterator[list[tuple[str, Sequence[float]]]]:
    """The columns in groups whose heads fit beside each other."""
    group: list[tuple[str, Sequence[float]]] = []
    used = first = len("layer ")
    for head, values in columns:
        if group and used + len(head) + 2 > width:
            yield group
            group, used = [], first
        group.append((head, values))
        used += len(head) + 2
    if group:
        yield group


def print_methods(methods: Sequence[Method], console: Console | None = None) -> None:
    """The kinds of graft, what they are, and the keys of their configs."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for head in ("kind", "called", "what it is", "keys and defaults"):
        table.add_column(head, overflow="fold", no_wrap=head == "kind")
    for method in methods:
        table.add_row(method.kind, method.label, method.summary, _pairs(method.config, unset=True))
    (console or Console()).print(table, highlight=False, markup=False)


def _summary(found: Inspection) -> Iterable[tuple[str, str]]:
    yield "graft", f"{found.folder}, written by graftlm {found.library}"
    yield "kind", f"{found.kind} ({found.label})"
    if len(found.config) > 1:
        yield "config", _pairs({key: value for key, value in found.config.items() if key != "kind"})
    yield "backbone", "{name} ({model_type}), fingerprint {fingerprint}".format(**found.backbone)
    yield "parameters", f"{found.parameters:,}"
    plain = {key: value for key, value in found.training.items() if not isinstance(value, dict)}
    if plain:
        yield "trained", _pairs(plain)
    for key, value in found.training.items():
        if isinstance(value, dict):
            yield key, _pairs(value)
    if found.described:
        yield "shows", _pairs(found.described)


def _pairs(values: dict[str, Any], *, unset: bool = False) -> str:
    """Keys with their values; with `unset` also those that have none."""
    shown = [
        key if value is None else f"{key} {_plain(value)}"
        for key, value in values.items()
        if unset or value is not None
    ]
    return ", ".join(shown)


def _plain(value: Any) -> str:
    """A value in words; of a long list its beginning and its length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{_pairs(value)}}}"
    if isinstance(value, list):
        first = ", ".join(_plain(one) for one in value[:_LISTED])
        return f"[{first}, … {len(value)} in all]" if len(value) > _LISTED else f"[{first}]"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _tensors(group: TensorGroup) -> list[str]:
    ranks = group.effective_rank
    spread = (
        f"{min(ranks):.1f} to {max(ranks):.1f} of {min(group.shape)}" if ranks and min(group.shape) > 1 else _ABSENT
    )
    shape = " × ".join(map(str, group.shape))
    return [group.name, str(group.count), shape, f"{group.parameters:,}", spread]


def _at(values: Sequence[float], index: int) -> str:
    return f"{values[index]:.3g}" if index < len(values) else _ABSENT


def _title(name: str, names: Iterable[str]) -> str:
    if name.endswith("_bpb"):
        return f"{name.removesuffix('_bpb')}, bits per byte"
    nats = name in ("learned", "forgotten") or f"{name}_bpb" in names
    return f"{name}, nats per token" if nats else name.replace("_", " ")


def _print(
    head: Sequence[str], lines: Iterable[Sequence[str]], console: Console | None, *, title: bool = False
) -> None:
    """A table with numbers to the right; with `title` an empty line before it."""
    console = console or Console()
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    if title:
        console.print()
    console.print(table, highlight=False, markup=False)
