"""Presets: `preset: NAME` sets the keys of a graft that the user leaves out, and nothing else remembers the name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.grafts import GraftConfig, build_graft, graft_class, graft_config, kinds
from graftlm.grafts.heads import TaskSpec
from graftlm.grafts.presets import PresetConfig
from graftlm.runs.matching import MatchedGraft
from graftlm.runs.recipe import Recipe, recipe_schema
from graftlm.store.artifact import load_graft, save_graft
from runs.test_recipe import values
from tiny import tiny_model, tiny_tokenizer

REQUIRED: dict[str, dict[str, Any]] = {
    "composition": {"augmenting": {"other": {"name": "vanilla"}}},
    "llama-pro": {"blocks": 1},
    "memory": {"window": 8},
    "peft": {"method": "OFT"},
    "token-routing": {"experts": {"a": {"rank": 1, "targets": ["ffn"], "texts": ["one"]}}},
}
PRESETS = [(kind, name) for kind in kinds() for name in graft_class(kind).Config.presets]


class Inner(Config):
    width: int = 1
    depth: int = 1


class Toy(PresetConfig):
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"wide": {"inner": {"width": 7, "depth": 3}, "scale": 2.0}}

    inner: Inner = Inner()
    scale: float = 1.0


def section(kind: str, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, **REQUIRED.get(kind, {}), **changes}


def tiny() -> Backbone:
    return Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")


def test_the_published_forms_have_names() -> None:
    published = {("composition", "calm"), ("neutral-residues", "paper"), ("conditional-tasks", "ca-mtl")}
    assert published <= {*PRESETS}


@pytest.mark.parametrize(("kind", "name"), PRESETS)
def test_a_preset_is_its_keys(kind: str, name: str) -> None:
    keys = graft_class(kind).Config.presets[name]
    config = graft_config(section(kind, preset=name))
    explicit = graft_config(section(kind, **keys))
    assert config == explicit
    assert config.model_dump(mode="json") == explicit.model_dump(mode="json")
    assert config.model_dump(mode="json") == config.model_dump(mode="json") | json.loads(json.dumps(keys))
    assert graft_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(("kind", "name"), PRESETS)
def test_what_the_user_sets_has_priority(kind: str, name: str) -> None:
    for key, default in graft_class(kind).Config.model_fields.items():
        if key in graft_class(kind).Config.presets[name] and not default.is_required():
            own = default.get_default(call_default_factory=True)
            assert getattr(graft_config(section(kind, preset=name, **{key: own})), key) == own


@pytest.mark.parametrize("kind", kinds())
def test_a_config_without_a_preset_is_stored_as_before(kind: str) -> None:
    config = graft_config(section(kind))
    assert "preset" not in config.model_dump()
    assert graft_config(section(kind, preset=None)) == config
    assert graft_config(section(kind, preset=None)).model_fields_set == config.model_fields_set


@pytest.mark.parametrize(
    ("kind", "name", "known"),
    [
        ("composition", "clam", "calm"),
        ("neutral-residues", "calm", "paper"),
        ("conditional-tasks", 3, "ca-mtl"),
        ("conditional-tasks", ["ca-mtl"], "ca-mtl"),
        ("lora", "paper", "presets"),
        ("adapter", "paper", "presets"),
    ],
)
def test_an_unknown_preset_is_refused_with_the_known_ones(kind: str, name: Any, known: str) -> None:
    with pytest.raises(RecipeError) as error:
        graft_config(section(kind, preset=name))
    assert "preset" in str(error.value)
    assert known in str(error.value)


def test_a_wrong_value_beside_a_preset_is_refused() -> None:
    with pytest.raises(RecipeError) as error:
        graft_config(section("composition", preset="calm", stride=0))
    assert "stride" in str(error.value)


def test_nested_values_are_merged_by_key() -> None:
    assert Toy.parse({"preset": "wide"}) == Toy(inner=Inner(width=7, depth=3), scale=2.0)
    assert Toy.parse({"preset": "wide", "inner": {"depth": 5}}) == Toy(inner=Inner(width=7, depth=5), scale=2.0)
    assert Toy(preset="wide", inner=Inner(depth=5)) == Toy(inner=Inner(width=1, depth=5), scale=2.0)
    assert Toy.presets["wide"] == {"inner": {"width": 7, "depth": 3}, "scale": 2.0}


def test_recipes_rows_and_overrides_take_presets(tmp_path: Path, tiny_backbone) -> None:
    rows: dict[str, Any] = {
        "published": {"graft": {"kind": "neutral-residues", "preset": "paper", "width": 4}},
        "matched": {"graft": {"kind": "neutral-residues", "preset": "paper", "capacity": "match"}},
    }
    folder = tiny_backbone("llama")
    recipe = Recipe.parse(values(tmp_path, folder, methods=rows))
    graft: Any = recipe.methods["published"].graft
    assert (graft.alpha, graft.gate_init, graft.width) == (0.01, "random", 4)
    matched = recipe.methods["matched"].graft
    assert isinstance(matched, MatchedGraft)
    assert getattr(matched.graft, "alpha", None) == 0.01
    assert "preset" not in recipe.to_yaml()
    assert Recipe.parse(recipe.model_dump()) == recipe
    named = _run_settings(tmp_path, folder, {"preset": "paper"})
    assert named == _run_settings(tmp_path, folder, _explicit("neutral-residues", "paper"))
    (tmp_path / "recipe.yaml").write_text(Recipe.parse(values(tmp_path, folder)).to_yaml(), encoding="utf-8")
    changed = Recipe.from_yaml(tmp_path / "recipe.yaml", ["graft={kind: neutral-residues}", "graft.preset=paper"])
    assert changed.graft == graft_config(section("neutral-residues", preset="paper"))


def _explicit(kind: str, name: str) -> dict[str, Any]:
    return dict(graft_class(kind).Config.presets[name])


def _run_settings(tmp_path: Path, folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, from which its key is computed."""
    graft = {"kind": "neutral-residues", **keys}
    return Recipe.parse(values(tmp_path, folder, graft=graft)).run().settings()


