"""Labelled rows of several tasks as batches of tokens, and the endless mixture that training draws them from.

A batch mixes rows of all tasks; it is padded on the right, with its longest rows first, so that parts of it need less
padding than the whole. Losses and predictions go row by row, so neither order nor padding changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import padding_id
from graftlm.data.encoding import EncodedRow, EncodedTask, RowEncoder
from graftlm.data.labelled import TaskRows
from graftlm.data.samplers import Pick, SamplerConfig, TaskSampler
from graftlm.errors import DataError
from graftlm.grafts.heads import IGNORED, TaskSpec

_WITHOUT_ENTROPY = ("regression", "span")


@dataclass(frozen=True)
class TaskBatch:
    """B rows of at most T tokens, each of one task.

    Attributes:
        input_ids: long, (B, T).
        attention_mask: long, (B, T), 0 at padding, which is on the right.
        token_type_ids: long, (B, T), 1 in the second text of a pair; None where no row has such marks.
        task: long, (B,), the number of each row's task.
        own_targets: one tensor a row, those of tagging as long as their row; None where the rows have no labels.
        tagged: whether each row's task is tagging.
        origin: the place of each row among those that were asked for, as rows are sorted by length.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    task: Tensor
    own_targets: list[Tensor] | None
    tagged: list[bool]
    origin: list[int]

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def targets(self) -> list[Tensor] | None:
        """One tensor a row, as `grafts.heads` takes them: those of tagging (T,), -100 at padding."""
        if self.own_targets is None:
            return None
        width = self.input_ids.shape[1]
        return [
            functional.pad(one, (0, width - len(one)), value=IGNORED) if of_tokens else one
            for one, of_tokens in zip(self.own_targets, self.tagged, strict=True)
        ]

    def rows(self, chosen: slice) -> TaskBatch:
        """Some of the rows, such as a micro-batch, without the columns that are padding in all of them."""
        mask = self.attention_mask[chosen]
        width = int(mask.sum(1).max()) if len(mask) else 0
        segments = None if self.token_type_ids is None else self.token_type_ids[chosen, :width]
        targets = None if self.own_targets is None else self.own_targets[chosen]
        tensors = self.input_ids[chosen, :width], mask[:, :width], segments, self.task[chosen]
        return TaskBatch(*tensors, targets, self.tagged[chosen], self.origin[chosen])

    def to(self, device: torch.device | str) -> TaskBatch:
        """The same rows on `device`."""
        segments = None if self.token_type_ids is None else self.token_type_ids.to(device)
        targets = None if self.own_targets is None else [target.to(device) for target in self.own_targets]
        tensors = self.input_ids.to(device), self.attention_mask.to(device), segments, self.task.to(device)
        return TaskBatch(*tensors, targets, self.tagged, self.origin)

    def asked(self) -> dict[str, Any]:
        """Keyword arguments for `GraftedModel.predict`."""
        segments = {} if self.token_type_ids is None else {"token_type_ids": self.token_type_ids}
        said = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return said | segments | {"extras": {"task": self.task}}

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the forward pass of a `GraftedModel`."""
        return self.asked() | {"targets": self.targets}

    def totals(self) -> Tensor:
        """Float, (2,): rows, and tokens without padding."""
        tokens = self.attention_mask.sum()
        return torch.stack([torch.full_like(tokens, len(self)), tokens]).float()


Score = Callable[[TaskBatch], Sequence[float | None]]
"""How unsure a model is of each row of a batch, from 0 to 1; None for a row whose prediction has no entropy."""


def collate(rows: Sequence[tuple[EncodedRow, TaskSpec, int]], pad_id: int) -> TaskBatch:
    """The batch of some rows, each with its task and that task's number; the longest row first."""
    origin = sorted(range(len(rows)), key=lambda place: -len(rows[place][0]))
    ordered = [rows[place] for place in origin]
    shape = len(rows), len(ordered[0][0])
    ids, mask = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.long)
    segments = torch.zeros(shape, dtype=torch.long)
    for line, (row, _, _) in enumerate(ordered):
        ids[line, : len(row)] = torch.from_numpy(row.ids.astype(np.int64))
        mask[line, : len(row)] = 1
        if row.segments is not None:
            segments[line, : len(row)] = torch.from_numpy(row.segments.astype(np.int64))
    targets = [row.target for row, _, _ in ordered]
    known = [target for target in targets if target is not None]
    return TaskBatch(
        ids,
        mask,
        segments if any(row.segments is not None for row, _, _ in rows) else None,
        torch.tensor([number for _, _, number in ordered]),
        known if len(known) == len(targets) else None,
        [spec.type == "tagging" for _, spec, _ in ordered],
        origin,
    )


