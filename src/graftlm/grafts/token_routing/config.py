"""Configuration of token routing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, field_validator, model_serializer

from graftlm.config import Config
from graftlm.errors import RecipeError, did_you_mean
from graftlm.grafts.base import GraftConfig

Combination = Literal["exact", "linear"]

WORDS = "words"
"""Name of the embedder that represents a text by its rare words and names."""


class ExpertConfig(Config):
    """Configuration of one expert: an existing LoRA adapter (`path`), or a new one that is trained (`rank`).

    Args:
        bare: whether the bare backbone takes the place of an adapter, for text like the examples. With one other expert
            and `top: 1`, this is a switch.
        path: folder that PEFT's `save_pretrained` wrote, or OWNER/NAME on the hub.
        rank: rank of a new expert.
        alpha: the update of a new expert is multiplied by alpha / rank. Default: the rank.
        targets: modules that a new expert changes: attention, ffn, embedding, or the last parts of module names, such
            as q_proj.
        texts: examples of the expert's domain. The centroid is the mean of their embeddings.
        sources: files with further examples, in the form of the `data` sources of a recipe. The examples of a new
            expert without texts and sources are the text that it trains on.
        set: named set of `data.new` on which a new expert trains alone. Default: the set of its name, if every new
            expert has one and every set an expert; otherwise each document trains the expert of the nearest centroid.
        sha256: SHA-256 of the adapter's tensor file, which is written when the graft is saved.
    """

    bare: bool = False
    path: str | None = None
    rank: int | None = Field(None, ge=1)
    alpha: float | None = Field(None, gt=0)
    targets: list[str] = []
    texts: list[str] = []
    sources: list[dict[str, Any]] = []
    set: str | None = Field(None, min_length=1)
    sha256: str | None = None

    def _problems(self) -> Iterator[str]:
        if self.bare:
            for key in ("path", "rank", "targets", "alpha", "set"):
                if getattr(self, key):
                    yield f"bare is true, but {key} is set, which an adapter has: leave one of them out"
            if not (self.texts or self.sources):
                yield "bare is true, but there are no examples of its text: give some under texts or sources"
            return
        if self.path is None and self.rank is None:
            yield "neither path nor rank is set: set the path of a LoRA adapter, or rank and targets of a new expert"
        if self.path is not None and self.rank is not None:
            yield (
                "both path and rank are set, but an expert is either an existing LoRA adapter or a new one: leave one "
                "out"
            )
        if self.rank is not None and not self.targets:
            yield (
                "targets is empty, but a new expert must change some modules: name attention, ffn, or modules such as "
                "q_proj"
            )
        for key in ("targets", "alpha"):
            if self.path is not None and getattr(self, key):
                yield f"{key} is set, but the adapter in path already defines it: leave {key} out"
        if self.path is not None and self.set is not None:
            yield "set names text to train on, but the adapter in path does not train: leave set out"

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out later fields at their defaults, so that earlier runs keep their keys."""
        values = serialize(self)
        for key in ("bare", "set"):
            if not values.get(key):
                values.pop(key, None)
        return values

    @property
    def is_new(self) -> bool:
        """Whether it is an adapter that is trained."""
        return self.path is None and not self.bare


class EmbedderConfig(Config):
    """Configuration of the model that embeds text for routing.

    Args:
        name: `backbone` for the mean of the backbone's own hidden states; `words` for the rare words of a text, such as
            names and numbers, with `centroids: all` and `threshold: 0.5`; or the name or folder of a
            sentence-transformers model.
        layers: number of the backbone's hidden states, as in transformers. 0: token embeddings, at no cost. n: after
            the n-th layer. -1: the last, after the final norm. The states are computed in a separate pass of the bare
            backbone over these layers.
        whiten: whether to whiten vectors by the covariance of the examples within their domains. Default: only for
            `backbone`, and only if an expert has several examples.
        centre: whether to subtract the mean of all centroids before vectors are compared. Default: only for `backbone`,
            whose vectors share one dominant direction.
        centroids: number of centroids of each expert, by k-means of its examples; `all` makes every example a centroid.
            The score of an expert is that of its best centroid.
        trust_remote_code: whether to run code that comes with a sentence-transformers model.
    """

    name: str = Field("backbone", min_length=1)
    layers: int = 0
    whiten: bool | None = None
    centre: bool | None = None
    centroids: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    trust_remote_code: bool = False

    def _problems(self) -> Iterator[str]:
        if self.name == WORDS and self.centroids != "all":
            yield (
                f"centroids is {self.centroids}, but the embedder {WORDS} compares the rare words of each example: set "
                "centroids to all"
            )
        if self.layers and self.name != "backbone":
            yield (
                f"layers is {self.layers}, but it selects hidden states of the backbone, which the embedder "
                f"{self.name} does not read: leave layers out"
            )

    @property
    def whitens(self) -> bool:
        """Whether vectors are whitened if the examples allow it."""
        if self.whiten is None:
            return self.name == "backbone"
        return self.whiten


