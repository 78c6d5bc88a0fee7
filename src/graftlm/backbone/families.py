"""Model families: where each architecture keeps its layers, attention, FFN, embedding and head.

A family whose structure `structure.py` cannot find has a row in `families.yaml`. Paths are relative to
`model.base_model`; paths of a layer's modules are relative to the layer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.config import read_yaml
from graftlm.errors import UnknownFamilyError


@dataclass(frozen=True)
class Sublayer:
    """An attention or FFN sublayer: its input is the first input of `entry`, its output the output of `exit`.

    In most decoders both are one module, and `exit` may be left out. BERT's FFN enters at `intermediate` and leaves at
    `output.dense`, before the residual sum.
    """

    entry: str
    exit: str = ""


@dataclass(frozen=True)
class Family:
    """Where one architecture keeps the modules that grafts need.

    Args:
        norm: the norm after the last layer; None for encoders that normalise inside each layer.
        attention, ffn: the sublayers of one layer.
        ffn_in: the Linears that read the FFN's input; the gating one is first in a gated linear unit. Layers with a
            mixture of experts need none.
        ffn_out: the Linear that writes the FFN's output.
        gated: the FFN is W_o(act(W_g x) * W_i x) rather than W_o act(W_i x).
        activation: the config field that names the activation, or the activation's own name.
        text_config: the config field that holds the text model's config in multimodal models.
        causal: no token attends to a later one.
        norms: the norms of one layer over the model's width, in the order in which they act.
        counts_positions: the model derives positions from the ids that are not padding, and reserves the first
            `pad_token_id + 1` positions, as RoBERTa does.
        body: the module that the head calls, where it is not `model.base_model` itself, as in OPT.
        one_stream: a layer maps (B, T, d) to (B, T, d). Gemma 3n's layers pass several streams of hidden states.
        separates_documents: where `position_ids` restart in a row, attention stays inside each document.
        reads_positions: Linears of a layer that also read embeddings of relative positions, which belong to no token.
    """

    layers: str
    embedding: str
    norm: str | None
    attention: Sublayer
    ffn: Sublayer
    ffn_in: tuple[str, ...]
    ffn_out: str
    gated: bool
    activation: str = "hidden_act"
    text_config: str | None = None
    causal: bool = True
    norms: tuple[str, ...] = ()
    counts_positions: bool = False
    body: str = ""
    one_stream: bool = True
    separates_documents: bool = True
    reads_positions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in _texts(vars(self)):  # they come from files, and stand in the code of exported models
            if not re.fullmatch(r"[\w.]*", text):
                raise UnknownFamilyError(
                    f"A family has {text!r}, but names of modules and fields are expected: letters, digits, _ and dots."
                )


def _texts(value: Any) -> Iterator[str]:
    """All strings in nested fields."""
    fields = vars(value) if isinstance(value, Sublayer) else value
    if isinstance(fields, str):
        yield fields
    elif isinstance(fields, Mapping | Iterable):
        for inner in fields.values() if isinstance(fields, Mapping) else fields:
            yield from _texts(inner)


def register_family(model_type: str, family: Family | Mapping[str, Any] | str) -> None:
    """Add an architecture to `FAMILIES`; `model_type` is the one in its config.

    `family` is a row, a dict of its fields where a path stands for a sublayer, or another model type that has the row.
    """
    if isinstance(family, str) and family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownFamilyError(
            f"There is no row for the model type {family!r} (other models' parts are found without one): name one of "
            f"{known}, or give fields."
        )
    FAMILIES[model_type] = FAMILIES[family] if isinstance(family, str) else family_row(family)


def user_row(model_type: str) -> dict[str, Any] | None:
    """The row that a user gave a model type, as a recipe writes it; None for a row of GraftLM's own and for no row."""
    row = FAMILIES.get(model_type)
    return (
        None
        if row is None or row is PROVEN_FAMILIES.get(model_type)
        else json.loads(json.dumps(dataclasses.asdict(row)))
    )


def family_row(family: Family | Mapping[str, Any]) -> Family:
    """A row from a dict of its fields."""
    if isinstance(family, Family):
        return family
    if not isinstance(family, Mapping):
        raise UnknownFamilyError(f"The family is {type(family).__name__}: give a model type, or fields in a dict.")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in family.items()}
    try:
        for name in {"attention", "ffn"} & values.keys():
            path = values[name]
            values[name] = Sublayer(**path) if isinstance(path, Mapping) else Sublayer(path)
        return Family(**values)
    except TypeError as error:
        fields = ", ".join(field.name for field in dataclasses.fields(Family))
        raise UnknownFamilyError(f"The fields {family} describe no family ({error}): give {fields}.") from None


FAMILIES: dict[str, Family] = {
    model_type: family_row(values) for model_type, values in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}
PROVEN_FAMILIES = dict(FAMILIES)  # tests prove these rows; others are checked by a pass without weights
