"""A run that is cut short anywhere goes on to the same bits."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import graftlm.files.writing as writing_module
import graftlm.training.checkpoint as checkpoint_module
import graftlm.training.history as history_module
from graftlm.data import Document, Mixture
from graftlm.data.labelled import LabelledRow, TaskRows
from graftlm.data.labelled_batches import LabelledMixture
from graftlm.data.row_encoder import RowEncoder
from graftlm.data.samplers import SamplerConfig
from graftlm.data.streams import RowPacker, StreamingBlocks
from graftlm.errors import TrainingError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.heads import TaskSpec
from graftlm.training import train
from graftlm.training.checkpoint import newest_checkpoint
from graftlm.training.history import read_history
from tiny import tiny_tokenizer
from training.toy import run_jobs, toy_config, toy_mixture, toy_model, weights

STEPS = 6


class CutError(Exception):
    """Stands for a kill."""


def run(out: Path, graft: str = "neutral-residues", resume: bool = True, **changes: Any) -> dict[str, torch.Tensor]:
    model = toy_model(graft)
    train(model, toy_mixture(), toy_config(**changes), out, progress=False, resume=resume)
    return weights(model)


def cut_at(step: int, out: Path, graft: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Run until step `step` (from 0) asks for its batch."""
    mixture = toy_mixture()
    draw = mixture.batch

    def batch(at: int) -> Any:
        if at == step:
            raise CutError
        return draw(at)

    monkeypatch.setattr(mixture, "batch", batch)
    with pytest.raises(CutError):
        train(toy_model(graft), mixture, toy_config(**changes), out, progress=False)


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(two[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("graft", "steps"),
    [
        pytest.param("neutral-residues", range(STEPS), marks=pytest.mark.slow),
        ("neutral-residues", (1, STEPS - 1)),
        pytest.param("lora", (5,), marks=pytest.mark.slow),
        pytest.param("lora", (1,), marks=pytest.mark.slow),
        pytest.param("finetune", (3,), marks=pytest.mark.slow),
        pytest.param("finetune", (0,), marks=pytest.mark.slow),
        pytest.param("osf", (3,), marks=pytest.mark.slow),
        pytest.param("llama-pro", (3,), marks=pytest.mark.slow),
        ("memory", (3,)),
    ],
)
def test_resume_is_bit_for_bit(
    tmp_path: Path, graft: str, steps: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", graft)
    for step in steps:
        out = tmp_path / str(step)
        cut_at(step, out, graft, monkeypatch)
        assert same(run(out, graft), whole), step
        assert read_history(out / "history.jsonl") == read_history(tmp_path / "whole/history.jsonl")


class ToyLoss(torch.nn.Module):
    """A mean over the rows of any batch; it is not a number in the calls `bad`."""

    def __init__(self, bad: Container[int] = ()) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(20))
        self.bad = bad
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        loss = self.scale[input_ids % 20].sum(-1).pow(2).mean()
        if self.calls in self.bad:
            loss = loss * math.nan
        self.calls += 1
        return SimpleNamespace(loss=loss, lm_loss=loss.detach(), auxiliary_loss=None)


def toy_stream() -> Mixture:
    documents = [Document(f"document {i} " + "word " * (i % 5)) for i in range(20)]
    packer = RowPacker(lambda: documents, tiny_tokenizer(), 12, repeat=True)
    return Mixture({1: StreamingBlocks(packer, buffer_rows=4)}, {1: 1}, 8)


def toy_tasks() -> LabelledMixture:
    rows = [LabelledRow((f"text {i}",), "xy"[i % 2], f"row {i}") for i in range(20)]
    spec = TaskSpec(type="classification", labels=["x", "y"])
    encoder = RowEncoder(tiny_tokenizer(), 12)
    sampler = SamplerConfig(policy="uncertainty")
    return LabelledMixture({"t": TaskRows(spec, rows)}, encoder, sampler, 8, score=lambda batch: [1.0] * len(batch))


@pytest.mark.parametrize("batches", [toy_mixture, toy_stream, toy_tasks])
def test_a_run_resumes_before_the_step_that_went_wrong(tmp_path: Path, batches: Callable[[], Any]) -> None:
    whole = ToyLoss()
    train(whole, batches(), toy_config(), tmp_path / "whole", progress=False)
    out = tmp_path / "stopped"
    with pytest.raises(TrainingError):
        train(ToyLoss(bad=[3]), batches(), toy_config(), out, progress=False)
    resumed = ToyLoss()
    assert train(resumed, batches(), toy_config(), out, progress=False).resumed_from == 3
    assert same(weights(resumed), weights(whole))


@pytest.mark.slow
def test_the_summary_says_where_it_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_at(5, tmp_path, "neutral-residues", monkeypatch)
    model = toy_model()
    again = train(model, toy_mixture(), toy_config(), tmp_path, progress=False)
    assert (again.resumed_from, again.steps, again.tokens) == (4, 6, 6 * 8 * 12)
    done = train(toy_model(), toy_mixture(), toy_config(), tmp_path, progress=False)
    assert (done.resumed_from, done.loss, done.tokens_per_s) == (6, again.loss, again.tokens_per_s)
    assert train(toy_model(), toy_mixture(), toy_config(), tmp_path, progress=False, resume=False).resumed_from is None


@pytest.mark.slow
def test_random_numbers_go_on_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(self: Any, **inputs: Any) -> Any:
        output = forward(self, **inputs)
        output.loss = output.loss * (1 + torch.rand(()))
        return output

    forward = GraftedModel.forward
    monkeypatch.setattr(GraftedModel, "forward", noisy)
    whole = run(tmp_path / "whole", "adapter")
    cut_at(5, tmp_path / "cut", "adapter", monkeypatch)
    torch.rand(7)
    assert same(run(tmp_path / "cut", "adapter"), whole)


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    run(tmp_path, keep_checkpoints=1, checkpoint_every=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000006"]


def test_none_are_written_where_none_is_kept(tmp_path: Path) -> None:
    run(tmp_path, keep_checkpoints=0, checkpoint_every=1)
    assert not list(tmp_path.glob("checkpoints/*"))


def tear_state(folder: Path) -> None:
    (folder / "state.json").write_text('{"step": 6, "fil')


def tear_tensors(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def flip_bit(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose_file(folder: Path) -> None:
    (folder / "optimizer.safetensors").unlink()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


MORE_DAMAGE = [pytest.param(damage, marks=pytest.mark.slow) for damage in (tear_state, lose_file, empty)]


@pytest.mark.parametrize("damage", [tear_tensors, flip_bit, *MORE_DAMAGE])
def test_a_torn_checkpoint_is_passed_over_and_removed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    whole = run(tmp_path)
    folder = tmp_path / "checkpoints"
    damage(folder / "step-000006")
    (folder / ".step-000008.tmp").mkdir()
    found = newest_checkpoint(folder)
    assert found is not None
    assert found.step == 4
    assert same(run(tmp_path), whole)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000004", "step-000006"]
    assert newest_checkpoint(folder).step == 6  # type: ignore[union-attr]


def test_a_torn_line_of_the_history_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_at(5, tmp_path, "neutral-residues", monkeypatch)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    run(tmp_path)
    assert [line["step"] for line in read_history(tmp_path / "history.jsonl")] == [1, 2, 3, 4, 5, 6]


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_to_safetensors(*_: Any) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("fail", [full_disk, pytest.param(full_disk_to_safetensors, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("module", "step_name"), [(checkpoint_module, "save_file"), (writing_module, "sync")])
def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None], module: Any, step_name: str
) -> None:
    whole = run(tmp_path / "whole")
    out = tmp_path / "full"
    cut_at(3, out, "neutral-residues", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(module, step_name, fail)
        with pytest.raises(TrainingError) as error:
            run(out)
        assert "step-000004" in str(error.value)
        assert "No space left" in str(error.value)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]
    assert same(run(out), whole)


def test_a_history_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "json", SimpleNamespace(dumps=full_disk, loads=json.loads))
    with pytest.raises(TrainingError) as error:
        run(tmp_path)
    assert "history.jsonl" in str(error.value)
    assert "No space left" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 0.5}, ["training.learning_rate = 0.01", "0.5"]),
        pytest.param({"betas": (0.8, 0.9)}, ["training.betas"], marks=pytest.mark.slow),
        ({"steps": 3}, ["step 6", "training.steps is 3"]),
    ],
)
def test_resume_with_other_settings_is_refused(tmp_path: Path, changes: dict[str, Any], named: list[str]) -> None:
    run(tmp_path)
    with pytest.raises(TrainingError) as error:
        run(tmp_path, **changes)
    assert all(value in str(error.value) for value in named), error.value
    run(tmp_path, resume=False, **changes)


