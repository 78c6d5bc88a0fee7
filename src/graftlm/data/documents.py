"""The unit of all data: one document."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and where it was found (`file`, `file:line` or `dataset row n`), for messages."""

    text: str
    where: str = "in memory"
