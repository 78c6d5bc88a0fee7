"""The run of one language model: train all of its weights on text, and measure bits per byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from accelerate import PartialState
from pydantic import BeforeValidator, Field
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import fingerprint
from graftlm.backbone.backbone import move
from graftlm.config import Config
from graftlm.data import DataConfig, Document, Mixture, SourceConfig, TokenBlocks, build_mixture
from graftlm.data.mixture import build_blocks
from graftlm.data.sources import read_documents
from graftlm.evaluation import Interval, Metric, Results, Row, score
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.evaluator import load_tests
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.runs.run import RunContext, Trainee, TrainingRun
from graftlm.training import language_model
from graftlm.training.config import TrainingConfig
from graftlm.training.language_model import MIN_VOCAB_SIZE
from graftlm.training.loop import TrainingSummary
from graftlm.training.stateful import StatefulBatches


class TokenizerConfig(Config):
    """The tokenizer: an existing one, or one that is learned from the training text."""

    name: str | None = Field(None, min_length=1, description="A name on the Hugging Face hub, or a folder.")
    vocab_size: int | None = Field(
        None, ge=MIN_VOCAB_SIZE, description="Learn a byte-level BPE tokenizer of at most this many tokens instead."
    )
    characters: int = Field(20_000_000, ge=1, description="Characters of text to learn the tokenizer from, at most.")

    def _problems(self) -> Iterator[str]:
        if (self.name is None) == (self.vocab_size is None):
            yield "a tokenizer has either a name or a vocab_size"


class LanguageDataConfig(Config):
    """Training and test texts of a language model."""

    train: list[SourceConfig] = Field(min_length=1, description="Training texts.")
    test: dict[str, list[SourceConfig]] = Field({}, description="Test texts by name, disjoint from the training texts.")
    length: int = Field(1024, ge=2, description="Tokens per row.")
    boundaries: Literal["joined", "separate", "whole"] = Field(
        "joined",
        description="joined: documents of a row make one stream with end-of-text tokens between them. separate: "
        "attention stays inside each document, which needs a model with position ids. whole: separate, and a document "
        "that fits into a row is never cut.",
    )
    seed: int = Field(0, ge=0, description="Orders the rows.")
    stream: bool = Field(
        False,
        description="Each row continues that of the step before, and the model keeps its state without gradients: for "
        "texts that are longer than a row, and models with a recurrent state.",
    )

    def _problems(self) -> Iterator[str]:
        if self.stream and self.boundaries != "joined":
            yield "a stream joins its documents: set boundaries to joined, or stream to false"
        if self.stream and any(source.streaming for source in self.train):
            yield "a stream is cut from text in memory: set streaming or stream to false"

    def packed(self) -> DataConfig:
        """The data section that packing takes."""
        same = {name: getattr(self, name) for name in ("length", "boundaries", "test", "seed")}
        return DataConfig(new=self.train, replay_fraction=0, **same)


class LengthsConfig(Config):
    """How test texts are scored: bits per byte in windows of several lengths."""

    lengths: list[Annotated[int, Field(ge=3)]] = Field(
        [], description="Tokens per window; the training length is always measured."
    )
    tokens_per_pass: int = Field(16_384, ge=1, description="Tokens in a forward pass; a longer window is alone.")
    limit_tokens: int | None = Field(50_000, ge=1, description="Tokens scored per test set; all when null.")
    precision: Literal["fp32", "bf16"] = "fp32"


class _LanguageSettings(Config):
    model: str | dict[str, Any] = Field(
        description="A pretrained model (a name on the hub, or a folder), or the config of a new one: its model_type "
        "in transformers, and any of its keys."
    )
    tokenizer: Annotated[
        TokenizerConfig | None, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
    ] = Field(None, description="A name or folder, or how to learn one; the pretrained model's when absent.")
    data: LanguageDataConfig
    training: TrainingConfig
    evaluation: LengthsConfig = LengthsConfig()
    device: str | None = Field(None, description="Such as cuda; by default the fastest there is.")

    @property
    def lengths(self) -> list[int]:
        """Lengths of the windows that are scored, the training length included."""
        return sorted({*self.evaluation.lengths, self.data.length})


class LanguageModelRecipe(_LanguageSettings):
    """A training run of all weights of a language model."""

    kind: Literal["language-model"] = Field("language-model", description="Marks the recipe of a language model.")
    out: str = Field("runs/model", description="Folder for the model, its report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if self.training.steps == 0:
            yield "a language model learns by steps: set training.steps to 1 or more"
        if isinstance(self.model, dict) and not isinstance(self.model.get("model_type"), str):
            yield "a new model has a model_type, such as llama: name one under model"
        if isinstance(self.model, dict) and self.tokenizer is None:
            yield "a new model has no tokenizer: name one, or learn one, as in tokenizer: {vocab_size: 4096}"

    def run(self) -> LanguageModelRun:
        """The run that trains the recipe's model."""
        settings = {name: getattr(self, name) for name in _LanguageSettings.model_fields}
        label = self.model if isinstance(self.model, str) else str(self.model["model_type"])
        return LanguageModelRun(id="model", label=label, folder=".", **settings)

    def plots(self, results: Results) -> dict[str, Any]:
        """Bits per byte by length, where several lengths were measured."""
        from graftlm.evaluation import plots  # matplotlib takes half a second to import

        metrics, length = results.rows[0].metrics, self.data.length
        names = [name for name in self.data.test if f"bpb_{name}_at_{length}" in metrics]
        curves = {name: [(at, metrics[f"bpb_{name}_at_{at}"]) for at in self.lengths] for name in names}
        return {"bits-per-byte-by-length": plots.by_length(curves, trained=length)} if curves else {}


