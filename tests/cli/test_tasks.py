"""`graft train` on tasks, `graft eval --rows` and `graft predict`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cli.tools import Graft
from tiny import BackboneFolder
from training.tasks import task_recipe, tasks_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """A folder with a trained graft in `run/graft`."""
    from cli.tools import invoke

    folder = tmp_path_factory.mktemp("served")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(task_recipe(folder, tiny_backbone("bert"))))
    outcome = invoke("train", str(folder / "recipe.yaml"), "training.steps=2", "--quiet", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["results"]["rows"][0]["metrics"]["average"]
    return folder


def test_rows_are_measured(graft: Graft, served: Path) -> None:
    rows = [f"{name}={task['test']}" for name, task in tasks_of(served / "rows").items()]
    arguments = [word for row in rows for word in ("--rows", row)]
    measured = graft("eval", str(served / "run/graft"), *arguments, "--json")
    assert measured.code == 0, measured.err
    metrics = json.loads(measured.out)["rows"][0]["metrics"]
    kept = json.loads((served / "run/results.json").read_text())["rows"][0]["metrics"]
    assert metrics == pytest.approx({name: kept[name] for name in metrics}, abs=1e-3)
    shown = graft("eval", str(served / "run/graft"), "--rows", rows[0], "--out", str(served / "measured"))
    assert "task sigma" in shown.out
    assert "| topic | 24 |" in (served / "measured/report.md").read_text()
    report = (served / "run/report.md").read_text()
    assert all(f"| {name} | 24 |" in report for name in tasks_of(served / "rows")), "what is confused, task by task"


@pytest.mark.parametrize(
    ("task", "line", "keys"),
    [
        ("topic", "quick fox", {"label", "probability"}),
        ("alike", "quick fox\tfox quick", {"label", "probability"}),
        ("length", "quick fox", {"value"}),
        ("marks", "quick fox", {"labels", "probabilities"}),
        ("where", "which?\tquick fox", {"answer", "start", "end", "probability"}),
        ("animals", "quick fox", {"words", "tags", "entities"}),
    ],
)
def test_lines_are_answered(graft: Graft, served: Path, task: str, line: str, keys: set[str]) -> None:
    outcome = graft("predict", str(served / "run/graft"), "--task", task, stdin=f"{line}\n\n{line}\n".encode())
    assert outcome.code == 0, outcome.err
    first, second = (json.loads(text, parse_float=lambda x: round(float(x), 4)) for text in outcome.out.splitlines())
    assert first.keys() == keys
    assert first == second


def test_a_line_that_was_not_read_to_its_end_says_so(graft: Graft, served: Path) -> None:
    lines = "quick fox " * 99 + "\nquick fox\n"
    outcome = graft("predict", str(served / "run/graft"), "--task", "animals", stdin=lines.encode())
    assert [json.loads(text).get("truncated") for text in outcome.out.splitlines()] == [True, None]


@pytest.mark.slow
def test_a_file_and_stdin_in_a_new_process_say_the_same(graft: Graft, served: Path, fresh_graft: Graft) -> None:
    folder, rows = str(served / "run/graft"), served / "rows/topic.jsonl"
    of_table = graft("predict", folder, str(rows), "--task", "topic")
    piped = fresh_graft("predict", folder, "-", "--task", "topic", "--text-column", "text", stdin=rows.read_text())
    assert piped.code == 0, piped.err
    ours, theirs = ([json.loads(line) for line in text.splitlines()] for text in (of_table.out, piped.out))
    assert [row["label"] for row in ours] == [row["label"] for row in theirs]
    assert len(ours) == 24
    whole = graft("predict", folder, str(rows), "--task", "topic", "--json")
    assert json.loads(whole.out) == ours


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (("predict", "GRAFT", "--task", "topics"), "", "The graft has no task 'topics' (did you mean topic?)."),
        (
            ("predict", "GRAFT", "--task", "alike"),
            "one text\n",
            "stdin: line 1: the number of texts is 1, but 2 (a, b) is expected: give one for each.",
        ),
        (
            ("predict", "GRAFT", "gone.csv", "--task", "topic"),
            "",
            "There is no file gone.csv: name one, or -",
        ),
        (
            ("predict", "GRAFT", "--task", "topic", "--text-column", "text"),
            "[1]\n",
            "stdin: line 1 is no JSON object with text",
        ),
        (("eval", "GRAFT", "--rows", "gone=a.csv"), "", "The graft has no task 'gone'"),
        (("eval", "GRAFT", "--rows", "topic=gone.csv"), "", "There is no file gone.csv: check test of the task topic."),
        (
            ("eval", "GRAFT", "--rows", "topic=a.csv", "--text", "b.txt"),
            "",
            "--rows can't be combined with --text, --examples or --tasks: run",
        ),
        (("eval", "GRAFT", "--text", "old=old/test.txt"), "", "measure it on rows of its tasks (--rows NAME=FILE)."),
    ],
)
def test_what_the_user_can_mend(
    graft: Graft, served: Path, arguments: tuple[str, ...], stdin: str, sentence: str
) -> None:
    words = [str(served / "run/graft") if word == "GRAFT" else word for word in arguments]
    outcome = graft(*words, stdin=stdin.encode())
    assert (outcome.code, outcome.out) == (2, "")
    assert sentence in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_graft_without_heads_is_refused(graft: Graft, trained: str) -> None:
    outcome = graft("predict", trained, "--task", "topic", stdin=b"a\n")
    assert outcome.code == 2
    assert "has no heads to predict with: name one that was trained on tasks." in outcome.err
