"""Heads: predictions of labels from the last hidden states.

`TaskSpec` describes a task. `Heads` contains a dropout and a Linear for each task, and accepts rows of several tasks
in one batch. Predictions and targets are lists with an entry per row, since their shapes differ:

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.config import Config
from graftlm.errors import GraftError

TaskType = Literal["classification", "regression", "multi-label", "tagging", "span"]
Pooling = Literal["first", "mean", "last"]
IGNORED = -100
FEWEST_LABELS: dict[TaskType, int] = {
    "classification": 2,
    "tagging": 2,
    "multi-label": 1,
}


class TaskSpec(Config):
    """The specification of a labeled task.

    Args:
        type: the type of the prediction, which fixes its shape and loss: `classification` chooses one label of a row,
            `multi-label` any number of them, `tagging` one label of each token; `regression` predicts a number, and
            `span` the first and the last token of an answer. The last two have no labels.
        labels: the classes, in order.
        range: for regression, the lowest and the highest target of the training rows; the head's outputs 0 and 1 are
            mapped to them.
    """

    type: TaskType
    labels: list[str] = []
    range: tuple[float, float] = (0.0, 1.0)

    def _problems(self) -> Iterator[str]:
        fewest = FEWEST_LABELS.get(self.type)
        if fewest is None and self.labels:
            yield f"the number of labels is {len(self.labels)}, but a {self.type} task has no labels: leave labels out"
        if fewest is not None and len(self.labels) < fewest:
            yield (
                f"the number of labels is {len(self.labels)}, but for a {self.type} task at least {fewest} is expected:"
                " name more labels"
            )
        lowest, highest = self.range
        if not lowest < highest:
            yield f"range is [{lowest}, {highest}], but its first number must be less than the second: exchange them"
        repeated = sorted({label for label in self.labels if self.labels.count(label) > 1})
        if repeated:
            yield f"the label {repeated[0]!r} occurs more than once: name each label once"

    @property
    def outputs(self) -> int:
        """The number of outputs of the head's Linear per row, or per token for tagging and span."""
        if self.type == "regression":
            return 1
        if self.type == "span":
            return 2
        return len(self.labels)

    @property
    def unit(self) -> float:
        """The highest minus the lowest target of `range`."""
        lowest, highest = self.range
        return highest - lowest

    @property
    def chance_loss(self) -> float:
        """The loss of a row for an uninformed prediction.

        It is log C nats for classification, the variance of a uniform target for regression, and 1 for span. For
        tagging and multi-label it is log 2, because most labels are absent (most words are outside all entities).
        """
        if self.type == "regression":
            return self.unit**2 / 12
        if self.type == "span":
            return 1.0
        if self.type == "classification":
            return math.log(len(self.labels))
        return math.log(2)

    @property
    def of_tokens(self) -> bool:
        """Whether there is a prediction per token rather than per row."""
        return self.type in ("tagging", "span")


