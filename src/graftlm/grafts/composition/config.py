"""Configuration of a composition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_serializer
from torch import nn

from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.grafts.base import GraftConfig
from graftlm.grafts.composition.attention import Init, Norm, Positions
from graftlm.grafts.composition.readout import ReadoutKind

RANDOM = "random"
"""Name of an augmenting model with random weights."""
VANILLA = "vanilla"
"""Name of an augmenting model that is the backbone itself."""

CALM: dict[str, object] = {
    "stride": 4,  # section 4: every 4th layer of the augmenting model
    "heads": None,  # section 3.1: as many as in the anchor's self-attention
    "init": "paper",
    "norm": "none",
    "positions": "none",
    "refresh": "every",  # section 3.1: each new token is appended to the input of both models
    "qk_norm": False,
    "cross": True,
    "readout": "none",
}
"""The form that the paper published."""

Pair = tuple[int, int]  # (layer of the augmenting model, layer of the anchor), counted from 0


class AugmentingConfig(Config):
    """Configuration of one augmenting model.

    Args:
        name: name on the hub, or folder, of a causal language model; `vanilla` for the backbone itself, `random` for
            random weights.
        like: the model whose architecture and tokenizer `random` has. Default: the backbone.
        seed: seed of `random`.
        stride: every stride-th layer of this model is paired, including the last one. Default: the stride of the graft.
        pairs: pairs (layer of this model, layer of the anchor), counted from 0, which replace those of the stride.
        dtype: dtype of the weights; `auto` keeps the dtype of the checkpoint.
        trust_remote_code: whether to run model code that comes with the checkpoint.
    """

    name: str = Field(min_length=1)
    like: str | None = Field(None, min_length=1)
    seed: int = Field(0, ge=0)
    stride: int | None = Field(None, ge=1)
    pairs: list[Pair] | None = Field(None, min_length=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False

    def _problems(self) -> Iterator[str]:
        if self.name == RANDOM:
            return
        for key, is_set in {"like": self.like is not None, "seed": self.seed != 0}.items():
            if is_set:
                yield (
                    f"{key} is set, but only a model with the name {RANDOM} uses it: leave {key} out, or set name to "
                    f"{RANDOM}"
                )

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out the keys of random models in others, so that earlier runs keep their keys."""
        values = serialize(self)
        if self.name != RANDOM:
            values.pop("like", None)
            values.pop("seed", None)
        return values


class CompositionConfig(GraftConfig):
    """Configuration of a composition.

    Args:
        augmenting: the augmenting models by name.
        stride: every stride-th layer of each augmenting model is paired with a layer of the anchor; the layers of the
            anchor are evenly spaced.
        heads: number of heads of each cross-attention. Default: the number of attention heads of the anchor.
        init: `zero`: the untrained composition equals the anchor. `paper`: all matrices are random.
        norm: `pre`: RMS norms of the anchor's states and of the projected states before attention.
        positions: `none`: no positions, as in the paper. `rotary`: rotary positions of queries and keys. `local`:
            rotary, and half of the heads initially attend to the most recent token.
        refresh: what the augmenting models read: `every` token, or only the `prompt`, like an encoder;
            then all new text needs prompts.
        alignment: how tokens are matched: by `position` (one tokenizer), by `characters` (two tokenizers), or `auto`,
            which compares the tokenizers.
        qk_norm: whether RMS norms are applied to the queries and keys of each head. Without them, large values can
            saturate the softmax.
        cross: whether there are cross-attentions; without them, only the readout is trained.
        readout: `mixture`: a gate mixes the next-token distributions of the anchor and of the augmenting models, which
            must have the anchor's tokenizer. `none`: the distribution is the anchor's.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"calm": CALM}

    kind: Literal["composition"] = "composition"
    augmenting: dict[str, AugmentingConfig] = Field(min_length=1)
    stride: int = Field(4, ge=1)
    heads: int | None = Field(None, ge=1)
    init: Init = "zero"
    norm: Norm = "pre"
    positions: Positions = "local"
    refresh: Literal["every", "prompt"] = "every"
    alignment: Literal["auto", "position", "characters"] = "auto"
    qk_norm: bool = False
    cross: bool = True
    readout: ReadoutKind = "none"

    @field_validator("augmenting")
    @classmethod
    def _check_names(cls, value: dict[str, AugmentingConfig]) -> dict[str, AugmentingConfig]:
        for name in value:
            is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name)
            if not is_word or hasattr(nn.ModuleDict, name):
                raise ValueError(
                    f"an augmenting model has the name {name!r}, but a name of letters, digits, - and _ is expected "
                    "that begins with a letter and is not an attribute of nn.ModuleDict: choose another, such as french"
                )
        return value

    def check_prompts(self, missing: Sequence[str]) -> None:
        if self.refresh == "prompt" and missing:
            raise RecipeError(
                f"refresh is prompt, so the augmenting models read only prompts, but the source {missing[0]} of "
                "data.new has none: set its prompt_column or messages_column, or set refresh to every."
            )

    def _problems(self) -> Iterator[str]:
        if not self.cross and self.readout == "none":
            yield "cross is false and readout is none, which leaves nothing to train: set readout to mixture"
        if self.readout != "none" and self.refresh == "prompt":
            yield (
                f"refresh is prompt, but with readout {self.readout} the augmenting models must read every token: set "
                "refresh to every"
            )
