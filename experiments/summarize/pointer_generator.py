"""A pointer-generator network (See, Liu and Manning, 2017): an LSTM that writes words or copies them from its source.

An id below the size of the vocabulary is a word of the vocabulary; the ids from there on are the other words of one
source, in order. Shape suffixes: B documents, S words of a source, T of a summary, X of the vocabulary and a source,
h size of states.
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

PAD = 0
UNKNOWN = 1
START = 2
END = 3
_MARKS = ("<pad>", "<unknown>", "<start>", "<end>")
_TOKEN = re.compile(r"\w+(?:['’.-]\w+)*|[^\w\s]")
_BATCH = 16  # documents of an update
_WRITTEN = 32  # documents that are summarized at once
_MAX_NORM = 2.0  # norm to which gradients are clipped


def tokens_of(text: str) -> list[str]:
    """Return words in lower case, and punctuation marks."""
    return _TOKEN.findall(text.casefold())


def frequent_words(texts: Iterable[Sequence[str]], size: int) -> list[str]:
    """Return a vocabulary: four marks, then the most frequent words of texts."""
    counts = Counter[str]()
    for words in texts:
        counts.update(words)
    frequent = counts.most_common(size - len(_MARKS))
    return [*_MARKS, *(word for word, _ in frequent)]


class CopyExample(NamedTuple):
    """A source and its summary.

    Attributes:
        source: ids of the source.
        target: ids of the summary.
        extra: the words of the source outside the vocabulary.
    """

    source: list[int]
    target: list[int]
    extra: list[str]


def encode_examples(
    words: list[str],
    pairs: Iterable[tuple[Sequence[str], Sequence[str]]],
    limit: int,
) -> list[CopyExample]:
    """Encode sources and their summaries.

    Args:
        words: the vocabulary.
        pairs: words of each source and of its summary.
        limit: maximum number of words of a summary; the mark of the end counts as one.
    """
    ids = {word: index for index, word in enumerate(words)}
    examples = []
    for source, summary in pairs:
        extra = [word for word in dict.fromkeys(source) if word not in ids]
        extra_ids = {word: index for index, word in enumerate(extra, start=len(words))}
        all_ids = {**ids, **extra_ids}
        target = [all_ids.get(word, UNKNOWN) for word in summary]
        target.append(END)
        example = CopyExample(
            source=[all_ids[word] for word in source],
            target=target[:limit],
            extra=extra,
        )
        examples.append(example)
    return examples


class State(NamedTuple):
    """State of the decoder.

    Attributes:
        hidden: hidden states, (B, h).
        cell: cell states, (B, h).
        context: the last context, (B, 2h).
        coverage: sum of the attention of all previous steps, (B, S).
    """

    hidden: Tensor
    cell: Tensor
    context: Tensor
    coverage: Tensor


class Memory(NamedTuple):
    """The encoded sources.

    Attributes:
        values: outputs of the encoder, (B, S, 2h).
        keys: their keys, (B, S, h).
        ids: ids of the sources, (B, S).
    """

    values: Tensor
    keys: Tensor
    ids: Tensor


class PointerGenerator(nn.Module):
    """Attention a = softmax(vᵀ tanh(W m + U h + w c + b)); P(x) = g P_words(x) + (1 − g) Σ a_i over the positions of x.

    The output layer shares its weights with the word vectors. The attention depends on the coverage c, the sum of the
    previous attentions, only while `has_coverage` is true.

    Args:
        vocab_size: size of the vocabulary.
        size: size of word vectors and states.
        has_copy: False fixes g = 1, which makes a sequence-to-sequence model.
    """

    def __init__(self, vocab_size: int, size: int, *, has_copy: bool = True) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.has_copy = has_copy
        self.has_coverage = False
        self.embedding = nn.Embedding(vocab_size, size, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.encoder = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTMCell(3 * size, size)
        self.start_proj = nn.Linear(2 * size, 2 * size)
        self.key_proj = nn.Linear(2 * size, size)
        self.query_proj = nn.Linear(size, size, bias=False)
        self.score_proj = nn.Linear(size, 1, bias=False)
        self.out_proj = nn.Linear(3 * size, size)
        self.gate_proj = nn.Linear(4 * size, 1)
        self.coverage_weight = nn.Parameter(torch.zeros(size))
        self.out_bias = nn.Parameter(torch.zeros(vocab_size))

    def embed(self, ids: Tensor) -> Tensor:
        """Return word vectors; words outside the vocabulary have that of the unknown word."""
        known = ids.masked_fill(ids >= self.vocab_size, UNKNOWN)
        return self.embedding(known)

    def encode(self, examples: Sequence[CopyExample]) -> tuple[Memory, State]:
        """Encode the sources; returns the memory, and the first state of the decoder."""
        sources = [torch.tensor(example.source) for example in examples]
        ids_BS = pad_sequence(sources, batch_first=True)
        lengths = (ids_BS != PAD).sum(1)
        packed = pack_padded_sequence(
            self.embed(ids_BS),
            lengths,
            batch_first=True,
            enforce_sorted=False,
        )
        output, (last, _) = self.encoder(packed)
        values, _ = pad_packed_sequence(output, batch_first=True)
        both_directions = torch.cat([last[0], last[1]], dim=-1)
        start = torch.tanh(self.start_proj(both_directions))
        hidden, cell = start.chunk(2, dim=-1)
        state = State(
            hidden=hidden,
            cell=cell,
            context=torch.zeros_like(values[:, 0]),
            coverage=torch.zeros_like(values[..., 0]),
        )
        return Memory(values, self.key_proj(values), ids_BS), state

    def step(self, previous_Bh: Tensor, state: State, memory: Memory) -> tuple[Tensor, State]:
        """Return the attention over the source, (B, S), and the state, after the word with the given vector."""
        inputs = torch.cat([previous_Bh, state.context], dim=-1)
        hidden, cell = self.decoder(inputs, (state.hidden, state.cell))
        query_Bh = self.query_proj(hidden)
        features = memory.keys + query_Bh[:, None]
        if self.has_coverage:
            features = features + state.coverage[..., None] * self.coverage_weight
        scores = self.score_proj(torch.tanh(features)).squeeze(-1)
        scores = scores.masked_fill(memory.ids == PAD, float("-inf"))
        attention_BS = scores.softmax(-1)
        context = torch.einsum("bs,bsh->bh", attention_BS, memory.values)
        coverage = state.coverage + attention_BS
        return attention_BS, State(hidden, cell, context, coverage)

    def output(self, previous: Tensor, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output layer.

        Returns:
            The features that are multiplied with the word vectors, (..., h), the logits of the vocabulary, and the gate
            g, (...).
        """
        features = self.out_proj(torch.cat([hidden, context], dim=-1))
        logits = features @ self.embedding.weight.T + self.out_bias
        gate_inputs = torch.cat([context, hidden, previous], dim=-1)
        gate = torch.sigmoid(self.gate_proj(gate_inputs)).squeeze(-1)
        if not self.has_copy:
            gate = torch.ones_like(gate)
        return features, logits, gate

    def distribution(self, previous_Bh: Tensor, attention_BS: Tensor, state: State, memory: Memory) -> Tensor:
        """Return the probabilities of the next word, (B, X)."""
        _, logits, gate = self.output(previous_Bh, state.hidden, state.context)
        extra = max(0, int(memory.ids.max()) + 1 - self.vocab_size)
        gate_B1 = gate[:, None]
        generated = gate_B1 * logits.softmax(-1)
        copied_BS = (1 - gate_B1) * attention_BS
        words_BX = nn.functional.pad(generated, (0, extra))
        return words_BX.scatter_add(1, memory.ids, copied_BS)

    def forward(self, examples: Sequence[CopyExample]) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a word, −log P, and the mean coverage loss, Σ_i min(a_i, c_i)."""
        memory, state = self.encode(examples)
        target_BT = self._targets(examples)
        inputs_BT = nn.functional.pad(target_BT, (1, 0), value=START)[:, :-1]
        previous = self.embed(inputs_BT)
        hidden_states = []
        contexts = []
        copied_probabilities = []
        overlaps = []
        for word_B, target_B in zip(previous.unbind(1), target_BT.unbind(1), strict=True):
            covered = state.coverage
            attention, state = self.step(word_B, state, memory)
            is_target_BS = memory.ids == target_B[:, None]
            hidden_states.append(state.hidden)
            contexts.append(state.context)
            copied_probabilities.append((attention * is_target_BS).sum(-1))
            overlaps.append(torch.minimum(attention, covered).sum(-1))
        hidden = torch.stack(hidden_states, dim=1)
        context = torch.stack(contexts, dim=1)
        copied = torch.stack(copied_probabilities, dim=1)
        overlap = torch.stack(overlaps, dim=1)
        features, logits, gate = self.output(previous, hidden, context)
        generated = self._target_probabilities(features, logits, target_BT)
        probability = gate * generated + (1 - gate) * copied
        loss = -probability.clamp(min=1e-10).log()
        mask_BT = target_BT != PAD
        return loss[mask_BT].mean(), overlap[mask_BT].mean()

    def _targets(self, examples: Sequence[CopyExample]) -> Tensor:
        """Return padded targets, (B, T); a model that can't copy gets the unknown word for words of the source."""
        targets = [torch.tensor(example.target) for example in examples]
        target_BT = pad_sequence(targets, batch_first=True)
        if self.has_copy:
            return target_BT
        return target_BT.masked_fill(target_BT >= self.vocab_size, UNKNOWN)

    def _target_probabilities(self, features: Tensor, logits: Tensor, target_BT: Tensor) -> Tensor:
        """Return P_words of the targets, (B, T); 0 for words outside the vocabulary."""
        is_word = target_BT < self.vocab_size
        words_BT = target_BT * is_word
        # This is faster than gathering from all logits.
        products = features * self.embedding(words_BT)
        target_logits = products.sum(-1) + self.out_bias[words_BT]
        log_probabilities = target_logits - logits.logsumexp(-1)
        return log_probabilities.exp() * is_word

    @torch.inference_mode()
    def write(self, words: Sequence[str], examples: Sequence[CopyExample], limit: int) -> list[str]:
        """Write summaries with the most likely word at each step; the unknown word is never written.

        Args:
            words: the vocabulary.
            examples: the sources.
            limit: maximum number of words of a summary.
        """
        texts: list[str] = []
        for first in range(0, len(examples), _WRITTEN):
            group = examples[first : first + _WRITTEN]
            rows = self._write_ids(group, limit).tolist()
            for row, example in zip(rows, group, strict=True):
                known = [*words, *example.extra]
                length = row.index(END) if END in row else len(row)
                texts.append(" ".join(known[index] for index in row[:length]))
        return texts

    def _write_ids(self, examples: Sequence[CopyExample], limit: int) -> Tensor:
        """Return the ids of summaries, (B, T), up to the step at which the last one ends."""
        memory, state = self.encode(examples)
        last = torch.full((len(examples),), START)
        is_finished = torch.zeros(len(examples), dtype=torch.bool)
        columns: list[Tensor] = []
        while len(columns) < limit and not is_finished.all():
            previous = self.embed(last)
            attention, state = self.step(previous, state, memory)
            probabilities = self.distribution(previous, attention, state, memory)
            probabilities[:, [PAD, UNKNOWN, START]] = 0
            last = probabilities.argmax(-1)
            is_finished |= last == END
            columns.append(last)
        return torch.stack(columns, dim=1)


