"""Interactive chains and their baselines: Tables 4.2 and 4.3, Figures 4.3 to 4.6, for any endpoint and models.

| table | rows, for every model |
|---|---|
| 4.2 | intercpt, with_context and no_extra on formality, "it" and polysemy |
| 4.3 | the same on names and professions, which no exemplar shows |
| figure-4.3 | the rows of 4.2 for models of several sizes, with one user (`--user`) |
| 4.4 | intercpt with the specialist templates of Figure 4.4 |
| 4.5, figure-4.5 | intercpt of the first model with each other model as the user |
| figure-4.6 | the rows of 4.2 on formality and "it", French and Spanish: shares of the labels |
| needed | precision and recall of asking, by a translator of known behaviour; needs no endpoint |
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments import Options
from experiments.clarify import metrics
from experiments.clarify.conversations import LANGUAGES, TABLES, ConversationRun, Key, Method, read_sets, sample
from experiments.clarify.datasets import AmbiguousExample, mt_geneval_contexts
from experiments.clarify.metrics import Scorer, score_rows, share
from experiments.clarify.scripted import NAME as SCRIPTED
from experiments.study import Study, bars, published
from graftlm.errors import RecipeError
from graftlm.evaluation import Metric, PaperRow, Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.digests import digest
from graftlm.pipelines.clarify import Bill, Chain, Conversation, Cost, Reply, load_template
from graftlm.pipelines.clarify.ambiguity import english_gender
from graftlm.pipelines.clarify.gain import normalize_text
from graftlm.pipelines.clarify.opening import LOCAL
from graftlm.pipelines.clarify.prompts import Prompt, format_question
from graftlm.runs.execute import execute

NAME = "clarify"
DEFAULT = ("4.2", "4.3", "4.4", "4.5", "needed")
KNOWN = (*DEFAULT, "figure-4.3", "figure-4.5", "figure-4.6")
METHODS: dict[Method, str] = {
    "intercpt": "asks first",
    "with_context": "with context",
    "no_extra": "nothing more",
}
# Maximum numbers of examples of a kind and language; the paper has 1,000.
LIMIT = 1000
SCRIPTED_LIMIT = 50
QUICK_LIMIT = 6
QUICK_TOKENS = 32  # of a reply in a quick run
# The committed results contain this text.
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
    """A row of the table: a method of a model on several sets.

    Args:
        id: id of the row.
        label: label of the row.
        runs: a run per set.
    """

    id: str
    label: str
    runs: list[ConversationRun]


def run(options: Options) -> Results:
    """Run the chosen tables.

    Raises:
        RecipeError: no endpoint or no model is named, a figure needs several models, or prices have another form.
        EndpointError: the server failed. The same command continues the run.
    """
    tables = options.chosen(KNOWN, DEFAULT)
    bill = Bill.read(options.prices, options.user_prices, options.user)
    scorers = [Scorer(argument) for argument in options.scorers]
    is_scripted = options.endpoint == SCRIPTED
    limit = _limit(options)
    started = time.perf_counter()
    rows: list[Row] = []
    details: dict[str, Any] = {}
    if is_scripted:
        details["statement"] = STATEMENT
    model_tables = [table for table in tables if table != "needed"]
    if model_tables:
        rows, measured = _model_rows(options, model_tables, limit, scorers, bill)
        details.update(measured)
    if "needed" in tables:
        rows += needed_rows(options.data, options.limit or (QUICK_LIMIT if options.quick else LIMIT))
    details["wall_s"] = round(time.perf_counter() - started, 1)
    details["limit"] = limit
    return Study(options).write(
        NAME,
        rows,
        seeds=(0,),
        paper=[] if is_scripted else paper_rows(rows),
        details=details,
        plots=_plots(rows),
    )


def _limit(options: Options) -> int:
    """Return the maximum number of examples of a kind and language."""
    if options.limit is not None:
        return options.limit
    if options.quick:
        return QUICK_LIMIT
    if options.endpoint == SCRIPTED:
        return SCRIPTED_LIMIT
    return LIMIT


def _model_rows(
    options: Options, tables: Sequence[str], limit: int, scorers: Sequence[Scorer], bill: Bill | None
) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of all models, and details that belong to no table."""
    _check_models(options, tables)
    sets = {key: sample(examples, limit) for key, examples in read_sets(options.data).items()}
    conditions = _conditions(options, tables, sets, limit)
    runs: list[ConversationRun] = []
    for condition in conditions:
        runs.extend(condition.runs)
    measured = execute(runs, options.out, jobs=options.jobs, title=NAME)
    details: dict[str, Any] = {
        "examples": {f"{kind}_{language}": len(examples) for (kind, language), examples in sets.items()},
        "mistakes": _mistakes(conditions, measured),
        "significance": _significance(conditions, measured, sets),
        "templates": sorted({run.template for run in runs}),
    }
    if options.user is not None:
        details["user"] = options.user
    rows = [_row(condition, measured, sets, scorers) for condition in conditions]
    if bill is not None:
        rows = [
            _priced(row, condition, measured, bill, options.user)
            for row, condition in zip(rows, conditions, strict=True)
        ]
        details["rows_of_unknown_price"] = [row.id for row in rows if "price" not in row.metrics]
    return rows, details


