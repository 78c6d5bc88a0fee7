"""One layer, and what stands before the first: window attention and context states, then an FFN.

    h = norm(x)        x = x + [attention(h) ; context(h)] O        x = x + FFN(norm(x))

where `context` is cross-attention to the layer's context states, in the layers that have some.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, E channels, d hidden.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from graftlm.models.block_state.attention import Norm, WindowAttention, beside
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.context import FilterContext, TokenContext
from graftlm.models.block_state.memory import LayerMemory
from graftlm.models.block_state.passes import Pass
from graftlm.models.block_state.recurrent import RecurrentContext
from graftlm.models.block_state.sequence_ssm import token_outputs


class Mixing(nn.Module):
    """Window attention and, where the layer has one, cross-attention to context states; one projection of both."""

    def __init__(self, config: BlockStateConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention = WindowAttention(config)
        self.context = _context(config) if config.mixes(layer) else None
        self.out = nn.Linear(width * (2 if self.context is not None else 1), width, bias=False)

    def forward(self, x_BTd: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, T, d)."""
        seen, kv = self.attention(x_BTd, now, memory)
        out = beside(seen) if self.context is None else beside(seen, self.context(x_BTd, kv, now, memory))
        return self.out(now.off_grid(out, x_BTd.shape[1]))


def _context(config: BlockStateConfig) -> nn.Module:
    if config.mixer == "recurrent":
        return RecurrentContext(config)
    return FilterContext(config) if config.context == "mf" else TokenContext(config)


class FeedForward(nn.Module):
    """W_2 act(W_1 x)."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act = ACT2FN[config.hidden_act]
        if isinstance(self.act, nn.ReLU):
            self.act.inplace = True  # on W_1's output, the largest tensor of a layer
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d)."""
        return self.down(self.act(self.up(x)))


class BlockStateLayer(GradientCheckpointingLayer):
    """Mixing, then FFN, each on normed hidden states and added to them."""

    def __init__(self, config: BlockStateConfig, layer: int) -> None:
        super().__init__()
        self.mixing_norm = Norm(config.hidden_size, config)
        self.mixing = Mixing(config, layer)
        self.ffn_norm = Norm(config.hidden_size, config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTd: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, T, d)."""
        x_BTd = x_BTd + self.dropout(self.mixing(self.mixing_norm(x_BTd), now, memory))
        return x_BTd + self.dropout(self.ffn(self.ffn_norm(x_BTd)))


class Silent(nn.Linear):
    """A projection whose fresh weights are zero."""


class Positions(nn.Module):
    """A state space behind the embeddings: x + lift(SSM(down(norm(x)))), which tells where a token stands."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config)
        self.down = nn.Linear(config.hidden_size, config.state_width, bias=False)
        self.ssm = token_outputs(config, 1, "positions")
        self.lift = Silent(config.state_width, config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, T, d)."""
        u_BGE = now.onto_grid(self.down(self.norm(x_BTd)))
        y = now.off_grid(self.ssm(u_BGE, now, memory)[..., 0], x_BTd.shape[1])
        return x_BTd + self.lift(y.to(x_BTd.dtype))
