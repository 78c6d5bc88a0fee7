"""Losses of a model's predictions before targets, whose logits are computed for a few tokens at a time.

The logits of all tokens in float32 are the largest tensor of a training step where the vocabulary is large. Here each
chunk of them is turned into its loss and into the gradients of its hidden states at once, and then it is freed. No
logits are computed twice.

Shape suffixes: B rows, N targets, d hidden width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graftlm.backbone import OutputLayer
from graftlm.grafted.losses import OLD_DOMAIN, Targets, distillation_loss, target_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

CHUNK_BYTES = {"cpu": 2**25}
"""Size of a chunk of float32 logits by the type of the device."""
OTHER_CHUNK_BYTES = 2**28
"""Size of a chunk on other devices, where few large operations are faster."""

LossOfChunk = Callable[[Tensor, slice], Tensor]
"""Takes the logits of a chunk, (n, V), and its place among the targets; returns a scalar."""


@dataclass(frozen=True)
class Predictions:
    """What a model predicts before each target, as hidden states or as logits.

    Attributes:
        values: (N, d) hidden states, or (N, V) logits if `output_layer` is None.
        output_layer: computes the logits of hidden states.
        body_output: the output of the body that the hidden states are from.
    """

    values: Tensor
    output_layer: OutputLayer | None = None
    body_output: object = None

    def select(self, is_selected: Tensor) -> Predictions:
        """Return the predictions before some targets.

        Args:
            is_selected: bool (N,)
        """
        return Predictions(self.values[is_selected], self.output_layer, self.body_output)

    def logits(self, values: Tensor) -> Tensor:
        """Return the logits of some values, which are part of `values`."""
        if self.output_layer is None:
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


def loss_with_distilled_rows(
    predictions: Predictions,
    targets: Targets,
    domain: Tensor,
    totals: Tensor,
    teach: Callable[[Tensor], Predictions],
) -> Tensor:
    """Compute a loss in which rows of the old domain follow a teacher's distributions instead of their labels.

    Args:
        predictions: the model's predictions before each target.
        targets: the targets of all rows.
        domain: (B,), 0 for the old domain.
        totals: the first entry is the divisor.
        teach: takes the indices of the old rows and returns the teacher's predictions before all their targets, in the
            order of the rows. It runs without gradients, and only if there are old rows.

    Returns:
        A float32 scalar in nats per target: the cross-entropy of the other rows plus KL(teacher || model) of the old
        rows, both divided by the number of all targets.
    """
    is_old_row = domain == OLD_DOMAIN
    old = is_old_row.nonzero().squeeze(-1)
    if not len(old):
        return language_loss(predictions, targets.labels, totals)
    is_old = is_old_row[targets.rows]
    new_loss = language_loss(predictions.select(~is_old), targets.labels[~is_old], totals)
    with torch.no_grad():
        taught = teach(old)
    return new_loss + divergence_loss(predictions.select(is_old), taught, totals)


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
        ctx: Any,
        loss: Callable[[Tensor, slice], Tensor],
        size: int,
        states: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        total = torch.zeros((), device=states.device)
        state_gradients = torch.empty_like(states)
        sums: list[Tensor | None] = [None] * len(parameters)
        for rows in _chunks(len(states), size):
            chunk = states[rows].detach().requires_grad_()
            with torch.enable_grad():
                part = loss(chunk, rows)
            chunk_gradient, *gradients = torch.autograd.grad(part, [chunk, *parameters], allow_unused=True)
            state_gradients[rows] = chunk_gradient
            sums = [_plus(before, gradient) for before, gradient in zip(sums, gradients, strict=True)]
            total += part.detach()
        ctx.save_for_backward(state_gradients, *sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if saved is None else saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors]
        return (None, None, *scaled)


def _plus(before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if before is None or gradient is None:
        return gradient if before is None else before
    return before.add_(gradient)
