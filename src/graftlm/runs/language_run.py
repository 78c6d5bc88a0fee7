"""The run of one language model: train all of its weights on text, and measure bits per byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from graftlm.backbone import fingerprint
from graftlm.backbone.backbone import move
from graftlm.config import Config
from graftlm.data import DataConfig, Document, Mixture, SourceConfig, TokenBlocks, build_mixture
from graftlm.data.mixture import build_blocks
from graftlm.data.source_config import used_sources
from graftlm.data.sources import first_texts
from graftlm.evaluation import Interval, Metric, Results, Row, Scores, score
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.evaluator import load_tests
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.scored_text import scored_parts
from graftlm.files.writing import fill_once
from graftlm.processes import process_state
from graftlm.runs.run import RunContext, Trainee, TrainingRun, steps_text
from graftlm.training import language_model
from graftlm.training.config import TrainingConfig
from graftlm.training.language_model import MIN_VOCAB_SIZE, LanguageModel
from graftlm.training.loop import TrainingSummary
from graftlm.training.stateful import StatefulBatches

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TokenizerConfig(Config):
    """The tokenizer: an existing one, or one that is learned from the training text."""

    name: str | None = Field(None, min_length=1, description="A name on the Hugging Face hub, or a folder.")
    vocab_size: int | None = Field(
        None, ge=MIN_VOCAB_SIZE, description="Learn a byte-level BPE tokenizer of at most this many tokens instead."
    )
    characters: int = Field(
        20_000_000, ge=1, description="Maximum number of characters of text to learn the tokenizer from."
    )

    def _problems(self) -> Iterator[str]:
        if (self.name is None) == (self.vocab_size is None):
            yield "a tokenizer needs either a name or a vocab_size: give one of them"


class LanguageDataConfig(Config):
    """Training and test texts of a language model."""

    train: Annotated[list[SourceConfig], AfterValidator(used_sources)] = Field(
        min_length=1, description="Training texts."
    )
    test: dict[str, list[SourceConfig]] = Field({}, description="Test texts by name, disjoint from the training texts.")
    length: int = Field(1024, ge=3, description="Tokens per row.")
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
        if self.stream and any(source.weight is not None for source in self.train):
            yield "a stream reads each text in its order, so its sources have no weights: leave them out"
        if any(source.set is not None for source in self.train):
            yield "the training texts of a language model have no named sets: leave the key set out"

    def packed(self) -> DataConfig:
        """Return these texts as the data section of a recipe of grafts, with no old text."""
        return DataConfig(
            new=self.train,
            replay_fraction=0,
            length=self.length,
            boundaries=self.boundaries,
            test=self.test,
            seed=self.seed,
        )


class LengthsConfig(Config):
    """How test texts are scored: bits per byte in windows of several lengths."""

    lengths: list[Annotated[int, Field(ge=3)]] = Field(
        [], description="Tokens per window; the training length is always measured."
    )
    tokens_per_pass: int = Field(
        16_384, ge=1, description="Tokens in a forward pass; a longer window gets a separate pass."
    )
    limit_tokens: int | None = Field(
        50_000, ge=1, description="Tokens scored per test set, equal shares of its sources; all when null."
    )
    precision: Literal["fp32", "bf16"] = "fp32"


def _parse_tokenizer(value: object) -> object:
    """Take a text as the tokenizer's name."""
    return {"name": value} if isinstance(value, str) else value


class _LanguageSettings(Config):
    model: str | dict[str, Any] = Field(
        description="A pretrained model (a name on the hub, or a folder), or the config of a new one: its model_type "
        "in transformers, and any of its keys."
    )
    tokenizer: Annotated[TokenizerConfig | None, BeforeValidator(_parse_tokenizer)] = Field(
        None, description="A name or folder, or how to learn one; the pretrained model's when absent."
    )
    data: LanguageDataConfig
    training: TrainingConfig
    evaluation: LengthsConfig = LengthsConfig()
    device: str | None = Field(None, description="Such as cuda; by default the fastest there is.")

    @property
    def lengths(self) -> list[int]:
        """Lengths of the scored windows in tokens, including the training length."""
        return sorted({*self.evaluation.lengths, self.data.length})


