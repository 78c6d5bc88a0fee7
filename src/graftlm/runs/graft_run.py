"""The run of one graft on text: train it beside its frozen backbone, measure both, save the graft.

Before it, where they are needed, come runs that sample the backbone's own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from pydantic import BeforeValidator, Field, SerializeAsAny
from torch import Tensor

from graftlm.artifact import TENSORS_NAME, load_graft, model_card, save_graft
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, Document, Mixture, SelfSourceConfig, SourceConfig, build_documents, build_mixture
from graftlm.data.own_text import OwnText, marked_ids, read_own_text, sample_own_text
from graftlm.data.packing import build_blocks, check_boundaries
from graftlm.evaluation import Row, Scores, TaskConfig, TaskResult, measure_task, read_task, score
from graftlm.evaluation.metrics import decode_speed, learning_and_forgetting, own_windows, score_windows
from graftlm.evaluation.results import Interval
from graftlm.evaluation.tables import format_metric
from graftlm.grafts import FitsOnText, Graft, GraftConfig, GraftedModel, ReadsModels, ReplacesModel, graft_config
from graftlm.io import digest, file_digest
from graftlm.runs.run import Measurement, Run, RunContext, Trainee, TrainingRun
from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary
from graftlm.training.stateful import StatefulBatches, StatefulModel

OLD_SET, NEW_SET = "old", "new"
BACKBONE_ROW = "backbone"
GRAFT_NAME = "graft"  # of what a run trains, among those that are attached
_SAMPLES = "samples.jsonl"
_OBSERVED_TOKENS = 4096
_TEST_SEED = 2**31 - 1  # of the text that own_kl is measured on, beside the small ones that people choose
_CACHED_BATCHES = 4
_BATCHES: dict[tuple[BackboneConfig, str, int], Mixture] = {}  # the newest, shared by the runs of this process

AnyGraft = Annotated[
    SerializeAsAny[GraftConfig],
    BeforeValidator(lambda value: value if isinstance(value, GraftConfig) else graft_config(value)),
]
"""The config of any kind of graft, chosen by its key `kind`."""


class EvaluationConfig(Config):
    """What is measured after training, on test texts and on tasks."""

    length: int | None = Field(None, ge=2, description="Tokens per window; the data's row length when absent.")
    batch_size: int = Field(16, ge=1)
    limit_tokens: int | None = Field(50_000, ge=1, description="Tokens scored per test set; all when null.")
    precision: Literal["fp32", "bf16"] = "fp32"
    decode_prompts: int = Field(2, ge=0, description="Prompts per domain for the decoding speed; 0 leaves it out.")
    decode_tokens: int = Field(32, ge=1, description="Tokens decoded per prompt.")
    tasks: dict[str, TaskConfig] = Field({}, description="Files of prompts and answers by name.")
    own_tokens: int = Field(
        4096,
        ge=0,
        description="Tokens of text that the backbone samples, on which own_kl measures the divergence from it; 0 "
        "leaves it out.",
    )
    own_seed: int = Field(_TEST_SEED, ge=0, description="Seed of that text.")
    strengths: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [],
        description="Measure the model also with its weights moved back: shares of the way from their start to where "
        "training took them.",
    )
    forgetting_budget: float | None = Field(
        None, description="Nats per token of the old domain that the run may lose; more makes it fail."
    )


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
        return (_SAMPLES,)

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        context.log(f"Sampling {self.source.tokens:,} tokens of {backbone.name}'s own text.")
        started = perf_counter()
        with PartialState().main_process_first():  # the others read its file
            path, show = context.folder / _SAMPLES, context.progress
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
        files = [dependencies[run.id] / _SAMPLES for run in self._test_samples()] if dependencies else []
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
            yield Trainee(model, batches, identity, evaluator=evaluator, start=start)

    def _batches(self, backbone: Backbone, dependencies: Mapping[str, Path]) -> Mixture:
        """The run's batches; runs of one process share those that keep no position."""
        check_boundaries(backbone.model, self.data.boundaries)
        key = (self.backbone, self.data.model_dump_json(exclude={"test"}), self.training.batch_size)
        batches = _BATCHES.pop(key, None)
        if batches is None or batches.state_dict():
            files = [dependencies[run.id] / _SAMPLES for run in self._old_samples()]
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
        return trainee.evaluator.measure(trainee.model, self.id, label, trainee.start)

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


