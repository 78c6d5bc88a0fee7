"""Entities in tagged words."""

from __future__ import annotations

from collections.abc import Sequence

_INSIDE_MARKS = ("I", "E", "L")


def entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return the entities in tags such as B-PLACE, I-PLACE, O.

    An I tag without a predecessor of its type begins an entity. S and U count as B; E and L count as I.

    Returns:
        (first word, last word + 1, type) of each entity.
    """
    spans: list[tuple[int, int, str]] = []
    for position, tag in enumerate(tags):
        mark, dash, kind = tag.partition("-")
        if not dash:
            continue
        continues = mark in _INSIDE_MARKS and bool(spans) and spans[-1][1:] == (position, kind)
        if continues:
            start, _, _ = spans.pop()
        else:
            start = position
        spans.append((start, position + 1, kind))
    return spans
