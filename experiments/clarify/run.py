"""Interactive chains and their baselines: Tables 4.2 and 4.3, Figures 4.3 to 4.6, for any endpoint and models.

| table | rows, for every model |
|---|---|
| 4.2 | intercpt, with_context and no_extra on formality, "it" and polysemy; Figures 4.3 and 4.6 |
| 4.3 | the same on names and professions, which no exemplar shows |
| 4.4 | intercpt with the specialist templates of Figure 4.4 |
| 4.5 | intercpt of the first model with each other model as the user: Figure 4.5 |
| needed | precision and recall of asking, by a translator of known behaviour; needs no endpoint |
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments import Options
from experiments.clarify import metrics, needed
from experiments.clarify.conversations import TABLES, ConversationRun, Key, Method, fingerprint, read_sets, sample
from experiments.clarify.metrics import Scorer, score_rows
from experiments.clarify.scripted import NAME as SCRIPTED
from experiments.study import Study, bars, published
from graftlm.errors import RecipeError
from graftlm.evaluation import Metric, PaperRow, Results, Row
from graftlm.pipelines.clarify import load_template
from graftlm.pipelines.clarify.datasets import AmbiguousExample
from graftlm.runs.run import Measurement, execute

NAME = "clarify"
KNOWN = ("4.2", "4.3", "4.4", "4.5", "needed")
METHODS: dict[Method, str] = {"intercpt": "asks first", "with_context": "with context", "no_extra": "nothing more"}
LIMIT, SCRIPTED_LIMIT, QUICK_LIMIT = 1000, 50, 6  # examples of a kind and language; the paper has 1,000
STATEMENT = (
    "The translator is scripted: it knows the references, and its mistakes are made on purpose (scripted.py). The "
    "figures show that the harness works. They say nothing about any model: no real model was asked."
)
Sets = Mapping[Key, Sequence[AmbiguousExample]]
Measured = Mapping[str, Measurement]


class Condition(NamedTuple):
    """A row of the table: one method of one model on several sets."""

    id: str
    label: str
    runs: list[ConversationRun]


def run(options: Options) -> Results:
    """Run the chosen tables.

    Raises:
        RecipeError: no endpoint or no model is named.
        EndpointError: the server fails; the same command continues the run.
    """
    tables, scorers = options.chosen(KNOWN), [Scorer(argument) for argument in options.scorers]
    started = time.perf_counter()
    rows: list[Row] = []
    scripted = options.endpoint == SCRIPTED
    limit = QUICK_LIMIT if options.quick else SCRIPTED_LIMIT if scripted else LIMIT
    details: dict[str, Any] = {"statement": STATEMENT} if scripted else {}
    if model_tables := [table for table in tables if table != "needed"]:
        rows, measured = _model_rows(options, model_tables, limit, scorers)
        details |= measured
    if "needed" in tables:
        rows += needed.rows(options.data, QUICK_LIMIT if options.quick else LIMIT)
    details |= {"wall_s": round(time.perf_counter() - started, 1), "limit": limit}
    paper = [] if scripted else paper_rows(rows)
    return Study(options).write(NAME, rows, seeds=(0,), paper=paper, details=details, plots=_plots(rows))


def _model_rows(
    options: Options, tables: Sequence[str], limit: int, scorers: Sequence[Scorer]
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of all models, and details that fit no table."""
    if options.endpoint is None:
        raise RecipeError(
            "No server was named: give the URL of one and its models (--endpoint URL --model NAME), or "
            "--endpoint scripted."
        )
    if options.endpoint != SCRIPTED and not options.models:
        raise RecipeError(f"The server {options.endpoint} may have several models: name some (--model).")
    sets = {key: sample(examples, limit) for key, examples in read_sets(options.data).items()}
    conditions = _conditions(options, tables, sets, options.models or (SCRIPTED,), limit)
    runs = [run for condition in conditions for run in condition.runs]
    measured = execute(runs, options.out, jobs=options.jobs, title=NAME)
    details: dict[str, Any] = {
        "examples": {f"{kind}_{language}": len(examples) for (kind, language), examples in sets.items()},
        "mistakes": {
            condition.id: {f"{run.kind}_{run.language}": measured[run.id].details["mistakes"] for run in condition.runs}
            for condition in conditions
            if condition.id.endswith("-intercpt")
        },
        "significance": _significance(conditions, measured, sets),
        "templates": sorted({run.template for run in runs}),
    }
    return [_row(condition, measured, sets, scorers) for condition in conditions], details


