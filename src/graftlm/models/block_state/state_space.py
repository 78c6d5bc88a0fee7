"""State-space models of one channel each: structured (S4D) and unstructured, in parallel and token by token.

    x_t = a x_{t-1} + b u_t        y_t = 2 Re(c x_t) + d u_t        a = exp(dt A), b = (a - 1) / A          (eq. 5.1)

Each channel has N / 2 conjugate pairs of states. Initially A = -1/2 + i pi n, and dt is log-uniform in [0.001, 0.1];
the discretisation is a zero-order hold. Unrolled, y = K * u with K_t = 2 Re(sum over n of c b a^t) (eq. 5.3).
Unstructured kernels (eq. 5.4) are

    K_t = exp(-alpha t / L) FFN(positional encoding of t / L)        L the length of training

Shape suffixes: B rows, T tokens, E channels, C outputs of each channel, M systems side by side, P pairs of states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graftlm.errors import GraftError
from graftlm.models.block_state.convolution import chunked_convolution, states_after_chunks

CHUNK = 32
_BANDS, _NETWORK_WIDTH = 8, 32
_FASTEST_DECAY, _SLOWEST_DECAY = 64.0, 0.5  # of unstructured kernels, over the length of training


class S4DKernel(nn.Module):
    """Structured kernels: for each of E channels, M systems of states of size N, and C outputs of each system."""

    def __init__(self, channels: int, outputs: int, systems: int, state_size: int) -> None:
        super().__init__()
        self.shape = systems, channels, state_size // 2
        self.log_dt = _zeros(systems, channels)
        self.log_decay = _zeros(*self.shape)
        self.frequency = _zeros(*self.shape)
        self.c = _zeros(outputs, *self.shape, 2)
        self.d = _zeros(outputs, systems, channels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        self.log_dt.uniform_(math.log(1e-3), math.log(1e-1))
        self.log_decay.fill_(math.log(0.5))
        self.frequency.copy_(math.pi * torch.arange(self.shape[-1]).expand(self.shape))
        self.c.normal_(std=math.sqrt(0.5))
        self.d.normal_()

    def discretize(self) -> tuple[Tensor, Tensor]:
        """log a, (M, E, P) complex; and c b, (C, M, E, P) complex."""
        a = torch.complex(-torch.exp(at_least_float32(self.log_decay)), at_least_float32(self.frequency))
        log_a = a * torch.exp(at_least_float32(self.log_dt))[..., None]
        b = (torch.exp(log_a) - 1) / a
        return log_a, torch.view_as_complex(at_least_float32(self.c).contiguous()) * b

    def outputs(self, u_BTE: Tensor, initial_BEP: Tensor | None) -> Tensor:
        """(B, T, E, C): outputs at every token, where M = 1, after the complex initial state; None stands for zero."""
        log_a, c = self.discretize()
        return chunked_convolution(u_BTE, c[:, 0], self.d[:, 0], log_a[0], initial_BEP, CHUNK)

    def final_state(self, u_BTE: Tensor, initial_BMEP: Tensor | None, lengths_B: Tensor) -> Tensor:
        """(B, M, E, P) complex: the state after the last token, x_T = a^T x_0 + sum over j of a^(T-1-j) u_j.

        Inputs are right-aligned, and zero before each row's first of `lengths_B` tokens; None stands for x_0 = 0.
        """
        length = u_BTE.shape[1]
        log_a, _ = self.discretize()
        padded = nn.functional.pad(u_BTE, (0, 0, -length % CHUNK, 0)) if length > CHUNK else u_BTE
        state = states_after_chunks(padded, log_a, min(length, CHUNK))[:, -1]
        if initial_BMEP is None:
            return state
        return state + torch.exp(log_a * lengths_B[:, None, None, None]) * initial_BMEP

    def step(self, u_BE: Tensor, state_BMEP: Tensor) -> tuple[Tensor, Tensor]:
        """One token: outputs (B, M, E, C), and the state (B, M, E, P) after it."""
        log_a, c = self.discretize()
        state = torch.exp(log_a) * state_BMEP + u_BE[:, None, :, None]
        return self.readout(state, u_BE[:, None], c), state

    def readout(self, state_BMEP: Tensor, u_BME: Tensor, c: Tensor | None = None) -> Tensor:
        """(B, M, E, C): outputs at a token, given the state after it."""
        c = self.discretize()[1] if c is None else c
        y = 2 * torch.einsum("bmep,cmep->bmec", state_BMEP, c).real
        return y + u_BME[..., None] * self.d.permute(1, 2, 0)


class UnstructuredKernel(nn.Module):
    """Kernels computed from the time by a small network, with a decay for each channel.

    Each of E channels has `outputs` = C M kernels. Times from 0 to 1 are those of `length` = L; `limit` is the longest.
    """

    def __init__(self, channels: int, outputs: int, length: int, limit: int) -> None:
        super().__init__()
        self.shape = outputs, channels
        self.length, self.limit = length, limit
        self.inner = nn.Linear(2 * _BANDS + 1, _NETWORK_WIDTH)
        self.outer = nn.Linear(_NETWORK_WIDTH, outputs * channels, bias=False)
        self.log_alpha = _zeros(channels)
        self.d = _zeros(outputs, 1, channels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        self.inner.reset_parameters()
        self.outer.weight.normal_(std=self.outer.in_features**-0.5)
        decays = torch.linspace(math.log(_SLOWEST_DECAY), math.log(_FASTEST_DECAY), self.log_alpha.shape[0])
        self.log_alpha.copy_(decays)
        self.d.normal_()

    def kernel(self, length: int) -> Tensor:
        """K, (C M, E, length), of about unit energy over the length of training.

        Raises GraftError if `length` is above the limit.
        """
        if length > self.limit:
            raise GraftError(
                f"A text of {length:,} tokens is longer than kernel_limit, the {self.limit:,} that an unstructured "
                "kernel may be extended to: shorten it, raise kernel_limit, or train with kernel: s4d, which has none."
            )
        alpha = torch.exp(at_least_float32(self.log_alpha))
        time = torch.arange(length, device=alpha.device, dtype=alpha.dtype) / self.length
        waves = 2 * math.pi * time[:, None] * torch.arange(1, _BANDS + 1, device=time.device)
        features = torch.cat([time[:, None], waves.sin(), waves.cos()], dim=-1)
        inner = torch.sin(features @ at_least_float32(self.inner.weight).T + at_least_float32(self.inner.bias))
        undamped = (inner @ at_least_float32(self.outer.weight).T).T.reshape(*self.shape, length)
        energy = self.length * (1 - torch.exp(-2 * alpha)) / (2 * alpha)
        return undamped * torch.exp(-alpha[:, None] * time) * energy.rsqrt()[:, None]


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def at_least_float32(value: Tensor) -> Tensor:
    """The tensor in float32 or float64: Fourier transforms and powers need that precision."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
