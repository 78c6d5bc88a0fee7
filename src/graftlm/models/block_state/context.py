"""Cross-attention of a window's tokens to context states, which summarize the text before them.

- `sh`: outputs of a state-space model at the window's tokens; a token attends to those up to its own.
- `mh`: the same, with a separate output for each head.
- `sh` with the delta rule: a token reads only its own state.
- `mf`: outputs of S state-space models at the end of the previous window, with learned context IDs; the first window
  has learned states.
- `recurrent`, a baseline (Block-Recurrent Transformer, fixed gate, skip): state vectors, updated after each window.

The `forward` methods of all context modules have the same arguments:

- `x_BTd`: hidden states (B, T, d).
- `kv_BG`: keys and values of the window's tokens (B, G, 2d), which only `recurrent` reads.
- `grid`: the grid of the pass.
- `cache`: the layer's cache, which is updated; None without a cache.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, I windows of the grid, w slots of a window, W the full
window, H heads, K width of a head, S states, E channels, d hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graftlm.models.block_state.cache import LayerCache, SlidingBuffer
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.delta_ssm import DeltaSSM
from graftlm.models.block_state.grid import Grid, StepGrid, WindowGrid
from graftlm.models.block_state.layout import ChunkedTensor, merge_heads, split_heads, split_windows
from graftlm.models.block_state.multi_head import MASKED, causal_attention, multi_head_attention, scaled_attention
from graftlm.models.block_state.norm import RMSNorm
from graftlm.models.block_state.sequence_ssm import TokenSSM, WindowEndSSM

_NO_STEP = "a bidirectional model has no cache, so it has no decode steps"


class TokenStates(nn.Module):
    """State-space outputs at each token.

    Args:
        config: config of the model.
        outputs: number of outputs C of each channel.
    """

    def __init__(self, config: BlockStateConfig, outputs: int) -> None:
        super().__init__()
        self.window = config.window
        self.in_proj = nn.Linear(config.hidden_size, config.state_width, bias=False)
        self.ssm = _token_ssm(config, outputs, "state")
        self.backward_ssm = _token_ssm(config, outputs, "back") if config.bidirectional else None
        self.norm = RMSNorm(config.state_width, config)

    def outputs(self, u_BTE: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Compute the outputs (B, T, E, C).

        Args:
            u_BTE: inputs (B, T, E).
            grid: grid of the pass.
            cache: the layer's cache, which is updated; None without a cache.
        """
        u = grid.to_grid(u_BTE)
        y = self.ssm(u, grid, cache)
        if self.backward_ssm is not None:
            assert isinstance(grid, WindowGrid), _NO_STEP
            backward = self.backward_ssm(u.flip(1), grid.reversed(), None)
            y = y + backward.flip(1)
        # Taps expect that a Linear of tokens reads columns.
        return grid.from_grid(y, u_BTE.shape[1]).to(u_BTE.dtype)


def _token_ssm(config: BlockStateConfig, outputs: int, name: str) -> DeltaSSM | TokenSSM:
    if config.kernel == "delta":
        return DeltaSSM(config, name)
    return TokenSSM(config, outputs, name)


class TokenStateReadout(TokenStates):
    """The output of the delta rule at each token, instead of cross-attention.

    The delta rule computes the query itself, from the token and the three before it (see `DeltaSSM`), so there is no
    query projection here.

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config, outputs=1)
        self.value = nn.Linear(config.state_width, config.attention_width, bias=False)

    def forward(
        self,
        x_BTd: Tensor,
        kv_BG: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> ChunkedTensor:
        """Compute the projected outputs (B, I, w, d). The module's docstring has the arguments."""
        y = self.outputs(self.in_proj(x_BTd), grid, cache)[..., 0]
        values = grid.to_grid(self.value(self.norm(y)))
        width = min(self.window, grid.slots)
        return ChunkedTensor([split_windows(values, width)])


