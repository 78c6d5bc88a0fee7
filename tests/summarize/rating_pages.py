"""Documents with summaries of several systems, for tests of the rating page."""

from __future__ import annotations

import json
from pathlib import Path

from examples.rate_summaries import RatingItem
from graftlm.pipelines.summarize import read_text
from summarize.tools import TEA

ARABIC = "هذا اختبار. هل هذا صحيح؟ نعم."


def items() -> list[RatingItem]:
    """Three documents; of the second two systems wrote the same."""
    return [
        RatingItem.from_document(
            read_text(TEA, ".md", "tea.md"), {"lead": "Tea is drunk.", "ours": "Tea helps.", "human": "It </script>"}
        ),
        RatingItem.from_document(
            read_text("Water is wet. It runs."), {"lead": "Water is wet.", "ours": "Water  is\nwet.", "human": "Wet."}
        ),
        RatingItem.from_document(read_text(ARABIC), {"lead": "هذا اختبار.", "ours": "نعم.", "human": "هل هذا صحيح؟"}),
    ]


def write_systems(folder: Path) -> list[str]:
    """Files of two systems, one document short in one of them; as the command line takes them."""
    (folder / "tea.md").write_text(TEA, encoding="utf-8")
    lead = [
        {"document": str(folder / "tea.md"), "summary": "Tea is drunk."},
        {"document": "a note", "summary": "Water is wet.", "text": "Water is wet. It runs."},
        {"document": "gone.txt", "error": "gone.txt can't be read."},
    ]
    ours = [
        {"document": str(folder / "tea.md"), "summary": "Tea helps."},
        {"document": "a note", "summary": "It runs."},
        {"document": "gone.txt", "summary": "Gone."},
    ]
    for name, rows in {"lead": lead, "ours": ours}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"lead={folder / 'lead.jsonl'}", str(folder / "ours.jsonl")]
