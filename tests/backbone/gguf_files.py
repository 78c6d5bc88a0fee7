"""Tiny models as GGUF files in float32, with the keys and the tensors that llama.cpp's converter writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""Names of llama.cpp that differ from those of transformers."""
SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys by the field of the config."""
SHIFTED = ("gemma2", "gemma3", "nemotron")
"""Architectures whose norms multiply by one more than their weight."""


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of llama.cpp: rotated pairs are neighbours, not half a head apart."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, tokenizer: Any, changes: Mapping[str, Any] | None = None) -> Path:
    """Write a model and its byte-level BPE tokenizer to `path`.

    Args:
        path: the file.
        model: the model.
        tokenizer: the tokenizer.
        changes: values by key, with or without the architecture's prefix; None removes a key. Tensors add tensors.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), arch)
    values = {f"{arch}.{key}": value for key, value in facts(config).items()} | {"tokenizer.ggml.pre": "gpt-2"}
    tensors = dict(tensors_of(model, arch))
    for key, value in (changes or {}).items():
        whole = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
        if isinstance(value, Tensor):
            tensors[key] = value
        elif value is None:
            values.pop(whole)
        else:
            values[whole] = value
    for key, value in values.items():
        add_value(writer, key, value)
    add_tokenizer(writer, tokenizer)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def facts(config: Any) -> dict[str, Any]:
    """Return the keys of a config, without the architecture's prefix."""
    values: dict[str, Any] = {}
    for field, key in SIZES.items():
        value = getattr(config, field, None)
        if value is not None:
            values[key] = value
    if config.model_type == "gpt2":
        return values | {"feed_forward_length": 4 * config.n_embd, "context_length": config.n_positions}
    if config.model_type in ("gpt2", "bloom"):
        return values | {"feed_forward_length": 4 * config.hidden_size, "context_length": 512}
    if config.model_type == "falcon":
        values |= {"attention.head_count_kv": 1, "tensor_data_layout": "jploski"}
        return values | {"rope.freq_base": config.rope_parameters["rope_theta"]}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "head_dim", None):
        values |= {"attention.key_length": width, "attention.value_length": width}
    if getattr(config, "sliding_window", None) and config.model_type in ("gemma2", "gemma3_text", "phi3"):
        values["attention.sliding_window"] = config.sliding_window
    return values | rope_facts(config, width)


def rope_facts(config: Any, width: int) -> dict[str, Any]:
    rope = config.rope_parameters
    values: dict[str, Any] = {}
    if "full_attention" in rope:
        values["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope.freq_base"] = rope["rope_theta"]
    if config.model_type in ("llama", "phi3", "stablelm", "nemotron"):
        values["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * width)
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    names = {
        "attention_factor": "attn_factor" if rope["rope_type"] == "longrope" else "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "original_max_position_embeddings": "original_context_length",
    }
    for field, key in names.items():
        if rope["rope_type"] in ("yarn", "longrope") and rope.get(field) is not None:
            values[f"rope.scaling.{key}"] = rope[field]
    return values


def tensors_of(model: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under their names in the file."""
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True):
                yield f"{names.get_name(stem + part)}.weight", half
            continue
        outer, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            outer, suffix = name, "weight"
        found = names.get_name(outer) or names.get_name(outer.removeprefix("transformer."))
        assert found is not None, name
        yield f"{found}.{suffix}", converted(weight, f"{found}.{suffix}", config, arch)
    yield from rope_factors(config)


def converted(weight: Tensor, name: str, config: Any, arch: str) -> Tensor:
    """Return a weight as the converter writes it."""
    if arch == "llama" and ".attn_q." in name:
        return interleave(weight, config.num_attention_heads)
    if arch == "llama" and ".attn_k." in name:
        return interleave(weight, config.num_key_value_heads)
    if arch in SHIFTED and name.endswith("norm.weight"):
        return weight + 1
    if arch == "gpt2" and name.endswith(("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")):
        return weight.T
    if arch == "bloom" and "attn_qkv" in name:
        parts = weight.view(config.n_head, 3, -1, *weight.shape[1:])
        return parts.transpose(0, 1).reshape(weight.shape)
    return weight


def rope_factors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with factors of the rotary frequencies."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, config.head_dim)


def llama3_factors(rope: Mapping[str, float], width: int) -> Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(width // 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (2 * pair / width))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


def add_tokenizer(writer: Any, tokenizer: Any) -> None:
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in bpe["vocab"]])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)


__all__ = ["llama3_factors", "write_gguf"]
