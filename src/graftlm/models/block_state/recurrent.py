"""Block-recurrent attention (fixed gate, skip): state vectors that are updated at the end of each window.

    update = [attention of the states to themselves ; attention of the states to the window's tokens] O
    state' = g state + (1 - g) update        g = sigmoid(b), learned for each channel

The tokens of a window attend to the states before it. The states run window after window; all else runs in parallel.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, I windows of the grid, W window, S states, H heads, K
width of a head, d hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graftlm.models.block_state.attention import Norm, Pieces, attend, heads, merge, windowed
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.context import StateReader, before_windows
from graftlm.models.block_state.memory import LayerMemory
from graftlm.models.block_state.passes import Pass


class RecurrentContext(nn.Module):
    """Cross-attention of each token to the state vectors before its window."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.count, self.window = config.num_attention_heads, config.window
        self.first = nn.Parameter(torch.empty(config.recurrent_states, width))
        self.ids = nn.Parameter(torch.empty(config.recurrent_states, width))
        self.norm = Norm(width, config)
        self.reader = StateReader(config)
        self.q = nn.Linear(width, 2 * width, bias=False)  # of the states: to themselves, and to tokens
        self.out = nn.Linear(2 * width, width, bias=False)
        self.gate = nn.Parameter(torch.empty(width))

    def forward(self, x_BTd: Tensor, kv_BG: Tensor, now: Pass, memory: LayerMemory | None) -> Pieces:
        """(B, I, w, d) for each slot, of hidden states and all keys and values of its window (B, G, 2d)."""
        states = self._states(kv_BG, now, memory).to(x_BTd.dtype)
        return self.reader.read(x_BTd, self.reader.kv(self._said(states)), now)

    def _states(self, kv_BG: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, I, S, d): before each window of the grid."""
        old = None if memory is None else memory.tensors.get("states")
        state = self.first.expand(kv_BG.shape[0], *self.first.shape) if old is None else old
        count = 1 if now.step else -(-now.slots // self.window)
        if now.step or now.slots < self.window:
            ended = [self._update(state, kv_BG) if any(now.ended) else state]
        else:
            ended = []
            for kv in windowed(kv_BG, self.window).unbind(1):
                ended.append(self._update(ended[-1] if ended else state, kv) if len(ended) < max(now.ended) else state)
        assert len(ended) == count
        return before_windows(torch.stack(ended, dim=1), self.first, now, memory, "states", self.training)

    def _update(self, state_BSd: Tensor, kv_BW: Tensor) -> Tensor:
        """(B, S, d): the states after a whole window."""
        said = self._said(state_BSd)
        q_self, q_tokens = self.q(said).chunk(2, dim=-1)
        inner = self._attend(q_self, self.reader.kv(said))
        outer = self._attend(q_tokens, kv_BW)
        gate = torch.sigmoid(self.gate)
        return gate * state_BSd + (1 - gate) * self.out(torch.cat([inner, outer], dim=-1))

    def _attend(self, q: Tensor, kv: Tensor) -> Tensor:
        k, v = kv.chunk(2, dim=-1)
        q, k, v = (heads(one, self.count) for one in (q, k, v))
        return merge(attend(q, k, v))

    def _said(self, state: Tensor) -> Tensor:
        return self.norm(state) + self.ids
