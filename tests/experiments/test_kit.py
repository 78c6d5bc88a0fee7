"""An experiment on another machine: packed, run for some time there, merged and read back here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import experiments.__main__ as command
import kit_toy.run
from experiments import EXPERIMENTS, Options
from experiments.kit import merge, pack
from experiments.time_limit import TimeIsUp, time_limit
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results
from kit_toy.run import STOPPED


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of the toy experiment."""
    monkeypatch.setitem(EXPERIMENTS, "toy", "kit_toy")
    texts = tmp_path / "data" / "texts"
    texts.mkdir(parents=True)
    (texts / "short.txt").write_text("one", encoding="utf-8")
    (texts / "long.txt").write_text("two words", encoding="utf-8")
    (texts / "unused.txt").write_text("no file of the experiment", encoding="utf-8")
    return tmp_path / "data"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["experiments", *(str(argument) for argument in arguments)])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    return int(exit_.value.code or 0)


def unpacked(kit: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Unpack as on the other machine: by Python alone."""
    done = [sys.executable, "-I", str(kit / "unpack.py"), str(folder)]
    return subprocess.run(done, capture_output=True, text=True, check=False)


def test_a_kit_goes_there_and_its_results_come_back(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    some = ("--data", data, "--jobs", 1)
    monkeypatch.setenv(STOPPED, "long")
    assert call(monkeypatch, "toy", *some, "--out", here, "--minutes", "5") == 75, "the second run was stopped"
    monkeypatch.delenv(STOPPED)
    assert not (here / "results.json").exists()

    kit = tmp_path / "kit"
    assert call(monkeypatch, "pack", "toy", *some[:2], "--out", here, "--kit", kit, "--part-mb", "0.5") == 0
    assert len(list(kit.glob("kit.tar.gz.*"))) > 1
    assert all(part.stat().st_size <= 2**19 for part in kit.glob("kit.tar.gz.*"))
    there = tmp_path / "there"
    done = unpacked(kit, there)
    assert done.returncode == 0, done.stderr
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert {"src/graftlm/__init__.py", "experiments/study.py", "pyproject.toml", "data/texts/long.txt"} <= names
    assert "out/runs/short/copy.txt" in names, "what is finished goes along"
    assert "data/texts/unused.txt" not in names
    assert not any("checkpoints" in name for name in names if name.startswith("out/"))

    other = ("toy", "--data", there / "data", "--out", there / "out", "--jobs", 1)
    assert call(monkeypatch, *other) == 0
    assert call(monkeypatch, "merge", there / "out", "--out", here) == 0
    assert merge([there / "out"], here) == [], "all are there"
    assert (here / "runs" / "long" / "copy.txt").is_file()
    measured = (here / "runs" / "measurements" / "long.json").read_bytes()
    assert call(monkeypatch, "toy", *some, "--out", here) == 0
    assert (here / "runs" / "measurements" / "long.json").read_bytes() == measured, "it was read back"
    assert [row.id for row in Results.read(here).rows] == ["short", "long"]


def test_damaged_and_missing_parts_are_named(data: Path, tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    pack("toy", Options(data=data, out=tmp_path / "none"), kit, part_bytes=2**19)
    moved = tmp_path / "kit" / "elsewhere"
    moved.mkdir()
    first, second = sorted(kit.glob("kit.tar.gz.*"))[:2]
    first.rename(moved / first.name)
    assert unpacked(kit, tmp_path / "a").returncode == 0, "parts may lie in any folder"
    assert str(tmp_path / "a") in unpacked(kit, tmp_path / "a").stderr, "a folder with files stays as it is"
    second.write_bytes(second.read_bytes()[:-1])
    assert second.name in unpacked(kit, tmp_path / "b").stderr
    second.unlink()
    assert second.name in unpacked(kit, tmp_path / "c").stderr
    assert not (tmp_path / "c").exists()


def test_results_of_other_settings_are_not_merged(data: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        (folder / "runs" / "measurements").mkdir(parents=True)
        (folder / "runs" / "measurements" / "a.json").write_text(json.dumps({"key": str(number)}), encoding="utf-8")
    with pytest.raises(DataError) as error:
        merge(folders, tmp_path / "out")
    assert "two" in str(error.value)
    assert not (tmp_path / "out").exists(), "nothing is copied"
    with pytest.raises(DataError):
        merge([tmp_path / "empty"], tmp_path / "out")
    (folders[0] / "runs" / "measurements" / "b.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError) as error:
        merge(folders[:1], tmp_path / "out")
    assert "b.json" in str(error.value)


def test_what_can_not_be_packed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(data=data, out=tmp_path / "none")
    with pytest.raises(RecipeError) as error:
        pack("toyy", options, tmp_path / "kit")
    assert "toy" in str(error.value)
    with pytest.raises(RecipeError) as error:
        pack("toy", options, data)
    assert str(data) in str(error.value)
    (data / "texts" / "long.txt").unlink()
    with pytest.raises(DataError) as missing:
        pack("toy", options, tmp_path / "kit")
    assert "long.txt" in str(missing.value)
    monkeypatch.delattr(kit_toy.run, "FILES")
    with pytest.raises(RecipeError) as error:
        pack("toy", options, tmp_path / "kit")
    assert "FILES" in str(error.value)


def test_a_limit_ends_what_takes_longer_and_nothing_else() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeIsUp), time_limit(0.001):
        time.sleep(600)
    assert signal.getsignal(signal.SIGALRM) is before
    for minutes in (None, 5.0):
        with time_limit(minutes):
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "no alarm is left"
