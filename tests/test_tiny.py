"""The tiny backbones are random everywhere, and their logits depend on all tokens that they may see."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from cases import thinned
from tiny import DECODERS, FAMILIES, PAD, TOKENS, USUAL, WINDOW, BackboneFolder, tiny_ids, tiny_model, tiny_tokenizer

TEXT = "Où est «ça»? 日本 \n\tx = {1: 'y'}  "


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_tiny_backbone_is_random_everywhere_and_reproducible(family: str) -> None:
    model = tiny_model(family)
    same = dict(tiny_model(family).named_parameters())
    other = dict(tiny_model(family, seed=1).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.05, name
        assert torch.equal(parameter, same[name]), name
        assert not torch.equal(parameter, other[name]), name
    logits = model(tiny_ids()).logits
    assert 0.5 < logits.std() < 3
    assert not model.training


def test_copies_share_no_tensor_and_keep_tied_ones() -> None:
    model = tiny_model("gemma3")
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert not model.get_output_embeddings().weight.any()
    assert tiny_model("gemma3").get_input_embeddings().weight.all()


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_each_token_changes_later_logits_and_no_earlier_ones(family: str) -> None:
    model = tiny_model(family)
    ids = tiny_ids(1)
    changed = ids.clone()
    changed[0, 5] = ids[0, 6]
    difference = (model(ids).logits - model(changed).logits).abs().amax(-1)[0]
    assert difference[:5].max() == 0
    assert (difference[5 : 5 + WINDOW] > 0.05).all()


@pytest.mark.parametrize("family", thinned(FAMILIES, USUAL))
@torch.no_grad()
def test_a_saved_backbone_loads_unchanged(tiny_backbone: BackboneFolder, family: str) -> None:
    folder = tiny_backbone(family)
    loader = AutoModelForCausalLM if family in DECODERS else AutoModelForMaskedLM
    loaded = loader.from_pretrained(folder)
    torch.testing.assert_close(loaded(tiny_ids()).logits, tiny_model(family)(tiny_ids()).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == TOKENS
    assert tokenizer(["a", TEXT], padding=True)["input_ids"][0][0] == PAD
