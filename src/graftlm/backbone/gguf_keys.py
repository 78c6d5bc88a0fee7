"""What becomes of the facts of a GGUF file: a table of its keys per architecture.

A key of the architecture that has no row is refused, because a model without one of its facts computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ConfigFields = dict[str, Any]
"""Fields of a config of transformers by their names."""


@dataclass(frozen=True)
class Read:
    """The key becomes a field of the config."""

    field: str


@dataclass(frozen=True)
class Computed:
    """The key is one of several from which a field of the config is computed."""

    field: str


@dataclass(frozen=True)
class Ignored:
    """The key says nothing about the logits."""

    reason: str


@dataclass(frozen=True)
class Expected:
    """The key must have one of these values, which the architecture has anyway; others are refused."""

    values: tuple[bool | int | float | str, ...]


@dataclass(frozen=True)
class EqualTo:
    """The key must equal the value of another key, times a factor; other values are refused."""

    key: str
    factor: int = 1


KeyUse = Read | Computed | Ignored | Expected | EqualTo


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        model_type: transformers' name of the architecture.
        keys: use of each key, without the architecture's prefix.
        constants: fields of the config if no key states them.
        tensors: fields of the config that are true if the first layer has this tensor.
        window_period: with sliding windows, every so many layers one attends to all tokens; 0 if all layers have the
            window.
        rope_base: base of the rotary frequencies if the file states none; 0 if the architecture has none.
        partial_rotary: whether a part of a head may be rotated.
        by_transformers: whether transformers makes the config, from all keys of the table that are read.
    """

    model_type: str
    keys: Mapping[str, KeyUse]
    constants: Mapping[str, object] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    window_period: int = 0
    rope_base: float = 10_000.0
    partial_rotary: bool = False
    by_transformers: bool = False


