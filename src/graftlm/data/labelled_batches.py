"""Batches of labelled rows, and the endless mixture of tasks that training draws them from.

A batch may mix rows of all tasks. It is padded on the right and starts with its longest rows, so that micro-batches
need less padding. Losses and predictions are computed per row, so they depend neither on the order nor on padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from graftlm.backbone import padding_id
from graftlm.data.labelled import TaskRows
from graftlm.data.row_encoder import EncodedRow, EncodedTask, RowEncoder
from graftlm.data.samplers import Pick, SamplerConfig, TaskSampler
from graftlm.errors import DataError
from graftlm.grafts.heads import IGNORED, TaskSpec

_WITHOUT_SCORE = "span"


@dataclass(frozen=True)
class TaskBatch:
    """A batch of R rows in B sequences of at most T tokens.

    Each row belongs to one task, and its sequences follow each other.

    Attributes:
        input_ids: long, (B, T).
        attention_mask: long, (B, T), 0 at padding, which is on the right.
        token_type_ids: long, (B, T), 1 in the second text of a pair; None if no row has such a mark.
        task: long, (R,), the number of each row's task.
        targets: a tensor for each row, as `graftlm.grafts.heads` expects it: for tagging (T,), -100 at padding; None if
            a row has no label.
        tagged: whether each row's task is tagging.
        parts: the number of sequences of each row, 1 except for choices and windows.
        marks: long, (B, T), the marked places as `graftlm.grafts.heads` expects them; None if no row is marked.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    task: Tensor
    targets: list[Tensor] | None
    tagged: list[bool]
    parts: list[int]
    marks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.parts)

    def rows(self, rows: slice) -> TaskBatch:
        """Return some of the rows, such as a micro-batch, without the columns in which all of them are padded.

        Args:
            rows: which rows, as a slice with a step of 1.
        """
        tagged = self.tagged[rows]
        parts = self.parts[rows]
        first = sum(self.parts[: rows.indices(len(self))[0]])
        sequences = slice(first, first + sum(parts))
        attention_mask = self.attention_mask[sequences]
        width = int(attention_mask.sum(1).max()) if len(attention_mask) else 0
        targets = None
        if self.targets is not None:
            targets = []
            for target, of_tokens in zip(self.targets[rows], tagged, strict=True):
                targets.append(target[:width] if of_tokens else target)
        return TaskBatch(
            input_ids=self.input_ids[sequences, :width],
            attention_mask=attention_mask[:, :width],
            token_type_ids=None if self.token_type_ids is None else self.token_type_ids[sequences, :width],
            task=self.task[rows],
            targets=targets,
            tagged=tagged,
            parts=parts,
            marks=None if self.marks is None else self.marks[sequences, :width],
        )

    def to(self, device: torch.device | str) -> TaskBatch:
        """Return the same rows with their tokens on `device`, without waiting for the copy.

        Tasks and targets stay on the CPU, where heads sort rows by task.
        """
        token_type_ids = self.token_type_ids
        if token_type_ids is not None:
            token_type_ids = token_type_ids.to(device, non_blocking=True)
        marks = self.marks
        if marks is not None:
            marks = marks.to(device, non_blocking=True)
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            attention_mask=self.attention_mask.to(device, non_blocking=True),
            token_type_ids=token_type_ids,
            marks=marks,
        )

    def prediction_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for `GraftedModel.predict`."""
        inputs: dict[str, object] = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.token_type_ids is not None:
            inputs["token_type_ids"] = self.token_type_ids
        extras: dict[str, object] = {"task": self.task, "padding": "right"}
        if len(self) < len(self.input_ids):
            extras["task"] = self.task.repeat_interleave(torch.tensor(self.parts))
            extras["parts"] = self.parts
        if self.marks is not None:
            extras["marks"] = self.marks
        inputs["extras"] = extras
        return inputs

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for the forward pass of a `GraftedModel`."""
        return {**self.prediction_inputs(), "targets": self.targets}

    def totals(self) -> Tensor:
        """Return the number of rows and the number of tokens without padding: float32, (2,)."""
        tokens = self.attention_mask.sum()
        rows = torch.full_like(tokens, len(self))
        return torch.stack([rows, tokens]).float()


TaskRow = tuple[EncodedRow, TaskSpec, int]
"""A row, the specification of its task's head, and the number of its task in the model."""

Score = Callable[[TaskBatch], Sequence[float | None]]
"""A function that returns a score from 0 to 1 for each row, such as the model's uncertainty, or None for no score."""


