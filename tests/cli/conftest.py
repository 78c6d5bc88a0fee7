"""A folder such as a user has, and `graft`, in this process or a new one."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.tools import RECIPE, WORDS, Graft, Outcome, invoke
from tiny import BackboneFolder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """The user's folder; tests write below `runs` alone, each under a name of its own."""
    folder = tmp_path_factory.mktemp("home")
    chance = random.Random(0)
    for name, words in WORDS.items():
        for part in ("train", "test"):
            (folder / name).mkdir(exist_ok=True)
            text = " ".join(chance.choice(words.split()) for _ in range(1000))
            (folder / name / f"{part}.txt").write_text(text, encoding="utf-8")
    for family in ("llama", "gpt2"):
        (folder / family).symlink_to(tiny_backbone(family))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


@pytest.fixture(scope="session")
def trained(home: Path) -> str:
    """A graft of the recipe, trained once; its folder as seen from `home`."""
    with contextlib.chdir(home):
        outcome = invoke("train", "recipe.yaml", "out=runs/trained", "--quiet")
    assert outcome.code == 0, outcome.err
    return "runs/trained/graft"


@pytest.fixture
def graft(home: Path, monkeypatch: pytest.MonkeyPatch) -> Graft:
    """`graft("train", …)` runs a command in this process, in `home`."""
    monkeypatch.chdir(home)
    return invoke


@pytest.fixture
def new_process(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`new_process("train", …)` starts a command in a process of its own, in `home`."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, launcher: tuple[str, ...] = ("-m", "graftlm"), **more: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, *launcher, *arguments]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        started.append(subprocess.Popen(command, cwd=home, env=environment, **(pipes | more)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def fresh_graft(new_process: Callable[..., subprocess.Popen[str]]) -> Graft:
    """As `graft`, but in a new process each time."""

    def run(*arguments: str, stdin: str | None = None, **more: Any) -> Outcome:
        process = new_process(*arguments, **more)
        out, err = process.communicate(stdin, timeout=900)
        return Outcome(process.returncode, out, err)

    return run