@dataclass(frozen=True)
class LanguageEvaluation:
    """What measures a language model: its tokenizer, and test documents by set."""

    tokenizer: PreTrainedTokenizerBase
    tests: Mapping[str, Sequence[Document]]


class LanguageModelRun(_LanguageSettings, TrainingRun):
    """Train all weights of a causal language model on text, and measure bits per byte."""

    def artefacts(self) -> tuple[str, ...]:
        return ("model/config.json",)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee]:
        tokenizer = self._load_tokenizer(context.folder)
        model = self._load_model(tokenizer)
        batches = self._batches(tokenizer)
        tests = load_tests(self.data.test)
        start = fingerprint(model).id if isinstance(self.model, str) else self.model
        rows = self.training.batch_size * self.data.length
        parameters = count_parameters(model.parameters())
        context.log(f"A {model.config.model_type} model of {parameters:,} parameters.")
        context.log(f"Training it for {self.training.steps:,} steps of {rows:,} tokens.")
        identity = {"model": start, "data": batches.fingerprint()}
        yield Trainee(
            model=language_model.LanguageModel(model),
            batches=batches,
            identity=identity,
            evaluation=LanguageEvaluation(tokenizer=tokenizer, tests=tests),
        )

    def _load_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """The named tokenizer, or one that is learned once into `folder/tokenizer`."""
        if self.tokenizer is None:
            assert isinstance(self.model, str), "a recipe's own check"
            return language_model.read_tokenizer(self.model)
        if self.tokenizer.name is not None:
            return language_model.read_tokenizer(self.tokenizer.name)
        learned = self.tokenizer

        def learn(path: Path) -> None:
            texts = _first_texts(self.data.train, learned.characters)
            assert learned.vocab_size is not None, "a config's own check"
            language_model.train_tokenizer(texts, learned.vocab_size).save_pretrained(path)

        settings = self.model_dump(mode="json", include={"tokenizer": True, "data": {"train"}})
        with PartialState().main_process_first():
            return language_model.read_tokenizer(str(fill_once(folder / "tokenizer", settings, learn)))

    def _load_model(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The untrained or pretrained model on its device."""
        if isinstance(self.model, str):
            model = language_model.read_model(self.model, tokenizer)
        else:
            model = language_model.new_model(self.model, tokenizer, self.training.seed)
        if self.data.stream:
            language_model.check_stream(model, self.training)
        language_model.check_rows(
            model, length=self.data.length, longest=max(self.lengths), boundaries=self.data.boundaries
        )
        device: Any = self.device or PartialState().device
        move(model, device)
        return model

    def _batches(self, tokenizer: PreTrainedTokenizerBase) -> Mixture:
        size, data = self.training.batch_size, self.data.packed()
        if not self.data.stream:
            return build_mixture(data, tokenizer, size)
        blocks = build_blocks(self.data.train, data, tokenizer)
        assert isinstance(blocks, TokenBlocks), "a config's own check"
        return StatefulBatches(blocks, size)

    def evaluate(self, trainee: Trainee) -> Measurement:
        model = trainee.model.model
        by_length = bits_per_byte(
            model, trainee.evaluation.tokenizer, trainee.evaluation.tests, self.lengths, self.evaluation
        )
        metrics = metrics_by_length(by_length, self.data.length) | {"parameters": count_parameters(model.parameters())}
        row_id = model.config.model_type
        return Measurement(Row(id=row_id, label=self.label or row_id, metrics=metrics))

    def save(
        self, trainee: Trainee, context: RunContext, summary: TrainingSummary | None, measurement: Measurement
    ) -> None:
        language_model.save_model(trainee.model.model, trainee.evaluation.tokenizer, context.folder / "model")


def bits_per_byte(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tests: Mapping[str, Sequence[Document]],
    lengths: Sequence[int],
    settings: LengthsConfig,
) -> dict[str, dict[int, Interval]]:
    """Bits per byte of each test set by window length; every length scores the same tokens of text."""
    options = settings.model_dump(include={"precision", "limit_tokens"})
    intervals: dict[str, dict[int, Interval]] = {name: {} for name in tests}
    for name, documents in tests.items():
        for length in lengths:
            size = max(1, settings.tokens_per_pass // length)
            scores = score(model, tokenizer, documents, length=length, batch_size=size, **options)
            intervals[name][length] = scores.interval("bits_per_byte")
    return intervals


def metrics_by_length(values: Mapping[str, Mapping[int, Interval]], trained: int) -> dict[str, Metric]:
    """`bpb_<set>` at the training length and, with several lengths, `bpb_<set>_at_<length>`."""
    metrics: dict[str, Metric] = {}
    for name, by_length in values.items():
        if trained in by_length:
            metrics[f"bpb_{name}"] = by_length[trained]
        if len(by_length) > 1:
            metrics |= {f"bpb_{name}_at_{length}": value for length, value in by_length.items()}
    return metrics


def _first_texts(sources: Sequence[SourceConfig], characters: int) -> Iterator[str]:
    """The first characters of every source, the same number of each."""
    for source in sources:
        left = -(-characters // len(sources))
        for document in read_documents(source):
            yield document.full_text[:left]
            left -= len(document.full_text)
            if left <= 0:
                break
