"""The laws on backbones with added tokens. Rows of the laws contain both old and new tokens."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch

from graftlm.backbone import Backbone
from graftlm.grafts import build_graft, graft_config
from graftlm.testing import GraftLaws, attach_graft, logits, randomise
from graftlm.testing.passes import seeded_logits
from tiny import VOCABULARY, tiny_ids, tiny_model, tiny_tokenizer

FIRST = 292
"""Id of the first added token, such that the largest ids of `tiny_ids` are added tokens, and no logits are appended."""
TOKENS = [f" new{number}" for number in range(300 - FIRST)]


@functools.cache
def backbone(family: str) -> Backbone:
    name, _, ties = family.partition("+")
    model = tiny_model(name, **({"tie_word_embeddings": ties == "tied"} if ties else {}))
    return Backbone.wrap(model, tiny_tokenizer(FIRST), family).with_tokens(TOKENS)


class AddedTokensLaws(GraftLaws):
    """The laws of a graft on backbones with added tokens."""

    def backbone(self, family: str) -> Backbone:
        return backbone(family)

    def renew_backbones(self) -> None:
        backbone.cache_clear()

    def test_untrained_graft_changes_no_bit(self, family: str) -> None:
        """Where the text has no added token, the logits of old tokens are the backbone's."""
        ids = tiny_ids() % (FIRST - 10) + 4
        bare = logits(self.backbone(family).model, ids)
        with self.attach(family, trained=False) as model:
            untrained = logits(model, ids)
        assert torch.equal(untrained[..., :FIRST], bare[..., :FIRST])
        assert untrained.shape[-1] == VOCABULARY

    def test_untrained_graft_changes_nothing_in_training_mode(self, family: str) -> None:
        ids = tiny_ids() % (FIRST - 10) + 4
        bare = logits(self.backbone(family).model, ids)
        with self.attach(family, trained=False) as model:
            self.skip_copies(model.train())
            untrained = seeded_logits(model, ids)
        self.assert_close(family, untrained[..., :FIRST], bare[..., :FIRST])

    def test_logits_keep_the_backbones_dtype(self) -> None:
        name, _, _ = self.families[0].partition("+")
        in_half = Backbone.wrap(tiny_model(name, dtype=torch.bfloat16).bfloat16(), tiny_tokenizer(FIRST))
        with attach_graft(in_half.with_tokens(TOKENS), self.config).eval() as model:
            self.skip_copies(model)
            randomise(model, self.spread)
            assert logits(model, tiny_ids()).dtype == torch.bfloat16

    def test_the_rows_have_an_effect(self, family: str) -> None:
        ids = tiny_ids()
        assert (ids >= FIRST).any()
        with self.attach(family, trained=False) as untrained:
            before = logits(untrained, ids)
        with self.attach(family, trained=False) as model:
            rows = model.grafts["graft"].token_rows
            with torch.no_grad():
                rows.embedding.weight.add_(1.0)  # type: ignore[union-attr]
            after = logits(model, ids)
        assert (after - before).abs().max() > 0.01


class TestAdapters(AddedTokensLaws):
    config: ClassVar[dict[str, Any]] = {"kind": "neutral-residues", "alpha": 1.0}
    families = ("gemma3+tied",)


class TestLora(AddedTokensLaws):
    config: ClassVar[dict[str, Any]] = {"kind": "lora", "rank": 4}
    families = ("llama+untied",)
    start = 1e-5


class TestFineTuning(AddedTokensLaws):
    config: ClassVar[dict[str, Any]] = {"kind": "finetune"}
    families = ("gpt2",)


def test_the_laws_hold_for_tied_and_untied_backbones() -> None:
    tied = []
    for laws in (TestAdapters, TestLora, TestFineTuning):
        graft = build_graft(graft_config(dict(laws.config)), backbone(laws.families[0]))
        assert graft.token_rows is not None
        tied.append(graft.token_rows.head is None)
    assert tied == [True, False, True]
