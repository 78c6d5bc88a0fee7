"""Interactive chains beside their baselines: Tables 4.2 and 4.3 and Figures 4.3 to 4.6, for any endpoint and models.

| table | rows, for every model |
|---|---|
| 4.2 | intercpt, with_context and no_extra on formality, "it" and polysemy; Figures 4.3 and 4.6 |
| 4.3 | the same on names and professions, which no exemplar shows |
| 4.4 | intercpt with the specialist templates of Figure 4.4 |
| 4.5 | intercpt of the first model with each other one as the user that answers: Figure 4.5 |
| needed | precision and recall of "needed", by a translator of known behaviour; needs no endpoint |
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments import Options
from experiments.clarify import metrics, needed, paper
from experiments.clarify.cell import Cell, Method, measure
from experiments.clarify.data import TABLES, Key, fingerprint, read_sets, some
from experiments.clarify.scorers import Scorer, Translation, best_of, scored
from experiments.clarify.scripted import NAME as SCRIPTED
from experiments.clarify.scripted import Script
from experiments.clarify.server import serving
from experiments.composed import bars
from experiments.jobs import run_jobs
from graftlm.errors import RecipeError
from graftlm.evaluation import Interval, Metric, Results, Row
from graftlm.evaluation.report import write_report
from graftlm.pipelines.clarify import load_template
from graftlm.pipelines.clarify.examples import Example

NAME = "clarify"
KNOWN = ("4.2", "4.3", "4.4", "4.5", "needed")
METHODS: dict[Method, str] = {"intercpt": "asks first", "with_context": "with context", "no_extra": "nothing more"}
LIMIT, SCRIPTED_LIMIT, QUICK_LIMIT = 1000, 50, 6  # examples of a kind and language; the paper has 1,000
STATEMENT = (
    "The translator is scripted: it knows the references, and its mistakes are drawn on purpose (reproduce/clarify/"
    "scripted.py). The figures show that the harness works and say nothing about any model: no large model was at hand."
)


class Line(NamedTuple):
    """A row: one method of one model on several sets."""

    id: str
    label: str
    cells: list[Cell]


def run(options: Options) -> Results:
    """Run the asked tables, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table, or no endpoint, or no model of it is named.
        DataError: the data folder has no ambiguous sentences.
        EndpointError: the server can't be used; the same command goes on where it stopped.
    """
    tables, scorers = options.chosen(KNOWN), [Scorer(one) for one in options.scorers]
    started = time.perf_counter()
    asked = [table for table in tables if table != "needed"]
    limit = _limit(options)
    rows, details = _with_models(options, asked, limit, scorers) if asked else ([], {})
    if "needed" in tables:
        rows += needed.rows(options.data, QUICK_LIMIT if options.quick else LIMIT)
    details |= {"wall_s": round(time.perf_counter() - started, 1), "limit": limit}
    published = [] if options.endpoint == SCRIPTED else paper.rows(rows)  # scripted figures stand beside nothing
    results = Results.here(NAME, rows, seeds=(0,), paper=published, details=details)
    write_report(results, options.out, plots=_plots(rows))
    return results


def _limit(options: Options) -> int:
    return QUICK_LIMIT if options.quick else SCRIPTED_LIMIT if options.endpoint == SCRIPTED else LIMIT


def _with_models(
    options: Options, tables: Sequence[str], limit: int, scorers: Sequence[Scorer]
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of all models, and what does not fit a table."""
    sets = {key: some(examples, limit) for key, examples in read_sets(options.data).items()}
    with _server(options, sets) as (url, models):
        lines = _lines(options, tables, sets, url, models, limit)
        cells = [cell for line in lines for cell in line.cells]
        found = run_jobs(cells, measure, options.out / "cells", processes=options.jobs, title=NAME)
    details: dict[str, Any] = {
        "examples": {f"{kind}_{language}": len(examples) for (kind, language), examples in sets.items()},
        "mistakes": {line.id: _mistakes(line, found) for line in lines if line.id.endswith("-intercpt")},
        "significance": _significance(lines, found, sets, models),
        "templates": sorted({cell.template for cell in cells}),
    }
    if options.endpoint == SCRIPTED:
        details["statement"] = STATEMENT
    return [_row(line, found, _scores(line, found, sets, scorers)) for line in lines], details


