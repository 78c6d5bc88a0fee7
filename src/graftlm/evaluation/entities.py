"""Entities in tagged words."""

from __future__ import annotations

from collections.abc import Sequence

_INSIDE_MARKS = ("I", "E", "L")
_LAST_MARKS = ("E", "L", "S", "U")


def entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return the entities in tags such as B-PLACE, I-PLACE, O.

    As in seqeval, S and U mark an entity of one word, and E and L the last word of an entity. An I, E or L tag begins
    an entity if no entity of its type is open before it.

    Returns:
        (first word, last word + 1, type) of each entity.
    """
    spans: list[tuple[int, int, str]] = []
    is_open = False
    for position, tag in enumerate(tags):
        mark, dash, kind = tag.partition("-")
        if not dash:
            continue
        follows_last = bool(spans) and spans[-1][1:] == (position, kind)
        if is_open and follows_last and mark in _INSIDE_MARKS:
            start, _, _ = spans.pop()
        else:
            start = position
        spans.append((start, position + 1, kind))
        is_open = mark not in _LAST_MARKS
    return spans
