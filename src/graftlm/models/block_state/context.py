"""Cross-attention of a window's tokens to context states, which summarize the text before them.

- `sh`: outputs of a state-space model at the window's tokens; a token attends to those up to its own.
- `mh`: the same, with one output for each head.
- `sh` with the delta rule: a token reads its own state, and nothing else.
- `mf`: outputs of S state-space models at the end of the previous window, with learned context IDs; the first window
  has learned states.
- `recurrent`, a baseline (Block-Recurrent Transformer, fixed gate, skip): state vectors, updated after each window.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, I windows of the grid, w slots of a window, W the full
window, H heads, K width of a head, S states, E channels, d hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.models.block_state.attention import (
    MASKED,
    ChunkedTensor,
    RMSNorm,
    SlidingBuffer,
    causal_attention,
    merge_heads,
    multi_head_attention,
    scaled_attention,
    split_heads,
    split_windows,
)
from graftlm.models.block_state.cache import LayerCache
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.grid import WindowGrid
from graftlm.models.block_state.sequence_ssm import DeltaSSM, TokenSSM, WindowEndSSM


class TokenStates(nn.Module):
    """State-space outputs at each token."""

    def __init__(self, config: BlockStateConfig, outputs: int) -> None:
        super().__init__()
        self.window = config.window
        self.in_proj = nn.Linear(config.hidden_size, config.state_width, bias=False)
        make = partial(DeltaSSM, config) if config.kernel == "delta" else partial(TokenSSM, config, outputs)
        self.ssm = make("state")
        self.backward_ssm = make("back") if config.bidirectional else None
        self.norm = RMSNorm(config.state_width, config)

    def outputs(self, u_BTE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, E, C)."""
        u = grid.to_grid(u_BTE)
        y = self.ssm(u, grid, cache)
        if self.backward_ssm is not None:
            y = y + self.backward_ssm(u.flip(1), grid.reversed(), None).flip(1)
        return grid.from_grid(y, u_BTE.shape[1]).to(u_BTE.dtype)  # taps expect that a Linear of tokens reads columns


class TokenStateReadout(TokenStates):
    """What the delta rule's state answers each token: its query is the token's own, so no attention chooses a state."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config, 1)
        self.value = nn.Linear(config.state_width, config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, kv_BG: Tensor, grid: WindowGrid, cache: LayerCache | None) -> ChunkedTensor:
        """(B, I, w, d) for hidden states (B, T, d); the tokens' own keys and values `kv_BG` are not read."""
        values = grid.to_grid(self.value(self.norm(self.outputs(self.in_proj(x_BTd), grid, cache)[..., 0])))
        return ChunkedTensor([split_windows(values, min(self.window, grid.slots))])


