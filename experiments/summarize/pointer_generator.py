"""A pointer-generator network (See, Liu and Manning, 2017): an LSTM that writes words or copies them from its source.

An id below the size of the vocabulary is a word of it; ids from there on are words of one source alone, in order.
Shape suffixes: B documents, S words of a source, T of a summary, X of the vocabulary and a source, h size of states.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

PAD, UNKNOWN, START, END = range(4)
_MARKS = ("<pad>", "<unknown>", "<start>", "<end>")
_TOKEN = re.compile(r"\w+(?:['’.-]\w+)*|[^\w\s]")
_BATCH, _WRITTEN = 16, 32  # documents of an update; written at once


def tokens_of(text: str) -> list[str]:
    """Words in lower case, and punctuation marks."""
    return _TOKEN.findall(text.casefold())


def frequent_words(texts: Iterable[Sequence[str]], size: int) -> list[str]:
    """A vocabulary: the most frequent words of texts behind four marks."""
    counts = Counter(word for words in texts for word in words)
    return [*_MARKS, *(word for word, _ in counts.most_common(size - len(_MARKS)))]


class CopyExample(NamedTuple):
    """A source and its summary as ids, and the source's words outside the vocabulary."""

    source: list[int]
    target: list[int]
    extra: list[str]


def encode_examples(
    words: list[str], pairs: Iterable[tuple[Sequence[str], Sequence[str]]], limit: int
) -> list[CopyExample]:
    """Sources and at most `limit` words of their summaries; the mark of the end counts as one."""
    rows, ids = list[CopyExample](), {word: index for index, word in enumerate(words)}
    for source, summary in pairs:
        extra = [word for word in dict.fromkeys(source) if word not in ids]
        own = ids | {word: len(words) + index for index, word in enumerate(extra)}
        target = [own.get(word, UNKNOWN) for word in summary]
        rows.append(CopyExample([own[word] for word in source], [*target, END][:limit], extra))
    return rows


class State(NamedTuple):
    """The decoder's states, (B, h), the last context, (B, 2h), and the sum of the attentions before, (B, S)."""

    hidden: Tensor
    cell: Tensor
    context: Tensor
    coverage: Tensor


class Memory(NamedTuple):
    """The encoder's outputs, (B, S, 2h), and their keys, (B, S, h); the source's ids, (B, S)."""

    values: Tensor
    keys: Tensor
    ids: Tensor