def _check_models(options: Options, tables: Sequence[str]) -> None:
    """Refuse options that name no model, or too few for a figure."""
    if options.endpoint is None and options.backbone is None:
        raise RecipeError(
            "No server was named: give the URL of a server and its models (--endpoint URL --model NAME), the folder of "
            "a model (--backbone), or --endpoint scripted."
        )
    if options.endpoint is not None and options.backbone is not None:
        raise RecipeError("Both --endpoint and --backbone were given: leave one of them out.")
    if options.endpoint not in (SCRIPTED, None) and not options.models:
        raise RecipeError(f"The server {options.endpoint} may have several models: name some (--model).")
    if options.prices is not None and len(_models(options)) > 1:
        raise RecipeError(
            f"The prices are those of one model, but {len(_models(options))} were named: ask each by its own command, "
            "or leave --prices out."
        )
    if options.user is None and (options.user_endpoint or options.user_prices):
        raise RecipeError("The user's server or prices were given, but not its model: name it (--user).")
    for table, purpose in (("figure-4.3", "scale"), ("figure-4.5", "the scale of the user's model")):
        if table in tables and len(_models(options)) < 2:
            raise RecipeError(
                f"The table {table} is about {purpose}, but one model was named: name models of several sizes (repeat "
                "--model)."
            )


def _models(options: Options) -> tuple[str, ...]:
    """Return the names of the translators; of models on this machine, their folders."""
    if options.backbone is not None:
        return (options.backbone, *options.models)
    return options.models or (SCRIPTED,)


def _keys(tables: Sequence[str], sets: Iterable[Key]) -> list[Key]:
    """Return the kinds and languages of the sets that tables with all methods measure, in the order of the sets."""
    wanted: set[Key] = set()
    for table in tables:
        kinds = TABLES["4.2"] if table in ("figure-4.3", "figure-4.5") else TABLES.get(table, ())
        wanted |= {(kind, language) for kind in kinds for language in LANGUAGES}
        if table == "figure-4.6":
            wanted |= {(kind, language) for kind in ("formality", "it") for language in ("fr", "es")}
    return [key for key in sets if key in wanted]


class _RunFactory:
    """Makes the runs of a condition on all sets of the data folder."""

    def __init__(self, options: Options, sets: Sets, limit: int) -> None:
        self._options = options
        self._url = LOCAL if options.backbone is not None else str(options.endpoint)
        self._data = str(options.data.resolve())
        self._limit = limit
        self._digests: dict[Key, str] = {}
        for key, examples in sets.items():
            values = [asdict(example) for example in examples]
            self._digests[key] = digest(*values)

    def condition(
        self,
        model: str,
        name: str,
        label: str,
        keys: Sequence[Key],
        *,
        method: Method = "intercpt",
        template: str = "translate",
        user: str | None = None,
    ) -> Condition:
        """Return a condition; sets that the data folder lacks are left out.

        Args:
            model: the translator.
            name: the end of the row's id.
            label: the end of the row's label.
            keys: the kinds and languages of the sets.
            method: the method.
            template: name of the template, in which `{kind}` is replaced by the kind.
            user: the model that answers; by default that of the options, or else the translator.
        """
        shown = _shown(model, self._url)
        row_id = f"{slug(shown)}-{name}"
        is_apart = user is None and self._options.user is not None and method == "intercpt"
        user_url = None
        if is_apart:
            user = self._options.user
            user_url = self._options.user_endpoint
        runs = []
        for kind, language in keys:
            template_name = template.format(kind=kind)
            run = ConversationRun(
                id=f"{row_id}-{kind}-{language}",
                url=self._url,
                model=model,
                user=user,
                user_url=user_url,
                method=method,
                template=template_name,
                template_sha256=load_template(template_name).sha256,
                kind=kind,
                language=language,
                data=self._data,
                examples_sha256=self._digests[kind, language],
                limit=self._limit,
                max_new_tokens=QUICK_TOKENS if self._options.quick and self._url != SCRIPTED else None,
                concurrency=self._options.concurrency,
                device=self._options.device,
            )
            runs.append(run)
        return Condition(id=row_id, label=f"{shown}: {label}", runs=runs)


