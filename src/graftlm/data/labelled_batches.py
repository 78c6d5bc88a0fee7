"""Labelled rows as tokens and batches, and the endless mixture of tasks that training draws batches from.

A batch may mix rows of all tasks. It is padded on the right, with its longest rows first, so that micro-batches need
less padding. Losses and predictions are computed per row, so neither order nor padding changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from graftlm.backbone import padding_id
from graftlm.data.labelled import LabelledRow, TaskRows
from graftlm.data.samplers import SCORED, Pick, SamplerConfig, TaskSampler
from graftlm.errors import BackboneError, DataError
from graftlm.grafts.heads import IGNORED, TaskSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WITHOUT_SCORE = "span"


@dataclass(frozen=True)
class EncodedRow:
    """A row of n tokens.

    Attributes:
        ids: int32, (n,).
        segments: int8, (n,), 1 in the second text of a pair; None when no token is.
        target: as `grafts.heads` takes it, for tagging (n,); None for a row without a label.
        alignment: for tagging, (words,), the first token of each word or -1; for span, (n, 2), the range of context
            characters that each token covers, or -1.
        truncated: whether the row had more tokens.
    """

    ids: np.ndarray
    segments: np.ndarray | None
    target: Tensor | None
    alignment: np.ndarray | None = None
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class EncodedTask:
    """The rows of a task as tokens, and how many of them were truncated (`cut`)."""

    spec: TaskSpec
    rows: list[EncodedRow]
    cut: int

    def __len__(self) -> int:
        return len(self.rows)


class RowEncoder:
    """Turns rows into tokens.

    A word is tagged at its first token. A row of more than `length` tokens is truncated at its end: in a pair the
    longer text first, for span only the context. Between two texts a line break stands if the tokenizer puts nothing.

    Args:
        length: maximum number of tokens of a row, special ones included.
        segments: whether the model marks the second text of a pair by `token_type_ids`.
        truncation: truncate longer rows; without it a longer row is an error.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, length: int, *, segments: bool = True, truncation: bool = True
    ) -> None:
        self.tokenizer, self.length, self.segments, self.truncation = tokenizer, length, segments, truncation
        self._separator = "" if _separates_pairs(tokenizer) else "\n"

    def encode(self, task: TaskRows, *, training: bool = False) -> EncodedTask:
        """Encode the rows of one task; `training` leaves out truncated answers, as nothing can be learned from them.

        Raises DataError if a row has no tokens, or is longer than `length` and must not be truncated, and BackboneError
        if tags or answers need a fast tokenizer.
        """
        spec, rows = task.spec, task.rows
        if not rows:
            return EncodedTask(spec, [], 0)
        texts = [self._texts(spec, row) for row in rows]
        values = self._tokenise(texts, spec)
        long = dict.fromkeys(index for index, ids in enumerate(values["input_ids"]) if len(ids) > self.length)
        if long:
            self._truncate(values, [*long], texts, task)
        encoded = [self._row(spec, row, values, index, index in long) for index, row in enumerate(rows)]
        if training and spec.type == "span":
            encoded = [row for row in encoded if row.target is None or int(row.target[0]) != IGNORED]
        if not encoded:
            raise DataError(f"{rows[0].where}: no row has its answer within {self.length} tokens: raise the length.")
        return EncodedTask(spec, encoded, len(long))

    def _texts(self, spec: TaskSpec, row: LabelledRow) -> tuple[str, ...]:
        """One text, or a pair."""
        if spec.type == "tagging":
            return (" ".join(row.texts),)
        first, *second = row.texts
        return (first, *(self._separator + text for text in second))

    def _tokenise(self, texts: Sequence[tuple[str, ...]], spec: TaskSpec, **options: Any) -> dict[str, Any]:
        """Ids, marks of second texts, offsets and numbers of texts; a list over the rows for each."""
        if spec.of_tokens and not self.tokenizer.is_fast:
            raise BackboneError(
                f"Tasks of the type {spec.type} need the characters that each token covers, which the tokenizer "
                f"{type(self.tokenizer).__name__} does not give: use a backbone with a tokenizer.json."
            )
        options |= {"return_attention_mask": False, "return_token_type_ids": True, "verbose": False}
        columns: list[Any] = [list(column) for column in zip(*texts, strict=True)]
        encoding = self.tokenizer(*columns, **options, return_offsets_mapping=spec.of_tokens)
        values = dict(encoding)
        if spec.type == "span":
            values["sequences"] = [encoding.sequence_ids(index) for index in range(len(texts))]
        return values

    def _truncate(
        self, values: dict[str, Any], indices: Sequence[int], texts: Sequence[tuple[str, ...]], task: TaskRows
    ) -> None:
        """Replace the encodings of rows that are too long."""
        spec, rows = task.spec, task.rows
        if not self.truncation:
            raise DataError(
                f"{rows[indices[0]].where} has {len(values['input_ids'][indices[0]])} tokens, but {self.length} are "
                "read: raise the length, shorten the text, or set truncation to true."
            )
        for index in indices if spec.type == "span" else ():
            others = sum(sequence != 1 for sequence in values["sequences"][index])
            if others >= self.length:
                raise DataError(
                    f"{rows[index].where} has a question of {others} tokens, which leaves nothing of the {self.length} "
                    "for its context: raise the length, or shorten the question."
                )
        strategy = "only_second" if spec.type == "span" else "longest_first"
        shorter = self._tokenise([texts[index] for index in indices], spec, truncation=strategy, max_length=self.length)
        for key, replacements in shorter.items():
            for index, value in zip(indices, replacements, strict=True):
                values[key][index] = value

    def _row(self, spec: TaskSpec, row: LabelledRow, values: dict[str, Any], index: int, cut: bool) -> EncodedRow:
        value = {key: column[index] for key, column in values.items()}
        ids = np.asarray(value["input_ids"], dtype=np.int32)
        if not len(ids):
            raise DataError(f"{row.where} has no tokens: give it text that the tokenizer knows, or leave the row out.")
        marks = np.asarray(value["token_type_ids"], dtype=np.int8)
        segments = marks if self.segments and marks.any() else None
        alignment = None
        if spec.type == "tagging":
            alignment = first_tokens(row.texts, value["offset_mapping"])
        elif spec.type == "span":
            alignment = _context_ranges(value["offset_mapping"], value["sequences"], len(self._separator))
        return EncodedRow(ids, segments, _encode_target(spec, row, alignment, len(ids)), alignment, cut)


