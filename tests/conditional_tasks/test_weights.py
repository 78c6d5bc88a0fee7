"""Which weights train, which are shared with the backbone, and in which mode its parts run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertModel

from cases import pairwise
from conditional_tasks.tools import OFF, TASK, TASKS, batch, build, host, random_model, targets
from graftlm.backbone import Backbone
from graftlm.errors import BackboneError, GraftError, RecipeError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import default_config
from graftlm.grafts.conditional_tasks import ConditionalTasks, ConditionalTasksConfig
from graftlm.store.artifact import load_graft, save_graft
from graftlm.training import TrainingConfig
from graftlm.training.optimizer import declared, make_optimizer
from tiny import tiny_model


def encoder() -> Backbone:
    """With the pooler that nothing reads."""
    live: Any = tiny_model("bert", num_hidden_layers=4)
    return Backbone.wrap(BertModel(live.config))


@pytest.mark.parametrize(
    ("frozen", "starts"),
    [
        (1.0, ()),
        (0.5, ("encoder.layer.2.", "encoder.layer.3.")),
        (0.4, ("encoder.layer.2.", "encoder.layer.3.")),  # the nearest whole number
        (0.3, tuple(f"encoder.layer.{layer}." for layer in (1, 2, 3))),
        (0.05, tuple(f"encoder.layer.{layer}." for layer in range(4))),
        (0.0, ("embeddings.", "encoder.")),
    ],
)
def test_the_share_of_layers_that_stay_frozen(frozen: float, starts: tuple[str, ...]) -> None:
    backbone = encoder()
    with GraftedModel(backbone, {"graft": build(backbone, frozen=frozen, **OFF)}) as model:
        copied = {name[6:]: p for name, p in model.trainable_parameters().items() if name.startswith("model.")}
        expected = [name for name, _ in backbone.model.named_parameters() if name.startswith(starts)] if starts else []
        assert list(copied) == expected
        own = dict(backbone.model.named_parameters())
        for name, parameter in model.model.named_parameters():
            assert (parameter is own[name]) == (name not in copied), "shared where frozen, and only there"
        assert (model.model is backbone.model) == (frozen == 1)


@pytest.mark.parametrize("family", ["modernbert", "llama"])
def test_the_norm_after_the_last_layer_trains_with_it(family: str) -> None:
    backbone = host(family)
    with GraftedModel(backbone, {"graft": build(backbone, **OFF)}) as model:
        ends = {name.removesuffix(".weight").rsplit(".", 1)[-1] for name in model.trainable_parameters()}
        assert backbone.sites.family.norm in ends


def test_modules_have_their_own_learning_rate() -> None:
    """AdamW's first step is the rate times the sign of the gradient: times `module_rate`, or for heads `head_rate`."""
    with random_model(host(), module_rate=5.0, head_rate=9.0) as model:
        parameters = model.trainable_parameters()
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        optimizer = make_optimizer(
            parameters, TrainingConfig(steps=1, learning_rate=1e-3), (), declared(model, "learning_rate_scales")
        )
        ids, mask = batch()
        model(ids, mask, extras={"task": TASK}, targets=targets()).loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * group["scale"]  # as a training step sets it
        optimizer.step()
        for name, parameter in parameters.items():
            moved = (parameter - before[name]).abs()[parameter.grad.abs() > 1e-5]  # type: ignore[union-attr]
            if not len(moved):
                continue  # a key's bias, which no softmax feels
            scale = 9 if ".heads." in name else 5 if name.startswith("grafts.") else 1
            assert moved.max().item() == pytest.approx(scale * 1e-3, rel=0.02), name


def test_dropout_is_on_in_trained_layers_alone_and_in_training_alone() -> None:
    backbone = host(num_hidden_layers=4)
    with GraftedModel(backbone, {"graft": build(backbone)}) as model:
        layers = model.model.base_model.encoder.layer  # type: ignore[union-attr]

        def dropouts(module: nn.Module) -> set[bool]:
            return {first.training for first in module.modules() if isinstance(first, nn.Dropout)}

        for _ in range(2):
            model.train()
            assert [dropouts(layer) for layer in layers] == [{False}, {False}, {True}, {True}]  # type: ignore[union-attr]
            assert dropouts(model.model.base_model.embeddings) == {False}  # type: ignore[arg-type]
            assert dropouts(model.grafts["graft"]) == {True}
            model.eval()
            assert dropouts(model) == dropouts(backbone.model) == {False}
        with GraftedModel(host(), {"graft": build(host(), frozen=0)}) as whole:
            assert dropouts(whole.train().model.base_model) == {True}


def test_fine_tuning_of_one_task_is_what_transformers_does() -> None:
    """With all modules off and nothing frozen, the loss and its gradients are those of the bare model with a head."""
    backbone = host(double=True)
    tasks = {"topics": TASKS["topics"]}
    live: Any = tiny_model("bert").double()
    ids, mask = batch()
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    with GraftedModel(backbone, {"graft": build(backbone, tasks, frozen=0.0, **OFF).double()}) as model:
        head = model.grafts["graft"].heads.linear("topics")  # type: ignore[union-attr]
        loss = model.eval()(ids, mask, targets=list(labels)).loss
        out = head(live.bert(ids, attention_mask=mask)[0][:, 0])
        expected = nn.functional.cross_entropy(out, labels)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-7)
        loss.backward()
        expected.backward()
        own = dict(live.named_parameters())
        for name, parameter in model.model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-4, atol=1e-6)