def batches_by_length(
    rows: Sequence[tuple[EncodedRow, TaskSpec, int]], size: int, pad_id: int
) -> Iterator[tuple[list[int], TaskBatch]]:
    """All rows in batches of at most `size`, sorted by length, each with the places of its rows among `rows`."""
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place][0]))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        batch = collate([rows[place] for place in chosen], pad_id)
        yield [chosen[place] for place in batch.origin], batch


class LabelledMixture:
    """Endless batches of `batch_size` rows of several tasks, which a sampler chooses step by step.

    Args:
        rows: of each task.
        tokenizer: the backbone's.
        sampler: the policy. Of `uncertainty` the share of tasks without entropy, regression and span, is that of
            uniform sampling, one by the number of tasks, where `fixed` does not say another.
        batch_size: rows of a step, over all processes.
        seed: of the sampler.
        length: tokens of a row, at most.
        score: how unsure the model that trains is of rows; needed by the policies uncertainty and entropy.
        numbers: the number of each task, as the model counts them; by default their order in `rows`.
        segments: whether the model tells the second text of a pair by `token_type_ids`.
        truncation: truncate longer rows at their end; without it a longer row is an error.
        score_rows: rows that are scored at a time; by default those of a step.

    Raises:
        DataError: a task has no rows, a row does not fit, or the policy does not fit the tasks.
    """

    def __init__(
        self,
        rows: Mapping[str, TaskRows],
        tokenizer: PreTrainedTokenizerBase,
        sampler: SamplerConfig,
        batch_size: int,
        seed: int = 0,
        length: int = 128,
        score: Score | None = None,
        *,
        numbers: Mapping[str, int] | None = None,
        segments: bool = True,
        truncation: bool = True,
        score_rows: int | None = None,
    ) -> None:
        self.batch_size, self.score, self.pad_id = batch_size, score, padding_id(tokenizer)
        self.score_rows = score_rows or batch_size
        encoder = RowEncoder(tokenizer, length, segments=segments, truncation=truncation)
        self.tasks = {name: encoder.encode(task, training=True) for name, task in rows.items()}
        self.numbers = dict(numbers or {name: number for number, name in enumerate(rows)})
        self.notes = [note for name, task in self.tasks.items() for note in _notes(name, task, len(rows[name]), length)]
        config = with_fixed_shares(sampler, {name: task.spec for name, task in rows.items()})
        _check_policy(config, rows, score)
        self.sampler = TaskSampler({name: len(task) for name, task in self.tasks.items()}, config, batch_size, seed)

    def batch(self, step: int) -> TaskBatch:
        """The rows of one optimiser step, counted from 0; to be asked step by step.

        Raises:
            DataError: it is not the next step, or a prediction is not a number.
        """
        if step != self.sampler.step:
            raise DataError(f"Step {step} was asked for, but the sampler is at {self.sampler.step}: go step by step.")
        asked = self.sampler.candidates()
        picks = self.sampler.choose([value or 0.0 for value in self._scores(asked)] if asked else ())
        if self.sampler.config.policy == "entropy":
            self._observe(picks)
        return collate([self._row(pick) for pick in picks], self.pad_id)

    def sample(self, name: str, count: int) -> TaskBatch:
        """The first rows of one task, at most `count`."""
        chosen = [Pick(name, row) for row in range(min(count, len(self.tasks[name])))]
        return collate([self._row(pick) for pick in chosen], self.pad_id)

    def report(self) -> dict[str, Any]:
        """What was chosen so far, see `TaskSampler.report`."""
        return self.sampler.report()

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands, as plain JSON values."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of a mixture of the same rows.

        Raises:
            DataError: the state is of other rows.
        """
        self.sampler.load_state_dict(state)

    def fingerprint(self) -> str:
        """SHA-256 over all that sets the batches apart."""
        sampler = self.sampler
        said = repr((sampler.sizes, sampler.config, self.batch_size, sampler.seed, self.numbers))
        digest = hashlib.sha256(said.encode())
        for task in self.tasks.values():
            digest.update(repr(task.spec).encode())
            for row in task.rows:
                digest.update(row.ids.tobytes())
                digest.update(repr(None if row.target is None else row.target.tolist()).encode())
        return digest.hexdigest()

    def _row(self, pick: Pick) -> tuple[EncodedRow, TaskSpec, int]:
        task = self.tasks[pick.task]
        return task.rows[pick.row], task.spec, self.numbers[pick.task]

    def _scores(self, picks: Sequence[Pick]) -> list[float | None]:
        """How unsure the model is of some rows, in their order."""
        assert self.score is not None, "the policy was checked"
        found: list[float | None] = [None] * len(picks)
        for places, batch in batches_by_length([self._row(pick) for pick in picks], self.score_rows, self.pad_id):
            for place, value in zip(places, self.score(batch), strict=True):
                found[place] = value
        return found

    def _observe(self, picks: Sequence[Pick]) -> None:
        """Tell the sampler what the model thinks of the rows that it is about to learn."""
        scores = self._scores(picks)
        for name, task in self.tasks.items():
            mine = [value for pick, value in zip(picks, scores, strict=True) if pick.task == name and value is not None]
            self.sampler.observe(name, [value * largest_entropy(task.spec) for value in mine])


def largest_entropy(spec: TaskSpec) -> float:
    """H', in nats, the entropy of knowing nothing: log C, and of C labels that may hold together C log 2."""
    if spec.type == "multi-label":
        return len(spec.labels) * float(np.log(2))
    return float(np.log(max(2, len(spec.labels))))


