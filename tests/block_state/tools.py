"""Tiny block-state models of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cases import thinned
from graftlm.models.block_state import BlockStateConfig, BlockStateForCausalLM, BlockStateForSequenceClassification

W = 4
BASELINES: dict[str, dict[str, Any]] = {
    "slide": {"mixer": "slide"},
    "memory": {"mixer": "memory", "memory_windows": 2},
    "recurrent": {"mixer": "recurrent", "recurrent_states": 3},
    "gated-s4d": {"mixer": "state-space", "kernel": "s4d"},
    "gated-delta": {"mixer": "state-space", "kernel": "delta", "mixer_layers": [0, 1, 2]},
}
BLOCK_STATE: dict[str, dict[str, Any]] = {
    f"{context}-{kernel}": {"context": context, "kernel": kernel}
    for context in ("sh", "mh", "mf")
    for kernel in ("s4d", "unstructured")
} | {"sh-delta": {"context": "sh", "kernel": "delta"}}
RESET: dict[str, dict[str, Any]] = {
    "sh-delta-reset": BLOCK_STATE["sh-delta"] | {"reset_states": True, "positional_ssm": False},
    "gated-delta-reset": BASELINES["gated-delta"] | {"reset_states": True},
}
# BST:SH:S4 of the Long Range Arena: gated state-space layers on top of block-state layers.
ON_TOP: dict[str, dict[str, Any]] = {"sh-s4d-on-top": {"mixer_layers": [0, 1], "state_space_layers": [2]}}
# Diagonal state spaces; heads that are wider together than the hidden size.
DSS: dict[str, dict[str, Any]] = {
    "mh-dss": {"context": "mh", "kernel": "dss", "head_dim": 12},
    "mf-dss": {"context": "mf", "kernel": "dss", "head_dim": 12},
}
WIDE: dict[str, dict[str, Any]] = {
    "recurrent-wide": BASELINES["recurrent"] | {"head_dim": 12},
    "sh-delta-wide": BLOCK_STATE["sh-delta"] | {"head_dim": 12},
}
VARIANTS = BASELINES | BLOCK_STATE | RESET | ON_TOP | DSS | WIDE
DEFAULT_VARIANTS = ("slide", "recurrent", "sh-delta-reset", "mf-unstructured", "mh-dss", *ON_TOP)
"""Each kind of layer once."""


def default_cases(variants: Iterable[str]) -> list[Any]:
    """Return the parameters of a test over variants; those beyond the default ones are slow."""
    variants = list(variants)
    return thinned(variants, set(variants) & set(DEFAULT_VARIANTS))


EXHAUSTIVE_VARIANTS = default_cases(VARIANTS)
BIDIRECTIONAL = {
    name: settings for name, settings in VARIANTS.items() if settings.get("mixer") not in ("memory", "recurrent")
}
VOCABULARY = 50


def config(variant: str, **settings: Any) -> BlockStateConfig:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "window": W,
        "mixer_layers": [0, 2],
        "state_size": 4,
        "filters": 3,
        "kernel_length": 16,
        "kernel_limit": 4096,
        "relative_buckets": 8,
        "relative_distance": 8,
        "initializer_range": 0.3,
    }
    return BlockStateConfig(**(shape | VARIANTS[variant] | settings))


def model(variant: str, seed: int = 0, **settings: Any) -> BlockStateForCausalLM:
    """A model in double precision with noise on weights that are constant initially."""
    torch.manual_seed(seed)
    return _with_noise(BlockStateForCausalLM(config(variant, **settings)))


def classifier(variant: str, **settings: Any) -> BlockStateForSequenceClassification:
    torch.manual_seed(0)
    return _with_noise(
        BlockStateForSequenceClassification(config(variant, bidirectional=True, num_labels=5, **settings))
    )


def _with_noise(model: Any) -> Any:
    """Add noise to norms, gates, steps and zero projections, so that a test notices if any of them is not used."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            constant = ("log_", "rate_weight", ".mix", "positional_ssm.out_proj")
            if weight.dim() == 1 or any(part in name for part in constant):
                weight.add_(0.3 * torch.randn_like(weight))
    return model.double().eval()


def ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
