"""The language-modeling loss, and the distillation of old rows.

Shape suffixes: B rows, T tokens, N targets, V in the vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from graftlm.backbone import TokenSelection

IGNORED = -100
"""The label of tokens that are not predicted."""

OLD_DOMAIN = 0
"""The value of `domain` in rows of the old domain."""


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
