"""The tables of the demo, from the results of one run of `graft demo`."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("demo.json")
_METRICS = ("facts_right", "kept_answers", "names_a_taught_thing")
_TITLES = ("facts right", "everyday answers kept", "everyday answers that name a taught thing")


def demo(arguments: str, page: Path) -> str:
    """Return the five questions with the answers of each row, and the numbers below them.

    Args:
        arguments: none.
        page: the page.
    """
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = results["rows"]
    lines = [
        "|question|" + "|".join(row["label"] for row in rows) + "|",
        "|---" * (len(rows) + 1) + "|",
    ]
    lines += [_line(texts) for texts in results["details"]["questions"]]
    for name, title in zip(_METRICS, _TITLES, strict=True):
        cells = [f"**{row['metrics'][name]['mean']:.2f}**" for row in rows]
        lines.append(f"|**{title}**|" + "|".join(cells) + "|")
    return "\n".join(lines)


def _line(texts: list[str]) -> str:
    cells = [" ".join(text.split()).replace("|", "\\|") for text in texts]
    return f"|{'|'.join(cells)}|"
