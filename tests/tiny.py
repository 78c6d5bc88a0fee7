"""Tiny random backbones of every family: those of `graftlm.testing`, and more. `from tiny import tiny_model`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graftlm.models import block_state
from graftlm.testing.tiny import (
    BOS,
    COMMON,
    ENCODERS,
    EOS,
    FAMILY_CONFIGS,
    FFN_WIDTH,
    GROUPED,
    HEAD_WIDTH,
    HEADS,
    LAYERS,
    MASK,
    PAD,
    SPECIAL,
    SPREAD,
    TEXT,
    TOKEN_IDS,
    TOKENS,
    VOCABULARY,
    WINDOW,
    tiny_ids,
    tiny_model,
    tiny_tokenizer,
)

_GEMMA = {**GROUPED, "head_dim": HEAD_WIDTH + 4}  # the heads together are wider than the residual stream

FAMILY_CONFIGS |= {
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH, "sliding_window": WINDOW}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _GEMMA),
    "gemma2": (  # layers: sliding, full
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _GEMMA | {"query_pre_attn_scalar": HEAD_WIDTH + 4, "sliding_window": WINDOW},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH + 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", COMMON | {"hidden_size": 64}),  # rotates half of each head
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", COMMON | {"hidden_size": 64}),  # rotates a quarter
    "olmo": ("OlmoConfig", "OlmoForCausalLM", GROUPED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED),
    "block-state": (
        block_state.BlockStateConfig,
        block_state.BlockStateForCausalLM,
        {**COMMON, "window": WINDOW, "mixer_layers": [0, 1], "state_size": 4, "dropout": 0.1},
    ),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", COMMON),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        TOKEN_IDS | {"dim": COMMON["hidden_size"], "hidden_dim": FFN_WIDTH, "n_layers": LAYERS, "n_heads": HEADS},
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        COMMON | {"local_attention": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}
DECODERS = tuple(family for family in FAMILY_CONFIGS if family not in ENCODERS)
FAMILIES = DECODERS + ENCODERS
LAW_DECODERS = ("llama", "gemma3", "qwen3", "gpt2", "gpt_neox", "block-state")  # where all would take too long

BackboneFolder = Callable[[str], Path]
"""The type of the fixture `tiny_backbone`: family -> folder."""


def save_tiny_backbone(folder: str | Path, family: str, seed: int = 0, *, tokenizer: bool = True) -> Path:
    """Write model and tokenizer to `folder` as `save_pretrained` does; returns the folder."""
    tiny_model(family, seed).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


__all__ = [
    "BOS",
    "DECODERS",
    "ENCODERS",
    "EOS",
    "FAMILIES",
    "LAW_DECODERS",
    "MASK",
    "PAD",
    "SPECIAL",
    "SPREAD",
    "TEXT",
    "TOKENS",
    "VOCABULARY",
    "WINDOW",
    "BackboneFolder",
    "save_tiny_backbone",
    "tiny_ids",
    "tiny_model",
    "tiny_tokenizer",
]
