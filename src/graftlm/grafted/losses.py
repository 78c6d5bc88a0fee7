"""The language-modeling loss, its variants for new rows, and the distillation of old rows.

Shape suffixes: B rows, T tokens, N targets, V in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.backbone import TokenSelection
from graftlm.errors import GraftError

IGNORED = -100
"""The label of tokens that are not predicted."""

OLD_DOMAIN = 0
"""The value of `domain` in rows of the old domain."""


OldObjective = Literal["replay", "distil"]
NewObjective = Literal["cross-entropy", "dft"]


@dataclass(frozen=True)
class Objectives:
    """The losses of training rows.

    Attributes:
        old: the loss of rows of the old domain. `replay` predicts their tokens; `distil` is the divergence KL(bare
            backbone || model) at each of their tokens.
        new: the loss of other rows. `cross-entropy` is -log p(token); `dft` is -p(token) log p(token), in which
            p(token) has no gradient.
        anchor: the weight of KL(bare backbone || model) at each token of other rows, which is added to their loss.

    Raises:
        GraftError: an objective is unknown, or the weight is negative.
    """

    old: OldObjective = "replay"
    new: NewObjective = "cross-entropy"
    anchor: float = 0.0

    def __post_init__(self) -> None:
        for key, value, known in (
            ("old_objective", self.old, get_args(OldObjective)),
            ("new_objective", self.new, get_args(NewObjective)),
        ):
            if value not in known:
                raise GraftError(f"{key} is {value!r}, but {' or '.join(known)} is expected: choose one of them.")
        if not self.anchor >= 0:
            raise GraftError(f"anchor is {self.anchor}, but a weight of at least 0 is expected: set it to 0 or more.")

    @property
    def changes_new_rows(self) -> bool:
        """Whether the loss of new rows is another one than the cross-entropy."""
        return self.new != "cross-entropy" or self.anchor > 0

    @property
    def depends_on_domain(self) -> bool:
        """Whether the loss of a row depends on its domain."""
        return self.old == "distil" or self.changes_new_rows

    @property
    def reads_bare_model(self) -> bool:
        """Whether the losses need passes of the bare backbone."""
        return self.old == "distil" or self.anchor > 0


class Targets(TokenSelection):
    """The targets of a batch. The selected tokens are the N tokens before the targets.

    Args:
        labels: (B, T), aligned with the inputs; -100 for tokens that are not predicted. The first label of a row is
            never a target.

    Attributes:
        labels: (N,) the targets, row by row.
        rows: (N,) the row of each target.
    """

    def __init__(self, labels: Tensor) -> None:
        is_target = labels[:, 1:] != IGNORED
        super().__init__(functional.pad(is_target, (0, 1)))
        self.labels = labels.flatten()[self.positions + 1]
        self.rows = self.positions // labels.shape[1]
        self._all_labels = labels

    def of_rows(self, rows: Tensor) -> Targets:
        """Return the targets of some rows.

        Args:
            rows: indices of the rows.
        """
        return Targets(self._all_labels[rows])


def language_modelling_loss(logits: Tensor, labels: Tensor, totals: Tensor | None = None) -> Tensor:
    """Compute the log-perplexity in nats.

    This is the sum of -log p(label at t | text before t), divided by the number of targets.

    Args:
        logits: (B, T, V)
        labels: (B, T), aligned with the inputs; -100 for tokens that are not predicted. The first label of a row is
            never a target.
        totals: the first entry is the divisor; None counts the targets of `labels`.

    Returns:
        A float32 scalar, which is 0 without targets.
    """
    predictions = logits[:, :-1].reshape(-1, logits.shape[-1])
    return target_loss(predictions, labels[:, 1:].reshape(-1), totals)


def target_loss(logits: Tensor, targets: Tensor, totals: Tensor | None = None) -> Tensor:
    """Compute the sum of -log p(target) in nats, divided by the number of targets.

    Args:
        logits: (N, V)
        targets: (N,); -100 for tokens that are not predicted.
        totals: the first entry is the divisor; None counts the targets.

    Returns:
        A float32 scalar, which is 0 without targets.
    """
    nats = functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    count = (targets != IGNORED).sum() if totals is None else totals[0]
    return nats / count.clamp(min=1)


def reweighted_loss(logits: Tensor, targets: Tensor, totals: Tensor) -> Tensor:
    """Compute the loss of dynamic fine-tuning (Wu et al., 2025, arXiv 2508.05629).

    This is the sum of -p(target) log p(target), divided by the number of targets. The first factor has no gradient, so
    that tokens that the model thinks impossible move it little.

    Args:
        logits: (N, V)
        targets: (N,)
        totals: the first entry is the divisor.

    Returns:
        A float32 scalar, which is 0 without targets.
    """
    nats = functional.cross_entropy(logits.float(), targets, reduction="none")
    probabilities = torch.exp(-nats.detach())
    return (probabilities * nats).sum() / totals[0].clamp(min=1)


def distillation_loss(logits: Tensor, taught: Tensor, totals: Tensor) -> Tensor:
    """Compute the sum of KL(teacher || model) over targets in nats, divided by the number of targets.

    Args:
        logits: (N, V), the model's logits before each target. They may have further ones, of tokens that were added.
        taught: (N, V), the teacher's logits before each target.
        totals: the first entry is the divisor, which may count targets of other rows as well.

    Returns:
        A float32 scalar.
    """
    model_log_p = logits.float().log_softmax(-1)[..., : taught.shape[-1]]
    teacher_log_p = taught.float().log_softmax(-1)
    divergence = functional.kl_div(model_log_p, teacher_log_p, reduction="sum", log_target=True)
    return divergence / totals[0].clamp(min=1)


def loss_parts(lm_loss: Tensor | None, auxiliary_loss: Tensor | None) -> dict[str, Tensor | None]:
    """Return the loss and its detached parts: `loss` = `lm_loss` + `auxiliary_loss`.

    Args:
        lm_loss: the loss of the targets; without one, `loss` is None.
        auxiliary_loss: the loss of the grafts; None adds nothing.
    """
    loss = lm_loss
    if lm_loss is not None and auxiliary_loss is not None:
        loss = lm_loss + auxiliary_loss
    return {
        "loss": loss,
        "lm_loss": None if lm_loss is None else lm_loss.detach(),
        "auxiliary_loss": None if auxiliary_loss is None else auxiliary_loss.detach(),
    }