def load_tests(test: Mapping[str, Sequence[SourceConfig]]) -> dict[str, list[Document]]:
    """Test documents by name of their set."""
    return {name: list(build_documents(sources)) for name, sources in test.items()}


@dataclass(eq=False)
class BackboneEvaluator:
    """Measures models that are built on one backbone, beside the bare backbone.

    Args:
        tests: test documents by set. `old` and `new` give `forgotten` and `learned`; other sets stand beside them.
        evaluation: what is measured; the files of its tasks are read now.
        length: tokens per window.
        own_text: texts that the backbone sampled, for own_kl and chat_kl.
    """

    backbone: Backbone
    tests: Mapping[str, Sequence[Document]]
    evaluation: EvaluationConfig
    length: int
    own_text: Sequence[OwnText] = ()

    def __post_init__(self) -> None:
        self.tokenizer = self.backbone.need_tokenizer()
        self.tasks = {name: read_task(task) for name, task in self.evaluation.tasks.items()}

    def measure_backbone(self, label: str = BACKBONE_ROW, row_id: str = BACKBONE_ROW) -> Measurement:
        """Measure the bare backbone."""
        metrics = dict(learning_and_forgetting({}, self.backbone_scores)) | self._speeds(self.backbone.model)
        metrics["total_parameters"] = count_parameters(self.backbone.model.parameters())
        outcomes = self.backbone_outcomes
        for name, outcome in outcomes.items():
            metrics |= outcome.metrics(name)
        return Measurement(Row(id=row_id, label=label, metrics=metrics), self._details({}, outcomes))

    @cached_property
    def backbone_scores(self) -> dict[str, Scores]:
        """The bare backbone's scores, measured once, while no graft is attached."""
        return self._score(self.backbone.model)

    @cached_property
    def backbone_outcomes(self) -> dict[str, TaskResult]:
        """The bare backbone's results on the tasks, measured once, while no graft is attached."""
        return self._do_tasks(self.backbone.model)

    def measure(
        self, model: GraftedModel, row_id: str, label: str, start: Mapping[str, Tensor] | None = None
    ) -> Measurement:
        """Measure a trained model, with `start`, its weights before training, also at the strengths."""
        scores, own = self._score(model), self._own_scores(model)
        metrics: dict[str, Any] = dict(learning_and_forgetting(self.backbone_scores, scores))
        metrics |= self._own_metrics(own) | self._speeds(model)
        metrics["trainable_parameters"] = count_parameters(model.trainable_parameters().values())
        metrics["total_parameters"] = count_parameters(model.parameters())
        outcomes = self._do_tasks(model)
        for name, outcome in outcomes.items():
            metrics |= outcome.metrics(name) | outcome.gain(name, self.backbone_outcomes[name])
        details = self._details(self._statistics(model), outcomes)
        if self.evaluation.strengths:
            details["strengths"] = self._at_strengths(model, start or {}, self._point(1.0, scores, own))
        return Measurement(Row(id=row_id, label=label, metrics=metrics), details)

    def _at_strengths(
        self, model: GraftedModel, start: Mapping[str, Tensor], trained: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """What a model learned and forgot at each strength, ordered; `trained` is its point at strength 1.

        At strength s each weight is start + s (trained - start); for fine-tuned weights the curve is that of WiSE-FT
        (Wortsman et al., 2022, arXiv 2109.01903). What learns without training has that one point.
        """
        points = []
        for strength in sorted(set(self.evaluation.strengths) - {1.0}) if start else []:
            with weights_moved_back(model.trainable_parameters(), start, strength):
                points.append(self._point(strength, self._score(model, divergence=False), self._own_scores(model)))
        return [*points, trained]

    def _point(self, strength: float, scores: Mapping[str, Scores], own: Scores | None) -> dict[str, Any]:
        """`strength`, `metrics` as in a row, and `windows`: the `nats` and `tokens` of each window, by what changed.

        `learned`, `forgotten` and `own_kl` are sums of such nats over sums of tokens, so that anything between two
        points has an interval.
        """
        metrics = learning_and_forgetting(self.backbone_scores, scores) | self._own_metrics(own)
        changes = {"own_kl": (own.kl, own.tokens)} if own and own.kl is not None else {}
        for name, key, sign in (("learned", NEW_SET, -1), ("forgotten", OLD_SET, 1)):
            if key in scores:
                changes[name] = (sign * (scores[key].nats - self.backbone_scores[key].nats), scores[key].tokens)
        return {
            "strength": strength,
            "metrics": {name: value.model_dump(mode="json") for name, value in metrics.items()},
            "windows": {n: {"nats": nats.tolist(), "tokens": tokens.tolist()} for n, (nats, tokens) in changes.items()},
        }

    def _details(self, statistics: Mapping[str, Any], outcomes: Mapping[str, TaskResult]) -> dict[str, Any]:
        tasks = {name: outcome.describe(self.tasks[name]) for name, outcome in outcomes.items()}
        details = {"statistics": dict(statistics), "tasks": tasks}
        return {name: value for name, value in details.items() if value}

    def _own_scores(self, model: Any) -> Scores | None:
        """Scores of the backbone's own text with the divergence from it; None without such text."""
        if not self.own_text:
            return None
        options = self.evaluation.model_dump(include={"batch_size", "precision"})
        windows, reference = own_windows(self.own_text), self.backbone.bare_model
        return score_windows(model, self.tokenizer, windows, reference=reference, **options).by_document()

    def _own_metrics(self, scores: Scores | None) -> dict[str, Interval]:
        """`own_kl` on all of the backbone's own text, and `chat_kl` on its conversations, in nats per token."""
        if scores is None:
            return {}
        chats = np.array([self.own_text[number].is_chat for number in scores.document])
        metrics = {"own_kl": scores.interval("kl_per_token")}
        if chats.any() and not chats.all():
            metrics["chat_kl"] = scores.subset(chats).interval("kl_per_token")
        return metrics

    def _score(self, model: Any, *, divergence: bool = True) -> dict[str, Scores]:
        """Scores by test set; those of a grafted model have the divergence from the bare backbone on new text."""
        options = self.evaluation.model_dump(include={"batch_size", "precision", "limit_tokens"})
        references = {NEW_SET: self.backbone.bare_model} if divergence and model is not self.backbone.model else {}
        return {
            name: score(model, self.tokenizer, documents, length=self.length, reference=references.get(name), **options)
            for name, documents in self.tests.items()
        }

    def _do_tasks(self, model: Any) -> dict[str, TaskResult]:
        options = self.evaluation.model_dump(include={"batch_size", "precision"})
        return {name: measure_task(model, self.tokenizer, task, **options) for name, task in self.tasks.items()}

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
        """What the graft shows on the start of a test set, such as shares of open gates: one number a layer."""
        text = "\n".join(document.full_text[: 8 * _OBSERVED_TOKENS] for document in list(self.tests.get(name, ()))[:8])
        ids = self.tokenizer(text[: 8 * _OBSERVED_TOKENS], add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            return {}
        length = min(len(ids), self.length)
        rows = max(1, min(len(ids), _OBSERVED_TOKENS) // length)
        inputs = torch.tensor(ids[: rows * length], device=self.backbone.device).view(rows, length)
        return {key: value.tolist() for key, value in model.observe(input_ids=inputs, use_cache=False)["graft"].items()}


@contextmanager
def weights_moved_back(
    weights: Mapping[str, torch.nn.Parameter], start: Mapping[str, Tensor], strength: float
) -> Iterator[None]:
    """Weights at start + strength (weight - start) in the block, and as they were behind it."""
    trained = {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(torch.lerp(start[name], trained[name], strength))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(trained[name])


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Total number of elements."""
    return sum(parameter.numel() for parameter in parameters)


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


def _prompts(documents: Sequence[Document], count: int) -> list[str]:
    """`count` prompts of 400 characters, evenly spaced in the texts."""
    text = "\n".join(document.full_text[:100_000] for document in list(documents)[:8])
    return [text[start : start + 400] for start in range(0, len(text), max(1, len(text) // count))][:count]


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
