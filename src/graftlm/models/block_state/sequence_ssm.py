"""State-space models over the text of a pass and all text before it: outputs at each token, or at window ends.

Shape suffixes: B rows, G slots of the grid, T aligned tokens, E channels, C outputs, M systems, I windows of the grid,
P pairs of states.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.models.block_state.cache import LayerCache
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.convolution import fft_convolution, last_output, states_after_chunks, window_end_outputs
from graftlm.models.block_state.grid import WindowGrid, slice_rows
from graftlm.models.block_state.state_space import S4DKernel, UnstructuredKernel, at_least_float32
from graftlm.models.delta_rule import delta_rule, mixed_tokens, unit_length

_MIXED = 4  # from how many last tokens a query, key and value of the delta rule are mixed


class TokenSSM(nn.Module):
    """A state-space model with C outputs of each channel at each token; the cache has its state under `name`."""

    def __init__(self, config: BlockStateConfig, outputs: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.kernels: Any = _kernels(config, outputs, 1)

    def forward(self, u_BGE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, G, E, C), at least in float32; values of empty slots are arbitrary."""
        u, offsets = at_least_float32(u_BGE), grid.offsets
        aligned = slice_rows(u, offsets, grid.slots - min(offsets))
        run = self._structured if isinstance(self.kernels, S4DKernel) else self._unstructured
        with _without_autocast(u.device):
            y = run(aligned, grid, cache)
        return slice_rows(y, tuple(-offset for offset in offsets), grid.slots)

    def _structured(self, u_BTE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, E, C) of left-aligned inputs, by one system of states."""
        state = _cached_state(cache, self.name)
        if cache is None:
            return self.kernels.outputs(u_BTE, None)
        if grid.decoding and state is not None:
            y, after = self.kernels.step(u_BTE[:, 0], state)
        else:
            y = self.kernels.outputs(u_BTE, None if state is None else state[:, 0])
            length = u_BTE.shape[1]
            right_aligned = slice_rows(u_BTE, tuple(count - length for count in grid.new_lengths), length)
            after = self.kernels.final_state(right_aligned, state, grid.per_row(grid.new_lengths))
        cache.store(self.name, torch.view_as_real(after))
        return y

    def _unstructured(self, u_BTE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, E, C) of left-aligned inputs, by a convolution over all inputs so far."""
        inputs, length = _with_cached_inputs(u_BTE, grid, cache, self.name), u_BTE.shape[1]
        kernel = self.kernels.kernel(inputs.shape[1])
        if length == 1:
            y = last_output(inputs, kernel)[:, None]
        else:
            y = fft_convolution(inputs, kernel)[:, -length:]
        return y + u_BTE[..., None] * self.kernels.d[:, 0].T


