"""Train a graft with heads on the rows of several tasks, measure it on theirs, and leave both in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, set_seed
from torch import Tensor

from graftlm.backbone import max_sequence_length
from graftlm.artifact import read_manifest, save_graft
from graftlm.backbone import Backbone
from graftlm.data.encoding import RowEncoder
from graftlm.data.labelled import LabelledConfig, TaskRows, read_held_out_rows, read_training_rows, score_metric
from graftlm.data.labelled_batches import LabelledMixture, Score, TaskBatch
from graftlm.errors import RecipeError
from graftlm.evaluation import MemoryWatch, Results, Row, write_report
from graftlm.evaluation.labelled import TaskScore, TaskTestSet, measure_labelled, predictor, summary_metrics
from graftlm.io import write_atomically
from graftlm.grafts import Graft, GraftConfig, GraftedModel, HasHeads, build_graft, graft_config
from graftlm.grafts.heads import TaskSpec, uncertainty
from graftlm.runs.bench import Measurement, count_weights, graft_label
from graftlm.training.loop import TrainingSummary, train
from graftlm.runs.task_recipe import TaskRecipe

MEASURED, SAMPLER = "measurement.json", "sampler.json"
_START_ROWS = 64  # of each task, shown to a graft before training
_REMEMBERED = ("type", "text", "label", "columns", "separator", "metric")


def train_tasks(recipe: TaskRecipe, out: Path, *, progress: bool = True, say: Callable[[str], None] = print) -> Results:
    """Train the recipe's graft and report; the graft is in `out/graft`, and a finished run is read back.

    Raises:
        RecipeError: the graft has no heads, or rows are longer than the model.
        DataError: a row can't be read.
    """
    main = PartialState().is_main_process
    if main:
        write_atomically(out / "recipe.yaml", recipe.to_yaml().encode())
    rows = {name: read_training_rows(name, task) for name, task in recipe.tasks.items()}
    tests = {split: _held_out(recipe, rows, split) for split in ("test", "validation")}
    for task in rows.values():
        for note in task.notes:
            say(note)
    backbone = recipe.backbone.load(kind="encoder")
    check_length(backbone, recipe.length)
    config = with_tasks(recipe.graft, {name: task.spec for name, task in rows.items()})
    set_seed(recipe.training.seed)
    graft = build_graft(config, backbone)
    measured = _run(recipe, backbone, graft, rows, tests, out, progress, say)
    results = _results(recipe, measured)
    if main:
        write_report(results, out)
    return results


def with_tasks(config: GraftConfig, specs: Mapping[str, TaskSpec]) -> GraftConfig:
    """The config of a graft that is to learn these tasks."""
    values = config.model_dump(mode="json") | {"tasks": {name: spec.model_dump() for name, spec in specs.items()}}
    return graft_config(values)


def check_length(backbone: Backbone, length: int) -> None:
    """Make sure that a model can read rows of so many tokens.

    Raises:
        RecipeError: it has fewer positions.
    """
    most = max_sequence_length(backbone, backbone.need_tokenizer())
    if length > most:
        raise RecipeError(f"length is {length}, but {backbone.name} reads {most} tokens: lower the length to that.")


def row_encoder(backbone: Backbone, length: int, truncation: bool = True) -> RowEncoder:
    """Turns rows into tokens for a backbone; second texts are marked where the model tells them apart."""
    segments = knows_segments(backbone)
    return RowEncoder(backbone.need_tokenizer(), length, segments=segments, truncation=truncation)


def knows_segments(backbone: Backbone) -> bool:
    """Whether a model has an embedding for the second text of a pair."""
    return (getattr(backbone.config, "type_vocab_size", None) or 0) > 1


def scorer(model: Any, specs: Sequence[TaskSpec], precision: Any = "fp32") -> Score:
    """How unsure a model is of rows, in evaluation mode; the first process decides, so that all choose alike.

    Args:
        model: predicts by heads.
        specs: what each task's head says, by the task's number.
        precision: what it computes in.
    """
    predict = predictor(model, precision)

    def score(batch: TaskBatch) -> Sequence[float | None]:
        predictions = predict(batch)
        each = [specs[number] for number in batch.task.tolist()]
        with torch.no_grad():
            found = uncertainty(predictions, each, batch.targets)
            nothing = torch.zeros((), device=predictions[0].device)
            values = torch.stack([nothing if one is None else one.to(nothing.device) for one in found])
        if PartialState().num_processes > 1:
            values = cast("Tensor", broadcast(values.to(PartialState().device)))
        return [None if one is None else value for one, value in zip(found, values.tolist(), strict=True)]

    return score


def build_task_mixture(recipe: TaskRecipe, model: GraftedModel, rows: Mapping[str, TaskRows]) -> LabelledMixture:
    """The batches of a recipe, chosen with the help of the model that learns from them."""
    backbone, tasks = model.backbone, tasks_of(model)
    return LabelledMixture(
        rows,
        backbone.need_tokenizer(),
        recipe.sampler,
        recipe.training.batch_size,
        recipe.training.seed,
        recipe.length,
        scorer(model, list(tasks.values()), recipe.training.precision),
        numbers={name: number for number, name in enumerate(tasks) if name in rows},
        segments=knows_segments(backbone),
        truncation=recipe.truncation,
    )


def tasks_of(model: GraftedModel) -> dict[str, TaskSpec]:
    """The tasks of the graft that has heads."""
    graft = model.grafts["graft"]
    return graft.tasks() if isinstance(graft, HasHeads) else {}


def task_tests(
    tasks: Mapping[str, TaskSpec], configs: Mapping[str, LabelledConfig], rows: Mapping[str, TaskRows]
) -> dict[str, TaskTestSet]:
    """Rows to measure on, each with its task's number and score."""
    numbers = {name: number for number, name in enumerate(tasks)}
    return {
        name: TaskTestSet(numbers[name], held_out, score_metric(configs[name], held_out.spec))
        for name, held_out in rows.items()
    }


