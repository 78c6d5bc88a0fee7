"""The rows that are compared on long texts: one model each, of the same size, with one difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from graftlm.errors import RecipeError
from graftlm.models import register
from graftlm.runs.graft_run import count_parameters

LABELS = {
    "slide": "sliding window",
    "transformer_xl": "Transformer-XL",
    "block_recurrent": "block-recurrent, fixed gate, skip",
    "bst_sh_s4d": "BST single-head, S4D",
    "bst_mh_s4d": "BST multi-head, S4D",
    "bst_mf_s4d": "BST multi-filter, S4D",
    "bst_sh_unstructured": "BST single-head, unstructured",
    "bst_mf_unstructured": "BST multi-filter, unstructured",
}
# Transformer-XL reads four windows behind its own, as the published row does with windows four times as long.
ROWS: dict[str, dict[str, Any]] = {
    "slide": {"mixer": "slide"},
    "transformer_xl": {"mixer": "memory", "memory_windows": 4},
    "block_recurrent": {"mixer": "recurrent"},
    "bst_sh_s4d": {"mixer": "block-state", "context": "sh", "kernel": "s4d"},
    "bst_mh_s4d": {"mixer": "block-state", "context": "mh", "kernel": "s4d"},
    "bst_mf_s4d": {"mixer": "block-state", "context": "mf", "kernel": "s4d"},
    "bst_sh_unstructured": {"mixer": "block-state", "context": "sh", "kernel": "unstructured"},
    "bst_mf_unstructured": {"mixer": "block-state", "context": "mf", "kernel": "unstructured"},
}
BLOCK_STATE = tuple(row for row in ROWS if row.startswith("bst"))


def model_of(row: str, shape: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """The `model` section of a row: `shape` with the row's difference, and an FFN as wide as `parameters` allow.

    Raises:
        RecipeError: what the row has beside its FFNs is already larger.
    """
    values = {"model_type": "block-state", **shape, **ROWS[row]}
    narrow, wide = (count(values | {"intermediate_size": inner}) for inner in (8, 16))
    inner = 8 + round(8 * (parameters - narrow) / (wide - narrow))
    if inner < 8:
        raise RecipeError(
            f"The row {row} has {narrow:,} parameters with the narrowest FFN, but {parameters:,} are asked for: "
            "raise them, or lower hidden_size."
        )
    return values | {"intermediate_size": inner}


def count(values: Mapping[str, Any]) -> int:
    """The parameters of a model with this config."""
    register()
    config = CONFIG_MAPPING[values["model_type"]](**{key: v for key, v in values.items() if key != "model_type"})
    with torch.device("meta"):
        return count_parameters(AutoModelForCausalLM.from_config(config).parameters())
