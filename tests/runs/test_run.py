"""Run and execute: keys, the cache of results, dependencies, the process pool, and what a kill leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from filelock import FileLock

from graftlm.errors import EvaluationError, RecipeError
from graftlm.evaluation import Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.runs.execute import execute
from graftlm.runs.run import Run, RunContext


class SumRun(Run):
    """Adds a number to the sums of its dependencies, and counts how often it is done."""

    number: int = 1
    path: str | None = None
    settings_of: dict[str, Any] = {}

    def artefacts(self) -> tuple[str, ...]:
        return ("sum.txt",)

    def measure(self, context: RunContext) -> Measurement:
        context.folder.mkdir(parents=True, exist_ok=True)
        total = self.number + sum(int((folder / "sum.txt").read_text()) for folder in context.dependencies.values())
        (context.folder / "sum.txt").write_text(str(total))
        with (context.folder / "done.txt").open("a") as file:
            file.write("x")
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics={"sum": total}), {"losses": [[1, 0.5]]})


def times(out: Path, name: str) -> int:
    return len((out / name / "done.txt").read_text())


def test_a_finished_run_is_read_back_and_a_changed_one_is_done_again(tmp_path: Path) -> None:
    first = execute([SumRun(id="a"), SumRun(id="b", number=2)], tmp_path, progress=False)
    assert [first[name].row.metrics["sum"] for name in "ab"] == [1, 2]
    again = execute([SumRun(id="a", label="A"), SumRun(id="b", number=3)], tmp_path, progress=False)
    assert (times(tmp_path, "a"), times(tmp_path, "b")) == (1, 2)
    assert again["a"].row.label == "A", "a label is no part of the key"
    assert again["a"].details == {"losses": [[1, 0.5]], "run_seconds": first["a"].details["run_seconds"]}
    assert again["b"].row.metrics["sum"] == 3


def test_a_run_is_done_again_when_a_dependency_changes(tmp_path: Path) -> None:
    def runs(number: int) -> list[SumRun]:
        return [SumRun(id="b", depends_on=("a",)), SumRun(id="a", number=number), SumRun(id="c", depends_on=("b",))]

    assert execute(runs(1), tmp_path, progress=False)["c"].row.metrics["sum"] == 3
    assert execute(runs(1), tmp_path, progress=False)["c"].row.metrics["sum"] == 3
    assert times(tmp_path, "c") == 1
    assert execute(runs(5), tmp_path, progress=False)["c"].row.metrics["sum"] == 7
    assert times(tmp_path, "c") == 2


def test_a_path_counts_by_content_and_not_by_name(tmp_path: Path) -> None:
    for name, text in {"one.txt": "text", "two.txt": "text", "other.txt": "more"}.items():
        (tmp_path / name).write_text(text)
    keys = [SumRun(id="a", path=str(tmp_path / name)).key() for name in ("one.txt", "two.txt", "other.txt")]
    assert keys[0] == keys[1] != keys[2]
    assert SumRun(id="b", path=str(tmp_path / "one.txt")).key() == keys[0], "an id is no part of the key"


def test_every_text_that_names_a_file_or_a_folder_counts_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bare names, `~`, nested files and texts in lists too. The values are those of recipes, so `kind` is a name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model" / "1_Dense").mkdir(parents=True)
    (tmp_path / "lora").mkdir()
    files = {"intents.csv": "intents.csv", "~/home.txt": "home.txt", "model": "model/1_Dense/weights"}
    for value, file in files.items():
        (tmp_path / file).write_text("before")
        key = SumRun(id="a", settings_of={"train": [value], "kind": "lora"}).key()
        (tmp_path / "lora" / "checkpoint").write_text(value)
        assert SumRun(id="a", settings_of={"train": [value], "kind": "lora"}).key() == key, "a kind is no folder"
        (tmp_path / file).write_text("after")
        assert SumRun(id="a", settings_of={"train": [value], "kind": "lora"}).key() != key, value


def test_a_measurement_of_another_folder_does_not_stand_for_an_artefact(tmp_path: Path) -> None:
    """The runs of `graft train` and `graft compare` share an id and differ in their folders."""
    run, changed = SumRun(id="a", folder="."), SumRun(id="a", number=2)
    execute([run], tmp_path, progress=False)
    execute([changed], tmp_path, progress=False)
    execute([changed.model_copy(update={"folder": "."})], tmp_path, progress=False)
    assert (tmp_path / "sum.txt").read_text() == "2"


def test_a_run_that_failed_half_way_is_not_finished_with_its_old_settings(tmp_path: Path) -> None:
    class Torn(SumRun):
        def measure(self, context: RunContext) -> Measurement:
            measurement = super().measure(context)
            if self.number == 2:
                raise KeyboardInterrupt
            return measurement

    execute([Torn(id="a")], tmp_path, progress=False)
    with pytest.raises(KeyboardInterrupt):
        execute([Torn(id="a", number=2)], tmp_path, progress=False)
    execute([Torn(id="a")], tmp_path, progress=False)
    assert (tmp_path / "a" / "sum.txt").read_text() == "1"


def test_one_process_works_in_a_folder(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(RecipeError) as error:
        execute([SumRun(id="a")], tmp_path, progress=False)
    assert str(tmp_path) in str(error.value)
    execute([SumRun(id="a")], tmp_path, progress=False)


def test_a_folder_is_filled_once_and_again_for_other_content(tmp_path: Path) -> None:
    calls: list[bool] = []

    def fill(folder: Path) -> None:
        calls.append((folder / "text").exists())
        (folder / "text").write_text("x")
        if len(calls) == 1:
            raise KeyboardInterrupt

    source = tmp_path / "source.txt"
    source.write_text("before")
    settings = {"size": 1, "source": str(source)}
    with pytest.raises(KeyboardInterrupt):
        fill_once(tmp_path / "made", settings, fill)
    fill_once(tmp_path / "made", settings, fill)
    fill_once(tmp_path / "made", settings, fill)
    assert calls == [False, True], "a killed call goes on with what it left, and a complete folder stays"
    source.write_text("after")
    fill_once(tmp_path / "made", settings, fill)
    assert calls == [False, True, False], "what other content left is removed"


def test_a_folder_with_files_of_others_is_not_filled(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("of the user")
    with pytest.raises(EvaluationError) as error:
        fill_once(tmp_path, {"size": 1}, lambda folder: None)
    assert str(tmp_path) in str(error.value)
    assert (tmp_path / "weights").read_text() == "of the user"


def test_links_in_a_circle_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_text("text")
    key = SumRun(id="a", path=str(tmp_path / "data")).key()
    (tmp_path / "data" / "circle").symlink_to(tmp_path / "data")
    (tmp_path / "data" / ".cache").mkdir()
    (tmp_path / "data" / ".cache" / "file").write_text("hidden")
    assert SumRun(id="a", path=str(tmp_path / "data")).key() == key


def test_a_lost_artefact_or_a_torn_measurement_is_done_again(tmp_path: Path) -> None:
    run = SumRun(id="a")
    execute([run], tmp_path, progress=False)
    (tmp_path / "a" / "sum.txt").unlink()
    execute([run], tmp_path, progress=False)
    assert times(tmp_path, "a") == 2
    (tmp_path / "measurements" / "a.json").write_text('{"key": "')
    execute([run], tmp_path, progress=False)
    assert times(tmp_path, "a") == 3
    assert json.loads((tmp_path / "measurements" / "a.json").read_text())["key"] == run.key()


@pytest.mark.slow
def test_two_processes_measure_what_one_does(tmp_path: Path) -> None:
    runs = [SumRun(id=f"r{n}", number=n, depends_on=("r0",) if n else ()) for n in range(4)]
    one = execute(runs, tmp_path / "one", progress=False)
    two = execute(runs, tmp_path / "two", jobs=2, title="sums", progress=False)
    assert {name: m.to_json() for name, m in one.items()} == {name: m.to_json() for name, m in two.items()}


class SharingRun(SumRun):
    """Shares something in its process, and fails."""

    shared: ClassVar[list[str]] = []

    def measure(self, context: RunContext) -> Measurement:
        self.shared.append("a loaded backbone")
        raise ValueError("a run that fails")

    @classmethod
    def release(cls) -> None:
        cls.shared.clear()


def test_a_failed_run_leaves_nothing_shared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run that fails"):
        execute([SharingRun(id="a")], tmp_path, progress=False)
    assert not SharingRun.shared


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([SumRun(id="a"), SumRun(id="a", number=2)], ["'a'", "id"]),
        ([SumRun(id="a", folder="x"), SumRun(id="b", folder="x")], ["'a'", "'b'", "folder"]),
        ([SumRun(id="../a")], ["'../a'", "folder"]),
        ([SumRun(id="..")], ["'..'", "folder"]),
        ([SumRun(id="")], ["''", "folder"]),
        ([SumRun(id="measurements")], ["'measurements'", "folder"]),
        ([SumRun(id="a", depends_on=("b",))], ["depends on 'b'"]),
        ([SumRun(id="a", depends_on=("b",)), SumRun(id="b", depends_on=("a",))], ["circle"]),
    ],
)
def test_runs_that_do_not_fit_together(tmp_path: Path, runs: list[SumRun], named: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        execute(runs, tmp_path)
    assert all(value in str(error.value) for value in named), error.value
