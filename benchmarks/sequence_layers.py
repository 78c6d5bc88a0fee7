"""The layers whose cost block_state.py compares: ours and our baselines, full attention, and the public package's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.models.block_state import BlockStateConfig, BlockStateModel

OURS, RECURRENT, PUBLIC = "bst_sh", "block_recurrent", "public_package"
MIXERS: dict[str, dict[str, Any]] = {
    OURS: {"mixer": "block-state", "context": "sh"},
    "bst_mh": {"mixer": "block-state", "context": "mh"},
    "bst_mf": {"mixer": "block-state", "context": "mf"},
    "bst_sh_unstructured": {"mixer": "block-state", "context": "sh", "kernel": "unstructured"},
    RECURRENT: {"mixer": "recurrent"},
    "slide": {"mixer": "slide"},
}


@dataclass(frozen=True)
class Size:
    """How large the layers and the work are."""

    width: int = 512
    ffn: int = 2048
    heads: int = 16
    window: int = 128
    state: int = 16
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    """As many as `NAMES`; the aims hold from the second on."""
    full_up_to: int = 4096
    """Full attention is not timed on longer texts."""
    others_up_to: int = 16_384
    """On longer texts single-head, block-recurrent and sliding layers alone are timed."""
    training_up_to: int = 4096
    forward_rounds: int = 7
    training_rounds: int = 5
    decode: tuple[int, int] = (1024, 65_536)
    decode_rounds: int = 9
    steps: int = 16
    """Tokens of a turn of decoding."""


class FullAttention(nn.Module):
    """A layer that attends to all text before, by torch's own fused kernels, with the same norms and FFN."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d)."""
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(self.norms[1](x))))


class Ours(nn.Module):
    """One layer of the house, without embeddings."""

    def __init__(self, size: Size, values: Mapping[str, Any]) -> None:
        super().__init__()
        config = BlockStateConfig(
            vocab_size=2,
            hidden_size=size.width,
            intermediate_size=size.ffn,
            num_hidden_layers=1,
            num_attention_heads=size.heads,
            window=size.window,
            state_size=size.state,
            mixer_layers=[0],
            positional_ssm=False,
            kernel_length=size.lengths[1],
            kernel_limit=max(size.lengths),
            **values,
        )
        self.model = BlockStateModel(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d)."""
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class Public(nn.Module):
    """The public package's layer, which reads tokens."""

    def __init__(self, size: Size, kind: Any) -> None:
        super().__init__()
        self.model = kind(
            num_tokens=16,
            dim=size.width,
            depth=1,
            dim_head=size.width // size.heads,
            heads=size.heads,
            ff_mult=size.ffn // size.width,
            max_seq_len=max(size.lengths),
            block_width=size.window,
            num_state_vectors=size.window,
            recurrent_layers=(1,),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 16) for any hidden states of (B, T, d): their tokens are all zero."""
        return self.model(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device))[0]


def public_layer(size: Size) -> Public | None:
    """The public package's layer; None, which is said, where it is not installed."""
    try:
        from block_recurrent_transformer_pytorch import BlockRecurrentTransformer  # type: ignore[import-not-found]
    except ImportError:
        print(
            "The public package is not installed, so its figures are left out: "
            "run `pip install block-recurrent-transformer-pytorch`."
        )
        return None
    return Public(size, BlockRecurrentTransformer)