def test_a_saved_graft_has_the_values_and_no_preset(tmp_path: Path) -> None:
    backbone = tiny()
    config = graft_config({"kind": "neutral-residues", "preset": "paper", "width": 3})
    save_graft(build_graft(config, backbone), backbone, tmp_path / "graft")
    saved = json.loads((tmp_path / "graft" / "graft.json").read_text(encoding="utf-8"))["config"]
    assert "preset" not in saved
    assert saved == saved | _explicit("neutral-residues", "paper")
    assert load_graft(tmp_path / "graft", backbone).config == config
    with pytest.raises(RecipeError) as error:
        load_graft(tmp_path / "graft", backbone, ["preset=paper"])
    assert "preset" in str(error.value)


def test_the_schema_has_the_names_of_presets() -> None:
    variants = recipe_schema()["$defs"]["GraftConfig"]["oneOf"]
    presets = {one["properties"]["kind"]["const"]: one["properties"].get("preset") for one in variants}
    assert presets["composition"]["enum"] == ["calm"]
    assert presets["conditional-tasks"]["enum"] == ["ca-mtl"]
    assert presets["lora"] is None


def test_calm_has_the_matrices_of_its_equations_and_no_others() -> None:
    """n (D_A D_B + 4 D_B^2) parameters; W_O is random with variance 1 / D_B."""
    backbone = tiny()
    graft = build_graft(graft_config(section("composition", preset="calm", stride=1)), backbone)
    layers, width = backbone.sites.n_layers, backbone.sites.width
    trained = {name: parameter for name, parameter in graft.named_parameters() if parameter.requires_grad}
    assert sum(parameter.numel() for parameter in trained.values()) == layers * 5 * width**2
    outputs = torch.cat([parameter.flatten() for name, parameter in trained.items() if name.endswith("w_o.weight")])
    assert outputs.numel() == layers * width**2
    assert outputs.std().item() == pytest.approx(width**-0.5, rel=5 / (2 * outputs.numel()) ** 0.5)


def test_neutral_residues_of_the_paper_have_gates_without_bias() -> None:
    backbone = tiny()
    graft: Any = build_graft(graft_config({"kind": "neutral-residues", "preset": "paper", "width": 3}), backbone)
    for block in graft.blocks:
        assert block.gate.bias is None
        assert block.kind == "relu"
        assert bool(block.gate.weight.any())
        assert not bool(block.w_o.weight.any())


def test_ca_mtl_has_all_modules_in_the_upper_half() -> None:
    backbone = Backbone.wrap(tiny_model("bert"), tiny_tokenizer(), "bert")
    tasks = {"topics": TaskSpec(type="classification", labels=["a", "b"])}
    config: Any = graft_config({"kind": "conditional-tasks", "preset": "ca-mtl", "tasks": tasks})
    assert isinstance(config, GraftConfig)
    graft: Any = build_graft(config, backbone)
    upper = [str(layer) for layer in range(backbone.sites.n_layers // 2, backbone.sites.n_layers)]
    assert [*graft.biases] == [*graft.norms] == [*graft.bottlenecks] == upper
    assert all(neck.norm is not None for neck in graft.bottlenecks.values())
    assert graft.alignment is not None
    assert not graft.loras