def test_saved_and_loaded_it_predicts_the_same(tmp_path: Path) -> None:
    backbone = host()
    ids, mask = batch()
    with random_model(backbone, bottleneck="large") as model, torch.no_grad():
        expected = model.predict(ids, mask, {"task": TASK})
        save_graft(model.grafts["graft"], backbone, tmp_path / "graft")  # type: ignore[arg-type]
    graft = load_graft(tmp_path / "graft", backbone)
    assert graft.tasks() == TASKS
    with GraftedModel(backbone, {"graft": graft}).eval() as again, torch.no_grad():
        actual = again.predict(ids, mask, {"task": TASK})
    assert all(torch.equal(first, second) for first, second in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "headless", "frozen"),
    pairwise([("bert", "base"), ("bert", "large"), ("llama", "base")], [False, True], [0.5, 1.0]),
)
def test_recomputing_activations_changes_no_gradient(kind: tuple[str, str], headless: bool, frozen: float) -> None:
    """The laws do so with the language-model head; these are the heads' losses, and skips along layers.

    The modules with checkpoints are in training mode; of a model without a head, as recipes load it, it is one itself.
    """
    family, bottleneck = kind
    backbone = host(family)
    if headless:
        backbone = Backbone.wrap(backbone.model.base_model)
    with random_model(backbone, bottleneck=bottleneck, modulated=1.0, lora_rank=2, frozen=frozen) as model:
        ids, mask = batch()
        model.train()
        actual = []
        for recompute in (False, True):
            if recompute:
                model.enable_gradient_checkpointing()
            torch.manual_seed(0)
            model.zero_grad()
            model(ids, mask, extras={"task": TASK}, targets=targets()).loss.backward()
            actual.append(
                {name: p.grad.clone() for name, p in model.trainable_parameters().items() if p.grad is not None}
            )
        assert actual[0].keys() == actual[1].keys() == model.trainable_parameters().keys()
        for name, gradient in actual[0].items():
            torch.testing.assert_close(actual[1][name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("headless", [False, True])
def test_a_backbone_in_training_mode_is_refused_with_checkpoints_too(headless: bool) -> None:
    backbone = Backbone.wrap(host().model.base_model) if headless else host()
    with random_model(backbone, frozen=1.0) as model:
        ids, mask = batch()
        model.train()
        model.enable_gradient_checkpointing()
        model.backbone.model.train()
        with pytest.raises(GraftError):
            model(ids, mask, extras={"task": TASK}, targets=targets())


def test_it_trains_in_processes(tmp_path: Path) -> None:
    """Through torch's DDP, in a group of one; tasks that no row has take no part."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with random_model(host()) as model:
            ids, mask = batch()
            plain = model(ids[:2], mask[:2], extras={"task": TASK[:2]}, targets=targets()[:2]).loss
            wrapped = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
            loss = wrapped(ids[:2], mask[:2], extras={"task": TASK[:2]}, targets=targets()[:2]).loss
            loss.backward()
            assert torch.equal(loss, plain)
            assert model.grafts["graft"].embeddings["task:topics"].grad is not None  # type: ignore[index, union-attr]
    finally:
        torch.distributed.destroy_process_group()


def test_bf16_backbones_are_served() -> None:
    backbone = Backbone.wrap(tiny_model("bert").bfloat16())
    graft = build(backbone, frozen=1.0, bottleneck="large")
    with GraftedModel(backbone, {"graft": graft}).eval() as model, torch.no_grad():
        actual = model.predict(*batch(), {"task": TASK})
        assert {first.dtype for first in actual} == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            assert model(*batch(), extras={"task": TASK}, targets=targets()).loss.isfinite()


def test_packed_weights_train_nowhere() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    live = tiny_model("bert")
    quantize_(live, Int8WeightOnlyConfig())
    backbone = Backbone.wrap(live)
    with pytest.raises(BackboneError):
        GraftedModel(backbone, {"graft": build(backbone)})
    with GraftedModel(backbone, {"graft": build(backbone, frozen=1.0)}).eval() as model:
        assert len(model.predict(*batch(), {"task": TASK})) == 6


def test_what_a_config_may_not_say() -> None:
    assert default_config("conditional-tasks") is None, "it has no tasks by default"
    with pytest.raises(RecipeError):
        ConditionalTasks(ConditionalTasksConfig(), host())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"a.b": {"type": "span"}}, "'a.b'"),
        ({"a": {"type": "classification", "labels": ["x"]}}, "at least 2"),
        ({"a": {"type": "tagging", "labels": ["x", "y", "x"]}}, "'x'"),
        ({"a": {"type": "regression", "labels": ["x"]}}, "regression"),
        ({"a": {"type": "classify"}}, "'classification', 'regression'"),
    ]
    for tasks, named in cases:
        with pytest.raises(RecipeError) as error:
            ConditionalTasksConfig(tasks=tasks)
        assert named in str(error.value)
    with pytest.raises(RecipeError) as error:
        build(host("block-state"))
    assert "block-state" in str(error.value)