def _held_out(recipe: TaskRecipe, rows: Mapping[str, TaskRows], split: Any) -> dict[str, TaskRows]:
    return {
        name: read_held_out_rows(name, task, rows[name].spec, split)
        for name, task in recipe.tasks.items()
        if task.files(split)
    }


def _run(
    recipe: TaskRecipe,
    backbone: Backbone,
    graft: Graft,
    rows: Mapping[str, TaskRows],
    tests: Mapping[str, Mapping[str, TaskRows]],
    out: Path,
    progress: bool,
    say: Callable[[str], None],
) -> Measurement:
    """Train, save and measure, or read back what was measured."""
    training, kind = recipe.training, graft.config.kind
    with GraftedModel(backbone, {"graft": graft}) as model:
        mixture = build_task_mixture(recipe, model, rows)
        identity = {"graft": recipe.graft.model_dump(mode="json"), "backbone": backbone.fingerprint.id}
        identity["data"] = mixture.fingerprint()
        key = _key(recipe, identity, tests)
        if (kept := _read(out, key)) is not None:
            return kept
        for note in mixture.notes:
            say(note)
        weights = count_weights(backbone.model.parameters())
        counted = sum(map(len, rows.values()))
        say(f"Backbone {backbone.name}: {weights:,} parameters; {len(rows)} tasks of {counted:,} rows together.")
        samples = {name: mixture.sample(name, _START_ROWS).to(backbone.device).inputs() for name in rows}
        started = graft.start_tasks(model, samples) if isinstance(graft, HasHeads) else {}
        for name, choice in started.items():
            say(f"The task {name} starts from {json.dumps(choice)}.")
        summary, peak = None, 0
        if training.steps:
            say(f"Training {graft_label(graft.config)} for {training.steps:,} steps.")
            with MemoryWatch() as memory:
                summary = train(model, mixture, training, out, identity=identity, progress=progress)
            peak = memory.peak
        measured = Measurement(Row(id=kind, label=graft_label(graft.config), metrics={}))
        if not PartialState().is_main_process:
            return measured
        scores = {split: _measure(recipe, model, each) for split, each in tests.items()}
        measured = _measurement(measured, model, weights, mixture, scores)
        if started:
            measured.statistics["started"] = started
        if summary is not None:
            measured.add_training(summary, peak)
        _write(recipe, backbone, graft, measured, summary, mixture, out)
    write_atomically(out / MEASURED, json.dumps({"key": key} | measured.to_json()).encode())
    return measured


