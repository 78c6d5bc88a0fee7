"""What the demo prints: five questions in three columns, the numbers, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from graftlm.demo.run import LABELS
from graftlm.evaluation import Results
from graftlm.evaluation.terminal_tables import print_side_by_side

_NEXT = "Now your own: graft train examples/teach-facts.yaml data.new.0.path=FACTS.jsonl"


def print_demo(results: Results, out: Path, console: Console) -> None:
    """Print the results of the demo.

    Args:
        results: the results of `run_demo`.
        out: the output folder.
        console: where to print.
    """
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold", pad_edge=False)
    for head in ("question", *LABELS.values()):
        table.add_column(head, overflow="fold", ratio=1)
    for texts in cast("list[list[str]]", results.details["questions"]):
        table.add_row(*(" ".join(text.split()) for text in texts))
    console.print(table, highlight=False, markup=False)
    print_side_by_side(results, console)
    console.print(
        f"\nThe first two questions are taught in other phrasings. Report: {out / 'report.md'}", highlight=False
    )
    console.print(_NEXT, highlight=False, markup=False)