def _encode_target(spec: TaskSpec, row: LabelledRow, alignment: np.ndarray | None, tokens: int) -> Tensor | None:
    """The target of a head; a truncated answer is -100 twice."""
    target: Any = row.target
    if target is None:
        return None
    if spec.type == "classification":
        return torch.tensor(spec.labels.index(target))
    if spec.type == "regression":
        return torch.tensor(float(target))
    if spec.type == "multi-label":
        return torch.tensor([float(label in target) for label in spec.labels])
    assert alignment is not None, "tags and spans are aligned"
    if spec.type == "span":  # its first and its last token
        inside = (alignment[:, 0] < target.end) & (alignment[:, 1] > target.start)
        is_whole = inside.any() and alignment[:, 1].max() >= target.end
        return torch.from_numpy(np.flatnonzero(inside)[[0, -1]] if is_whole else np.full(2, IGNORED))
    tags = torch.full((tokens,), IGNORED)
    for token, label in zip(alignment.tolist(), target, strict=True):
        if token >= 0:
            tags[token] = spec.labels.index(label)
    return tags


def first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """The first token (words,) of each word of a text that joins words by blanks; -1 for a word without one.

    A token that covers two words counts for the first of them.
    """
    tokens = np.full(len(words), -1, dtype=np.int64)
    start, token, taken = 0, 0, -1
    for number, word in enumerate(words):
        end = start + len(word)
        while token < len(offsets) and (offsets[token][1] <= start or token <= taken):
            token += 1
        if token < len(offsets) and offsets[token][0] < end:
            tokens[number] = taken = token
        start = end + 1
    return tokens


def _context_ranges(offsets: Sequence[tuple[int, int]], sequences: Sequence[int | None], shift: int) -> np.ndarray:
    """The range (n, 2) of context characters of each token, less the separator's `shift`; -1 for other tokens."""
    in_context = np.asarray([sequence == 1 for sequence in sequences])
    ranges = np.asarray(offsets, dtype=np.int64).reshape(-1, 2) - shift
    in_context &= (ranges[:, 1] > ranges[:, 0]) & (ranges[:, 1] > 0)
    return np.where(in_context[:, None], np.maximum(ranges, 0), -1)


