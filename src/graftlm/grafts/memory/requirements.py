"""Requirements of a memory on its backbone: the form of its attention, its rotation, and its output head."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from graftlm.backbone import Site, Sites
from graftlm.errors import GraftError
from graftlm.grafts.memory.window import WindowShape


def check_backbone(sites: Sites) -> None:
    """Check that the backbone is a decoder with full attention and Llama's rotary positions in every layer.

    Args:
        sites: sites of the backbone.

    Raises:
        GraftError: it is another kind of model.
    """
    problem = _problem(sites)
    if problem is not None:
        raise GraftError(
            f"This {sites.model_type} model {problem}, but a memory needs a decoder with full attention and Llama's "
            "rotary positions: choose another backbone, such as SmolLM2 or Qwen3."
        )


def _problem(sites: Sites) -> str | None:
    """Return why a backbone can't have a memory, as the end of a sentence; None if it can."""
    config = sites.config
    if not sites.family.causal:
        return "is an encoder"
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if set(layer_types) != {"full_attention"} or has_window:
        return "has layers with sliding windows or recurrent states"
    if not hasattr(getattr(sites.body, "rotary_emb", None), "inv_freq"):
        return "has no rotary positions"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return "has rotary positions that change with the length of the text"
    if getattr(config, "kv_lora_rank", None) or not rotates_halves(sites):
        return "rotates its keys in another way than Llama"
    return None


def rotates_halves(sites: Sites) -> bool:
    """Return whether the backbone's rotation pairs element i of a key with element i + n, as `WindowShape.moved` does.

    Args:
        sites: sites of the backbone.
    """
    attention = sites.module(Site("attention", 0))[0]
    module = sys.modules[type(attention).__module__]
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        return False
    rotation: Any = sites.body.rotary_emb
    frequencies: Tensor = rotation.inv_freq.cpu().float()
    # The sinks of this shape move by two positions.
    shape = WindowShape(window=1, sinks=0, reach=3, frequencies=frequencies)
    key = torch.linspace(-1, 1, 2 * len(frequencies))[None, None, None]
    angle = 2 * frequencies.repeat(2)[None, None]
    try:
        _, rotated = rotate(key, key, angle.cos(), angle.sin())
        return torch.allclose(rotated, shape.moved(key, torch.ones(1)), atol=1e-5)
    except (TypeError, RuntimeError, ValueError):
        return False


def is_plain(model: Any) -> bool:
    """Return whether the weights of a model's head are an ordinary tensor, rather than quantized by torchao.

    Args:
        model: model with an output head.
    """
    weight = model.get_output_embeddings().weight
    return not type(weight).__module__.startswith("torchao")


def output_embeddings(model: Any) -> Tensor:
    """Return the output embeddings (V, D), whose products with the last hidden state are the logits.

    Args:
        model: model with an output head; embeddings of a quantized head are copied.

    Raises:
        GraftError: the model has no head, or its weight is not a floating-point matrix with a row for each token, as
            with quantizations other than torchao's.
    """
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if isinstance(weight, Tensor) and not is_plain(model):
        weight = weight.dequantize()
    vocabulary = model.get_input_embeddings().num_embeddings
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape[0] >= vocabulary:
        return weight.detach()
    found = "has no output head"
    if isinstance(weight, Tensor):
        found = f"has an output head with a {weight.dtype} weight of shape {tuple(weight.shape)}"
    raise GraftError(
        f"The model {found}, but a memory needs a head with a floating-point vector for each of {vocabulary:,} tokens: "
        "load the causal language model with a head that is not quantized, or set state to none."
    )
