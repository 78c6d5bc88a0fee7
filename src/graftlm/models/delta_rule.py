"""The gated delta rule: a matrix-valued recurrent state that each token decays, corrects and reads.

    S_t = a_t S_{t-1} + k_t u_t^T        u_t = b_t (v_t - a_t S_{t-1}^T k_t)        o_t = S_t^T q_t

The state maps keys to values. A token adds the part of its value that the decayed state does not yet return for its
key. The sequence is computed in chunks of c tokens. With g_i = log a_1 + ... + log a_i from the start of a chunk, and S
the state before it:

    (1 + L) U = diag(b) (V - diag(exp g) K S)                      L_ij = b_i exp(g_i - g_j) k_i k_j  for j < i
    O = diag(exp g) Q S + M U                                      M_ij = exp(g_i - g_j) q_i k_j      for j <= i
    S' = exp(g_c) S + sum over j of exp(g_c - g_j) k_j u_j^T

Shape suffixes: B rows, H heads, T tokens, E channels, K key width, V value width, C mixed tokens, n chunks, c tokens of
a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


class _Decays(NamedTuple):
    """Factors by which the state decays within the chunks; factors between different documents are zero.

    Attributes:
        within: (B, H, n, c, c) exp(g_i - g_j), from token j to token i; zero for j > i.
        before: (B, H, n, c) exp(g_i), from the start of the chunk to token i.
        after: (B, H, n, c) exp(g_c - g_j), from token j to the end of the chunk.
        whole: (B, H, n) exp(g_c), over the whole chunk.
    """

    within: Tensor
    before: Tensor
    after: Tensor
    whole: Tensor


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
    """Apply the gated delta rule to a sequence.

    All tensors but `document_BT` have one dtype, float32 or float64. T is at least 1. A token with log a = 0 and b = 0
    leaves the state unchanged.

    Args:
        q_BHTK: queries (B, H, T, K).
        k_BHTK: keys (B, H, T, K) of length at most 1.
        v_BHTV: values (B, H, T, V).
        log_a_BHT: logarithms (B, H, T) of the decay rates a, at most 0.
        b_BHT: write rates b (B, H, T), from 0 to 1.
        state_BHKV: state (B, H, K, V) before the first token; None for zero.
        document_BT: document numbers (B, T); the state is reset to zero where the number changes. None treats each row
            as a single document.
        chunk: number of tokens c computed in parallel; it changes results only by rounding.

    Returns:
        The outputs (B, H, T, V) and the state (B, H, K, V) after the last token.
    """
    length = q_BHTK.shape[2]
    chunk = min(chunk, length)
    q = _split_chunks(q_BHTK, chunk)
    k = _split_chunks(k_BHTK, chunk)
    v = _split_chunks(v_BHTV, chunk)
    b = _split_chunks(b_BHT[..., None], chunk)
    log_a = _split_chunks(log_a_BHT[..., None], chunk)
    decays = _chunk_decays(log_a[..., 0].cumsum(-1), document_BT, length)
    updates, state_weights = _solve_updates(k, v, b, decays)
    attention = decays.within * (q @ k.transpose(-1, -2))
    queries = q * decays.before[..., None]
    keys = k * decays.after[..., None]
    state = state_BHKV
    if state is None:
        rows, heads = q.shape[:2]
        state = q.new_zeros(rows, heads, q.shape[-1], v.shape[-1])
    chunks = q.shape[2]
    outputs = []
    for i in range(chunks):
        u = updates[:, :, i] - state_weights[:, :, i] @ state
        output = queries[:, :, i] @ state + attention[:, :, i] @ u
        outputs.append(output)
        kept = decays.whole[:, :, i, None, None] * state
        state = kept + keys[:, :, i].transpose(-1, -2) @ u
    output_BHTV = torch.cat(outputs, dim=2)
    return output_BHTV[:, :, :length], state


def unit_length(x: Tensor) -> Tensor:
    """Scale vectors (..., K) to about unit length: x / sqrt(|x|^2 + 0.01).

    Vectors shorter than about 0.1 stay shorter than 1. The first keys of a document are zero, where a division by the
    length alone would have gradients of 1e12.
    """
    squared_length = x.square().sum(-1, keepdim=True)
    return x * (squared_length + 0.01).rsqrt()


def mixed_tokens(
    z_BTE: Tensor,
    mix_CE: Tensor,
    document_BT: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a weighted sum of each token and the C - 1 tokens before it: a causal convolution of each channel.

    Args:
        z_BTE: tokens (B, T, E).
        mix_CE: weights (C, E), of the token itself first.
        document_BT: document numbers (B, T); tokens of another document count as zero. None treats each row as a single
            document.
        before: the last C - 1 tokens (B, C - 1, E) of the previous pass; None for zero.

    Returns:
        The sums (B, T, E), and the last C - 1 tokens (B, C - 1, E) for the next pass.
    """
    length = z_BTE.shape[1]
    longest = len(mix_CE) - 1
    if before is None:
        rows, _, channels = z_BTE.shape
        before = z_BTE.new_zeros(rows, longest, channels)
    z = torch.cat([before, z_BTE], dim=1)
    result = mix_CE[0] * z_BTE
    for shift in range(1, longest + 1):
        first = longest - shift
        past = z[:, first : first + length]
        if document_BT is not None:
            past_document = functional.pad(document_BT, (shift, 0), value=-1)[:, :length]
            same = past_document == document_BT
            past = past * same[..., None]
        result = result + mix_CE[shift] * past
    # A view would keep all tokens in memory.
    return result, z[:, length:].clone()


