"""Train one method after the other on one backbone, and measure what each learned, forgot and cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from torch import Tensor

from graftlm.artifact import save_graft
from graftlm.backbone import Backbone
from graftlm.data import Document, Mixture, SourceConfig
from graftlm.data.sources import read_some
from graftlm.errors import RecipeError
from graftlm.evaluation import TaskResult, Row, Scores, measure_task, read_task, score
from graftlm.evaluation.metrics import MemoryWatch, decode_speed
from graftlm.evaluation.report import learning_and_forgetting
from graftlm.io import write_atomically
from graftlm.grafts import FitsOnText, GraftConfig, GraftedModel, ReadsModels, build_graft, graft_class
from graftlm.training.config import TrainingConfig
from graftlm.training.history import read_history
from graftlm.training.loop import TrainingSummary, train
from graftlm.runs.recipe import EvaluationConfig

OLD_SET, NEW_SET = "old", "new"
_OBSERVED_TOKENS = 4096


@dataclass
class Measurement:
    """What one method measured.

    Attributes:
        row: its metrics.
        statistics: what the graft showed: open shares per domain, spectra.
        losses: (step, loss) pairs of its training.
        tasks: what there is to say of each task beside its metric, a few answers among it.
    """

    row: Row
    statistics: dict[str, Any] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)
    tasks: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        more = {"statistics": self.statistics, "losses": self.losses, "tasks": self.tasks}
        return {"row": self.row.model_dump(mode="json")} | more

    def add_training(self, summary: TrainingSummary, peak_memory: int) -> None:
        """Put the cost of training into the row, and its losses beside it."""
        cost = {"train_tokens_per_s": summary.tokens_per_s, "peak_memory_bytes": peak_memory}
        self.row = self.row.model_copy(update={"metrics": self.row.metrics | cost})
        self.losses = [[line["step"], line["loss"]] for line in read_history(summary.history)]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measurement:
        return cls(Row.model_validate(values["row"]), values["statistics"], values["losses"], values["tasks"])


class Bench:
    """One backbone, its test texts and its tasks; methods are trained and measured on it one after the other.

    Args:
        backbone: the frozen model.
        tests: test documents by set; `old` and `new` give what was forgotten and learned, any other set stands beside
            them.
        evaluation: how much is measured, and the tasks, whose files are read now.
        length: tokens per window where `evaluation` does not say.
    """

    def __init__(
        self, backbone: Backbone, tests: Mapping[str, Sequence[Document]], evaluation: EvaluationConfig, length: int
    ) -> None:
        self.backbone = backbone
        self.tokenizer = backbone.need_tokenizer()
        self.tests = tests
        self.evaluation = evaluation
        self.length = evaluation.length or length
        self.tasks = {name: read_task(task) for name, task in evaluation.tasks.items()}
        self._scores: dict[str, Scores] = {}
        self._outcomes: dict[str, TaskResult] = {}

    def backbone_measurement(self) -> Measurement:
        """The bare backbone's row."""
        metrics = dict(learning_and_forgetting({}, self.backbone_scores())) | self._speeds(self.backbone.model)
        metrics["total_parameters"] = count_weights(self.backbone.model.parameters())
        outcomes = self.backbone_outcomes()
        for name, outcome in outcomes.items():
            metrics |= outcome.metrics(name)
        return Measurement(Row(id="backbone", label="backbone", metrics=metrics), tasks=self._describe(outcomes))

    def backbone_scores(self) -> dict[str, Scores]:
        """The bare backbone's scores, measured once, while no graft is attached."""
        if not self._scores:
            self._scores = self._score(self.backbone.model)
        return self._scores

    def backbone_outcomes(self) -> dict[str, TaskResult]:
        """How the bare backbone does on the tasks, measured once, while no graft is attached."""
        if not self._outcomes:
            self._outcomes = self._do_tasks(self.backbone.model)
        return self._outcomes

    def run(
        self,
        row_id: str,
        config: GraftConfig,
        mixture: Mixture | None,
        training: TrainingConfig,
        out: Path,
        *,
        label: str = "",
        progress: bool = True,
    ) -> Measurement:
        """Train a fresh graft into `out/graft` and measure it; a finished run of the same settings is read back.

        Raises:
            RecipeError: there are steps to do, and no mixture to do them on.
        """
        identity = {"graft": config.model_dump(mode="json"), "backbone": self.backbone.fingerprint.id}
        identity["data"] = mixture.fingerprint() if mixture else None
        set_seed(training.seed)
        graft = build_graft(config, self.backbone)
        if isinstance(graft, ReadsModels):
            identity["frozen_models"] = {name: model.fingerprint.id for name, model in graft.frozen_models().items()}
        sources = graft.sources() if isinstance(graft, FitsOnText) else {}
        texts = {name: _whole_texts(own) for name, own in sources.items()}
        identity["texts"] = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
        key = self._key(row_id, identity, training)
        kept = _read_measurement(out, key)
        if kept is not None:
            return kept
        self.backbone_scores()
        self.backbone_outcomes()
        if isinstance(graft, FitsOnText):
            graft.fit(texts)
        with GraftedModel(self.backbone, {"graft": graft}) as model:
            summary, peak = None, 0
            if training.steps:
                with MemoryWatch() as memory:
                    summary = train(model, _need(mixture), training, out, identity=identity, progress=progress)
                peak = memory.peak
            if not PartialState().is_main_process:
                return Measurement(Row(id=row_id, label=label or row_id, metrics={}))
            measurement = self.measure(model, row_id, label or graft_label(config))
            if summary is not None:
                measurement.add_training(summary, peak)
            save_graft(
                model.grafts["graft"],  # type: ignore[arg-type]  # a ModuleDict forgets what it holds
                self.backbone,
                out / "graft",
                training=_summary(summary, training, measurement),
                card=_card(self.backbone, config, measurement),
            )
        write_atomically(out / "measurement.json", json.dumps({"key": key} | measurement.to_json()).encode())
        return measurement

    def measure(self, model: GraftedModel, row_id: str, label: str) -> Measurement:
        """Measure a model that is trained already."""
        metrics = dict(learning_and_forgetting(self.backbone_scores(), self._score(model))) | self._speeds(model)
        metrics["trainable_parameters"] = count_weights(model.trainable_parameters().values())
        metrics["total_parameters"] = count_weights(model.parameters())
        outcomes = self._do_tasks(model)
        for name, outcome in outcomes.items():
            metrics |= outcome.metrics(name) | outcome.gain(name, self.backbone_outcomes()[name])
        row = Row(id=row_id, label=label, metrics=metrics)
        return Measurement(row, self._statistics(model), tasks=self._describe(outcomes))

    def _key(self, row_id: str, identity: Mapping[str, Any], training: TrainingConfig) -> str:
        """What must be the same for a finished run to be read back."""
        texts = hashlib.sha256()
        for name, documents in self.tests.items():
            texts.update(name.encode())
            for document in documents:
                texts.update(document.text.encode())
                texts.update(document.prompt.encode())
        for name, task in self.tasks.items():
            texts.update(repr((name, task.shots, task.examples)).encode())
        measured = [self.evaluation.model_dump_json(), self.length, texts.hexdigest()]
        said = json.dumps([row_id, identity, training.model_dump_json(), measured], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    def _score(self, model: Any) -> dict[str, Scores]:
        settings = self.evaluation
        return {
            name: score(
                model,
                self.tokenizer,
                documents,
                length=self.length,
                batch_size=settings.batch_size,
                precision=settings.precision,
                limit_tokens=settings.limit_tokens,
            )
            for name, documents in self.tests.items()
        }

    def _do_tasks(self, model: Any) -> dict[str, TaskResult]:
        size, precision = self.evaluation.batch_size, self.evaluation.precision
        return {
            name: measure_task(model, self.tokenizer, task, batch_size=size, precision=precision)
            for name, task in self.tasks.items()
        }

    def _describe(self, outcomes: Mapping[str, TaskResult]) -> dict[str, Any]:
        return {name: outcome.describe(self.tasks[name]) for name, outcome in outcomes.items()}

    def _speeds(self, model: Any) -> dict[str, Any]:
        count, tokens = self.evaluation.decode_prompts, self.evaluation.decode_tokens
        sets = [name for name in (OLD_SET, NEW_SET) if name in self.tests] if count else []
        prompts = {name: _prompts(self.tests[name], count) for name in sets}
        return {
            f"decode_{name}_tokens_per_s": decode_speed(model, self.tokenizer, texts, tokens)
            for name, texts in prompts.items()
        }

    def _statistics(self, model: GraftedModel) -> dict[str, Any]:
        graft = model.grafts["graft"]
        statistics: dict[str, Any] = dict(graft.describe(self.backbone))  # type: ignore[operator]
        for name in (OLD_SET, NEW_SET):
            for key, value in self.observe(model, name).items():
                statistics.setdefault(key, {})[name] = value
        return statistics

    def observe(self, model: GraftedModel, name: str) -> dict[str, list[float]]:
        """What the graft shows on the start of a test set, such as open shares: one number a layer."""
        rows = self._rows(name)
        if rows is None:
            return {}
        return {key: value.tolist() for key, value in model.observe(input_ids=rows, use_cache=False)["graft"].items()}

    def _rows(self, name: str) -> torch.Tensor | None:
        """(rows, length) tokens of the start of a test set, one shorter row of a short one; None for no tokens."""
        text = "\n".join(document.whole[: 8 * _OBSERVED_TOKENS] for document in list(self.tests.get(name, ()))[:8])
        ids = self.tokenizer(text[: 8 * _OBSERVED_TOKENS], add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            return None
        length = min(len(ids), self.length)
        rows = max(1, min(len(ids), _OBSERVED_TOKENS) // length)
        return torch.tensor(ids[: rows * length], device=self.backbone.device).view(rows, length)


def graft_label(config: GraftConfig) -> str:
    """What tables call a kind of graft."""
    return graft_class(config.kind).label or config.kind


def count_weights(parameters: Iterable[Tensor]) -> int:
    """How many numbers some parameters hold."""
    return sum(parameter.numel() for parameter in parameters)


def _need(mixture: Mixture | None) -> Mixture:
    if mixture is None:
        raise RecipeError("A run with steps needs text: name some under data.new, or set training.steps to 0.")
    return mixture


def _whole_texts(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """The documents that a graft names, as it learns from them without gradients."""
    return [document.whole for source in sources for document in read_some(SourceConfig.parse(dict(source)))]


def _summary(summary: TrainingSummary | None, training: TrainingConfig, measurement: Measurement) -> dict[str, Any]:
    metrics = measurement.row.model_dump(mode="json")["metrics"]
    return {
        "steps": summary.steps if summary else 0,
        "tokens": summary.tokens if summary else 0,
        "training": training.model_dump(mode="json"),
        "measured": metrics,
        "observed": {key: value for key, value in measurement.statistics.items() if _is_per_layer(value)},
        "described": {
            key: value for key, value in measurement.statistics.items() if isinstance(value, int | float | str)
        },
    }


def _is_per_layer(value: Any) -> bool:
    """Whether a statistic is of the form {text: one number a layer}, as those that `observe` gives."""
    each = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(layers, list) and all(isinstance(one, float) for one in layers) for layers in each)


def _card(backbone: Backbone, config: GraftConfig, measurement: Measurement) -> str:
    lines = [f"| {name} | {_shown(value)} |" for name, value in measurement.row.metrics.items()]
    return (
        f"---\nlibrary_name: graftlm\nbase_model: {backbone.name}\n---\n\n"
        f"# {graft_label(config)} for {backbone.name}\n\n"
        "The backbone's weights are not in this folder and were never changed. Log-perplexities are in nats per token, "
        "those that end in bpb in bits per byte.\n\n"
        "| metric | measured |\n|---|---|\n" + "\n".join(lines) + "\n\n"
        "```python\nfrom graftlm import GraftedModel, load_backbone, load_graft\n\n"
        f"backbone = load_backbone({backbone.name!r})\n"
        'model = GraftedModel(backbone, {"graft": load_graft("this-folder", backbone)})\n```\n'
    )


def _shown(value: Any) -> str:
    if hasattr(value, "mean"):
        return f"{value.mean:.4f} ({value.low:.4f} to {value.high:.4f})"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _prompts(documents: Sequence[Document], count: int) -> list[str]:
    """The starts of evenly spaced stretches of the texts."""
    text = "\n".join(document.whole[:100_000] for document in list(documents)[:8])
    return [text[start : start + 400] for start in range(0, len(text), max(1, len(text) // count))][:count]


def _read_measurement(out: Path, key: str) -> Measurement | None:
    try:
        values = json.loads((out / "measurement.json").read_text(encoding="utf-8"))
        return Measurement.from_json(values) if values["key"] == key else None
    except (OSError, ValueError, KeyError):
        return None
