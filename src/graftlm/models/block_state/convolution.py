"""Causal convolutions of long sequences, and recurrences of diagonal systems, in every form that is the same sum.

    y_t = sum over j = 0..t of K_j u_{t-j}                x_t = a x_{t-1} + u_t

Shape suffixes: B rows, T tokens, E channels, C outputs of each channel, P conjugate pairs of a state, n chunks, c
tokens of a chunk, N = B n chunks of all rows, M systems side by side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def convolve(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """(B, T, E, C) by Fourier transforms: O(T log T)."""
    length = u_BTE.shape[1]
    size = 2 * length
    u_f = torch.fft.rfft(u_BTE.transpose(1, 2), n=size)  # (B, E, f)
    k_f = torch.fft.rfft(kernel_CET[..., :length], n=size)  # (C, E, f)
    y = torch.fft.irfft(u_f[:, None] * k_f, n=size)[..., :length]  # (B, C, E, T)
    return y.permute(0, 3, 2, 1)


def last_output(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """(B, E, C): a convolution's output at the last token alone, as a sum over all inputs."""
    return torch.einsum("bte,cet->bec", u_BTE, kernel_CET.flip(-1))


def window_ends(u_BTE: Tensor, kernel_CET: Tensor, window: int) -> Tensor:
    """(B, T / window, E, C): a convolution's outputs at the last token of each window.

    Of the phases r of a window, each is a convolution over windows:

        y_{iW + W-1} = sum over r of sum over m of K_{mW + r} u_{(i-m)W + W-1-r}

    so that one Fourier transform of T / W steps for each phase is enough, and one back for all phases together.
    """
    rows, length, width = u_BTE.shape
    count = length // window
    size = 2 * count
    u = u_BTE.reshape(rows, count, window, width).flip(2).permute(0, 3, 2, 1)  # (B, E, r, m)
    k = kernel_CET[..., :length].reshape(*kernel_CET.shape[:2], count, window).transpose(2, 3)  # (C, E, r, m)
    u_f, k_f = torch.fft.rfft(u, n=size), torch.fft.rfft(k, n=size)
    y_f = torch.einsum("berf,cerf->bcef", u_f, k_f)
    return torch.fft.irfft(y_f, n=size)[..., :count].permute(0, 3, 2, 1)


