"""What a GGUF file states about a model: the keys of llama.cpp, from a config of transformers.

The keys are those of the table that reads them. Before a file is written, they are read again, and a config that they
can't express is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from graftlm.backbone.gguf_config import gguf_config
from graftlm.backbone.gguf_header import GgufHeader, GgufValue
from graftlm.backbone.gguf_keys import ARCHITECTURES, Read
from graftlm.backbone.gguf_rope import FREQUENCIES
from graftlm.errors import ArtifactError, BackboneError, first_line, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Facts = dict[str, GgufValue]
"""Values by key. Integers are written in 32 bits without a sign, floats in 32 bits."""


@dataclass(frozen=True)
class FileForm:
    """How the files of an architecture differ from transformers' models.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        pairs: whether the values that rotate together are neighbours in queries and keys, not half a head apart.
        shift: what is added to the weights of norms.
        ties: whether the head is always that of the token embeddings.
    """

    architecture: str
    pairs: bool = False
    shift: float = 0.0
    ties: bool = False


FORMS = {
    "llama": FileForm("llama", pairs=True),
    "qwen2": FileForm("qwen2"),
    "qwen3": FileForm("qwen3"),
    "gemma2": FileForm("gemma2", shift=1.0, ties=True),
    "gemma3_text": FileForm("gemma3", shift=1.0),
}
"""By transformers' name of the architecture."""

_COMPUTING = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "use_bidirectional_attention",
    "vocab_size",
)
"""The fields of these architectures' configs on which their computation depends."""
_YARN = {
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def form_of(config: PreTrainedConfig) -> FileForm:
    """Return the form of a model's files.

    Raises:
        ArtifactError: the architecture can't be written.
    """
    form = FORMS.get(config.model_type)
    if form is None:
        raise ArtifactError(
            f"The model is a {config.model_type}, but GGUF files are written of {', '.join(FORMS)}: export it as a "
            "folder (--to FOLDER), and convert that with llama.cpp."
        )
    return form


def facts_of(config: PreTrainedConfig, form: FileForm) -> Facts:
    """Return what a file states about a model, without its tokenizer.

    Args:
        config: the model's config.
        form: the form of its files.
    """
    facts: Facts = {}
    for key, use in ARCHITECTURES[form.architecture].keys.items():
        value = getattr(config, use.field, None) if isinstance(use, Read) else None
        if value is not None:
            facts[key] = value
    width = _head_width(config)
    facts |= {"attention.key_length": width, "attention.value_length": width}
    facts["vocab_size"] = config.vocab_size
    if form.pairs:
        facts["rope.dimension_count"] = width
    period = _period(config)
    if period not in (None, ARCHITECTURES[form.architecture].window_period):
        facts["attention.sliding_window_pattern"] = period
    facts |= _rope_facts(config.rope_parameters)
    return {f"{form.architecture}.{key}": value for key, value in facts.items()}


def _period(config: PreTrainedConfig) -> int | None:
    """Return the number of layers after which one attends to all tokens; None if no layer has a window."""
    types = getattr(config, "layer_types", None) or []
    if "sliding_attention" not in types:
        return None
    return types.index("full_attention") + 1 if "full_attention" in types else 0


def _rope_facts(rope: Mapping[str, object]) -> Facts:
    """Return what a file states about rotary positions."""
    facts: Facts = {}
    if "full_attention" in rope:
        facts["rope.freq_base_swa"] = _base(cast("Mapping[str, object]", rope["sliding_attention"]))
        rope = cast("Mapping[str, object]", rope["full_attention"])
    facts["rope.freq_base"] = _base(rope)
    kind = str(rope.get("rope_type", "default"))
    if kind in ("linear", "yarn"):
        facts["rope.scaling.type"] = kind
        facts["rope.scaling.factor"] = float(cast("float", rope["factor"]))
    if kind == "yarn":
        for field, key in _YARN.items():
            value = rope.get(field)
            if isinstance(value, int | float):
                facts[f"rope.scaling.{key}"] = value
    return facts


def _base(rope: Mapping[str, object]) -> float:
    return float(cast("float", rope["rope_theta"]))


def frequency_factors(config: PreTrainedConfig) -> list[float]:
    """Return the factors by which Llama 3's scaling divides the rotary frequencies; an empty list without it."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return []
    width = _head_width(config)
    factors = []
    for pair in range(width // 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (2 * pair / width))
        share = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        share = min(1.0, max(0.0, share))
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return factors


def check_facts(config: PreTrainedConfig, form: FileForm, facts: Facts, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ArtifactError` if a model that is made from a file's facts would compute something else.

    Args:
        config: the model's config.
        form: the form of its files.
        facts: what the file states.
        shapes: shape of each tensor of the file.
    """
    factors = frequency_factors(config)
    header = GgufHeader(form.architecture, facts, shapes, {FREQUENCIES: factors} if factors else {})
    try:
        read = gguf_config("the new file", header)
    except BackboneError as error:
        raise _inexpressible(config, first_line(error)) from error
    assert read is not None, "transformers makes no config of these architectures itself"
    for field in _COMPUTING:
        expected, found = _field(config, field), _field(read, field)
        if not _are_equal(expected, found):
            raise _inexpressible(config, f"{field} is {shorten(repr(expected))}, which it would read as {found!r}")
    if form.ties and not config.tie_word_embeddings:
        raise _inexpressible(config, "the head is not that of the token embeddings")


def _inexpressible(config: PreTrainedConfig, problem: str) -> ArtifactError:
    return ArtifactError(
        f"A GGUF file can't express this {config.model_type} model ({problem}): export it as a folder (--to FOLDER)."
    )


def _field(config: PreTrainedConfig, field: str) -> object:
    return _head_width(config) if field == "head_dim" else getattr(config, field, None)


def _head_width(config: PreTrainedConfig) -> int:
    """Return the width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _are_equal(one: object, other: object) -> bool:
    """Return whether two values of a config are equal; floats but for their rounding to 32 bits."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = {key for values in (one, other) for key, value in values.items() if value is not None}
        return all(_are_equal(one.get(key), other.get(key)) for key in keys)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
