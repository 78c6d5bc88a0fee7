"""Causal convolutions of long sequences, and recurrences of diagonal systems, in all forms that give the same sum.

    y_t = sum over j = 0..t of K_j u_{t-j}                x_t = a x_{t-1} + u_t

Shape suffixes: B rows, T tokens, E channels, C outputs of each channel, P conjugate pairs of a state, n chunks of a
row, c tokens of a chunk, N = B n chunks of all rows, M systems side by side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def fft_convolution(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """(B, T, E, C): the convolution by Fourier transforms, O(T log T)."""
    length = u_BTE.shape[1]
    size = 2 * length
    u_f = torch.fft.rfft(u_BTE.transpose(1, 2), n=size)  # (B, E, f)
    k_f = torch.fft.rfft(kernel_CET[..., :length], n=size)  # (C, E, f)
    y = torch.fft.irfft(u_f[:, None] * k_f, n=size)[..., :length]  # (B, C, E, T)
    return y.permute(0, 3, 2, 1)


def last_output(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """(B, E, C): the convolution's output at the last token, as a sum over all inputs."""
    return torch.einsum("bte,cet->bec", u_BTE, kernel_CET.flip(-1))


def window_end_outputs(u_BTE: Tensor, kernel_CET: Tensor, window: int) -> Tensor:
    """(B, T / window, E, C): the convolution's outputs at the last token of each window.

    Each of the phases r of a window is a convolution over windows:

        y_{iW + W-1} = sum over r of sum over m of K_{mW + r} u_{(i-m)W + W-1-r}

    This takes one Fourier transform of T / W steps for each phase, and one inverse transform for all phases together.
    """
    rows, length, width = u_BTE.shape
    count = length // window
    size = 2 * count
    u = u_BTE.reshape(rows, count, window, width).flip(2).permute(0, 3, 2, 1)  # (B, E, r, m)
    k = kernel_CET[..., :length].reshape(*kernel_CET.shape[:2], count, window).transpose(2, 3)  # (C, E, r, m)
    u_f, k_f = torch.fft.rfft(u, n=size), torch.fft.rfft(k, n=size)
    y_f = torch.einsum("berf,cerf->bcef", u_f, k_f)
    return torch.fft.irfft(y_f, n=size)[..., :count].permute(0, 3, 2, 1)


