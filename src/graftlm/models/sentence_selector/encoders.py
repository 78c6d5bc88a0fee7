"""From tokens to vectors of sentences, and from those to vectors of sentences in their document.

Shape suffixes: B documents, N sentences of a document, T tokens of a sentence, e embedding, w width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from graftlm.models.sentence_selector.config import SentenceSelectorConfig


def two_way_lstm(config: SentenceSelectorConfig, inputs: int) -> nn.LSTM:
    """An LSTM in both directions, with dropout between its layers."""
    dropout = config.dropout if config.num_layers > 1 else 0.0
    return nn.LSTM(inputs, config.hidden_size, config.num_layers, batch_first=True, bidirectional=True, dropout=dropout)


class TokenReader(nn.Module):
    """The sentence's vector s: the last states of both directions of the last layer."""

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__()
        self.padding = config.vocab_size
        self.embed = nn.Embedding(config.vocab_size + 1, config.embedding_size, padding_idx=self.padding)
        self.lstm = two_way_lstm(config, config.embedding_size)

    def forward(self, ids_BNT: Tensor) -> Tensor:
        """(B, N, w); sentences of padding alone get zeros."""
        rows, columns, _ = ids_BNT.shape
        lengths = (ids_BNT != self.padding).sum(-1).flatten()
        (there,) = lengths.nonzero(as_tuple=True)
        embedded = self.embed(ids_BNT.flatten(0, 1)[there])
        packed = pack_padded_sequence(embedded, lengths[there].cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        vectors = torch.cat([last[-2], last[-1]], dim=-1)
        return (
            vectors.new_zeros(rows * columns, vectors.shape[-1]).index_copy(0, there, vectors).view(rows, columns, -1)
        )


class RecurrentDocument(nn.Module):
    """Vectors d of sentences in their document, by an LSTM in both directions."""

    def __init__(self, config: SentenceSelectorConfig, inputs: int) -> None:
        super().__init__()
        self.lstm = two_way_lstm(config, inputs)

    def forward(self, s_BNw: Tensor, mask_BN: Tensor) -> Tensor:
        """(B, N, w)."""
        packed = pack_padded_sequence(s_BNw, mask_BN.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        d_BNw, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=s_BNw.shape[1])
        return d_BNw


class AttentiveDocument(nn.Module):
    """Vectors d of sentences in their document, by a transformer that knows their places.

    Vectors of an encoder have length 1, so a number of theirs is near 1 / √v: normed, or the sines would drown them.
    """

    def __init__(self, config: SentenceSelectorConfig, inputs: int) -> None:
        super().__init__()
        self.enter = nn.LayerNorm(inputs)
        self.lift = nn.Linear(inputs, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width, config.num_heads, 2 * config.width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, s_BNw: Tensor, mask_BN: Tensor) -> Tensor:
        """(B, N, w)."""
        places = sinusoids(s_BNw.shape[1], self.lift.out_features, s_BNw.device)
        return self.norm(self.layers(self.lift(self.enter(s_BNw)) + places, src_key_padding_mask=~mask_BN))


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """(length, width) sines and cosines of places, in frequencies from 1 to 1/10,000."""
    frequencies = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
