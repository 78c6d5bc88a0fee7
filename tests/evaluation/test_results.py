"""results.json keeps its form, goes there and back, and is never half written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from graftlm.errors import EvaluationError, GraftError, RecipeError
from graftlm.evaluation import Aim, Interval, Machine, PaperRow, Results, Row, combine_seeds, origin
from graftlm.evaluation.intervals import _t95

GOLDEN = Path(__file__).parent / "golden_results.json"


def example(**changes: Any) -> Results:
    values: dict[str, Any] = {
        "name": "neutral-residues",
        "command": "graft compare --quick",
        "commit": None,
        "machine": Machine(cpu="a CPU", cores=2, gpu=None, torch="2.8.0"),
        "seeds": [0, 1, 2],
        "rows": [
            Row(id="backbone", label="backbone", metrics={"old": 3.2, "total_parameters": 4_200_000}),
            Row(
                id="lora",
                label="LoRA on FFN",
                metrics={"forgotten": Interval(mean=0.067, low=0.061, high=0.073), "trainable_parameters": 840_000},
            ),
        ],
        "aims": [Aim(text="forgets at most 1/5 of it", metric="forgotten", aim=0.2, measured=0.17, met=True)],
        "paper": [PaperRow(id="lora", metrics={"forgotten": 0.067}, where="Table 2")],
    }
    return Results(**(values | changes))


def test_the_form_is_that_of_the_golden_file(tmp_path: Path) -> None:
    path = example().write(tmp_path)
    assert path == tmp_path / "results.json"
    assert path.read_text(encoding="utf-8") == GOLDEN.read_text(encoding="utf-8")


def test_round_trip_by_folder_and_by_file(tmp_path: Path) -> None:
    results = example(details={"statistics": {"lora": {"open_share": {"old": [0.1, 0.2]}}}})
    path = results.write(tmp_path / "new" / "folder")
    assert Results.read(path) == Results.read(path.parent) == results
    assert isinstance(Results.read(path).row("lora").metrics["trainable_parameters"], int)


def test_here_fills_in_machine_command_and_commit(tmp_path: Path) -> None:
    results = Results.here("demo", [Row(id="a", label="A", metrics={"old": 1.0})])
    assert results.machine.cores >= 1
    assert results.machine.torch
    assert "/" not in results.command.split()[0]
    assert results.commit is None or len(results.commit) == 40
    assert Results.read(results.write(tmp_path)) == results


def test_no_commit_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert origin.source_commit() is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example().write(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EvaluationError):
        example(name="other").write(tmp_path)
    assert Results.read(tmp_path).name == "neutral-residues"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(EvaluationError) as caught:
        example().write(tmp_path / "taken")
    assert "taken" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{", EvaluationError),
        (b"\xff\xfe\x00", EvaluationError),
        (b"[1, 2]", RecipeError),
        (b'{"nam": 1}', RecipeError),
        (b"{}", RecipeError),
    ],
)
def test_bad_files_get_one_sentence(tmp_path: Path, content: bytes, error: type[GraftError]) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(error) as caught:
        Results.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_rows() -> None:
    with pytest.raises(EvaluationError) as caught:
        Results.read("nowhere")
    assert "nowhere" in str(caught.value)
    with pytest.raises(EvaluationError, match=r"lorra.*lora"):
        example().row("lorra")


def test_bad_values() -> None:
    with pytest.raises(RecipeError):
        example(rows=[Row(id="a", label="", metrics={}), Row(id="a", label="", metrics={})])
    with pytest.raises(RecipeError):
        Interval(mean=1, low=2, high=0)
    with pytest.raises(RecipeError) as caught:
        example(details={"loss": math.nan})
    assert "details" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        Row(id="a", label="", metrics={"old": math.nan})
    assert "metrics" in str(caught.value)


def test_seeds_combine_to_students_interval() -> None:
    result = combine_seeds([1.0, 2.0, 3.0])
    assert result.mean == 2
    assert result.high - result.mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    single = Interval(mean=1, low=0, high=2)
    assert combine_seeds([single]) == single
    assert combine_seeds([3.0]) == Interval(mean=3, low=3, high=3)
    assert combine_seeds([single, 1.0]) == Interval(mean=1, low=1, high=1)
    with pytest.raises(EvaluationError):
        combine_seeds([])


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (10, 2.2281), (31, 2.0395), (60, 2.0003), (1000, 1.9623)]
)
def test_students_quantiles(degrees: int, quantile: float) -> None:
    assert _t95(degrees) == pytest.approx(quantile, abs=1e-4)


def test_the_golden_file_is_plain_json() -> None:
    assert set(json.loads(GOLDEN.read_text(encoding="utf-8"))) == {
        "name", "command", "commit", "machine", "seeds", "rows", "aims", "paper",
    }  # fmt: skip
