"""The compared models of the long-text experiments: one for each row, of equal size, with one difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from graftlm.errors import RecipeError
from graftlm.evaluation.cost import count_parameters
from graftlm.models import register

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
# What a result of a block-state row may be owed to, one at a time.
_CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "slide_ssm": ("sliding window, state space behind the embeddings", {"mixer": "block-state", "mixer_layers": []}),
    "sh_s4d": (
        "BST single-head, S4D, no state space behind the embeddings",
        {"mixer": "block-state", "positional_ssm": False, "state_size": 64},
    ),
    "sh_delta": (
        "BST single-head, delta rule, no state space behind the embeddings",
        {"mixer": "block-state", "kernel": "delta", "positional_ssm": False, "state_size": 64},
    ),
    "sh_delta_reset": (
        "BST single-head, delta rule with states of one window, no state space behind the embeddings",
        {"mixer": "block-state", "kernel": "delta", "positional_ssm": False, "state_size": 64, "reset_states": True},
    ),
    "gss_hybrid": (
        "gated state space, S4D, attention in the last layer",
        {"mixer": "state-space", "mixer_layers": "all but the last", "state_size": 64},
    ),
    "gss": ("gated state space, S4D, no attention", {"mixer": "state-space", "mixer_layers": "all", "state_size": 64}),
    "gated_delta": (
        "gated state space, delta rule, no attention",
        {"mixer": "state-space", "kernel": "delta", "mixer_layers": "all", "state_size": 64},
    ),
}
# Layers of both kinds, of the Long Range Arena's ListOps: S4 is a gated state space with S4D in place of attention.
_CHAPTER: dict[str, Any] = {"mixer_layers": [0, 1, 2, 3], "state_space_layers": [4, 5]}
_LISTS: dict[str, tuple[str, dict[str, Any]]] = {
    "listops_slide": ("sliding window, six layers", {"mixer": "slide"}),
    "listops_s4": ("S4, six layers", {"mixer": "state-space", "mixer_layers": "all"}),
    "listops_bst": ("BST:SH:S4, six layers", {"mixer_layers": "all"}),
    "listops_bst_s4": ("BST:SH:S4, four layers, and two of S4 on top (the thesis' model)", _CHAPTER),
    "listops_bst_s4_causal": ("the thesis' model, left to right", _CHAPTER | {"bidirectional": False}),
    "listops_bst_s4_last": ("the thesis' model, trained on the last bracket of a text alone", _CHAPTER),
}
# Models of transformers, of the same width, depth and number of parameters; the interval leaves no layer of attention.
# "width" stands for the width of the model.
_SINGLE = ("linear_num_key_heads", "linear_num_value_heads", "num_attention_heads", "num_key_value_heads")
_WIDE = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), "width")
_PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": (
        "gated DeltaNet (transformers, Qwen3.5's layers)",
        {"model_type": "qwen3_5_text", "full_attention_interval": 9, **_WIDE, **dict.fromkeys(_SINGLE, 1)},
    ),
    "mamba2": (
        "Mamba-2 (transformers)",
        {"model_type": "mamba2", "state_size": 128, "n_groups": 1, "expand": 4, "num_heads": 4, "head_dim": "width"}
        | {"chunk_size": 64},  # 256 by default, to which shorter texts are padded: six times as slow on 48 tokens
    ),
}
PEERS = {row: label for row, (label, _) in _PEERS.items()}
LABELS = {row: label for row, (label, _) in _MODELS.items()}
CONTROLS = {row: label for row, (label, _) in _CONTROLS.items()}
LISTS = {row: label for row, (label, _) in _LISTS.items()}
ROWS = {row: difference for row, (_, difference) in (_MODELS | _CONTROLS | _LISTS).items()}


def model_config(row: str, shape: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """The model config of a row: `shape`, the row's difference, and the FFN width that gives `parameters`.

    Raises:
        RecipeError: the row has more parameters without its FFNs.
    """
    if row in PEERS:
        return _peer_config(row, shape, parameters)
    config = {"model_type": "block-state", **shape, **ROWS[row]}
    layers = list(range(config["num_hidden_layers"]))
    named = {"all": layers, "all but the last": layers[:-1]}
    config["mixer_layers"] = named.get(str(config["mixer_layers"]), config["mixer_layers"])
    return config | {"intermediate_size": ffn_width(row, config, parameters)}


def _peer_config(row: str, shape: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")
    config = {name: shape[name] for name in names} | {"tie_word_embeddings": True, "pad_token_id": 0}
    config |= {name: shape["hidden_size"] if value == "width" else value for name, value in _PEERS[row][1].items()}
    return config | {"intermediate_size": ffn_width(row, config, parameters)}


def ffn_width(row: str, config: Mapping[str, Any], parameters: int) -> int:
    """The width of the FFNs that gives so many parameters; RecipeError if the row has more without those it has."""
    narrow, wide = (parameter_count({**config, "intermediate_size": width}) for width in (8, 16))
    if narrow == wide:
        return 8  # a model without FFNs has its own size, which a test compares
    width = 8 + round(8 * (parameters - narrow) / (wide - narrow))
    if width < 8:
        raise RecipeError(
            f"The row {row} has {narrow:,} parameters with the narrowest FFN, but {parameters:,} are asked for: "
            "raise them, or lower hidden_size."
        )
    return width


def parameter_count(config: Mapping[str, Any]) -> int:
    """The number of parameters of a model with this config."""
    with torch.device("meta"):
        return count_parameters(new_model(config).parameters())


def new_model(config: Mapping[str, Any]) -> Any:
    """A causal language model with this config, which names its `model_type`."""
    register()
    values = {name: value for name, value in config.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**values))
