"""The config of a model in a GGUF file: every fact of the file is applied, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from graftlm.backbone.gguf_header import GgufHeader, refused_fact
from graftlm.backbone.gguf_keys import ARCHITECTURES, Architecture, ConfigFields, EqualTo, Expected, KeyUse, Read
from graftlm.backbone.gguf_rope import rope_parameters
from graftlm.backbone.patching import replaced_attributes
from graftlm.errors import BackboneError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_REMEDY = "name the model's safetensors checkpoint."
_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and number of layers of the models that scale attention by the width per head, not by the heads' own."""


def gguf_config(name: str, header: GgufHeader) -> PreTrainedConfig | None:
    """Make the config of the model in a GGUF file; None if transformers makes it.

    Args:
        name: name of the model in messages.
        header: the file's header.

    Raises:
        BackboneError: the architecture is unknown, or the file states a fact that the model can't have.
    """
    from transformers import CONFIG_MAPPING

    architecture = _architecture(name, header)
    read = _read_keys(name, header, architecture.keys)
    if architecture.by_transformers:
        _check_recurrent_layers(name, header)
        return None
    values: ConfigFields = {
        **architecture.constants,
        **read,
        **{field: f"blk.0.{tensor}" in header.shapes for field, tensor in architecture.tensors.items()},
        "vocab_size": _vocabulary(name, header),
        "tie_word_embeddings": "output.weight" not in header.shapes,
    }
    for field, key in _SPECIAL_TOKENS.items():
        values[field] = header.metadata.get(key)
    values |= _attention(name, header, architecture)
    values |= _layers(name, header, architecture, values)
    if architecture.rope_base:
        values["rope_parameters"] = rope_parameters(name, header, architecture, values)
    try:
        config = CONFIG_MAPPING[architecture.model_type](**values)
    except Exception as error:  # The checks of transformers' configs raise errors of several types.
        raise BackboneError(
            f"The GGUF file {name} states sizes that contradict each other ({first_line(error)}): {_REMEDY}"
        ) from error
    return config


