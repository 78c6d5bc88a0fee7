"""What a composition can be told."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator
from torch import nn

from graftlm.config import Config
from graftlm.grafts.base import GraftConfig
from graftlm.grafts.composition.attention import Init, Norm, Positions

Pair = tuple[int, int]  # augmenting layer, anchor layer


class AugmentingConfig(Config):
    """One augmenting model.

    Args:
        name: of a causal language model on the Hugging Face hub, or its folder.
        stride: pairs every stride-th layer of it, the last one included; by default the graft's stride.
        pairs: (its layer, the anchor's layer), counted from 0, instead of a stride.
        dtype: of its weights; `auto` keeps the checkpoint's.
        trust_remote_code: run model code that comes with the checkpoint.
    """

    name: str = Field(min_length=1)
    stride: int | None = Field(None, ge=1)
    pairs: list[Pair] | None = Field(None, min_length=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False


class CompositionConfig(GraftConfig):
    """Config of a composition.

    Args:
        augmenting: the augmenting models, each by a name of your choice.
        stride: pairs every stride-th layer of each augmenting model with as many of the anchor's, evenly spaced.
        heads: of the cross-attention; by default as many as the anchor's own attention has.
        init: `zero` starts as the bare anchor; `paper` starts all matrices at random.
        positions: `rotary` turns queries and keys by their places in the text; with `none`, as in the paper, attention
            knows tokens by what they say alone, and can hardly tell the last one. `local` is rotary, and starts with
            half of the heads looking at the token that was read last.
        norm: `pre` normalises the anchor's states and the projected ones before attention.
        refresh: what the augmenting models read: `every` token, or the `prompt` alone, as encoders of it.
        alignment: whether tokens are matched by `position`, which takes one tokenizer, or by `characters`.
    """

    kind: Literal["composition"] = "composition"
    augmenting: dict[str, AugmentingConfig] = Field(min_length=1)
    stride: int = Field(4, ge=1)
    heads: int | None = Field(None, ge=1)
    init: Init = "zero"
    norm: Norm = "none"
    positions: Positions = "rotary"
    refresh: Literal["every", "prompt"] = "every"
    alignment: Literal["auto", "position", "characters"] = "auto"

    @field_validator("augmenting")
    @classmethod
    def _names_can_be_written(cls, value: dict[str, AugmentingConfig]) -> dict[str, AugmentingConfig]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or hasattr(nn.ModuleDict, name):
                raise ValueError(
                    f"the augmenting model's name {name!r} can't be used: take letters, digits, - and _, such as french"
                )
        return value