def _solve_updates(
    k: Tensor,
    v: Tensor,
    b: Tensor,
    decays: _Decays,
) -> tuple[Tensor, Tensor]:
    """Solve the triangular system (1 + L) U = diag(b) (V - diag(exp g) K S) without knowing the state S.

    Returns:
        (B, H, n, c, V) and (B, H, n, c, K): the tensors X and Y with U = X - Y S.
    """
    products = k @ k.transpose(-1, -2)
    corrections = (b * decays.within.tril(-1)) * products
    right = torch.cat([b * v, b * decays.before[..., None] * k], dim=-1)
    solved = torch.linalg.solve_triangular(corrections, right, upper=False, unitriangular=True)
    updates, state_weights = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return updates, state_weights


def _chunk_decays(g: Tensor, document_BT: Tensor | None, length: int) -> _Decays:
    """Compute the decays from the cumulative log rates g (B, H, n, c); `length` is T without the padding."""
    chunk = g.shape[-1]
    difference = g[..., :, None] - g[..., None, :]
    all_pairs = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device)
    ahead = all_pairs.triu(1)
    decays = _Decays(
        within=difference.masked_fill(ahead, -torch.inf).exp(),
        before=g.exp(),
        after=(g[..., -1:] - g).exp(),
        whole=g[..., -1].exp(),
    )
    if document_BT is None:
        return decays
    padding = -length % chunk
    document_B1T = document_BT[:, None].to(g.dtype)
    padded = functional.pad(document_B1T, (0, padding), mode="replicate")
    document_B1nc = padded.unflatten(-1, (-1, chunk))
    return _separate_documents(decays, document_B1nc)


def _separate_documents(decays: _Decays, document: Tensor) -> _Decays:
    """Set decays between different documents to zero, for document numbers (B, 1, n, c)."""
    last = document[..., -1]
    # The document of the state before each chunk; the first chunk continues the previous pass.
    first = document[:, :, 0, 0, None]
    entered = torch.cat([first, last[..., :-1]], dim=-1)
    same_document = document[..., :, None] == document[..., None, :]
    return _Decays(
        within=decays.within * same_document,
        before=decays.before * (document == entered[..., None]),
        after=decays.after * (document == last[..., None]),
        whole=decays.whole * (last == entered),
    )


def _split_chunks(x_BHTd: Tensor, chunk: int) -> Tensor:
    """Split (B, H, T, d) into chunks (B, H, n, c, d), padded with zeros at the end."""
    padding = -x_BHTd.shape[2] % chunk
    padded = functional.pad(x_BHTd, (0, 0, 0, padding))
    return padded.unflatten(2, (-1, chunk))
