"""What becomes of the facts of a GGUF file: a table of its keys per architecture.

A key of the architecture that has no row is refused, because a model without one of its facts computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        sparse: whether the layers are mixtures of experts.
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
    sparse: bool = False
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


_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"}


def _layer_norm(field_name: str) -> dict[str, KeyUse]:
    return {"attention.layer_norm_epsilon": Read(field_name)}


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
        "llama",
        {**_LLAMA_LIKE, **_DENSE, "tensor_data_layout": Expected(("Meta AI original pth",))},
        tensors=_BIASES,
    ),
    "qwen2": Architecture("qwen2", {**_LLAMA_LIKE, **_DENSE}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_LLAMA_LIKE, **_EXPERTS, "expert_shared_feed_forward_length": Read("shared_expert_intermediate_size")},
        sparse=True,
    ),
    "qwen3": Architecture("qwen3", {**_LLAMA_LIKE, **_DENSE}, tensors=_ATTENTION_BIAS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_LLAMA_LIKE, **_EXPERTS},
        {"norm_topk_prob": True},
        tensors=_ATTENTION_BIAS,
        sparse=True,
    ),
    "gemma2": Architecture(
        "gemma2",
        {
            **_LLAMA_LIKE,
            **_WINDOWED,
            "rope.freq_base_swa": EqualTo("rope.freq_base"),
            "attn_logit_softcapping": Read("attn_logit_softcapping"),
            "final_logit_softcapping": Read("final_logit_softcapping"),
        },
        {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        tensors=_ATTENTION_BIAS,
        window_period=2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **_LLAMA_LIKE,
            **_WINDOWED,
            "rope.freq_base_swa": Computed("rope_parameters"),
            "final_logit_softcapping": Read("final_logit_softcapping"),
        },
        {"sliding_window": None},
        tensors=_ATTENTION_BIAS,
        window_period=6,
    ),
    "phi3": Architecture(
        "phi3",
        {**_LLAMA_LIKE, "attention.sliding_window": Read("sliding_window")},
        {"pad_token_id": None},
        partial_rotary=True,
    ),
    "stablelm": Architecture(
        "stablelm",
        {
            **_SIZES,
            **_GROUPED,
            **_ROPE,
            **_layer_norm("layer_norm_eps"),
            "use_parallel_residual": Ignored("the norms among the tensors tell"),
        },
        tensors={"use_qkv_bias": "attn_q.bias"},
        partial_rotary=True,
    ),
    "starcoder2": Architecture("starcoder2", {**_SIZES, **_GROUPED, **_ROPE, **_HEADS, **_layer_norm("norm_epsilon")}, tensors={"use_bias": "attn_q.bias"}),
    "nemotron": Architecture(
        "nemotron",
        {**_SIZES, **_GROUPED, **_ROPE, **_HEADS, **_layer_norm("norm_eps"), **_DENSE, "attention.layer_norm_rms_epsilon": EqualTo("attention.layer_norm_epsilon")},
        tensors=_BIASES,
        partial_rotary=True,
    ),
    "falcon": Architecture(
        "falcon",
        {
            **_SIZES,
            **_ROPE,
            **_layer_norm("layer_norm_epsilon"),
            "feed_forward_length": Read("ffn_hidden_size"),
            "attention.head_count_kv": Expected((1,)),
            "tensor_data_layout": Expected(("jploski",)),
        },
        {"multi_query": True},
        tensors={"bias": "attn_qkv.bias"},
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            **_SIZES,
            **_layer_norm("layer_norm_epsilon"),
            "context_length": Read("n_positions"),
            "feed_forward_length": Read("n_inner"),
            "attention.head_count_kv": EqualTo("attention.head_count"),
        },
        rope_base=0,
    ),
    "bloom": Architecture(
        "bloom",
        {
            **_SIZES,
            **_layer_norm("layer_norm_epsilon"),
            "context_length": Ignored("ALiBi has no longest text"),
            "feed_forward_length": EqualTo("embedding_length", 4),
            "attention.head_count_kv": EqualTo("attention.head_count"),
            "attention.max_alibi_bias": Expected((8.0,)),
        },
        rope_base=0,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            **_LLAMA_LIKE,
            "attention.head_count_kv": Computed("layer_types"),
            "attention.layer_norm_rms_epsilon": Read("norm_eps"),
            "shortconv.l_cache": Read("conv_L_cache"),
        },
        {"block_auto_adjust_ff_dim": False},
        tensors={"conv_bias": "shortconv.in_proj.bias"},
    ),
    "qwen35": Architecture("qwen3_5_text", _QWEN35, by_transformers=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**_QWEN35, **_EXPERTS, "expert_shared_feed_forward_length": Read("shared_expert_intermediate_size")},
        by_transformers=True,
    ),
}
"""By llama.cpp's name of the architecture."""
