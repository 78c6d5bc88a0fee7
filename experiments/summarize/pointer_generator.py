"""A pointer-generator network (See, Liu and Manning, 2017): an LSTM that writes words or copies them from its source.

An id below the size of the vocabulary is a word of it; the ids above are words of the source alone, in order.
Shape suffixes: B documents, S words of a source, T words of a summary, V of the vocabulary, X with those of sources,
h size of states.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

PAD, UNKNOWN, START, END = range(4)
_MARKS = ("<pad>", "<unknown>", "<start>", "<end>")
_TOKEN = re.compile(r"\w+(?:['’.-]\w+)*|[^\w\s]")
_POOL = 20  # batches that are sorted by length together
_WRITTEN = 32  # documents that are written at once


def tokens_of(text: str) -> list[str]:
    """Words in lower case, and punctuation marks."""
    return _TOKEN.findall(text.casefold())


class Vocabulary:
    """The most frequent words of some texts."""

    def __init__(self, texts: Iterable[Sequence[str]], size: int) -> None:
        counts = Counter(word for words in texts for word in words)
        self.words = [*_MARKS, *(word for word, _ in counts.most_common(size - len(_MARKS)))]
        self.ids = {word: index for index, word in enumerate(self.words)}

    def encode(self, words: Sequence[str], known: Sequence[str] = ()) -> tuple[list[int], list[str]]:
        """Ids of words, and the words outside the vocabulary that have one: those of `known`, or else all."""
        extra = list(known) or list(dict.fromkeys(word for word in words if word not in self.ids))
        ids = self.ids | {word: len(self.words) + index for index, word in enumerate(extra)}
        return [ids.get(word, UNKNOWN) for word in words], extra


class Example(NamedTuple):
    """A source and its summary as ids; the source's own words; where copying is allowed, by default everywhere."""

    source: list[int]
    extra: list[str]
    target: list[int]
    allowed: list[bool] = []


def encode_example(
    vocabulary: Vocabulary, source: Sequence[str], summary: Sequence[str], limit: int, allowed: Sequence[bool] = ()
) -> Example:
    """An example with at most `limit` words of a summary; the mark of its end counts."""
    ids, extra = vocabulary.encode(source)
    target, _ = vocabulary.encode(summary, extra or ["\n"])  # a source without words of its own gives no others an id
    return Example(ids, extra, [*target, END][:limit], list(allowed))


class State(NamedTuple):
    """The decoder's states, (B, h); the last context, (B, 2h); the sum of attentions before, (B, S)."""

    hidden: Tensor
    cell: Tensor
    context: Tensor
    coverage: Tensor


class Memory(NamedTuple):
    """The encoder's outputs, (B, S, 2h), and keys; ids and mask of the source, and where it may be copied, (B, S)."""

    values: Tensor
    keys: Tensor
    ids: Tensor
    mask: Tensor
    allowed: Tensor