def _conditions(
    options: Options, tables: Sequence[str], sets: Sets, models: tuple[str, ...], limit: int
) -> list[Condition]:
    """All rows; sets that the data folder lacks are omitted."""
    hashes = {key: fingerprint(examples) for key, examples in sets.items()}
    common: dict[str, Any] = {"url": options.endpoint, "data": str(options.data.resolve()), "limit": limit}

    conditions: list[Condition] = []

    def add(
        name: str, label: str, kinds: Sequence[str] = TABLES["4.2"], *, template: str = "translate", **values: Any
    ) -> None:
        runs = [
            ConversationRun(
                id=f"{name}-{kind}-{language}",
                template=template.format(kind=kind),
                template_sha256=load_template(template.format(kind=kind)).sha256,
                kind=kind,
                language=language,
                examples_sha256=hashes[kind, language],
                **{**common, "method": "intercpt", **values},
            )
            for kind, language in sets
            if kind in kinds
        ]
        if runs:
            conditions.append(Condition(name, label, runs))

    kinds = [kind for table in tables for kind in TABLES.get(table, ())]
    for model in models:
        for method, words in METHODS.items():
            add(f"{slug(model)}-{method}", f"{model}: {words}", kinds, model=model, method=method)
        if "4.4" in tables:
            name, label = f"{slug(model)}-intercpt_specialist", f"{model}: asks first, specialist"
            add(name, label, model=model, template="translate-{kind}")
    for user in models[1:] if "4.5" in tables else ():
        name, label = f"{slug(models[0])}-intercpt_user_{slug(user)}", f"{models[0]}: asks first, {user} answers"
        add(name, label, model=models[0], user=user)
    return conditions


def slug(model: str) -> str:
    """A model's name as part of a row's id."""
    return re.sub(r"[^a-z0-9.]+", "_", model.casefold()).strip("_")


def _outputs(measurement: Measurement) -> list[str]:
    return [conversation["output"] for conversation in measurement.details["conversations"]]


def _row(condition: Condition, measured: Measured, sets: Sets, scorers: Sequence[Scorer]) -> Row:
    values: dict[str, Metric] = {}
    for run in condition.runs:
        own = dict(measured[run.id].row.metrics)
        for scorer in scorers:
            own |= score_rows(scorer, run.kind, sets[run.kind, run.language], _outputs(measured[run.id]))
        values |= {f"{run.kind}_{run.language}_{name}": value for name, value in own.items()}
    costs = [measured[run.id].details["cost"] for run in condition.runs]
    total = {name: sum(cost[name] for cost in costs) for name in costs[0]}
    return Row(id=condition.id, label=condition.label, metrics=values | total)


def _significance(conditions: Sequence[Condition], measured: Measured, sets: Sets) -> dict[str, Any]:
    """The p-values of the baselines' differences from the chain, by model, kind and language."""
    systems: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for condition in conditions:
        method = condition.id.rpartition("-")[2]
        for run in condition.runs if method in METHODS else ():
            systems.setdefault((run.model, run.kind, run.language), {})[method] = _outputs(measured[run.id])
    return {
        f"{slug(model)}_{kind}_{language}": metrics.significance(outputs, sets[kind, language], language)
        for (model, kind, language), outputs in systems.items()
        if kind != "polysemy"
    }


def paper_rows(rows: Sequence[Row]) -> list[PaperRow]:
    """PaLM's figures for every row whose id ends in a method of the paper, limited to the row's metrics."""
    return [
        PaperRow(id=row.id, metrics=shown, where=figures.where)
        for row in rows
        for figures in published(__file__, (row.id.rpartition("-")[2],))
        if (shown := {name: value for name, value in figures.metrics.items() if name in row.metrics})
    ]


def _plots(rows: Sequence[Row]) -> dict[str, Figure]:
    """Figures 4.3 (with one model: its three methods), 4.4, 4.5 and 4.6, if there are rows for them."""
    methods = [row for row in rows if row.id.endswith(tuple(f"-{method}" for method in METHODS))]
    chains = [row for row in rows if row.id.endswith("-intercpt")]
    specialists = [row for row in rows if row.id.endswith("_specialist")]
    users = [row for row in rows if "-intercpt_user_" in row.id]
    shown = {
        "figure-4.3": (methods, "accuracy"),
        "figure-4.4": ([*chains, *specialists] if specialists else [], "accuracy"),
        "figure-4.5": ([*chains[:1], *users] if users else [], "accuracy"),
        "figure-4.6": (methods, "share"),
    }
    figures: dict[str, Figure] = {}
    for name, (selected, metric) in shown.items():
        names = [key for row in selected for key in row.metrics if re.search(rf"_{metric}(?:_\w+)?$", key)]
        if labels := {key: key.replace("_", " ") for key in list(dict.fromkeys(names))[:6]}:
            figures[name] = bars(selected, labels, "%")
    return figures