def with_fixed_shares(config: SamplerConfig, specs: Mapping[str, TaskSpec]) -> SamplerConfig:
    """The config in which each task without entropy has a fixed share under `uncertainty`."""
    if config.policy != "uncertainty":
        return config
    uniform = {name: 1 / len(specs) for name, spec in specs.items() if spec.type in _WITHOUT_ENTROPY}
    return config.model_copy(update={"fixed": uniform | config.fixed})


def _check_policy(config: SamplerConfig, rows: Mapping[str, TaskRows], score: Score | None) -> None:
    if config.policy not in ("entropy", "uncertainty"):
        return
    if score is None:
        raise DataError(
            f"The policy {config.policy} goes by what a model predicts, and there is no score: give one, or take "
            "policy: temperature."
        )
    without = [name for name, task in rows.items() if task.spec.type in _WITHOUT_ENTROPY]
    if config.policy == "entropy" and without:
        raise DataError(
            f"The task {without[0]} is of the type {rows[without[0]].spec.type}, whose predictions have no entropy, "
            "and policy: entropy goes by it: take policy: uncertainty, which gives such tasks a fixed share, or "
            "temperature."
        )


def _notes(name: str, task: EncodedTask, rows: int, length: int) -> Iterator[str]:
    lost = rows - len(task)
    if task.cut:
        yield (
            f"Of the {rows:,} rows of the task {name} {task.cut:,} are longer than {length} tokens and were cut at "
            f"their end{f', and {lost:,} left out, as their answer lies behind the cut' if lost else ''}."
        )