def test_the_callers_identity_counts_too(tmp_path: Path) -> None:
    def go(length: int) -> None:
        identity = {"data": {"length": length}}
        train(toy_model(), toy_mixture(), toy_config(), tmp_path, identity=identity, progress=False)

    go(12)
    with pytest.raises(TrainingError) as error:
        go(16)
    assert "data.length = 12" in str(error.value)
    assert "16" in str(error.value)


def test_digests_are_named_but_not_shown(tmp_path: Path) -> None:
    def go(digest: str) -> None:
        train(toy_model(), toy_mixture(), toy_config(), tmp_path, identity={"texts": digest}, progress=False)

    go("a" * 64)
    with pytest.raises(TrainingError) as error:
        go("b" * 64)
    assert "texts" in str(error.value)
    assert "aaaa" not in str(error.value)


def test_a_checkpoint_of_another_graft(tmp_path: Path) -> None:
    run(tmp_path, "adapter")
    with pytest.raises(TrainingError) as error:
        run(tmp_path, "neutral-residues")
    assert "gate.bias" in str(error.value)


@pytest.mark.slow
def test_a_longer_run_goes_on(tmp_path: Path) -> None:
    run(tmp_path, schedule="constant", checkpoint_every=3)
    longer = run(tmp_path, schedule="constant", checkpoint_every=4, steps=9, log_every=2, micro_batch_size=8)
    assert same(longer, run(tmp_path / "whole", schedule="constant", steps=9))


