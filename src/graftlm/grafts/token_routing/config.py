"""Configuration of token routing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, field_validator

from graftlm.config import Config
from graftlm.errors import did_you_mean
from graftlm.grafts.base import GraftConfig

Combination = Literal["exact", "linear"]


class ExpertConfig(Config):
    """One expert: an existing LoRA adapter (`path`), or a new one that is trained here (`rank`).

    Args:
        path: folder that PEFT's `save_pretrained` wrote, or OWNER/NAME on the hub.
        rank: rank of a new expert.
        alpha: the update of a new expert is multiplied by alpha / rank. Default: the rank.
        targets: modules that a new expert changes: attention, ffn, embedding, or the last parts of module names, such
            as q_proj.
        texts: examples of the expert's domain. The centroid is the mean of their embeddings.
        sources: files with further examples, in the form of a recipe's `data` sources.
        sha256: hash of the adapter's tensor file; written when the graft is saved.
    """

    path: str | None = None
    rank: int | None = Field(None, ge=1)
    alpha: float | None = Field(None, gt=0)
    targets: list[str] = []
    texts: list[str] = []
    sources: list[dict[str, Any]] = []
    sha256: str | None = None

    def _problems(self) -> Iterator[str]:
        if (self.path is None) == (self.rank is None):
            yield "an expert has either the path of a LoRA adapter, or a rank and targets for a new one"
        if self.rank is not None and not self.targets:
            yield "a new expert needs targets, such as attention, ffn, or module names like q_proj"
        if self.path is not None and (self.targets or self.alpha is not None):
            yield "an adapter already defines its targets and alpha: remove targets and alpha, or remove path"


class EmbedderConfig(Config):
    """The model that embeds text for routing.

    Args:
        name: `backbone` for the mean of the backbone's own hidden states, or a sentence-transformers model by name or
            folder.
        layers: which hidden states of the backbone, numbered as in transformers. 0: token embeddings, at no cost. n:
            after the n-th layer. -1: the last, behind the final norm. States come from a separate pass of the bare
            backbone over those layers.
        whiten: whiten vectors by the covariance of the examples within their domains. Default: only for `backbone`,
            where an expert has several examples.
        centre: subtract the mean of all centroids before comparing. Default: only for `backbone`, whose vectors share
            one dominant direction.
        centroids: number of centroids of each expert, by k-means of its examples; `all`: every example is one. The
            score of an expert is that of its best centroid.
        trust_remote_code: run code that comes with a sentence-transformers model.
    """

    name: str = Field("backbone", min_length=1)
    layers: int = 0
    whiten: bool | None = None
    centre: bool | None = None
    centroids: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    trust_remote_code: bool = False

    def _problems(self) -> Iterator[str]:
        if self.layers and self.name != "backbone":
            yield f"layers selects hidden states of the backbone: remove it for the embedder {self.name}"

    @property
    def whitens(self) -> bool:
        """Whether vectors are whitened, where the examples allow it."""
        return self.name == "backbone" if self.whiten is None else self.whiten


class TokenRoutingConfig(GraftConfig):
    """Configuration of a routing between LoRA experts.

    Args:
        experts: the experts by name.
        embedder: the model that embeds the text.
        policy: `softmax`: softmax of the cosines over `temperature`. `nearest`, the paper's: the largest cosine is
            multiplied by `boost` before a softmax. `discriminant`: softmax of linear discriminant scores over
            `temperature`; every expert needs several examples.
        temperature: of `softmax`, by default 0.03, and of `discriminant`, by default 1.
        boost: of the `nearest` policy.
        top: number of largest weights to keep. Default: all.
        threshold: minimum cosine. Below it no expert is used, and the bare backbone predicts.
        every: k, the number of tokens between two updates of the weights.
        reads: text that is embedded: `all` text so far, or the `prompt` only.
        window: number of most recent tokens of that text. Default: all of them.
        prompt: `whole`: all tokens of a prompt have the weights of the whole prompt. `causal`: each token has the
            weights of the text before it.
        cache: treatment of keys and values when weights change. `keep`: earlier tokens keep theirs. `recompute`: a full
            pass computes them again at each change.
        combination: `exact`: weighted sum of the experts' updates. `linear`, as published: the factors are summed
            before they are multiplied.
        fixed: weights of the experts by name, which add up to at most 1, for every token in place of a route. The
            bare backbone has the rest.
        bundle: save the experts' factors in the artefact, instead of their paths and hashes.
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
    fixed: dict[str, NonNegativeFloat] | None = None
    bundle: bool = False

    def _problems(self) -> Iterator[str]:
        if self.reads == "prompt" and self.prompt == "causal":
            yield "reads: prompt uses one route for the whole prompt: set prompt to whole"
        for name in (self.fixed or {}).keys() - self.experts.keys():
            yield f"fixed names {name}, and there is no such expert{did_you_mean(name, self.experts)}"
        if sum((self.fixed or {}).values()) > 1 + 1e-6:
            yield "the weights of fixed add up to more than 1: lower them"
        if self.policy == "discriminant" and self.threshold is not None:
            yield "threshold is a cosine, and policy: discriminant has none: leave threshold out"
        if self.policy == "discriminant" and self.embedder.whiten is False:
            yield "policy: discriminant divides by the covariance of the examples: leave whiten out"

    @property
    def whitens(self) -> bool:
        """Whether vectors are whitened, where the examples allow it."""
        return self.policy == "discriminant" or self.embedder.whitens

    @field_validator("experts")
    @classmethod
    def _check_names(cls, value: dict[str, ExpertConfig]) -> dict[str, ExpertConfig]:
        for name in value:
            if name == "none" or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
                raise ValueError(
                    f"the expert's name {name!r} can't be used: use letters, digits, - and _, such as maths; the name "
                    "none is reserved for the bare backbone"
                )
        return value
