"""Markdown that the generators share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; pipes in cells are escaped."""
    rule = ["---"] * len(head)
    lines = [
        _line(head),
        _line(rule),
        *map(_line, rows),
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    joined = "|".join(escaped)
    return f"|{joined}|"