class TokenStateAttention(TokenStates):
    """Cross-attention of each token to state-space outputs at the tokens of its window so far (`sh`, `mh`)."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config, config.num_attention_heads if config.context == "mh" else 1)
        self.num_heads, self.multi_head = config.num_attention_heads, config.context == "mh"
        self.bidirectional = config.bidirectional
        width, channels = config.hidden_size, config.state_width
        self.q = nn.Linear(width, width, bias=False)
        if self.multi_head:
            self.kv_per_head = nn.Parameter(torch.empty(self.num_heads, channels, 2 * width // self.num_heads))
        else:
            self.kv = nn.Linear(channels, 2 * width, bias=False)
        self.buffer = SlidingBuffer("contexts", config.window)

    def forward(self, x_BTd: Tensor, kv_BG: Tensor, grid: WindowGrid, cache: LayerCache | None) -> ChunkedTensor:
        """(B, I, w, d) for hidden states (B, T, d); the tokens' own keys and values `kv_BG` are not read."""
        q, kv = grid.to_grid(self.q(x_BTd)), self._state_keys(x_BTd, grid, cache)
        if grid.decoding and cache is not None:
            return self._step(q, self.buffer.append(kv, cache), grid)
        _, current = self.buffer.extend(kv, grid, cache)
        width = min(self.window, grid.slots)
        q, k, v = (
            split_heads(split_windows(tensor, width), self.num_heads) for tensor in (q, *current.chunk(2, dim=-1))
        )
        if not self.bidirectional:
            return causal_attention(q, k, v)
        bias = torch.where(split_windows(grid.occupied, width), 0.0, MASKED)
        return ChunkedTensor([merge_heads(scaled_attention(q, k, v, bias[:, :, None, None]))])

    def _step(self, q_B1d: Tensor, kv: Tensor, grid: WindowGrid) -> ChunkedTensor:
        """(B, 1, 1, d): attention to the states of the token's window, among the last W states."""
        offset = grid.per_row([n % self.window for n in grid.past_lengths])[:, None]
        visible = torch.arange(self.window - 1, -1, -1, device=q_B1d.device) <= offset
        bias = torch.where(visible, 0.0, MASKED)[:, None, None]
        return ChunkedTensor([multi_head_attention(q_B1d, kv, self.num_heads, bias)[:, None]])

    def _state_keys(self, x_BTd: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, G, 2d): keys and values of the context states."""
        y = self.outputs(self.in_proj(x_BTd), grid, cache)
        if not self.multi_head:
            return grid.to_grid(self.kv(self.norm(y[..., 0])))
        normed = self.norm(y.transpose(-1, -2)).transpose(-1, -2)
        k, v = torch.einsum("bteh,hek->bthk", normed, self.kv_per_head).chunk(2, dim=-1)
        return grid.to_grid(torch.cat([k.flatten(-2), v.flatten(-2)], dim=-1))


class FilterStateAttention(nn.Module):
    """Cross-attention of each token to S state-space outputs at the end of the previous window (`mf`)."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.window, width, channels = config.window, config.hidden_size, config.state_width
        self.in_proj = nn.Linear(width, channels, bias=False)
        self.ssm = WindowEndSSM(config, "state")
        self.backward_ssm: Any = WindowEndSSM(config, "back") if config.bidirectional else None
        self.initial_states = nn.Parameter(torch.empty(config.filters, channels))
        self.final_states: Any = nn.Parameter(torch.empty(config.filters, channels)) if config.bidirectional else None
        self.out_proj = nn.Linear(channels, width, bias=False)
        self.norm = RMSNorm(width, config)
        self.context_ids = nn.Parameter(torch.empty(config.filters * (2 if config.bidirectional else 1), width))
        self.cross_attention = StateCrossAttention(config)

    def forward(self, x_BTd: Tensor, kv_BG: Tensor, grid: WindowGrid, cache: LayerCache | None) -> ChunkedTensor:
        """(B, I, w, d) for hidden states (B, T, d); the tokens' own keys and values `kv_BG` are not read."""
        u = grid.to_grid(self.in_proj(x_BTd))
        ends = self.ssm(u, grid, cache).to(x_BTd.dtype)  # (B, I, S, E)
        states = previous_window_states(ends, self.initial_states, grid, cache, "context")
        if self.backward_ssm is not None:
            states = torch.cat([states, self._next_window_states(u, grid)], dim=2)
        return self.cross_attention(x_BTd, self.norm(self.out_proj(states)) + self.context_ids, grid)

    def _next_window_states(self, u: Tensor, grid: WindowGrid) -> Tensor:
        """(B, I, S, E): outputs of the backward models at the first token of the next window."""
        ends = self.backward_ssm(u.flip(1), grid.reversed(), None).to(u.dtype).flip(1)
        after = torch.cat([ends[:, 1:], ends[:, :1]], dim=1)
        width = min(self.window, grid.slots)
        inside = torch.arange(width, grid.slots + 1, width, device=u.device) < grid.per_row(grid.new_lengths)[:, None]
        return torch.where(inside[..., None, None], after, self.final_states)