def collate_rows(rows: Sequence[TaskRow], pad_id: int) -> TaskBatch:
    """Collate rows into a batch, sorted from the longest row to the shortest. Rows of one length keep their order.

    Args:
        rows: the rows, at least one.
        pad_id: the token id of padding.
    """
    ordered = sorted(rows, key=_negative_length)
    width = len(ordered[0][0])
    encoded = [row for row, _, _ in ordered]
    sequences = [sequence for row in encoded for sequence in row.sequences]
    tagged = [spec.type == "tagging" for _, spec, _ in ordered]
    token_type_ids = None
    if any(row.segments is not None for row in sequences):
        segments = [np.zeros(len(row.ids)) if row.segments is None else row.segments for row in sequences]
        token_type_ids = _padded(segments)
    marks = None
    if any(row.marks is not None for row in sequences):
        marks = _padded([np.zeros(len(row.ids)) if row.marks is None else row.marks for row in sequences])
    targets = []
    for row, of_tokens in zip(encoded, tagged, strict=True):
        if row.target is not None:
            padding = (0, width - len(row))
            targets.append(functional.pad(row.target, padding, value=IGNORED) if of_tokens else row.target)
    return TaskBatch(
        input_ids=_padded([row.ids for row in sequences], pad_id),
        attention_mask=_padded([np.ones(len(row.ids)) for row in sequences]),
        token_type_ids=token_type_ids,
        task=torch.tensor([number for _, _, number in ordered]),
        targets=targets if len(targets) == len(rows) else None,
        tagged=tagged,
        parts=[len(row.sequences) for row in encoded],
        marks=marks,
    )


def _negative_length(row: TaskRow) -> int:
    encoded, _, _ = row
    return -len(encoded)


def _padded(arrays: Sequence[np.ndarray], value: int = 0) -> Tensor:
    """Return arrays as rows that are padded at their end: long, (arrays, longest)."""
    tensors = [torch.from_numpy(array).long() for array in arrays]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def batches_by_length(rows: Sequence[TaskRow], size: int, pad_id: int) -> Iterator[tuple[list[int], TaskBatch]]:
    """Yield all rows in batches, sorted by length.

    Args:
        rows: the rows.
        size: maximum number of sequences of a batch; a row with more of them has a batch of its own.
        pad_id: the token id of padding.

    Yields:
        The indices of a batch's rows in `rows`, in the order of the batch, and the batch.
    """
    order = sorted(range(len(rows)), key=lambda index: _negative_length(rows[index]))
    indices: list[int] = []
    count = 0
    for index in order:
        encoded, _, _ = rows[index]
        parts = len(encoded.sequences)
        if indices and count + parts > size:
            yield indices, collate_rows([rows[number] for number in indices], pad_id)
            indices = []
            count = 0
        indices.append(index)
        count += parts
    if indices:
        yield indices, collate_rows([rows[number] for number in indices], pad_id)