class PointerGenerator(nn.Module):
    """Attention a = softmax(vᵀ tanh(W m + U h + w c + b)); P(x) = g P_V(x) + (1 − g) Σ a_i over the places of x.

    `has_copy` False keeps g = 1: a sequence-to-sequence model. `has_coverage` lets c, the sum of earlier attentions,
    into the attention. The output layer shares its weights with the word vectors.
    """

    def __init__(self, vocab_size: int, size: int, *, has_copy: bool = True) -> None:
        super().__init__()
        self.vocab_size, self.has_copy, self.has_coverage = vocab_size, has_copy, False
        self.embedding = nn.Embedding(vocab_size, size, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.encoder = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTMCell(3 * size, size)
        self.start_proj = nn.Linear(2 * size, 2 * size)
        self.key_proj = nn.Linear(2 * size, size)
        self.query_proj = nn.Linear(size, size, bias=False)
        self.coverage_weight = nn.Parameter(torch.zeros(size))
        self.score_proj = nn.Linear(size, 1, bias=False)
        self.out_proj = nn.Linear(3 * size, size)
        self.out_bias = nn.Parameter(torch.zeros(vocab_size))
        self.gate_proj = nn.Linear(4 * size, 1)

    def embed(self, ids: Tensor) -> Tensor:
        """Word vectors; words outside the vocabulary have that of the unknown word."""
        return self.embedding(ids.masked_fill(ids >= self.vocab_size, UNKNOWN))

    def encode(self, examples: Sequence[Example]) -> tuple[Memory, State]:
        """Read the sources."""
        ids_BS = pad_sequence([torch.tensor(example.source) for example in examples], batch_first=True)
        allowed_BS = pad_sequence(
            [torch.tensor(e.allowed or [True] * len(e.source)) for e in examples], batch_first=True
        )
        mask_BS = ids_BS != PAD
        packed = pack_padded_sequence(self.embed(ids_BS), mask_BS.sum(1), batch_first=True, enforce_sorted=False)
        output, (last, _) = self.encoder(packed)
        values = pad_packed_sequence(output, batch_first=True)[0]
        hidden, cell = torch.tanh(self.start_proj(torch.cat([last[0], last[1]], dim=-1))).chunk(2, dim=-1)
        memory = Memory(values, self.key_proj(values), ids_BS, mask_BS, allowed_BS)
        return memory, State(hidden, cell, torch.zeros_like(values[:, 0]), torch.zeros_like(values[..., 0]))

    def step(self, previous_Bh: Tensor, state: State, memory: Memory) -> tuple[Tensor, State]:
        """The attention over the source, (B, S), and the state after the word with this vector."""
        hidden, cell = self.decoder(torch.cat([previous_Bh, state.context], dim=-1), (state.hidden, state.cell))
        features = memory.keys + self.query_proj(hidden)[:, None]
        if self.has_coverage:
            features = features + state.coverage[..., None] * self.coverage_weight
        scores = self.score_proj(torch.tanh(features)).squeeze(-1).masked_fill(~memory.mask, float("-inf"))
        attention_BS = scores.softmax(-1)
        context = torch.einsum("bs,bsh->bh", attention_BS, memory.values)
        return attention_BS, State(hidden, cell, context, state.coverage + attention_BS)

    def output(self, previous: Tensor, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the word vectors are multiplied with, (..., h), the logits, (..., V), and the gate g, (...)."""
        features = self.out_proj(torch.cat([hidden, context], dim=-1))
        gate = torch.sigmoid(self.gate_proj(torch.cat([context, hidden, previous], dim=-1))).squeeze(-1)
        logits = features @ self.embedding.weight.T + self.out_bias
        return features, logits, gate if self.has_copy else torch.ones_like(gate)

    def distribution(self, previous_Bh: Tensor, attention_BS: Tensor, state: State, memory: Memory) -> Tensor:
        """Probabilities of the next word, (B, X). Copies come from allowed places, or from all where none is."""
        _, logits, gate = self.output(previous_Bh, state.hidden, state.context)
        copied = attention_BS * memory.allowed
        share = copied.sum(-1, keepdim=True)
        copied = torch.where(share > 0, copied / share.clamp(min=1e-12), attention_BS)
        width = max(self.vocab_size, int(memory.ids.max()) + 1)
        words_BX = nn.functional.pad(gate[:, None] * logits.softmax(-1), (0, width - self.vocab_size))
        return words_BX.scatter_add(1, memory.ids, (1 - gate)[:, None] * copied)

    def forward(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
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
        mask_BT = target_BT != PAD
        loss = -(gate * written + (1 - gate) * copied).clamp(min=1e-10).log()
        return loss[mask_BT].mean(), overlap[mask_BT].mean()

    @torch.inference_mode()
    def write(self, examples: Sequence[Example], limit: int) -> list[list[int]]:
        """Take the most likely word at each step, up to the mark of the end or `limit`; never the unknown word."""
        memory, state = self.encode(examples)
        word_B, steps = torch.full((len(examples),), START), list[Tensor]()
        ended_B = torch.zeros(len(examples), dtype=torch.bool)
        for _ in range(limit):
            previous = self.embed(word_B)
            attention, state = self.step(previous, state, memory)
            probabilities = self.distribution(previous, attention, state, memory)
            probabilities[:, [PAD, UNKNOWN, START]] = 0
            word_B = probabilities.argmax(-1)
            steps.append(word_B)
            ended_B = ended_B | (word_B == END)
            if ended_B.all():
                break
        rows = torch.stack(steps, dim=1).tolist()
        return [row[: row.index(END)] if END in row else row for row in rows]

    def write_texts(self, words: Sequence[str], examples: Sequence[Example], limit: int) -> list[str]:
        """What `write` gives, as texts."""
        groups = [examples[first : first + _WRITTEN] for first in range(0, len(examples), _WRITTEN)]
        rows = [row for group in groups for row in self.write(group, limit)]
        pairs = zip(rows, examples, strict=True)
        return [
            " ".join(words[i] if i < len(words) else example.extra[i - len(words)] for i in row)
            for row, example in pairs
        ]


def batches(examples: Sequence[Example], size: int, order: random.Random) -> Iterator[list[Example]]:
    """One epoch in a random order; documents with summaries of similar length are together."""
    shuffled = order.sample(list(examples), len(examples))
    pools = [shuffled[first : first + _POOL * size] for first in range(0, len(shuffled), _POOL * size)]
    sorted_rows = [row for pool in pools for row in sorted(pool, key=lambda row: len(row.target))]
    rows = [sorted_rows[first : first + size] for first in range(0, len(sorted_rows), size)]
    yield from order.sample(rows, len(rows))


def train(
    model: PointerGenerator,
    train_rows: Sequence[Example],
    validation: Sequence[Example],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> list[list[float]]:
    """Train with Adam; the last quarter of the epochs, at least one, has coverage.

    Returns [epoch, training loss, validation loss, validation's coverage loss].
    """
    order, adam, losses = random.Random(seed), torch.optim.Adam(model.parameters(), lr=learning_rate), []
    for epoch in range(1, epochs + 1):
        model.has_coverage, total = epoch > epochs - max(1, epochs // 4), 0.0
        model.train()
        rows = list(batches(train_rows, batch_size, order))
        for batch in rows:
            loss, overlap = model(batch)
            total += loss.item() / len(rows)
            adam.zero_grad()
            (loss + overlap * model.has_coverage).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            adam.step()
        model.eval()
        with torch.inference_mode():
            held_out = [[float(value) for value in model(row)] for row in batches(validation, batch_size, order)]
        means = [sum(values) / len(held_out) for values in zip(*held_out, strict=True)]
        losses.append([epoch, total, *means])
    return losses