class PointerGenerator(nn.Module):
    """Attention a = softmax(vᵀ tanh(W m + U h + w c + b)); P(x) = g P_words(x) + (1 − g) Σ a_i over the places of x.

    Without `has_copy` g is 1: a sequence-to-sequence model. With `has_coverage` the attention sees c, the sum of those
    before. The output layer shares its weights with the word vectors.
    """

    def __init__(self, vocab_size: int, size: int, *, has_copy: bool = True) -> None:
        super().__init__()
        self.vocab_size, self.has_copy, self.has_coverage = vocab_size, has_copy, False
        self.embedding = nn.Embedding(vocab_size, size, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.encoder = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTMCell(3 * size, size)
        self.start_proj, self.key_proj = nn.Linear(2 * size, 2 * size), nn.Linear(2 * size, size)
        self.query_proj, self.score_proj = nn.Linear(size, size, bias=False), nn.Linear(size, 1, bias=False)
        self.out_proj, self.gate_proj = nn.Linear(3 * size, size), nn.Linear(4 * size, 1)
        self.coverage_weight = nn.Parameter(torch.zeros(size))
        self.out_bias = nn.Parameter(torch.zeros(vocab_size))

    def embed(self, ids: Tensor) -> Tensor:
        """Word vectors; words outside the vocabulary have that of the unknown word."""
        return self.embedding(ids.masked_fill(ids >= self.vocab_size, UNKNOWN))

    def encode(self, examples: Sequence[CopyExample]) -> tuple[Memory, State]:
        """Read the sources."""
        ids_BS = pad_sequence([torch.tensor(example.source) for example in examples], batch_first=True)
        lengths = (ids_BS != PAD).sum(1)
        packed = pack_padded_sequence(self.embed(ids_BS), lengths, batch_first=True, enforce_sorted=False)
        output, (last, _) = self.encoder(packed)
        values = pad_packed_sequence(output, batch_first=True)[0]
        hidden, cell = torch.tanh(self.start_proj(torch.cat([last[0], last[1]], dim=-1))).chunk(2, dim=-1)
        state = State(hidden, cell, torch.zeros_like(values[:, 0]), torch.zeros_like(values[..., 0]))
        return Memory(values, self.key_proj(values), ids_BS), state

    def step(self, previous_Bh: Tensor, state: State, memory: Memory) -> tuple[Tensor, State]:
        """The attention over the source, (B, S), and the state, after the word with this vector."""
        hidden, cell = self.decoder(torch.cat([previous_Bh, state.context], dim=-1), (state.hidden, state.cell))
        features = memory.keys + self.query_proj(hidden)[:, None]
        if self.has_coverage:
            features = features + state.coverage[..., None] * self.coverage_weight
        scores = self.score_proj(torch.tanh(features)).squeeze(-1).masked_fill(memory.ids == PAD, float("-inf"))
        attention_BS = scores.softmax(-1)
        context = torch.einsum("bs,bsh->bh", attention_BS, memory.values)
        return attention_BS, State(hidden, cell, context, state.coverage + attention_BS)

    def output(self, previous: Tensor, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What word vectors are multiplied with, (..., h), the logits of the vocabulary, and the gate g, (...)."""
        features = self.out_proj(torch.cat([hidden, context], dim=-1))
        gate = torch.sigmoid(self.gate_proj(torch.cat([context, hidden, previous], dim=-1))).squeeze(-1)
        logits = features @ self.embedding.weight.T + self.out_bias
        return features, logits, gate if self.has_copy else torch.ones_like(gate)

    def distribution(self, previous_Bh: Tensor, attention_BS: Tensor, state: State, memory: Memory) -> Tensor:
        """Probabilities of the next word, (B, X)."""
        _, logits, gate = self.output(previous_Bh, state.hidden, state.context)
        extra = max(0, int(memory.ids.max()) + 1 - self.vocab_size)
        words_BX = nn.functional.pad(gate[:, None] * logits.softmax(-1), (0, extra))
        return words_BX.scatter_add(1, memory.ids, (1 - gate)[:, None] * attention_BS)

    def forward(self, examples: Sequence[CopyExample]) -> tuple[Tensor, Tensor]:
        """Mean loss of a word, −log P, and mean coverage loss, Σ_i min(a_i, c_i)."""
        memory, state = self.encode(examples)
        target_BT = pad_sequence([torch.tensor(example.target) for example in examples], batch_first=True)
        if not self.has_copy:
            target_BT = target_BT.masked_fill(target_BT >= self.vocab_size, UNKNOWN)
        previous = self.embed(nn.functional.pad(target_BT, (1, 0), value=START)[:, :-1])
        steps = list[tuple[Tensor, ...]]()
        for word_B, target_B in zip(previous.unbind(1), target_BT.unbind(1), strict=True):
            covered = state.coverage
            attention, state = self.step(word_B, state, memory)
            copied_B = (attention * (memory.ids == target_B[:, None])).sum(-1)
            steps.append((state.hidden, state.context, copied_B, torch.minimum(attention, covered).sum(-1)))
        hidden, context, copied, overlap = (torch.stack(values, dim=1) for values in zip(*steps, strict=True))
        features, logits, gate = self.output(previous, hidden, context)
        is_word = target_BT < self.vocab_size
        words_BT = target_BT * is_word
        own = (features * self.embedding(words_BT)).sum(-1) + self.out_bias[words_BT]  # faster than from all logits
        written = (own - logits.logsumexp(-1)).exp() * is_word
        loss, mask_BT = -(gate * written + (1 - gate) * copied).clamp(min=1e-10).log(), target_BT != PAD
        return loss[mask_BT].mean(), overlap[mask_BT].mean()

    @torch.inference_mode()
    def write(self, words: Sequence[str], examples: Sequence[CopyExample], limit: int) -> list[str]:
        """The most likely word at each step, up to the mark of the end or `limit`; never the unknown word."""
        texts = list[str]()
        for group in (examples[first : first + _WRITTEN] for first in range(0, len(examples), _WRITTEN)):
            memory, state = self.encode(group)
            columns = [torch.full((len(group),), START)]
            while len(columns) <= limit and not torch.stack(columns).eq(END).any(0).all():
                previous = self.embed(columns[-1])
                attention, state = self.step(previous, state, memory)
                probabilities = self.distribution(previous, attention, state, memory)
                probabilities[:, [PAD, UNKNOWN, START]] = 0
                columns.append(probabilities.argmax(-1))
            for row, example in zip(torch.stack(columns[1:], dim=1).tolist(), group, strict=True):
                known = [*words, *example.extra]
                texts.append(" ".join(known[index] for index in row[: [*row, END].index(END)]))
        return texts


def train(model: PointerGenerator, rows: Sequence[CopyExample], epochs: int, rate: float, seed: int) -> list[float]:
    """Train with Adam in batches of similar length; the last quarter of the epochs, at least one, has coverage.

    Returns the mean loss of each epoch.
    """
    adam, order, losses = torch.optim.Adam(model.parameters(), lr=rate), random.Random(seed), list[float]()
    by_length = sorted(rows, key=lambda row: len(row.target))
    batches = [by_length[first : first + _BATCH] for first in range(0, len(rows), _BATCH)]
    for epoch in range(1, epochs + 1):
        model.has_coverage, totals = epoch > epochs - max(1, epochs // 4), list[float]()
        for batch in order.sample(batches, len(batches)):
            loss, overlap = model(batch)
            adam.zero_grad()
            (loss + overlap * model.has_coverage).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            adam.step()
            totals.append(loss.item())
        losses.append(round(sum(totals) / len(totals), 4))
    return losses
