"""Laws 7 and 8: no token sees a later one, and neither padding, neighbours in the batch nor packed documents matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laws.examples import Example
from laws.tools import logits, padded, positions
from tiny import tiny_ids

CLOSE = {"rtol": 1e-5, "atol": 2e-5}  # logits are of the order of 5
LENGTHS = (24, 13, 19)


def rows() -> list[Tensor]:
    return [tiny_ids(1, length, seed=length)[0] for length in LENGTHS]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_no_logit_depends_on_a_later_token(example: Example, name: str, training: bool, attach: Any) -> None:
    model = attach(example, name).train(training)
    ids = tiny_ids()
    torch.manual_seed(0)  # the same dropout each time, for who trains with it
    before = logits(model, ids)
    for place in (23, 12):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 250 + 4
        torch.manual_seed(0)
        after = logits(model, changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], **CLOSE)
        change = (after[:, place:] - before[:, place:]).abs().amax((0, 2))
        assert change.gt(1e-3).all(), "the change must show from there on"


@pytest.mark.encoders
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_neighbours_change_nothing(example: Example, name: str, side: str, attach: Any) -> None:
    model = attach(example, name)
    ids, mask = padded(rows(), side)
    first = 1 if name == "roberta" else 0  # RoBERTa counts from after the padding token's id
    places = torch.where(mask == 1, positions(mask) + first, 0)
    together = logits(model, ids, attention_mask=mask, position_ids=places)
    for i, row in enumerate(rows()):
        torch.testing.assert_close(together[i][mask[i] == 1], logits(model, row[None])[0], **CLOSE)


@pytest.mark.law("packed")
def test_packed_documents_do_not_meet(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name)
    counted = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        together = model(torch.cat(rows())[None], position_ids=counted).logits[0]
    for row, found in zip(rows(), together.split(LENGTHS), strict=True):
        torch.testing.assert_close(found, logits(model, row[None])[0], **CLOSE)
