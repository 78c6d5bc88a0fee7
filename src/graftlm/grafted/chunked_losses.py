"""Losses of a model's predictions before targets, whose logits are computed for a few tokens at a time.

The logits of all tokens in float32 are the largest tensor of a training step where the vocabulary is large. Here each
chunk of them is turned into its loss and into the gradients of its hidden states at once, and then it is freed. No
logits are computed twice.

Shape suffixes: B rows, N targets, d hidden width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from graftlm.backbone import Backbone, OutputLayer
from graftlm.grafted.losses import OLD_DOMAIN, Objectives, Targets, distillation_loss, reweighted_loss, target_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

CHUNK_BYTES = {"cpu": 2**25}
"""Size of a chunk of float32 logits by the type of the device."""
OTHER_CHUNK_BYTES = 2**27
"""Size of a chunk on other devices, where few large operations are faster. It was not tuned on one yet."""

LossOfChunk = Callable[[Tensor, slice], Tensor]
"""Takes the logits of a chunk, (n, V), and its place among the targets; returns a scalar."""


@dataclass(frozen=True)
class Predictions:
    """What a model predicts before each target, as hidden states or as logits.

    Attributes:
        values: (N, d) hidden states, or (N, V) logits if `output_layer` is None.
        output_layer: computes the logits of hidden states.
        body_output: the output of the body that the hidden states are from; None for logits.
    """

    values: Tensor
    output_layer: OutputLayer | None = None
    body_output: ModelOutput | None = None

    def select(self, is_selected: Tensor) -> Predictions:
        """Return the predictions before some targets.

        Args:
            is_selected: bool (N,)
        """
        return Predictions(self.values[is_selected], self.output_layer, self.body_output)

    def logits(self, values: Tensor) -> Tensor:
        """Return the logits of some values, which are part of `values`."""
        if self.output_layer is None or self.body_output is None:
            return values
        return self.output_layer.logits(values, self.body_output)

    def sum(self, loss: LossOfChunk) -> Tensor:
        """Return the sum of a loss over all targets.

        Args:
            loss: the loss of a chunk, by a sum over its targets.

        Returns:
            A float32 scalar. Where the values are hidden states, its gradients can be taken once.
        """
        if self.output_layer is None:
            return loss(self.values, slice(0, len(self.values)))
        parameters = self.output_layer.trainable_parameters()
        size = chunk_size(self.output_layer.vocabulary, self.values.device)

        def of_values(values: Tensor, rows: slice) -> Tensor:
            return loss(self.logits(values), rows)

        if torch.is_grad_enabled() and (self.values.requires_grad or parameters):
            return _SumInChunks.apply(of_values, size, self.values, *parameters)
        total = torch.zeros((), device=self.values.device)
        for rows in _chunks(len(self.values), size):
            total = total + of_values(self.values[rows], rows)
        return total


def predict_targets(
    model: PreTrainedModel,
    output_layer: OutputLayer | None,
    targets: Targets,
    inputs: Mapping[str, object],
) -> tuple[ModelOutput, Predictions]:
    """Run a model without the logits of other tokens than those before targets.

    Args:
        model: the model.
        output_layer: its output layer; None computes all logits before targets in the pass.
        targets: the targets of the inputs.
        inputs: inputs of the model.

    Returns:
        The output of the model or of its body, and the predictions before the targets.
    """
    if output_layer is None:
        with targets.before_head(model):
            output = model(**inputs)
        return output, Predictions(targets.logits(output.logits))
    output = model.base_model(**inputs)
    return output, Predictions(targets.take(output[0]), output_layer, output)


def language_loss(predictions: Predictions, targets: Tensor, totals: Tensor) -> Tensor:
    """Compute `target_loss` of predictions.

    Args:
        predictions: the predictions before each target.
        targets: (N,)
        totals: the first entry is the divisor.

    Returns:
        A float32 scalar, which is 0 without targets.
    """
    return predictions.sum(lambda logits, rows: target_loss(logits, targets[rows], totals))


def divergence_loss(predictions: Predictions, taught: Predictions, totals: Tensor) -> Tensor:
    """Compute `distillation_loss` of predictions. Gradients flow to the model, not to the teacher.

    Args:
        predictions: the model's predictions before each target.
        taught: the teacher's.
        totals: the first entry is the divisor.

    Returns:
        A float32 scalar, which is 0 without targets.
    """

    def loss(logits: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            taught_logits = taught.logits(taught.values[rows])
        return distillation_loss(logits, taught_logits, totals)

    return predictions.sum(loss)


@dataclass(frozen=True)
class DomainLosses:
    """What the losses of old and new rows need.

    Attributes:
        objectives: the losses.
        backbone: the backbone, whose bare model rows may follow.
        inputs: `input_ids`, `attention_mask` and `position_ids` of all rows.
        domain: (B,), 0 for the old domain.
    """

    objectives: Objectives
    backbone: Backbone
    inputs: Mapping[str, Tensor | None]
    domain: Tensor

    @torch.no_grad()
    def taught(self, targets: Targets, is_row: Tensor) -> Predictions:
        """Return what the bare backbone predicts before the targets of some rows, in the order of the rows.

        Args:
            targets: the targets of all rows.
            is_row: bool (B,), True for the rows to read.
        """
        rows = is_row.nonzero().squeeze(-1)
        inputs = {name: None if value is None else value[rows] for name, value in self.inputs.items()}
        given = {**inputs, "use_cache": False}
        model = self.backbone.bare_model
        return predict_targets(model, self.backbone.bare_output_layer, targets.of_rows(rows), given)[1]


def loss_of_targets(
    predictions: Predictions,
    targets: Targets,
    totals: Tensor | None = None,
    losses: DomainLosses | None = None,
) -> Tensor:
    """Compute the loss of targets.

    Args:
        predictions: the predictions before each target.
        targets: the targets of all rows.
        totals: the first entry is the divisor; None counts the targets.
        losses: the losses by domain; the bare backbone reads no rows that do not follow it. None follows the labels in
            all rows.

    Returns:
        A float32 scalar in nats per target: the sum of the losses of old and new rows, both divided by the number of
        all targets.
    """
    if totals is None:
        totals = torch.full((1,), len(targets.labels), device=targets.labels.device)
    if losses is None:
        return language_loss(predictions, targets.labels, totals)
    is_old_row = losses.domain == OLD_DOMAIN
    has_old_rows = bool(is_old_row.any())
    if not has_old_rows and not losses.objectives.changes_new_rows:
        return language_loss(predictions, targets.labels, totals)
    is_old = is_old_row[targets.rows]
    new = _loss_of_new_rows(predictions.select(~is_old), targets, ~is_old_row, totals, losses)
    if not has_old_rows:
        return new
    old = predictions.select(is_old)
    if losses.objectives.old == "distil":
        return new + divergence_loss(old, losses.taught(targets, is_old_row), totals)
    return new + language_loss(old, targets.labels[is_old], totals)


def _loss_of_new_rows(
    predictions: Predictions,
    targets: Targets,
    is_new_row: Tensor,
    totals: Tensor,
    losses: DomainLosses,
) -> Tensor:
    """Compute the loss of new rows.

    Args:
        predictions: the predictions before the targets of the new rows.
        targets: the targets of all rows.
        is_new_row: bool (B,)
        totals: the first entry is the divisor.
        losses: the losses by domain.
    """
    objectives = losses.objectives
    labels = targets.labels[is_new_row[targets.rows]]
    loss_of_labels = reweighted_loss if objectives.new == "dft" else target_loss
    taught = None
    if objectives.anchor > 0 and len(labels):
        taught = losses.taught(targets, is_new_row)

    def loss(logits: Tensor, rows: slice) -> Tensor:
        of_labels = loss_of_labels(logits, labels[rows], totals)
        if taught is None:
            return of_labels
        with torch.no_grad():
            taught_logits = taught.logits(taught.values[rows])
        return of_labels + objectives.anchor * distillation_loss(logits, taught_logits, totals)

    return predictions.sum(loss)


def chunk_size(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens of a chunk.

    Args:
        vocabulary: V
        device: the device of the logits.
    """
    size = CHUNK_BYTES.get(device.type, OTHER_CHUNK_BYTES)
    return max(1, size // (4 * vocabulary))


def _chunks(count: int, size: int) -> Sequence[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


class _SumInChunks(torch.autograd.Function):
    """The sum of a loss over chunks of hidden states. The forward pass computes the gradients as well."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        loss: Callable[[Tensor, slice], Tensor],
        size: int,
        states: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        total = torch.zeros((), device=states.device)
        state_gradients = torch.empty_like(states)
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for rows in _chunks(len(states), size):
            chunk = states[rows].detach().requires_grad_()
            with torch.enable_grad():
                part = loss(chunk, rows)
            gradients = torch.autograd.grad(part, [chunk, *parameters], materialize_grads=True)
            state_gradients[rows] = gradients[0]
            for total_gradient, gradient in zip(sums, gradients[1:], strict=True):
                total_gradient += gradient
            total += part.detach()
        ctx.save_for_backward(state_gradients, *sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _SumInChunks, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors]
        return (None, None, *scaled)