class Heads(nn.Module):
    """A classification or regression head for each task.

    Args:
        tasks: the tasks by name; a row refers to its task by the index in this order.
        width: D, the width of the hidden states.
        pooling: how a row's vector is computed: from its first real token, its last real token, or the mean of all
            real tokens.
        dropout: dropout probability of the Linears' inputs during training.

    Raises:
        GraftError: the name of a task is empty or contains a dot.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskSpec],
        width: int,
        pooling: Pooling = "first",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.width = width
        self.pooling: Pooling = pooling
        self.dropout = nn.Dropout(dropout)
        self.specs: dict[str, TaskSpec] = {}
        self.linears = nn.ModuleDict()
        for name, spec in tasks.items():
            self.add(name, spec)

    def add(self, name: str, spec: TaskSpec) -> nn.Linear:
        """Append a newly initialized head, and return its Linear, which is on the default device.

        Args:
            name: the name of the new task.
            spec: the specification of the new task.

        Raises:
            GraftError: the name is empty, contains a dot, or belongs to another task.
        """
        problem = self._name_problem(name)
        if problem:
            raise GraftError(f"The task name {name!r} {problem}: choose another name.")
        linear = nn.Linear(self.width, spec.outputs)
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        self.linears[task_key(name)] = linear
        self.specs[name] = spec
        return linear

    def _name_problem(self, name: str) -> str:
        if not name:
            return "is empty"
        if name in self.specs:
            return "is already taken"
        if "." in name:
            return "contains a dot"
        return ""

    def linear(self, name: str) -> nn.Linear:
        """Return the Linear (D to the outputs of the task) of a task by the task's name."""
        return self.linears[task_key(name)]  # type: ignore[return-value]  # a ModuleDict holds modules

    def forward(self, hidden_BTD: Tensor, token_mask_BT: Tensor | None, task_B: Tensor | None) -> list[Tensor]:
        """Predict each row with the head of its task.

        Padding is excluded: its span logits are the lowest value of the dtype. Tagging logits of padding have no
        meaning.

        Args:
            hidden_BTD: (B, T, D), the backbone's last hidden states.
            token_mask_BT: (B, T), True for real tokens; None when all tokens are real.
            task_B: (B,) long, the index of each row's task; None when all rows have the first task.

        Returns:
            A prediction per row, in the order of the rows, with the shapes of the table of this module.

        Raises:
            GraftError: there is no task with the index of a row.
        """
        weight = next(self.linears.parameters())
        hidden_BTD = hidden_BTD.to(weight.dtype)
        if token_mask_BT is None:
            token_mask_BT = hidden_BTD.new_ones(hidden_BTD.shape[:2], dtype=torch.bool)
        token_mask_BT = token_mask_BT.bool()
        vectors_BD = pooled(hidden_BTD, token_mask_BT, self.pooling)
        predictions: dict[int, Tensor] = {}
        for name, rows_R in self._by_task(task_B, len(hidden_BTD)):
            spec = self.specs[name]
            inputs = _rows(hidden_BTD if spec.of_tokens else vectors_BD, rows_R)
            out = self.linear(name)(self.dropout(inputs))
            if spec.type == "regression":
                lowest = spec.range[0]
                out = out.squeeze(-1) * spec.unit + lowest
            elif spec.type == "span":
                padding_RT = ~_rows(token_mask_BT, rows_R)
                out = out.masked_fill(padding_RT[..., None], torch.finfo(out.dtype).min)
            predictions.update(zip(rows_R, out.unbind(0), strict=True))
        return [predictions[row] for row in range(len(predictions))]

    def losses(
        self,
        predictions: Sequence[Tensor],
        targets: Sequence[Tensor],
        task_B: Tensor | None,
        *,
        scaled: bool = False,
    ) -> list[Tensor]:
        """Compute the loss of each row, as in the table of this module.

        Args:
            predictions: the output of `forward`.
            targets: a target per row, with the shapes of the table of this module.
            task_B: (B,) long, the index of each row's task; None when all rows have the first task.
            scaled: divide each loss by the task's `chance_loss`, which gives tasks of all types the same weight.

        Returns:
            A float32 scalar per row, in nats, or for regression in squared units of the target; if `scaled`, as a
            multiple of the loss at chance.

        Raises:
            GraftError: there is no task with the index of a row.
        """
        losses: dict[int, Tensor] = {}
        for name, rows_R in self._by_task(task_B, len(predictions)):
            spec = self.specs[name]
            out = torch.stack([predictions[row] for row in rows_R]).float()
            targets_R = _stacked(targets, rows_R, out.device)
            values_R = row_losses(spec, out, targets_R)
            if scaled:
                values_R = values_R / spec.chance_loss
            losses.update(zip(rows_R, values_R.unbind(0), strict=True))
        return [losses[row] for row in range(len(predictions))]

    def _by_task(self, task_B: Tensor | None, rows: int) -> Iterator[tuple[str, list[int]]]:
        """Yield the name and the row indices of every task in a batch of `rows` rows."""
        tasks = [0] * rows if task_B is None else task_B.tolist()
        names = list(self.specs)
        for task in sorted(set(tasks)):
            if not 0 <= task < len(names):
                raise GraftError(
                    f"The batch has a row of task number {task}, but the graft's tasks have the numbers 0 to "
                    f"{len(names) - 1}: give the row one of them."
                )
            rows_of_task = [row for row, number in enumerate(tasks) if number == task]
            yield names[task], rows_of_task