STEPS_TO_KILL = 60


def start_run(folder: Path, context: Any) -> Any:
    jobs = [{"name": "run", "training": {"steps": STEPS_TO_KILL, "checkpoint_every": 1}}]
    process = context.Process(target=run_jobs, args=(folder, jobs))
    process.start()
    return process


def kill_at(process: Any, history: Path, line: int, delay: float) -> None:
    """SIGKILL the process some seconds after the history has this many lines."""
    while process.is_alive() and (not history.exists() or history.read_bytes().count(b"\n") < line):
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run ended before it was killed"


@pytest.mark.slow
def test_kill_nine_at_ten_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # where the server of processes finds this:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training.toy"])
    whole, cut = start_run(tmp_path / "whole", context), tmp_path / "cut/run"
    generator, last = random.Random(0), 0
    for line in sorted(generator.sample(range(STEPS_TO_KILL - 10), 10)):
        kill_at(start_run(tmp_path / "cut", context), cut / "history.jsonl", line, generator.uniform(0, 0.03))
        found = newest_checkpoint(cut / "checkpoints")
        assert (found.step if found else 0) >= last, "a checkpoint was lost"
        last = found.step if found else 0
    final = start_run(tmp_path / "cut", context)
    for process in (whole, final):
        process.join()
        assert process.exitcode == 0
    assert 0 < last < STEPS_TO_KILL
    assert same(*(load_file(tmp_path / name / "run/final.safetensors") for name in ("whole", "cut")))
    ours, theirs = (read_history(tmp_path / name / "run/history.jsonl") for name in ("whole", "cut"))
    assert ours == theirs