class DeltaSSM(nn.Module):
    """The gated delta rule (`models/delta_rule.py`): a state that maps keys to values, at rates that the text decides.

        z_t = sum over j < 4 of m_j * (u_{t-j} W)    z = [q, k, v]; q and k become q / sqrt(|q|^2 + 0.01)
        log a_t = -softplus(u_t w_a + c_a)           b_t = sigmoid(u_t w_b + c_b)

    Initially a key is the query of the token before, so a query finds what followed its token. Queries and keys have
    `state_size` numbers, values `state_width`. The cache has the state under `name`, and the last tokens' u W.
    """

    def __init__(self, config: BlockStateConfig, name: str) -> None:
        super().__init__()
        self.name, self.kernel_length, self.resets = name, config.kernel_length, config.reset_states
        self.sizes = (config.state_size, config.state_size, config.state_width)
        self.qkv = nn.Linear(config.state_width, sum(self.sizes), bias=False)
        self.mix = nn.Parameter(torch.empty(_MIXED, sum(self.sizes)))
        self.rate_weight = nn.Parameter(torch.empty(2, config.state_width))  # of a, then of b
        self.rate_bias = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        """Keys are the queries of the token before, a state falls to 1/e in `kernel_length` tokens, and b = 1/2."""
        with torch.no_grad():
            self.mix.zero_()
            queries, keys, values = self.mix.split(self.sizes, dim=1)
            queries[0], keys[1], values[0] = 1, 1, 1
            queries, keys, _ = self.qkv.weight.split(self.sizes)
            keys.copy_(queries)
            self.rate_weight.zero_()
            self.rate_bias.copy_(torch.tensor([math.log(math.expm1(1 / self.kernel_length)), 0.0]))

    def forward(self, u_BGE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, G, E, 1), at least in float32; values of empty slots are arbitrary."""
        u, offsets = at_least_float32(u_BGE), grid.offsets
        aligned = slice_rows(u, offsets, grid.slots - min(offsets))
        with _without_autocast(u.device):
            y = self._outputs(aligned, grid, cache)
        return slice_rows(y, tuple(-offset for offset in offsets), grid.slots)[..., None]

    def _outputs(self, u_BTE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, E) of left-aligned inputs."""
        lengths, dtype = grid.per_row(grid.new_lengths), u_BTE.dtype
        column = torch.arange(u_BTE.shape[1], device=u_BTE.device)
        inside = column < lengths[:, None]  # others leave the state alone
        z = functional.linear(u_BTE, self.qkv.weight.to(dtype))
        tensors = {} if cache is None else cache.tensors
        before = tensors.get(f"{self.name} inputs", z.new_zeros(len(z), _MIXED - 1, z.shape[-1]))
        mixed, _ = mixed_tokens(z, self.mix.to(dtype), None, before)
        q, k, v = mixed[:, None].split(self.sizes, dim=-1)
        rates = functional.linear(u_BTE, self.rate_weight.to(dtype), self.rate_bias.to(dtype)).transpose(1, 2)
        a, b = (rate * inside[:, None] for rate in (-functional.softplus(rates[:, :1]), rates[:, 1:].sigmoid()))
        q, k = unit_length(q), unit_length(k)
        state, window = tensors.get(self.name), None
        if self.resets:
            past = grid.per_row(grid.past_lengths)[:, None]
            window = (past + torch.minimum(column, lengths[:, None] - 1)) // grid.window
            state = None if state is None else state * (past % grid.window > 0)[..., None, None]
        y, state = delta_rule(q, k, v, a, b, state, window)
        if cache is not None:
            cache.store(self.name, state)
            cache.store(f"{self.name} inputs", slice_rows(torch.cat([before, z], 1), grid.new_lengths, _MIXED - 1))
        return y[:, 0]


