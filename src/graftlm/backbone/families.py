"""Model families: where each architecture keeps its layers, attention, FFN, embedding and head.

Families whose structure `structure.py` can't find are in `families.yaml`. Paths are relative to
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
from graftlm.errors import UnknownFamilyError, shorten


@dataclass(frozen=True)
class Sublayer:
    """An attention or FFN sublayer.

    In most decoders entry and exit are one module, and `exit` may be left out. BERT's FFN enters at `intermediate` and
    leaves at `output.dense`, before the residual sum. Gemma 2 normalizes what its FFN writes, and adds the result to
    the residual stream, so its FFN leaves at this norm.

    Attributes:
        entry: path of the module whose first input is the sublayer's input.
        exit: path of the module whose output is the sublayer's output; empty if it is `entry`. In layers without such a
            module it is `entry`, too.
    """

    entry: str
    exit: str = ""


@dataclass(frozen=True)
class Family:
    """Where one architecture keeps the modules that grafts need.

    Modules are given by their paths: of `layers`, `embedding`, `norm` and `body` relative to `model.base_model`, of all
    others relative to a layer.

    Args:
        layers: the list of layers.
        embedding: the embedding of tokens.
        norm: the norm after the last layer; None for encoders that normalize inside each layer.
        attention: the attention sublayer of a layer.
        ffn: the FFN sublayer of a layer.
        ffn_in: the Linears that read the FFN's input; in a gated linear unit the activated one comes first. Layers with
            a mixture of experts need none.
        ffn_out: the Linear that writes the FFN's output.
        gated: whether the FFN is W_o(act(W_g x) * W_i x) rather than W_o act(W_i x).
        activation: the config field that names the activation, or the name of the activation itself.
        text_config: the config field that holds the text model's config in multimodal models.
        causal: whether no token attends to a later one.
        norms: the norms of a layer over the model's width, in the order in which they act.
        counts_positions: whether the model derives positions from the ids that are not padding, and reserves the first
            `pad_token_id + 1` positions, as RoBERTa does.
        body: the module that the head calls, if it is not `model.base_model` itself, as in OPT.
        one_stream: whether a layer maps (B, T, d) to (B, T, d). Layers of Gemma 3n pass several streams.
        separates_documents: whether attention stays inside each document where `position_ids` restart in a row.
        reads_positions: Linears of a layer that also read embeddings of relative positions, which belong to no token.

    Raises:
        UnknownFamilyError: a name contains other characters than letters, digits, underscores and dots.
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
        # The names come from files, and are written into the code of exported models.
        for text in _texts(vars(self)):
            if not re.fullmatch(r"[\w.]*", text):
                raise UnknownFamilyError(
                    f"A family has {text!r}, but names of modules and fields are expected: use letters, digits, "
                    "underscores and dots."
                )


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in nested fields."""
    if isinstance(value, Sublayer):
        value = vars(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner)


def register_family(model_type: str, family: Family | Mapping[str, object] | str) -> None:
    """Add the family of an architecture to `FAMILIES`, or replace it.

    The family is compared with the architecture when a model of this type is loaded.

    Args:
        model_type: the `model_type` of the architecture's config.
        family: a `Family`; a dict of its fields, where a path may replace a sublayer; or another model type, whose
            registered family is used.

    Raises:
        UnknownFamilyError: the other model type has no registered family, or the fields do not describe a family.
    """
    if isinstance(family, str):
        if family not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise UnknownFamilyError(
                f"There is no family for the model type {family!r} (the modules of other models are found without "
                f"one): name one of {known}, or give fields."
            )
        FAMILIES[model_type] = FAMILIES[family]
    else:
        FAMILIES[model_type] = family_row(family)


def user_row(model_type: str) -> dict[str, Any] | None:
    """Return the fields of the family that a user registered for a model type, as plain JSON values.

    They are None for model types without a family, and for those whose family GraftLM ships.
    """
    family = FAMILIES.get(model_type)
    if family is None or family is PROVEN_FAMILIES.get(model_type):
        return None
    fields = dataclasses.asdict(family)
    return json.loads(json.dumps(fields))  # tuples become lists


def family_row(family: Family | Mapping[str, object]) -> Family:
    """Build a `Family` from a dict of its fields.

    Args:
        family: the fields, where a list may replace a tuple, and a path or a dict may replace a `Sublayer`. A `Family`
            is returned unchanged.

    Raises:
        UnknownFamilyError: this is not a dict, a field is unknown or missing, or a name has characters that names of
            modules don't have.
    """
    if isinstance(family, Family):
        return family
    if not isinstance(family, Mapping):
        raise UnknownFamilyError(
            f"The family is of type {type(family).__name__}, but a model type or a mapping of fields is expected: give "
            "the name of a type, or the paths of the modules by field."
        )
    values: dict[str, Any] = {}
    for name, value in family.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        for name in ("attention", "ffn"):
            if name in values:
                values[name] = _sublayer(values[name])
        return Family(**values)
    except TypeError as error:
        fields = ", ".join(field.name for field in dataclasses.fields(Family))
        given = ", ".join(str(name) for name in family)
        raise UnknownFamilyError(
            f"The fields {given} do not describe a family ({error}): give some or all of {fields}."
        ) from None


def _sublayer(value: object) -> Sublayer:
    """Return a sublayer of the path of its module, or of a dict of the paths where it begins and ends."""
    if isinstance(value, Sublayer):
        return value
    given = dict(value) if isinstance(value, Mapping) else {"entry": value}
    paths = {name: path for name, path in given.items() if isinstance(path, str)}
    if len(paths) < len(given) or set(paths) not in ({"entry"}, {"entry", "exit"}):
        raise UnknownFamilyError(
            f"A sublayer of the family is {shorten(repr(value))}, but the path of its module is expected: give it, or "
            "the paths `entry` and `exit`."
        )
    return Sublayer(**paths)


def _read_families() -> dict[str, Family]:
    families = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {model_type: family_row(values) for model_type, values in families.items()}


FAMILIES: dict[str, Family] = _read_families()
"""Families by model type; `register_family` adds to them."""

PROVEN_FAMILIES = dict(FAMILIES)
"""Families that the tests check. Others are checked in a pass on tensors without storage."""