def _separates_pairs(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts special tokens between the texts of a pair."""
    if not tokenizer.is_fast:
        return tokenizer.sep_token_id is not None
    sequences = tokenizer("a", "b", verbose=False).sequence_ids(0)
    return None in sequences[sequences.index(0) : sequences.index(1)]


@dataclass(frozen=True)
class TaskBatch:
    """B rows of at most T tokens, each of one task.

    Attributes:
        input_ids: long, (B, T).
        attention_mask: long, (B, T), 0 at padding, which is on the right.
        token_type_ids: long, (B, T), 1 in the second text of a pair; None when no row has such marks.
        task: long, (B,), the number of each row's task.
        targets: one tensor per row, as `grafts.heads` takes them: for tagging (T,), -100 at padding; None when the rows
            have no labels.
        tagged: whether each row's task is tagging.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    task: Tensor
    targets: list[Tensor] | None
    tagged: list[bool]

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, rows: slice) -> TaskBatch:
        """Some of the rows, such as a micro-batch, without columns that are padding in all of them."""
        mask, tagged, targets = self.attention_mask[rows], self.tagged[rows], self.targets
        width = int(mask.sum(1).max()) if len(mask) else 0
        segments = None if self.token_type_ids is None else self.token_type_ids[rows, :width]
        if targets is not None:
            pairs = zip(targets[rows], tagged, strict=True)
            targets = [target[:width] if of_tokens else target for target, of_tokens in pairs]
        return TaskBatch(self.input_ids[rows, :width], mask[:, :width], segments, self.task[rows], targets, tagged)

    def to(self, device: torch.device | str) -> TaskBatch:
        """The same rows with their tokens on `device`; nothing waits for it.

        Tasks and targets stay on the CPU, where heads sort rows by task.
        """
        segments = None if self.token_type_ids is None else self.token_type_ids.to(device, non_blocking=True)
        ids, mask = (tensor.to(device, non_blocking=True) for tensor in (self.input_ids, self.attention_mask))
        return TaskBatch(ids, mask, segments, self.task, self.targets, self.tagged)

    def prediction_inputs(self) -> dict[str, Any]:
        """Keyword arguments for `GraftedModel.predict`."""
        segments = {} if self.token_type_ids is None else {"token_type_ids": self.token_type_ids}
        tokens = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return tokens | segments | {"extras": {"task": self.task, "padding": "right"}}

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the forward pass of a `GraftedModel`."""
        return self.prediction_inputs() | {"targets": self.targets}

    def totals(self) -> Tensor:
        """Float, (2,): rows, and tokens without padding."""
        tokens = self.attention_mask.sum()
        return torch.stack([torch.full_like(tokens, len(self)), tokens]).float()


TaskRow = tuple[EncodedRow, TaskSpec, int]  # a row, its task, and the task's number
Score = Callable[[TaskBatch], Sequence[float | None]]
"""A score of each row of a batch, from 0 to 1, such as the model's uncertainty; None for a row that has none."""


def collate_rows(rows: Sequence[TaskRow], pad_id: int) -> TaskBatch:
    """The batch of some rows; the longest row comes first."""
    encoded, specs, numbers = zip(*sorted(rows, key=lambda row: -len(row[0])), strict=True)
    tagged = [spec.type == "tagging" for spec in specs]
    targets = [
        functional.pad(row.target, (0, len(encoded[0]) - len(row)), value=IGNORED) if of_tokens else row.target
        for row, of_tokens in zip(encoded, tagged, strict=True)
        if row.target is not None
    ]
    marks = [np.zeros(len(row)) if row.segments is None else row.segments for row in encoded]
    return TaskBatch(
        _padded([row.ids for row in encoded], pad_id),
        _padded([np.ones(len(row)) for row in encoded]),
        None if all(row.segments is None for row in encoded) else _padded(marks),
        torch.tensor(numbers),
        targets if len(targets) == len(rows) else None,
        tagged,
    )


def _padded(arrays: Sequence[np.ndarray], value: int = 0) -> Tensor:
    """Long, (arrays, longest): the arrays, padded at their end."""
    return pad_sequence([torch.from_numpy(array).long() for array in arrays], batch_first=True, padding_value=value)


