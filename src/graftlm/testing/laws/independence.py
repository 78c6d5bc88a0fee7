"""Laws of independence: no token depends on a later one, on padding, on other rows or on other packed documents."""

from __future__ import annotations

import pytest
import torch

from graftlm.grafted.model import GraftedModel
from graftlm.testing.laws.base import LENGTHS, LawsBase, decoders_only
from graftlm.testing.passes import logits, pad_rows, positions_of, rows_of, seeded_logits
from graftlm.testing.tiny import WINDOW, tiny_ids


class IndependenceLaws(LawsBase):
    """Laws of what a token's logits may depend on."""

    @decoders_only
    def test_no_logit_depends_on_a_later_token(self, family: str) -> None:
        with self.attach(family) as model:
            self.check_causality(family, model)

    @decoders_only
    def test_no_logit_depends_on_a_later_token_in_training(self, family: str) -> None:
        with self.attach(family) as model:
            self.check_causality(family, model.train())

    def check_causality(self, family: str, model: GraftedModel) -> None:
        """Fail unless a changed token changes the logits from its position on, and none before it.

        Args:
            family: the backbone's family.
            model: the grafted model, in the mode to test.
        """
        length = self.lengths(family)[0]
        ids = tiny_ids(length=length)
        before = seeded_logits(model, ids)
        for position in (length - 1, length // 2):
            changed = ids.clone()
            changed[:, position] = (changed[:, position] + 1) % 250 + 4
            after = seeded_logits(model, changed)
            self.assert_close(family, after[:, :position], before[:, :position])
            difference = (after[:, position:] - before[:, position:]).abs().amax((0, 2))
            assert difference[:WINDOW].gt(1e-3).all(), "the change must show from its position on"

    def test_no_row_depends_on_another_in_training(self, family: str) -> None:
        ids = tiny_ids()
        other = tiny_ids(seed=1)
        other[0] = ids[0]
        with self.attach(family) as model:
            model.train()
            before = seeded_logits(model, ids)
            after = seeded_logits(model, other)
        self.assert_close(family, after[0], before[0])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_and_other_rows_change_nothing(self, family: str, side: str) -> None:
        rows = rows_of(*(self.lengths(family) if side == "left" else LENGTHS))
        ids, mask = pad_rows(rows, side)
        first = 1 if "roberta" in family else 0  # RoBERTa counts from the padding token's id + 1.
        positions = torch.where(mask == 1, positions_of(mask) + first, 0)
        with self.attach(family) as model:
            together = logits(model, ids, attention_mask=mask, position_ids=positions)
            for number, row in enumerate(rows):
                alone = logits(model, row[None])[0]
                self.assert_close(family, together[number][mask[number] == 1], alone)

    @decoders_only
    def test_packed_documents_do_not_meet(self, family: str) -> None:
        lengths = self.lengths(family)
        rows = rows_of(*lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        with self.attach(family) as model:
            together = logits(model, torch.cat(rows)[None], position_ids=positions[None])[0]
            for row, part in zip(rows, together.split(lengths), strict=True):
                self.assert_close(family, part, logits(model, row[None])[0])
