"""Families whose structure is found: neutral residues act, decode with a cache as without it, and leave no trace."""

from __future__ import annotations

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.errors import GraftError, TapError
from graftlm.grafted.model import GraftedModel
from graftlm.testing import attach_graft, logits, randomise
from tiny import ALL_ENCODERS, MORE_FAMILIES, tiny_ids, tiny_model, tiny_tokenizer

DEFAULT = ("phi3", "gpt_oss", "opt", "bloom", "lfm2", "xlm-roberta")
PARAMS = [pytest.param(f, marks=[] if f in DEFAULT else [pytest.mark.slow]) for f in MORE_FAMILIES]
PADDED = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])


def grafted(family: str, **config: object) -> tuple[Backbone, GraftedModel]:
    backbone = Backbone.wrap(tiny_model(family), tiny_tokenizer(), family)
    return backbone, attach_graft(backbone, {"kind": "neutral-residues", "width": 6} | config).eval()


@pytest.mark.parametrize("family", PARAMS)
def test_neutral_residues_act_and_leave_no_bit(family: str) -> None:
    backbone, model = grafted(family)
    bare = logits(backbone.model, tiny_ids())
    with model:
        assert torch.equal(logits(model, tiny_ids()), bare), "an untrained graft changed bits"
        randomise(model, 0.3)
        assert (logits(model, tiny_ids()) - bare).abs().max() > 0.05
        described = model.grafts["graft"].describe(backbone)["spectrum"]  # type: ignore[operator]  # a Module's method
        assert len(described["backbone"]) == backbone.sites.n_layers
    assert torch.equal(logits(backbone.model, tiny_ids()), bare)


@pytest.mark.parametrize("family", [param for param in PARAMS if param.values[0] not in ALL_ENCODERS])
def test_cached_decoding_equals_recomputation(family: str) -> None:
    backbone, model = grafted(family)
    decoding = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with randomise(model, 0.3) as live:
        output = live.generate(
            tiny_ids(2, 12), attention_mask=PADDED, return_dict_in_generate=True, output_logits=True, **decoding
        )
        mask = torch.cat([PADDED, torch.ones(2, 5, dtype=torch.long)], 1)
        again = logits(live, output.sequences, attention_mask=mask, position_ids=backbone.sites.positions(mask))
    # BitNet rounds activations to eight bits, so a small difference grows.
    torch.testing.assert_close(torch.stack(output.logits, 1), again[:, -6:-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "kind"), [("gemma3n", "conditional-tasks"), ("mpt", "conditional-tasks")])
def test_what_a_family_can_not_do_is_refused(family: str, kind: str) -> None:
    tasks = {"tasks": {"topics": {"type": "classification", "labels": ["sport", "politics"]}}}
    backbone = Backbone.wrap(tiny_model(family), tiny_tokenizer(), family)
    with pytest.raises(TapError):
        logits(attach_graft(backbone, {"kind": kind, "attention": "blocks", "alignment": True, **tasks}), tiny_ids())


def test_documents_that_a_family_can_not_keep_apart_are_refused() -> None:
    _, model = grafted("opt")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with model, pytest.raises(GraftError) as error:
        logits(model, tiny_ids(1, 6), position_ids=positions)
    assert "data.boundaries" in str(error.value)


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["lora", "finetune"])
def test_baselines_train_on_mixtures_of_experts(family: str, kind: str) -> None:
    backbone = Backbone.wrap(tiny_model(family), tiny_tokenizer(), family)
    bare = logits(backbone.model, tiny_ids())
    with attach_graft(backbone, {"kind": kind}).train() as model:
        model(tiny_ids(), labels=tiny_ids()).loss.backward()
        trained = {name for name, p in model.trainable_parameters().items() if p.grad is not None}
        assert any("experts" in name for name in trained)
        assert any("layers.0.mlp" in name for name in trained)
    assert torch.equal(logits(backbone.model, tiny_ids()), bare)