def _conditions(options: Options, tables: Sequence[str], sets: Sets, limit: int) -> list[Condition]:
    """Return all rows that have runs."""
    models = _models(options)
    factory = _RunFactory(options, sets, limit)
    chosen = _keys([table for table in tables if table != "figure-4.5"], sets)
    own = _keys(("4.2",), sets)
    conditions: list[Condition] = []
    for model in models:
        for method, label in METHODS.items():
            conditions.append(factory.condition(model, method, label, chosen, method=method))
        if "4.4" in tables:
            specialist = factory.condition(
                model,
                "intercpt_specialist",
                "asks first, specialist",
                own,
                template="translate-{kind}",
            )
            conditions.append(specialist)
    if "4.5" in tables or "figure-4.5" in tables:
        users = models if "figure-4.5" in tables else models[1:]
        for user in users:
            shown = _shown(user, LOCAL if options.backbone is not None else None)
            other_user = factory.condition(
                models[0],
                f"intercpt_user_{slug(shown)}",
                f"asks first, {shown} answers",
                own,
                user=user,
            )
            conditions.append(other_user)
    return [condition for condition in conditions if condition.runs]


def _shown(model: str, url: str | None) -> str:
    """Return the name of a model in rows; of a folder on this machine, its last part."""
    return Path(model).name if url == LOCAL else model


def slug(model: str) -> str:
    """Return a model's name as part of a row's id."""
    return re.sub(r"[^a-z0-9.]+", "_", model.casefold()).strip("_")


def _outputs(measurement: Measurement) -> list[str]:
    return [conversation["output"] for conversation in measurement.details["conversations"]]


def _row(condition: Condition, measured: Measured, sets: Sets, scorers: Sequence[Scorer]) -> Row:
    """Return the metrics and the total cost of a condition."""
    values: dict[str, Metric] = {}
    total: Counter[str] = Counter()
    for run in condition.runs:
        measurement = measured[run.id]
        metrics_of_run = dict(measurement.row.metrics)
        for scorer in scorers:
            scores = score_rows(scorer, run.kind, sets[run.kind, run.language], _outputs(measurement))
            metrics_of_run.update(scores)
        for name, value in metrics_of_run.items():
            values[f"{run.kind}_{run.language}_{name}"] = value
        total.update(measurement.details["cost"])
    return Row(id=condition.id, label=condition.label, metrics={**values, **total})


def _priced(row: Row, condition: Condition, measured: Measured, bill: Bill, user: str | None) -> Row:
    """Add the price of a row's conversations.

    A row has none if a server did not report the tokens of some calls, or if another user than that of the options
    answered, whose prices are not known.
    """
    users = {run.user for run in condition.runs}
    if users not in ({None}, {user}):
        return row
    total = Cost()
    answered = Cost()
    for run in condition.runs:
        details = measured[run.id].details
        counts = {name: details["cost"].get(name, 0) for name in Cost.model_fields}
        total = total + Cost.parse(counts)
        answered = answered + Cost.parse(details.get("user_cost", {}))
    written = Cost(
        calls=total.calls - answered.calls,
        prompt_tokens=total.prompt_tokens - answered.prompt_tokens,
        new_tokens=total.new_tokens - answered.new_tokens,
        unknown=total.unknown - answered.unknown,
    )
    price = bill.translator.of(total) if users == {None} else bill.total(written, answered)
    if price is None:
        return row
    return row.model_copy(update={"metrics": {**row.metrics, "price": round(price, 6)}})


def _mistakes(conditions: Sequence[Condition], measured: Measured) -> dict[str, Any]:
    """Return the mistakes of the chains, by row, kind and language."""
    mistakes: dict[str, Any] = {}
    for condition in conditions:
        if condition.id.endswith("-intercpt"):
            mistakes[condition.id] = {
                f"{run.kind}_{run.language}": measured[run.id].details["mistakes"] for run in condition.runs
            }
    return mistakes


def _significance(conditions: Sequence[Condition], measured: Measured, sets: Sets) -> dict[str, Any]:
    """Return p-values of the baselines' differences from the chain, by model, kind and language."""
    systems: defaultdict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(dict)
    for condition in conditions:
        method = condition.id.rpartition("-")[2]
        if method not in METHODS:
            continue
        for run in condition.runs:
            systems[run.model, run.kind, run.language][method] = _outputs(measured[run.id])
    p_values: dict[str, Any] = {}
    for (model, kind, language), outputs in systems.items():
        if kind != "polysemy":
            name = f"{slug(model)}_{kind}_{language}"
            p_values[name] = metrics.significance(outputs, sets[kind, language], language)
    return p_values