def powers(log_a: Tensor, count: int) -> Tensor:
    """(..., count): 1, a, a^2, ... of complex numbers a, given by their logarithms.

    They are computed as a^(m i) a^j with j < m, where m is about the root of `count`: a complex exponential
    costs many times as much as a product.
    """
    fine = math.isqrt(max(1, count) - 1) + 1
    coarse = -(-count // fine)
    jumps = torch.exp(log_a[..., None] * (fine * torch.arange(coarse, device=log_a.device)))
    steps = torch.exp(log_a[..., None] * torch.arange(fine, device=log_a.device))
    return (jumps[..., None] * steps[..., None, :]).flatten(-2)[..., :count]


def chunks_channels_first(u_BTE: Tensor, chunk: int) -> Tensor:
    """(E, N, c): the chunks of all rows; T is a multiple of `chunk`."""
    return u_BTE.reshape(-1, chunk, u_BTE.shape[-1]).permute(2, 0, 1).contiguous()


def states_within_chunks(u_ENc: Tensor, powers_MEPc: Tensor) -> Tensor:
    """(N, M, E, P) complex: the state after each chunk from zero before it, sum over j of a^(c-1-j) u_j."""
    weights = torch.view_as_real(powers_MEPc.flip(-1)).permute(1, 3, 0, 2, 4)  # (E, c, M, P, 2)
    states = torch.bmm(u_ENc, weights.flatten(2)).unflatten(-1, weights.shape[2:])
    return torch.view_as_complex(states).permute(1, 2, 0, 3)


def scan_chunks(states_BnMEP: Tensor, log_a_MEP: Tensor, length: int, initial_BMEP: Tensor | None) -> Tensor:
    """(B, n + 1, M, E, P): the initial state, and the state after each chunk of `length` tokens.

    `states` are those of `states_within_chunks`; the initial state is zero if it is None.
    """
    factor = torch.exp(log_a_MEP * length)
    state = torch.zeros_like(states_BnMEP[:, 0]) if initial_BMEP is None else initial_BMEP
    states = [state]
    for within_chunk in states_BnMEP.unbind(1):
        state = factor * state + within_chunk
        states.append(state)
    return torch.stack(states, dim=1)


def states_after_chunks(u_BTE: Tensor, log_a_MEP: Tensor, chunk: int) -> Tensor:
    """(B, n + 1, M, E, P) complex: zero, and the state after each of the n chunks of `chunk` tokens."""
    states = states_within_chunks(chunks_channels_first(u_BTE, chunk), powers(log_a_MEP, chunk))
    return scan_chunks(states.unflatten(0, (len(u_BTE), -1)), log_a_MEP, chunk, None)


def chunked_convolution(
    u_BTE: Tensor, c_CEP: Tensor, d_CE: Tensor, log_a_EP: Tensor, initial_BEP: Tensor | None, chunk: int
) -> Tensor:
    """(B, T, E, C): outputs of a system at every token, chunk by chunk, in O(T); later tokens have no influence.

    Within a chunk, the sum is a product with each channel's Toeplitz matrix M. Chunks are connected by a state x:

        y_t = sum over j of u_j M_jt + 2 Re(c a^(t+1) x)        M_jt = 2 Re(c a^(t-j)) for t >= j, plus d for t = j

    Channels are the batch dimension of all products, so no result is transposed between them.

    `c`, `log_a` and the initial state, which is zero if None, are complex; `d` are weights from inputs to outputs.
    """
    rows, length, _ = u_BTE.shape
    steps = powers(log_a_EP, chunk + 1)
    padded = nn.functional.pad(u_BTE, (0, 0, 0, -length % chunk))
    u_ENc = chunks_channels_first(padded, chunk)
    within_chunks = states_within_chunks(u_ENc, steps[None, ..., :-1])[:, 0].unflatten(0, (rows, -1))
    states = scan_chunks(within_chunks, log_a_EP, chunk, initial_BEP)[:, :-1]
    states_EN = torch.view_as_real(states.permute(2, 0, 1, 3).contiguous()).flatten(1, 2).flatten(-2)  # (E, N, 2 P)
    weights = 2 * c_CEP[..., None] * steps[..., 1:]  # (C, E, P, c), of a state x in the output 2 Re(c a^t x)
    weights = torch.stack([weights.real, -weights.imag], dim=-1).permute(1, 2, 4, 3, 0)
    weights = weights.flatten(1, 2).flatten(-2)  # (E, 2 P, c C)
    y = torch.bmm(u_ENc, _toeplitz(c_CEP, d_CE, steps[..., :-1])).baddbmm_(states_EN, weights)
    y = y.flatten(1).T.contiguous()  # (N c C, E)
    return y.unflatten(0, (rows, -1, c_CEP.shape[0])).transpose(-1, -2)[:, :length]


def _toeplitz(c_CEP: Tensor, d_CE: Tensor, powers_EPc: Tensor) -> Tensor:
    """(E, c, c C): the matrix that maps a chunk's inputs to its outputs."""
    kernel = 2 * torch.einsum("cep,ept->cet", c_CEP, powers_EPc).real
    kernel = torch.cat([kernel[..., :1] + d_CE[..., None], kernel[..., 1:]], dim=-1)
    delay = torch.arange(kernel.shape[-1], device=kernel.device)
    delay = delay - delay[:, None]  # (token j, token t): t - j
    return (kernel[..., delay.clamp(min=0)] * (delay >= 0)).permute(1, 2, 3, 0).flatten(-2)
