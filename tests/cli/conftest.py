"""The folder of a user, and the command `graft`, in this process or in a new one."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cli.tools import RECIPE, WORDS, Graft, Outcome, invoke
from tiny import BackboneFolder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """The user's folder. Tests write only below `runs`, each under a different name."""
    folder = tmp_path_factory.mktemp("home")
    chance = random.Random(0)
    for name, sentence in WORDS.items():
        words = sentence.split()
        (folder / name).mkdir()
        for part in ("train", "test"):
            text = " ".join(chance.choice(words) for _ in range(1000))
            (folder / name / f"{part}.txt").write_text(text, encoding="utf-8")
    for family in ("llama", "gpt2"):
        (folder / family).symlink_to(tiny_backbone(family))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


@pytest.fixture(scope="session")
def trained(home: Path) -> str:
    """The folder, below `home`, of a graft of the recipe that is trained once."""
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
    """`new_process("train", …)` starts a command in a new process, in `home`."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, launcher: tuple[str, ...] = ("-m", "graftlm")) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *launcher, *arguments],
            cwd=home,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def fresh_graft(new_process: Callable[..., subprocess.Popen[str]]) -> Graft:
    """Like `graft`, but each command runs in a new process."""

    def run(*arguments: str, stdin: str | None = None, **options: tuple[str, ...]) -> Outcome:
        process = new_process(*arguments, **options)
        out, err = process.communicate(stdin, timeout=900)
        return Outcome(process.returncode, out, err)

    return run
