"""State-space models over the text of a pass and all text before it, with outputs at each token or at window ends.

Shape suffixes: B rows, G slots of the grid, T aligned tokens, E channels, C outputs, M systems, I windows of the grid,
w slots of a window, P pairs of states.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from graftlm.models.block_state.cache import LayerCache
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.convolution import fft_convolution, last_output, states_after_chunks, window_end_outputs
from graftlm.models.block_state.grid import Grid, StepGrid, WindowGrid, slice_rows
from graftlm.models.block_state.state_space import S4DKernel, UnstructuredKernel, at_least_float32


class TokenSSM(nn.Module):
    """A state-space model with C outputs of each channel at each token.

    Args:
        config: config of the model.
        outputs: number of outputs C.
        name: name of the state in the cache.
    """

    def __init__(self, config: BlockStateConfig, outputs: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.kernels = _kernels(config, outputs, systems=1)

    def forward(self, u_BGE: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Compute the outputs at each token.

        Args:
            u_BGE: inputs (B, G, E).
            grid: grid of the pass.
            cache: the layer's cache, which is updated; None without a cache.

        Returns:
            Outputs (B, G, E, C), at least in float32; values of empty slots are arbitrary.
        """
        aligned = grid.aligned(at_least_float32(u_BGE))
        with without_autocast(u_BGE.device):
            if isinstance(self.kernels, S4DKernel):
                y = self._structured(self.kernels, aligned, grid, cache)
            else:
                y = self._unstructured(self.kernels, aligned, grid, cache)
        return grid.unaligned(y)

    def _structured(
        self,
        kernels: S4DKernel,
        u_BTE: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> Tensor:
        """Compute the outputs (B, T, E, C) for left-aligned inputs from a state."""
        if cache is None:
            return kernels.outputs(u_BTE, None)
        state = _cached_state(cache, self.name)
        if isinstance(grid, StepGrid):
            assert state is not None, "a decode step continues a text"
            y, after = kernels.step(u_BTE[:, 0], state)
            after = grid.kept(after, state)
        else:
            initial = None if state is None else state[:, 0]
            y = kernels.outputs(u_BTE, initial)
            length = u_BTE.shape[1]
            right_aligned = slice_rows(u_BTE, tuple(count - length for count in grid.new_lengths), length)
            after = kernels.final_state(right_aligned, state, grid.new_counts)
        cache.store(self.name, torch.view_as_real(after))
        return y

    def _unstructured(
        self,
        kernels: UnstructuredKernel,
        u_BTE: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> Tensor:
        """Compute the outputs (B, T, E, C) for left-aligned inputs by a convolution over all inputs so far."""
        inputs = _with_cached_inputs(u_BTE, grid, cache, self.name)
        length = u_BTE.shape[1]
        kernel = kernels.kernel(inputs.shape[1])
        if length == 1:
            y = last_output(inputs, kernel)[:, None]
        else:
            y = fft_convolution(inputs, kernel)[:, -length:]
        return y + u_BTE[..., None] * kernels.d[:, 0].T


class WindowEndSSM(nn.Module):
    """M state-space models with one output each, for each channel, at the last token of every window.

    Args:
        config: config of the model, whose `filters` is M.
        name: name of the state in the cache.
    """

    def __init__(self, config: BlockStateConfig, name: str) -> None:
        super().__init__()
        self.name = name
        self.window = config.window
        self.systems = config.filters
        self.kernels = _kernels(config, outputs=1, systems=config.filters)

    def forward(self, u_BGE: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Compute the outputs at the end of each window.

        Args:
            u_BGE: inputs (B, G, E).
            grid: grid of the pass.
            cache: the layer's cache, which is updated; None without a cache.

        Returns:
            Outputs (B, I, M, E), at least in float32; values of windows that have not ended are arbitrary.
        """
        u = at_least_float32(u_BGE)
        with without_autocast(u_BGE.device):
            if isinstance(self.kernels, S4DKernel):
                return self._structured(self.kernels, u, grid, cache)
            return self._unstructured(self.kernels, u, grid, cache)

    def _structured(
        self,
        kernels: S4DKernel,
        u_BGE: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> Tensor:
        """Compute the outputs (B, I, M, E) from the states at window ends, and none between them."""
        initial = _cached_state(cache, self.name)
        if isinstance(grid, StepGrid):
            assert cache is not None
            assert initial is not None, "a decode step continues a text"
            y, state = kernels.step(u_BGE[:, 0], initial)
            cache.store(self.name, torch.view_as_real(grid.kept(state, initial)))
            return y[:, None, ..., 0]
        u = u_BGE
        if not grid.is_full:
            u = u * grid.occupied[..., None]
        u_BIwE = u.unflatten(1, (-1, min(self.window, grid.slots)))
        states = _states_after_windows(kernels, u_BIwE, grid, initial)
        if cache is not None:
            final = self._final_state(kernels, u, grid, initial, states)
            cache.store(self.name, torch.view_as_real(final))
        rows, windows = u_BIwE.shape[:2]
        last = u_BIwE[:, :, -1].flatten(0, 1)[:, None]
        y = kernels.readout(states[:, 1:].flatten(0, 1), last)
        return y[..., 0].unflatten(0, (rows, windows))

    def _final_state(
        self,
        kernels: S4DKernel,
        u: Tensor,
        grid: WindowGrid,
        initial: Tensor | None,
        states: Tensor,
    ) -> Tensor:
        """Compute the state after each row's last token.

        Args:
            kernels: the systems.
            u: inputs (B, G, E), zero in empty slots.
            grid: grid of the pass.
            initial: complex state (B, M, E, P) before the pass; None for zero.
            states: complex states (B, I + 1, M, E, P) from `_states_after_windows`.

        Returns:
            Complex states (B, M, E, P).
        """
        # The tokens after each row's last completed window of this pass, or all new tokens if it completes none.
        lengths = zip(grid.total_lengths, grid.new_lengths, strict=True)
        since_end = grid.per_row([min(total % self.window, new) for total, new in lengths])
        starts = tuple(end - self.window for end in grid.ends)
        rest = slice_rows(u, starts, self.window)
        slot = torch.arange(self.window, device=u.device)
        is_after_end = slot >= self.window - since_end[:, None]
        rest = rest * is_after_end[..., None]
        completed = grid.completed_counts
        row = torch.arange(len(completed), device=u.device)
        start = states[row, completed]
        before = torch.zeros_like(start) if initial is None else initial
        start = torch.where(completed[:, None, None, None] > 0, start, before)
        return kernels.final_state(rest, start, since_end)

    def _unstructured(
        self,
        kernels: UnstructuredKernel,
        u_BGE: Tensor,
        grid: Grid,
        cache: LayerCache | None,
    ) -> Tensor:
        """Compute the outputs (B, I, M, E) by convolutions over all inputs so far."""
        window = self.window
        aligned = grid.aligned(u_BGE)
        inputs = _with_cached_inputs(aligned, grid, cache, self.name)
        if not any(grid.completed_windows):
            windows = grid.slots // min(window, grid.slots)
            return u_BGE.new_zeros(u_BGE.shape[0], windows, self.systems, u_BGE.shape[-1])
        # Cached inputs are right-aligned. Windows begin at each row's first token, so rows are left-aligned here.
        longest = inputs.shape[1] - aligned.shape[1]
        count = -(-inputs.shape[1] // window)
        inputs = slice_rows(inputs, tuple(longest - n for n in grid.past_lengths), count * window)
        kernel = kernels.kernel(count * window)
        ends = window_end_outputs(inputs, kernel, window)  # (B, count, E, M)
        last_inputs = inputs[:, window - 1 :: window, None]
        ends = ends.transpose(2, 3) + last_inputs * kernels.d[:, 0]
        first_windows = tuple(n // window for n in grid.past_lengths)
        return slice_rows(ends, first_windows, max(1, grid.slots // window))


def _states_after_windows(
    kernels: S4DKernel,
    u_BIwE: Tensor,
    grid: WindowGrid,
    initial: Tensor | None,
) -> Tensor:
    """Compute the state at each window boundary of the grid.

    Args:
        kernels: the systems.
        u_BIwE: inputs (B, I, w, E) of each window, zero in empty slots.
        grid: grid of the pass.
        initial: complex state (B, M, E, P) before the pass; None for zero.

    Returns:
        Complex states (B, I + 1, M, E, P): before the first window, where new tokens have no influence yet, and after
        each window.
    """
    log_a, _ = kernels.discretize()
    windows, width = u_BIwE.shape[1:3]
    states = states_after_chunks(u_BIwE.flatten(1, 2), log_a, width)
    if initial is None:
        return states
    boundary = torch.arange(windows + 1, device=u_BIwE.device) * width
    elapsed = boundary - grid.per_row(grid.offsets)[:, None]
    decay = torch.exp(log_a * elapsed.clamp(min=0)[..., None, None, None])
    return states + decay * initial[:, None]


def _kernels(config: BlockStateConfig, outputs: int, systems: int) -> S4DKernel | UnstructuredKernel:
    """Build the systems of a config's kernel."""
    # The positional model of a config with kernel: delta is structured.
    if config.kernel != "unstructured":
        return S4DKernel(
            config.state_width,
            outputs=outputs,
            systems=systems,
            state_size=config.state_size,
            log_dt_range=(math.log(config.dt_min), math.log(config.dt_max)),
            hippo=config.kernel == "dss",
        )
    return UnstructuredKernel(
        config.state_width,
        outputs=outputs * systems,
        length=config.kernel_length,
        limit=config.kernel_limit,
    )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that turns autocast off on a device, if the device supports autocast at all."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _with_cached_inputs(
    aligned_BTE: Tensor,
    grid: Grid,
    cache: LayerCache | None,
    name: str,
) -> Tensor:
    """Return (B, past + T, E): the right-aligned inputs of earlier passes, then the left-aligned ones of this pass."""
    if cache is None:
        return aligned_BTE
    past = cache.tensors.get(name)
    inputs = aligned_BTE
    if past is not None:
        inputs = torch.cat([past, aligned_BTE], dim=1)
    longest = max(grid.new_lengths)
    length = inputs.shape[1] - aligned_BTE.shape[1] + longest
    right_aligned = slice_rows(inputs, tuple(count - longest for count in grid.new_lengths), length)
    cache.store(name, right_aligned)
    return inputs


def _cached_state(cache: LayerCache | None, name: str) -> Tensor | None:
    """Return the complex state (B, M, E, P) in the cache, if any."""
    if cache is None or name not in cache.tensors:
        return None
    return torch.view_as_complex(cache.tensors[name].contiguous())
