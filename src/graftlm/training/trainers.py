"""Domains in trainers of transformers and TRL: `class MyTrainer(DomainTrainer, transformers.Trainer): ...`.

Trainers take a `GraftedModel` as any other model. An auxiliary loss needs two things that they lack: the column
`domain` in every batch, and each domain's tokens counted over the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from graftlm.data.rows import Batch
from graftlm.errors import TrainingError

OLD_OR_NEW = (0, 1)


@dataclass
class DomainCollator:
    """Add the rows' `domain`, (B,) int64, to the batch of another collator.

    Args:
        collate: the other collator, which gets the rows without `domain`. It must return `input_ids` with one row for
            each of them.

    Raises:
        TrainingError: when called, if a row has no `domain` or another one than 0 or 1, or if `collate` returns another
            number of rows.
    """

    collate: Callable[[list[Any]], Mapping[str, Any]]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        without_domain = [{name: value for name, value in row.items() if name != "domain"} for row in rows]
        batch = dict(self.collate(without_domain))
        if not all("domain" in row for row in rows):
            raise TrainingError(
                "A row of the batch has no `domain`, but every row needs one: give the data set that column, 0 for old "
                "text and 1 for new, and leave out packing, which drops it."
            )
        if len(batch["input_ids"]) != len(rows):
            raise TrainingError(
                f"The collator made a batch of {len(batch['input_ids'])} from {len(rows)} examples, but each example "
                "needs its own row: leave out packing and padding_free."
            )
        for row in rows:
            if row["domain"] not in OLD_OR_NEW:
                raise TrainingError(
                    f"A row has the domain {row['domain']!r}, but 0 or 1 is expected: give old text 0 and new text 1."
                )
        batch["domain"] = torch.tensor([int(row["domain"]) for row in rows])
        return batch


class DomainTrainer(Trainer if TYPE_CHECKING else object):
    """A mix-in before `transformers.Trainer` or TRL's `SFTTrainer` for rows with `domain`: 0 old text, 1 new text.

    The loss is that of `GraftedModel.forward`, with each mean taken over the optimizer step. The trainer's data
    collator is wrapped in a `DomainCollator`, so batches with packing or `padding_free` are refused.

    Args:
        args: positional arguments of the trainer.
        kwargs: keyword arguments of the trainer.

    Raises:
        TrainingError: the trainer has a `compute_loss_func`, a `label_smoothing_factor`, or another `loss_type` than
            `nll`, and so computes another loss than the model's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own_losses = {
            "compute_loss_func": bool(self.compute_loss_func),
            "label_smoothing_factor": bool(self.label_smoother),
            "loss_type": getattr(self.args, "loss_type", "nll") != "nll",
        }
        set_options = [name for name, is_set in own_losses.items() if is_set]
        if set_options:
            names = " and ".join(set_options)
            raise TrainingError(
                f"The trainer has {names} and would compute its own loss, but the graft's auxiliary loss is part of "
                f"the model's: leave out {names}."
            )
        self._step_totals: Tensor | None = None  # (3,), see `Call.totals`
        self.data_collator = DomainCollator(self.data_collator)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns or ()
        self._signature_columns = list({*columns, "domain"})

    def get_batch_samples(
        self,
        epoch_iterator: Iterator[Any],
        num_batches: int,
        device: torch.device,
    ) -> tuple[list[object], Any]:
        """Draw the batches of one optimizer step, and count their tokens by domain.

        Args:
            epoch_iterator: the remaining batches of the epoch.
            num_batches: maximum number of batches to draw.
            device: device of the counts.

        Returns:
            The batches and the number of target tokens, as `transformers.Trainer` returns them.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            counts = [_as_batch(batch).totals() for batch in batches]
            totals = torch.stack(counts).sum(0).to(device)
            if self.args.average_tokens_across_devices:
                totals = self.accelerator.reduce(totals, "sum")
            self._step_totals = totals  # type: ignore[assignment]  # a tensor in, a tensor out
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, object],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss of `model.forward`. TRL's own `compute_loss` would leave out the auxiliary loss.

        Args:
            model: the model in training or evaluation mode. In training, its means are over the optimizer step.
            inputs: a batch of the data collator.
            return_outputs: whether to return the model's output too.
            num_items_in_batch: number of target tokens of the optimizer step.

        Returns:
            The loss, or (loss, output), as `transformers.Trainer` returns them.
        """
        inputs = dict(inputs)
        if model.training:
            inputs["totals"] = self._step_totals
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def _as_batch(batch: Mapping[str, Any]) -> Batch:
    return Batch(
        input_ids=batch["input_ids"],
        labels=batch["labels"],
        attention_mask=batch.get("attention_mask"),
        position_ids=batch.get("position_ids"),
        domain=batch["domain"],
    )
