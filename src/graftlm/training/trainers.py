"""Domains in trainers of transformers and TRL: `class MyTrainer(DomainTrainer, transformers.Trainer): ...`.

A `GraftedModel` goes into a trainer as it is. An auxiliary loss needs more than trainers give: the column `domain` in
every batch, and each domain's tokens counted over the whole optimiser step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from graftlm.data.rows import Batch
from graftlm.errors import TrainingError


@dataclass
class DomainCollator:
    """Adds the rows' `domain` to the batch of another collator; `TrainingError` where a row has none, or not 0 or 1."""

    collate: Callable[[list[Any]], Mapping[str, Any]]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = dict(self.collate([{name: row[name] for name in row if name != "domain"} for row in rows]))
        if any("domain" not in row for row in rows) or len(batch["input_ids"]) != len(rows):
            raise TrainingError(
                "Rows of the batch have no `domain` of their own: give every row that column, 0 for old text and 1 for "
                "new, and leave out packing and padding_free."
            )
        domain = torch.tensor([int(row["domain"]) for row in rows])
        if wrong := set(domain.tolist()) - {0, 1}:
            raise TrainingError(f"A row has the domain {min(wrong)}, not 0 or 1: give old text 0 and new text 1.")
        return batch | {"domain": domain}


class DomainTrainer(Trainer if TYPE_CHECKING else object):
    """A mix-in, put before `transformers.Trainer` or TRL's `SFTTrainer`: rows have `domain`, 0 for old text, 1 for new.

    The loss is that of `GraftedModel.forward`, with each mean taken over the optimiser step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.compute_loss_func or self.label_smoother or getattr(self.args, "loss_type", "nll") != "nll":
            raise TrainingError(
                "The trainer has a loss of its own, without the graft's auxiliary loss: leave out compute_loss_func, "
                "label_smoothing_factor and loss_type."
            )
        self._step_totals: Any = None  # (3,), see `Call.totals`
        self.data_collator = DomainCollator(self.data_collator)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*(self._signature_columns or ()), "domain"})

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of one optimiser step, whose tokens are counted here."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            names = ("input_ids", "labels", "attention_mask", "position_ids", "domain")
            counts = [Batch(*map(batch.get, names)).totals() for batch in batches]
            self._step_totals = torch.stack(counts).sum(0).to(device)
            if self.args.average_tokens_across_devices:
                self._step_totals = self.accelerator.reduce(self._step_totals, "sum")
        return batches, items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss; TRL's would leave out the auxiliary loss."""
        totals = {"totals": self._step_totals} if model.training else {}
        return Trainer.compute_loss(self, model, {**inputs, **totals}, return_outputs, num_items_in_batch)