def _measure(recipe: TaskRecipe, model: GraftedModel, rows: Mapping[str, TaskRows]) -> dict[str, TaskScore]:
    encoder = row_encoder(model.backbone, recipe.length)  # of test rows, too long ones are always cut
    settings = recipe.evaluation
    tests = task_tests(tasks_of(model), recipe.tasks, rows)
    return measure_labelled(predictor(model, settings.precision), encoder, tests, batch_size=settings.batch_size)


def _measurement(
    measured: Measurement,
    model: GraftedModel,
    weights: int,
    mixture: LabelledMixture,
    scores: Mapping[str, Mapping[str, TaskScore]],
) -> Measurement:
    trained, total = (count_weights(each) for each in (model.trainable_parameters().values(), model.parameters()))
    metrics: dict[str, Any] = dict(summary_metrics(scores["test"]))
    if scores["validation"]:
        metrics |= {f"{name}_validation": value for name, value in summary_metrics(scores["validation"]).items()}
    metrics |= {
        "data_share": mixture.report()["data_share"],
        "trained_parameters_ratio": trained / weights,
        "total_parameters_ratio": total / weights,
        "trainable_parameters": trained,
        "total_parameters": total,
    }
    measured.row = measured.row.model_copy(update={"metrics": metrics})
    measured.tasks = {split: {name: one.to_json() for name, one in each.items()} for split, each in scores.items()}
    return measured


def _write(
    recipe: TaskRecipe,
    backbone: Backbone,
    graft: Graft,
    measured: Measurement,
    summary: TrainingSummary | None,
    mixture: LabelledMixture,
    out: Path,
) -> None:
    """The sampler's report, and the graft with all that using it needs to know."""
    write_atomically(out / SAMPLER, json.dumps(mixture.report()).encode())
    own = {name: task.model_dump(mode="json", include=set(_REMEMBERED)) for name, task in recipe.tasks.items()}
    training = {
        "steps": summary.steps if summary else 0,
        "tokens": summary.tokens if summary else 0,
        "length": recipe.length,
        "training": recipe.training.model_dump(mode="json"),
        "measured": measured.row.model_dump(mode="json")["metrics"],
        "tasks": _of_extended(recipe.graft) | own,
    }
    save_graft(graft, backbone, out / "graft", training=training)


def _of_extended(config: GraftConfig) -> dict[str, Any]:
    """What the graft that is extended remembers of its tasks' rows."""
    folder = getattr(config, "extends", None)
    found = read_manifest(folder).training.get("tasks") if folder else None
    return dict(found) if isinstance(found, dict) else {}


def _key(recipe: TaskRecipe, identity: Mapping[str, Any], tests: Mapping[str, Mapping[str, TaskRows]]) -> str:
    """What must be the same for a finished run to be read back."""
    read = {split: {name: rows.fingerprint() for name, rows in each.items()} for split, each in tests.items()}
    metrics = {name: task.metric for name, task in recipe.tasks.items()}
    settings = [recipe.training.model_dump_json(), recipe.evaluation.model_dump_json(), recipe.length, metrics]
    return hashlib.sha256(json.dumps([identity, settings, read], sort_keys=True).encode()).hexdigest()


def _read(out: Path, key: str) -> Measurement | None:
    try:
        values = json.loads((out / MEASURED).read_text(encoding="utf-8"))
        whole = values["key"] == key and (out / "graft" / "graft.json").exists()
        return Measurement.from_json(values) if whole else None
    except (OSError, ValueError, KeyError):
        return None


def _results(recipe: TaskRecipe, measured: Measurement) -> Results:
    row = measured.row.id
    details: dict[str, Any] = {"tasks": {row: measured.tasks}}
    if measured.losses:
        details["losses"] = {row: measured.losses}
    if measured.statistics:
        details["statistics"] = {row: measured.statistics}
    return Results.here("train", [measured.row], seeds=[recipe.training.seed], details=details)
