"""What a `GraftedModel` refuses in one sentence, and what other tools may do with it."""

from __future__ import annotations

import copy
import gc
import weakref
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments, pipeline

from graftlm import export_graft, load_graft, save_graft
from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import BackboneError, GraftError, RecipeError, WrongBackboneError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_class, graft_config, registry
from graftlm.grafts.neutral_residues import VanillaAdapter
from graftlm.testing.laws import attach_graft, randomise
from tiny import tiny_ids, tiny_model, tiny_tokenizer


def wrapped(family: str = "llama", seed: int = 0) -> Backbone:
    return Backbone.wrap(tiny_model(family, seed=seed), tiny_tokenizer(), family)


def adapter(backbone: Backbone, kind: str = "adapter") -> Graft:
    return build_graft(graft_config({"kind": kind}), backbone)


@pytest.mark.parametrize("other", [("gpt2", 0), ("llama", 1)], ids=str)
def test_a_graft_of_another_backbone_is_refused(other: tuple[str, int], tmp_path: Path) -> None:
    backbone, foreign = wrapped(), adapter(wrapped(*other), "lora")
    refused = pytest.raises(WrongBackboneError)
    with refused:
        GraftedModel(backbone, {"graft": foreign})
    with refused:
        save_graft(foreign, backbone, tmp_path / "graft")
    with refused:
        export_graft(foreign, backbone, tmp_path / "model")
    with GraftedModel(wrapped(), {"graft": copy.deepcopy(adapter(backbone))}):
        pass  # another copy of the backbone is the same
    assert backbone.model.get_input_embeddings() is not None


@pytest.mark.parametrize("kind", ["neutral-residues", "lora", "finetune"])
def test_a_detached_model_is_freed_without_a_garbage_collection(kind: str) -> None:
    """Trained copies are as large as the backbone, and runs follow each other in one process."""
    backbone = wrapped()
    graft = adapter(backbone, kind)
    gc.collect()
    gc.disable()
    try:
        with GraftedModel(backbone, {"graft": graft}) as model:
            model(tiny_ids(), labels=tiny_ids()).loss.backward()  # type: ignore[union-attr]
            alive = [weakref.ref(model)] + ([weakref.ref(model.model)] if model.model is not backbone.model else [])
        del model
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("grafts", "named"),
    [
        ("graft", "VanillaAdapter"),
        (["graft"], "list"),
        ({"name": "config"}, "VanillaAdapterConfig"),
        ({"a.b": "graft"}, "'a.b'"),
        ({"keys": "graft"}, "'keys'"),
        ({"": "graft"}, "''"),
        ({3: "graft"}, "3"),
    ],
    ids=str,
)
def test_what_are_no_grafts_by_name(grafts: Any, named: str) -> None:
    backbone = wrapped()
    values = {"graft": adapter(backbone), "config": graft_config({"kind": "adapter"})}
    if isinstance(grafts, dict):
        grafts = {name: values[value] for name, value in grafts.items()}
    else:
        grafts = values[grafts] if isinstance(grafts, str) else [values[value] for value in grafts]
    with pytest.raises(GraftError) as error:
        GraftedModel(backbone, grafts)
    assert named in str(error.value)
    with GraftedModel(backbone, {"name": values["graft"]}):  # nothing is left of the attempt
        pass


