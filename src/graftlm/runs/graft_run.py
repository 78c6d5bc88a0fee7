"""The run of one graft on text: train it on its frozen backbone, measure both, save the graft.

Runs that sample the backbone's own text come before it, where they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Self

from accelerate import PartialState
from accelerate.utils import set_seed
from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig, Mixture, SelfSourceConfig, SourceConfig, build_documents, build_mixture
from graftlm.data.boundaries import check_boundaries
from graftlm.data.mixture import build_blocks
from graftlm.data.own_text import marked_ids, read_own_text
from graftlm.data.own_text_sampling import sample_own_text
from graftlm.evaluation import Row
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.evaluator import BACKBONE_ROW, BackboneEvaluator, EvaluationConfig, load_tests
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.metric_text import format_metric
from graftlm.files.digests import digest, file_digest
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import FitsOnText, Graft, GraftConfig, ReadsModels, ReplacesModel, graft_config
from graftlm.runs.run import Run, RunContext, Trainee, TrainingRun
from graftlm.store.artifact import load_graft, save_graft
from graftlm.store.card import model_card
from graftlm.store.manifest import TENSORS_NAME
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary
from graftlm.training.stateful import StatefulBatches, StatefulModel

GRAFT_NAME = "graft"  # of what a run trains, among those that are attached
SAMPLES = "samples.jsonl"
_CACHED_BATCHES = 4
_BATCHES: dict[tuple[BackboneConfig, str, int], Mixture] = {}  # the newest, shared by the runs of this process
AnyGraft = Annotated[
    SerializeAsAny[GraftConfig],
    BeforeValidator(lambda value: value if isinstance(value, GraftConfig) else graft_config(value)),
]
"""The config of any kind of graft, chosen by its key `kind`."""


class SamplingRun(Run):
    """Samples text from one backbone; every run with these settings shares the file."""

    backbone: BackboneConfig
    source: SelfSourceConfig
    length: int

    @classmethod
    def of(cls, backbone: BackboneConfig, source: SelfSourceConfig, length: int) -> Self:
        """The run that samples texts of at most `length` tokens, where the source names no length."""
        source = source.model_copy(update={"length": source.length or length})
        settings = [backbone.model_dump(mode="json"), source.model_dump(mode="json")]
        name = f"own-text-{digest(settings)[:8]}"
        return cls(id=name, label=source.name, backbone=backbone, source=source, length=length)

    def artefacts(self) -> tuple[str, ...]:
        return (SAMPLES,)

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        context.log(f"Sampling {self.source.tokens:,} tokens of {backbone.name}'s own text.")
        started = perf_counter()
        with PartialState().main_process_first():  # the others read its file
            path, show = context.folder / SAMPLES, context.progress
            samples = sample_own_text(backbone, self.source, self.length, path, key=context.key, progress=show)
        chats = sum(sample.is_chat for sample in samples)
        if backbone.need_tokenizer().chat_template:
            context.log(f"Of {len(samples):,} texts, {chats:,} are conversations.")
        metrics: dict[str, Any] = {
            "texts": len(samples),
            "tokens": sum(sample.tokens for sample in samples),
            "chat_texts": chats,
            "seconds": perf_counter() - started,
        }
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics))

    @classmethod
    def release(cls) -> None:
        load_shared.cache_clear()


@lru_cache(maxsize=2)
def load_shared(backbone: BackboneConfig) -> Backbone:
    """A loaded backbone, which the runs of one process share."""
    return backbone.load()


@dataclass(frozen=True)
class GraftEvaluation:
    """What measures a trained graft.

    Attributes:
        evaluator: the evaluator of the run's backbone, made before training.
        start: the weights before training by name; empty if evaluation does not need them.
    """

    evaluator: BackboneEvaluator
    start: Mapping[str, Tensor]


class GraftRun(TrainingRun):
    """One graft on one backbone, trained on text; without a graft, the bare backbone.

    The grafts of the runs in `depends_on` are attached before it, frozen; with `continues` the last of them is not, and
    trains on in the place of a new one.
    """

    continues: bool = False
    backbone: BackboneConfig
    graft: AnyGraft | None = None
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        settings["evaluation"].pop("forgetting_budget")
        if not self.data.stream:
            del settings["data"]["stream"]
        if not self.continues:
            del settings["continues"]
        if self.graft is None:
            settings["data"] = {"test": settings["data"]["test"], "length": settings["data"]["length"]}
            del settings["training"]
        return settings

    def model_post_init(self, _context: Any) -> None:
        if self.graft is not None and self.training.steps and not self.data.stream:
            self.graft.check_rows(self.data.length)

    def artefacts(self) -> tuple[str, ...]:
        return () if self.graft is None else ("graft/graft.json",)

    def check(self) -> None:
        """Attach an untrained graft, so that settings which don't fit the backbone are an error at once."""
        if self.graft is not None:
            backbone = load_shared(self.backbone)
            with GraftedModel(backbone, {GRAFT_NAME: self.graft.graft_class(self.graft, backbone)}):
                pass

    def needs(self) -> Sequence[SamplingRun]:
        return [] if self.graft is None else [*self._old_samples(), *self._test_samples()]

    def _old_samples(self) -> list[SamplingRun]:
        """The runs that sample the old text to train on."""
        if not (self.training.steps and self.data.replay_fraction):
            return []
        sources = [source for source in self.data.old if isinstance(source, SelfSourceConfig)]
        return [SamplingRun.of(self.backbone, source, self.data.length) for source in sources]

    def _test_samples(self) -> list[SamplingRun]:
        """The run that samples the text to measure on: plainly, as the divergence is over the backbone's own texts."""
        if not self.evaluation.own_tokens:
            return []
        settings = self.evaluation
        source = SelfSourceConfig(self=True, tokens=settings.own_tokens, seed=settings.own_seed)
        return [SamplingRun.of(self.backbone, source, self._scored_length)]

    @property
    def _scored_length(self) -> int:
        return self.evaluation.length or self.data.length

    def evaluator(self, dependencies: Mapping[str, Path] | None = None) -> BackboneEvaluator:
        """The evaluator of the run's backbone; runs of one process share it.

        `dependencies` are the folders of the runs of `needs`; without them, own_kl is left out.
        """
        test = self.data.model_dump_json(include={"test"})
        files = [dependencies[run.id] / SAMPLES for run in self._test_samples()] if dependencies else []
        settings = self.evaluation.model_dump_json()
        return _load_evaluator(self.backbone, test, settings, self._scored_length, files[0] if files else None)

    def measure(self, context: RunContext) -> Measurement:
        if self.graft is None:
            evaluator = self.evaluator()
            parameters = count_parameters(evaluator.backbone.model.parameters())
            context.log(f"Backbone {evaluator.backbone.name}: {parameters:,} parameters, frozen.")
            return evaluator.measure_backbone(self.label or BACKBONE_ROW, self.id)
        return super().measure(context)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee]:
        assert self.graft is not None, "a bare backbone is not trained"
        evaluator = self.evaluator(context.dependencies)
        backbone = evaluator.backbone
        batches = self._batches(backbone, context.dependencies) if self.training.steps else None
        set_seed(self.training.seed)
        earlier = {name: load_graft(context.dependencies[name] / "graft", backbone) for name in self.depends_on}
        files = [context.dependencies[name] / "graft" / TENSORS_NAME for name in self.depends_on]
        continued = earlier.popitem()[1] if self.continues and earlier else None
        graft = continued or self.graft.graft_class(self.graft, backbone)
        identity: dict[str, Any] = {"graft": self.graft.model_dump(mode="json"), "backbone": backbone.fingerprint.id}
        identity |= {"data": batches.fingerprint() if batches else None, "old_objective": self.data.old_objective}
        if files:
            identity["trained_after"] = [file_digest(file) for file in files]
        if isinstance(graft, ReadsModels):
            identity["frozen_models"] = {name: model.fingerprint.id for name, model in graft.frozen_models().items()}
        _ = evaluator.backbone_scores, evaluator.backbone_outcomes  # before the graft is attached
        steps = self.training.steps
        label = self.label or self.graft.label
        context.log(f"Training {label} for {steps:,} steps." if steps else f"Fitting {label}.")
        if isinstance(graft, FitsOnText) and continued is None:
            sources = {name: map(SourceConfig.parse, map(dict, each)) for name, each in graft.sources().items()}
            graft.fit({name: [text.full_text for text in build_documents(each)] for name, each in sources.items()})
        grafts = {**earlier, GRAFT_NAME: graft}
        model_class = StatefulModel if self.data.stream else GraftedModel
        with model_class(backbone, grafts, old_objective=self.data.old_objective) as model:
            _freeze(model, earlier.values())
            moves = self.evaluation.strengths and self.training.steps
            weights = model.trainable_parameters() if moves else {}
            start = {name: weight.detach().clone() for name, weight in weights.items()}
            evaluation = GraftEvaluation(evaluator=evaluator, start=start)
            yield Trainee(model=model, batches=batches, identity=identity, evaluation=evaluation)

    def _batches(self, backbone: Backbone, dependencies: Mapping[str, Path]) -> Mixture:
        """The run's batches; runs of one process share those that keep no position."""
        check_boundaries(backbone.model, self.data.boundaries)
        key = (self.backbone, self.data.model_dump_json(exclude={"test"}), self.training.batch_size)
        batches = _BATCHES.pop(key, None)
        if batches is None or batches.state_dict():
            files = [dependencies[run.id] / SAMPLES for run in self._old_samples()]
            own_text = [marked_ids(sample) for file in files for sample in read_own_text(file)]
            if self.data.stream:
                blocks: Any = build_blocks(self.data.new, self.data, backbone.need_tokenizer())
                batches = StatefulBatches(blocks, self.training.batch_size)
            else:
                batches = build_mixture(self.data, backbone.need_tokenizer(), self.training.batch_size, own_text)
        while len(_BATCHES) >= _CACHED_BATCHES:
            del _BATCHES[next(iter(_BATCHES))]
        _BATCHES[key] = batches
        return batches

    def evaluate(self, trainee: Trainee) -> Measurement:
        assert self.graft is not None, "a bare backbone is not trained"
        label = self.label or self.graft.label
        return trainee.evaluation.evaluator.measure(trainee.model, self.id, label, trainee.evaluation.start)

    def save(
        self, trainee: Trainee, context: RunContext, summary: TrainingSummary | None, measurement: Measurement
    ) -> None:
        model: GraftedModel = trainee.model
        graft = model.grafts[GRAFT_NAME]
        assert isinstance(graft, Graft), "a grafted model holds grafts"
        training = self.record(summary, measurement)
        if self.depends_on and not self.continues:
            training["trained_after"] = list(self.depends_on)
        statistics = measurement.details.get("statistics", {})
        training["observed"] = {name: value for name, value in statistics.items() if _is_per_layer(value)}
        training["described"] = {name: v for name, v in statistics.items() if isinstance(v, int | float | str)}
        card = _model_card(model.backbone, graft.config, measurement, training.get("trained_after", ()))
        save_graft(graft, model.backbone, context.folder / "graft", training=training, card=card)

    @classmethod
    def release(cls) -> None:
        load_shared.cache_clear()
        _load_evaluator.cache_clear()
        _BATCHES.clear()


