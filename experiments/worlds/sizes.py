"""How much is taught and asked."""

from __future__ import annotations

from experiments.facts.generator import Part


class Size:
    """How much is taught and asked.

    Args:
        quick: run the smallest version of the same form.
        is_search: whether the questions only serve the searches.
    """

    def __init__(self, quick: bool, *, is_search: bool) -> None:
        self.part: Part = "search" if is_search else "test"
        self.facts = 18 if quick else 48 if is_search else 120
        self.unseen = 3 if quick else 24 if is_search else 48
        self.across = 3 if quick else 32 if is_search else 60
        self.within = 2 if quick else 12 if is_search else 24
        self.near = 2 if quick else 8 if is_search else None
        self.answer_tokens = 6 if quick else 24
        self.length = 512 if quick else 128
