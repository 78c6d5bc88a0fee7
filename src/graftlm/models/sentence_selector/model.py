"""A model that selects the sentences of a summary: sentence encoder, document encoder, classifier or pointer head.

Shape suffixes: B documents, N sentences, T tokens of a sentence, K steps of the pointer, v size of given embeddings,
s size of sentence vectors, w width of the document encoder, h hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from graftlm.errors import RecipeError, did_you_mean

_CHOICES = {
    "input_type": ("tokens", "embeddings"),
    "document_encoder": ("lstm", "transformer"),
    "head": ("classifier", "pointer"),
}
_POSITIVE = (
    "vocab_size", "embedding_size", "hidden_size", "num_layers", "num_heads", "sentence_embedding_size",
    "max_sentences", "max_tokens", "beam_size", "extract_size",
)  # fmt: skip


class SentenceSelectorConfig(PreTrainedConfig):
    """Configuration of `SentenceSelector`; defaults are those of the thesis.

    Args:
        input_type: `tokens`, encoded by an LSTM for each sentence; or `embeddings` of sentences from another encoder.
        document_encoder: encoder over the sentences: a bidirectional `lstm` or a `transformer`.
        head: `classifier`, one probability for each sentence; or `pointer`, one sentence after another.
        hidden_size: size of each LSTM direction and of the pointer's LSTM; half the size of a transformer.
        num_layers: layers of each LSTM or of the transformer.
        sentence_embedding_size: size of given sentence embeddings.
        sentence_encoder: name or folder of the sentence-transformers model that gives the embeddings.
        max_sentences: maximum number of sentences read at a time.
        max_tokens: maximum number of tokens read of a sentence.
        beam_size: beams of the pointer's search.
        extract_size: mean number of sentences of an extract in training.

    Raises RecipeError if a value is invalid.
    """

    model_type = "sentence-selector"

    input_type: Literal["tokens", "embeddings"] = "tokens"
    document_encoder: Literal["lstm", "transformer"] = "lstm"
    head: Literal["classifier", "pointer"] = "pointer"
    vocab_size: int = 40_000
    embedding_size: int = 300
    hidden_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    sentence_embedding_size: int = 384
    sentence_encoder: str | None = None
    dropout: float = 0.5
    max_sentences: int = 300
    max_tokens: int = 35
    beam_size: int = 4
    extract_size: int = 10

    def __post_init__(self, **kwargs: Any) -> None:
        for problem in self._problems():
            raise RecipeError(problem)
        super().__post_init__(**kwargs)

    @property
    def width(self) -> int:
        """Size of the sentence vectors that the document encoder returns."""
        return 2 * self.hidden_size

    def _problems(self) -> Iterator[str]:
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) not in known:
                yield f"{name} is {value!r}, which is not known{did_you_mean(str(value), known)}."
        for name in _POSITIVE:
            if not isinstance(value := getattr(self, name), int) or value < 1:
                yield f"{name} is {value!r}, but a whole number above 0 is expected."
        if not 0 <= self.dropout < 1:
            yield f"dropout is {self.dropout!r}, but a share from 0 to below 1 is expected."
        if self.document_encoder == "transformer" and self.width % self.num_heads:
            yield (
                f"{self.num_heads} heads don't divide a width of {self.width} (twice hidden_size): "
                "choose another number of heads."
            )


class SelectorOutput(NamedTuple):
    """All sentences of one document, best first, with their scores.

    Scores of a classifier are log-odds. Scores of a pointer are log-probabilities: for the sequence of the beam search,
    each given the sentences before it; for the other sentences, those of the next step.
    """

    indices: list[int]
    scores: list[float]


def _lstm(config: SentenceSelectorConfig, input_size: int, **options: bool) -> nn.LSTM:
    dropout = config.dropout if config.num_layers > 1 else 0.0
    return nn.LSTM(input_size, config.hidden_size, config.num_layers, batch_first=True, dropout=dropout, **options)


class LstmSentenceEncoder(nn.Module):
    """Encodes the tokens of a sentence as vector s: the last states of both directions of the last LSTM layer."""

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__()
        self.padding_idx = config.vocab_size
        self.embed = nn.Embedding(config.vocab_size + 1, config.embedding_size, padding_idx=self.padding_idx)
        self.lstm = _lstm(config, config.embedding_size, bidirectional=True)

    def forward(self, ids_BNT: Tensor) -> Tensor:
        """Return (B, N, w); sentences of padding only get zeros."""
        batch, sentences, _ = ids_BNT.shape
        lengths = (ids_BNT != self.padding_idx).sum(-1).flatten()
        (nonempty,) = lengths.nonzero(as_tuple=True)
        embedded = self.embed(ids_BNT.flatten(0, 1)[nonempty])
        packed = pack_padded_sequence(embedded, lengths[nonempty].cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        vectors = torch.cat([last[-2], last[-1]], dim=-1)
        zeros = vectors.new_zeros(batch * sentences, vectors.shape[-1])
        return zeros.index_copy(0, nonempty, vectors).view(batch, sentences, -1)


class LstmDocumentEncoder(nn.Module):
    """Encodes sentences in the context of their document as vectors d, with a bidirectional LSTM."""

    def __init__(self, config: SentenceSelectorConfig, input_size: int) -> None:
        super().__init__()
        self.lstm = _lstm(config, input_size, bidirectional=True)

    def forward(self, s_BNs: Tensor, mask_BN: Tensor) -> Tensor:
        """Return (B, N, w)."""
        packed = pack_padded_sequence(s_BNs, mask_BN.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        d_BNw, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=s_BNs.shape[1])
        return d_BNw


class TransformerDocumentEncoder(nn.Module):
    """Encodes sentences in the context of their document as vectors d, with a transformer and sinusoidal positions.

    Sentence embeddings of length 1 have entries near 1/√v, far below the sinusoids. A layer norm equalizes the scales.
    """

    def __init__(self, config: SentenceSelectorConfig, input_size: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(input_size)
        self.input_proj = nn.Linear(input_size, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width, config.num_heads, 2 * config.width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, s_BNs: Tensor, mask_BN: Tensor) -> Tensor:
        """Return (B, N, w)."""
        hidden_BNw = self.input_proj(self.input_norm(s_BNs))
        positions_Nw = _sinusoids(hidden_BNw.shape[1], hidden_BNw.shape[2], s_BNs.device)
        return self.norm(self.layers(hidden_BNw + positions_Nw, src_key_padding_mask=~mask_BN))


def _sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of the positions, (length, width), in frequencies from 1 to 1/10,000."""
    frequencies = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _masked_mean(d_BNw: Tensor, mask_BN: Tensor) -> Tensor:
    weights = mask_BN[..., None].to(d_BNw.dtype)
    return (d_BNw * weights).sum(1) / weights.sum(1)