class LanguageModelRecipe(_LanguageSettings):
    """A training run of all weights of a language model."""

    kind: Literal["language-model"] = Field("language-model", description="Marks the recipe of a language model.")
    out: str = Field("runs/model", description="Folder for the model, its report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if not self.training.has_steps:
            yield "a language model needs training steps: set training.steps to 1 or more, or training.epochs"
        if isinstance(self.model, dict):
            if not isinstance(self.model.get("model_type"), str):
                yield "a new model needs a model_type, such as llama: name one under model"
            if self.tokenizer is None:
                yield "a new model has no tokenizer: name one, or learn one, as in tokenizer: {vocab_size: 4096}"

    def run(self) -> LanguageModelRun:
        """Return the run that trains the recipe's model."""
        settings = {name: getattr(self, name) for name in _LanguageSettings.model_fields}
        label = self.model if isinstance(self.model, str) else str(self.model["model_type"])
        return LanguageModelRun(id="model", label=label, folder=".", **settings)

    def plots(self, results: Results) -> dict[str, Figure]:
        """Plot bits per byte by window length, if several lengths were measured.

        Args:
            results: the results of the recipe's run.

        Returns:
            The figure by its file name without suffix; empty for a single length.
        """
        from graftlm.evaluation import plots  # Importing matplotlib takes half a second.

        metrics = results.rows[0].metrics
        curves = {}
        for name in self.data.test:
            if f"bpb_{name}_at_{self.data.length}" in metrics:
                curves[name] = [(length, metrics[f"bpb_{name}_at_{length}"]) for length in self.lengths]
        if not curves:
            return {}
        return {"bits-per-byte-by-length": plots.by_length(curves, trained=self.data.length)}


@dataclass(frozen=True)
class LanguageEvaluation:
    """What is needed to evaluate a trained language model.

    Attributes:
        tokenizer: the model's tokenizer.
        tests: test documents by set.
    """

    tokenizer: PreTrainedTokenizerBase
    tests: Mapping[str, Sequence[Document]]


class LanguageModelRun(_LanguageSettings, TrainingRun):
    """Train all weights of a causal language model on text, and measure bits per byte."""

    def artefacts(self) -> tuple[str, ...]:
        return ("model/config.json",)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee[LanguageModel, LanguageEvaluation]]:
        """Load or make the tokenizer and the model, and read the texts.

        Args:
            context: where a learned tokenizer is kept, and where to log.

        Raises:
            GraftError: model, tokenizer or texts can't be read, or do not fit together.
        """
        tokenizer = self._load_tokenizer(context.folder)
        model = self._load_model(tokenizer)
        batches = self._batches(tokenizer)
        tests = load_tests(self.data.test)
        start = fingerprint(model).id if isinstance(self.model, str) else self.model
        tokens = self.training.batch_size * self.data.length
        parameters = count_parameters(model.parameters())
        context.log(f"A {model.config.model_type} model of {parameters:,} parameters.")
        if self.training.steps:
            context.log(f"Training it for {steps_text(self.training.steps)} of {tokens:,} tokens.")
        yield Trainee(
            model=LanguageModel(model),
            batches=batches,
            identity={"model": start, "data": batches.fingerprint()},
            evaluation=LanguageEvaluation(tokenizer=tokenizer, tests=tests),
        )

    def _load_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """Return the named tokenizer, or one that is learned once into `folder/tokenizer`."""
        if self.tokenizer is None:
            assert isinstance(self.model, str), "the recipe was checked"
            return language_model.read_tokenizer(self.model)
        if self.tokenizer.name is not None:
            return language_model.read_tokenizer(self.tokenizer.name)
        vocab_size = self.tokenizer.vocab_size
        assert vocab_size is not None, "the config was checked"
        texts = first_texts(self.data.train, self.tokenizer.characters)

        def learn(path: Path) -> None:
            language_model.train_tokenizer(texts, vocab_size).save_pretrained(path)

        settings = self.model_dump(mode="json", include={"tokenizer": True, "data": {"train"}})
        with process_state().main_process_first():
            learned = fill_once(folder / "tokenizer", settings, learn)
            return language_model.read_tokenizer(str(learned))

    def _load_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Return the untrained or pretrained model on its device."""
        if isinstance(self.model, str):
            model = language_model.read_model(self.model, tokenizer)
        else:
            model = language_model.new_model(self.model, tokenizer, self.training.seed)
        if self.data.stream:
            language_model.check_stream(model, self.training)
        language_model.check_rows(
            model,
            length=self.data.length,
            longest=max(self.lengths),
            boundaries=self.data.boundaries,
        )
        device: Any = self.device or process_state().device
        move(model, device)
        return model

    def _batches(self, tokenizer: PreTrainedTokenizerBase) -> Mixture:
        data = self.data.packed()
        if not self.data.stream:
            return build_mixture(data, tokenizer, self.training.batch_size)
        blocks = build_blocks(self.data.train, data, tokenizer)
        assert isinstance(blocks, TokenBlocks), "the config was checked"
        return StatefulBatches(blocks, self.training.batch_size)

    def evaluate(self, trainee: Trainee[LanguageModel, LanguageEvaluation]) -> Measurement:
        model = trainee.model.model
        tests = trainee.evaluation.tests
        scores = score_lengths(model, trainee.evaluation.tokenizer, tests, self.lengths, self.evaluation)
        by_length = {
            name: {length: of_length.interval("bits_per_byte") for length, of_length in of_set.items()}
            for name, of_set in scores.items()
        }
        metrics = metrics_by_length(by_length, self.data.length)
        metrics["parameters"] = count_parameters(model.parameters())
        row_id = model.config.model_type
        scored = {}
        for name, of_set in scores.items():
            # Every length scores the same tokens.
            any_length, *_ = of_set.values()
            scored[name] = scored_parts(any_length, tests[name])
        row = Row(id=row_id, label=self.label or row_id, metrics=metrics)
        return Measurement(row, {"scored_text": scored} if scored else {})

    def save(
        self,
        trainee: Trainee[LanguageModel, LanguageEvaluation],
        context: RunContext,
        summary: TrainingSummary | None,
        measurement: Measurement,
    ) -> None:
        """Write the model with its tokenizer."""
        language_model.save_model(trainee.model.model, trainee.evaluation.tokenizer, context.folder / "model")


def score_lengths(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tests: Mapping[str, Sequence[Document]],
    lengths: Sequence[int],
    settings: LengthsConfig,
) -> dict[str, dict[int, Scores]]:
    """Score test sets in windows of several lengths. Every length scores the same tokens of text.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        tests: test documents by set.
        lengths: lengths of the windows, in tokens.
        settings: tokens in a pass, tokens scored per test set, and precision. Its `lengths` are not used.

    Returns:
        {set: {length: scores}}.

    Raises:
        EvaluationError: a length exceeds the model's positions, or the model predicts NaN or infinity.
        DataError: a set has no token to score.
    """
    scores: dict[str, dict[int, Scores]] = {}
    for name, documents in tests.items():
        scores[name] = {}
        for length in lengths:
            scores[name][length] = score(
                model,
                tokenizer,
                documents,
                length=length,
                batch_size=max(1, settings.tokens_per_pass // length),
                precision=settings.precision,
                limit_tokens=settings.limit_tokens,
            )
    return scores


def metrics_by_length(values: Mapping[str, Mapping[int, Interval]], trained: int) -> dict[str, Metric]:
    """Return `bpb_<set>` at the training length and, with several lengths, `bpb_<set>_at_<length>`.

    Args:
        values: bits per byte by set and length.
        trained: the length of training rows in tokens.
    """
    metrics: dict[str, Metric] = {}
    for name, by_length in values.items():
        if trained in by_length:
            metrics[f"bpb_{name}"] = by_length[trained]
        if len(by_length) > 1:
            for length, value in by_length.items():
                metrics[f"bpb_{name}_at_{length}"] = value
    return metrics
