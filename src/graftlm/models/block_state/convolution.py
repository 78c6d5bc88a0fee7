"""Causal convolutions of long sequences, and recurrences of diagonal systems, in every form that is the same sum.

    y_t = sum over j = 0..t of K_j u_{t-j}                x_t = a x_{t-1} + u_t

Shape suffixes: B rows, T tokens, E channels, C outputs of each channel, P conjugate pairs of a state, n chunks, c
tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """(B, T, E, C) by Fourier transforms: O(T log T)."""
    length = u_BTE.shape[1]
    size = 2 * length
    u_f = torch.fft.rfft(u_BTE.transpose(1, 2), n=size)  # (B, E, f)
    k_f = torch.fft.rfft(kernel_CET[..., :length], n=size)  # (C, E, f)
    y = torch.fft.irfft(u_f[:, None] * k_f, n=size)[..., :length]  # (B, C, E, T)
    return y.permute(0, 3, 2, 1)


def convolve_short(u_BTE: Tensor, kernel_CET: Tensor) -> Tensor:
    """(B, T, E, C) by a product with each channel's Toeplitz matrix: O(T^2), and nothing of later tokens."""
    length = u_BTE.shape[1]
    back = torch.arange(length, device=u_BTE.device)
    back = back - back[:, None]  # (token j, token t): t - j
    matrix = kernel_CET[..., back.clamp(min=0)] * (back >= 0)  # (C, E, j, t)
    return torch.einsum("bje,cejt->btec", u_BTE, matrix)


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
    """(..., count) a^start, a^(start+1), ..., of complex numbers given by their logarithms."""
    return torch.exp(log_a[..., None] * torch.arange(start, start + count, device=log_a.device))


def end_states(u_BncE: Tensor, log_a_EP: Tensor) -> Tensor:
    """(B, n, E, P) complex: what each chunk alone leaves behind, sum over j of a^(c-1-j) u_j."""
    weights = torch.view_as_real(powers(log_a_EP, u_BncE.shape[2]).flip(-1))  # (E, P, c, 2)
    found = torch.einsum("bnce,epck->bnepk", u_BncE, weights)
    return torch.view_as_complex(found.contiguous())


def carry(ends_BnEP: Tensor, log_a_EP: Tensor, length: int, first_BEP: Tensor | None) -> Tensor:
    """(B, n + 1, E, P): the state before each chunk of `length` tokens, and behind the last."""
    factor = torch.exp(log_a_EP * length)
    state = torch.zeros_like(ends_BnEP[:, 0]) if first_BEP is None else first_BEP
    states = [state]
    for end in ends_BnEP.unbind(1):
        state = factor * state + end
        states.append(state)
    return torch.stack(states, dim=1)


def read_states(states_BnEP: Tensor, c_CEP: Tensor, log_a_EP: Tensor, count: int) -> Tensor:
    """(B, n, count, E, C): what a state before `count` tokens adds to the output at each, 2 Re(c a^(t+1) x)."""
    weights = torch.view_as_real(c_CEP[..., None] * powers(log_a_EP, count, 1)).clone()  # (C, E, P, count, 2)
    weights[..., 1] *= -1
    return 2 * torch.einsum("bnepk,ceptk->bntec", torch.view_as_real(states_BnEP), weights)
