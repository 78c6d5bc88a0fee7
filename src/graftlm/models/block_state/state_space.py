"""State-space models of one channel each: structured (S4D) and unstructured, in parallel and token by token.

    x_t = a x_{t-1} + b u_t        y_t = 2 Re(c x_t) + d u_t        a = exp(dt A), b = (a - 1) / A          (eq. 5.1)

with N / 2 pairs of states for each channel, A = -1/2 + i pi n at the start, dt log-uniform in [0.001, 0.1], zero-order
hold. Unrolled, K_t = 2 Re(sum over n of c b a^t), y = K * u (eq. 5.3). Unstructured (eq. 5.4):

    K_t = exp(-alpha t / L) FFN(positional encoding of t / L)        L the length of training

Shape suffixes: B rows, T tokens, E channels, C outputs of each channel, M systems side by side, P pairs of states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graftlm.errors import GraftError
from graftlm.models.block_state import convolution

CHUNK = 32
_BANDS = 8
_FASTEST, _SLOWEST = 64.0, 0.5  # decays of unstructured kernels, over the length of training


class Structured(nn.Module):
    """S4D kernels: M systems for each of E channels, each read by C outputs.

    Args:
        channels: E.
        outputs: C, read-outs of the same states.
        systems: M, each with states of its own.
        state_size: N.
    """

    def __init__(self, channels: int, outputs: int, systems: int, state_size: int) -> None:
        super().__init__()
        self.shape = systems, channels, state_size // 2
        self.outputs = outputs
        self.log_dt = _parameter(systems, channels)
        self.log_decay = _parameter(*self.shape)
        self.frequency = _parameter(*self.shape)
        self.c = _parameter(outputs, *self.shape, 2)
        self.d = _parameter(outputs, systems, channels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh parameters."""
        self.log_dt.uniform_(math.log(1e-3), math.log(1e-1))
        self.log_decay.fill_(math.log(0.5))
        self.frequency.copy_(math.pi * torch.arange(self.shape[-1]).expand(self.shape))
        self.c.normal_(std=math.sqrt(0.5))
        self.d.normal_()

    def discrete(self) -> tuple[Tensor, Tensor]:
        """(M, E, P) complex: log a, and (C, M, E, P) complex: c b."""
        a = torch.complex(-torch.exp(wide(self.log_decay)), wide(self.frequency))
        log_a = a * torch.exp(wide(self.log_dt))[..., None]
        b = (torch.exp(log_a) - 1) / a
        return log_a, torch.view_as_complex(wide(self.c).contiguous()) * b

    def kernel(self, length: int) -> Tensor:
        """(C, M, E, length)."""
        log_a, c = self.discrete()
        return 2 * torch.einsum("cmep,mept->cmet", c, convolution.powers(log_a, length)).real


