"""Tasks that are added to a trained graft: old predictions stay bit-identical, and the best old task is the start."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conditional_tasks.tools import SMALL, TASK, TASKS, batch, build, host, random_model, randomise, targets
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError, RecipeError, WrongBackboneError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.conditional_tasks import ConditionalTasks, ConditionalTasksConfig
from graftlm.grafts.heads import TaskSpec
from graftlm.store.artifact import load_graft, save_graft

TOPICS = TASKS["topics"]
NEW = {"news": TOPICS}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return host()


@pytest.fixture(scope="module")
def folder(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained graft."""
    with random_model(backbone) as model:
        path = tmp_path_factory.mktemp("trained") / "graft"
        return save_graft(model.grafts["graft"], backbone, path)  # type: ignore[arg-type]


@pytest.fixture
def extended(backbone: Backbone, folder: Path) -> Iterator[GraftedModel]:
    with GraftedModel(backbone, {"graft": extend(backbone, folder)}) as model:
        yield model


def extend(backbone: Backbone, folder: Path, tasks: Any = None, **config: Any) -> ConditionalTasks:
    return ConditionalTasks(ConditionalTasksConfig(tasks=tasks or NEW, extends=str(folder), **config), backbone)


@torch.no_grad()
def old_predictions(model: GraftedModel) -> list[Tensor]:
    ids, mask = batch()
    return model.eval().predict(ids, mask, {"task": TASK})


def rows(task: int, labels: list[int]) -> dict[str, Any]:
    """Rows of a classification task, with one label per row."""
    ids, mask = batch()
    extras = {"task": torch.full((len(ids),), task)}
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "extras": extras,
        "targets": [torch.tensor(label) for label in labels],
    }


