"""One model that is trained on one task or several, and what it says to rows that it has not read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.conditional_tasks import peer
from experiments.conditional_tasks.covariance import covariance_similarity
from experiments.jobs import Job
from graftlm.artifact import load_graft, save_graft
from graftlm.backbone import Backbone, Site, load_backbone
from graftlm.data.labelled import LabelledConfig, TaskRows, read_held_out_rows, read_training_rows, score_metric
from graftlm.data.labelled_batches import LabelledMixture, RowEncoder, Score, TaskBatch, batches_by_length
from graftlm.data.samplers import SamplerConfig
from graftlm.evaluation.labelled import TaskTestSet, measure_labelled, predictor
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafts import GraftedModel, HasHeads, build_graft, graft_config
from graftlm.grafts.heads import uncertainty
from graftlm.runs.graft_run import count_parameters
from graftlm.training import TrainingConfig, train
from graftlm.training.checkpoint import read_history

GRAFT = "graft"
# Rows of each task whose first layer's inputs are compared, and from which a new task's start is chosen.
COMPARED = 64


class Cell(Job):
    """One training run.

    Args:
        encoder: folder of the backbone.
        tasks: the recipe's, with their files.
        graft: its config but for the tasks.
        length: tokens of a row.
        parts: which rows are asked afterwards.
        peer: of the package `adapters`: the interpreter, how many layers stay frozen, the inner width.
        old: the tasks of a graft that is extended; whether it still says the same of them is measured.
        kept: whether the graft is written to disk.
    """

    encoder: str
    device: str | None = None
    tasks: dict[str, LabelledConfig]
    graft: dict[str, Any]
    training: TrainingConfig
    sampler: SamplerConfig = SamplerConfig()
    length: int
    parts: tuple[str, ...] = ("validation", "test")
    peer: dict[str, Any] | None = None
    old: dict[str, LabelledConfig] = {}
    kept: bool = False


def measure(cell: Cell, folder: Path) -> Mapping[str, Any]:
    """Train, then ask: scores in points by part and task, the share of the data, parameters, losses.

    `seconds` are those of the process's own time, which stands still while other work has the core.
    """
    rows = {name: read_training_rows(name, config) for name, config in cell.tasks.items()}
    found = by_peer(cell, rows, folder) if cell.peer is not None else by_graft(cell, rows, folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a finished cell is read from its measurement
    return found


def by_graft(cell: Cell, rows: Mapping[str, TaskRows], folder: Path) -> dict[str, Any]:
    """A graft of ours."""
    backbone = _encoder(cell.encoder, cell.device)
    before = old_predictions(cell, backbone) if cell.old else {}
    torch.manual_seed(cell.training.seed)
    graft = build_graft(config_of(cell, rows), backbone)
    assert isinstance(graft, HasHeads)
    with GraftedModel(backbone, {GRAFT: graft}) as model:
        mixture = _mixture(cell, rows, backbone, graft, score_of(model, cell.training.precision))
        began = graft.start_tasks(model, {name: mixture.sample(name, COMPARED).inputs() for name in rows})
        started = time.process_time()
        done = train(model, mixture, cell.training, folder, identity={"cell": cell.key()}, progress=False)
        found: dict[str, Any] = {"seconds": time.process_time() - started, "began": began}
        numbers = {name: number for number, name in enumerate(graft.tasks())}
        predict, encoder = predictor(model, cell.training.precision), _row_encoder(cell, backbone)
        for part in cell.parts:
            tests = {name: held_out(cell, rows, name, part, numbers[name]) for name in rows}
            measured = measure_labelled(predict, encoder, tests, batch_size=cell.training.batch_size)
            found[part] = {name: score.value for name, score in measured.items()}
        found["losses"] = [[line["step"], line["loss"]] for line in read_history(done.history)]
        found |= parameters_of(model, backbone) | chosen_by(mixture)
        found["similarity"] = similarities(model, mixture) if len(rows) > 1 else {}
        if cell.old:
            found["old_changed"] = changed(before, predictions(cell, model))
        if cell.kept:
            save_graft(graft, backbone, folder / GRAFT)
    return found


def by_peer(cell: Cell, rows: Mapping[str, TaskRows], folder: Path) -> dict[str, Any]:
    """The package `adapters`, on the same batches."""
    assert cell.peer is not None, "a cell of the peer's says how"
    backbone = _encoder(cell.encoder, cell.device)
    encoder, mixture = _row_encoder(cell, backbone), _mixture(cell, rows, backbone, None, None)
    tests = {
        part: {name: held_out(cell, rows, name, part, number) for number, name in enumerate(rows)}
        for part in cell.parts
    }
    encoded = {part: {name: encoder.encode(test.rows).rows for name, test in of.items()} for part, of in tests.items()}
    exams = {
        part: [row for name, test in of.items() for row in peer.exam(encoded[part][name], test)]
        for part, of in tests.items()
    }
    batches = [list(peer.rows_of(mixture.batch(step))) for step in range(cell.training.steps)]
    told = peer.exercise(cell.encoder, cell.peer, rows, config_of(cell, rows), cell.training)
    said = peer.answers(told | {"batches": batches, "exams": exams}, folder, cell.peer["python"])
    found: dict[str, Any] = {key: said[key] for key in ("seconds", "trained", "total")}
    for part, of in tests.items():
        given = iter(said["answers"][part])
        found[part] = {name: peer.score(test, encoded[part][name], given) for name, test in of.items()}
    found["backbone"] = count_parameters(backbone.model.parameters())
    found["losses"] = [[step + 1, loss] for step, loss in enumerate(said["losses"])]
    return found | chosen_by(mixture)


def held_out(cell: Cell, rows: Mapping[str, TaskRows], name: str, part: str, number: int) -> TaskTestSet:
    """The rows of a part of a task."""
    config, spec = cell.tasks[name], rows[name].spec
    kept = read_held_out_rows(name, config, spec, part)  # type: ignore[arg-type]  # test or validation
    return TaskTestSet(number, kept, score_metric(config, spec))


def score_of(model: GraftedModel, precision: Literal["fp32", "bf16"]) -> Score:
    """How unsure the model is of rows, without dropout."""
    graft: Any = model.grafts[GRAFT]
    predict, specs = predictor(model, precision), list(graft.tasks().values())

    def score(batch: TaskBatch) -> list[float | None]:
        found = uncertainty(predict(batch), [specs[task] for task in batch.task.tolist()], batch.targets)
        return [None if one is None else float(one) for one in found]

    return score


def similarities(model: GraftedModel, mixture: LabelledMixture) -> dict[str, float]:
    """CovSim_i of each task: the mean covariance similarity of its first layer's inputs to every other task's."""
    # X^T X = R^T R of X = Q R: the same covariance from fewer rows.
    inputs = {name: torch.linalg.qr(first_inputs(model, mixture.sample(name, COMPARED)))[1] for name in mixture.tasks}
    pairs = {(one, other): covariance_similarity(inputs[one], inputs[other]) for one, other in combinations(inputs, 2)}
    others = len(inputs) - 1
    return {name: sum(value for pair, value in pairs.items() if name in pair) / others for name in inputs}


def first_inputs(model: GraftedModel, batch: TaskBatch) -> Tensor:
    """(n, d): what the first layer reads at each real token, behind everything that a graft puts there."""
    layer, _ = Backbone.wrap(model.model, kind="encoder").sites.module(Site("layer", 0))
    seen: list[Tensor] = []
    # Behind the graft's own hooks, which were registered before.
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        with evaluation_mode(model), torch.no_grad():
            model.predict(**batch.to(model.device).prediction_inputs())
    finally:
        hook.remove()
    return seen[0][batch.attention_mask.bool()].double().cpu()


def old_predictions(cell: Cell, backbone: Backbone) -> dict[str, list[Tensor]]:
    """What the graft that is to be extended predicts of its own tasks' validation rows."""
    graft = load_graft(cell.graft["extends"], backbone)
    with GraftedModel(backbone, {GRAFT: graft}) as model:
        return predictions(cell, model)


