"""Pairs, parameters, and one sentence for each mistake."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composition.tools import OTHER_TOKENS, composition, live
from graftlm.backbone import Backbone
from graftlm.errors import BackboneError, GraftError, RecipeError, WrongBackboneError
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.composition import Composition
from graftlm.grafts.composition.config import CompositionConfig
from graftlm.grafts.composition.pairs import check_heads, pairs_of
from graftlm.runs.graft_recipe import Recipe
from graftlm.store.artifact import load_graft, save_graft
from graftlm.store.manifest import read_manifest
from tiny import BackboneFolder, save_tiny_backbone, tiny_model

PLAIN: dict[str, str] = {"path": "plain.txt"}
PROMPTED = {"path": "answers.jsonl", "prompt_column": "question"}
PAPER = {"norm": "none", "positions": "none"}


def values(folder: Any, **more: Any) -> dict[str, Any]:
    return {"kind": "composition", "stride": 1, "augmenting": {"one": {"name": str(folder)}}} | more


class Depth:
    """A stand-in with a number of layers."""

    def __init__(self, layers: int) -> None:
        self.sites = type("Sites", (), {"n_layers": layers})


@given(mine=st.integers(1, 60), theirs=st.integers(1, 60), stride=st.integers(1, 12))
def test_pairs_are_evenly_spaced_and_end_with_both_models(mine: int, theirs: int, stride: int) -> None:
    config = CompositionConfig.parse({"stride": stride, "augmenting": {"one": {"name": "x"}}})
    depths: Any = Depth(theirs), Depth(mine)
    count = theirs // stride
    if not 0 < count <= mine:
        with pytest.raises(GraftError) as caught:
            pairs_of(config, "one", *depths)
        assert f"stride of {stride}" in str(caught.value)
        return
    pairs = pairs_of(config, "one", *depths)
    assert len(pairs) == count
    assert pairs[-1] == (theirs - 1, mine - 1)
    assert {b[0] - a[0] for a, b in pairwise(pairs)} <= {stride}
    gaps = [b[1] - a[1] for a, b in pairwise(pairs)]
    assert not gaps or 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1
    assert min(i for pair in pairs for i in pair) >= 0


def test_the_papers_stride() -> None:
    config = CompositionConfig.parse({"augmenting": {"one": {"name": "x"}}})
    depths: Any = Depth(12), Depth(24)
    assert pairs_of(config, "one", *depths) == [(3, 7), (7, 15), (11, 23)]


def test_parameters_are_those_of_the_formula() -> None:
    anchor, augmenting = live("llama"), live("phi", 1)
    graft = composition(anchor, {"one": augmenting}, **PAPER)
    d_A, d_B, n = 64, 48, 2
    shown = graft.describe(anchor)
    formula, output = shown["one: paper's n(D_A D_B + 3 D_B^2)"], shown["one: and W_O's n D_B^2"]
    assert (formula, output) == (n * (d_A * d_B + 3 * d_B**2), n * d_B**2)
    assert shown["one: parameters"] == formula + output == sum(p.numel() for p in graft.parameters())
    assert shown["one: pairs of layers"] == "0 to 0, 1 to 1"


def test_the_augmenting_model_is_referenced_and_not_saved(tmp_path: Path, tiny_backbone: BackboneFolder) -> None:
    anchor = live("llama")
    moved = tiny_backbone("gpt2")
    folder = save_tiny_backbone(tmp_path / "one", "gpt2")
    save_graft(build_graft(graft_config(values(folder, **PAPER)), anchor), anchor, tmp_path / "graft")
    manifest = read_manifest(tmp_path / "graft")
    assert manifest.frozen_models["one"].name == str(folder)
    config: Any = manifest.config
    assert config["augmenting"]["one"]["pairs"] == [[0, 0], [1, 1]]
    assert manifest.parameters == 2 * 5 * 48 * 48

    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(BackboneError) as unusable:
        load_graft(tmp_path / "graft", anchor)
    assert "augmenting.one.name" in str(unusable.value)
    graft = load_graft(tmp_path / "graft", anchor, [f"augmenting.one.name={moved}"])
    assert isinstance(graft, Composition)
    other = save_tiny_backbone(tmp_path / "other", "gpt2", seed=1)
    with pytest.raises(WrongBackboneError):
        load_graft(tmp_path / "graft", anchor, [f"augmenting.one.name={other}"])
    with pytest.raises(RecipeError) as misspelt:
        load_graft(tmp_path / "graft", anchor, ["augmenting.one.nam=x"])
    assert "augmenting.one.nam " in str(misspelt.value)


def test_frozen_models_get_no_gradient_and_the_graft_owns_none_of_them() -> None:
    anchor, augmenting = live("llama"), live("gpt2", 1)
    graft = composition(anchor, {"one": augmenting})
    assert {name.split(".")[0] for name, _ in graft.named_parameters()} == {"blocks"}
    assert not list(graft.buffers())
    assert not any(parameter.requires_grad for parameter in augmenting.model.parameters())
    graft.to(torch.float64)
    assert augmenting.model.dtype == torch.float64, "it moves with the graft"


BAD = {
    "a layer out of range": ({"pairs": [[2, 0]]}, {}, "layer 2 of one"),
    "the anchor's too": ({"pairs": [[0, -1]]}, {}, "layer -1 of the anchor"),
    "a pair twice": ({"pairs": [[0, 1], [0, 1]]}, {}, "[0, 1]"),
    "heads that do not divide": ({}, {"heads": 7}, "set heads to one of"),
    "heads of an odd width": ({}, {"heads": 16}, "set heads to one of"),
    "a long stride": ({"stride": 9}, {}, "stride of 9"),
}


@pytest.mark.parametrize("case", BAD)
def test_models_that_do_not_fit(case: str, tiny_backbone: BackboneFolder) -> None:
    model, more, offence = BAD[case]
    config = values(tiny_backbone("gpt2"), **more)
    config["augmenting"]["one"] |= model
    with pytest.raises(GraftError) as caught:
        build_graft(graft_config(config), live("llama"))
    assert offence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_number_of_heads_fits_an_odd_width_with_positions() -> None:
    check_heads(3, 15, even=False)
    with pytest.raises(GraftError) as caught:
        check_heads(3, 15, even=True)
    assert "positions to none" in str(caught.value)


def test_more_pairs_than_the_anchor_has_layers() -> None:
    with pytest.raises(GraftError) as caught:
        composition(live("llama"), {"one": live("gemma3")})
    assert "set stride to 2" in str(caught.value)


RECIPES = {
    "no model": ({"augmenting": {}}, "augmenting"),
    "no name": ({"augmenting": {"one": {}}}, "augmenting.one.name"),
    "a name of two words": ({"augmenting": {"my model": {"name": "x"}}}, "'my model'"),
    "a module's own name": ({"augmenting": {"keys": {"name": "x"}}}, "'keys'"),
    "a pair of three": ({"augmenting": {"one": {"name": "x", "pairs": [[1, 2, 3]]}}}, "pairs"),
    "no heads": ({"heads": 0}, "heads"),
    "an unknown start": ({"init": "ones"}, "init"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes(case: str) -> None:
    more, offence = RECIPES[case]
    with pytest.raises(RecipeError) as caught:
        graft_config(values("x") | more)
    assert offence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("refresh", ["every", "prompt"])
@pytest.mark.parametrize("sources", [[PROMPTED], [PROMPTED, PLAIN], [PLAIN]])
def test_text_without_prompts_is_refused_where_only_prompts_are_read(
    sources: list[dict[str, str]], refresh: str
) -> None:
    graft = values("x", refresh=refresh)
    recipe = Recipe.parse(
        {
            "backbone": {"name": "x"},
            "methods": {"row": {"graft": graft}},
            "data": {"new": sources, "replay_fraction": 0},
            "training": {"steps": 1},
        }
    )
    if refresh == "every" or PLAIN not in sources:
        assert [run.id for run in recipe.comparison()] == ["row"]
        return
    with pytest.raises(RecipeError) as caught:
        recipe.comparison()
    assert "refresh" in str(caught.value)
    assert PLAIN["path"] in str(caught.value)


def test_models_that_are_no_causal_language_models(tmp_path: Path, tiny_backbone: BackboneFolder) -> None:
    with pytest.raises(BackboneError) as encoder:
        build_graft(graft_config(values(tiny_backbone("bert"))), live("llama"))
    assert "augmenting.one.name" in str(encoder.value)
    from transformers import ViTConfig, ViTForImageClassification

    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "image_size": 16,
    }
    ViTForImageClassification(ViTConfig(**small)).save_pretrained(tmp_path / "vision")
    with pytest.raises(BackboneError) as caught:
        build_graft(graft_config(values(tmp_path / "vision")), live("llama"))
    assert "augmenting.one.name" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_backbone_itself() -> None:
    anchor = live("llama")
    with pytest.raises(GraftError):
        composition(anchor, {"one": anchor})


def test_a_vocabulary_that_is_too_small() -> None:
    augmenting = Backbone.wrap(tiny_model("llama", vocab_size=100))
    with pytest.raises(GraftError) as caught:
        composition(live("llama"), {"one": augmenting})
    assert "299" in str(caught.value)
    assert "100 embeddings" in str(caught.value)


def test_tokenizers_without_offsets(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    augmenting = Backbone.wrap(tiny_model("llama", vocab_size=400), ByT5Tokenizer())
    with pytest.raises(GraftError) as caught:
        composition(live("llama"), {"one": augmenting})
    assert "The tokenizer of one" in str(caught.value)


def test_no_tokenizer_at_all() -> None:
    augmenting = Backbone.wrap(tiny_model("llama"))
    with pytest.raises(BackboneError):
        composition(live("llama"), {"one": augmenting}, alignment="characters")


def test_an_encoder_with_another_tokenizer() -> None:
    with pytest.raises(GraftError):
        composition(live("bert"), {"one": live("llama", 1, OTHER_TOKENS)})
