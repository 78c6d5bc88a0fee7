"""The compared models of the long-text experiments: one for each row, of equal size, with one difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from graftlm.errors import RecipeError
from graftlm.evaluation.cost import count_parameters
from graftlm.models import register

# Rows with a label, and the keys in which their model config differs from the shared one.
LabelledRows = dict[str, tuple[str, dict[str, Any]]]

_CONTEXTS = {
    "sh": "single-head",
    "mh": "multi-head",
    "mf": "multi-filter",
}
_KERNELS = {
    "s4d": ("S4D", ("sh", "mh", "mf")),
    "unstructured": ("unstructured", ("sh", "mf")),
}


def _published_rows() -> LabelledRows:
    """Return the rows of the thesis' comparison.

    Transformer-XL reads four windows before its own, like the published row, whose windows are four times as long.
    """
    rows: LabelledRows = {
        "slide": ("sliding window", {"mixer": "slide"}),
        "transformer_xl": ("Transformer-XL", {"mixer": "memory", "memory_windows": 4}),
        "block_recurrent": ("block-recurrent, fixed gate, skip", {"mixer": "recurrent"}),
    }
    for kernel, (name, contexts) in _KERNELS.items():
        for context in contexts:
            label = f"BST {_CONTEXTS[context]}, {name}"
            difference = {"mixer": "block-state", "context": context, "kernel": kernel}
            rows[f"bst_{context}_{kernel}"] = (label, difference)
    return rows


_MODELS = _published_rows()
# Rows that separate the possible causes of a block-state row's result.
_CONTROLS: LabelledRows = {
    "slide_ssm": (
        "sliding window, state space behind the embeddings",
        {"mixer": "block-state", "mixer_layers": []},
    ),
    "sh_s4d": (
        "BST single-head, S4D, no state space behind the embeddings",
        {"mixer": "block-state", "positional_ssm": False, "state_size": 64},
    ),
    "sh_delta": (
        "BST single-head, delta rule, no state space behind the embeddings",
        {
            "mixer": "block-state",
            "kernel": "delta",
            "positional_ssm": False,
            "state_size": 64,
        },
    ),
    "sh_delta_reset": (
        "BST single-head, delta rule with states of one window, no state space behind the embeddings",
        {
            "mixer": "block-state",
            "kernel": "delta",
            "positional_ssm": False,
            "state_size": 64,
            "reset_states": True,
        },
    ),
    "gss_hybrid": (
        "gated state space, S4D, attention in the last layer",
        {"mixer": "state-space", "mixer_layers": "all but the last", "state_size": 64},
    ),
    "gss": (
        "gated state space, S4D, no attention",
        {"mixer": "state-space", "mixer_layers": "all", "state_size": 64},
    ),
    "gated_delta": (
        "gated state space, delta rule, no attention",
        {
            "mixer": "state-space",
            "kernel": "delta",
            "mixer_layers": "all",
            "state_size": 64,
        },
    ),
}
# Layers of both kinds, for ListOps of the Long Range Arena. S4 is a gated state space with S4D that replaces attention.
_CHAPTER: dict[str, Any] = {
    "mixer_layers": [0, 1, 2, 3],
    "state_space_layers": [4, 5],
}
_LISTS: LabelledRows = {
    "listops_slide": (
        "sliding window, six layers",
        {"mixer": "slide"},
    ),
    "listops_s4": (
        "S4, six layers",
        {"mixer": "state-space", "mixer_layers": "all"},
    ),
    "listops_bst": (
        "BST:SH:S4, six layers",
        {"mixer_layers": "all"},
    ),
    "listops_bst_s4": (
        "BST:SH:S4, four layers, and two of S4 on top (the thesis' model)",
        _CHAPTER,
    ),
    "listops_bst_s4_causal": (
        "the thesis' model, left to right",
        {**_CHAPTER, "bidirectional": False},
    ),
    "listops_bst_s4_last": (
        "the thesis' model, trained on the last bracket of a text alone",
        _CHAPTER,
    ),
}
# Models of transformers with the same width, depth and number of parameters. The value "width" is replaced by the
# width of the model.
_PEERS: LabelledRows = {
    "gated_deltanet": (
        "gated DeltaNet (transformers, Qwen3.5's layers)",
        {
            "model_type": "qwen3_5_text",
            "full_attention_interval": 9,  # more than the layers, so that none has full attention
            "linear_key_head_dim": "width",
            "linear_value_head_dim": "width",
            "head_dim": "width",
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        },
    ),
    "mamba2": (
        "Mamba-2 (transformers)",
        {
            "model_type": "mamba2",
            "state_size": 128,
            "n_groups": 1,
            "expand": 4,
            "num_heads": 4,
            "head_dim": "width",
            # The default is 256, to which shorter texts are padded: six times as slow on 48 tokens.
            "chunk_size": 64,
        },
    ),
}


def _labels(rows: LabelledRows) -> dict[str, str]:
    return {row: label for row, (label, _) in rows.items()}


PEERS = _labels(_PEERS)
LABELS = _labels(_MODELS)
CONTROLS = _labels(_CONTROLS)
LISTS = _labels(_LISTS)
ROWS = {row: difference for row, (_, difference) in (_MODELS | _CONTROLS | _LISTS).items()}


def model_config(row: str, shape: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """Return the model config of a row: the shared shape, the row's difference, and the fitting FFN width.

    Args:
        row: name of the row.
        shape: keys of the model config that all rows share.
        parameters: number of parameters that the width of the FFNs is fitted to.

    Raises:
        RecipeError: the row has more parameters even without its FFNs.
    """
    if row in PEERS:
        return _peer_config(row, shape, parameters)
    config = {"model_type": "block-state", **shape, **ROWS[row]}
    layers = list(range(config["num_hidden_layers"]))
    if config["mixer_layers"] == "all":
        config["mixer_layers"] = layers
    elif config["mixer_layers"] == "all but the last":
        config["mixer_layers"] = layers[:-1]
    config["intermediate_size"] = ffn_width(row, config, parameters)
    return config


def _peer_config(row: str, shape: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    config = {
        "vocab_size": shape["vocab_size"],
        "hidden_size": shape["hidden_size"],
        "num_hidden_layers": shape["num_hidden_layers"],
        "initializer_range": shape["initializer_range"],
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    _, difference = _PEERS[row]
    for name, value in difference.items():
        config[name] = shape["hidden_size"] if value == "width" else value
    config["intermediate_size"] = ffn_width(row, config, parameters)
    return config


def ffn_width(row: str, config: Mapping[str, Any], parameters: int) -> int:
    """Return the width of the FFNs with which a model has a given number of parameters.

    Args:
        row: name of the row, for the error message.
        config: the model config, without `intermediate_size`.
        parameters: number of parameters to reach, up to rounding.

    Raises:
        RecipeError: the row has more parameters even with the narrowest FFN.
    """
    narrow = parameter_count({**config, "intermediate_size": 8})
    wide = parameter_count({**config, "intermediate_size": 16})
    if narrow == wide:
        return 8  # A model without FFNs has its own size, which a test compares.
    width = 8 + round(8 * (parameters - narrow) / (wide - narrow))
    if width < 8:
        raise RecipeError(
            f"The row {row} has {narrow:,} parameters with the narrowest FFN, but {parameters:,} are asked for: "
            "raise them, or lower hidden_size."
        )
    return width


def parameter_count(config: Mapping[str, Any]) -> int:
    """Return the number of parameters of a model with this config."""
    with torch.device("meta"):
        return count_parameters(new_model(config).parameters())


def new_model(config: Mapping[str, Any]) -> Any:
    """Return a new causal language model with this config, which names its `model_type`."""
    register()
    values = dict(config)
    config_class = CONFIG_MAPPING[values.pop("model_type")]
    return AutoModelForCausalLM.from_config(config_class(**values))
