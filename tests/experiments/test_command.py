"""python -m experiments: its options, and its one-sentence errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import experiments.__main__ as command
from experiments import EXPERIMENTS
from graftlm.evaluation import Results, Row


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["experiments", *arguments])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    return int(exit_.value.code or 0)


def test_options_reach_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    seen: list[Any] = []

    def reproduce(name: str, options: Any) -> Results:
        seen.append((name, options.model_dump(mode="json")))
        results = Results.here("stand-in", [Row(id="backbone", label="backbone", metrics={"old": 1.5})])
        results.write(options.out)
        return results

    monkeypatch.setattr(command, "reproduce", reproduce)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "some-paper", "--data", "texts", "--quick") == 0
    assert "runs/some-paper/results.json" in capsys.readouterr().out
    more = ("--seeds", "3,4", "--table", "2", "--table", "7", "--jobs", "1", "--out", "runs/some", "--device", "cpu")
    assert run(monkeypatch, "some-paper", "--data", "texts", *more, "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"]["rows"]
    default = {
        "data": str(tmp_path / "texts"),
        "out": "runs/some-paper",
        "seeds": [0, 1, 2],
        "tables": [],
        "quick": True,
    }
    other = {"out": "runs/some", "seeds": [3, 4], "tables": ["2", "7"], "quick": False, "jobs": 1, "device": "cpu"}
    unset = {"jobs": 2, "device": None, "backbone": None, "endpoint": None, "models": [], "scorers": []}
    unset |= {"user": None, "user_endpoint": None, "limit": None, "concurrency": 4, "prices": None, "user_prices": None}
    assert seen[0] == ("some-paper", default | unset)
    assert seen[1][1] == seen[0][1] | other


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("neutral-residue", "--data", "."),
            "error: There is no experiment 'neutral-residue' (did you mean neutral-residues?).",
        ),
        (
            ("neutral-residues", "--data", ".", "--seeds", "0,one"),
            "error: python -m experiments: seeds.1: the value should be a valid integer, but found 'one'.",
        ),
        (
            ("neutral-residues",),
            f"error: The data folder {Path('data').absolute()} lacks lm_text/eltec_eng.jsonl",
        ),
    ],
)
def test_a_mistake_gets_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys, arguments, sentence: str) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_the_table_of_experiments_matches_the_folders() -> None:
    folders = {path.parent for path in Path(command.__file__).parent.glob("*/__init__.py")}
    assert {f"experiments.{folder.name}" for folder in folders} == set(EXPERIMENTS.values())
    for folder in folders:
        page = (folder / "README.md").read_text(encoding="utf-8")
        assert (folder / "run.py").is_file()
        # Comparisons are declared before the run, so a page may precede its results.
        is_measured = (folder / "results.json").is_file() and (folder / "report.md").is_file()
        assert is_measured or "## Result" not in page, folder
        assert is_measured or "not measured yet" in page, folder
