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
    "assistant_early_exit",
    "output_attentions",
    "prompt_lookup_num_tokens",
    "custom_generate",
)
"""Options with which a caller decodes in another way, which stays as it is."""

_OTHER_WAYS_OF_CONFIGS = ("cache_implementation", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Those of `_OTHER_WAYS` that the generation config of a model may have."""


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
    configured = getattr(model, "generation_config", None)
    if any(getattr(configured, name, None) is not None for name in _OTHER_WAYS_OF_CONFIGS):
        return {}
    if options.get("use_cache") is False or int(options.get("num_beams") or 1) > 1:  # type: ignore[call-overload]
        return {}
    tokens = _most_tokens(options, prompt_tokens)
    limit = getattr(model, "max_static_columns", None)
    may_exceed_limit = limit is not None and (tokens is None or tokens > limit)
    if may_exceed_limit or not decodes_in_one_graph(model):
        _LOG.debug("The decode step of %s is not compiled: it is not one graph.", type(model).__name__)
        return {}
    from transformers import CompileConfig

    guard_hooks()
    # CUDA graphs reuse the memory of their results, which grafts with a state of their own would read a step later.
    mode = "default" if getattr(model, "has_decode_state", False) else "reduce-overhead"
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True  # type: ignore[assignment]
    compiled: dict[str, object] = {"cache_implementation": "static", "compile_config": config}
    if tokens is not None:
        compiled["max_cache_len"] = _columns(model, tokens, limit)
    return compiled


def _most_tokens(options: Mapping[str, object], prompt_tokens: int | None) -> int | None:
    """Return the number of tokens of the longest text that `generate` may make; None if it is unknown."""
    new_tokens = options.get("max_new_tokens")
    if prompt_tokens is None or not isinstance(new_tokens, int):
        return None
    return prompt_tokens + new_tokens


def _columns(model: PreTrainedModel, tokens: int, limit: int | None) -> int:
    """Return the smallest power of two of at least 256 columns for a number of tokens, if it exceeds no limit.

    Args:
        model: the model, whose positions are a limit.
        tokens: number of tokens, which are the least columns.
        limit: a further limit.
    """
    columns = max(_MIN_COLUMNS, 2 ** math.ceil(math.log2(tokens)))
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = [number for number in (positions, limit) if isinstance(number, int)]
    return max(tokens, min([columns, *limits]))


def decodes_in_one_graph(model: PreTrainedModel) -> bool:
    """Return whether a decode step of a model can be compiled as one graph, with all grafts that are attached."""
    own: bool | None = getattr(model, "decodes_in_one_graph", None)
    return bool(getattr(model, "_can_compile_fullgraph", False)) if own is None else own
