"""The step itself: accumulation, clipping, schedule, and what happens when numbers go wrong."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate.accelerator as accelerator_module
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch.nn.utils import get_total_norm

import graftlm.training.loop as loop_module
from graftlm.data.marked_ids import IGNORED
from graftlm.errors import GraftError, RecipeError, TrainingError
from graftlm.grafted.model import GraftedModel
from graftlm.training import train
from graftlm.training.checkpoint import TrainingCounts, newest_checkpoint
from graftlm.training.history import read_history
from graftlm.training.optimizer import learning_rate, make_optimizer
from training.toy import toy_config, toy_mixture, toy_model, weights


@pytest.mark.parametrize(
    "graft", ["neutral-residues", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adapter", "lora"))]
)
@pytest.mark.parametrize("micro", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_micro_batches_equal_one_big_batch(tmp_path: Path, graft: str, micro: int) -> None:
    results = []
    for size in (None, micro):
        model, out = toy_model(graft), tmp_path / str(size)
        summary = train(model, toy_mixture(), toy_config(micro_batch_size=size), out, progress=False)
        results.append((read_history(summary.history), weights(model)))
    (ours, big), (theirs, small) = results
    for one, two in zip(ours, theirs, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["auxiliary_loss"] == pytest.approx(one["auxiliary_loss"], rel=1e-4, abs=1e-6)
    for name, tensor in big.items():
        torch.testing.assert_close(small[name], tensor, rtol=1e-3, atol=2e-5)


def test_the_history_shows_the_losses_of_the_whole_batch(tmp_path: Path) -> None:
    model = toy_model()
    batch = toy_mixture().batch(0)
    with torch.no_grad():
        expected = model.train()(**batch.inputs(), totals=batch.totals())
    summary = train(model, toy_mixture(), toy_config(micro_batch_size=2), tmp_path, progress=False)
    first, *_, last = read_history(summary.history)
    assert first["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert first["loss"] == pytest.approx(first["lm_loss"] + first["auxiliary_loss"], rel=1e-6)
    assert (first["step"], last["step"], last["tokens"]) == (1, 6, 6 * 8 * 12)
    assert (summary.steps, summary.tokens, summary.loss) == (6, 6 * 8 * 12, last["loss"])
    assert summary.tokens_per_s > 0


def test_one_step_is_adamw_on_the_clipped_gradient(tmp_path: Path) -> None:
    config = toy_config(steps=1, clip=0.01, warmup_steps=0, weight_decay=0.1)
    model, twin = toy_model("adapter"), toy_model("adapter")
    batch = toy_mixture().batch(0)
    twin.train()(**batch.inputs(), totals=batch.totals()).loss.backward()
    trainable = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in trainable.values()]))
    for parameter in trainable.values():
        parameter.grad.mul_(config.clip / norm)
    make_optimizer(trainable, config).step()
    summary = train(model, toy_mixture(), config, tmp_path, progress=False)
    assert read_history(summary.history)[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, trainable[name].detach(), rtol=1e-4, atol=1e-6)


def test_no_steps_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        train(toy_model(), toy_mixture(), toy_config(steps=0), tmp_path / "out", progress=False)
    assert "steps" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("clip", [0.05, None])
def test_the_update_sees_at_most_the_clipped_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    norms, step = [], torch.optim.AdamW.step

    def watch(self: torch.optim.AdamW, *args: object) -> None:
        norms.append(get_total_norm([p.grad for group in self.param_groups for p in group["params"]]).item())
        step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    summary = train(toy_model("adapter"), toy_mixture(), toy_config(clip=clip), tmp_path, progress=False)
    found = [line["gradient_norm"] for line in read_history(summary.history)]
    assert norms == pytest.approx([min(norm, clip or math.inf) for norm in found], rel=1e-3)
    assert max(found) > 0.05


@pytest.mark.parametrize(
    ("schedule", "halfway", "last"),
    [("cosine", 0.55, 0.1 + 0.9 * (1 + math.cos(math.pi * 0.9)) / 2), ("linear", 0.55, 0.19), ("constant", 1, 1)],
)
def test_schedules(schedule: str, halfway: float, last: float) -> None:
    config = toy_config(steps=14, warmup_steps=4, schedule=schedule, learning_rate=2.0, min_ratio=0.1)
    rates = [learning_rate(config, step) / 2 for step in range(14)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates[9] == pytest.approx(halfway)
    assert rates[13] == pytest.approx(last)
    assert learning_rate(config, 14) / 2 == pytest.approx(1 if schedule == "constant" else 0.1)


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    config = toy_config(steps=3, warmup_steps=10)
    assert [learning_rate(config, step) / config.learning_rate for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_vectors_do_not_decay() -> None:
    module = torch.nn.Linear(2, 3)
    groups = make_optimizer(dict(module.named_parameters()), toy_config(weight_decay=0.5)).param_groups
    assert [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in groups] == [(0.5, [2]), (0.0, [1])]
    assert {group["betas"] for group in groups} == {(0.9, 0.95)}


def poison(model: GraftedModel, monkeypatch: pytest.MonkeyPatch, at: int, where: str) -> None:
    """Make the loss or the gradient of step `at` (from 0) not a number."""
    forward, calls = model.forward, iter(range(100))

    def poisoned(**inputs: object) -> object:
        output = forward(**inputs)
        if next(calls) == at:
            if where == "loss":
                output.loss = output.loss * math.nan
            else:
                output.loss.register_hook(lambda gradient: gradient * math.inf)
        return output

    monkeypatch.setattr(model, "forward", poisoned)


@pytest.mark.parametrize(("where", "named"), [("loss", "loss is nan"), ("gradient", "gradient's norm is (nan|inf)")])
def test_a_step_that_goes_wrong_leaves_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, named: str
) -> None:
    good = toy_model("adapter")
    config = toy_config(schedule="constant", checkpoint_every=100)
    train(good, toy_mixture(), config.model_copy(update={"steps": 3}), tmp_path / "good", progress=False)

    model = toy_model("adapter")
    poison(model, monkeypatch, 3, where)
    with pytest.raises(TrainingError, match=rf"step 4 the {named}"):
        train(model, toy_mixture(), config, tmp_path / "bad", progress=False)
    assert all(torch.equal(tensor, weights(good)[name]) for name, tensor in weights(model).items())
    kept, expected = (newest_checkpoint(tmp_path / name / "checkpoints") for name in ("bad", "good"))
    assert kept is not None
    assert expected is not None
    assert kept.step == 3
    for file in ("tensors.safetensors", "optimizer.safetensors"):
        assert (kept.path / file).read_bytes() == (expected.path / file).read_bytes()
    lines = (tmp_path / "bad/history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_first_step_that_goes_wrong_is_told_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()
    before = weights(model)
    poison(model, monkeypatch, 0, "loss")
    with pytest.raises(TrainingError) as error:
        train(model, toy_mixture(), toy_config(), tmp_path, progress=False)
    assert "step 1" in str(error.value)
    assert "nan" in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_gates_that_are_all_closed_do_not_stop_the_run(tmp_path: Path) -> None:
    model = toy_model()
    with torch.no_grad():
        for block in model.grafts["graft"].blocks:
            block.gate.weight.zero_()
            block.gate.bias.zero_()
    before = weights(model)
    train(model, toy_mixture(), toy_config(steps=2), tmp_path, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path: Path) -> None:
    losses = []
    for checkpointing in (False, True):
        config = toy_config(gradient_checkpointing=checkpointing)
        summary = train(toy_model(), toy_mixture(), config, tmp_path / str(checkpointing), progress=False)
        losses.append([line["loss"] for line in read_history(summary.history)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_steps_between_log_lines(tmp_path: Path) -> None:
    summary = train(toy_model(), toy_mixture(), toy_config(steps=7, log_every=3), tmp_path, progress=False)
    assert [line["step"] for line in read_history(summary.history)] == [3, 6, 7]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(toy_model(), toy_mixture(), toy_config(steps=2, tracker="tensorboard"), tmp_path, progress=False)
    assert list(tmp_path.rglob("events.out.tfevents*"))


@pytest.mark.parametrize("name", sorted(map(str, LOGGER_TYPE_TO_CLASS)))
def test_a_tracker_that_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    package = name.replace("_", "-")
    with pytest.raises(GraftError) as error:
        train(toy_model(), toy_mixture(), toy_config(tracker=name), tmp_path, progress=False)
    assert package in str(error.value)


def test_every_tracker_of_accelerate_gets_settings_and_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Recording(GeneralTracker):
        name, requires_logging_directory, main_process_only = "mlflow", False, False

        def __init__(self, run_name: str, **_: Any) -> None:
            super().__init__()
            self.run = run_name

        @property
        def tracker(self) -> str:
            return self.run

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            logged.append(values)

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            logged.append((step, values["loss"]))

    monkeypatch.setitem(sys.modules, "mlflow", type(sys)("mlflow"))
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Recording)
    monkeypatch.setattr(accelerator_module, "filter_trackers", lambda *_: ["mlflow"])
    train(toy_model(), toy_mixture(), toy_config(steps=2, tracker="mlflow"), tmp_path, progress=False)
    assert logged[0]["steps"] == 2
    assert [step for step, _ in logged[1:]] == [1, 2]
    monkeypatch.setattr(Recording, "store_init_configuration", lambda *_: 1 / 0)
    with pytest.raises(TrainingError) as error:
        train(toy_model(), toy_mixture(), toy_config(steps=2, tracker="mlflow"), tmp_path / "b", progress=False)
    assert "mlflow" in str(error.value)
    assert "division by zero" in str(error.value)


def test_a_tracker_that_accelerate_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        train(toy_model(), toy_mixture(), toy_config(tracker="wandbb"), tmp_path, progress=False)
    assert "wandbb" in str(error.value)


def test_a_model_with_nothing_to_train(tmp_path: Path) -> None:
    model = toy_model().requires_grad_(False)
    with pytest.raises(TrainingError) as error:
        train(model, toy_mixture(), toy_config(), tmp_path, progress=False)
    assert "training.steps" in str(error.value)


def test_a_mixture_of_another_batch_size(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        train(toy_model(), toy_mixture(4), toy_config(), tmp_path, progress=False)
    assert "batch_size is 8" in str(error.value)


def test_grafts_in_half_precision_are_refused(tmp_path: Path) -> None:
    model = toy_model()
    model.grafts.to(torch.bfloat16)
    with pytest.raises(TrainingError) as error:
        train(model, toy_mixture(), toy_config(), tmp_path, progress=False)
    assert "grafts.graft." in str(error.value)
    assert "bfloat16" in str(error.value)


def test_a_typo_in_the_config() -> None:
    with pytest.raises(RecipeError) as error:
        toy_config(learning_rte=1)
    assert "learning_rte" in str(error.value)
    assert "learning_rate" in str(error.value)


def test_the_progress_bar_shows_loss_and_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlm.progress.SECONDS_BETWEEN_LINES", 0.0)
    train(toy_model(), toy_mixture(), toy_config(), tmp_path, progress=True)
    captured = capsys.readouterr()
    shown = captured.out + captured.err  # the command line moves rich's console of this process to stderr
    assert "6/6" in shown
    assert "loss" in shown
    assert "tokens/s" in shown


def test_random_numbers_depend_on_seed_step_and_process() -> None:
    drawn = []
    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        loop_module._seed(*key)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[4]
    assert len(set(drawn)) == 4


def test_a_step_is_without_target_only_if_all_of_its_rows_are() -> None:
    batch = toy_mixture(batch_size=3).batch(0)
    counts = TrainingCounts()
    for without in (0, 1, 2, 3):
        labels = batch.labels.clone()
        labels[:without] = IGNORED
        loop_module._count_targets(counts, replace(batch, labels=labels))
    assert counts.rows_without_target == 0 + 1 + 2 + 3
    assert counts.steps_without_target == 1
