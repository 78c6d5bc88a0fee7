"""The gated delta rule: a matrix-valued state that every token decays, corrects and reads.

    S_t = a_t S_{t-1} + k_t u_t^T        u_t = b_t (v_t - a_t S_{t-1}^T k_t)        o_t = S_t^T q_t

The state maps keys to values: a token writes what the decayed state does not yet answer to its key. In chunks of c
tokens, with g_i = log a_1 + ... + log a_i from the chunk's start and S the state before it:

    (1 + L) U = diag(b) (V - diag(exp g) K S)                      L_ij = b_i exp(g_i - g_j) k_i k_j  for j < i
    O = diag(exp g) Q S + M U                                      M_ij = exp(g_i - g_j) q_i k_j      for j <= i
    S' = exp(g_c) S + sum over j of exp(g_c - g_j) k_j u_j^T

Shape suffixes: B rows, H heads, T tokens, K key width, V value width, n chunks, c tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


def delta_rule(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    log_a_BHT: Tensor,
    b_BHT: Tensor,
    state_BHKV: Tensor | None = None,
    document_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, T, V), and the state (B, H, K, V) after the last token; all tensors are float32 or float64.

    A token with log a = 0 and b = 0 leaves the state as it is. Keys are of length 1 or less. Another `chunk` changes
    results by rounding alone.

    Args:
        state_BHKV: the state before the first token; None for zero.
        document_BT: numbers of documents, which begin with a state of zero; None for one document.
    """
    length, chunk = q_BHTK.shape[2], min(chunk, q_BHTK.shape[2])
    q, k, v, log_a, b = (_chunks(x, chunk) for x in (q_BHTK, k_BHTK, v_BHTV, log_a_BHT[..., None], b_BHT[..., None]))
    g = log_a[..., 0].cumsum(-1)  # (B, H, n, c)
    within, before, after, kept = _decays(g, document_BT, length, chunk)
    corrections = (b * within.tril(-1)) * (k @ k.transpose(-1, -2))
    right = torch.cat([b * v, b * before[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(corrections, right, upper=False, unitriangular=True)
    own, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention = within * (q @ k.transpose(-1, -2))
    q, k = q * before[..., None], k * after[..., None]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if state_BHKV is None else state_BHKV
    outputs = []
    for i in range(q.shape[2]):
        u = own[:, :, i] - read[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + attention[:, :, i] @ u)
        state = kept[:, :, i, None, None] * state + k[:, :, i].transpose(-1, -2) @ u
    return torch.cat(outputs, dim=2)[:, :, :length], state


def unit_length(x: Tensor) -> Tensor:
    """Vectors (..., K) over their lengths; those of a length near 0.1 or below stay shorter.

    A document's first keys are zero. A division by their lengths alone would have gradients of 1e12 there.
    """
    return x * (x.square().sum(-1, keepdim=True) + 0.01).rsqrt()


def mixed_tokens(
    z_BTE: Tensor, mix_CE: Tensor, document_BT: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(B, T, E) sums of each token and the C - 1 tokens before, weighted by channel; and the last C - 1 tokens.

    `before` are those of the pass before, None for none. A token of another document counts as zero.
    """
    length, longest = z_BTE.shape[1], len(mix_CE) - 1
    z = torch.cat([z_BTE.new_zeros(len(z_BTE), longest, z_BTE.shape[2]) if before is None else before, z_BTE], 1)
    result = mix_CE[0] * z_BTE
    for shift in range(1, longest + 1):
        past = z[:, longest - shift :][:, :length]
        if document_BT is not None:
            same = functional.pad(document_BT, (shift, 0), value=-1)[:, :length] == document_BT
            past = past * same[..., None]
        result = result + mix_CE[shift] * past
    return result, z[:, length:].clone()  # not a view that keeps all tokens


def _decays(g: Tensor, document_BT: Tensor | None, length: int, chunk: int) -> tuple[Tensor, ...]:
    """The decays of a chunk: between its tokens (.., c, c), from its start, to its end (.., c), over all of it (..)."""
    difference = g[..., :, None] - g[..., None, :]
    ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    within = difference.masked_fill(ahead, -torch.inf).exp()
    before, after, kept = g.exp(), (g[..., -1:] - g).exp(), g[..., -1].exp()
    if document_BT is None:
        return within, before, after, kept
    padded = functional.pad(document_BT[:, None].to(g.dtype), (0, -length % chunk), mode="replicate")
    document = padded.unflatten(-1, (-1, chunk))  # (B, 1, n, c)
    last = document[..., -1]
    entered = torch.cat([document[:, :, 0, 0, None], last[..., :-1]], dim=-1)
    within = within * (document[..., :, None] == document[..., None, :])
    before, after = before * (document == entered[..., None]), after * (document == last[..., None])
    return within, before, after, kept * (last == entered)


def _chunks(x_BHTd: Tensor, chunk: int) -> Tensor:
    """(B, H, n, c, d), with zeros behind the text."""
    return functional.pad(x_BHTd, (0, 0, 0, -x_BHTd.shape[2] % chunk)).unflatten(2, (-1, chunk))
