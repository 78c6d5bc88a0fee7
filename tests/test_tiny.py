"""The tiny backbones are worth testing with: nothing in them is zero, and their logits say something."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from tiny import DECODERS, FAMILIES, PAD, TOKENS, WINDOW, BackboneFolder, tiny_ids, tiny_model, tiny_tokenizer

TEXT = "Où est «ça»? 日本 \n\tx = {1: 'y'}  "


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_tiny_backbone_is_random_everywhere_and_the_same_again(family: str) -> None:
    model, again, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    for (name, one), two, three in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert one.std() > 0.05, f"{name} is flat"
        assert torch.equal(one, two), f"{name} differs between two models of one seed"
        assert not torch.equal(one, three), f"{name} does not depend on the seed"
    logits = model(tiny_ids()).logits
    assert 0.5 < logits.std() < 3
    assert not model.training


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_each_token_tells_on_those_after_it_and_on_none_before(family: str) -> None:
    model, ids = tiny_model(family), tiny_ids(1)
    changed = ids.clone()
    changed[0, 5] = ids[0, 6]
    moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0]
    assert moved[:5].max() == 0
    assert (moved[5 : 5 + WINDOW] > 0.05).all()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_saved_backbone_loads_as_it_was(tiny_backbone: BackboneFolder, family: str) -> None:
    folder = tiny_backbone(family)
    loader = AutoModelForCausalLM if family in DECODERS else AutoModelForMaskedLM
    torch.testing.assert_close(loader.from_pretrained(folder)(tiny_ids()).logits, tiny_model(family)(tiny_ids()).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == TOKENS
    assert tokenizer(["a", TEXT], padding=True)["input_ids"][0][0] == PAD
