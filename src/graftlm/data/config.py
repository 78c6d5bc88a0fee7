"""The data section of a recipe: the texts of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field, model_serializer

from graftlm.config import Config
from graftlm.data.source_config import NEAR_TOP_P, NewSources, OldSources, SelfSourceConfig, SourceConfig
from graftlm.data.text_sets import TextSets
from graftlm.errors import DataError


class WeightsConfig(Config):
    """Weights of sources that follow from their sizes."""

    temperature: float = Field(
        gt=0,
        le=1,
        description="Each named set, or source without one, has a share in proportion to its number of tokens to this "
        "power. The sources of a set share in proportion to their tokens.",
    )


class RewriteConfig(Config):
    """How the backbone writes the answers of new conversations in its own words, before training (SDFT).

    A conversation keeps its answer if the backbone's is empty, does not end, or lacks a name or number of that answer.
    """

    instruction: str = Field(
        "{question}\n\nThe right answer is: {answer}\n\nGive this answer in your own words. Keep all names and "
        "numbers, and add nothing.",
        description="What the backbone is asked, with {question} and {answer}.",
    )
    answer_tokens: int = Field(256, ge=1, description="Maximum tokens of an answer; longer ones are not used.")
    temperature: float = Field(0.7, ge=0.01, le=100, description="Divides the logits.")
    top_p: float = Field(NEAR_TOP_P, gt=0, le=1, description="Total probability of the tokens to sample from.")
    batch_size: int | None = Field(None, ge=1, description="Texts that are sampled at once, as in own text.")
    seed: int = Field(0, ge=0, description="Seed of the sampling.")

    def _problems(self) -> Iterator[str]:
        for part in ("{question}", "{answer}"):
            if part not in self.instruction:
                yield f"the instruction does not have {part}, for which each conversation's own text is put: add it"


class DataConfig(Config):
    """The texts of a run: the new ones that the model learns, and the old ones that it must not forget."""

    new: NewSources = Field([], description="Texts that the model learns, or named sets of them.")
    rewrite: RewriteConfig | None = Field(
        None,
        description="Learn the answers of the new conversations in the backbone's own words.",
    )
    old: OldSources = Field(
        [],
        description="Texts like the backbone's training data, or named sets of them; `self: true` lets the backbone "
        "sample them.",
    )
    weights: WeightsConfig | None = Field(
        None,
        description="`temperature: T`: shares of named sets, else of sources, in proportion to tokens to the "
        "power of T.",
    )
    replay_fraction: float = Field(0.1, ge=0, lt=1, description="Share of the rows that come from old; 0 ignores old.")
    old_objective: Literal["replay", "distil"] = Field(
        "replay",
        description="The loss of old rows. replay: the cross-entropy of their next tokens; distil: the divergence from "
        "the predictions of the bare backbone.",
    )
    new_objective: Literal["cross-entropy", "dft"] = Field(
        "cross-entropy",
        description="The loss of new rows. dft: cross-entropies times the tokens' probabilities.",
    )
    anchor: float = Field(0.0, ge=0, description="Weight of the divergence from the bare backbone in new rows.")
    length: int = Field(256, ge=2, description="Number of tokens of a row.")
    boundaries: Literal["separate", "joined", "whole"] = Field(
        "separate",
        description="How documents share rows. separate: they don't attend to each other; joined: they are one stream; "
        "whole: separate, and a document that does not fit begins the next row (plain text longer than a row is cut).",
    )
    stream: bool = Field(
        False,
        description="Each row continues that of the previous step from a cache without gradients, for grafts that keep "
        "a state over texts longer than a row. Needs joined boundaries and no replay.",
    )
    test: dict[str, list[SourceConfig]] = Field({}, description="Test texts by name, such as 'old' and 'new'.")
    seed: int = Field(0, ge=0, description="Seed of the order of rows.")

    def _problems(self) -> Iterator[str]:
        has_near = any(isinstance(source, SelfSourceConfig) and source.near for source in self.old)
        if has_near and any(source.streaming for source in self.new):
            yield (
                "a source of new is streaming, but near needs all new texts before training: set streaming to false, "
                "or leave near out"
            )
        yield from self._problems_of_weights()
        yield from self._problems_of_sets()
        yield from self._problems_of_rewriting()

    def _problems_of_rewriting(self) -> Iterator[str]:
        for source in self.new if self.rewrite is not None else ():
            if source.streaming:
                yield "a source of new is streaming, but rewrite needs all conversations: set streaming to false"
            if not source.messages_column:
                yield (
                    f"rewrite is set, but the source {source.name} of new has no conversations: set its "
                    "messages_column, or leave rewrite out"
                )

    def _problems_of_weights(self) -> Iterator[str]:
        for name, sources in self.test.items():
            if any(source.weight is not None or source.set is not None for source in sources):
                yield (
                    f"a source of the test text {name} has a weight or a set, which only training texts have: leave "
                    "the key out"
                )
        if self.weights is None:
            return
        for source in (*self.new, *self.old):
            if source.weight is not None:
                yield (
                    f"the source {source.name} has a weight, but weights.temperature sets the weights of all: leave "
                    "out one of them"
                )
            if isinstance(source, SourceConfig) and source.streaming:
                yield (
                    f"weights.temperature needs the sizes of all sources, but {source.name} is streaming: set its "
                    "streaming to false, or give each source a weight"
                )

    def _problems_of_sets(self) -> Iterator[str]:
        for domain, sources in (("new", self.new), ("old", self.old)):
            named = [source.set is not None for source in sources]
            if any(named) and not all(named):
                yield f"some sources of {domain} have a set and others have none: give every source a set, or none"
        yield from self.sets.problems(self.test)

    @property
    def sets(self) -> TextSets:
        """The names of the sets of new and old text."""
        new = dict.fromkeys(source.set for source in self.new if source.set is not None)
        old = dict.fromkeys(source.set for source in self.old if source.set is not None)
        return TextSets(new=tuple(new), old=tuple(old))

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Serialize the config without `weights` where there are none, so that earlier runs keep keys."""
        values = serialize(self)
        if self.weights is None:
            values.pop("weights", None)
        return values


def check_domains(config: DataConfig) -> None:
    """Raise `DataError` if there are no new sources, or no old ones although `replay_fraction` is above 0."""
    if not config.new:
        raise DataError("The recipe has no new sources, so there is nothing to learn: name some under data.new.")
    if config.replay_fraction > 0 and not config.old:
        raise DataError(
            f"data.replay_fraction is {config.replay_fraction:g}, but the recipe has no old sources: name some under "
            "data.old, or set data.replay_fraction to 0."
        )
