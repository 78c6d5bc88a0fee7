"""The language-modelling loss, and the distillation of old rows.

Shape suffixes: B rows, T tokens, V in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""The label of tokens that are not predicted."""

OLD_DOMAIN = 0


def language_modelling_loss(logits: Tensor, labels: Tensor, totals: Tensor | None = None) -> Tensor:
    """Compute the log-perplexity in nats.

    This is the sum of -log p(label at t | text before t), divided by the number of targets.

    Args:
        logits: (B, T, V)
        labels: (B, T), aligned with the inputs; -100 for tokens that are not predicted.
        totals: the first entry is the divisor; None counts the targets of `labels`.
    """
    targets = labels[:, 1:].reshape(-1)
    predictions = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    nats = functional.cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")
    count = (targets != IGNORED).sum() if totals is None else totals[0]
    return nats / count.clamp(min=1)


def distillation_loss(logits: Tensor, taught: Tensor, labels: Tensor, totals: Tensor) -> Tensor:
    """Compute the sum of KL(teacher || model) over the targets in nats, divided by the number of targets.

    Args:
        logits: (B, T, V), of the model.
        taught: (B, T, V), of the teacher.
        labels: (B, T), aligned with the inputs; the position before each label other than -100 is a target.
        totals: the first entry is the divisor.
    """
    targets = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    own = logits[:, :-1][targets].float().log_softmax(-1)
    other = taught[:, :-1][targets].float().log_softmax(-1)
    divergence = functional.kl_div(own, other, reduction="sum", log_target=True)
    return divergence / totals[0].clamp(min=1)


def loss_with_distilled_rows(
    logits: Tensor,
    labels: Tensor,
    domain: Tensor,
    totals: Tensor | None,
    teach: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute a loss in which rows of the old domain follow a teacher's distributions instead of their labels.

    Args:
        logits: (B, T, V), of the model.
        labels: (B, T), aligned with the inputs; -100 for tokens that are not predicted.
        domain: (B,), 0 for the old domain.
        totals: the first entry is the divisor; None counts the targets of `labels`.
        teach: returns the teacher's logits (rows, T, V) of rows with these indices; not called without old rows.
    """
    if totals is None:
        totals = (labels[:, 1:] != IGNORED).sum()[None]
    old = (domain == OLD_DOMAIN).nonzero().squeeze(-1)
    new_labels = labels.index_fill(0, old, IGNORED)
    loss = language_modelling_loss(logits, new_labels, totals)
    if len(old):
        with torch.no_grad():
            taught = teach(old)
        loss = loss + distillation_loss(logits[old], taught, labels[old], totals)
    return loss


def loss_parts(lm_loss: Tensor | None, auxiliary_loss: Tensor | None) -> dict[str, Tensor | None]:
    """Return the loss and its detached parts: `loss` = `lm_loss` + `auxiliary_loss`."""
    loss = lm_loss
    if lm_loss is not None and auxiliary_loss is not None:
        loss = lm_loss + auxiliary_loss
    return {
        "loss": loss,
        "lm_loss": None if lm_loss is None else lm_loss.detach(),
        "auxiliary_loss": None if auxiliary_loss is None else auxiliary_loss.detach(),
    }
