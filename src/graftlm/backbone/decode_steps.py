"""Compiled decode steps: the options of `generate` with which every new token is one compiled graph."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from graftlm.backbone.compiled_code import guard_hooks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)

COMPILING_DEVICES = ("cuda", "xpu")
"""Types of devices on which steps are compiled unless the user says otherwise: launching operations takes longer there
than computing them."""

_MIN_COLUMNS = 256
_OTHER_WAYS = (
    "past_key_values",
    "cache_implementation",
    "compile_config",
    "disable_compile",
    "generation_config",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "custom_generate",
)
"""Options with which a caller decodes in another way, which stays as it is."""


def compiled_decoding(
    model: PreTrainedModel,
    options: Mapping[str, object],
    *,
    prompt_tokens: int | None = None,
    wanted: bool | None = None,
) -> dict[str, object]:
    """Return options that make `generate` decode with a static cache and a compiled step.

    transformers compiles the step, by default with CUDA graphs. The first step with a new number of rows takes up to a
    minute.

    Args:
        model: a model of transformers, or a `GraftedModel`.
        options: the caller's options of `generate`.
        prompt_tokens: number of tokens of the padded prompts. With it, the cache has a power of two of columns, so that
            most longer prompts do not compile the step again.
        wanted: whether to compile; None takes the attribute `compiles_decoding` of the model. If that is None too,
            steps are compiled on accelerators only, where launching operations takes longer than computing them.

    Returns:
        The options to add; empty if the model's step is no single graph, or the caller decodes in another way.
    """
    if wanted is None:
        wanted = getattr(model, "compiles_decoding", None)
    if wanted is None:
        wanted = model.device.type in COMPILING_DEVICES
    if not wanted or any(options.get(name) is not None for name in _OTHER_WAYS):
        return {}
    if options.get("use_cache") is False or int(options.get("num_beams") or 1) > 1:  # type: ignore[call-overload]
        return {}
    if not decodes_in_one_graph(model):
        _LOG.debug("The decode step of %s is not compiled: it is not one graph.", type(model).__name__)
        return {}
    from transformers import CompileConfig

    guard_hooks()
    # CUDA graphs reuse the memory of their results, which grafts with a state of their own would read a step later.
    mode = "default" if getattr(model, "has_decode_state", False) else "reduce-overhead"
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True  # type: ignore[assignment]
    compiled: dict[str, object] = {"cache_implementation": "static", "compile_config": config}
    new_tokens = options.get("max_new_tokens")
    if prompt_tokens is not None and isinstance(new_tokens, int):
        compiled["max_cache_len"] = _columns(model, prompt_tokens + new_tokens)
    return compiled


def _columns(model: PreTrainedModel, tokens: int) -> int:
    """Return the smallest power of two of at least 256 columns for a number of tokens, or the model's positions."""
    columns = max(_MIN_COLUMNS, 2 ** math.ceil(math.log2(tokens)))
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return max(tokens, min(columns, limit)) if isinstance(limit, int) else columns


def decodes_in_one_graph(model: PreTrainedModel) -> bool:
    """Return whether a decode step of a model can be compiled as one graph, with all grafts that are attached."""
    own: bool | None = getattr(model, "decodes_in_one_graph", None)
    return bool(getattr(model, "_can_compile_fullgraph", False)) if own is None else own
