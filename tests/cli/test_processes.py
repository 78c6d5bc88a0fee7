"""Behaviour that needs separate processes: signals, pipes, launchers, and the time of the help."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.tools import Graft

Start = Callable[..., "subprocess.Popen[str]"]


def wait_for_steps(history: Path, steps: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run has logged a number of steps."""
    deadline = time.monotonic() + 600
    while not history.exists() or history.read_text().count("\n") < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.02)


@pytest.mark.slow
def test_an_interrupted_and_a_killed_run_go_on(graft: Graft, new_process: Start, home: Path) -> None:
    settings = ("training.schedule=constant", "training.checkpoint_every=1", "training.keep_checkpoints=1")
    endless = ("train", "recipe.yaml", "training.steps=1000000", *settings, "out=runs/cut")
    history = home / "runs/cut/history.jsonl"

    first = new_process(*endless)
    wait_for_steps(history, 3, first)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=300)
    assert (first.returncode, out) == (130, "")
    assert err.splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in err

    done = history.read_text().count("\n")
    second = new_process(*endless)
    wait_for_steps(history, done + 3, second)
    second.kill()
    second.communicate()

    checkpoint = next((home / "runs/cut/checkpoints").glob("step-*"))
    steps = int(checkpoint.name.removeprefix("step-")) + 2
    finished = ("train", "recipe.yaml", f"training.steps={steps}", *settings, "--quiet")
    last = graft(*finished, "out=runs/cut")
    assert last.code == 0, last.err
    assert [json.loads(line)["step"] for line in history.read_text().splitlines()] == list(range(1, steps + 1))
    whole = graft(*finished, "out=runs/whole")
    assert whole.code == 0, whole.err
    resumed_tensors = load_file(home / "runs/cut/graft/graft.safetensors")
    whole_tensors = load_file(home / "runs/whole/graft/graft.safetensors")
    assert resumed_tensors.keys() == whole_tensors.keys()
    for name, tensor in whole_tensors.items():
        assert torch.equal(resumed_tensors[name], tensor), name


@pytest.mark.slow
def test_a_pipe_that_is_closed_is_no_error(new_process: Start) -> None:
    process = new_process("schema")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(600)


@pytest.mark.slow
def test_two_launched_processes_print_once(fresh_graft: Graft, home: Path) -> None:
    # On a CPU, `accelerate launch` starts only one process.
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "graftlm")
    outcome = fresh_graft("train", "recipe.yaml", "out=runs/launched", launcher=launcher)
    assert outcome.code == 0, outcome.err[-2000:]
    assert outcome.out.count("\nresults  ") == 1
    assert outcome.err.count("Sampling 300 tokens") == 1
    assert outcome.err.count("Training neutral residues") == 1
    results = json.loads((home / "runs/launched/results.json").read_text())
    assert results["command"].startswith("graft train recipe.yaml")


def test_help_is_quick_and_imports_nothing_heavy(new_process: Start) -> None:
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = new_process("--help", launcher=("-X", "importtime", "-m", "graftlm"))
        out, err = process.communicate(timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user = after.ru_utime - before.ru_utime
        system = after.ru_stime - before.ru_stime
        seconds.append(user + system)
        assert process.returncode == 0
        assert "compare" in out
        imported = set(re.findall(r"\| +(\w+)", err))
        assert "typer" in imported
        assert imported.isdisjoint({"torch", "transformers", "pydantic", "numpy", "matplotlib"})
    assert min(seconds) < 0.5
