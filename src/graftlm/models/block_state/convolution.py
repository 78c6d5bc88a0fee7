"""Causal convolutions of long sequences and recurrences of diagonal systems, in several equivalent forms.

    y_t = sum over j = 0..t of K_j u_{t-j}                x_t = a x_{t-1} + u_t

Shape suffixes: B rows, T tokens, E channels, C outputs of each channel, P conjugate pairs of a state, n chunks of a
row, c tokens of a chunk, N = B n chunks of all rows, M parallel systems, Q = M P pairs of all systems, f frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Tokens of all rows in a segment: its intermediate tensors stay in the cache and use the same memory as those before.
SEGMENT = 8192


def fft_convolution(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """Compute the convolution by Fourier transforms, in O(T log T).

    Args:
        u_BTE: inputs (B, T, E).
        kernel_CET: kernels (C, E, T or longer).

    Returns:
        Outputs (B, T, E, C).
    """
    length = u_BTE.shape[1]
    # Twice the length, so that the circular convolution does not wrap around.
    size = 2 * length
    u_BEf = torch.fft.rfft(u_BTE.transpose(1, 2), n=size)
    kernel_CEf = torch.fft.rfft(kernel_CET[..., :length], n=size)
    y_BCEf = u_BEf[:, None] * kernel_CEf
    y_BCET = torch.fft.irfft(y_BCEf, n=size)[..., :length]
    return y_BCET.permute(0, 3, 2, 1)


def last_output(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """Compute the convolution's output (B, E, C) at the last token only, as a sum over all inputs.

    Args:
        u_BTE: inputs (B, T, E).
        kernel_CET: kernels (C, E, T).
    """
    return torch.einsum("bte,cet->bec", u_BTE, kernel_CET.flip(-1))


def window_end_outputs(u_BTE: Tensor, kernel_CET: Tensor, window: int) -> Tensor:
    """Compute the convolution's outputs at the last token of each window only.

    For each phase r within a window, the sum is a convolution over windows:

        y_{iW + W-1} = sum over r of sum over m of K_{mW + r} u_{(i-m)W + W-1-r}

    This takes one Fourier transform of T / W steps for each phase, and one inverse transform for all phases together.

    Args:
        u_BTE: inputs (B, T, E), with T a multiple of `window`.
        kernel_CET: kernels (C, E, T or longer).
        window: number of tokens W in a window.

    Returns:
        Outputs (B, T / W, E, C).
    """
    rows, length, width = u_BTE.shape
    outputs = kernel_CET.shape[0]
    count = length // window
    size = 2 * count
    u_BmrE = u_BTE.reshape(rows, count, window, width).flip(2)
    u_BErm = u_BmrE.permute(0, 3, 2, 1)
    u_BErf = torch.fft.rfft(u_BErm, n=size)
    kernel_CEmr = kernel_CET[..., :length].reshape(outputs, width, count, window)
    kernel_CErm = kernel_CEmr.transpose(2, 3)
    kernel_CErf = torch.fft.rfft(kernel_CErm, n=size)
    y_BCEf = torch.einsum("berf,cerf->bcef", u_BErf, kernel_CErf)
    y_BCEm = torch.fft.irfft(y_BCEf, n=size)[..., :count]
    return y_BCEm.permute(0, 3, 2, 1)


def powers(log_a: Tensor, count: int) -> Tensor:
    """Compute the powers 1, a, a^2, ... of complex numbers a.

    They are computed as a^(m i) a^j with j < m, where m is about the square root of `count`, since a complex
    exponential costs many times as much as a product.

    Args:
        log_a: complex logarithms (...) of a.
        count: number of powers.

    Returns:
        Powers (..., count).
    """
    fine = math.isqrt(max(1, count) - 1) + 1
    coarse = -(-count // fine)
    coarse_exponents = fine * torch.arange(coarse, device=log_a.device)
    fine_exponents = torch.arange(fine, device=log_a.device)
    coarse_powers = torch.exp(log_a[..., None] * coarse_exponents)
    fine_powers = torch.exp(log_a[..., None] * fine_exponents)
    products = coarse_powers[..., None] * fine_powers[..., None, :]
    all_powers = products.flatten(-2)
    return all_powers[..., :count]


def chunks_channels_first(u_BTE: Tensor, chunk: int) -> Tensor:
    """Split rows (B, T, E) into the chunks (E, N, c) of all rows.

    Args:
        u_BTE: inputs (B, T, E), with T a multiple of `chunk`.
        chunk: number of tokens c in a chunk.
    """
    # A matrix is transposed several times as fast as a tensor of three dimensions.
    u_ET = u_BTE.flatten(0, 1).T.contiguous()
    return u_ET.unflatten(1, (-1, chunk))


def states_within_chunks(u_ENc: Tensor, powers_EQc: Tensor) -> Tensor:
    """Compute the state after each chunk from a zero state before it, sum over j of a^(c-1-j) u_j.

    Args:
        u_ENc: inputs (E, N, c) of all chunks.
        powers_EQc: complex powers (E, Q, c) of a, from 0 to c - 1.

    Returns:
        Complex states (E, N, Q).
    """
    weights_EQc2 = torch.view_as_real(powers_EQc.flip(-1))
    weights_EcQ2 = weights_EQc2.transpose(1, 2)
    states = torch.bmm(u_ENc, weights_EcQ2.flatten(2))
    return torch.view_as_complex(states.unflatten(-1, (-1, 2)))


def scan_chunks(
    states_EBnQ: Tensor,
    factor_EQ: Tensor,
    initial_EBQ: Tensor | None,
) -> Tensor:
    """Connect the states of consecutive chunks by a parallel scan, in 2 log2(n) dependent steps and O(n) products.

    Two chunks of c tokens, of which the first leaves the state x and the second y, are one chunk of twice the length,
    which leaves a^c x + y. The states before such pairs are known from half as many chunks; they are the states before
    the first chunks, and one more step gives those before the second ones (Blelloch, 1990).

    Args:
        states_EBnQ: complex states (E, B, n, Q) after each chunk from zero.
        factor_EQ: complex factors a^c (E, Q) of a state over one chunk.
        initial_EBQ: complex state (E, B, Q) before the first chunk; None for zero.

    Returns:
        Complex states (E, B, n, Q) before each chunk; the last entry of `states_EBnQ` has no influence.
    """
    chunks = states_EBnQ.shape[2]
    initial = initial_EBQ
    if initial is None:
        initial = torch.zeros_like(states_EBnQ[:, :, 0])
    if chunks == 1:
        return initial[:, :, None]
    padded = states_EBnQ
    if chunks % 2 == 1:
        padded = nn.functional.pad(states_EBnQ, (0, 0, 0, 1))
    first = padded[:, :, 0::2]
    second = padded[:, :, 1::2]
    factor = factor_EQ[:, None, None]
    pairs = torch.addcmul(second, factor, first)
    before_first = scan_chunks(pairs, factor_EQ.square(), initial)
    before_second = torch.addcmul(first, factor, before_first)
    before = torch.stack([before_first, before_second], dim=3)
    return before.flatten(2, 3)[:, :, :chunks]


def states_after_chunks(u_BTE: Tensor, log_a_MEP: Tensor, chunk: int) -> Tensor:
    """Compute the states of M systems at the boundaries of chunks, from a zero state before the first chunk.

    Args:
        u_BTE: inputs (B, T, E), with T a multiple of `chunk`.
        log_a_MEP: complex logarithms (M, E, P) of a.
        chunk: number of tokens c in a chunk.

    Returns:
        Complex states (B, n + 1, M, E, P): zero, then the state after each chunk.
    """
    rows = len(u_BTE)
    systems, _, pairs = log_a_MEP.shape
    log_a_EQ = log_a_MEP.transpose(0, 1).flatten(1)
    u_ENc = chunks_channels_first(u_BTE, chunk)
    states_ENQ = states_within_chunks(u_ENc, powers(log_a_EQ, chunk))
    states_EBnQ = states_ENQ.unflatten(1, (rows, -1))
    # The state after the last chunk is the state before a further one.
    extended = nn.functional.pad(states_EBnQ, (0, 0, 0, 1))
    before_EBnQ = scan_chunks(extended, torch.exp(log_a_EQ * chunk), None)
    before_EBnMP = before_EBnQ.unflatten(-1, (systems, pairs))
    return before_EBnMP.permute(1, 2, 3, 0, 4)


def chunked_convolution(
    u_BTE: Tensor,
    c_CEP: Tensor,
    d_CE: Tensor,
    log_a_EP: Tensor,
    initial_BEP: Tensor | None,
    chunk: int,
) -> Tensor:
    """Compute the outputs of one diagonal system at every token, in parallel chunks, in O(T).

    Within a chunk, the sum is a product with each channel's Toeplitz matrix M. Chunks are connected by a state x:

        y_t = sum over j of u_j M_jt + 2 Re(c a^(t+1) x)        M_jt = 2 Re(c a^(t-j)) for t >= j, plus d for t = j

    Channels are the batch dimension of all products, so no result is transposed between them. Without gradients, a CPU
    computes a long text in segments that stay in its cache.

    Args:
        u_BTE: inputs (B, T, E).
        c_CEP: complex output weights (C, E, P) of the states.
        d_CE: output weights (C, E) of the input at the same token.
        log_a_EP: complex logarithms (E, P) of a.
        initial_BEP: complex state (B, E, P) before the first token; None for zero.
        chunk: number of tokens c in a chunk.

    Returns:
        Outputs (B, T, E, C).
    """
    length = u_BTE.shape[1]
    padding = -length % chunk
    padded = u_BTE
    if padding:
        padded = nn.functional.pad(u_BTE, (0, 0, 0, padding))
    weights = _ChunkWeights.of(c_CEP, d_CE, log_a_EP, chunk)
    initial_EBP = None if initial_BEP is None else initial_BEP.transpose(0, 1)
    if torch.is_grad_enabled() or u_BTE.device.type != "cpu":
        y_BTCE, _ = _convolve_chunks(padded, weights, initial_EBP)
    else:
        y_BTCE = _convolve_segments(padded, weights, initial_EBP)
    return y_BTCE.transpose(-1, -2)[:, :length]


@dataclass(frozen=True)
class _ChunkWeights:
    """The matrices by which chunks of one length are convolved.

    Args:
        toeplitz: weights (E, c, c C) of a chunk's inputs in its outputs.
        states: weights (E, 2 P, c C) of the state before a chunk, in real and imaginary parts, in its outputs.
        powers: complex powers (E, P, c) of a, from 0 to c - 1.
        factor: complex factors a^c (E, P) of a state over one chunk.
        outputs: number of outputs C of each channel.
    """

    toeplitz: Tensor
    states: Tensor
    powers: Tensor
    factor: Tensor
    outputs: int

    @classmethod
    def of(cls, c_CEP: Tensor, d_CE: Tensor, log_a_EP: Tensor, chunk: int) -> _ChunkWeights:
        """Compute the matrices of a system for chunks of `chunk` tokens."""
        powers_EPc = powers(log_a_EP, chunk + 1)
        return cls(
            toeplitz=_toeplitz(c_CEP, d_CE, powers_EPc[..., :-1]),
            states=_state_weights(c_CEP, powers_EPc[..., 1:]),
            powers=powers_EPc[..., :-1],
            factor=powers_EPc[..., -1],
            outputs=c_CEP.shape[0],
        )

    @property
    def chunk(self) -> int:
        """The number of tokens c in a chunk."""
        return self.powers.shape[-1]


def _convolve_segments(u_BTE: Tensor, weights: _ChunkWeights, initial_EBP: Tensor | None) -> Tensor:
    """Compute the same outputs as `_convolve_chunks`, one segment of the text after the other."""
    rows, length, width = u_BTE.shape
    segment = max(1, SEGMENT // (rows * weights.chunk)) * weights.chunk
    y_BTCE = u_BTE.new_empty(rows, length, weights.outputs, width)
    state = initial_EBP
    for start in range(0, length, segment):
        span = slice(start, start + segment)
        y_BTCE[:, span], state = _convolve_chunks(u_BTE[:, span], weights, state)
    return y_BTCE


def _convolve_chunks(
    u_BTE: Tensor,
    weights: _ChunkWeights,
    initial_EBP: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Convolve all chunks of a text at once.

    Args:
        u_BTE: inputs (B, T, E), with T a multiple of the chunk.
        weights: matrices of the chunks.
        initial_EBP: complex state (E, B, P) before the first chunk; None for zero.

    Returns:
        Outputs (B, T, C, E), and the complex state (E, B, P) after the last chunk.
    """
    rows = len(u_BTE)
    u_ENc = chunks_channels_first(u_BTE, weights.chunk)
    within_ENP = states_within_chunks(u_ENc, weights.powers)
    within_EBnP = within_ENP.unflatten(1, (rows, -1))
    before_EBnP = scan_chunks(within_EBnP, weights.factor, initial_EBP)
    after_EBP = torch.addcmul(within_EBnP[:, :, -1], weights.factor[:, None], before_EBnP[:, :, -1])
    before_EBnP2 = torch.view_as_real(before_EBnP)
    states_ENs = before_EBnP2.flatten(1, 2).flatten(-2)
    y = torch.bmm(u_ENc, weights.toeplitz).baddbmm_(states_ENs, weights.states)
    y_NcCE = y.flatten(1).T.contiguous()
    y_BTCE = y_NcCE.unflatten(0, (rows, -1, weights.outputs))
    return y_BTCE, after_EBP


