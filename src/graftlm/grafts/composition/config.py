"""Configuration of a composition."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator
from torch import nn

from graftlm.config import Config
from graftlm.grafts.base import GraftConfig
from graftlm.grafts.composition.attention import Init, Norm, Positions

Pair = tuple[int, int]
"""(layer of the augmenting model, layer of the anchor), counted from 0."""


class AugmentingConfig(Config):
    """One augmenting model.

    Args:
        name: causal language model: hub name or folder.
        stride: pairs every stride-th layer of this model, its last layer included. Default: the graft's stride.
        pairs: (its layer, the anchor's layer), counted from 0, instead of a stride.
        dtype: dtype of its weights; `auto` keeps the checkpoint's.
        trust_remote_code: run model code that comes with the checkpoint.
    """

    name: str = Field(min_length=1)
    stride: int | None = Field(None, ge=1)
    pairs: list[Pair] | None = Field(None, min_length=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False


class CompositionConfig(GraftConfig):
    """Configuration of a composition.

    Args:
        augmenting: the augmenting models by name.
        stride: pairs every stride-th layer of each augmenting model with a layer of the anchor, evenly spaced.
        heads: number of cross-attention heads. Default: the anchor's number of attention heads.
        init: `zero`: the untrained composition equals the anchor. `paper`: all matrices are random.
        norm: `pre`: RMS norms of the anchor's states and of the projected states before attention.
        positions: `none`: no positions, as in the paper. `rotary`: rotary positions of queries and keys. `local`:
            rotary, and half of the heads initially attend to the most recent token.
        refresh: what the augmenting models read: `every` token, or only the `prompt`, as encoders.
        alignment: matching of tokens: by `position` (one tokenizer), by `characters` (two tokenizers), or `auto`.
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
    def _check_names(cls, value: dict[str, AugmentingConfig]) -> dict[str, AugmentingConfig]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or hasattr(nn.ModuleDict, name):
                raise ValueError(
                    f"the augmenting model's name {name!r} can't be used: use letters, digits, - and _, such as french"
                )
        return value