class ClassifierHead(nn.Module):
    """One logit for each sentence: W_o [d_i; tanh(b_d + W_d mean(d))] + b_o (equations 2.1 and 2.2)."""

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__()
        self.document_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(2 * config.width, 1)

    def forward(self, d_BNw: Tensor, mask_BN: Tensor) -> Tensor:
        """Return (B, N)."""
        document_BNw = torch.tanh(self.document_proj(_masked_mean(d_BNw, mask_BN)))[:, None].expand_as(d_BNw)
        return self.out_proj(torch.cat([d_BNw, document_BNw], dim=-1)).squeeze(-1)


class PointerState(NamedTuple):
    """Hidden and cell states of the pointer's LSTM, (layers, B, h), and its last attention output h̃, (B, h)."""

    hidden: Tensor
    cell: Tensor
    attended: Tensor

    def select(self, rows: Tensor | slice) -> PointerState:
        """Return the state of the given rows."""
        return PointerState(self.hidden[:, rows].contiguous(), self.cell[:, rows].contiguous(), self.attended[rows])


class PointerHead(nn.Module):
    """An LSTM that selects one sentence after another, with the last sentence's vector s and h̃ as its input.

    a_t = softmax over i of (W_a h_t) · d_i,  c_t = Σ a_ti d_i,  h̃_t = tanh(W_c [c_t; h_t]).
    """

    def __init__(self, config: SentenceSelectorConfig, input_size: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.start = nn.Parameter(torch.zeros(input_size))
        self.lstm = _lstm(config, input_size + hidden)
        self.state_proj = nn.Linear(config.width, hidden)
        self.query_proj = nn.Linear(hidden, config.width, bias=False)
        self.attention_proj = nn.Linear(config.width + hidden, hidden)

    def initial_state(self, d_BNw: Tensor, mask_BN: Tensor) -> PointerState:
        """Return the state before the first step: every layer starts from tanh(W mean(d) + b)."""
        first_Bh = torch.tanh(self.state_proj(_masked_mean(d_BNw, mask_BN)))
        hidden = first_Bh.expand(self.lstm.num_layers, -1, -1).contiguous()
        return PointerState(hidden, torch.zeros_like(hidden), torch.zeros_like(first_Bh))

    def step(self, last_Bs: Tensor, state: PointerState, d_BNw: Tensor, mask_BN: Tensor) -> tuple[Tensor, PointerState]:
        """Return log-probabilities of the next sentence, (B, N), after the sentences with vectors `last_Bs`."""
        inputs = torch.cat([last_Bs, state.attended], dim=-1)[:, None]
        h_B1h, (hidden, cell) = self.lstm(inputs, (state.hidden, state.cell))
        h_Bh = h_B1h[:, 0]
        scores_BN = torch.einsum("bw,bnw->bn", self.query_proj(h_Bh), d_BNw).masked_fill(~mask_BN, float("-inf"))
        c_Bw = torch.einsum("bn,bnw->bw", scores_BN.softmax(-1), d_BNw)
        attended_Bh = torch.tanh(self.attention_proj(torch.cat([c_Bw, h_Bh], dim=-1)))
        return scores_BN.log_softmax(-1), PointerState(hidden, cell, attended_Bh)

    def forward(self, s_BNs: Tensor, d_BNw: Tensor, mask_BN: Tensor, targets_BK: Tensor) -> Tensor:
        """Return log-probabilities of each step, (B, K, N), given the target sentences before it; −1 is padding."""
        state, last_Bs = self.initial_state(d_BNw, mask_BN), self.start.expand(len(s_BNs), -1)
        rows_B = torch.arange(len(s_BNs), device=s_BNs.device)
        steps = []
        for target_B in targets_BK.unbind(1):
            log_probs_BN, state = self.step(last_Bs, state, d_BNw, mask_BN)
            steps.append(log_probs_BN)
            last_Bs = s_BNs[rows_B, target_B.clamp(min=0)]
        return torch.stack(steps, dim=1)

    def search(self, s_Ns: Tensor, d_Nw: Tensor, steps: int, beam_size: int) -> tuple[dict[int, float], Tensor]:
        """Search the most likely sequence of distinct sentences of one document with beams.

        Returns its indices with their log-probabilities, and log-probabilities of the step after it, (N,).
        """
        state = self.initial_state(d_Nw[None], torch.ones(1, len(d_Nw), dtype=torch.bool, device=d_Nw.device))
        last_Bs = self.start[None]
        beams: list[dict[int, float]] = [{}]
        totals_B = torch.zeros(1, device=d_Nw.device)
        for _ in range(min(steps, len(d_Nw))):
            step_BN, state = self._step_beams(last_Bs, state, d_Nw)
            for row, beam in enumerate(beams):
                step_BN[row, list(beam)] = float("-inf")
            best = (totals_B[:, None] + step_BN).flatten().topk(min(beam_size, int(step_BN.isfinite().sum())))
            rows, columns = best.indices // len(d_Nw), best.indices % len(d_Nw)
            pairs = zip(rows.tolist(), columns.tolist(), strict=True)
            beams = [beams[row] | {column: float(step_BN[row, column])} for row, column in pairs]
            totals_B, state, last_Bs = best.values, state.select(rows), s_Ns[columns]
        next_1N, _ = self._step_beams(last_Bs[:1], state.select(slice(1)), d_Nw)
        return beams[0], next_1N[0]

    def _step_beams(self, last_Bs: Tensor, state: PointerState, d_Nw: Tensor) -> tuple[Tensor, PointerState]:
        """Step several beams on one document."""
        mask_BN = torch.ones(len(last_Bs), len(d_Nw), dtype=torch.bool, device=d_Nw.device)
        return self.step(last_Bs, state, d_Nw.expand(len(last_Bs), -1, -1), mask_BN)


class SentenceSelector(PreTrainedModel):
    """A hierarchical encoder with a classifier or a pointer over sentences."""

    config_class = SentenceSelectorConfig
    base_model_prefix = "selector"

    def __init__(self, config: SentenceSelectorConfig) -> None:
        super().__init__(config)
        reads_tokens = config.input_type == "tokens"
        self.sentence_encoder = LstmSentenceEncoder(config) if reads_tokens else None
        input_size = config.width if reads_tokens else config.sentence_embedding_size
        encoder = LstmDocumentEncoder if config.document_encoder == "lstm" else TransformerDocumentEncoder
        self.document_encoder = encoder(config, input_size)
        self.dropout = nn.Dropout(config.dropout)
        self.head = ClassifierHead(config) if config.head == "classifier" else PointerHead(config, input_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep torch's default initialization, which is usual for LSTMs."""

    def encode(self, inputs: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors s of sentences alone, (B, N, s), and d of sentences in their document, (B, N, w).

        `inputs` are token ids, (B, N, T), padded with `vocab_size`; or sentence embeddings, (B, N, v). The mask is True
        for sentences, False for padding, which comes last.
        """
        s_BNs = self.sentence_encoder(inputs) if self.sentence_encoder is not None else inputs
        return s_BNs, self.dropout(self.document_encoder(self.dropout(s_BNs), mask_BN))

    def forward(self, inputs: Tensor, mask_BN: Tensor, targets: Tensor) -> Tensor:
        """Return the loss: mean binary cross-entropy of the sentences, or mean cross-entropy of the pointer's steps.

        `targets` of a classifier are (B, N), 1 for sentences of the extract. Those of a pointer are (B, K), the
        sentences' indices in order, padded with −1. The other inputs are those of `encode`.
        """
        s_BNs, d_BNw = self.encode(inputs, mask_BN)
        if isinstance(self.head, ClassifierHead):
            logits_BN = self.head(d_BNw, mask_BN)
            return functional.binary_cross_entropy_with_logits(logits_BN[mask_BN], targets[mask_BN].float())
        log_probs_BKN = cast("PointerHead", self.head)(s_BNs, d_BNw, mask_BN, targets)
        return functional.nll_loss(log_probs_BKN.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.inference_mode()
    def rank(self, inputs: Tensor, steps: int | None = None) -> SelectorOutput:
        """Rank all sentences of one document, given token ids, (N, T), or sentence embeddings, (N, v).

        A pointer's search selects `steps` of them, by default `extract_size`.
        """
        mask_BN = torch.ones(1, len(inputs), dtype=torch.bool, device=inputs.device)
        s_BNs, d_BNw = self.encode(inputs[None], mask_BN)
        if isinstance(self.head, ClassifierHead):
            return _sorted(self.head(d_BNw, mask_BN)[0])
        pointer = cast("PointerHead", self.head)
        length = int(steps or self.config.extract_size)
        sequence, next_N = pointer.search(s_BNs[0], d_BNw[0], length, self.config.beam_size)
        scores = sequence | {i: score for i, score in zip(*_sorted(next_N), strict=True) if i not in sequence}
        return SelectorOutput(list(scores), list(scores.values()))


def _sorted(scores_N: Tensor) -> SelectorOutput:
    order = scores_N.sort(descending=True, stable=True)
    return SelectorOutput(order.indices.tolist(), order.values.tolist())
