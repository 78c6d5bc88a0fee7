"""Markdown that the generators share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; pipes in cells are escaped."""
    lines = [_line(head), f"|{'---|' * len(head)}"]
    lines.extend(_line(row) for row in rows)
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"|{'|'.join(escaped)}|"
