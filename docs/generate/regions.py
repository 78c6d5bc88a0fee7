"""Find the regions of all pages, and fill them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from docs.generate import code_tables, demo, evidence, families, results_tables, sizes

ROOT = Path(__file__).parents[2]
PATTERNS = ("README.md", "docs/**/*.md", "experiments/*.md", "experiments/*/README.md", "benchmarks/README.md")

_REGION = re.compile(
    r"^<!-- generated: (?P<name>[\w-]+) ?(?P<arguments>[^\n]*?) -->\n(?P<content>.*?)^<!-- end -->",
    re.MULTILINE | re.DOTALL,
)

# Each generator gets the arguments of its region and the page, and returns Markdown.
_GENERATORS: dict[str, Callable[[str, Path], str]] = {
    "comparisons": results_tables.comparisons,
    "demo": demo.demo,
    "evidence": evidence.evidence_table,
    "experiments": code_tables.experiments,
    "extras": code_tables.extras,
    "families": families.families,
    "file": code_tables.file,
    "grafts": code_tables.grafts,
    "keys": code_tables.keys,
    "memory": sizes.memory,
    "options": code_tables.options,
    "results": results_tables.results,
    "sizing": sizes.sizing,
    "time": sizes.time,
    "verbs": code_tables.verbs,
}


def fill(text: str, page: Path) -> str:
    """Return the text of a page with the current content of its regions.

    Raises:
        ValueError: A region has a name without a generator.
    """

    def replacement(region: re.Match[str]) -> str:
        name = region["name"]
        arguments = region["arguments"]
        if name not in _GENERATORS:
            raise ValueError(f"{page}: there is no generator {name!r}: use one of {', '.join(_GENERATORS)}.")
        content = _GENERATORS[name](arguments, page)
        head = f"<!-- generated: {name} {arguments}".rstrip()
        return f"{head} -->\n\n{content}\n\n<!-- end -->"

    return _REGION.sub(replacement, text)


@cache
def generated_pages() -> tuple[Path, ...]:
    """Return the pages that have generated regions."""
    pages = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]
    return tuple(page for page in pages if _REGION.search(page.read_text(encoding="utf-8")))


def outdated_pages() -> dict[Path, str]:
    """Return the pages whose regions are out of date, with their new texts."""
    outdated = {}
    for page in generated_pages():
        text = page.read_text(encoding="utf-8")
        filled = fill(text, page)
        if filled != text:
            outdated[page] = filled
    return outdated
