"""Rotary frequencies of a model in a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graftlm.backbone.gguf_header import GgufHeader, refused_fact
from graftlm.backbone.gguf_keys import Architecture, ConfigFields
from graftlm.errors import BackboneError

FREQUENCIES = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of all published models with Llama 3's scaling."""

_WITHOUT_EFFECT = {
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 0.0),
}
"""Values with which the keys that change the rotation change nothing, whatever the type of the scaling."""
_APPLIED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"rope.scaling.factor", "rope.scale_linear"},
    "yarn": {
        "rope.scaling.factor",
        "rope.scale_linear",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_ext_factor",
    },
    "llama3": set(),
    "longrope": {"rope.scaling.attn_factor"},
}
"""The keys among them that a type of transformers applies."""


def rope_parameters(name: str, header: GgufHeader, architecture: Architecture, values: ConfigFields) -> ConfigFields:
    """Return the config's `rope_parameters`, from the metadata and from the tensors with factors.

    Args:
        name: name of the model in messages.
        header: the file's header.
        architecture: the file's architecture.
        values: fields of the config: the width of the heads and the longest text.

    Raises:
        BackboneError: the file states another scaling than transformers has, or factors of another length.
    """
    head_width = values.get("head_dim") or header.number("embedding_length") // header.number("attention.head_count")
    rotated = head_width
    if header.value("rope.dimension_count"):
        rotated = header.number("rope.dimension_count")
    parameters: ConfigFields = {"rope_theta": header.value("rope.freq_base") or architecture.rope_base}
    if architecture.partial_rotary:
        parameters["partial_rotary_factor"] = rotated / head_width
    elif rotated != head_width:
        raise refused_fact(name, f"{header.architecture}.rope.dimension_count", rotated)
    scaling = _scaling(name, header, values, rotated)
    _check_all_applied(name, header, scaling["rope_type"])
    parameters |= scaling
    if header.architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": header.value("rope.freq_base_swa") or 10_000.0}
        return {"full_attention": parameters, "sliding_attention": local}
    return parameters


def _scaling(name: str, header: GgufHeader, values: ConfigFields, rotated: int) -> ConfigFields:
    """Return the type of the scaling and its own parameters."""
    kind = header.value("rope.scaling.type") or "linear"
    factor = header.value("rope.scaling.factor") or header.value("rope.scale_linear") or 1.0
    if LONG in header.factors or SHORT in header.factors or FREQUENCIES in header.factors:
        if kind not in ("none", "linear", "longrope"):
            raise refused_fact(name, f"{header.architecture}.rope.scaling.type", kind)
        return _factors(name, header, values, rotated)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **_yarn(header, values)}
    raise refused_fact(name, f"{header.architecture}.rope.scaling.type", kind)


def _check_all_applied(name: str, header: GgufHeader, rope_type: str) -> None:
    """Raise `BackboneError` for a key that changes the rotation, but not that of the type."""
    applied = _APPLIED[rope_type]
    if header.value("rope.scaling.type") == "none":  # The factor does not count then.
        applied = applied | {"rope.scaling.factor", "rope.scale_linear"}
    for key, values in _WITHOUT_EFFECT.items():
        found = header.value(key)
        if found is not None and key not in applied and found not in values:
            raise refused_fact(name, f"{header.architecture}.{key}", found)


def _yarn(header: GgufHeader, values: ConfigFields) -> ConfigFields:
    """Return the parameters of YaRN that the file states."""
    found = {
        "original_max_position_embeddings": header.value("rope.scaling.original_context_length")
        or values["max_position_embeddings"],
        "attention_factor": header.value("rope.scaling.yarn_attn_factor"),
        "beta_fast": header.value("rope.scaling.yarn_beta_fast"),
        "beta_slow": header.value("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _factors(name: str, header: GgufHeader, values: ConfigFields, rotated: int) -> ConfigFields:
    """Return the scaling of frequencies that are divided by factors."""
    every = header.factors.get(FREQUENCIES)
    short = header.factors.get(SHORT, every)
    long = header.factors.get(LONG, every)
    if short is None or long is None or not len(short) == len(long) == rotated // 2:
        found = {key: len(factors) for key, factors in header.factors.items()}
        raise BackboneError(
            f"The GGUF file {name} has factors of rotary frequencies of the lengths {found}, but {rotated // 2} of "
            "each are expected: name the model's safetensors checkpoint."
        )
    base = header.value("rope.freq_base") or 10_000.0
    if every is not None and isinstance(base, int | float) and _is_llama3(every, base, rotated):
        return {"rope_type": "llama3", "factor": max(every), **_LLAMA3}
    longest = values["max_position_embeddings"]
    return {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": header.value("rope.scaling.original_context_length") or longest,
        "attention_factor": header.value("rope.scaling.attn_factor") or 1.0,
    }


def _is_llama3(factors: Sequence[float], base: float, rotated: int) -> bool:
    """Return whether Llama 3's scaling, with the largest of the factors as its own, has these factors."""
    largest = max(factors)
    longest = _LLAMA3["original_max_position_embeddings"]
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    for pair, factor in enumerate(factors):
        wavelength = 2 * math.pi * base ** (2 * pair / rotated)
        smooth = min(1.0, max(0.0, (longest / wavelength - low) / (high - low)))
        expected = 1 / ((1 - smooth) / largest + smooth)
        if not math.isclose(factor, expected, rel_tol=1e-4):
            return False
    return largest > 1
