"""How much is taught and asked in each table of the experiment."""

from __future__ import annotations

from experiments.facts.generator import Part

PAGES = "pages"
SIZES = {"search": 16, "main": 120, "large": 1000, PAGES: 78}
QUICK_SIZES = {"search": 4, "main": 5, "large": 6, PAGES: 9}


class Size:
    """How much is taught and asked.

    Args:
        quick: run the smallest version of the same form.
        table: search, main, large, or pages.

    Attributes:
        of_pages: whether the facts are those of real pages.
        is_search: whether the rows only serve the search, so that they answer fewer questions.
        part: who asks: the search or the test.
        suffix: what is added to the ids of rows.
    """

    def __init__(self, quick: bool, table: str) -> None:
        facts = SIZES[table]
        self.facts = QUICK_SIZES[table] if quick else facts
        self.of_pages = table == PAGES
        self.is_search = table == "search"
        self.part: Part = "search" if self.is_search else "test"
        self.suffix = f"-{facts}" if table == "large" else ""
        self.trained = 2 if quick else 40
        self.unseen = 4 if quick else 2 * facts if self.of_pages else 120
        self.near = 4 if quick else None
        self.far_candidates = 3 if quick else 240
        self.far_unchanged = 2 if quick else 40
        self.prompts = 0 if self.of_pages else 2 if quick else 60
        self.answer_tokens = 6 if quick else 32
        self.prompt_tokens = 8 if quick else 128
        self.near_tokens = 60 if quick else 4000 + 40 * (facts - 16)
        self.own_tokens = 200 if quick else self.near_tokens
        self.kl_tokens = 60 if quick else 1500
        self.old_share = 0.5
        self.max_steps = 2 if quick else None
        self.tested_documents = 4 if quick else 60