_UNUSED = Ignored("nothing of the computation depends on it")
_DENSE: dict[str, KeyUse] = {"expert_count": Expected((0,)), "expert_used_count": Expected((0,))}
_SIZES: dict[str, KeyUse] = {
    "block_count": Read("num_hidden_layers"),
    "context_length": Read("max_position_embeddings"),
    "embedding_length": Read("hidden_size"),
    "feed_forward_length": Read("intermediate_size"),
    "attention.head_count": Read("num_attention_heads"),
    "vocab_size": Ignored("the rows of the token embeddings are counted"),
    "attention.causal": Expected((True,)),
    "pooling_type": Ignored("it tells servers how to pool embeddings"),
    "logit_scale": Expected((0.0, 1.0)),
    "attention.clamp_kqv": Expected((0.0,)),
    "attention.max_alibi_bias": Expected((0.0,)),
}
_ROPE: dict[str, KeyUse] = {
    "rope.dimension_count": Computed("rope_parameters"),
    "rope.freq_base": Computed("rope_parameters"),
    "rope.scale_linear": Computed("rope_parameters"),
    "rope.scaling.type": Computed("rope_parameters"),
    "rope.scaling.factor": Computed("rope_parameters"),
    "rope.scaling.attn_factor": Computed("rope_parameters"),
    "rope.scaling.original_context_length": Computed("rope_parameters"),
    "rope.scaling.yarn_attn_factor": Computed("rope_parameters"),
    "rope.scaling.yarn_beta_fast": Computed("rope_parameters"),
    "rope.scaling.yarn_beta_slow": Computed("rope_parameters"),
    "rope.scaling.yarn_ext_factor": Expected((1.0, -1.0)),
    "rope.scaling.yarn_log_multiplier": Expected((0.0,)),
    "rope.scaling.alpha": Expected((0.0,)),
    "rope.scaling.finetuned": _UNUSED,
}
_GROUPED: dict[str, KeyUse] = {"attention.head_count_kv": Read("num_key_value_heads")}
_HEADS: dict[str, KeyUse] = {
    "attention.key_length": Computed("head_dim"),
    "attention.value_length": Computed("head_dim"),
}
_RMS: dict[str, KeyUse] = {"attention.layer_norm_rms_epsilon": Read("rms_norm_eps")}
_NO_WINDOW: dict[str, KeyUse] = {"attention.sliding_window": Expected((0,))}
_LLAMA_LIKE = {**_SIZES, **_GROUPED, **_ROPE, **_HEADS, **_RMS, **_NO_WINDOW}
_WINDOWED: dict[str, KeyUse] = {
    "attention.sliding_window": Read("sliding_window"),
    "attention.sliding_window_pattern": Computed("layer_types"),
}
_EXPERTS: dict[str, KeyUse] = {
    "expert_count": Read("num_experts"),
    "expert_used_count": Read("num_experts_per_tok"),
    "expert_feed_forward_length": Read("moe_intermediate_size"),
    "expert_weights_norm": Read("norm_topk_prob"),
    "expert_weights_scale": Expected((0.0, 1.0)),
    "expert_gating_func": Expected((0, 1)),
    "expert_group_count": Expected((0, 1)),
    "expert_group_used_count": Expected((0, 1)),
}
_EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"}
_SHARED_EXPERT: dict[str, KeyUse] = {
    "expert_shared_feed_forward_length": Read("shared_expert_intermediate_size"),
}
_QWEN35: dict[str, KeyUse] = {
    **_SIZES,
    **_GROUPED,
    **_RMS,
    **{key: use if isinstance(use, Ignored) else Expected(()) for key, use in _ROPE.items()},
    "attention.key_length": Read("head_dim"),
    "attention.value_length": EqualTo("attention.key_length"),
    "rope.dimension_count": Computed("rope_parameters"),
    "rope.dimension_sections": Computed("rope_parameters"),
    "rope.freq_base": Computed("rope_parameters"),
    "full_attention_interval": Read("full_attention_interval"),
    "attention.recurrent_layers": Computed("layer_types"),
    "ssm.conv_kernel": Read("linear_conv_kernel_dim"),
    "ssm.group_count": Read("linear_num_key_heads"),
    "ssm.inner_size": Computed("linear_value_head_dim"),
    "ssm.state_size": Read("linear_key_head_dim"),
    "ssm.time_step_rank": Read("linear_num_value_heads"),
    "nextn_predict_layers": Ignored("the layers for several tokens at once are not used"),
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_type="llama",
        keys={**_LLAMA_LIKE, **_DENSE, "tensor_data_layout": Expected(("Meta AI original pth",))},
        tensors=_BIASES,
    ),
    "qwen2": Architecture(
        model_type="qwen2",
        keys={**_LLAMA_LIKE, **_DENSE},
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        keys={**_LLAMA_LIKE, **_EXPERTS, **_SHARED_EXPERT},
        constants=_EVERY_LAYER,
    ),
    "qwen3": Architecture(
        model_type="qwen3",
        keys={**_LLAMA_LIKE, **_DENSE},
        tensors=_ATTENTION_BIAS,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        keys={**_LLAMA_LIKE, **_EXPERTS},
        constants={"norm_topk_prob": True, **_EVERY_LAYER},
        tensors=_ATTENTION_BIAS,
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        keys={
            **_LLAMA_LIKE,
            **_WINDOWED,
            "rope.freq_base_swa": EqualTo("rope.freq_base"),
            "attn_logit_softcapping": Read("attn_logit_softcapping"),
            "final_logit_softcapping": Read("final_logit_softcapping"),
        },
        constants={"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        tensors=_ATTENTION_BIAS,
        window_period=2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        keys={
            **_LLAMA_LIKE,
            **_WINDOWED,
            "rope.freq_base_swa": Computed("rope_parameters"),
            "final_logit_softcapping": Read("final_logit_softcapping"),
        },
        constants={"sliding_window": None},
        tensors=_ATTENTION_BIAS,
        window_period=6,
    ),
    "phi3": Architecture(
        model_type="phi3",
        keys={**_LLAMA_LIKE, "attention.sliding_window": Read("sliding_window")},
        partial_rotary=True,
    ),
    "stablelm": Architecture(
        model_type="stablelm",
        keys={
            **_SIZES,
            **_GROUPED,
            **_ROPE,
            "attention.layer_norm_epsilon": Read("layer_norm_eps"),
            "use_parallel_residual": Ignored("the norms among the tensors tell"),
        },
        tensors={"use_qkv_bias": "attn_q.bias"},
        partial_rotary=True,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        keys={**_SIZES, **_GROUPED, **_ROPE, **_HEADS, "attention.layer_norm_epsilon": Read("norm_epsilon")},
        tensors={"use_bias": "attn_q.bias"},
    ),
    "nemotron": Architecture(
        model_type="nemotron",
        keys={
            **_SIZES,
            **_GROUPED,
            **_ROPE,
            **_HEADS,
            **_DENSE,
            "attention.layer_norm_epsilon": Read("norm_eps"),
            "attention.layer_norm_rms_epsilon": EqualTo("attention.layer_norm_epsilon"),
        },
        tensors=_BIASES,
        partial_rotary=True,
    ),
    "falcon": Architecture(
        model_type="falcon",
        keys={
            **_SIZES,
            **_ROPE,
            "feed_forward_length": Read("ffn_hidden_size"),
            "attention.head_count_kv": Expected((1,)),
            "attention.layer_norm_epsilon": Read("layer_norm_epsilon"),
            "tensor_data_layout": Expected(("jploski",)),
        },
        constants={"multi_query": True},
        tensors={"bias": "attn_qkv.bias"},
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        keys={
            **_SIZES,
            "context_length": Read("n_positions"),
            "feed_forward_length": Read("n_inner"),
            "attention.head_count_kv": EqualTo("attention.head_count"),
            "attention.layer_norm_epsilon": Read("layer_norm_epsilon"),
        },
        rope_base=0,
    ),
    "bloom": Architecture(
        model_type="bloom",
        keys={
            **_SIZES,
            "context_length": Ignored("ALiBi has no longest text"),
            "feed_forward_length": EqualTo("embedding_length", factor=4),
            "attention.head_count_kv": EqualTo("attention.head_count"),
            "attention.layer_norm_epsilon": Read("layer_norm_epsilon"),
            "attention.max_alibi_bias": Expected((8.0,)),
        },
        rope_base=0,
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        keys={
            **_LLAMA_LIKE,
            "attention.head_count_kv": Computed("layer_types"),
            "attention.layer_norm_rms_epsilon": Read("norm_eps"),
            "shortconv.l_cache": Read("conv_L_cache"),
        },
        constants={"block_auto_adjust_ff_dim": False},
        tensors={"conv_bias": "shortconv.in_proj.bias"},
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        keys=_QWEN35,
        by_transformers=True,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        keys={
            **_QWEN35,
            **_EXPERTS,
            **_SHARED_EXPERT,
            "feed_forward_length": Ignored("all layers have experts"),
            "expert_weights_norm": Expected((True,)),
        },
        by_transformers=True,
    ),
}
"""By llama.cpp's name of the architecture."""
