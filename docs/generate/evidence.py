"""Tables of evidence: claims with their estimates from `results.json`, and verdicts from `evidence.yaml`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from docs.generate.markdown import table
from docs.generate.results_tables import load_results, show, value_at
from graftlm.config import Config, read_yaml

ROOT = Path(__file__).parents[2]
CLAIMS = Path(__file__).with_name("evidence.yaml")
FRONT_HEAD = ("method", "claim (source)", "verdict")
HEAD = (
    "claim (source)",
    "our estimate against the best control [95%]",
    "model, tokens, seeds, test",
    "verdict",
    "advice",
)
MOST_WORDS = 25
_VALUE = re.compile(r"\{(?P<path>[^|{}]+)\|(?P<spec>[^{}]+)\}")


class Claim(Config):
    """A row of the tables of evidence.

    Args:
        results: Folder of the `results.json`, relative to the repository.
        methods: Pages of methods that show the row.
        front: Whether the front page shows the row.
        claim: The claim, with its source.
        estimate: Our estimate; `{PATH|FORMAT}` is a value of the results.
        setting: Model, tokens, seeds and test.
        verdict: The verdict.
        comparison: Name of the declared comparison that decides; only for verdicts that support the claim.
        cause: Why, in a few words.
        advice: When to use the method, as a sentence.
    """

    results: str
    methods: list[str] = Field(default_factory=list)
    front: bool = False
    claim: str
    estimate: str
    setting: str
    verdict: Literal["reproduced", "supported", "not reproduced", "undecided"]
    comparison: str = ""
    cause: str
    advice: str


@cache
def claims() -> Mapping[str, Claim]:
    """Return the claims by their ids."""
    return {name: Claim.parse(values, where=name) for name, values in read_yaml(CLAIMS).items()}


def evidence_table(selection: str, page: Path) -> str:
    """Return a table of evidence.

    Args:
        selection: `front` for the verdicts alone, one claim of each method; `all`, or the name of a method's page, for
            the estimates with them.
        page: The page that shows the table.
    """
    chosen = [claim for claim in claims().values() if _is_chosen(claim, selection)]
    if not chosen:
        raise ValueError(f"{page}: there is no claim for {selection!r}.")
    if selection == "front":
        return table(FRONT_HEAD, [_front_row(claim, page) for claim in chosen])
    return table(HEAD, [_row(claim, page) for claim in chosen])


def _is_chosen(claim: Claim, selection: str) -> bool:
    if selection == "front":
        return claim.front
    return selection == "all" or selection in claim.methods


def _front_row(claim: Claim, page: Path) -> list[str]:
    method = claim.methods[0]
    link = os.path.relpath(ROOT / "docs" / "methods" / f"{method}.md", page.parent)
    name = method.replace("-", " ")
    return [f"[{name}]({link})", claim.claim, _verdict(claim)]


def _row(claim: Claim, page: Path) -> list[str]:
    cells = [
        claim.claim,
        _filled(claim.estimate, claim),
        _filled(claim.setting, claim),
        _verdict(claim),
        claim.advice,
    ]
    for cell in cells:
        if len(cell.split()) > MOST_WORDS:
            raise ValueError(f"A cell of evidence has more than {MOST_WORDS} words: {cell}")
    cells[2] += f" ([results]({_link(claim, page)}))"
    return cells


def _verdict(claim: Claim) -> str:
    """Return the verdict and its cause; one that supports the claim needs a comparison that decides."""
    supports = claim.verdict in ("reproduced", "supported")
    if supports != bool(claim.comparison):
        raise ValueError(f"A verdict needs a comparison if and only if it supports the claim: {claim.claim}")
    if supports:
        comparison = value_at(load_results(ROOT / claim.results), f"details/comparisons/{claim.comparison}")
        if not comparison["decided"] or comparison["verdict"] not in ("better", "equivalent"):
            raise ValueError(f"The comparison {claim.comparison} does not support its claim: {claim.claim}")
    return f"**{claim.verdict}**: {_filled(claim.cause, claim)}"


def _filled(text: str, claim: Claim) -> str:
    """Return a text with the values of the claim's results."""
    results = load_results(ROOT / claim.results)

    def fill(value: re.Match[str]) -> str:
        return show(value_at(results, value["path"]), value["spec"])

    return _VALUE.sub(fill, text)


def _link(claim: Claim, page: Path) -> str:
    """Return the link to the folder of the results, which a site can only reach on the web."""
    folder = ROOT / claim.results
    if (ROOT / "docs") in page.parents:
        return f"https://github.com/graftlm/graftlm/tree/main/{claim.results}"
    readme = folder / "README.md"
    return os.path.relpath(readme if readme.exists() else folder / "report.md", page.parent)