@contextmanager
def _server(options: Options, sets: Mapping[Key, Sequence[Example]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The server's address and the models that are asked; the scripted one runs as long as the block."""
    if options.endpoint is None:
        raise RecipeError(
            "No server was named: give the URL of one and its models (--endpoint URL --model NAME), or "
            "--endpoint scripted."
        )
    if options.endpoint != SCRIPTED and not options.models:
        raise RecipeError(f"The server {options.endpoint} may have several models: name some (--model).")
    if options.endpoint != SCRIPTED:
        yield options.endpoint, options.models
        return
    with serving(Script(one for examples in sets.values() for one in examples)) as running:
        yield running.url, options.models or (SCRIPTED,)


def _lines(
    options: Options,
    tables: Sequence[str],
    sets: Mapping[Key, Sequence[Example]],
    url: str,
    models: tuple[str, ...],
    limit: int,
) -> list[Line]:
    """All rows; a set that the data does not have is left out."""
    shas = {key: fingerprint(examples) for key, examples in sets.items()}
    known: dict[str, Any] = {"url": url, "data": str(options.data.resolve()), "limit": limit, "method": "intercpt"}

    def cells(name: str, kinds: Sequence[str], model: str, template: str = "translate", **more: Any) -> list[Cell]:
        return [
            Cell(
                id=f"{name}-{kind}-{language}",
                model=model,
                template=(chosen := template.format(kind=kind)),
                template_sha256=load_template(chosen).sha256,
                kind=kind,
                language=language,
                examples_sha256=shas[kind, language],
                **(known | more),
            )
            for kind, language in sets
            if kind in kinds
        ]

    lines: list[Line] = []
    kinds = [kind for table in tables for kind in TABLES.get(table, ())]
    for model in models:
        for method, words in METHODS.items():
            name = f"{slug(model)}-{method}"
            lines.append(Line(name, f"{model}: {words}", cells(name, kinds, model, method=method)))
        if "4.4" in tables:
            name = f"{slug(model)}-intercpt_specialist"
            found = cells(name, TABLES["4.2"], model, "translate-{kind}")
            lines.append(Line(name, f"{model}: asks first, specialist", found))
    for user in models[1:] if "4.5" in tables else ():
        name = f"{slug(models[0])}-intercpt_user_{slug(user)}"
        found = cells(name, TABLES["4.2"], models[0], user=user)
        lines.append(Line(name, f"{models[0]}: asks first, {user} answers", found))
    return [line for line in lines if line.cells]


def slug(model: str) -> str:
    """A model's name as part of a row's id."""
    return re.sub(r"[^a-z0-9.]+", "_", model.casefold()).strip("_")


def _scores(
    line: Line, found: Mapping[str, Mapping[str, Any]], sets: Mapping[Key, Sequence[Example]], scorers: Sequence[Scorer]
) -> dict[str, Metric]:
    """What the user's own scorers say of a row's outputs."""
    values: dict[str, Metric] = {}
    for cell in line.cells:
        examples = sets[cell.kind, cell.language]
        outputs, refs = [one["output"] for one in found[cell.id]["talks"]], [one.reference for one in examples]
        for scorer in scorers:
            if cell.kind == "polysemy":
                lists = [metrics.listed(output) for output in outputs]
                scores = best_of(scorer, [one.source for one in examples], lists, refs)
            else:
                sources = [one.source for one in examples]
                scores = {scorer.name: scored(scorer, list(map(Translation, sources, outputs, refs)))}
            values |= {f"{cell.kind}_{cell.language}_{name}": value for name, value in scores.items()}
    return values


def _row(line: Line, found: Mapping[str, Mapping[str, Any]], scores: Mapping[str, Metric]) -> Row:
    values: dict[str, Metric] = {}
    for cell in line.cells:
        for name, value in found[cell.id]["metrics"].items():
            metric = Interval.parse(value) if isinstance(value, dict) else value
            values[f"{cell.kind}_{cell.language}_{name}"] = metric
    costs = [found[cell.id]["cost"] for cell in line.cells]
    spent = {name: sum(one[name] for one in costs) for name in costs[0]}
    return Row(id=line.id, label=line.label, metrics=values | dict(scores) | spent)


def _mistakes(line: Line, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{cell.kind}_{cell.language}": found[cell.id]["mistakes"] for cell in line.cells}


def _significance(
    lines: Sequence[Line],
    found: Mapping[str, Mapping[str, Any]],
    sets: Mapping[Key, Sequence[Example]],
    models: Sequence[str],
) -> dict[str, Any]:
    """p-values of the baselines' differences from the chain, by model, kind and language."""
    tests: dict[str, Any] = {}
    outputs = {
        (cell.model, cell.kind, cell.language, line.id.rpartition("-")[2]): [
            one["output"] for one in found[cell.id]["talks"]
        ]
        for line in lines
        for cell in line.cells
    }
    for model in models:
        for (kind, language), examples in sets.items():
            systems = {name: outputs[key] for name in METHODS if (key := (model, kind, language, name)) in outputs}
            if kind != "polysemy" and systems:
                tests[f"{slug(model)}_{kind}_{language}"] = metrics.significance(systems, examples, language)
    return tests


def _plots(rows: Sequence[Row]) -> dict[str, Figure]:
    """Figures 4.3 (with one model: its three methods), 4.4, 4.5 and 4.6, as far as there are rows for them."""
    main = [row for row in rows if row.id.endswith(tuple(f"-{method}" for method in METHODS))]
    asks = [row for row in rows if row.id.endswith("-intercpt")]
    special = [row for row in rows if row.id.endswith("_specialist")]
    users = [row for row in rows if "-intercpt_user_" in row.id]
    shown = {
        "figure-4.3": (main, "accuracy"),
        "figure-4.4": ([*asks, *special] if special else [], "accuracy"),
        "figure-4.5": ([*asks[:1], *users] if users else [], "accuracy"),
        "figure-4.6": (main, "share"),
    }
    return {name: figure for name, (some_rows, end) in shown.items() if (figure := _bars(some_rows, end)) is not None}


def _bars(rows: Sequence[Row], what: str) -> Figure | None:
    names = dict.fromkeys(name for row in rows for name in row.metrics if re.search(rf"_{what}(?:_\w+)?$", name))
    return bars(rows, {name: name.replace("_", " ") for name in list(names)[:6]}, "%") if names else None