@lru_cache(maxsize=2)
def _load_evaluator(
    backbone: BackboneConfig, test: str, evaluation: str, length: int, own_text: Path | None
) -> BackboneEvaluator:
    sources = DataConfig.model_validate_json(test).test
    settings = EvaluationConfig.model_validate_json(evaluation)
    samples = [] if own_text is None else read_own_text(own_text)
    return BackboneEvaluator(load_shared(backbone), load_tests(sources), settings, length, samples)


def _freeze(model: GraftedModel, grafts: Iterable[Graft]) -> None:
    """Keep grafts as they are: their own parameters, and those of one that stand in the backbone's modules."""
    for frozen in grafts:
        frozen.requires_grad_(False)
        if isinstance(frozen, ReplacesModel):  # the one of this sort, so what trains is registered in its graft
            own = {id(parameter) for parameter in model.grafts.parameters()}
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.requires_grad and id(parameter) in own)


def check_sections(training: TrainingConfig, data: DataConfig, evaluation: EvaluationConfig) -> None:
    """Raise `ValueError` where sections of a recipe do not fit together."""
    if training.sharded and evaluation.strengths:
        raise ValueError(
            "strengths move weights back to their start, and training.sharded spreads them over processes: set "
            "sharded to false, or leave evaluation.strengths out"
        )
    if training.sharded and data.old_objective == "distil":
        raise ValueError(
            "old_objective distil runs the bare backbone beside the graft, and training.sharded spreads its "
            "weights over processes: set sharded to false, or old_objective to replay"
        )
    if data.stream and (data.boundaries != "joined" or data.replay_fraction or training.gradient_checkpointing):
        raise ValueError(
            "data.stream reads new text once and in order: set boundaries to joined, replay_fraction to 0 and "
            "training.gradient_checkpointing to false, or stream to false"
        )
    own = [source.seed for source in data.old if isinstance(source, SelfSourceConfig)] if data.replay_fraction else []
    if evaluation.own_tokens and evaluation.own_seed in own:
        raise ValueError(
            f"evaluation.own_seed is {evaluation.own_seed}, as the seed of an old text that the backbone samples, and "
            "own_kl would be measured on text that was trained on: choose another"
        )


def _is_per_layer(value: Any) -> bool:
    """Whether a statistic has the form {text: one number a layer}."""
    layers = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(values, list) and all(isinstance(x, float) for x in values) for values in layers)


def _model_card(backbone: Backbone, config: GraftConfig, measurement: Measurement, trained_after: Sequence[str]) -> str:
    beside = f" with {', '.join(trained_after)}" if trained_after else ""
    lines = [f"| {name} | {format_metric(name, value)} |" for name, value in measurement.row.metrics.items()]
    text = (
        "The backbone's weights are not in this folder and were never changed. Log-perplexities are in nats per token, "
        f"those that end in bpb in bits per byte.\n\n| metric | measured{beside} |\n|---|---|\n" + "\n".join(lines)
    )
    return model_card(backbone.name, config.label, text, several=bool(trained_after))
