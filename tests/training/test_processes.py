"""Two processes give what one gives: losses, weights and a whole graft, copied (DDP) or sharded (FSDP2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graftlm.backbone import Backbone
from graftlm.errors import TrainingError
from graftlm.training import train
from graftlm.training.distributed import distributed
from graftlm.training.history import read_history
from tiny import tiny_model
from training.toy import run_jobs, toy_config, toy_mixture, toy_model

TOLERANCE = 1e-5  # relative to the largest weight, and to the loss: only the order of sums differs
SHARDED = {"sharded": True}
JOBS = [
    {"name": "ddp"},
    {"name": "ddp-micro", "training": {"micro_batch_size": 1}},
    {"name": "ddp-lora", "graft": "lora"},
    {"name": "ddp-finetune", "graft": "finetune"},
    {"name": "ddp-composition", "graft": "composition"},
    {"name": "ddp-adapter", "graft": "adapter"},
    {"name": "ddp-llama-pro", "graft": "llama-pro"},
    {"name": "ddp-osf", "graft": "osf"},
    {"name": "ddp-memory", "graft": "memory"},
    {"name": "ddp-routed", "graft": "routed"},
    {"name": "ddp-two-experts", "graft": "two-experts"},
    {"name": "ddp-distil", "old_objective": "distil"},
    {"name": "fsdp", "training": SHARDED},
    {"name": "fsdp-micro", "training": SHARDED | {"micro_batch_size": 3}},
    {"name": "fsdp-lora", "graft": "lora", "training": SHARDED},
    {"name": "fsdp-composition", "graft": "composition", "training": SHARDED},
    {"name": "fsdp-finetune", "graft": "finetune", "training": SHARDED},
    {"name": "fsdp-llama-pro", "graft": "llama-pro", "training": SHARDED},
    {"name": "fsdp-adapter", "graft": "adapter", "training": SHARDED},
    {"name": "fsdp-memory", "graft": "memory", "training": SHARDED},
    {"name": "fsdp-routed", "graft": "routed", "training": SHARDED},
    {"name": "fsdp-two-experts", "graft": "two-experts", "training": SHARDED},
]
NAMES = [str(job["name"]) for job in JOBS]
HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parent), str(HERE.parents[1] / "src")])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_jobs(folder, JOBS)
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    launch(folder, JOBS)
    return folder


def launch(folder: Path, jobs: list[dict] | list[str], script: Path = HERE / "toy.py") -> None:
    """Run the jobs of a script in two processes on the CPU, where `accelerate launch` would start only one."""
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *options, str(script), str(folder), json.dumps(jobs)]
    environment = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "processes.txt").read_text() == "2"


def check_close(theirs: torch.Tensor, ours: torch.Tensor, name: str) -> None:
    """Compare weights or states of Adam, which makes more of the rounding of small gradients."""
    if ours.numel():
        assert (theirs - ours).abs().max() <= 10 * TOLERANCE * ours.abs().max().clamp(min=1e-2), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(alone: Path, together: Path, name: str) -> None:
    ours, theirs = (read_history(folder / name / "history.jsonl") for folder in (alone, together))
    assert len(ours) == toy_config().steps
    for one, two in zip(ours, theirs, strict=True):
        assert one["tokens"] == two["tokens"]
        for key in ("loss", "lm_loss", "auxiliary_loss", "gradient_norm"):
            assert two[key] == pytest.approx(one[key], rel=TOLERANCE, abs=1e-6), (one["step"], key)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_graft_of_two_processes_is_whole(alone: Path, together: Path, name: str) -> None:
    ours, theirs = (load_file(folder / name / "final.safetensors") for folder in (alone, together))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert theirs[key].shape == tensor.shape
        check_close(theirs[key], tensor, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoint_of_two_processes_is_whole(alone: Path, together: Path, name: str) -> None:
    for file in ("tensors.safetensors", "optimizer.safetensors"):
        last = f"checkpoints/step-{toy_config().steps:06d}/{file}"
        ours, theirs = (load_file(folder / name / last) for folder in (alone, together))
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
        for key, tensor in ours.items():
            check_close(theirs[key], tensor, key)


@pytest.mark.slow
def test_one_process_resumes_what_two_sharded_ones_began(alone: Path, together: Path) -> None:
    jobs = [{"name": "fsdp", "training": {"steps": toy_config().steps + 2}}]
    for folder in (alone, together):
        run_jobs(folder, jobs)
    ours, theirs = (load_file(folder / "fsdp" / "final.safetensors") for folder in (alone, together))
    for key, tensor in ours.items():
        check_close(theirs[key], tensor, key)


def test_uneven_shares_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 3))
    with (
        pytest.raises(TrainingError) as error,
        distributed(toy_model(), toy_config(), tmp_path),
    ):
        pass
    assert "3 processes" in str(error.value)


@pytest.mark.parametrize(
    ("model", "key"),
    [({"old_objective": "distil"}, "old_objective"), ({"kind": "osf"}, "training.sharded")],
)
def test_a_model_that_can_not_be_sharded_is_refused(
    model: dict[str, str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 2))
    with (
        pytest.raises(TrainingError) as error,
        distributed(toy_model(**model), toy_config(sharded=True), tmp_path),
    ):
        pass
    assert key in str(error.value)


def test_training_leaves_the_callers_model_as_it_was(tmp_path: Path) -> None:
    model = toy_model().eval()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    train(model, toy_mixture(), toy_config(steps=2, precision="bf16"), tmp_path, progress=False)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_two_runs_in_one_process_may_differ_in_precision(tmp_path: Path) -> None:
    losses = {}
    for precision in ("bf16", "fp32", "bf16"):
        out = tmp_path / f"{precision}-{len(losses)}"
        losses[out.name] = train(
            toy_model("adapter"), toy_mixture(), toy_config(steps=2, precision=precision), out, progress=False
        ).loss
    assert losses["bf16-0"] == losses["bf16-2"] != losses["fp32-1"]
    assert losses["bf16-0"] == pytest.approx(losses["fp32-1"], rel=2e-2)


@pytest.mark.parametrize(
    ("half_backbone", "precision", "short", "fused"),
    [
        (False, "bf16", 128, False),
        (True, "fp32", 128, False),
        (False, "bf16", 1, True),
        (False, "fp32", 128, True),
    ],
)
def test_attention_is_plain_for_short_texts_in_half_precision(
    half_backbone: bool, precision: str, short: int, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlm.training.distributed.SHORT", short)
    backbone = Backbone.wrap(tiny_model("llama").to(torch.bfloat16 if half_backbone else torch.float32))
    model, seen = toy_model("adapter", backbone), []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.flash_sdp_enabled()))
    train(model, toy_mixture(), toy_config(steps=1, precision=precision), tmp_path, progress=False)
    assert set(seen) == {fused}
    assert torch.backends.cuda.flash_sdp_enabled(), "as it was"


def test_in_half_precision_neither_attention_nor_recomputation_change_more_than_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {}
    for short in (128, 1):
        for again in (False, True):
            monkeypatch.setattr("graftlm.training.distributed.SHORT", short)
            config = toy_config(steps=3, precision="bf16", gradient_checkpointing=again)
            out = tmp_path / f"{short}-{again}"
            losses[out.name] = train(toy_model("adapter"), toy_mixture(), config, out, progress=False).loss
    assert list(losses.values()) == pytest.approx([losses["128-False"]] * 4, rel=2e-2)


def test_a_frozen_bfloat16_backbone_trains_with_float32_grafts(tmp_path: Path) -> None:
    model = toy_model("adapter", Backbone.wrap(tiny_model("llama").to(torch.bfloat16)))
    assert {p.dtype for p in model.trainable_parameters().values()} == {torch.float32}
    summary = train(model, toy_mixture(), toy_config(precision="bf16", steps=20), tmp_path, progress=False)
    first = read_history(summary.history)[0]["loss"]
    assert summary.loss < first
