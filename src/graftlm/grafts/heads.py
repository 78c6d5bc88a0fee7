"""Heads: predictions of labels from the last hidden states.

`TaskSpec` describes a task. `Heads` holds one dropout and one Linear for each task, and takes rows of several tasks in
one batch. Predictions and targets are lists with one entry for each row, since their shapes differ:

    type             prediction              target            loss of a row
    classification   (C,) logits             () long           cross-entropy
    regression       () in the task's unit   () float          squared error
    multi-label      (C,) logits             (C,) float        mean binary cross-entropy
    tagging          (T, C) logits           (T,) long         mean cross-entropy of the tokens that are not -100
    span             (T, 2) logits           (2,) long         mean cross-entropy of first and last token

Shape suffixes: B rows, R rows of one task, T tokens, D the backbone's width, C labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.config import Config
from graftlm.errors import GraftError

TaskType = Literal["classification", "regression", "multi-label", "tagging", "span"]
Pooling = Literal["first", "mean", "last"]
IGNORED = -100
FEWEST_LABELS: dict[TaskType, int] = {"classification": 2, "tagging": 2, "multi-label": 1}


class TaskSpec(Config):
    """A task.

    Args:
        type: the type of the prediction; regression and span have no labels.
        labels: the classes, in order.
        range: of regression, the lowest and the highest target in training: the head's 0 and 1.
    """

    type: TaskType
    labels: list[str] = []
    range: tuple[float, float] = (0.0, 1.0)

    def _problems(self) -> Iterator[str]:
        fewest = FEWEST_LABELS.get(self.type)
        if fewest is None and self.labels:
            yield f"a {self.type} task has no labels: leave them out"
        if fewest is not None and len(self.labels) < fewest:
            yield f"a {self.type} task needs at least {fewest} labels, and has {len(self.labels)}"
        if not self.range[0] < self.range[1]:
            yield f"range is {list(self.range)}: give two numbers, the smaller first"
        if repeated := sorted({label for label in self.labels if self.labels.count(label) > 1}):
            yield f"the label {repeated[0]!r} appears twice"

    @property
    def outputs(self) -> int:
        """The number of outputs for a row, or for a token of tagging and span."""
        return {"regression": 1, "span": 2}.get(self.type, len(self.labels))

    @property
    def unit(self) -> float:
        """The width of the range."""
        return self.range[1] - self.range[0]

    @property
    def chance_loss(self) -> float:
        """A row's loss when nothing is known: log C nats, or the variance of a uniform target; 1 for span.

        Of tagging and multi-label it is log 2, as most labels are absent: most words are outside of all entities.
        """
        if self.type == "regression":
            return self.unit**2 / 12
        return 1.0 if self.type == "span" else math.log(len(self.labels) if self.type == "classification" else 2)

    @property
    def of_tokens(self) -> bool:
        """Whether each token has a prediction; otherwise each row has one."""
        return self.type in ("tagging", "span")


class Heads(nn.Module):
    """One head for each task.

    Args:
        tasks: the tasks by name; a row's task is an index into them.
        width: D.
        pooling: the vector of a row: that of its first real token, that of its last, or the mean of all.
        dropout: of the Linears' inputs, in training.
    """

    def __init__(self, tasks: Mapping[str, TaskSpec], width: int, pooling: Pooling = "first", dropout: float = 0.1):
        super().__init__()
        self.width = width
        self.pooling: Pooling = pooling
        self.dropout = nn.Dropout(dropout)
        self.specs: dict[str, TaskSpec] = {}
        self.linears = nn.ModuleDict()
        for name, spec in tasks.items():
            self.add(name, spec)

    def add(self, name: str, spec: TaskSpec) -> nn.Linear:
        """A fresh head, the last in order. Raises GraftError if the name is taken, is empty or has a dot."""
        if name in self.specs or "." in name or not name:
            problem = "is there already" if name in self.specs else "has a dot in it" if name else "is empty"
            raise GraftError(f"The task name {name!r} {problem}: name the task another way.")
        linear = nn.Linear(self.width, spec.outputs)
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        self.linears[task_key(name)] = linear
        self.specs[name] = spec
        return linear

    def linear(self, name: str) -> nn.Linear:
        """A task's Linear."""
        return self.linears[task_key(name)]  # type: ignore[return-value]  # a ModuleDict holds modules

    def forward(self, hidden_BTD: Tensor, token_mask_BT: Tensor | None, task_B: Tensor | None) -> list[Tensor]:
        """Each row's prediction, in the order of the rows.

        Padding is excluded: its span logits are the lowest of the dtype, and its tagging logits have no meaning.

        Args:
            hidden_BTD: the backbone's last hidden states.
            token_mask_BT: True for real tokens; None when all are real.
            task_B: long, each row's task; None for the first.
        """
        hidden_BTD = hidden_BTD.to(next(self.linears.parameters()).dtype)
        if token_mask_BT is None:
            token_mask_BT = hidden_BTD.new_ones(hidden_BTD.shape[:2], dtype=torch.bool)
        token_mask_BT = token_mask_BT.bool()
        vectors_BD = pooled(hidden_BTD, token_mask_BT, self.pooling)
        predictions: dict[int, Tensor] = {}
        for name, rows_R in self._by_task(task_B, len(hidden_BTD)):
            spec = self.specs[name]
            out = self.linear(name)(self.dropout(_rows(hidden_BTD if spec.of_tokens else vectors_BD, rows_R)))
            if spec.type == "regression":
                out = out.squeeze(-1) * spec.unit + spec.range[0]
            elif spec.type == "span":
                out = out.masked_fill(~_rows(token_mask_BT, rows_R)[..., None], torch.finfo(out.dtype).min)
            predictions |= zip(rows_R, out.unbind(0), strict=True)
        return [predictions[row] for row in range(len(predictions))]

    def losses(
        self, predictions: Sequence[Tensor], targets: Sequence[Tensor], task_B: Tensor | None, *, scaled: bool = False
    ) -> list[Tensor]:
        """Each row's loss, scalars in nats or squared units, from the output of `forward`; see the table above.

        `scaled` divides it by the task's `chance_loss`, so that tasks of all types count alike.
        """
        losses: dict[int, Tensor] = {}
        for name, rows_R in self._by_task(task_B, len(predictions)):
            spec = self.specs[name]
            out = torch.stack([predictions[row] for row in rows_R]).float()
            values_R = row_losses(spec, out, _stacked(targets, rows_R, out.device))
            values_R = values_R / spec.chance_loss if scaled else values_R
            losses |= zip(rows_R, values_R.unbind(0), strict=True)
        return [losses[row] for row in range(len(predictions))]

    def _by_task(self, task_B: Tensor | None, rows: int) -> Iterator[tuple[str, list[int]]]:
        tasks = [0] * rows if task_B is None else task_B.tolist()
        names = list(self.specs)
        for task in sorted(set(tasks)):
            if not 0 <= task < len(names):
                raise GraftError(f"There is no task number {task}: the graft has {len(names)}, counted from 0.")
            yield names[task], [row for row, number in enumerate(tasks) if number == task]


