"""Loading: what comes back, and one sentence for everything that is not a whole model with its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoConfig, BertModel, LlamaForCausalLM

from cases import thinned
from graftlm.backbone import (
    UNLIMITED,
    Backbone,
    BackboneKind,
    leading_bos,
    load_backbone,
    max_sequence_length,
    padding_id,
)
from graftlm.backbone.load import BackboneConfig
from graftlm.errors import BackboneError, UnknownFamilyError
from tiny import ENCODERS, FAMILIES, USUAL, BackboneFolder, save_tiny_backbone, tiny_ids, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tiny_backbone: BackboneFolder, tmp_path: Path) -> Path:
    """A tiny Llama of one's own, to be damaged."""
    return Path(shutil.copytree(tiny_backbone("llama"), tmp_path / "llama"))


@pytest.mark.parametrize("family", thinned(FAMILIES, {*USUAL, "distilbert", "gemma2"}))
def test_a_saved_model_is_loaded(family: str, tiny_backbone: BackboneFolder) -> None:
    kind = "masked-lm" if family in ENCODERS else "causal-lm"
    backbone = load_backbone(tiny_backbone(family), kind=kind)
    with torch.no_grad():
        # A file's tensors may be aligned otherwise, and kernels of some CPUs then sum in another order.
        torch.testing.assert_close(backbone.model(tiny_ids()).logits, tiny_model(family)(tiny_ids()).logits)
    assert not backbone.model.training
    assert backbone.name == str(tiny_backbone(family))
    assert backbone.need_tokenizer()("thin forest").input_ids == tiny_tokenizer()("thin forest").input_ids
    assert backbone.device.type == "cpu"


@pytest.mark.parametrize("family", ENCODERS)
def test_a_model_that_sees_later_tokens_is_no_causal_one(family: str, tiny_backbone: BackboneFolder) -> None:
    with pytest.raises(BackboneError, match="attend to later|no head of the kind causal-lm"):
        load_backbone(tiny_backbone(family))


def test_a_refused_row_is_forgotten(tiny_backbone: BackboneFolder) -> None:
    with pytest.raises(UnknownFamilyError):
        load_backbone(tiny_backbone("llama"), family="bert")
    load_backbone(tiny_backbone("llama"))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_is_computed_as_requested(implementation: str, tiny_backbone: BackboneFolder) -> None:
    model = BackboneConfig(name=str(tiny_backbone("llama")), device="cpu", attn_implementation=implementation).load()
    assert model.bare_model.config._attn_implementation == implementation


def test_an_unknown_attention_is_refused(tiny_backbone: BackboneFolder) -> None:
    with pytest.raises(BackboneError, match="flash"):
        load_backbone(tiny_backbone("llama"), attn_implementation="flash")  # type: ignore[arg-type]


