"""What the compositions on real text share: trained rows, how their rates are chosen, and tasks with a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import Options
from experiments.study import Measurements, Study, over_seeds
from experiments.tasks import PromptTask, measure_tasks
from graftlm.backbone import load_backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig, SourceConfig
from graftlm.evaluation import Aim, Interval, Row, value_of
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.graft_run import EvaluationConfig, GraftRun, count_parameters
from graftlm.runs.run import Measurement, RunContext, Trainee
from graftlm.training import TrainingConfig

# Of the rows that compositions are trained on: English that the anchor has read.
REPLAY_FRACTION = 0.2
# Learning rates to try, by kind of graft.
RATES = {"composition": (3e-3,), "lora": (1e-2,)}


class ComposedRow(NamedTuple):
    """A row that is trained: a graft on the anchor, its data, and the metrics whose sum chooses its learning rate.

    `times` the study's steps, at one of `rates`, which are those of its kind of graft where it has none.
    """

    id: str
    label: str
    graft: Mapping[str, Any]
    data: DataConfig
    chosen_by: tuple[str, ...]
    times: int = 1
    rates: tuple[float, ...] = ()


class PromptedRun(GraftRun):
    """A run that is also measured on tasks with a prompt."""

    prompts: tuple[PromptTask, ...] = ()

    def measure(self, context: RunContext) -> Measurement:
        measurement = super().measure(context)
        if self.graft is None:
            backbone = self.evaluator().backbone
            measurement.add_metrics(measure_tasks(backbone.model, backbone.need_tokenizer(), self.prompts))
        return measurement

    def evaluate(self, trainee: Trainee) -> Measurement:
        measurement = super().evaluate(trainee)
        measurement.add_metrics(measure_tasks(trainee.model, self.evaluator().tokenizer, self.prompts))
        return measurement


class ComposedStudy(Study):
    """One experiment's anchor, settings and folders.

    Args:
        anchor: folder of the model that every row is trained on.
        steps: of every row.
        sets: what the bare models are measured on as well.
        validation: tasks that choose, measured for every cell.
        tasks: measured for the chosen cells.
    """

    def __init__(
        self,
        options: Options,
        anchor: Path,
        *,
        steps: int,
        batch_size: int,
        sets: DataConfig,
        validation: Sequence[PromptTask] = (),
        tasks: Sequence[PromptTask] = (),
    ) -> None:
        super().__init__(options)
        self.anchor = anchor
        self.steps, self.batch_size = steps, batch_size
        self.evaluation = EvaluationConfig(limit_tokens=None, decode_prompts=0)  # whole texts, whatever the tokenizer
        self.sets, self.validation, self.tasks = sets, validation, tasks

    def training(self, rate: float, seed: int, times: int = 1) -> TrainingConfig:
        """The numbers of one run of so many times the study's steps."""
        steps = times * self.steps
        return TrainingConfig(
            steps=steps,
            batch_size=self.batch_size,
            learning_rate=rate,
            warmup_steps=max(1, min(10, steps // 4)),
            precision="bf16",
            seed=seed,
            checkpoint_every=self.steps,
            keep_checkpoints=1,
        )

    def cell(self, row: ComposedRow, rate: float, seed: int) -> GraftRun:
        """One run of a row."""
        return GraftRun(
            id=f"{row.id}_lr{rate:g}_s{seed}",
            label=row.label,
            backbone=self._model(self.anchor),
            graft=graft_config(dict(row.graft)),
            data=row.data.model_copy(update={"seed": seed}),
            training=self.training(rate, seed, row.times),
            evaluation=self.evaluation,
        )

    def bare(self, name: str, folder: Path) -> GraftRun:
        """A model as it is."""
        data, training = self.sets, self.training(1e-3, 0)
        return GraftRun(id=name, backbone=self._model(folder), data=data, training=training, evaluation=self.evaluation)

    def measure_all(self, runs: Sequence[GraftRun], tasks: Sequence[PromptTask], title: str) -> Measurements:
        """Train and measure runs on texts and on tasks with a prompt; by id.

        One training can have two measurements: on the validation tasks alone, and on all tasks.
        """
        suffix = ".validation" if tuple(tasks) == tuple(self.validation) else ""
        prompted = []
        for run in runs:
            fields = {name: getattr(run, name) for name in GraftRun.model_fields}
            fields |= {"id": run.id + suffix, "folder": run.id}
            prompted.append(PromptedRun(**fields, prompts=tuple(tasks)))
        measured = self.execute(prompted, title)
        return {name.removesuffix(suffix): measurement for name, measurement in measured.items()}

    def tune(self, rows: Sequence[ComposedRow]) -> tuple[Measurements, dict[str, float]]:
        """The learning rate of every row: the lowest sum of its metrics on validation text, with the first seed."""
        seed = self.seeds[0]
        rates = {row.id: row.rates or RATES[row.graft["kind"]] for row in rows}
        choices = [row for row in rows if len(rates[row.id]) > 1]
        tried = {row.id: {rate: self.cell(row, rate, seed) for rate in rates[row.id]} for row in choices}
        cells = [cell for of_row in tried.values() for cell in of_row.values()]
        measured = self.measure_all(cells, self.validation, "learning rates") if cells else {}
        best = {
            row.id: min(tried[row.id], key=lambda rate: total(measured[tried[row.id][rate].id], row.chosen_by))
            for row in choices
        }
        return measured, {name: best.get(name, of_row[0]) for name, of_row in rates.items()}

    def try_out(self, rows: Sequence[ComposedRow], rate: float) -> Measurements:
        """Rows at one learning rate with the first seed, on validation text."""
        return self.measure_all([self.cell(row, rate, self.seeds[0]) for row in rows], self.validation, "variants")

    def measure(
        self, rows: Sequence[ComposedRow], rates: Mapping[str, float], title: str
    ) -> dict[str, list[Measurement]]:
        """Every row at its rate, one measurement a seed."""
        cells = {row.id: [self.cell(row, rates[row.id], seed) for seed in self.seeds] for row in rows}
        flat = [cell for of_row in cells.values() for cell in of_row]
        measured = self.measure_all(flat, [*self.validation, *self.tasks], title)
        return {row_id: [measured[cell.id] for cell in of_row] for row_id, of_row in cells.items()}

    def measure_bare(self, models: Mapping[str, Path]) -> Measurements:
        """Models as they are."""
        cells = [self.bare(name, folder) for name, folder in models.items()]
        return self.measure_all(cells, [*self.validation, *self.tasks], "the parents")

    def setting(self) -> dict[str, Any]:
        """What a reader needs to know beside the rows."""
        training = self.training(1e-3, 0).model_dump(mode="json", exclude={"learning_rate", "seed"})
        return {
            "training": training,
            "rates": {kind: list(rates) for kind, rates in RATES.items()},
            "replay_fraction": REPLAY_FRACTION,
        }

    def _model(self, folder: Path) -> BackboneConfig:
        return BackboneConfig(name=str(folder), device=self.options.device)


def total(measured: Measurement, names: Iterable[str]) -> float:
    """The sum of some metrics."""
    return sum(value_of(measured.row.metrics[name]) for name in names)


def composition(augmenting: Mapping[str, Path], **more: Any) -> dict[str, Any]:
    """The graft section of a composition: every layer of the augmenting models with as many of the anchor's."""
    models = {name: {"name": str(folder)} for name, folder in augmenting.items()}
    settings = {"stride": 1, "positions": "local", "norm": "pre"}
    return {"kind": "composition", "augmenting": models, **settings, **more}


def equal_lora(anchor: Path, graft: Mapping[str, Any]) -> dict[str, Any]:
    """The graft section of LoRA with as many trainable parameters as another graft, up to the rounding of its rank."""
    backbone = load_backbone(str(anchor))
    extra = count_parameters(build_graft(graft_config(dict(graft)), backbone).parameters())
    return {"kind": "lora", "capacity": extra / count_parameters(backbone.model.parameters())}


def row_of(measured: Sequence[Measurement], row_id: str, label: str, anchor: Measurement) -> Row:
    """One row over seeds, with what was forgotten in bits per byte as well."""
    for measurement in measured:
        if "forgotten" in measurement.row.metrics:
            lost = total(measurement, ["old_bpb"]) - total(anchor, ["old_bpb"])
            more = {"forgotten_bpb": Interval(mean=lost, low=lost, high=lost)}
            measurement.row = measurement.row.model_copy(update={"metrics": measurement.row.metrics | more})
    return over_seeds(measured, row_id, label)


def rows_of(
    bare: Mapping[str, Measurement], main: Mapping[str, Sequence[Measurement]], labels: Mapping[str, str]
) -> list[Row]:
    """The rows of all tables: the bare models, the anchor `m_b` among them, and what was trained."""
    anchor = bare["m_b"]
    rows = [row_of([measurement], name, labels[name], anchor) for name, measurement in bare.items()]
    return rows + [row_of(measured, name, labels[name], anchor) for name, measured in main.items()]


def details_of(
    rates: Mapping[str, float],
    tuning: Measurements,
    main: Mapping[str, Sequence[Measurement]],
    setting: Mapping[str, Any],
) -> dict[str, Any]:
    """What stands beside the rows: rates and what chose them, and the first seed's statistics and losses."""
    return {
        "rates": dict(rates),
        "validation": {cell: plain(measurement, ("validation",)) for cell, measurement in tuning.items()},
        "statistics": {row_id: measured[0].details.get("statistics", {}) for row_id, measured in main.items()},
        "losses": {row_id: measured[0].details.get("losses", []) for row_id, measured in main.items()},
        "setting": dict(setting),
    }


def plain(measured: Measurement, starts: tuple[str, ...]) -> dict[str, float]:
    """The plain numbers of the metrics whose names start so."""
    return {name: value_of(metric) for name, metric in measured.row.metrics.items() if name.startswith(starts)}


def only(row: Row, *endings: str) -> Row:
    """A row with those metrics alone whose names end so."""
    return row.model_copy(update={"metrics": {k: v for k, v in row.metrics.items() if k.endswith(endings)}})


def more_forgotten(rows: Sequence[Row]) -> list[Aim]:
    """The aim that a composition forgets no more than LoRA; a difference, for either may have gained."""
    forgotten = {row.id: value_of(row.metrics["forgotten"]) for row in rows if "forgotten" in row.metrics}
    if not {"composition", "lora"} <= forgotten.keys():
        return []
    more = forgotten["composition"] - forgotten["lora"]
    text = "English forgotten beyond LoRA's, nats per token"
    return [Aim(text=text, metric="forgotten", aim=0.0, measured=more, met=more <= 0)]


def source(texts: Path, name: str, **more: Any) -> SourceConfig:
    """One of the experiment's own texts."""
    return SourceConfig(path=str(texts / f"{name}.jsonl"), **more)
