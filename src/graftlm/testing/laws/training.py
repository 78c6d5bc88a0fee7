"""Laws of training: the loss falls, gradients reach every parameter, and losses of micro-batches add up."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.grafted.model import GraftedModel
from graftlm.testing.laws.base import LawsBase, decoders_only
from graftlm.testing.passes import DOMAIN, gradients, is_encoder, losses_of, pad_rows, rows_of
from graftlm.testing.tiny import tiny_ids

LEAST_FALL = 0.05
"""The least decrease of the loss in eight steps, in nats."""


class TrainingLaws(LawsBase):
    """Laws of losses and gradients."""

    def test_loss_falls_on_one_batch(self, family: str) -> None:
        ids = tiny_ids()
        losses: list[float] = []
        with self.attach(family, trained=False) as model:
            parameters = model.train().trainable_parameters().values()
            optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate)
            for _ in range(8):
                loss = _loss_of(model, ids, family)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert losses[-1] < losses[0] - LEAST_FALL, losses

    def test_every_parameter_gets_a_gradient(self, family: str) -> None:
        with self.attach(family) as model:
            parameters = model.train().trainable_parameters()
            dead = list(parameters)
            # A single batch may not reach every parameter, for example if a router chooses.
            for seed in range(4):
                torch.stack(list(losses_of(model, tiny_ids(seed=seed)))).sum().backward()
                dead = [name for name, parameter in parameters.items() if not _has_gradient(parameter)]
                if not dead:
                    break
        assert not dead, "these parameters are trained, but no loss reaches them"

    @decoders_only
    def test_losses_of_micro_batches_add_up(self, family: str) -> None:
        rows = rows_of(24, 17)
        ids, mask = pad_rows(rows, "right")
        labels = ids.masked_fill(mask == 0, -100)
        totals = torch.tensor([23.0 + 16, 24, 17])
        with self.attach(family) as model:
            expected = gradients(model, input_ids=ids, attention_mask=mask, labels=labels, domain=DOMAIN)
            parts = [
                gradients(model, input_ids=row[None], labels=row[None], domain=domain, totals=totals)
                for row, domain in zip(rows, DOMAIN.split(1), strict=True)
            ]
        assert expected
        for name, gradient in expected.items():
            zero = torch.zeros_like(gradient)
            total = torch.stack([part.get(name, zero) for part in parts]).sum(0)
            self.assert_close(family, total, gradient, name, rtol=1e-3, atol=1e-5)


def _loss_of(model: GraftedModel, ids: Tensor, family: str) -> Tensor:
    """Return the loss of one batch; an encoder attends to the token that it predicts, so it learns to repeat it."""
    output = model(ids, labels=ids, domain=DOMAIN)
    if is_encoder(family):
        return functional.cross_entropy(output.logits.float().flatten(0, 1), ids.flatten())
    return output.loss


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.count_nonzero())