def test_what_is_no_backbone(tmp_path: Path) -> None:
    backbone, config = wrapped(), graft_config({"kind": "adapter"})
    save_graft(build_graft(config, backbone), backbone, tmp_path / "graft")
    wrong: Any
    for wrong in (backbone.model, "llama", None):
        with pytest.raises(BackboneError) as error:
            GraftedModel(wrong, {})
        assert type(wrong).__name__ in str(error.value)
        with pytest.raises(BackboneError):
            build_graft(config, wrong)
        with pytest.raises(BackboneError):
            load_graft(tmp_path / "graft", wrong)
    values: Any = {"kind": "adapter"}
    with pytest.raises(GraftError, match="dict"):
        build_graft(values, backbone)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "bf16"}, "'bf16'"),
        ({"dtype": "nn"}, "'nn'"),
        ({"kind": "seq2seq"}, "'seq2seq'"),
        ({"kind": "masked-lm"}, "masked-lm"),
        ({"family": 3}, "int"),
        ({"family": "gpt2"}, "'gpt2'"),
    ],
    ids=str,
)
def test_options_of_a_backbone_that_do_not_fit(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(BackboneError) as error:
        load_backbone(tmp_path, **options)
    assert named in str(error.value)


def test_a_model_is_no_copy() -> None:
    with attach_graft(wrapped(), {"kind": "adapter"}) as model, pytest.raises(GraftError):
        copy.deepcopy(model)


def test_an_adapter_of_peft_below_the_grafts_does_not_train(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with attach_graft(wrapped(), {"kind": "adapter"}) as model:
        with pytest.raises(GraftError):
            model.add_adapter(lora)
        rows: Any = [{"input_ids": tiny_ids(1, 8)[0], "labels": tiny_ids(1, 8)[0]}] * 4
        arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
        trainer: Any = Trainer(get_peft_model(model, lora), arguments, train_dataset=rows)
        with pytest.raises(GraftError, match="peft_config"):
            trainer.train()


def test_neftune_adds_noise_while_it_trains() -> None:
    backbone = wrapped()
    model = randomise(attach_graft(backbone, {"kind": "adapter"}), 0.2)
    embedding: Any = backbone.model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    from transformers.integrations.neftune import neftune_post_forward_hook

    handle = embedding.register_forward_hook(neftune_post_forward_hook)
    ids = tiny_ids()
    first, second = model.train()(ids, labels=ids).loss, model(ids, labels=ids).loss
    assert abs(float(first - second)) > 1e-4
    model.eval()
    torch.testing.assert_close(model(ids).logits, model(ids).logits)
    handle.remove()
    del embedding.neftune_noise_alpha
    assert not model.detach().model.get_input_embeddings().training


def test_outputs_as_a_tuple() -> None:
    ids = tiny_ids()
    with attach_graft(wrapped(), {"kind": "adapter"}).eval() as model, torch.no_grad():
        loss, logits = model(ids, labels=ids, return_dict=False)[:2]
        expected = model(ids, labels=ids)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(logits, expected.logits)


def test_a_pipeline_writes_what_generate_writes() -> None:
    tokenizer = tiny_tokenizer()
    with randomise(attach_graft(wrapped(), {"kind": "adapter"}).eval(), 0.2) as model:
        ids = tokenizer("a text", return_tensors="pt")["input_ids"]
        expected = tokenizer.decode(model.generate(ids, max_new_tokens=5, do_sample=False)[0], skip_special_tokens=True)
        write: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
        assert write("a text", max_new_tokens=5, do_sample=False)[0]["generated_text"] == expected


class InstalledConfig(VanillaAdapter.Config):
    kind: Literal["installed"] = "installed"


class InstalledAdapter(VanillaAdapter):
    """A graft of another package."""

    Config = InstalledConfig


def test_a_kind_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"adapter-elsewhere": VanillaAdapter, "installed": InstalledAdapter}
    points = {n: [EntryPoint(n, f"{c.__module__}:{c.__name__}", "graftlm.grafts")] for n, c in values.items()}
    monkeypatch.setattr(registry, "entry_points", lambda group, name: points.get(name, []))
    assert graft_class("installed") is InstalledAdapter
    assert isinstance(build_graft(graft_config({"kind": "installed"}), wrapped()), InstalledAdapter)
    with pytest.raises(GraftError) as error:
        graft_class("adapter-elsewhere")
    assert "'adapter'" in str(error.value)
    with pytest.raises(RecipeError) as unknown:
        graft_class("nowhere")
    assert "register_graft" in str(unknown.value)


def test_a_change_that_trained_tensors_do_not_fit(tmp_path: Path) -> None:
    backbone = wrapped()
    save_graft(adapter(backbone), backbone, tmp_path)
    with pytest.raises(GraftError) as caught:
        load_graft(tmp_path, backbone, ["capacity=0.9"])
    assert "capacity=0.9" in str(caught.value)
    assert "train it again" not in str(caught.value)
    assert isinstance(load_graft(tmp_path, backbone), nn.Module)


@pytest.mark.parametrize("kind", ["adapter", "lora", "finetune"])
def test_smoothed_labels_are_shifted(kind: str, tmp_path: Path) -> None:
    ids, backbone = tiny_ids(), wrapped()
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])

    def loss(model: Any) -> float:
        return float(Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids}))

    expected = loss(backbone.model)
    with attach_graft(backbone, {"kind": kind}) as model:
        assert loss(model) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_taps_can_not_follow_are_refused(reentrant: bool) -> None:
    backbone = wrapped()
    backbone.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with attach_graft(backbone, {"kind": "neutral-residues"}) as model:
        with pytest.raises(GraftError, match="enable_gradient_checkpointing"):
            model.train()
        model.model.gradient_checkpointing_disable()
        model.enable_gradient_checkpointing()
        model.train()
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with pytest.raises(GraftError, match="enable_gradient_checkpointing"):
            model.train()


@pytest.mark.parametrize(
    ("first", "second"),
    [("finetune", "finetune"), ("lora", "finetune")],
)
def test_grafts_whose_copies_exclude_each_other(first: str, second: str) -> None:
    backbone = wrapped()
    grafts = {"a": adapter(backbone, first), "b": adapter(backbone, second)}
    with pytest.raises(GraftError):
        GraftedModel(backbone, grafts)
    with GraftedModel(backbone, {"a": adapter(backbone, "finetune"), "b": adapter(backbone, "lora")}):
        pass


PACKED: dict[str, Any] = {"position_ids": torch.tensor([[*range(5), *range(7)]])}


@pytest.mark.parametrize("read", ["encode", "forward_traces", "base_model"])
def test_documents_in_a_row_stay_apart_wherever_it_is_read(read: str) -> None:
    ids = tiny_ids(1, 12)

    def states(model: GraftedModel, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        if read == "encode":
            return model.encode(ids, **inputs)
        if read == "base_model":  # as trainers with a loss of their own do
            return model.base_model(input_ids=ids, use_cache=False, **inputs)[0]
        return model.forward_traces(input_ids=ids, **inputs)[0].logits

    with randomise(attach_graft(wrapped(), {"kind": "adapter"}).eval(), 0.2) as model, torch.no_grad():
        together = states(model, ids, **PACKED)
        torch.testing.assert_close(together[:, 5:], states(model, ids[:, 5:]), rtol=1e-4, atol=1e-4)
    mixing = GraftedModel(opt := wrapped("opt"), {"graft": adapter(opt)})
    with mixing as model, pytest.raises(GraftError) as error:
        states(model, ids, **PACKED)
    assert "data.boundaries" in str(error.value)


def test_factors_of_lora_are_float32_on_a_bfloat16_backbone() -> None:
    backbone = Backbone.wrap(tiny_model("llama").to(torch.bfloat16), tiny_tokenizer(), "llama")
    with attach_graft(backbone, {"kind": "lora"}) as model:
        assert {parameter.dtype for parameter in model.trainable_parameters().values()} == {torch.float32}