def test_training_a_new_task_leaves_no_bit_of_the_old_ones(
    backbone: Backbone, folder: Path, extended: GraftedModel, tmp_path: Path
) -> None:
    graft: Any = extended.grafts["graft"]
    assert list(graft.tasks()) == [*TASKS, "news"]
    with_old = load_graft(folder, backbone)
    trained = extended.trainable_parameters()
    own = ["embeddings.task:news", "heads.linears.task:news.weight", "heads.linears.task:news.bias"]
    for key in graft.loras:
        own += [f"loras.{key}.a.{len(TASKS)}", f"loras.{key}.b.{len(TASKS)}"]
    assert len(own) == 3 + 12, "six Linears in the layer with modules"
    assert set(trained) == {f"grafts.graft.{name}" for name in own}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.02, weight_decay=0.1)
    before = old_predictions(extended)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = extended.train()(**rows(5, [0, 1, 2, 0, 1, 2])).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(a, b) for a, b in zip(old_predictions(extended), before, strict=True))
    save_graft(graft, backbone, tmp_path / "more")
    answered = {name: value for name, value in rows(5, [0] * 6).items() if name != "targets"}
    new = extended.predict(**answered)
    extended.detach()
    manifest = json.loads((tmp_path / "more" / "graft.json").read_text())
    assert manifest["config"]["extends"] is None
    assert manifest["config"]["block"] == SMALL["block"], "settings are the old graft's"
    with GraftedModel(backbone, {"graft": load_graft(tmp_path / "more", backbone)}) as again:
        assert all(torch.equal(a, b) for a, b in zip(old_predictions(again), before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(again.predict(**answered), new, strict=True))
    with GraftedModel(backbone, {"graft": with_old}) as alone:
        assert all(torch.equal(a, b) for a, b in zip(old_predictions(alone), before, strict=True))


def test_while_a_task_is_added_nothing_of_the_encoder_drops_out(extended: GraftedModel) -> None:
    extended.train()
    assert extended.model is not extended.backbone.model, "it trained parts of the encoder, which it has as a copy"
    assert not any(module.training for module in extended.model.modules())


def test_a_task_is_added_while_the_graft_is_attached(backbone: Backbone) -> None:
    with random_model(backbone) as model:
        graft: Any = model.grafts["graft"]
        before = old_predictions(model)
        graft.add_task("news", TOPICS, like="topics")
        assert len(model.trainable_parameters()) == 3 + 12
        assert all(torch.equal(a, b) for a, b in zip(old_predictions(model), before, strict=True))
        ids, mask = batch()
        new = model.predict(ids[1:2], mask[1:2], {"task": torch.tensor([5])})
        torch.testing.assert_close(new[0], before[1], rtol=1e-5, atol=1e-5)
        with pytest.raises(GraftError) as error:
            graft.add_task("again", TOPICS, like="unknown")
        assert "'unknown'" in str(error.value)
        graft.add_task("again", TOPICS)  # The failed call has added nothing.
        assert len(model.trainable_parameters()) == 2 * (3 + 12), "both are new"


def test_a_task_is_added_to_a_graft_in_double_precision() -> None:
    with random_model(host(double=True)) as model:
        model.grafts["graft"].add_task("news", TOPICS)  # type: ignore[operator]  # a ModuleDict holds modules
        ids, mask = batch()
        assert model.predict(ids[:2], mask[:2], {"task": torch.tensor([5, 0])})[0].dtype == torch.double


def test_a_graft_from_before_loras_has_none(backbone: Backbone, tmp_path: Path) -> None:
    graft = randomise(build(backbone, lora_rank=0))
    save_graft(graft, backbone, tmp_path / "old")
    manifest = json.loads((tmp_path / "old" / "graft.json").read_text())
    del manifest["config"]["lora_rank"]
    (tmp_path / "old" / "graft.json").write_text(json.dumps(manifest))
    assert load_graft(tmp_path / "old", backbone).config.lora_rank == 0
    assert extend(backbone, tmp_path / "old").config.lora_rank == 0


def test_a_number_of_another_range_is_no_start(backbone: Backbone, folder: Path) -> None:
    far = {"marks": TaskSpec(type="regression", range=(1.0, 5.0))}
    with GraftedModel(backbone, {"graft": extend(backbone, folder, far)}) as model:
        marks = rows(5, [0] * 6) | {"targets": [torch.tensor(2.0)] * 6}
        assert model.grafts["graft"].start_tasks(model, {"marks": marks}) == {}  # type: ignore[operator]  # the same


def test_the_old_task_that_answers_best_gives_its_embedding_and_head(backbone: Backbone, tmp_path: Path) -> None:
    tasks = {"quality": TASKS["quality"], "one": TOPICS, "two": TOPICS}
    graft = randomise(build(backbone, tasks))
    save_graft(graft, backbone, tmp_path / "graft")
    for wanted in ("one", "two"):
        with GraftedModel(backbone, {"graft": extend(backbone, tmp_path / "graft")}) as model:
            made: Any = model.grafts["graft"]
            answered = rows(list(tasks).index(wanted), [0] * 6)
            answered.pop("targets")
            predicted = [int(p.argmax()) for p in model.eval().predict(**answered)]
            choices = made.start_tasks(model.train(), {"news": rows(3, predicted), "one": rows(1, predicted)})
            assert list(choices) == ["news"]
            assert choices["news"]["like"] == wanted
            assert set(choices["news"]["losses"]) == {"one", "two"}
            assert choices["news"]["losses"][wanted] < choices["news"]["chance"] == pytest.approx(math.log(3))
            assert torch.equal(made.embeddings["task:news"], made.embeddings[f"task:{wanted}"])
            assert torch.equal(made.heads.linear("news").weight, made.heads.linear(wanted).weight)
            old = list(tasks).index(wanted)
            for lora in made.loras.values():
                assert torch.equal(lora.a[3], lora.a[old])
                assert torch.equal(lora.b[3], lora.b[old])
            assert model.training


def test_without_a_task_that_says_the_same_a_new_one_has_a_mean_vector_and_no_lora(
    backbone: Backbone, folder: Path
) -> None:
    spec = TaskSpec(type="classification", labels=["a", "b"])
    with GraftedModel(backbone, {"graft": extend(backbone, folder, {"news": spec})}) as model:
        graft: Any = model.grafts["graft"]
        before = {name: tensor.clone() for name, tensor in graft.tensors().items()}
        assert graft.start_tasks(model, {"news": rows(5, [0] * 6)}) == {}
        assert all(torch.equal(tensor, before[name]) for name, tensor in graft.tensors().items())
        assert not any(lora.b[len(TASKS)].any() for lora in graft.loras.values())
        assert all(lora.a[len(TASKS)].any() for lora in graft.loras.values())


def test_a_regression_and_a_span_start_from_a_task_of_their_type(backbone: Backbone, folder: Path) -> None:
    new = {"marks": TASKS["quality"], "places": TASKS["answers"]}
    with GraftedModel(backbone, {"graft": extend(backbone, folder, new)}) as model:
        inputs = {
            "marks": rows(5, [0] * 6) | {"targets": [torch.tensor(0.5)] * 6},
            "places": rows(6, [0] * 6) | {"targets": [torch.tensor([1, 2])] * 6},
        }
        choices = model.grafts["graft"].start_tasks(model, inputs)  # type: ignore[operator]
        assert {name: [*choice["losses"]] for name, choice in choices.items()} == {
            "marks": ["quality"],
            "places": ["answers"],
        }


def test_a_task_starts_from_none_that_is_no_better_than_chance(backbone: Backbone, folder: Path) -> None:
    with GraftedModel(backbone, {"graft": extend(backbone, folder)}) as model:
        graft: Any = model.grafts["graft"]
        answered = rows(list(TASKS).index("topics"), [0] * 6)
        answered.pop("targets")
        wrong = [int(p.argmin()) for p in model.eval().predict(**answered)]
        before = {name: tensor.clone() for name, tensor in graft.tensors().items()}
        choice = graft.start_tasks(model, {"news": rows(5, wrong)})["news"]
        assert choice["like"] is None
        assert choice["losses"]["topics"] > choice["chance"]
        assert all(torch.equal(tensor, before[name]) for name, tensor in graft.tensors().items())


def test_other_settings_than_the_trained_ones_are_refused_by_name(backbone: Backbone, folder: Path) -> None:
    values = {"tasks": {"news": TOPICS}, "extends": str(folder)}
    same = ConditionalTasks(ConditionalTasksConfig.parse(values | {"lora_rank": 2, "pooling": "first"}), backbone)
    assert same.config.lora_rank == 2
    with pytest.raises(RecipeError) as error:
        ConditionalTasks(ConditionalTasksConfig.parse(values | {"lora_rank": 3}), backbone)
    assert "lora_rank" in str(error.value)
    config = ConditionalTasksConfig.parse({"tasks": {"old": TOPICS}})
    save_graft(ConditionalTasks(config, backbone), backbone, folder.parent / "shares-nothing")
    with pytest.raises(RecipeError) as error:
        extend(backbone, folder.parent / "shares-nothing", adapts="all")
    assert "adapts" in str(error.value)


def test_the_config_may_name_the_old_task(backbone: Backbone, folder: Path) -> None:
    made = extend(backbone, folder, like="topics")
    assert torch.equal(made.embeddings["task:news"], made.embeddings["task:topics"])
    with GraftedModel(backbone, {"graft": made}) as model:
        assert made.start_tasks(model, {"news": rows(5, [0] * 6)}) == {}, "it has its start"
    with pytest.raises(GraftError) as error:
        extend(backbone, folder, like="topic")
    assert all(name in str(error.value) for name in ("news", "topic", "topics, quality"))
    with pytest.raises(GraftError):
        extend(backbone, folder, like="news")


def test_a_graft_that_extends_none_has_nothing_to_start(backbone: Backbone) -> None:
    with random_model(backbone) as model:
        assert model.grafts["graft"].start_tasks(model, {"topics": rows(0, [0] * 6)}) == {}  # type: ignore[operator]


def test_what_can_not_be_extended(backbone: Backbone, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as error:
        extend(backbone, tmp_path)
    assert "FileNotFoundError" in str(error.value)
    with pytest.raises(RecipeError) as error:
        extend(backbone, folder, {"topics": TOPICS})
    assert "topics" in str(error.value)
    with pytest.raises(WrongBackboneError):
        extend(host("distilbert"), folder)
    from graftlm.grafts import build_graft, graft_config

    save_graft(build_graft(graft_config({"kind": "adapter"}), backbone), backbone, tmp_path / "adapter")
    with pytest.raises(ArtifactError) as error:
        extend(backbone, tmp_path / "adapter")
    assert "kind adapter" in str(error.value)
    with pytest.raises(GraftError) as error:
        build(backbone).add_task("topics", TOPICS)
    assert "'topics'" in str(error.value)


def test_a_graft_from_before_unit_embeddings_is_refused(backbone: Backbone, folder: Path, tmp_path: Path) -> None:
    """It could be loaded, but would predict something else."""
    shutil.copytree(folder, tmp_path / "old")
    manifest = json.loads((tmp_path / "old" / "graft.json").read_text())
    del manifest["config"]["module_rate"]
    (tmp_path / "old" / "graft.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="module_rate"):
        load_graft(tmp_path / "old", backbone)
    with pytest.raises(RecipeError, match="module_rate"):
        extend(backbone, tmp_path / "old")


def test_targets_are_what_the_tools_say() -> None:
    """Guard the rows on which other tests of this module rely."""
    assert [tuple(target.shape) for target in targets()] == [(13,), (), (), (2,), (2,), ()]


def test_whole_model_adaptation_trains_what_the_base_did(backbone: Backbone, folder: Path) -> None:
    """With `adapts: all`, the copy, the modules and the tensors of every task train, from the trained values on."""
    base = load_graft(folder, backbone)
    with GraftedModel(backbone, {"graft": base}) as trained:
        names = set(trained.trainable_parameters())
        before = old_predictions(trained)
    with GraftedModel(backbone, {"graft": extend(backbone, folder, adapts="all")}) as model:
        for first, second in zip(old_predictions(model), before, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0)
        own = {name for name in model.trainable_parameters() if "news" in name or name.endswith(f".{len(TASKS)}")}
        assert len(own) == 3 + 12
        assert set(model.trainable_parameters()) == names | own
        assert model.train().model.base_model.encoder.layer[-1].training  # type: ignore[union-attr,index]
