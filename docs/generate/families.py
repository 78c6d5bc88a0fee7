"""Tables of families and grafts, from the results of the experiment `compatibility`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from docs.generate.markdown import table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "compatibility" / "results.json"
GENERATION = {"cached", "static"}  # uses that an encoder does not have

Uses = Mapping[str, Sequence[str]]  # use -> verdict, sentence
Cells = Mapping[str, Mapping[str, Uses]]  # family -> kind -> uses


@cache
def _cells() -> Cells:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["details"]["cells"]


def families(part: str, page: Path) -> str:
    """Return the table of `decoders` or `encoders`, or the list of `reasons`."""
    if part == "reasons":
        numbered = [f"{number}. {reason}" for number, reason in enumerate(_reasons(), 1)]
        return "\n".join(numbered)
    kinds = list(next(iter(_cells().values())))
    alike: dict[tuple[str, ...], list[str]] = {}
    for family, row in _cells().items():
        if _is_encoder(row) == (part == "encoders"):
            entries = tuple(_entry(row[kind]) for kind in kinds)
            names = alike.setdefault(entries, [])
            names.append(family)
    rows = [[", ".join(names), *entries] for entries, names in alike.items()]
    return table(["families", *kinds], rows)


def _is_encoder(row: Mapping[str, Uses]) -> bool:
    """Whether no kind of graft can generate on this family."""
    for uses in row.values():
        for use in GENERATION:
            verdict, _ = uses[use]
            if verdict != "not applicable":
                return False
    return True


def _entry(uses: Uses) -> str:
    """Return `yes`, or the uses that are refused or wrong with the number of the reason."""
    other: dict[tuple[str, int], list[str]] = {}
    reasons = _reasons()
    applicable = 0
    for use, (verdict, sentence) in uses.items():
        if verdict != "not applicable":
            applicable += 1
        if verdict in ("refused", "wrong"):
            number = reasons.index(_general(sentence)) + 1
            other.setdefault((verdict, number), []).append(use)
    if not other:
        return "yes"
    entries = []
    for (verdict, number), names in other.items():
        entry = f"no [{number}]" if verdict == "refused" else f"wrong [{number}]"
        if len(names) < applicable:
            entry = f"{', '.join(names)}: {entry}"
        entries.append(entry)
    return "; ".join(entries)


@cache
def _reasons() -> list[str]:
    """Return the sentences of all refusals, without names of models and numbers of layers."""
    reasons: list[str] = []
    for sentence in _sentences():
        general = _general(sentence)
        if general not in reasons:
            reasons.append(general)
    return reasons


def _sentences() -> Iterator[str]:
    for row in _cells().values():
        for uses in row.values():
            for verdict, sentence in uses.values():
                if verdict in ("refused", "wrong"):
                    yield sentence


def _general(sentence: str) -> str:
    """Return a sentence with MODEL for the name of a model and N for the number of a layer."""
    without_model = re.sub(r"\b(this|This|a|an) '?[\w.-]+'? model\b", r"\1 MODEL model", sentence)
    return re.sub(r"\b(layer|Layer|attention|layers) \d+\b", r"\1 N", without_model)