def powers(log_a: Tensor, count: int, start: int = 0) -> Tensor:
    """(..., count) a^start, a^(start+1), ..., of complex numbers given by their logarithms.

    As a^(start + m i) a^j with j < m, about the root of `count`: an exponential costs many times a product.
    """
    fine = math.isqrt(max(1, count) - 1) + 1
    coarse = -(-count // fine)
    jumps = torch.exp(log_a[..., None] * (start + fine * torch.arange(coarse, device=log_a.device)))
    steps = torch.exp(log_a[..., None] * torch.arange(fine, device=log_a.device))
    return (jumps[..., None] * steps[..., None, :]).flatten(-2)[..., :count]


def channels_first(u_BTE: Tensor, chunk: int) -> Tensor:
    """(E, N, c): the chunks of all rows, whose tokens fill a whole number of them."""
    return u_BTE.reshape(-1, chunk, u_BTE.shape[-1]).permute(2, 0, 1).contiguous()


def end_states(u_ENc: Tensor, powers_MEPc: Tensor) -> Tensor:
    """(N, M, E, P) complex: what each chunk alone leaves behind in each system, sum over j of a^(c-1-j) u_j."""
    weights = torch.view_as_real(powers_MEPc.flip(-1)).permute(1, 3, 0, 2, 4)  # (E, c, M, P, 2)
    found = torch.bmm(u_ENc, weights.flatten(2)).unflatten(-1, weights.shape[2:])
    return torch.view_as_complex(found).permute(1, 2, 0, 3)


def carry(ends_BnMEP: Tensor, log_a_MEP: Tensor, length: int, first_BMEP: Tensor | None) -> Tensor:
    """(B, n + 1, M, E, P): the state before each chunk of `length` tokens, and behind the last."""
    factor = torch.exp(log_a_MEP * length)
    state = torch.zeros_like(ends_BnMEP[:, 0]) if first_BMEP is None else first_BMEP
    states = [state]
    for end in ends_BnMEP.unbind(1):
        state = factor * state + end
        states.append(state)
    return torch.stack(states, dim=1)


def read_states(states_BnEP: Tensor, c_CEP: Tensor, log_a_EP: Tensor, count: int) -> Tensor:
    """(B, n, count, E, C): what a state before `count` tokens adds to the output at each, 2 Re(c a^(t+1) x)."""
    weights = read_outs(c_CEP, powers(log_a_EP, count, 1))
    return torch.einsum("bnepk,ceptk->bntec", torch.view_as_real(states_BnEP), weights)


def read_outs(c_CEP: Tensor, powers_EPt: Tensor) -> Tensor:
    """(C, E, P, t, 2): what either part of a state adds to outputs, 2 Re(c a^t x) as two products."""
    weights = 2 * c_CEP[..., None] * powers_EPt
    return torch.stack([weights.real, -weights.imag], dim=-1)


def in_chunks(
    u_BTE: Tensor, c_CEP: Tensor, d_CE: Tensor, log_a_EP: Tensor, first_BEP: Tensor | None, chunk: int
) -> Tensor:
    """(B, T, E, C): outputs of a system at every token, some tokens at a time: O(T), and nothing of later tokens.

    Within a chunk it is a product with each channel's Toeplitz matrix, from chunk to chunk a state x is carried:

        y_t = sum over j of u_j M_jt + 2 Re(c a^(t+1) x)        M_jt = 2 Re(c a^(t-j)) for t >= j, and d more for t = j

    All products have the channels in front, so that what is added lies alike in memory.

    Args:
        u_BTE: inputs.
        c_CEP: complex, the read-out of states.
        d_CE: of the input.
        log_a_EP: complex.
        first_BEP: complex, the state before all tokens; zero where absent.
        chunk: c.
    """
    rows, length, _ = u_BTE.shape
    steps = powers(log_a_EP, chunk + 1)
    padded = nn.functional.pad(u_BTE, (0, 0, 0, -length % chunk))
    u_ENc = channels_first(padded, chunk)
    ends = end_states(u_ENc, steps[None, ..., :-1])[:, 0].unflatten(0, (rows, -1))
    states = carry(ends, log_a_EP, chunk, first_BEP)[:, :-1]
    states_EN = torch.view_as_real(states.permute(2, 0, 1, 3).contiguous()).flatten(1, 2).flatten(-2)  # (E, N, 2 P)
    reads = read_outs(c_CEP, steps[..., 1:]).permute(1, 2, 4, 3, 0).flatten(1, 2).flatten(-2)  # (E, 2 P, c C)
    y = torch.bmm(u_ENc, _toeplitz(c_CEP, d_CE, steps[..., :-1])).baddbmm_(states_EN, reads)
    y = y.flatten(1).T.contiguous()  # (N c C, E)
    return y.unflatten(0, (rows, -1, c_CEP.shape[0])).transpose(-1, -2)[:, :length]


def _toeplitz(c_CEP: Tensor, d_CE: Tensor, powers_EPc: Tensor) -> Tensor:
    """(E, c, c C): by which a chunk's inputs are multiplied."""
    kernel = 2 * torch.einsum("cep,ept->cet", c_CEP, powers_EPc).real
    kernel = torch.cat([kernel[..., :1] + d_CE[..., None], kernel[..., 1:]], dim=-1)
    back = torch.arange(kernel.shape[-1], device=kernel.device)
    back = back - back[:, None]  # (token j, token t): t - j
    return (kernel[..., back.clamp(min=0)] * (back >= 0)).permute(1, 2, 3, 0).flatten(-2)