class TokenRoutingConfig(GraftConfig):
    """Configuration of the routing between LoRA experts.

    Args:
        experts: the experts by name.
        embedder: the model that embeds the text.
        policy: `softmax`: softmax of the cosines divided by `temperature`. `nearest`, as in the paper: the largest
            cosine is multiplied by `boost` before a softmax. `discriminant`: softmax of linear discriminant scores
            divided by `temperature`; every expert needs several examples.
        temperature: temperature of `softmax` (default: 0.03) and of `discriminant` (default: 1).
        boost: factor of the `nearest` policy.
        top: number of largest weights to keep. Default: all.
        threshold: minimum cosine. If all cosines are smaller, no expert is used, and the bare backbone predicts.
        every: k, the number of tokens between two updates of the weights.
        reads: text that is embedded: `all` text so far, or only the `prompt`. With `prompt`, the examples that are read
            from sources are prompts too: of a conversation, the user's turns before each learned answer.
        window: number of most recent tokens of that text that are embedded. Default: all of them.
        prompt: `whole`: all tokens of a prompt have the weights of the whole prompt. `causal`: each token has the
            weights of the text before it.
        cache: what happens to keys and values when weights change. `keep`: earlier tokens keep theirs. `recompute`: a
            full pass computes them again at each change.
        combination: `exact`: weighted sum of the experts' updates. `linear`, as published: the factors are summed
            before they are multiplied.
        experts_in_memory: number of experts whose factors stay in memory; the others are read from their folders when
            a route needs them. One pass holds all experts that its rows need. Default: all.
        fixed: weights of the experts by name for every token, instead of a route. Their sum is at most 1, and the bare
            backbone has the rest.
        bundle: whether to save the experts' factors in the artifact, instead of their paths and hashes.
    """

    kind: Literal["token-routing"] = "token-routing"
    experts: dict[str, ExpertConfig] = Field(min_length=1)
    embedder: EmbedderConfig = EmbedderConfig()
    policy: Literal["softmax", "nearest", "discriminant"] = "softmax"
    temperature: float | None = Field(None, gt=0)
    boost: float = Field(4.0, ge=1)
    top: int | None = Field(None, ge=1)
    threshold: float | None = Field(None, ge=-1, le=1)
    every: int = Field(2, ge=1)
    reads: Literal["all", "prompt"] = "all"
    window: int | None = Field(None, ge=1)
    prompt: Literal["whole", "causal"] = "whole"
    cache: Literal["keep", "recompute"] = "keep"
    combination: Combination = "exact"
    experts_in_memory: int | None = Field(None, ge=1)
    fixed: dict[str, NonNegativeFloat] | None = None
    bundle: bool = False

    def _problems(self) -> Iterator[str]:
        fixed = self.fixed or {}
        if all(expert.bare for expert in self.experts.values()):
            yield "every expert is bare, so that there is no adapter: add one with a path or a rank"
        if self.reads == "prompt" and self.prompt == "causal":
            yield "prompt is causal, but with reads set to prompt the whole prompt has one route: set prompt to whole"
        for name in fixed.keys() - self.experts.keys():
            yield f"fixed names {name}, but there is no such expert{did_you_mean(name, self.experts)}"
        if sum(fixed.values()) > 1 + 1e-6:
            yield f"the weights in fixed add up to {sum(fixed.values()):.4g}, but at most 1 is expected: lower them"
        if self.embedder.name == WORDS and self.threshold is None and fixed == {}:
            yield "the embedder words has scores near 0 for texts without a taught word: set threshold to 0.5"
        yield from self._problems_of_memory()
        if self.policy == "discriminant":
            if self.threshold is not None:
                yield "threshold is a cosine, but the policy discriminant computes no cosines: leave threshold out"
            if self.embedder.whiten is False:
                yield "embedder.whiten is false, but policy: discriminant whitens vectors: leave whiten out"

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out later fields without a value, so that earlier runs keep their keys."""
        values = {"kind": self.kind} | serialize(self)
        if self.experts_in_memory is None:
            values.pop("experts_in_memory", None)
        return values

    def check_new(self) -> None:
        if self.top is not None and self.top > len(self.experts):
            raise RecipeError(
                f"top is {self.top}, but the number of experts is {len(self.experts)}: lower top, or leave it out to "
                "use all experts."
            )

    def set_of_parts(self, sets: Sequence[str]) -> dict[str, str]:
        new = {name: expert.set for name, expert in self.experts.items() if expert.is_new}
        if all(own is None for own in new.values()):
            return {name: name for name in new} if new.keys() == set(sets) else {}
        found: dict[str, str] = {}
        for name, own in new.items():
            chosen = own or name
            if chosen not in sets:
                raise RecipeError(
                    f"The expert {name} trains on the set {chosen}, but data.new has no such set"
                    f"{did_you_mean(chosen, sets)}: name it there, or change set."
                )
            if chosen in found.values():
                raise RecipeError(
                    f"The set {chosen} of data.new belongs to two experts, of which {name} is one, but each set trains "
                    "one expert: give them different sets."
                )
            found[name] = chosen
        for own in sets:
            if own not in found.values():
                raise RecipeError(
                    f"No expert trains on the set {own} of data.new: name it as the set of a new expert, or leave its "
                    "text out."
                )
        return found

    def _problems_of_memory(self) -> Iterator[str]:
        if self.experts_in_memory is None:
            return
        for name, expert in self.experts.items():
            if expert.is_new:
                yield (
                    f"experts_in_memory is set, but the expert {name} is new, and an expert in training stays in "
                    "memory: leave experts_in_memory out"
                )
        if self.bundle:
            yield "experts_in_memory reads experts from their folders, but bundle is true: leave one of them out"
        if self.top is None and self.fixed is None:
            yield "experts_in_memory is set, but without top every token needs all experts: set top, such as 2"

    @property
    def whitens(self) -> bool:
        """Whether vectors are whitened if the examples allow it."""
        return self.policy == "discriminant" or self.embedder.whitens

    @field_validator("experts")
    @classmethod
    def _check_names(cls, value: dict[str, ExpertConfig]) -> dict[str, ExpertConfig]:
        for name in value:
            is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name)
            if name == "none" or not is_word:
                raise ValueError(
                    f"an expert has the name {name!r}, but a name of letters, digits, - and _ is expected that begins "
                    "with a letter and is not none, which stands for the bare backbone: choose another, such as math"
                )
        return value
