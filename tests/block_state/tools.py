"""Tiny block-state models of every kind."""

from __future__ import annotations

from typing import Any

import torch

from graftlm.models.block_state import BlockStateConfig, BlockStateForCausalLM, BlockStateForSequenceClassification

W = 4
BASELINES: dict[str, dict[str, Any]] = {
    "slide": {"mixer": "slide"},
    "memory": {"mixer": "memory", "memory_windows": 2},
    "recurrent": {"mixer": "recurrent", "recurrent_states": 3},
}
BLOCK_STATE: dict[str, dict[str, Any]] = {
    f"{context}-{kernel}": {"context": context, "kernel": kernel}
    for context in ("sh", "mh", "mf")
    for kernel in ("s4d", "unstructured")
}
VARIANTS = BASELINES | BLOCK_STATE
BOTH_WAYS = {"slide": BASELINES["slide"]} | BLOCK_STATE
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
    """In double precision, with random weights wherever weights begin even."""
    torch.manual_seed(seed)
    return _stirred(BlockStateForCausalLM(config(variant, **settings)))


def classifier(variant: str, **settings: Any) -> BlockStateForSequenceClassification:
    torch.manual_seed(0)
    return _stirred(BlockStateForSequenceClassification(config(variant, bidirectional=True, num_labels=5, **settings)))


def _stirred(found: Any) -> Any:
    """Norms, gates, steps and what begins silent with noise, so that none of them can be left out unseen."""
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if weight.dim() == 1 or "log_" in name or "positions.lift" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    return found.double().eval()


def ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