def test_dtype_and_kind_are_those_requested(tiny_backbone: BackboneFolder) -> None:
    assert load_backbone(tiny_backbone("llama"), dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert load_backbone(tiny_backbone("llama")).model.dtype == torch.float32
    assert isinstance(load_backbone(tiny_backbone("bert"), kind="encoder").model, BertModel)


@pytest.mark.parametrize(("family", "kinds"), [("bert", ("masked-lm", "encoder")), ("llama", ("causal-lm", "encoder"))])
def test_the_kind_is_remembered_and_read_off_a_live_model(
    family: str, kinds: tuple[BackboneKind, ...], tiny_backbone: BackboneFolder
) -> None:
    for kind in kinds:
        backbone = load_backbone(tiny_backbone(family), kind=kind)
        assert backbone.kind == Backbone.wrap(backbone.model).kind == kind


def test_models_in_wrappers_are_reached() -> None:
    live = tiny_model("llama")
    assert Backbone.wrap(torch.compile(live, backend="eager")).model is live
    adapted = get_peft_model(live, LoraConfig(target_modules=["q_proj"]))
    assert Backbone.wrap(adapted).model is live
    assert Backbone.wrap(torch.compile(adapted, backend="eager")).model is live
    assert Backbone.wrap(live).name == "in memory"


def test_other_modules_are_refused() -> None:
    with pytest.raises(BackboneError) as error:
        Backbone.wrap(nn.Linear(2, 2))
    assert "Linear" in str(error.value)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def pickled_only(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut(name: str, share: float) -> Callable[[Path], None]:
    def shorten(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return shorten


def one_tensor_less(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {  # and what the error names
    "no tokenizer": (without_tokenizer, "tokenizer.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "broken config": (cut("config.json", 0.5), "config.json"),
    "empty config": (cut("config.json", 0), "config.json"),
    "pickled weights only": (pickled_only, ".bin"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "half the weights": (cut("model.safetensors", 0.5), "can't be loaded"),
    "almost all weights": (cut("model.safetensors", 0.999), "can't be loaded"),
    "empty weights": (cut("model.safetensors", 0), "can't be loaded"),
    "one tensor less": (one_tensor_less, "model.layers.1.mlp.up_proj.weight"),
    "other shape": (other_shape, "can't be loaded"),
    "unknown type": (unknown_type, "can't be loaded"),
    "a graft": (lambda folder: (folder / "graft.json").write_text("{}"), "graft"),
    "broken tokenizer": (cut("tokenizer.json", 0.5), "tokenizer"),
    "empty tokenizer": (cut("tokenizer.json", 0), "tokenizer"),
    "broken tokenizer config": (cut("tokenizer_config.json", 0.5), "tokenizer"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_is_one_sentence(damage: str, folder: Path) -> None:
    harm, named = DAMAGE[damage]
    harm(folder)
    with pytest.raises(BackboneError) as caught:
        load_backbone(folder)
    assert named in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_may_be_missing_until_text_is_read(folder: Path) -> None:
    without_tokenizer(folder)
    backbone = load_backbone(folder, tokenizer_required=False)
    assert backbone.tokenizer is None
    with pytest.raises(BackboneError) as error:
        backbone.need_tokenizer()
    assert "tokenizer.json" in str(error.value)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(BackboneError) as error:
        load_backbone(name)
    assert f"no folder {name}" in str(error.value)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(BackboneError) as error:
        load_backbone(folder / "config.json")
    assert "config.json is a file" in str(error.value)


def test_a_name_that_is_not_on_the_hub() -> None:
    with pytest.raises(BackboneError) as caught:
        load_backbone("nobody/nothing")
    assert "hub has no model nobody/nothing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_that_the_checkpoint_does_not_have_is_not_made_up(tmp_path: Path) -> None:
    tiny_model("llama").model.save_pretrained(tmp_path / "headless")
    tiny_tokenizer().save_pretrained(tmp_path / "headless")
    with pytest.raises(BackboneError) as error:
        load_backbone(tmp_path / "headless")
    assert "lm_head.weight" in str(error.value)
    load_backbone(tmp_path / "headless", kind="encoder")


def test_a_family_without_a_row(tmp_path: Path) -> None:
    folder = save_tiny_backbone(tmp_path, "mamba2")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UnknownFamilyError) as error:  # before it looks for weights
        load_backbone(folder)
    assert "'mamba2'" in str(error.value)
    assert "norm, mixer" in str(error.value), "the children of its layers"


def test_remote_code_is_not_run_by_default(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    config = json.loads((folder / "config.json").read_text())
    remote = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": remote}))
    assert isinstance(load_backbone(folder).model, LlamaForCausalLM)
    assert AutoConfig.from_pretrained(folder).model_type == "llama"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bert", "roberta"])
def test_roberta_reserves_positions_of_the_sequence_length(family: str) -> None:
    backbone, tokenizer = Backbone.wrap(tiny_model(family)), tiny_tokenizer()
    limit = backbone.config.get_text_config().max_position_embeddings
    embeddings = getattr(backbone.model.base_model, "embeddings", None)
    reserved = embeddings.position_embeddings.padding_idx + 1 if family == "roberta" else 0
    assert max_sequence_length(backbone) == max_sequence_length(backbone.model) == limit - reserved
    tokenizer.model_max_length = 7
    assert max_sequence_length(backbone, tokenizer) == 7


def test_without_a_limit_a_sequence_is_unlimited() -> None:
    assert max_sequence_length(SimpleNamespace()) == UNLIMITED
    assert max_sequence_length(SimpleNamespace(config=SimpleNamespace(max_position_embeddings=0))) == UNLIMITED


def test_padding_is_the_padding_token_else_eos_else_0() -> None:
    tokens = {"pad_token_id": 5, "eos_token_id": 3}
    assert padding_id(SimpleNamespace(**tokens)) == 5
    assert padding_id(SimpleNamespace(**tokens | {"pad_token_id": None})) == 3
    assert padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=None)) == 0


def test_a_bos_counts_only_where_the_tokenizer_puts_it_first() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    assert leading_bos(tokenizer) is None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
    )
    assert leading_bos(tokenizer) == tokenizer.bos_token_id
