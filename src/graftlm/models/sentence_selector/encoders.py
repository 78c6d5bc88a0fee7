"""Encoders of sentences and documents.

Shape suffixes: B documents, N sentences, T tokens of a sentence, h hidden size of an LSTM, s size of sentence vectors,
w width of the document encoder.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from graftlm.models.sentence_selector.config import SentenceSelectorConfig


def build_lstm(config: SentenceSelectorConfig, input_size: int, *, bidirectional: bool = False) -> nn.LSTM:
    """Build an LSTM with the layers and the dropout of a config.

    Args:
        config: config of the model.
        input_size: size of the inputs.
        bidirectional: whether the LSTM reads in both directions.
    """
    return nn.LSTM(
        input_size,
        config.hidden_size,
        num_layers=config.num_layers,
        batch_first=True,
        dropout=config.dropout if config.num_layers > 1 else 0.0,
        bidirectional=bidirectional,
    )


class LstmSentenceEncoder(nn.Module):
    """Encodes the tokens of a sentence as vector s: the last states of both directions of the last LSTM layer.

    Args:
        config: config of the model.
    """

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__()
        self.padding_idx = config.vocab_size
        self.embed = nn.Embedding(config.vocab_size + 1, config.embedding_size, padding_idx=self.padding_idx)
        self.lstm = build_lstm(config, config.embedding_size, bidirectional=True)

    def forward(self, ids_BNT: Tensor) -> Tensor:
        """Encode sentences.

        Args:
            ids_BNT: token ids (B, N, T), padded at the end with `vocab_size`. At least one sentence has a token.

        Returns:
            Vectors (B, N, s), with s = 2 h; zero for sentences that consist of padding only.
        """
        batch, sentences, _ = ids_BNT.shape
        lengths = (ids_BNT != self.padding_idx).sum(-1).flatten()
        (nonempty,) = lengths.nonzero(as_tuple=True)
        embedded = self.embed(ids_BNT.flatten(0, 1)[nonempty])
        packed = pack_padded_sequence(
            embedded,
            lengths[nonempty].cpu(),
            batch_first=True,
            enforce_sorted=False,
        )
        _, (last, _) = self.lstm(packed)
        vectors = torch.cat([last[-2], last[-1]], dim=-1)
        zeros = vectors.new_zeros(batch * sentences, vectors.shape[-1])
        return zeros.index_copy(0, nonempty, vectors).view(batch, sentences, -1)


class LstmDocumentEncoder(nn.Module):
    """Encodes sentences in the context of their document as vectors d, with a bidirectional LSTM.

    Args:
        config: config of the model.
        input_size: size of the sentence vectors.
    """

    def __init__(self, config: SentenceSelectorConfig, input_size: int) -> None:
        super().__init__()
        self.lstm = build_lstm(config, input_size, bidirectional=True)

    def forward(self, s_BNs: Tensor, mask_BN: Tensor) -> Tensor:
        """Encode documents.

        Args:
            s_BNs: sentence vectors (B, N, s).
            mask_BN: bool (B, N), True for sentences and False for padding, which comes last. Each document has a
                sentence.

        Returns:
            Vectors (B, N, w).
        """
        lengths = mask_BN.sum(1).cpu()
        packed = pack_padded_sequence(s_BNs, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = self.lstm(packed)
        d_BNw, _ = pad_packed_sequence(outputs, batch_first=True, total_length=s_BNs.shape[1])
        return d_BNw


class TransformerDocumentEncoder(nn.Module):
    """Encodes sentences in the context of their document as vectors d, with a transformer and sinusoidal positions.

    Sentence embeddings of length 1 have entries near 1/√v for v dimensions, far below the sinusoids. A layer norm
    equalizes the scales.

    Args:
        config: config of the model.
        input_size: size of the sentence vectors.
    """

    def __init__(self, config: SentenceSelectorConfig, input_size: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(input_size)
        self.input_proj = nn.Linear(input_size, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.num_heads,
            dim_feedforward=2 * config.width,
            dropout=config.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, s_BNs: Tensor, mask_BN: Tensor) -> Tensor:
        """Encode documents, with the arguments and the result of `LstmDocumentEncoder.forward`."""
        hidden_BNw = self.input_proj(self.input_norm(s_BNs))
        positions_Nw = _sinusoids(hidden_BNw.shape[1], hidden_BNw.shape[2], s_BNs.device)
        return self.norm(self.layers(hidden_BNw + positions_Nw, src_key_padding_mask=~mask_BN))


def _sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return the sines and cosines (length, width) of the positions, with frequencies from 1 to 1/10,000."""
    exponents = torch.arange(0, width, 2, device=device)
    frequencies = torch.exp(exponents * (-math.log(10_000) / width))
    positions = torch.arange(length, device=device)
    angles = positions[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
