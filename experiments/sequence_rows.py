"""The compared models of the long-text experiments: one for each row, of equal size, with one difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from graftlm.errors import RecipeError
from graftlm.models import register
from graftlm.runs.graft_run import count_parameters

_CONTEXTS = {"sh": "single-head", "mh": "multi-head", "mf": "multi-filter"}
_KERNELS = {"s4d": ("S4D", _CONTEXTS), "unstructured": ("unstructured", ("sh", "mf"))}
# Label and difference; Transformer-XL reads four windows behind its own, like the published row, whose windows are four
# times as long.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "slide": ("sliding window", {"mixer": "slide"}),
    "transformer_xl": ("Transformer-XL", {"mixer": "memory", "memory_windows": 4}),
    "block_recurrent": ("block-recurrent, fixed gate, skip", {"mixer": "recurrent"}),
} | {
    f"bst_{context}_{kernel}": (
        f"BST {_CONTEXTS[context]}, {name}",
        {"mixer": "block-state", "context": context, "kernel": kernel},
    )
    for kernel, (name, contexts) in _KERNELS.items()
    for context in contexts
}
LABELS = {row: label for row, (label, _) in _MODELS.items()}
ROWS = {row: difference for row, (_, difference) in _MODELS.items()}
BLOCK_STATE = tuple(row for row in ROWS if row.startswith("bst_"))


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
