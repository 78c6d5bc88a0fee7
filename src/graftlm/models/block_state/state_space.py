"""State-space models with one system for each channel: structured (S4D) and unstructured, in parallel or step by step.

    x_t = a x_{t-1} + b u_t        y_t = 2 Re(c x_t) + d u_t        a = exp(dt A), b = (a - 1) / A          (eq. 5.1)

Each channel has N / 2 conjugate pairs of states. Initially A = -1/2 + i pi n (S4D-Lin), or A has the eigenvalues of the
normal part of HiPPO-LegS (DSS), and dt is log-uniform in a range. The discretization is a zero-order hold. Unrolled,
y = K * u with K_t = 2 Re(sum over n of c b a^t) (eq. 5.3). Unstructured kernels (eq. 5.4) are

    K_t = exp(-alpha t / L) FFN(positional encoding of t / L)        L the length of training

Shape suffixes: B rows, T tokens, E channels, C outputs of each channel, M parallel systems, P pairs of states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graftlm.errors import GraftError
from graftlm.models.block_state.convolution import chunked_convolution, states_after_chunks

CHUNK = 32

# Frequencies of the positional encoding, and hidden units of the network, of unstructured kernels.
_BANDS = 8
_NETWORK_WIDTH = 32

# Initial decays alpha of unstructured kernels, over the length of training.
_FASTEST_DECAY = 64.0
_SLOWEST_DECAY = 0.5


class S4DKernel(nn.Module):
    """Structured kernels (S4D, or DSS by their first frequencies): M systems for each of E channels.

    Args:
        channels: number of channels E.
        outputs: number of outputs C of each system.
        systems: number of parallel systems M.
        state_size: real numbers N in a system's state, which are N / 2 conjugate pairs.
        log_dt_range: logarithms of the smallest and the largest initial step size dt.
        hippo: whether frequencies are initially those of HiPPO-LegS, instead of multiples of pi.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        systems: int,
        state_size: int,
        log_dt_range: tuple[float, float] = (math.log(1e-3), math.log(1e-1)),
        hippo: bool = False,
    ) -> None:
        super().__init__()
        self.shape = (systems, channels, state_size // 2)
        self.log_dt_range = log_dt_range
        self.hippo = hippo
        self.log_dt = _zeros(systems, channels)
        self.log_decay = _zeros(*self.shape)
        self.frequency = _zeros(*self.shape)
        self.c = _zeros(outputs, *self.shape, 2)
        self.d = _zeros(outputs, systems, channels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters."""
        self.log_dt.uniform_(*self.log_dt_range)
        self.log_decay.fill_(math.log(0.5))
        frequencies = math.pi * torch.arange(self.shape[-1])
        if self.hippo:
            frequencies = hippo_frequencies(self.shape[-1])
        self.frequency.copy_(frequencies.expand(self.shape))
        self.c.normal_(std=math.sqrt(0.5))
        self.d.normal_()

    def discretize(self) -> tuple[Tensor, Tensor]:
        """Discretize the systems by a zero-order hold.

        Returns:
            log a, (M, E, P) complex; and c b, (C, M, E, P) complex.
        """
        decay = -torch.exp(at_least_float32(self.log_decay))
        a = torch.complex(decay, at_least_float32(self.frequency))
        dt = torch.exp(at_least_float32(self.log_dt))
        log_a = a * dt[..., None]
        b = (torch.exp(log_a) - 1) / a
        c = torch.view_as_complex(at_least_float32(self.c).contiguous())
        return log_a, c * b

    def outputs(self, u_BTE: Tensor, initial_BEP: Tensor | None) -> Tensor:
        """Compute the outputs (B, T, E, C) at every token, for a single system (M = 1).

        Args:
            u_BTE: inputs (B, T, E).
            initial_BEP: complex state (B, E, P) before the first token; None for zero.
        """
        log_a, c = self.discretize()
        return chunked_convolution(
            u_BTE,
            c_CEP=c[:, 0],
            d_CE=self.d[:, 0],
            log_a_EP=log_a[0],
            initial_BEP=initial_BEP,
            chunk=CHUNK,
        )

    def final_state(self, u_BTE: Tensor, initial_BMEP: Tensor | None, lengths_B: Tensor) -> Tensor:
        """Compute the state after the last token, x_T = a^T x_0 + sum over j of a^(T-1-j) u_j.

        Args:
            u_BTE: right-aligned inputs (B, T, E), zero before each row's first token.
            initial_BMEP: complex state x_0 (B, M, E, P) before the first token; None for zero.
            lengths_B: number of tokens in each row (B).

        Returns:
            Complex states (B, M, E, P).
        """
        length = u_BTE.shape[1]
        log_a, _ = self.discretize()
        padded = u_BTE
        if length > CHUNK:
            padded = nn.functional.pad(u_BTE, (0, 0, -length % CHUNK, 0))
        state = states_after_chunks(padded, log_a, chunk=min(length, CHUNK))[:, -1]
        if initial_BMEP is None:
            return state
        return state + torch.exp(log_a * lengths_B[:, None, None, None]) * initial_BMEP

    def step(self, u_BE: Tensor, state_BMEP: Tensor) -> tuple[Tensor, Tensor]:
        """Process one token.

        Args:
            u_BE: inputs (B, E).
            state_BMEP: complex state (B, M, E, P) before the token.

        Returns:
            The outputs (B, M, E, C), and the complex state (B, M, E, P) after the token.
        """
        log_a, c = self.discretize()
        state = torch.exp(log_a) * state_BMEP + u_BE[:, None, :, None]
        return self.readout(state, u_BE[:, None], c), state

    def readout(self, state_BMEP: Tensor, u_BME: Tensor, c: Tensor | None = None) -> Tensor:
        """Compute the outputs (B, M, E, C) at a token from the state after it.

        Args:
            state_BMEP: complex state (B, M, E, P) after the token.
            u_BME: inputs (B, M or 1, E) at the token.
            c: complex output weights (C, M, E, P) from `discretize`; computed if None.
        """
        if c is None:
            _, c = self.discretize()
        y = 2 * torch.einsum("bmep,cmep->bmec", state_BMEP, c).real
        return y + u_BME[..., None] * self.d.permute(1, 2, 0)


class UnstructuredKernel(nn.Module):
    """Kernels computed from the time by a small network, with a decay for each channel.

    Args:
        channels: number of channels E.
        outputs: number of kernels of each channel, C M.
        length: length of training L, which is time 1.
        limit: maximum length of a kernel, in tokens.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        length: int,
        limit: int,
    ) -> None:
        super().__init__()
        self.shape = (outputs, channels)
        self.length = length
        self.limit = limit
        self.inner = nn.Linear(2 * _BANDS + 1, _NETWORK_WIDTH)
        self.outer = nn.Linear(_NETWORK_WIDTH, outputs * channels, bias=False)
        self.log_alpha = _zeros(channels)
        self.d = _zeros(outputs, 1, channels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters."""
        self.inner.reset_parameters()
        self.outer.weight.normal_(std=self.outer.in_features**-0.5)
        channels = self.log_alpha.shape[0]
        decays = torch.linspace(math.log(_SLOWEST_DECAY), math.log(_FASTEST_DECAY), channels)
        self.log_alpha.copy_(decays)
        self.d.normal_()

    def kernel(self, length: int) -> Tensor:
        """Compute the kernels K (C M, E, length), of about unit energy over the length of training.

        Args:
            length: number of tokens of the text, which each kernel covers.

        Raises:
            GraftError: `length` is above the limit.
        """
        if length > self.limit:
            raise GraftError(
                f"A text has {length:,} tokens, but kernel_limit allows unstructured kernels of at most "
                f"{self.limit:,}: shorten the text, raise kernel_limit, or train with the kernel s4d, which has no "
                "limit."
            )
        alpha = torch.exp(at_least_float32(self.log_alpha))
        time = torch.arange(length, device=alpha.device, dtype=alpha.dtype) / self.length
        undamped = self._network(time).T.reshape(*self.shape, length)
        energy = self.length * (1 - torch.exp(-2 * alpha)) / (2 * alpha)
        return undamped * torch.exp(-alpha[:, None] * time) * energy.rsqrt()[:, None]

    def _network(self, time_T: Tensor) -> Tensor:
        """Return the network's outputs (T, C M E) at times (T)."""
        bands = torch.arange(1, _BANDS + 1, device=time_T.device)
        waves = 2 * math.pi * time_T[:, None] * bands
        features = torch.cat([time_T[:, None], waves.sin(), waves.cos()], dim=-1)
        weight = at_least_float32(self.inner.weight)
        bias = at_least_float32(self.inner.bias)
        inner = torch.sin(features @ weight.T + bias)
        return inner @ at_least_float32(self.outer.weight).T


def hippo_frequencies(pairs: int) -> Tensor:
    """Compute the positive frequencies (P) of the normal part of HiPPO-LegS, in increasing order.

    The normal part has -1/2 on its diagonal, and +-sqrt((2n + 1) (2k + 1)) / 2 above and below (Gupta, Gu and Berant,
    2022; Gu et al., 2022).

    Args:
        pairs: number of conjugate pairs P, half of the size of the matrix.
    """
    root = torch.sqrt(2 * torch.arange(2 * pairs, dtype=torch.double) + 1)
    products = torch.outer(root, root) / 2
    skew = products.triu(1) - products.tril(-1)
    # The eigenvalues of a skew-symmetric S are imaginary, those of the Hermitian iS real.
    return torch.linalg.eigvalsh(1j * skew)[pairs:]


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def at_least_float32(value: Tensor) -> Tensor:
    """Return the tensor in float32 or float64, the precision that Fourier transforms and powers need."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.float()