class Unstructured(nn.Module):
    """Kernels given by a small network of the time, under decays that differ from channel to channel.

    Args:
        channels: E.
        outputs: C M, kernels of each channel.
        length: L, the length of training: its times are those from 0 to 1.
        limit: the longest text.
        width: of the network.
    """

    def __init__(self, channels: int, outputs: int, length: int, limit: int, width: int = 32) -> None:
        super().__init__()
        self.shape = outputs, channels
        self.length, self.limit = length, limit
        self.inner = nn.Linear(2 * _BANDS + 1, width)
        self.outer = nn.Linear(width, outputs * channels, bias=False)
        self.log_alpha = _parameter(channels)
        self.d = _parameter(outputs, 1, channels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh parameters."""
        self.inner.reset_parameters()
        self.outer.weight.normal_(std=self.outer.in_features**-0.5)
        channels = self.log_alpha.shape[0]
        self.log_alpha.copy_(torch.linspace(math.log(_SLOWEST), math.log(_FASTEST), channels))
        self.d.normal_()

    def kernel(self, length: int) -> Tensor:
        """(C M, E, length), of about unit energy over the length of training.

        Raises:
            GraftError: the text is longer than the limit.
        """
        if length > self.limit:
            raise GraftError(
                f"A text of {length:,} tokens is longer than kernel_limit, the {self.limit:,} that an unstructured "
                "kernel may be extended to: shorten it, raise kernel_limit, or train with kernel: s4d, which has none."
            )
        alpha = torch.exp(wide(self.log_alpha))
        time = torch.arange(length, device=alpha.device, dtype=alpha.dtype) / self.length
        waves = 2 * math.pi * time[:, None] * torch.arange(1, _BANDS + 1, device=time.device)
        features = torch.cat([time[:, None], waves.sin(), waves.cos()], dim=-1)
        inner = torch.sin(features @ wide(self.inner.weight).T + wide(self.inner.bias))
        free = (inner @ wide(self.outer.weight).T).T.reshape(*self.shape, length)
        energy = self.length * (1 - torch.exp(-2 * alpha)) / (2 * alpha)
        return free * torch.exp(-alpha[:, None] * time) * energy.rsqrt()[:, None]


def run_structured(kernels: Structured, u_BTE: Tensor, first_BEP: Tensor | None, form: str = "chunks") -> Tensor:
    """(B, T, E, C): outputs at every token, of one system.

    Args:
        kernels: M = 1.
        u_BTE: inputs.
        first_BEP: (B, E, P) complex, the state before them; zero where absent.
        form: `chunks`, a product within each chunk and a state from chunk to chunk; or `transform`, one Fourier
            transform over all tokens, as published.
    """
    log_a, c = kernels.discrete()
    if form == "chunks":
        return convolution.in_chunks(u_BTE, c[:, 0], kernels.d[:, 0], log_a[0], first_BEP, CHUNK)
    length = u_BTE.shape[1]
    y = convolution.convolve(u_BTE, kernels.kernel(length)[:, 0])
    if first_BEP is not None:
        y = y + convolution.read_states(first_BEP[:, None], c[:, 0], log_a[0], length)[:, 0]
    return y + u_BTE[..., None] * kernels.d[:, 0].T


def final_state(kernels: Structured, u_BTE: Tensor, first_BMEP: Tensor | None, steps_B: Tensor) -> Tensor:
    """(B, M, E, P) complex: the state behind the last token, x_T = a^steps x_0 + sum over j of a^(T-1-j) u_j.

    Args:
        kernels: the systems.
        u_BTE: inputs, those of each row at the end and zeros before them.
        first_BMEP: the state before them.
        steps_B: how many each row has.
    """
    length = u_BTE.shape[1]
    log_a, _ = kernels.discrete()
    padded = nn.functional.pad(u_BTE, (0, 0, -length % CHUNK, 0)) if length > CHUNK else u_BTE
    state = states_behind_chunks(log_a, padded, min(length, CHUNK))[:, -1]
    if first_BMEP is None:
        return state
    return state + torch.exp(log_a * steps_B[:, None, None, None]) * first_BMEP


def states_behind_chunks(log_a_MEP: Tensor, u_BTE: Tensor, chunk: int) -> Tensor:
    """(B, n + 1, M, E, P) complex: zero, and the state behind each of n chunks of so many tokens."""
    powers = convolution.powers(log_a_MEP, chunk)
    ends = convolution.end_states(convolution.channels_first(u_BTE, chunk), powers)
    return convolution.carry(ends.unflatten(0, (len(u_BTE), -1)), log_a_MEP, chunk, None)


def step_structured(kernels: Structured, u_BE: Tensor, state_BMEP: Tensor) -> tuple[Tensor, Tensor]:
    """One token: outputs (B, M, E, C) and the state (B, M, E, P) behind it."""
    log_a, c = kernels.discrete()
    state = torch.exp(log_a) * state_BMEP + u_BE[:, None, :, None]
    return read(kernels, state, u_BE[:, None], c), state


def read(kernels: Structured, state_BMEP: Tensor, u_BME: Tensor, c: Tensor | None = None) -> Tensor:
    """(B, M, E, C): outputs at a token, of the states behind it."""
    c = kernels.discrete()[1] if c is None else c
    y = 2 * torch.einsum("bmep,cmep->bmec", state_BMEP, c).real
    return y + u_BME[..., None] * kernels.d.permute(1, 2, 0)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def wide(value: Tensor) -> Tensor:
    """At least float32, which transforms and powers need."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