def predictions(cell: Cell, model: GraftedModel) -> dict[str, list[Tensor]]:
    """The same of any graft with these tasks."""
    graft: Any = model.grafts[GRAFT]
    predict, encoder = predictor(model), _row_encoder(cell, model.backbone)
    found: dict[str, list[Tensor]] = {}
    for number, (name, spec) in enumerate(graft.tasks().items()):
        if name in cell.old:
            rows = encoder.encode(read_held_out_rows(name, cell.old[name], spec, "validation")).rows
            batches = batches_by_length([(row, spec, number) for row in rows], cell.training.batch_size, 0)
            found[name] = [one for _, batch in batches for one in predict(batch)]
    return found


def changed(before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]]) -> int:
    """How many numbers of predictions differ."""
    return sum(
        int((one != other).sum()) for name in before for one, other in zip(before[name], after[name], strict=True)
    )


def parameters_of(model: GraftedModel, backbone: Backbone) -> dict[str, int]:
    """The backbone's weights, those that train, and all of the model with which tasks are served."""
    whole = count_parameters(backbone.model.parameters())
    graft: Any = model.grafts[GRAFT]
    trained = count_parameters(model.trainable_parameters().values())
    return {"backbone": whole, "trained": trained, "total": whole + count_parameters(graft.parameters())}


def chosen_by(mixture: LabelledMixture) -> dict[str, Any]:
    """What was trained on: the share of the rows, by task too, and how many were read to choose from."""
    report = mixture.report()
    return {key: report[key] for key in ("data_share", "data_share_by_task", "picked", "drawn", "steps")}


def config_of(cell: Cell, rows: Mapping[str, TaskRows]) -> Any:
    """The graft's config."""
    return graft_config(cell.graft | {"tasks": {name: task.spec.model_dump() for name, task in rows.items()}})


def weights_of(encoder: str, graft: Mapping[str, Any], tasks: int) -> tuple[int, int, int]:
    """The weights that a graft's modules add for so many tasks, heads left out; the encoder's layers and its width."""
    backbone = _encoder(encoder, None)
    specs = {f"task {n}": {"type": "regression"} for n in range(tasks)}
    built = build_graft(graft_config({**graft, "tasks": specs}), backbone)
    added = sum(weight.numel() for name, weight in built.named_parameters() if not name.startswith("heads"))
    return added, backbone.sites.n_layers, backbone.sites.width


def _row_encoder(cell: Cell, backbone: Backbone) -> RowEncoder:
    return RowEncoder(backbone.need_tokenizer(), cell.length)


def _mixture(
    cell: Cell, rows: Mapping[str, TaskRows], backbone: Backbone, graft: HasHeads | None, score: Score | None
) -> LabelledMixture:
    names = list(rows if graft is None else graft.tasks())
    training = cell.training
    return LabelledMixture(
        rows,
        backbone.need_tokenizer(),
        cell.sampler,
        training.batch_size,
        training.seed,
        cell.length,
        score,
        numbers={name: names.index(name) for name in rows},
    )


@lru_cache(maxsize=1)
def _encoder(folder: str, device: str | None) -> Backbone:
    """The backbone, kept for the next cells of this process."""
    return load_backbone(folder, kind="encoder", device=device)
