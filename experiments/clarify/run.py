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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments import Options
from experiments.clarify import metrics
from experiments.clarify.conversations import TABLES, ConversationRun, Key, Method, read_sets, sample
from experiments.clarify.datasets import AmbiguousExample, mt_geneval_contexts
from experiments.clarify.metrics import Scorer, score_rows, share
from experiments.clarify.scripted import NAME as SCRIPTED
from experiments.study import Study, bars, published
from graftlm.errors import RecipeError
from graftlm.evaluation import Metric, PaperRow, Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import digest
from graftlm.pipelines.clarify import Chain, Conversation, Cost, Reply, load_template
from graftlm.pipelines.clarify.ambiguity import english_gender
from graftlm.pipelines.clarify.gain import normalize_text
from graftlm.pipelines.clarify.prompts import Prompt, format_question
from graftlm.runs.execute import execute

NAME = "clarify"
KNOWN = ("4.2", "4.3", "4.4", "4.5", "needed")
METHODS: dict[Method, str] = {"intercpt": "asks first", "with_context": "with context", "no_extra": "nothing more"}
LIMIT, SCRIPTED_LIMIT, QUICK_LIMIT = 1000, 50, 6  # examples of a kind and language; the paper has 1,000
STATEMENT = (
    "The translator is scripted: it knows the references, and its mistakes are made on purpose (scripted.py). The "
    "figures show that the harness works. They say nothing about any model: no real model was asked."
)
NEEDED_LANGUAGES = ("de", "fr", "es")
THRESHOLD = 0.1
ANSWERS = {"a woman": "feminine", "a man": "masculine"}
_QUESTION = format_question("Is this person a woman or a man?", tuple(ANSWERS))
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
        rows += needed_rows(options.data, QUICK_LIMIT if options.quick else LIMIT)
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
    hashes = {key: digest(*map(asdict, examples)) for key, examples in sets.items()}
    common: dict[str, Any] = {"url": options.endpoint, "data": str(options.data.resolve()), "limit": limit}

    def condition(
        model: str, name: str, words: str, kinds: Sequence[str] = TABLES["4.2"], form: str = "translate", **more: Any
    ) -> Condition:
        runs = [
            ConversationRun(
                id=f"{slug(model)}-{name}-{kind}-{language}",
                model=model,
                template=form.format(kind=kind),
                template_sha256=load_template(form.format(kind=kind)).sha256,
                kind=kind,
                language=language,
                examples_sha256=hashes[kind, language],
                **{**common, "method": "intercpt", **more},
            )
            for kind, language in sets
            if kind in kinds
        ]
        return Condition(f"{slug(model)}-{name}", f"{model}: {words}", runs)

    conditions: list[Condition] = []
    kinds = [kind for table in tables for kind in TABLES.get(table, ())]
    for model in models:
        conditions += [condition(model, method, words, kinds, method=method) for method, words in METHODS.items()]
        if "4.4" in tables:
            name, words = "intercpt_specialist", "asks first, specialist"
            conditions.append(condition(model, name, words, form="translate-{kind}"))
    for user in models[1:] if "4.5" in tables else ():
        conditions.append(condition(models[0], f"intercpt_user_{slug(user)}", f"asks first, {user} answers", user=user))
    return [row for row in conditions if row.runs]


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
    systems: defaultdict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(dict)
    for condition in conditions:
        method = condition.id.rpartition("-")[2]
        for run in condition.runs if method in METHODS else ():
            systems[run.model, run.kind, run.language][method] = _outputs(measured[run.id])
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


class PronounTranslator:
    """Translates an example's sentence by the gender of the pronouns in its text, or else of the answer.

    An example whose context shows no gender by a pronoun counts as masculine. Only whether the two translations are
    told apart matters.
    """

    name = "pronoun translator"

    def __init__(self, example: AmbiguousExample) -> None:
        self._example = example

    def generate(self, prompt: Prompt, **_: Any) -> Reply:
        parts = dict(prompt.parts)
        if prompt.label == "Question":
            return Reply(_QUESTION)
        gender = english_gender(parts["text"]) or ANSWERS.get(parts.get("answer", ""))
        is_right = gender == (self._example.label or "masculine")
        return Reply(self._example.reference if is_right else self._example.contrast or "")


def needed_rows(data: Path, limit: int) -> list[Row]:
    """Precision and recall of asking, in percent, for each language whose files exist.

    MT-GenEval has sentences about people whose gender only the preceding sentence shows. With that sentence nothing has
    to be asked. Without it one has to ask, if the feminine and the masculine translation differ. The translator always
    asks. The chain puts the question if its expected gain is above the threshold.

    Recall is 100% by construction: without the preceding sentence this translator has no pronoun to read, so the gain
    is one bit exactly where the translations differ. Only precision is a measurement. `precision_always` is that of
    asking every time.
    """
    folder, file = data / "ambig" / "mt_geneval", "geneval-context-wikiprofessions-2to1-test.en_{}.en"
    languages = [language for language in NEEDED_LANGUAGES if (folder / file.format(language)).exists()]
    return [language_row(language, mt_geneval_contexts(folder, language)[:limit]) for language in languages]


def language_row(language: str, examples: Sequence[AmbiguousExample]) -> Row:
    """The row of one language; every example counts with and without its context."""
    decisions = [decision(example, with_context) for example in examples for with_context in (False, True)]
    questions, needed = (sum(values[index] is True for values in decisions) for index in (0, 1))
    right = sum(is_asked and is_needed for is_asked, is_needed, _ in decisions)
    metrics: dict[str, Any] = {
        "precision": share(right, questions),
        "recall": share(right, needed),
        "precision_always": share(needed, len(decisions)),
        "asked": questions,
        "needed": needed,
        "texts": len(decisions),
        "calls": sum(cost.calls for _, _, cost in decisions),
    }
    return Row(id=f"needed_{language}", label=f"needed, {language}", metrics=metrics)


def decision(example: AmbiguousExample, with_context: bool) -> tuple[bool, bool, Cost]:
    """Whether the question was asked, whether it was needed, and the cost."""
    text = " ".join((*example.context, example.source)) if with_context else example.source
    differ = normalize_text(example.reference) != normalize_text(example.contrast or "")
    start = Conversation.start(text, "translate", example.language, threshold=THRESHOLD, any_language=True)
    conversation = Chain(PronounTranslator(example)).run(start)
    return conversation.turns[0].kind == "asked", differ and not with_context, conversation.cost
