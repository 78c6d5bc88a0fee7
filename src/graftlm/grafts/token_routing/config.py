"""What a routing can be told."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from graftlm.config import Config
from graftlm.grafts.base import GraftConfig

Combination = Literal["exact", "linear"]


class ExpertConfig(Config):
    """One expert: a LoRA adapter that is there already (`path`), or one that is trained here (`rank`).

    Args:
        path: a folder that PEFT's `save_pretrained` wrote.
        rank: of a new expert.
        alpha: its update is multiplied by alpha / rank; by default alpha is the rank.
        targets: what a new expert changes: attention, ffn, embedding, or modules by the last parts of their names, such
            as q_proj.
        texts: examples of what it is for; its centroid is the mean of their embeddings.
        sources: the same, read from files: each as under `data` of a recipe.
        sha256: of the adapter's tensor file, written when the graft is saved.
    """

    path: str | None = None
    rank: int | None = Field(None, ge=1)
    alpha: float | None = Field(None, gt=0)
    targets: list[str] = []
    texts: list[str] = []
    sources: list[dict[str, Any]] = []
    sha256: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.rank is None):
            raise ValueError(
                "an expert has either the path of a LoRA adapter, or a rank and targets to be trained here"
            )
        if self.rank is not None and not self.targets:
            raise ValueError("a new expert needs targets, what it changes: attention, ffn, or names such as q_proj")
        if self.path is not None and (self.targets or self.alpha is not None):
            raise ValueError("an adapter says itself what it changes: leave out targets and alpha, or its path")
        return self


class EmbedderConfig(Config):
    """What turns text into a vector.

    Args:
        name: `backbone` for the mean of the backbone's own hidden states, or a sentence-transformers model by name or
            folder.
        layers: which states of the backbone, numbered as transformers does: 0 its token embeddings, which cost nothing,
            n those after the n-th layer, -1 the last, behind its last norm. They come from a pass of the bare backbone
            over those layers beside the mixed one.
        whiten: whether vectors are divided by the spread of the examples within their domains.
        centre: whether vectors are compared after the mean of all centroids was taken off; by default with the
            backbone's alone, whose vectors all point much the same way.
        trust_remote_code: run code that comes with a sentence-transformers model.
    """

    name: str = Field("backbone", min_length=1)
    layers: int = 0
    whiten: bool = False
    centre: bool | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers and self.name != "backbone":
            raise ValueError(f"layers counts the backbone's own: leave it out beside the embedder {self.name}")
        return self

    @property
    def centres(self) -> bool:
        """`centre`, or its default."""
        return self.name == "backbone" if self.centre is None else self.centre


class TokenRoutingConfig(GraftConfig):
    """Config of a routing between LoRA experts.

    Args:
        experts: the experts, each by a name of your choice.
        embedder: what the text so far is embedded by.
        policy: `softmax` of the cosines over `temperature`; or `nearest`, as in the paper: the largest cosine times
            `boost`, then a softmax.
        top: only so many of the largest weights are kept.
        threshold: where no centroid's cosine reaches it, no expert is used: the bare backbone writes.
        every: k, the number of tokens until weights are computed anew.
        reads: what is embedded: `all` text so far, or the `prompt` alone.
        window: only the last so many tokens of that.
        prompt: `whole`: a prompt is known at once, and all of its tokens take the route of its end; `causal`: each
            takes that of the text before it, as in text without a prompt.
        cache: what happens to keys and values when weights change: `keep` those that older weights made, or `recompute`
            them, which costs a pass over all text each time.
        combination: `exact`, the weighted sum of the experts' updates; or `linear`, as published, whose factors are
            summed before they are multiplied.
        bundle: whether the experts' factors are saved in the artefact; else their paths and hashes.
    """

    kind: Literal["token-routing"] = "token-routing"
    experts: dict[str, ExpertConfig] = Field(min_length=1)
    embedder: EmbedderConfig = EmbedderConfig()
    policy: Literal["softmax", "nearest"] = "softmax"
    temperature: float = Field(0.1, gt=0)
    boost: float = Field(4.0, ge=1)
    top: int | None = Field(None, ge=1)
    threshold: float | None = Field(None, ge=-1, le=1)
    every: int = Field(2, ge=1)
    reads: Literal["all", "prompt"] = "all"
    window: int | None = Field(None, ge=1)
    prompt: Literal["whole", "causal"] = "whole"
    cache: Literal["keep", "recompute"] = "keep"
    combination: Combination = "exact"
    bundle: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reads == "prompt" and self.prompt == "causal":
            raise ValueError("reads: prompt routes by the prompt as a whole: leave prompt at whole")
        return self

    @field_validator("experts")
    @classmethod
    def _names_can_be_written(cls, value: dict[str, ExpertConfig]) -> dict[str, ExpertConfig]:
        for name in value:
            if name == "none" or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
                raise ValueError(
                    f"the expert's name {name!r} can't be used: take letters, digits, - and _, such as maths; none is "
                    "what the trace calls the bare backbone"
                )
        return value
