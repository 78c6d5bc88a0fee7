"""The unit of all data: one document."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A text, where it was found (`file`, `file:line` or `dataset row n`), for messages, and what was given before it.

    A `prompt` is seen and never predicted; the text is then what completes it.
    """

    text: str
    where: str = "in memory"
    prompt: str = ""

    @property
    def whole(self) -> str:
        """Prompt and text."""
        return self.prompt + self.text