def paper_rows(rows: Sequence[Row]) -> list[PaperRow]:
    """Return PaLM's figures for every row whose id ends in a method of the paper, limited to the row's metrics."""
    papers: list[PaperRow] = []
    for row in rows:
        method = row.id.rpartition("-")[2]
        for figures in published(__file__, (method,)):
            shown = {name: value for name, value in figures.metrics.items() if name in row.metrics}
            if shown:
                papers.append(PaperRow(id=row.id, metrics=shown, where=figures.where))
    return papers


def _plots(rows: Sequence[Row]) -> dict[str, Figure]:
    """Plot Figures 4.3 (with one model: its three methods), 4.4, 4.5 and 4.6, if there are rows for them."""
    ends = tuple(f"-{method}" for method in METHODS)
    methods = [row for row in rows if row.id.endswith(ends)]
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
        labels = _bar_labels(selected, metric)
        if labels:
            figures[name] = bars(selected, labels, "%")
    return figures


def _bar_labels(rows: Sequence[Row], metric: str) -> dict[str, str]:
    """Return the labels of the first six keys of a metric in the rows, such as `it_fr_accuracy`."""
    labels: dict[str, str] = {}
    for row in rows:
        for key in row.metrics:
            if len(labels) < 6 and re.search(rf"_{metric}(?:_\w+)?$", key):
                labels[key] = key.replace("_", " ")
    return labels


class PronounTranslator:
    """Translates a sentence by the gender of the pronouns in its text, or of the answer if the text has none.

    An example whose context shows no gender by a pronoun counts as masculine, since only the difference between the two
    translations matters.

    Args:
        example: the example to translate.
    """

    name = "pronoun translator"

    def __init__(self, example: AmbiguousExample) -> None:
        self._example = example

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Ask for the gender, or translate by it."""
        if prompt.label == "Question":
            return Reply(_QUESTION)
        parts = dict(prompt.parts)
        gender = english_gender(parts["text"]) or ANSWERS.get(parts.get("answer", ""))
        if gender == (self._example.label or "masculine"):
            return Reply(self._example.reference)
        return Reply(self._example.contrast or "")


def needed_rows(data: Path, limit: int) -> list[Row]:
    """Measure precision and recall of asking, in percent, for each language whose files exist.

    MT-GenEval has sentences about people whose gender only the preceding sentence shows. With that sentence no question
    is needed. Without it a question is needed if the feminine and the masculine translation differ. The translator
    always asks. The chain asks the question if its expected gain exceeds the threshold.

    Recall is 100% by construction: without the preceding sentence this translator has no pronoun to read, so the gain
    is one bit exactly if the translations differ. Only precision is a measurement. `precision_always` is the precision
    of asking every time.

    Args:
        data: folder of the data sets.
        limit: maximum number of examples per language.
    """
    folder = data / "ambig" / "mt_geneval"
    rows: list[Row] = []
    for language in NEEDED_LANGUAGES:
        file = folder / f"geneval-context-wikiprofessions-2to1-test.en_{language}.en"
        if file.exists():
            examples = mt_geneval_contexts(folder, language)
            rows.append(language_row(language, examples[:limit]))
    return rows


def language_row(language: str, examples: Sequence[AmbiguousExample]) -> Row:
    """Return the row of a language; every example counts with and without its context."""
    decisions: list[Decision] = []
    for example in examples:
        decisions.append(decision(example, with_context=False))
        decisions.append(decision(example, with_context=True))
    asked = [entry for entry in decisions if entry.asked]
    needed = [entry for entry in decisions if entry.needed]
    right = [entry for entry in asked if entry.needed]
    metrics: dict[str, Metric] = {
        "precision": share(len(right), len(asked)),
        "recall": share(len(right), len(needed)),
        "precision_always": share(len(needed), len(decisions)),
        "asked": len(asked),
        "needed": len(needed),
        "texts": len(decisions),
        "calls": sum(entry.cost.calls for entry in decisions),
    }
    return Row(id=f"needed_{language}", label=f"needed, {language}", metrics=metrics)


class Decision(NamedTuple):
    """Whether a question was asked, whether it was needed, and the cost of the conversation."""

    asked: bool
    needed: bool
    cost: Cost


def decision(example: AmbiguousExample, with_context: bool) -> Decision:
    """Hold a conversation about an example, with or without its context in the text."""
    text = example.source
    if with_context:
        text = " ".join([*example.context, example.source])
    differ = normalize_text(example.reference) != normalize_text(example.contrast or "")
    start = Conversation.start(text, "translate", example.language, threshold=THRESHOLD, any_language=True)
    conversation = Chain(PronounTranslator(example)).run(start)
    return Decision(
        asked=conversation.turns[0].kind == "asked",
        needed=differ and not with_context,
        cost=conversation.cost,
    )