@contextmanager
def stated_config(config: PreTrainedConfig | None) -> Iterator[None]:
    """Let transformers choose the tokenizer of a GGUF file by this config, instead of reading the file for its own.

    Args:
        config: the config of `gguf_config`; None leaves the choice to transformers.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    if config is None:
        yield
        return
    stated = {"config": config.to_dict()}
    with replaced_attributes(reading, load_gguf_checkpoint=lambda *_, **__: stated):
        yield


def end_tokens(header: GgufHeader) -> list[int]:
    """Return the tokens that end a text, an answer or a message."""
    found = [header.metadata.get(key) for key in _END_TOKENS]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _architecture(name: str, header: GgufHeader) -> Architecture:
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise BackboneError(
            f"The GGUF file {name} contains a model of the architecture {header.architecture!r}, but GraftLM reads "
            f"{', '.join(sorted(ARCHITECTURES))}: {_REMEDY}"
        )
    return found


def _read_keys(name: str, header: GgufHeader, keys: Mapping[str, KeyUse]) -> ConfigFields:
    """Return the fields that keys state directly, after a check of all keys of the architecture."""
    values: ConfigFields = {}
    prefix = f"{header.architecture}."
    for key, value in header.metadata.items():
        if not key.startswith(prefix):
            continue
        use = keys.get(key.removeprefix(prefix))
        if use is None or not _is_expected(use, value, header):
            raise refused_fact(name, key, value)
        if isinstance(use, Read):
            if isinstance(value, list):
                raise refused_fact(name, key, value)
            values[use.field] = value
    for key, use in keys.items():
        if "epsilon" in key and isinstance(use, Read) and use.field not in values:
            raise BackboneError(
                f"The GGUF file {name} does not state {prefix}{key}, without which the norms are unknown: {_REMEDY}"
            )
    return values


def _is_expected(use: KeyUse, value: object, header: GgufHeader) -> bool:
    """Return whether a value is one that the model has anyway. Other keys than those with fixed values pass."""
    if isinstance(use, Expected):
        return value in use.values
    if isinstance(use, EqualTo):
        other = header.value(use.key)
        return isinstance(other, int | float) and value == other * use.factor
    return True


def _vocabulary(name: str, header: GgufHeader) -> int:
    """Return the number of rows of the token embeddings."""
    shape = header.shapes.get("token_embd.weight")
    if shape is None:
        raise BackboneError(
            f"The GGUF file {name} has no token embeddings, so it contains no whole model: name another file."
        )
    return shape[0]


def _attention(name: str, header: GgufHeader, architecture: Architecture) -> ConfigFields:
    """Return the number and the width of the heads, and the scale of attention."""
    heads = header.number("attention.head_count")
    per_head = header.number("embedding_length") // heads
    values: ConfigFields = {}
    counts_shared_heads = isinstance(architecture.keys.get("attention.head_count_kv"), Read)
    if counts_shared_heads and header.value("attention.head_count_kv") is None:
        values["num_key_value_heads"] = heads
    if "attention.key_length" not in architecture.keys:
        return values
    # In files of Llamas without the length, all values of a head are rotated.
    rotated = header.value("rope.dimension_count") if header.architecture == "llama" else None
    width = header.value("attention.key_length") or rotated or per_head
    value_width = header.value("attention.value_length") or width
    if width != value_width:
        raise refused_fact(name, f"{header.architecture}.attention.value_length", value_width)
    values["head_dim"] = width
    if header.architecture.startswith("gemma"):
        is_largest = (header.architecture, header.number("block_count")) in _LARGEST_GEMMAS
        values["query_pre_attn_scalar"] = per_head if is_largest else width
    return values


def _layers(name: str, header: GgufHeader, architecture: Architecture, values: ConfigFields) -> ConfigFields:
    """Return the fields that describe the layers: their types, windows and residual connections."""
    count = header.number("block_count")
    if header.architecture == "stablelm":
        return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in header.shapes}
    if header.architecture == "lfm2":
        return _short_convolutions(header)
    if header.architecture == "phi3":
        return {"sliding_window": values.get("sliding_window") or None}
    if not architecture.window_period:
        return {}
    pattern = header.value("attention.sliding_window_pattern")
    period = architecture.window_period
    if isinstance(pattern, list):
        is_windowed = [bool(value) for value in pattern]
    else:
        period = pattern if isinstance(pattern, int) else period
        is_windowed = [period == 0 or (layer + 1) % period != 0 for layer in range(count)]
    if len(is_windowed) != count:
        raise refused_fact(name, f"{header.architecture}.attention.sliding_window_pattern", pattern)
    if not values.get("sliding_window"):
        is_windowed = [False] * count
    return {
        "sliding_window": values.get("sliding_window") or None,
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in is_windowed],
    }


def _check_recurrent_layers(name: str, header: GgufHeader) -> None:
    """Raise `BackboneError` if other layers attend than the interval says, from which transformers makes the config."""
    recurrent = header.value("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        return
    interval = header.number("full_attention_interval")
    if any(bool(found) != bool((layer + 1) % interval) for layer, found in enumerate(recurrent)):
        raise refused_fact(name, f"{header.architecture}.attention.recurrent_layers", recurrent)


def _short_convolutions(header: GgufHeader) -> ConfigFields:
    """Return which layers of an LFM2 attend: the file counts the heads of each layer, none for convolutions."""
    heads = header.value("attention.head_count_kv")
    if not isinstance(heads, list):
        heads = [header.number("attention.head_count_kv")] * header.number("block_count")
    counts = [int(number) for number in heads]
    return {
        "num_key_value_heads": max(counts),
        "layer_types": ["full_attention" if number else "conv" for number in counts],
    }