def _state_weights(c_CEP: Tensor, powers_EPc: Tensor) -> Tensor:
    """Return the weights (E, 2 P, c C) of the state's real and imaginary parts in a chunk's outputs 2 Re(c a^t x)."""
    weights_CEPc = 2 * c_CEP[..., None] * powers_EPc
    real = weights_CEPc.real
    imaginary = -weights_CEPc.imag
    weights_CEPc2 = torch.stack([real, imaginary], dim=-1)
    weights_EP2cC = weights_CEPc2.permute(1, 2, 4, 3, 0)
    return weights_EP2cC.flatten(1, 2).flatten(-2)


def _toeplitz(c_CEP: Tensor, d_CE: Tensor, powers_EPc: Tensor) -> Tensor:
    """Return the matrix (E, c, c C) that maps a chunk's inputs to its outputs."""
    kernel = 2 * torch.einsum("cep,ept->cet", c_CEP, powers_EPc).real
    first = kernel[..., :1] + d_CE[..., None]
    kernel = torch.cat([first, kernel[..., 1:]], dim=-1)
    position = torch.arange(kernel.shape[-1], device=kernel.device)
    delay = position - position[:, None]  # delay[j, t] of output t after input j
    matrix_CEcc = kernel[..., delay.clamp(min=0)] * (delay >= 0)
    matrix_EccC = matrix_CEcc.permute(1, 2, 3, 0)
    return matrix_EccC.flatten(-2)