class WindowEndSSM(nn.Module):
    """M state-space models with one output each, for each channel, at the last token of every window."""

    def __init__(self, config: BlockStateConfig, name: str) -> None:
        super().__init__()
        self.name, self.window, self.systems = name, config.window, config.filters
        self.kernels: Any = _kernels(config, 1, config.filters)

    def forward(self, u_BGE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, I, M, E), at least in float32; values of windows that have not ended are arbitrary."""
        run = self._structured if isinstance(self.kernels, S4DKernel) else self._unstructured
        with _without_autocast(u_BGE.device):
            return run(at_least_float32(u_BGE), grid, cache)

    def _structured(self, u_BGE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """Outputs from states at window ends; no output between them is computed."""
        u, initial = u_BGE, _cached_state(cache, self.name)
        if grid.decoding and cache is not None and initial is not None:
            y, state = self.kernels.step(u[:, 0], initial)
            cache.store(self.name, torch.view_as_real(state))
            return y[:, None, ..., 0]
        u = u if grid.is_full else u * grid.occupied[..., None]
        u_BIwE = u.unflatten(1, (-1, min(self.window, grid.slots)))
        states = self._states_after_windows(u_BIwE, grid, initial)
        if cache is not None:
            final = self._final_state(u, grid, initial, states)
            cache.store(self.name, torch.view_as_real(final))
        rows, windows = u_BIwE.shape[:2]
        last = u_BIwE[:, :, -1].flatten(0, 1)[:, None]
        return self.kernels.readout(states[:, 1:].flatten(0, 1), last)[..., 0].unflatten(0, (rows, windows))

    def _states_after_windows(self, u_BIwE: Tensor, grid: WindowGrid, initial: Tensor | None) -> Tensor:
        """(B, I + 1, M, E, P): the state before the first window (zero), and after each window."""
        log_a, _ = self.kernels.discretize()
        windows, width = u_BIwE.shape[1:3]
        states = states_after_chunks(u_BIwE.flatten(1, 2), log_a, width)
        if initial is None:
            return states
        elapsed = torch.arange(windows + 1, device=u_BIwE.device) * width - grid.per_row(grid.offsets)[:, None]
        return states + torch.exp(log_a * elapsed.clamp(min=0)[..., None, None, None]) * initial[:, None]

    def _final_state(self, u: Tensor, grid: WindowGrid, initial: Tensor | None, states: Tensor) -> Tensor:
        """(B, M, E, P): the state after each row's last token."""
        lengths = zip(grid.total_lengths, grid.new_lengths, strict=True)
        since_end = grid.per_row([min(total % self.window, new) for total, new in lengths])
        rest = slice_rows(u, tuple(end - self.window for end in grid.ends), self.window)
        slot = torch.arange(self.window, device=u.device)
        rest = rest * (slot >= self.window - since_end[:, None])[..., None]
        completed = grid.per_row(grid.completed_windows)
        start = states[torch.arange(len(completed), device=u.device), completed]
        before = torch.zeros_like(start) if initial is None else initial
        start = torch.where(completed[:, None, None, None] > 0, start, before)
        return self.kernels.final_state(rest, start, since_end)

    def _unstructured(self, u_BGE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """Outputs of convolutions over all inputs so far."""
        u, offsets, window = u_BGE, grid.offsets, self.window
        aligned = slice_rows(u, offsets, grid.slots - min(offsets))
        inputs = _with_cached_inputs(aligned, grid, cache, self.name)
        if not any(grid.completed_windows):
            windows = grid.slots // min(window, grid.slots)
            return u.new_zeros(u.shape[0], windows, self.systems, u.shape[-1])
        longest = max(grid.past_lengths)
        count = -(-inputs.shape[1] // window)
        inputs = slice_rows(inputs, tuple(longest - n for n in grid.past_lengths), count * window)
        kernel = self.kernels.kernel(count * window)
        ends = window_end_outputs(inputs, kernel, window)  # (B, count, E, M)
        ends = ends.transpose(2, 3) + inputs[:, window - 1 :: window, None] * self.kernels.d[:, 0]
        return slice_rows(ends, tuple(n // window for n in grid.past_lengths), max(1, grid.slots // window))


def _kernels(config: BlockStateConfig, outputs: int, systems: int) -> S4DKernel | UnstructuredKernel:
    if config.kernel != "unstructured":  # positions have no other
        return S4DKernel(config.state_width, outputs, systems, config.state_size)
    return UnstructuredKernel(config.state_width, outputs * systems, config.kernel_length, config.kernel_limit)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast; devices that have none, such as meta, need none."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def _with_cached_inputs(aligned_BTE: Tensor, grid: WindowGrid, cache: LayerCache | None, name: str) -> Tensor:
    """(B, past + T, E): the inputs of earlier passes, right-aligned, then those of this pass."""
    if cache is None:
        return aligned_BTE
    past = cache.tensors.get(name)
    inputs = aligned_BTE if past is None else torch.cat([past, aligned_BTE], dim=1)
    longest = max(grid.new_lengths)
    length = inputs.shape[1] - aligned_BTE.shape[1] + longest
    cache.store(name, slice_rows(inputs, tuple(count - longest for count in grid.new_lengths), length))
    return inputs


def _cached_state(cache: LayerCache | None, name: str) -> Tensor | None:
    """(B, M, E, P) complex: the state in the cache, if any."""
    state = None if cache is None else cache.tensors.get(name)
    return None if state is None else torch.view_as_complex(state.contiguous())
