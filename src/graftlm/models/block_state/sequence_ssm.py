"""A state space over the text of a pass, whatever stands before it: outputs at each token, or at the ends of windows.

Shape suffixes: B rows, G slots of the grid, T tokens in line, E channels, C outputs, M systems, I windows of the grid.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from graftlm.models.block_state import convolution
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.memory import LayerMemory
from graftlm.models.block_state.passes import Pass, take
from graftlm.models.block_state.state_space import (
    Structured,
    Unstructured,
    final_state,
    read,
    run_structured,
    states_behind_chunks,
    step_structured,
    wide,
)


class TokenOutputs(nn.Module):
    """C outputs of each channel at each token."""

    def __init__(self, name: str, kernels: nn.Module) -> None:
        super().__init__()
        self.name, self.kernels = name, kernels

    def forward(self, u_BGE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, G, E, C), at least in float32; slots without a token hold anything."""
        u, phases = wide(u_BGE), now.phases
        with _without_autocast(u.device):
            y = self.run(take(u, phases, now.slots - min(phases)), now, memory)
        return take(y, tuple(-phase for phase in phases), now.slots)

    def run(self, u_BTE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, T, E, C) of inputs in line: each row's first token stands in the first place."""
        raise NotImplementedError


class StructuredTokens(TokenOutputs):
    """Outputs of one system of states."""

    kernels: Structured

    def run(self, u_BTE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        state = _state(memory, self.name)
        if memory is None:
            return run_structured(self.kernels, u_BTE, None)
        if now.step and state is not None:
            y, after = step_structured(self.kernels, u_BTE[:, 0], state)
        else:
            y = run_structured(self.kernels, u_BTE, None if state is None else state[:, 0])
            length = u_BTE.shape[1]
            right = take(u_BTE, tuple(count - length for count in now.new), length)
            after = final_state(self.kernels, right, state, now.row_numbers(now.new))
        memory.keep(self.name, torch.view_as_real(after), detach=self.training)
        return y


class UnstructuredTokens(TokenOutputs):
    """Convolutions with all inputs so far, which are remembered."""

    kernels: Unstructured

    def run(self, u_BTE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        every, length = _extended(u_BTE, now, memory, self.name, self.training), u_BTE.shape[1]
        kernel = self.kernels.kernel(every.shape[1])
        if length == 1:
            y = convolution.last_output(every, kernel)[:, None]
        else:
            y = convolution.convolve(every, kernel)[:, -length:]
        return y + u_BTE[..., None] * self.kernels.d[:, 0].T


class WindowOutputs(nn.Module):
    """One output of each of M systems, for each channel, at the last token of every window."""

    def __init__(self, name: str, kernels: nn.Module, config: BlockStateConfig) -> None:
        super().__init__()
        self.name, self.kernels = name, kernels
        self.systems, self.window = config.filters, config.window

    def forward(self, u_BGE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """(B, I, M, E), at least in float32; of windows that have not ended, anything."""
        with _without_autocast(u_BGE.device):
            return self.run(wide(u_BGE), now, memory)

    def run(self, u_BGE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        """The same of inputs that are wide enough."""
        raise NotImplementedError


class StructuredEnds(WindowOutputs):
    """Outputs of systems of states: from one end of a window to the next, no token between is needed."""

    kernels: Structured

    def run(self, u_BGE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        u, first = u_BGE, _state(memory, self.name)
        if now.step and memory is not None and first is not None:
            y, state = step_structured(self.kernels, u[:, 0], first)
            memory.keep(self.name, torch.view_as_real(state), detach=self.training)
            return y[:, None, ..., 0]
        u = u if now.full else u * now.holds[..., None]
        u_BIwE = u.unflatten(1, (-1, min(self.window, now.slots)))
        states = self._behind_windows(u_BIwE, now, first)
        if memory is not None:
            memory.keep(self.name, torch.view_as_real(self._after(u, now, first, states)), detach=self.training)
        rows, windows = u_BIwE.shape[:2]
        last = u_BIwE[:, :, -1].flatten(0, 1)[:, None]
        return read(self.kernels, states[:, 1:].flatten(0, 1), last)[..., 0].unflatten(0, (rows, windows))

    def _behind_windows(self, u_BIwE: Tensor, now: Pass, first: Tensor | None) -> Tensor:
        """(B, I + 1, M, E, P): states before the grid's first window (zero), and behind each."""
        log_a, _ = self.kernels.discrete()
        windows, width = u_BIwE.shape[1:3]
        states = states_behind_chunks(log_a, u_BIwE.flatten(1, 2), width)
        if first is None:
            return states
        behind = torch.arange(windows + 1, device=u_BIwE.device) * width - now.row_numbers(now.phases)[:, None]
        return states + torch.exp(log_a * behind.clamp(min=0)[..., None, None, None]) * first[:, None]

    def _after(self, u: Tensor, now: Pass, first: Tensor | None, states: Tensor) -> Tensor:
        """(B, M, E, P): the state behind each row's last token."""
        ends = tuple(phase + count for phase, count in zip(now.phases, now.new, strict=True))
        since = tuple(min(total % self.window, count) for total, count in zip(now.total, now.new, strict=True))
        rest = take(u, tuple(end - self.window for end in ends), self.window)
        slot = torch.arange(self.window, device=u.device)
        rest = rest * (slot >= self.window - now.row_numbers(since)[:, None])[..., None]
        ended = now.row_numbers(now.ended)
        start = states[torch.arange(len(ended), device=u.device), ended]
        start = torch.where(ended[:, None, None, None] > 0, start, torch.zeros_like(start) if first is None else first)
        return final_state(self.kernels, rest, start, now.row_numbers(since))


class UnstructuredEnds(WindowOutputs):
    """Convolutions with all inputs so far, which are remembered."""

    kernels: Unstructured

    def run(self, u_BGE: Tensor, now: Pass, memory: LayerMemory | None) -> Tensor:
        u, phases, window = u_BGE, now.phases, self.window
        line = take(u, phases, now.slots - min(phases))
        every = _extended(line, now, memory, self.name, self.training)
        if not any(now.ended):
            windows = now.slots // min(window, now.slots)
            return u.new_zeros(u.shape[0], windows, self.systems, u.shape[-1])
        longest = max(now.past)
        count = -(-every.shape[1] // window)
        left = take(every, tuple(longest - n for n in now.past), count * window)
        ends = convolution.window_ends(left, self.kernels.kernel(count * window), window)  # (B, count, E, M)
        ends = ends.transpose(2, 3) + left[:, window - 1 :: window, None] * self.kernels.d[:, 0]
        return take(ends, tuple(n // window for n in now.past), max(1, now.slots // window))


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products in the dtype of their factors; devices without autocast, such as meta, know none other."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def token_outputs(config: BlockStateConfig, outputs: int, name: str) -> TokenOutputs:
    """The state space of a config, with so many outputs of each channel at each token.

    Args:
        config: the model's.
        outputs: C.
        name: of what is remembered of it.
    """
    if config.kernel == "s4d":
        return StructuredTokens(name, Structured(config.state_width, outputs, 1, config.state_size))
    kernels = Unstructured(config.state_width, outputs, config.kernel_length, config.kernel_limit)
    return UnstructuredTokens(name, kernels)


def window_outputs(config: BlockStateConfig, name: str) -> WindowOutputs:
    """The state spaces of a config, as many as its filters, read at the ends of windows."""
    if config.kernel == "s4d":
        return StructuredEnds(name, Structured(config.state_width, 1, config.filters, config.state_size), config)
    kernels = Unstructured(config.state_width, config.filters, config.kernel_length, config.kernel_limit)
    return UnstructuredEnds(name, kernels, config)


def _extended(line_BTE: Tensor, now: Pass, memory: LayerMemory | None, name: str, detach: bool) -> Tensor:
    """(B, past + T, E): inputs of earlier passes, each row's at the end of them, before those of this one."""
    if memory is None:
        return line_BTE
    old = memory.tensors.get(name)
    every = line_BTE if old is None else torch.cat([old, line_BTE], dim=1)
    most = max(now.new)
    length = every.shape[1] - line_BTE.shape[1] + most
    memory.keep(name, take(every, tuple(count - most for count in now.new), length), detach=detach)
    return every


def _state(memory: LayerMemory | None, name: str) -> Tensor | None:
    """(B, M, E, P) complex: the state that is remembered, if any."""
    kept = None if memory is None else memory.tensors.get(name)
    return None if kept is None else torch.view_as_complex(kept.contiguous())