def batches_by_length(rows: Sequence[TaskRow], size: int, pad_id: int) -> Iterator[tuple[list[int], TaskBatch]]:
    """All rows in batches of at most `size`, sorted by length, each with the indices of its rows."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        yield indices, collate_rows([rows[index] for index in indices], pad_id)


class LabelledMixture:
    """Endless batches of rows of several tasks, which a sampler chooses step by step.

    Args:
        sampler: the policy. Where the model scores rows, a task without a score (span) has the share of uniform
            sampling, 1 / number of tasks, unless `fixed` sets another.
        batch_size: rows of a step, over all processes.
        score: the training model's score of rows; needed by the policies uncertainty, learnability and entropy.
        numbers: the number of each task in the model; by default their order in `rows`.
        steps: number of steps in all, over which the sampler's `passes` are spread.

    Raises DataError if a task has no rows, a row is too long, or the policy does not fit the tasks.
    """

    def __init__(
        self,
        rows: Mapping[str, TaskRows],
        encoder: RowEncoder,
        sampler: SamplerConfig,
        batch_size: int,
        seed: int = 0,
        score: Score | None = None,
        *,
        numbers: Mapping[str, int] | None = None,
        steps: int | None = None,
    ) -> None:
        self.batch_size, self.score, self.pad_id = batch_size, score, padding_id(encoder.tokenizer)
        self.tasks = {name: encoder.encode(task, training=True) for name, task in rows.items()}
        self.numbers = dict(numbers or {name: number for number, name in enumerate(rows)})
        length = encoder.length
        self.notes = [_note(name, task, len(rows[name]), length) for name, task in self.tasks.items() if task.cut]
        sizes = {name: len(task) for name, task in self.tasks.items()}
        self.sampler = TaskSampler(sizes, _fit_policy(sampler, rows, score), batch_size, seed, steps)

    def batch(self, step: int) -> TaskBatch:
        """The rows of one optimiser step, counted from 0; steps must be drawn in order.

        Raises DataError if `step` is not the next one, or a prediction is not a number.
        """
        if step != self.sampler.step:
            raise DataError(f"Step {step} was asked for, but the sampler is at {self.sampler.step}: go step by step.")
        candidates = self.sampler.candidates()
        picks = self.sampler.choose([value or 0.0 for value in self._scores(candidates)] if candidates else ())
        if self.sampler.config.policy == "entropy":
            self._observe(picks)
        return collate_rows([self._row(pick) for pick in picks], self.pad_id)

    def sample(self, name: str, count: int) -> TaskBatch:
        """The first rows of one task, at most `count`."""
        count = min(count, len(self.tasks[name]))
        return collate_rows([self._row(Pick(name, row)) for row in range(count)], self.pad_id)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, as plain JSON values."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a mixture. Raises DataError if the state belongs to other rows."""
        self.sampler.load_state_dict(state)

    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the batches."""
        sampler = self.sampler
        settings = repr((sampler.sizes, sampler.config, self.batch_size, sampler.seed, self.numbers))
        digest = hashlib.sha256(settings.encode())
        for task in self.tasks.values():
            digest.update(repr(task.spec).encode())
            for row in task.rows:
                digest.update(row.ids.tobytes() + repr(None if row.target is None else row.target.tolist()).encode())
        return digest.hexdigest()

    def _row(self, pick: Pick) -> TaskRow:
        task = self.tasks[pick.task]
        return task.rows[pick.row], task.spec, self.numbers[pick.task]

    def _scores(self, picks: Sequence[Pick]) -> list[float | None]:
        """The model's scores of some rows, in their order."""
        assert self.score is not None, "the policy was checked"
        batches = batches_by_length([self._row(pick) for pick in picks], self.batch_size, self.pad_id)
        scores = {i: value for rows, batch in batches for i, value in zip(rows, self.score(batch), strict=True)}
        return [scores[i] for i in range(len(picks))]

    def _observe(self, picks: Sequence[Pick]) -> None:
        """Report the entropies of the next rows to the sampler."""
        pairs = list(zip(picks, self._scores(picks), strict=True))
        for name, task in self.tasks.items():
            values = [value for pick, value in pairs if pick.task == name and value is not None]
            self.sampler.observe(name, [value * largest_entropy(task.spec) for value in values])


def largest_entropy(spec: TaskSpec) -> float:
    """H' in nats, the entropy of a uniform prediction: log C, C log 2 for C labels, log 2 for what has no labels."""
    labels = len(spec.labels)
    return labels * float(np.log(2)) if spec.type == "multi-label" else float(np.log(max(2, labels)))


def _fit_policy(config: SamplerConfig, rows: Mapping[str, TaskRows], score: Score | None) -> SamplerConfig:
    """The config, with a fixed share for each task without a score; refused where the policy does not fit the tasks."""
    if config.policy not in ("entropy", *SCORED):
        return config
    if score is None:
        raise DataError(
            f"The policy {config.policy} depends on a model's predictions, but there is no score: pass one, or set "
            "policy: temperature."
        )
    without = [name for name, task in rows.items() if task.spec.type == _WITHOUT_SCORE]
    if config.policy == "entropy" and without:
        raise DataError(
            f"The task {without[0]} is of the type {_WITHOUT_SCORE}, whose predictions have no score, but policy: "
            "entropy needs it: take policy: uncertainty, which gives such tasks a fixed share, or temperature."
        )
    return config.model_copy(update={"fixed": dict.fromkeys(without, 1 / len(rows)) | config.fixed})


def _note(name: str, task: EncodedTask, rows: int, length: int) -> str:
    lost = rows - len(task)
    return (
        f"Of the {rows:,} rows of the task {name} {task.cut:,} are longer than {length} tokens and were cut at their "
        f"end{f', and {lost:,} left out, as their answer lies behind the cut' if lost else ''}."
    )
