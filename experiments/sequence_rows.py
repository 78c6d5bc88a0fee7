"""The compared models of the long-text experiments: one for each row, of equal size, with one difference."""

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
# Transformer-XL reads four windows behind its own, like the published row, whose windows are four times as long.
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


def model_config(row: str, shape: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """The model config of a row: `shape`, the row's difference, and the FFN width that gives `parameters`.

    Raises:
        RecipeError: the row has more parameters without its FFNs.
    """
    config = {"model_type": "block-state", **shape, **ROWS[row]}
    narrow, wide = (parameter_count(config | {"intermediate_size": width}) for width in (8, 16))
    width = 8 + round(8 * (parameters - narrow) / (wide - narrow))
    if width < 8:
        raise RecipeError(
            f"The row {row} has {narrow:,} parameters with the narrowest FFN, but {parameters:,} are asked for: "
            "raise them, or lower hidden_size."
        )
    return config | {"intermediate_size": width}


def parameter_count(config: Mapping[str, Any]) -> int:
    """The number of parameters of a model with this config."""
    with torch.device("meta"):
        return count_parameters(new_model(config).parameters())


def new_model(config: Mapping[str, Any]) -> Any:
    """A causal language model with this config, which names its `model_type`."""
    register()
    values = {name: value for name, value in config.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**values))