class TokenStateAttention(TokenStates):
    """Cross-attention of each token to state-space outputs at the tokens of its window so far (`sh`, `mh`).

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        multi_head = config.context == "mh"
        super().__init__(config, outputs=config.num_attention_heads if multi_head else 1)
        self.num_heads = config.num_attention_heads
        self.multi_head = multi_head
        self.bidirectional = config.bidirectional
        channels = config.state_width
        self.q = nn.Linear(config.hidden_size, config.attention_width, bias=False)
        if self.multi_head:
            weight = torch.empty(self.num_heads, channels, 2 * config.head_dim)
            self.kv_per_head = nn.Parameter(weight)
        else:
            self.kv = nn.Linear(channels, 2 * config.attention_width, bias=False)
        self.buffer = SlidingBuffer("contexts", config.window)

    def forward(
        self,
        x_BTd: Tensor,
        kv_BG: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> ChunkedTensor:
        """Compute the attention outputs (B, I, w, d). The module's docstring has the arguments."""
        q = grid.to_grid(self.q(x_BTd))
        kv = self._state_keys(x_BTd, grid, cache)
        if isinstance(grid, StepGrid):
            assert cache is not None, "a decode step continues a text"
            return self._step(q, self.buffer.append(kv, grid, cache), grid)
        _, current = self.buffer.extend(kv, grid, cache)
        k, v = current.chunk(2, dim=-1)
        width = min(self.window, grid.slots)
        q = self._split(q, width)
        k = self._split(k, width)
        v = self._split(v, width)
        if not self.bidirectional:
            return causal_attention(q, k, v)
        bias = torch.where(split_windows(grid.occupied, width), 0.0, MASKED)
        out = scaled_attention(q, k, v, bias[:, :, None, None])
        return ChunkedTensor([merge_heads(out)])

    def _split(self, x_BGd: Tensor, width: int) -> Tensor:
        """Split (B, G, d) into windows and heads (B, I, H, w, K)."""
        return split_heads(split_windows(x_BGd, width), self.num_heads)

    def _step(self, q_B1d: Tensor, kv: Tensor, grid: StepGrid) -> ChunkedTensor:
        """Attend to the states of the token's window among the last W states (B, W, 2d); returns (B, 1, 1, d)."""
        offset = grid.past_counts % self.window
        distance = torch.arange(self.window - 1, -1, -1, device=q_B1d.device)
        visible = distance <= offset[:, None]
        bias = torch.where(visible, 0.0, MASKED)[:, None, None]
        out = multi_head_attention(q_B1d, kv, self.num_heads, bias)
        return ChunkedTensor([out[:, None]])

    def _state_keys(self, x_BTd: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Return keys and values (B, G, 2d) of the context states."""
        y = self.outputs(self.in_proj(x_BTd), grid, cache)
        if not self.multi_head:
            return grid.to_grid(self.kv(self.norm(y[..., 0])))
        normed = self.norm(y.transpose(-1, -2)).transpose(-1, -2)
        kv = torch.einsum("bteh,hek->bthk", normed, self.kv_per_head)
        k, v = kv.chunk(2, dim=-1)
        return grid.to_grid(torch.cat([k.flatten(-2), v.flatten(-2)], dim=-1))


class FilterStateAttention(nn.Module):
    """Cross-attention of each token to S state-space outputs at the end of the previous window (`mf`).

    Bidirectional models also attend to S outputs of backward models at the beginning of the next window.

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.window = config.window
        width = config.hidden_size
        channels = config.state_width
        states = config.filters
        self.in_proj = nn.Linear(width, channels, bias=False)
        self.ssm = WindowEndSSM(config, "state")
        self.backward_ssm: WindowEndSSM | None = None
        self.initial_states = nn.Parameter(torch.empty(states, channels))
        self.final_states: nn.Parameter | None = None
        context_ids = states
        if config.bidirectional:
            self.backward_ssm = WindowEndSSM(config, "back")
            self.final_states = nn.Parameter(torch.empty(states, channels))
            context_ids = 2 * states
        self.out_proj = nn.Linear(channels, width, bias=False)
        self.norm = RMSNorm(width, config)
        self.context_ids = nn.Parameter(torch.empty(context_ids, width))
        self.cross_attention = StateCrossAttention(config)

    def forward(
        self,
        x_BTd: Tensor,
        kv_BG: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> ChunkedTensor:
        """Compute the attention outputs (B, I, w, d). The module's docstring has the arguments."""
        u = grid.to_grid(self.in_proj(x_BTd))
        ends_BISE = self.ssm(u, grid, cache).to(x_BTd.dtype)
        states = previous_window_states(ends_BISE, self.initial_states, grid, cache, "context")
        if self.backward_ssm is not None and self.final_states is not None:
            assert isinstance(grid, WindowGrid), _NO_STEP
            after = _next_window_states(self.backward_ssm, u, self.final_states, grid)
            states = torch.cat([states, after], dim=2)
        contexts = self.norm(self.out_proj(states)) + self.context_ids
        return self.cross_attention(x_BTd, contexts, grid)


def _next_window_states(
    ssm: WindowEndSSM,
    u: Tensor,
    final: Tensor,
    grid: WindowGrid,
) -> Tensor:
    """Compute the outputs of backward models at the first token of the next window.

    Args:
        ssm: the backward models.
        u: inputs (B, G, E).
        final: learned states (S, E) after the last window.
        grid: grid of the pass.

    Returns:
        States (B, I, S, E).
    """
    backward_ends = ssm(u.flip(1), grid.reversed(), None)
    starts = backward_ends.to(u.dtype).flip(1)
    next_starts = torch.cat([starts[:, 1:], starts[:, :1]], dim=1)
    width = min(ssm.window, grid.slots)
    next_slot = torch.arange(width, grid.slots + 1, width, device=u.device)
    is_inside = next_slot < grid.new_counts[:, None]
    return torch.where(is_inside[..., None, None], next_starts, final)


class RecurrentStateAttention(nn.Module):
    """Cross-attention of each token to state vectors, which are updated at the end of each window.

        update = [attention of the states to themselves ; attention of the states to the window's tokens] O
        state' = g state + (1 - g) update        g = sigmoid(b), learned for each channel

    The tokens of a window attend to the states before it. Updates run window by window; the rest runs in parallel.

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.window = config.window
        self.initial_states = nn.Parameter(torch.empty(config.recurrent_states, width))
        self.context_ids = nn.Parameter(torch.empty(config.recurrent_states, width))
        self.norm = RMSNorm(width, config)
        self.cross_attention = StateCrossAttention(config)
        # Queries of the states to themselves, then to the tokens.
        self.q = nn.Linear(width, 2 * config.attention_width, bias=False)
        self.out = nn.Linear(2 * config.attention_width, width, bias=False)
        self.gate = nn.Parameter(torch.empty(width))

    def forward(
        self,
        x_BTd: Tensor,
        kv_BG: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> ChunkedTensor:
        """Compute the attention outputs (B, I, w, d). The module's docstring has the arguments."""
        states = self._states(kv_BG, grid, cache).to(x_BTd.dtype)
        return self.cross_attention(x_BTd, self._normed(states), grid)

    def _states(self, kv_BG: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Return the states (B, I, S, d) before each window of the grid."""
        state = _state_before(self.initial_states, kv_BG.shape[0], cache, "states")
        windows: tuple[Tensor, ...] = (kv_BG,)
        if isinstance(grid, StepGrid):
            completed = int(grid.may_complete_windows)
        else:
            completed = max(grid.completed_windows)
            if grid.slots >= self.window:
                windows = split_windows(kv_BG, self.window).unbind(1)
        ends: list[Tensor] = []
        for number, kv in enumerate(windows):
            if number < completed:
                state = self._update(state, kv)
            ends.append(state)
        return previous_window_states(torch.stack(ends, dim=1), self.initial_states, grid, cache, "states")

    def _update(self, state_BSd: Tensor, kv_BW: Tensor) -> Tensor:
        """Return the states (B, S, d) after a full window, whose tokens have keys and values (B, W, 2d)."""
        normed = self._normed(state_BSd)
        q_states, q_tokens = self.q(normed).chunk(2, dim=-1)
        inner = multi_head_attention(q_states, self.cross_attention.kv(normed), self.num_heads)
        outer = multi_head_attention(q_tokens, kv_BW, self.num_heads)
        update = self.out(torch.cat([inner, outer], dim=-1))
        gate = torch.sigmoid(self.gate)
        return gate * state_BSd + (1 - gate) * update

    def _normed(self, state: Tensor) -> Tensor:
        return self.norm(state) + self.context_ids


class StateCrossAttention(nn.Module):
    """Cross-attention of a window's tokens to S states, all of which are visible.

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.window = config.window
        self.q = nn.Linear(config.hidden_size, config.attention_width, bias=False)
        self.kv = nn.Linear(config.hidden_size, 2 * config.attention_width, bias=False)

    def forward(self, x_BTd: Tensor, states_BISd: Tensor, grid: Grid) -> ChunkedTensor:
        """Attend to the states of each window.

        Args:
            x_BTd: hidden states (B, T, d).
            states_BISd: states (B, I, S, d).
            grid: grid of the pass.

        Returns:
            Outputs (B, I, w, d).
        """
        width = min(self.window, grid.slots)
        q = split_windows(grid.to_grid(self.q(x_BTd)), width)
        return ChunkedTensor([multi_head_attention(q, self.kv(states_BISd), self.num_heads)])


def previous_window_states(
    ends_BI: Tensor,
    initial: Tensor,
    grid: Grid,
    cache: LayerCache | None,
    name: str,
) -> Tensor:
    """Return the states at the end of the window before each window.

    Args:
        ends_BI: states (B, I, ...) at the end of each window of the grid.
        initial: states (...) before a row's first window.
        grid: grid of the pass.
        cache: the layer's cache, with the states of the last window before the grid, which is updated; None without
            a cache.
        name: name of the states in the cache.

    Returns:
        States (B, I, ...).
    """
    before = _state_before(initial, ends_BI.shape[0], cache, name)
    if cache is None or name not in cache.tensors:
        before = before.to(ends_BI.dtype)
    states = torch.cat([before[:, None], ends_BI], dim=1)
    if cache is not None:
        row = torch.arange(len(states), device=states.device)
        cache.store(name, states[row, grid.completed_counts])
    return states[:, :-1]


def _state_before(
    initial: Tensor,
    rows: int,
    cache: LayerCache | None,
    name: str,
) -> Tensor:
    """Return the states (B, ...) before the grid, from the cache, or `initial` (...) for each row."""
    if cache is not None and name in cache.tensors:
        return cache.tensors[name]
    return initial.expand(rows, *initial.shape)
