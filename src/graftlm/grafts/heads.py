"""Heads: predictions of labels from the last hidden states.

`TaskSpec` describes a task. `Heads` contains a dropout and a Linear for each task, and accepts rows of several tasks
in one batch. Predictions and targets are lists with an entry per row, since their shapes differ:

    type             prediction              target            loss of a row
    classification   (C,) logits             () long           cross-entropy
    marked           (C,) logits             () long           cross-entropy
    choice           (N,) logits             () long           cross-entropy over the N choices of the row
    regression       () in the task's unit   () float          squared error
    multi-label      (C,) logits             (C,) float        mean binary cross-entropy
    tagging          (T, C) logits           (T,) long         mean cross-entropy of the tokens that are not -100
    span             (T, 2) logits           (2,) long         mean cross-entropy of first and last token

A row is one sequence of tokens, or several: a choice has one for each of its choices, whose Linear gives each a single
logit, and a span of a long context one for each window, whose prediction is then (windows, T, 2). A marked row has two
marked places. Its Linear reads the row's vector and the mean states of both places, 3 D inputs: no token is inserted,
since the frozen encoder knows no embedding for one.

Shape suffixes: B sequences, R sequences or rows of one task, T tokens, D the backbone's width, C labels.
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

TaskType = Literal["classification", "regression", "multi-label", "tagging", "span", "choice", "marked"]
Pooling = Literal["first", "mean", "last"]
IGNORED = -100
PLACES = 2
"""Number of marked places of a marked row."""
FEWEST_LABELS: dict[TaskType, int] = {
    "classification": 2,
    "tagging": 2,
    "multi-label": 1,
    "marked": 2,
}


class TaskSpec(Config):
    """The specification of a labeled task.

    Args:
        type: the type of the prediction, which fixes its shape and loss: `classification` chooses one label of a row,
            `marked` one label of two marked places, `multi-label` any number of labels, `tagging` one label of each
            token; `regression` predicts a number, `span` the first and the last token of an answer, and `choice` one
            of the row's own choices. The last three have no labels.
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
        """The number of outputs of the head's Linear per sequence, or per token for tagging and span."""
        if self.type in ("regression", "choice"):
            return 1
        if self.type == "span":
            return 2
        return len(self.labels)

    @property
    def inputs(self) -> int:
        """The number of vectors that the head's Linear reads at once: three for marked, otherwise one."""
        return 1 + PLACES if self.type == "marked" else 1

    @property
    def unit(self) -> float:
        """The highest minus the lowest target of `range`."""
        lowest, highest = self.range
        return highest - lowest

    @property
    def chance_loss(self) -> float:
        """The loss of a row for an uninformed prediction.

        It is log C nats for classification and marked, the variance of a uniform target for regression, and 1 for
        span. For tagging and multi-label it is log 2, because most labels are absent (most words are outside all
        entities). For choice it is that of two choices; scaled losses use the number of choices of each row.
        """
        if self.type == "regression":
            return self.unit**2 / 12
        if self.type == "span":
            return 1.0
        if self.type in ("classification", "marked"):
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
        linear = nn.Linear(self.width * spec.inputs, spec.outputs)
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
        """Return the Linear of a task by the task's name; it maps D, or 3 D for marked, to the outputs of the task."""
        return self.linears[task_key(name)]  # type: ignore[return-value]  # a ModuleDict holds modules

    def forward(
        self,
        hidden_BTD: Tensor,
        token_mask_BT: Tensor | None,
        task_B: Tensor | None,
        *,
        parts: Sequence[int] | None = None,
        marks_BT: Tensor | None = None,
    ) -> list[Tensor]:
        """Predict each row with the head of its task.

        Padding is excluded: its span logits are the lowest value of the dtype. Tagging logits of padding have no
        meaning. A marked place without tokens has zeros in place of its mean state.

        Args:
            hidden_BTD: (B, T, D), the backbone's last hidden states.
            token_mask_BT: (B, T), True for real tokens; None when all tokens are real.
            task_B: (B,) long, the index of each sequence's task; None when all have the first task.
            parts: the number of sequences of each row, which follow each other; None when each row has one.
            marks_BT: (B, T) long, 1 at tokens of a row's first marked place, 2 at those of the second one, 3 at tokens
                of both, and 0 elsewhere; None when no row is marked.

        Returns:
            A prediction per row, in the order of the rows, with the shapes of the table of this module.

        Raises:
            GraftError: there is no task with the index of a row, `parts` do not sum to B, or rows are marked and there
                are no marks.
        """
        weight = next(self.linears.parameters())
        hidden_BTD = hidden_BTD.to(weight.dtype)
        if token_mask_BT is None:
            token_mask_BT = hidden_BTD.new_ones(hidden_BTD.shape[:2], dtype=torch.bool)
        token_mask_BT = token_mask_BT.bool()
        vectors_BD = pooled(hidden_BTD, token_mask_BT, self.pooling)
        outputs: dict[int, Tensor] = {}
        joined: set[int] = set()
        for name, rows_R in self._by_task(task_B, len(hidden_BTD)):
            spec = self.specs[name]
            inputs = _rows(hidden_BTD if spec.of_tokens else vectors_BD, rows_R)
            if spec.type == "marked":
                places = _marked_states(name, _rows(hidden_BTD, rows_R), marks_BT, rows_R)
                inputs = torch.cat([inputs, *places], -1)
            out = self.linear(name)(self.dropout(inputs))
            if spec.type == "regression":
                lowest = spec.range[0]
                out = out.squeeze(-1) * spec.unit + lowest
            elif spec.type == "choice":
                out = out.squeeze(-1)
                joined.update(rows_R)
            elif spec.type == "span":
                padding_RT = ~_rows(token_mask_BT, rows_R)
                out = out.masked_fill(padding_RT[..., None], torch.finfo(out.dtype).min)
            outputs.update(zip(rows_R, out.unbind(0), strict=True))
        sequences = [outputs[number] for number in range(len(outputs))]
        return _joined(sequences, parts, joined)

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
            task_B: long, the index of each row's task; None when all rows have the first task. `row_tasks` selects
                them from those of sequences.
            scaled: divide each loss by the task's `chance_loss`, and that of N choices by log N, which gives tasks of
                all types the same weight.

        Returns:
            A float32 scalar per row, in nats, or for regression in squared units of the target; if `scaled`, as a
            multiple of the loss at chance.

        Raises:
            GraftError: there is no task with the index of a row.
        """
        losses: dict[int, Tensor] = {}
        for name, rows_R in self._by_task(task_B, len(predictions)):
            spec = self.specs[name]
            for alike_R in _by_shape(predictions, rows_R):
                out = torch.stack([predictions[row] for row in alike_R]).float()
                targets_R = _stacked(targets, alike_R, out.device)
                values_R = row_losses(spec, out, targets_R)
                if scaled:
                    values_R = values_R / _chance_loss(spec, out)
                losses.update(zip(alike_R, values_R.unbind(0), strict=True))
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


def row_tasks(task_B: Tensor | None, parts: Sequence[int] | None) -> Tensor | None:
    """Return the index of each row's task.

    Args:
        task_B: (B,) long, the index of each sequence's task; None when all have the first task.
        parts: the number of sequences of each row; None when each row has one.
    """
    if task_B is None or parts is None:
        return task_B
    ends = torch.tensor(parts).cumsum(0)
    return task_B[(ends - 1).to(task_B.device)]


def _joined(outputs: Sequence[Tensor], parts: Sequence[int] | None, choices: set[int]) -> list[Tensor]:
    """Return the outputs of sequences as predictions of rows.

    Args:
        outputs: an output per sequence.
        parts: the number of sequences of each row; None when each row has one.
        choices: the numbers of the sequences that are choices, whose outputs are joined even if there is one.
    """
    parts = [1] * len(outputs) if parts is None else parts
    if sum(parts) != len(outputs):
        raise GraftError(
            f"The rows of the batch have {sum(parts)} sequences in all (parts), but the batch has {len(outputs)}: give "
            "the number of sequences of each row."
        )
    predictions: list[Tensor] = []
    start = 0
    for count in parts:
        of_row = outputs[start : start + count]
        is_joined = count > 1 or start in choices
        predictions.append(torch.stack(list(of_row)) if is_joined else of_row[0])
        start += count
    return predictions


def _marked_states(
    name: str,
    hidden_RTD: Tensor,
    marks_BT: Tensor | None,
    rows: Sequence[int],
) -> list[Tensor]:
    """Return the mean hidden states (R, D) of the first and of the second marked place of some rows."""
    if marks_BT is None:
        raise GraftError(
            f"The batch has a row of the marked task {name}, but no marks: pass extras={{'marks': tensor}}, with 1 and "
            "2 at the tokens of the marked places."
        )
    marks_RT = _rows(marks_BT, rows).to(hidden_RTD.device)
    states = []
    for place in range(PLACES):
        at_place_RT = (marks_RT >> place) & 1
        states.append(pooled(hidden_RTD, at_place_RT, "mean"))
    return states


def _by_shape(predictions: Sequence[Tensor], rows: Sequence[int]) -> list[list[int]]:
    """Return rows in groups whose predictions have one shape."""
    groups: dict[torch.Size, list[int]] = {}
    for row in rows:
        groups.setdefault(predictions[row].shape, []).append(row)
    return list(groups.values())


def _chance_loss(spec: TaskSpec, predictions: Tensor) -> float:
    """Return the loss at chance of rows of one task; the number of choices is that of the predictions."""
    if spec.type == "choice":
        return math.log(max(2, predictions.shape[-1]))
    return spec.chance_loss


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
    if spec.type in ("classification", "marked", "choice"):
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
    | classification, marked | entropy over log C |
    | choice | entropy over log N for N choices |
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
    if spec.type in ("regression", "span"):
        return None
    log_probabilities = logits.log_softmax(-1)
    entropy = _entropy(log_probabilities) / math.log(logits.shape[-1])
    if spec.type == "tagging":
        return _largest_of_labeled(entropy, targets)
    return entropy


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