class LabelledMixture:
    """An endless sequence of batches of several tasks, whose rows a sampler chooses step by step.

    Args:
        rows: the training rows of each task.
        encoder: encodes the rows.
        sampler: the policy. Under `uncertainty` a task without a score (span) gets its share of uniform sampling,
            1 / number of tasks, unless `fixed` sets another one.
        batch_size: number of rows of a step, over all processes.
        seed: seed of the sampler.
        score: scores rows with the model in training; needed by the policies `uncertainty` and `entropy`.
        numbers: the number of each task in the model; by default its position in `rows`.
        steps: number of steps of the run, at least 1, over which the sampler's `passes` are spread; None ignores
            `passes`.

    Attributes:
        tasks: the encoded rows of each task.
        notes: warnings about truncated rows, as sentences.

    Raises:
        DataError: there is no task, a task has no rows, a row can't be encoded (see `RowEncoder.encode`), the policy
            does not fit the tasks or needs a `score`, or `batch_size` is below 1.
        BackboneError: a task has tags or spans, and the tokenizer is not a fast one.
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
        self.batch_size = batch_size
        self.score = score
        self.pad_id = padding_id(encoder.tokenizer)
        self.numbers = dict(numbers or {name: number for number, name in enumerate(rows)})
        self.tasks: dict[str, EncodedTask] = {}
        self.notes: list[str] = []
        for name, task in rows.items():
            encoded = encoder.encode(task, training=True)
            self.tasks[name] = encoded
            self.notes += _length_notes(name, encoded, task, encoder.length)
        sizes = {name: len(task) for name, task in self.tasks.items()}
        config = _fit_policy(sampler, rows, score)
        self.sampler = TaskSampler(sizes, config, batch_size, seed, steps)

    @property
    def depends_on_model(self) -> bool:
        """Whether the present weights decide which rows are chosen, so that no batch can be built ahead."""
        return self.score is not None

    def batch(self, step: int) -> TaskBatch:
        """Return the rows of an optimizer step.

        Args:
            step: the number of the step, from 0. Steps must be drawn in order.

        Raises:
            DataError: `step` is not the next one, or a score is not finite or, for the policy `entropy`, negative.
        """
        if step != self.sampler.step:
            raise DataError(
                f"Step {step} was requested, but the sampler is at step {self.sampler.step}: draw steps in order, or "
                "load the state that was saved at that step."
            )
        candidates = self.sampler.candidates()
        scores = []
        if candidates:
            scores = [0.0 if score is None else score for score in self._scores(candidates)]
        picks = self.sampler.choose(scores)
        if self.sampler.config.policy == "entropy":
            self._observe(picks)
        return self._collate(picks)

    def sample(self, name: str, count: int) -> TaskBatch:
        """Return a batch of the first `count` rows of a task, or of all if there are fewer. The sampler is not used.

        Args:
            name: the name of the task.
            count: maximum number of rows, at least 1.
        """
        count = min(count, len(self.tasks[name]))
        return self._collate([Pick(name, row) for row in range(count)])

    def state_dict(self) -> dict[str, object]:
        """Return the sampler's state as plain JSON values."""
        return self.sampler.state_dict()

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the present `state_dict()`, even after later batches have been drawn."""
        return self.sampler.snapshot()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from the `state_dict()` of a mixture.

        Raises:
            DataError: the state's tasks, or their numbers of rows, are not those of this mixture.
        """
        self.sampler.load_state_dict(state)

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of everything that determines the batches."""
        sampler = self.sampler
        settings: tuple[object, ...] = (sampler.sizes, sampler.config, self.batch_size, sampler.seed, self.numbers)
        if sampler.horizon is not None:
            settings = (*settings, sampler.horizon)
        digest = hashlib.sha256(repr(settings).encode())
        for task in self.tasks.values():
            digest.update(repr(task.spec).encode())
            for row in task.rows:
                target = None if row.target is None else row.target.tolist()
                digest.update(row.ids.tobytes())
                digest.update(repr(target).encode())
                for sequence in row.more:
                    digest.update(sequence.ids.tobytes())
                if row.marks is not None:
                    digest.update(row.marks.tobytes())
        return digest.hexdigest()

    def _row(self, pick: Pick) -> TaskRow:
        task = self.tasks[pick.task]
        return task.rows[pick.row], task.spec, self.numbers[pick.task]

    def _collate(self, picks: Sequence[Pick]) -> TaskBatch:
        return collate_rows([self._row(pick) for pick in picks], self.pad_id)

    def _scores(self, picks: Sequence[Pick]) -> list[float | None]:
        """Return the model's scores of some rows, in their order."""
        assert self.score is not None, "the policy was checked"
        rows = [self._row(pick) for pick in picks]
        scores: list[float | None] = [None] * len(rows)
        for indices, batch in batches_by_length(rows, self.batch_size, self.pad_id):
            for index, score in zip(indices, self.score(batch), strict=True):
                scores[index] = score
        return scores

    def _observe(self, picks: Sequence[Pick]) -> None:
        """Report the entropies of the chosen rows to the sampler."""
        entropies: dict[str, list[float]] = {name: [] for name in self.tasks}
        for pick, score in zip(picks, self._scores(picks), strict=True):
            if score is not None:
                spec = self.tasks[pick.task].spec
                entropies[pick.task].append(score * largest_entropy(spec))
        for name, values in entropies.items():
            self.sampler.observe(name, values)


def largest_entropy(spec: TaskSpec) -> float:
    """Return the entropy of a task's uniform prediction in nats, H'_t in `graftlm.data.samplers`.

    It is log C for C classes, C log 2 for C labels of a multi-label task, and log 2 for tasks without labels, which is
    that of two choices: the number of choices differs between rows.
    """
    labels = len(spec.labels)
    if spec.type == "multi-label":
        return labels * float(np.log(2))
    return float(np.log(max(2, labels)))


def _fit_policy(config: SamplerConfig, rows: Mapping[str, TaskRows], score: Score | None) -> SamplerConfig:
    """Return the config with a fixed share for each task without a score.

    Raises:
        DataError: the policy does not fit the tasks, or needs a `score`.
    """
    if config.policy not in ("entropy", "uncertainty"):
        return config
    if score is None:
        raise DataError(
            f"The policy {config.policy} needs the predictions of a model, but score is None: pass a function, or set "
            "the policy to temperature."
        )
    without = [name for name, task in rows.items() if task.spec.type == _WITHOUT_SCORE]
    if config.policy == "entropy" and without:
        raise DataError(
            f"The task {without[0]} has the type {_WITHOUT_SCORE}, whose predictions have no score, but the policy "
            "entropy needs one: set policy to uncertainty, which gives such tasks a fixed share, or to temperature."
        )
    fixed = {**dict.fromkeys(without, 1 / len(rows)), **config.fixed}
    return config.model_copy(update={"fixed": fixed})


def _length_notes(name: str, task: EncodedTask, rows: TaskRows, length: int) -> Iterator[str]:
    """Yield a warning about the truncated or windowed rows of a task, and about those that can't be learned from."""
    left_out = ""
    if task.left_out:
        left_out = f" Rows that are left out because this cuts their answer or marked place: {task.left_out:,}."
    if task.windowed:
        yield (
            f"Rows of the task {name} with more than {length} tokens are read in windows: {task.windowed:,} of "
            f"{len(rows):,}, which makes {len(task):,} rows in all.{left_out}"
        )
    elif task.cut:
        yield (
            f"Rows of the task {name} with more than {length} tokens are cut at their end: {task.cut:,} of "
            f"{len(rows):,}.{left_out}"
        )