def task_key(name: str) -> str:
    """Return the key of a task in a ModuleDict, which rejects the names of its own attributes, such as `type`."""
    return f"task:{name}"


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Select different rows of a tensor, which are in ascending order."""
    if len(rows) == len(tensor):
        return tensor
    index = torch.tensor(rows).to(tensor.device, non_blocking=True)
    return tensor.index_select(0, index)


def _stacked(targets: Sequence[Tensor], rows: Sequence[int], device: torch.device) -> Tensor:
    selected = [targets[row] for row in rows]
    return torch.stack(selected).to(device, non_blocking=True)


def pooled(hidden_RTD: Tensor, mask_RT: Tensor, pooling: Pooling) -> Tensor:
    """Reduce the hidden states of each row to one vector.

    Padding may be on either side. Each row must have a real token.

    Args:
        hidden_RTD: (R, T, D) hidden states.
        mask_RT: (R, T), True or 1 for real tokens.
        pooling: `first` and `last` select a real token, `mean` averages all real tokens.

    Returns:
        (R, D) in the dtype of the hidden states.
    """
    if pooling == "mean":
        weights = mask_RT.to(hidden_RTD.dtype)
        sums_RD = torch.einsum("rtd,rt->rd", hidden_RTD, weights)
        counts = weights.sum(1, keepdim=True).clamp(min=1)
        return sums_RD / counts
    if pooling == "first":
        column_R = mask_RT.int().argmax(1)
    else:
        columns = torch.arange(mask_RT.shape[1], device=mask_RT.device)
        column_R = (columns * mask_RT).argmax(1)
    row_R = torch.arange(len(column_R), device=column_R.device)
    return hidden_RTD[row_R, column_R]


def row_losses(spec: TaskSpec, predictions: Tensor, targets: Tensor) -> Tensor:
    """Compute the losses of R rows of one task.

    Args:
        spec: the task.
        predictions: (R, ...), the predictions, with the other dimensions in the table of this module.
        targets: (R, ...), the targets, with the other dimensions in the table of this module.

    Returns:
        (R,) losses in nats, or for regression in squared units of the target. A tagging row without labels has the
        loss 0.
    """
    if spec.type == "classification":
        return functional.cross_entropy(predictions, targets, reduction="none")
    if spec.type == "regression":
        return (predictions - targets).square()
    if spec.type == "multi-label":
        targets = targets.to(predictions.dtype)
        nats_RC = functional.binary_cross_entropy_with_logits(predictions, targets, reduction="none")
        return nats_RC.mean(-1)
    logits = predictions.transpose(1, 2) if spec.type == "tagging" else predictions
    nats = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    if spec.type == "span":
        return nats.mean(-1)
    is_labeled = targets != IGNORED
    labeled_R = is_labeled.sum(-1)
    return nats.sum(-1) / labeled_R.clamp(min=1)


def uncertainty(
    predictions: Sequence[Tensor],
    specs: Sequence[TaskSpec],
    targets: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """Compute the uncertainty of each prediction, from 0 (certain) to 1.

    | type | uncertainty |
    |---|---|
    | classification | entropy over log C |
    | tagging | maximum over the labeled tokens, since most tokens are outside entities and certain |
    | multi-label | mean entropy of the labels, each over log 2 |
    | regression | absolute error over the task's range, at most 1; None without targets |
    | span | None |

    Args:
        predictions: a prediction per row.
        specs: the task of each row.
        targets: a target per row, in which -100 marks the tokens of a tagging task without a label. Without targets
            every token counts, including padding.

    Returns:
        A scalar per row, or None where the type has no uncertainty.
    """
    groups: dict[tuple[int, torch.Size], list[int]] = {}
    for row, (prediction, spec) in enumerate(zip(predictions, specs, strict=True)):
        groups.setdefault((id(spec), prediction.shape), []).append(row)
    scores: list[Tensor | None] = [None] * len(predictions)
    for rows_R in groups.values():
        spec = specs[rows_R[0]]
        out = torch.stack([predictions[row] for row in rows_R]).float()
        stacked = None if targets is None else _stacked(targets, rows_R, out.device)
        values_R = _uncertainty(spec, out, stacked)
        if values_R is None:
            continue
        for row, value in zip(rows_R, values_R.unbind(0), strict=True):
            scores[row] = value
    return scores


def _uncertainty(spec: TaskSpec, logits: Tensor, targets: Tensor | None) -> Tensor | None:
    """Return the uncertainty (R,) of R rows of one task."""
    if spec.type == "multi-label":
        present = functional.logsigmoid(logits)
        absent = functional.logsigmoid(-logits)
        entropy = _entropy(torch.stack([present, absent], -1))
        return entropy.mean(-1) / math.log(2)
    if spec.type == "regression" and targets is not None:
        return _relative_error(spec, logits, targets)
    if spec.type not in ("classification", "tagging"):
        return None
    log_probabilities = logits.log_softmax(-1)
    entropy = _entropy(log_probabilities) / math.log(logits.shape[-1])
    if spec.type == "classification":
        return entropy
    return _largest_of_labeled(entropy, targets)


def _relative_error(spec: TaskSpec, predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the absolute error of a regression over the task's range, at most 1."""
    errors = (predictions - targets).abs()
    return (errors / spec.unit).clamp(max=1)


def _largest_of_labeled(values_RT: Tensor, targets_RT: Tensor | None) -> Tensor:
    """Return each row's largest value among its labeled tokens, or among all tokens without targets."""
    if targets_RT is not None:
        values_RT = values_RT.masked_fill(targets_RT == IGNORED, 0)
    return values_RT.amax(-1)


def _entropy(log_probabilities: Tensor) -> Tensor:
    """Return the entropy in nats over the last dimension."""
    probabilities = log_probabilities.exp()
    return -(probabilities * log_probabilities).sum(-1)