def train(model: PointerGenerator, rows: Sequence[CopyExample], epochs: int, rate: float, seed: int) -> list[float]:
    """Train with Adam in batches of similar length. The last quarter of the epochs, at least one, has coverage.

    Args:
        model: the model, which is trained in place.
        rows: examples to learn from.
        epochs: number of epochs.
        rate: learning rate.
        seed: seed of the order of batches.

    Returns:
        The mean loss of each epoch.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    rng = random.Random(seed)
    by_length = sorted(rows, key=lambda row: len(row.target))
    batches = [by_length[first : first + _BATCH] for first in range(0, len(rows), _BATCH)]
    first_with_coverage = epochs - max(1, epochs // 4) + 1
    losses: list[float] = []
    for epoch in range(1, epochs + 1):
        model.has_coverage = epoch >= first_with_coverage
        order = rng.sample(batches, len(batches))
        totals = [_update(model, optimizer, batch) for batch in order]
        losses.append(round(sum(totals) / len(totals), 4))
    return losses


def _update(model: PointerGenerator, optimizer: torch.optim.Optimizer, batch: Sequence[CopyExample]) -> float:
    """Update the model on a batch; returns the loss of words."""
    loss, overlap = model(batch)
    objective = loss + overlap if model.has_coverage else loss
    optimizer.zero_grad()
    objective.backward()
    nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
    optimizer.step()
    return loss.item()