class RecurrentStateAttention(nn.Module):
    """Cross-attention of each token to state vectors, which are updated at the end of each window.

        update = [attention of the states to themselves ; attention of the states to the window's tokens] O
        state' = g state + (1 - g) update        g = sigmoid(b), learned for each channel

    The tokens of a window attend to the states before it. Updates run window by window; the rest runs in parallel.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.window = config.num_attention_heads, config.window
        self.initial_states = nn.Parameter(torch.empty(config.recurrent_states, width))
        self.context_ids = nn.Parameter(torch.empty(config.recurrent_states, width))
        self.norm = RMSNorm(width, config)
        self.cross_attention = StateCrossAttention(config)
        self.q = nn.Linear(width, 2 * width, bias=False)  # queries of the states: to themselves, and to tokens
        self.out = nn.Linear(2 * width, width, bias=False)
        self.gate = nn.Parameter(torch.empty(width))

    def forward(self, x_BTd: Tensor, kv_BG: Tensor, grid: WindowGrid, cache: LayerCache | None) -> ChunkedTensor:
        """(B, I, w, d) for hidden states (B, T, d) and the tokens' keys and values (B, G, 2d)."""
        states = self._states(kv_BG, grid, cache).to(x_BTd.dtype)
        return self.cross_attention(x_BTd, self._normed(states), grid)

    def _states(self, kv_BG: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, I, S, d): the states before each window of the grid."""
        cached = None if cache is None else cache.tensors.get("states")
        state = self.initial_states.expand(kv_BG.shape[0], *self.initial_states.shape) if cached is None else cached
        has_full_windows = not grid.decoding and grid.slots >= self.window
        windows = split_windows(kv_BG, self.window).unbind(1) if has_full_windows else (kv_BG,)
        ends: list[Tensor] = []
        for number, kv in enumerate(windows):
            state = self._update(state, kv) if number < max(grid.completed_windows) else state
            ends.append(state)
        return previous_window_states(torch.stack(ends, dim=1), self.initial_states, grid, cache, "states")

    def _update(self, state_BSd: Tensor, kv_BW: Tensor) -> Tensor:
        """(B, S, d): the states after a full window."""
        normed = self._normed(state_BSd)
        q_states, q_tokens = self.q(normed).chunk(2, dim=-1)
        inner = multi_head_attention(q_states, self.cross_attention.kv(normed), self.num_heads)
        outer = multi_head_attention(q_tokens, kv_BW, self.num_heads)
        gate = torch.sigmoid(self.gate)
        return gate * state_BSd + (1 - gate) * self.out(torch.cat([inner, outer], dim=-1))

    def _normed(self, state: Tensor) -> Tensor:
        return self.norm(state) + self.context_ids


class StateCrossAttention(nn.Module):
    """Cross-attention of a window's tokens to S states, all of them visible."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.num_heads, self.window = config.num_attention_heads, config.window
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.kv = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, states_BISd: Tensor, grid: WindowGrid) -> ChunkedTensor:
        """(B, I, w, d)."""
        q = split_windows(grid.to_grid(self.q(x_BTd)), min(self.window, grid.slots))
        return ChunkedTensor([multi_head_attention(q, self.kv(states_BISd), self.num_heads)])


def previous_window_states(
    ends_BI: Tensor, initial: Tensor, grid: WindowGrid, cache: LayerCache | None, name: str
) -> Tensor:
    """(B, I, ...): for each window, the states at the end of the window before it, given those at window ends.

    The window before the grid is in the cache under `name`; before a row's first window, the states are `initial`.
    """
    cached = None if cache is None else cache.tensors.get(name)
    before = initial.expand(ends_BI.shape[0], *initial.shape).to(ends_BI.dtype) if cached is None else cached
    states = torch.cat([before[:, None], ends_BI], dim=1)
    if cache is not None:
        completed = grid.per_row(grid.completed_windows)
        cache.store(name, states[torch.arange(len(states), device=states.device), completed])
    return states[:, :-1]
