"""The recipe of a language model of one's own: any Hugging Face config, trained from text, from nothing or further."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from graftlm.config import Config
from graftlm.data import DataConfig, SourceConfig
from graftlm.training.config import TrainingConfig
from graftlm.training.pieces import LEAST_PIECES

KIND = "language-model"


class TokenizerConfig(Config):
    """What the model reads with: a tokenizer that is there, or one that is learned from the training text."""

    name: str | None = Field(None, min_length=1, description="A name on the Hugging Face hub, or a folder.")
    pieces: int | None = Field(
        None, ge=LEAST_PIECES, description="Learn a byte-level BPE tokenizer of at most so many pieces instead."
    )
    characters: int = Field(20_000_000, ge=1, description="Learn the pieces from so much of the text, at most.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.name is None) == (self.pieces is None):
            raise ValueError("a tokenizer has either a name or a number of pieces")
        return self


class LanguageDataConfig(Config):
    """The texts that a language model learns from, and those that it is measured on."""

    train: list[SourceConfig] = Field(min_length=1, description="What the model reads.")
    test: dict[str, list[SourceConfig]] = Field({}, description="Texts to measure on, by name, that it never reads.")
    length: int = Field(1024, ge=2, description="Tokens per row.")
    boundaries: Literal["joined", "separate", "whole"] = Field(
        "joined",
        description="Whether documents of a row make one stream with an end-of-text token between them, or are kept "
        "apart, which takes a model with position ids; or are kept apart and never cut where they fit into a row.",
    )
    seed: int = Field(0, ge=0, description="Orders the rows.")
    stream: bool = Field(
        False,
        description="Whether rows go on where those of the step before ended, and the model remembers, without "
        "gradients, what it read: for texts that are longer than a row, and models that keep a state.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream and self.boundaries != "joined":
            raise ValueError(
                "documents that go on from row to row are joined: set boundaries to joined, or stream to false"
            )
        if self.stream and any(source.streaming for source in self.train):
            raise ValueError("rows that go on are cut from text in memory: set streaming to false, or stream to false")
        return self

    def packed(self) -> DataConfig:
        """As rows are packed."""
        return DataConfig(
            new=self.train, replay_fraction=0, length=self.length, boundaries=self.boundaries, test=self.test, seed=self.seed
        )


class LengthsConfig(Config):
    """How the test texts are scored: bits per byte of windows of several lengths."""

    lengths: list[Annotated[int, Field(ge=3)]] = Field(
        [], description="Tokens per window, one measurement for each; the length of training is always one."
    )
    tokens_per_pass: int = Field(16_384, ge=1, description="Windows of a pass together; a longer one is alone in its.")
    limit_tokens: int | None = Field(50_000, ge=1, description="Tokens scored per test set; all when null.")
    precision: Literal["fp32", "bf16"] = "fp32"


def _as_tokenizer(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class LanguageModelRecipe(Config):
    """One training run of all weights of a language model."""

    kind: Literal["language-model"] = Field(KIND, description="What this recipe is, beside those of grafts.")
    model: str | dict[str, Any] = Field(
        description="A model to go on from (a name on the hub, or a folder), or the config of a new one: its "
        "model_type, as Hugging Face names architectures, and any of its keys."
    )
    tokenizer: Annotated[TokenizerConfig | None, BeforeValidator(_as_tokenizer)] = Field(
        None, description="A name or folder, or how to learn one; that of the model to go on from when absent."
    )
    data: LanguageDataConfig
    training: TrainingConfig
    evaluation: LengthsConfig = LengthsConfig()
    device: str | None = Field(None, description="Such as cuda; by default the fastest there is.")
    out: str = Field("runs/model", description="Folder for the model, its report and the checkpoints.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.training.steps == 0:
            raise ValueError("a language model learns by steps: set training.steps to 1 or more")
        if isinstance(self.model, dict) and not isinstance(self.model.get("model_type"), str):
            raise ValueError("a new model has a model_type, such as llama: name one under model")
        if isinstance(self.model, dict) and self.tokenizer is None:
            raise ValueError(
                "a new model has no tokenizer: name one under tokenizer, or learn one, as in tokenizer: {pieces: 4096}"
            )
        return self

    @property
    def lengths(self) -> list[int]:
        """Of the windows that are scored, that of training among them."""
        return sorted({*self.evaluation.lengths, self.data.length})
