"""Laws of bits: the backbone never changes, and an untrained or detached graft changes no bit of its logits."""

from __future__ import annotations

import pytest
import torch

from graftlm.backbone import Backbone, Site, Sites
from graftlm.grafted.model import GraftedModel
from graftlm.testing.laws.base import LawsBase
from graftlm.testing.passes import DOMAIN, attach_graft, logits, randomise, seeded_logits
from graftlm.testing.state import digest, tensors_of
from graftlm.testing.tiny import tiny_ids, tiny_model, tiny_tokenizer

PASSES = 10


class FrozenBackboneLaws(LawsBase):
    """Laws of the backbone's weights, flags and modes, and of untrained and detached grafts."""

    def test_training_never_changes_the_backbone(self, family: str) -> None:
        own = tensors_of(self.backbone(family).model)
        before = digest(own)
        with self.attach(family) as model:
            parameters = list(model.train().trainable_parameters().values())
            optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
            for step in range(3):
                ids = tiny_ids(seed=step)
                optimizer.zero_grad()
                model(ids, labels=ids, domain=DOMAIN).loss.backward()
                optimizer.step()
            assert all(tensor.grad is None for tensor in own.values())
            assert digest(own) == before

    def test_only_the_graft_trains_and_flags_and_modes_are_restored(self, family: str) -> None:
        live = self.backbone(family).model
        own = list(live.parameters())
        modules = list(live.modules())
        flags = [parameter.requires_grad for parameter in own]
        for number, parameter in enumerate(own):
            parameter.requires_grad_(number % 2 == 0)
        live.base_model.train()
        try:
            with self.backbone_stays(family), attach_graft(self.backbone(family), self.config) as model:
                trainable = {id(parameter) for parameter in model.trainable_parameters().values()}
                assert trainable
                assert trainable.isdisjoint({id(parameter) for parameter in own})
                assert not any(parameter.requires_grad for parameter in own)
                assert not any(module.training for module in modules)
        finally:
            live.eval()
            for parameter, flag in zip(own, flags, strict=True):
                parameter.requires_grad_(flag)

    def test_frozen_backbone_has_no_dropout_in_training_mode(self, family: str) -> None:
        with self.attach(family) as model:
            self.skip_copies(model)
            model.train()
            model.grafts.eval()  # The graft's own dropout is off.
            first = seeded_logits(model, tiny_ids(), seed=0)
            second = seeded_logits(model, tiny_ids(), seed=1)
            assert not any(module.training for module in self.backbone(family).model.modules())
        assert torch.equal(first, second)

    def test_untrained_graft_changes_no_bit(self, family: str) -> None:
        bare = logits(self.backbone(family).model, tiny_ids())
        with self.attach(family, trained=False) as model:
            if self.is_half(family):
                self.skip_copies(model)
            # The backbone runs the very same operations, and exact zeros are added. The same holds wherever a law
            # compares with `torch.equal`.
            untrained = logits(model, tiny_ids())
        if self.start:
            self.assert_close(family, untrained, bare, rtol=0.0, atol=self.start)
        else:
            assert torch.equal(untrained, bare)

    def test_untrained_graft_changes_nothing_in_training_mode(self, family: str) -> None:
        bare = logits(self.backbone(family).model, tiny_ids())
        with self.attach(family, trained=False) as model:
            self.skip_copies(model.train())
            # Where gradients are kept, other kernels may run.
            self.assert_close(family, seeded_logits(model, tiny_ids()), bare)

    def test_logits_keep_the_backbones_dtype(self) -> None:
        model_in_half = tiny_model(self.families[0], dtype=torch.bfloat16).bfloat16()
        backbone = Backbone.wrap(model_in_half, tiny_tokenizer())
        with attach_graft(backbone, self.config).eval() as model:
            self.skip_copies(model)
            randomise(model, self.spread)
            assert logits(model, tiny_ids()).dtype == torch.bfloat16

    def test_detached_graft_leaves_no_bit_and_can_be_attached_again(self, family: str) -> None:
        live = self.backbone(family).model
        bare = logits(live, tiny_ids())
        with self.attach(family) as model:
            graft = model.grafts["graft"]
            expected = logits(model, tiny_ids())
        change = (expected - bare).abs().max()
        assert change > 0.1, f"noise of {self.spread} changes logits by {change:.2g}, not by 0.1: raise `spread`"
        assert torch.equal(logits(live, tiny_ids()), bare)
        with GraftedModel(self.backbone(family), {"graft": graft}) as model:  # type: ignore[dict-item]
            assert torch.equal(logits(model.eval(), tiny_ids()), expected)

    def test_passes_leave_nothing_behind(self, family: str) -> None:
        ids = tiny_ids(length=5)
        with self.attach(family) as model:
            expected = logits(model, ids)
            for step in range(PASSES):
                logits(model, tiny_ids(1, length=2, seed=step))
            model.train()(ids, labels=ids, domain=DOMAIN).loss.backward()
            assert torch.equal(logits(model.eval(), ids), expected)

    def test_exception_in_a_pass_leaves_no_bit(self, family: str) -> None:
        live = self.backbone(family).model
        bare = logits(live, tiny_ids())

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with self.attach(family) as model:
            before = logits(model, tiny_ids())
            ffn = Sites(model.model).module(Site("ffn", 1))[0]
            with ffn.register_forward_pre_hook(fail), pytest.raises(ZeroDivisionError):
                logits(model, tiny_ids(seed=3))
            assert torch.equal(logits(model, tiny_ids()), before)
        assert torch.equal(logits(live, tiny_ids()), bare)