def task_key(name: str) -> str:
    """The key of a task in a ModuleDict, which refuses names of its attributes, such as `type`."""
    return f"task:{name}"


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, torch.tensor(rows).to(tensor.device, non_blocking=True))


def _stacked(targets: Sequence[Tensor], rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.stack([targets[row] for row in rows]).to(device, non_blocking=True)


def pooled(hidden_RTD: Tensor, mask_RT: Tensor, pooling: Pooling) -> Tensor:
    """(R, D): the vector of each row, from its real tokens alone; padding may be on either side."""
    if pooling == "mean":
        weights = mask_RT.to(hidden_RTD.dtype)
        return torch.einsum("rtd,rt->rd", hidden_RTD, weights) / weights.sum(1, keepdim=True).clamp(min=1)
    columns = torch.arange(mask_RT.shape[1], device=mask_RT.device)
    column_R = mask_RT.int().argmax(1) if pooling == "first" else (columns * mask_RT).argmax(1)
    return hidden_RTD[torch.arange(len(column_R), device=column_R.device), column_R]


def row_losses(spec: TaskSpec, predictions: Tensor, targets: Tensor) -> Tensor:
    """(R,) losses of R rows of one task, whose predictions and targets are stacked."""
    if spec.type == "classification":
        return functional.cross_entropy(predictions, targets, reduction="none")
    if spec.type == "regression":
        return (predictions - targets).square()
    if spec.type == "multi-label":
        targets = targets.to(predictions.dtype)
        return functional.binary_cross_entropy_with_logits(predictions, targets, reduction="none").mean(-1)
    logits = predictions.transpose(1, 2) if spec.type == "tagging" else predictions
    nats = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    if spec.type == "span":
        return nats.mean(-1)
    return nats.sum(-1) / (targets != IGNORED).sum(-1).clamp(min=1)


def uncertainty(
    predictions: Sequence[Tensor], specs: Sequence[TaskSpec], targets: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """The uncertainty of each prediction, scalars from 0 to 1; None for span.

    Classification: the entropy over log C. Tagging: the largest of the labelled tokens' own, since most tokens are
    outside entities and certain. Multi-label: the mean entropy of the labels, each over log 2. Regression: the error
    over the task's range, at most 1; None without targets.

    Args:
        predictions: one for each row.
        specs: each row's task.
        targets: -100 marks the tokens of tagging that have no label; None counts every token, padding too.
    """
    return _scores(_uncertainty, predictions, specs, targets)


def learnability(
    predictions: Sequence[Tensor], specs: Sequence[TaskSpec], targets: Sequence[Tensor]
) -> list[Tensor | None]:
    """4 p (1 - p) of each row, from 0 to 1, where p is the probability of what is right; None for span.

    p (1 - p) is the derivative of p by its logit: what a step on the row gains. Rows that are known and rows that
    contradict the model have none. Tagging: the largest of the labelled tokens. Multi-label: the mean of the labels.
    Regression: p is 1 less the error over the task's range. Arguments as those of `uncertainty`.
    """
    return _scores(_learnability, predictions, specs, targets)


def _scores(
    score: Callable[..., Tensor | None],
    predictions: Sequence[Tensor],
    specs: Sequence[TaskSpec],
    targets: Sequence[Tensor] | None,
) -> list[Tensor | None]:
    """Each row's score; rows of one task and shape are scored together."""
    groups: dict[tuple[int, torch.Size], list[int]] = {}
    for row, (prediction, spec) in enumerate(zip(predictions, specs, strict=True)):
        groups.setdefault((id(spec), prediction.shape), []).append(row)
    scores: dict[int, Tensor | None] = {}
    for rows_R in groups.values():
        out = torch.stack([predictions[row] for row in rows_R]).float()
        values_R = score(specs[rows_R[0]], out, None if targets is None else _stacked(targets, rows_R, out.device))
        scores |= zip(rows_R, [None] * len(rows_R) if values_R is None else values_R.unbind(0), strict=True)
    return [scores[row] for row in range(len(predictions))]


def _uncertainty(spec: TaskSpec, logits: Tensor, targets: Tensor | None) -> Tensor | None:
    """(R,) of R rows of one task."""
    if spec.type == "multi-label":
        both = torch.stack([functional.logsigmoid(logits), functional.logsigmoid(-logits)], -1)
        return _entropy(both).mean(-1) / math.log(2)
    if spec.type == "regression" and targets is not None:
        return ((logits - targets).abs() / spec.unit).clamp(max=1)
    if spec.type not in ("classification", "tagging"):
        return None
    entropy = _entropy(logits.log_softmax(-1)) / math.log(logits.shape[-1])
    return entropy if spec.type == "classification" else _largest_of_labelled(entropy, targets)


def _learnability(spec: TaskSpec, logits: Tensor, targets: Tensor | None) -> Tensor | None:
    """(R,) of R rows of one task."""
    assert targets is not None, "what is right is known in training"
    if spec.type == "span":
        return None
    if spec.type == "regression":
        right = 1 - ((logits - targets).abs() / spec.unit).clamp(max=1)
    elif spec.type == "multi-label":
        right = torch.sigmoid(torch.where(targets > 0, logits, -logits))
    else:
        right = logits.softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    values = 4 * right * (1 - right)
    if spec.type == "multi-label":
        return values.mean(-1)
    return _largest_of_labelled(values, targets) if spec.type == "tagging" else values


def _largest_of_labelled(values_RT: Tensor, targets_RT: Tensor | None) -> Tensor:
    counted = values_RT if targets_RT is None else values_RT.masked_fill(targets_RT == IGNORED, 0)
    return counted.amax(-1)


def _entropy(log_probabilities: Tensor) -> Tensor:
    """In nats, over the last dimension."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)
