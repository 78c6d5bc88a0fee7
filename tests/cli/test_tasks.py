"""`graft train` on tasks, `graft eval --rows` and `graft predict`, as a user types them."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import yaml

from cli.tools import Graft, invoke
from graftlm.data.labelled import LabelledConfig
from graftlm.errors import DataError
from graftlm.generation.predict import read_questions
from tiny import BackboneFolder
from training.tasks import task_recipe, tasks_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """A folder with a trained graft in `run/graft`."""
    folder = tmp_path_factory.mktemp("served")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(task_recipe(folder, tiny_backbone("bert"))))
    outcome = invoke("train", str(recipe), "training.steps=2", "--quiet", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["results"]["rows"][0]["metrics"]["average"]
    return folder


def test_rows_are_measured(graft: Graft, served: Path) -> None:
    tasks = tasks_of(served / "rows")
    arguments: list[str] = []
    for name, task in tasks.items():
        arguments += ["--rows", f"{name}={task['test']}"]
    outcome = graft("eval", str(served / "run/graft"), *arguments, "--json")
    assert outcome.code == 0, outcome.err
    measured = json.loads(outcome.out)["rows"][0]["metrics"]
    trained = json.loads((served / "run/results.json").read_text())["rows"][0]["metrics"]
    assert measured == pytest.approx({name: trained[name] for name in measured}, abs=1e-3)
    shown = graft("eval", str(served / "run/graft"), *arguments[:2], "--out", str(served / "measured"))
    assert "task sigma" in shown.out
    assert "| topic | 24 |" in (served / "measured/report.md").read_text()
    report = (served / "run/report.md").read_text()
    assert all(f"| {name} | 24 |" in report for name in tasks)


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
    stdin = f"{line}\n{line}\n\n".encode()
    outcome = graft("predict", str(served / "run/graft"), "--task", task, stdin=stdin)
    assert outcome.code == 0, outcome.err
    first, second = outcome.out.splitlines()
    assert json.loads(first).keys() == keys
    assert rounded(first) == rounded(second)


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_graft_of_an_encoder_writes_no_text(graft: Graft, served: Path, verb: str) -> None:
    outcome = graft(verb, str(served / "run/graft"), *(["hello"] if verb == "generate" else []))
    assert outcome.code == 2
    assert "graft predict" in outcome.err
    assert outcome.err.count("\n") == 1


def rounded(line: str) -> object:
    """Return the JSON of a line with rounded numbers, since batches of different shapes differ in the last bits."""
    return json.loads(line, parse_float=lambda number: round(float(number), 4))


TOPIC = LabelledConfig.parse({"type": "classification", "train": "rows.csv"})


def test_only_the_first_mark_of_stdin_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffa\n\ufeffb\n".encode())))
    assert [row.texts for row in read_questions(TOPIC, "-")] == [("a",), ("\ufeffb",)]


@pytest.mark.parametrize(("lines", "number"), [("a\n\nb\n", 2), ("\n \na\n", 1)])
def test_an_empty_line_before_others_is_refused(tmp_path: Path, lines: str, number: int) -> None:
    path = tmp_path / "lines.txt"
    path.write_text(lines)
    with pytest.raises(DataError) as caught:
        list(read_questions(TOPIC, str(path)))
    assert f"line {number} " in str(caught.value)
    path.write_text("a\nb\n\n\n")
    assert len(list(read_questions(TOPIC, str(path)))) == 2, "the end of a file has no text"


def test_a_pipe_with_a_name_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("a\nb\n",))
    writer.start()
    assert [row.texts for row in read_questions(TOPIC, str(pipe))] == [("a",), ("b",)]
    writer.join()


TAGGING = LabelledConfig.parse({"type": "tagging", "train": "rows.conll"})


def test_words_of_a_conll_file_are_read_without_their_tags(tmp_path: Path) -> None:
    text = "Anna\tB-person\nran\tO\n\nRome\tB-place\n"
    named = tmp_path / "a.conll"
    named.write_text(text)
    assert [row.texts for row in read_questions(TAGGING, str(named))] == [("Anna", "ran"), ("Rome",)]
    lines = tmp_path / "a.txt"
    lines.write_text("Anna ran\nRome\n")
    assert [row.texts for row in read_questions(TAGGING, str(lines))] == [("Anna", "ran"), ("Rome",)]
    for tagged in (text, "Anna B-person\nran O\n\nRome B-place\n"):
        lines.write_text(tagged)
        with pytest.raises(DataError, match="conll"):
            list(read_questions(TAGGING, str(lines)))
    for sentences in ("They flew a B-52\n", "Her group is O\nThe end\n"):
        lines.write_text(sentences)
        assert list(read_questions(TAGGING, str(lines))), "a sentence may end in a word like a tag"


@pytest.mark.parametrize("name", ["gone", "."])
def test_no_file_of_lines(tmp_path: Path, name: str) -> None:
    source = str(tmp_path / name)
    with pytest.raises(DataError) as caught:
        list(read_questions(TOPIC, source))
    assert source in str(caught.value)


def test_a_truncated_line_is_marked(graft: Graft, served: Path) -> None:
    lines = "quick fox " * 99 + "\nquick fox\n"
    outcome = graft("predict", str(served / "run/graft"), "--task", "animals", stdin=lines.encode())
    assert [json.loads(line).get("truncated") for line in outcome.out.splitlines()] == [True, None]


@pytest.mark.slow
def test_a_file_and_stdin_in_a_new_process_give_the_same(graft: Graft, served: Path, fresh_graft: Graft) -> None:
    folder = str(served / "run/graft")
    rows = served / "rows/topic.jsonl"
    of_file = graft("predict", folder, str(rows), "--task", "topic")
    piped = fresh_graft("predict", folder, "-", "--task", "topic", "--text-column", "text", stdin=rows.read_text())
    assert piped.code == 0, piped.err
    file_predictions = [json.loads(line) for line in of_file.out.splitlines()]
    piped_predictions = [json.loads(line) for line in piped.out.splitlines()]
    assert [row["label"] for row in file_predictions] == [row["label"] for row in piped_predictions]
    assert len(file_predictions) == 24
    whole = graft("predict", folder, str(rows), "--task", "topic", "--json")
    assert json.loads(whole.out) == file_predictions


@pytest.mark.parametrize(
    ("arguments", "stdin", "named"),
    [
        (("predict", "GRAFT", "--task", "topics"), "", ("'topics'", "did you mean topic?")),
        (("predict", "GRAFT", "--task", "alike"), "one text\n", ("stdin", "line 1", "a, b")),
        (("predict", "GRAFT", "gone.csv", "--task", "topic"), "", ("gone.csv", "-")),
        (
            ("predict", "GRAFT", "--task", "topic", "--text-column", "text"),
            "[1]\n",
            ("stdin", "line 1", "JSON", "text"),
        ),
        (("eval", "runs/gone"), "", ("no folder runs/gone",)),
        (("eval", "GRAFT", "--rows", "gone=a.csv"), "", ("'gone'",)),
        (("eval", "GRAFT", "--rows", "topic=gone.csv"), "", ("gone.csv", "topic")),
        (
            ("eval", "GRAFT", "--rows", "topic=a.csv", "--text", "b.txt"),
            "",
            ("--rows", "--text", "--examples", "--tasks"),
        ),
        (("eval", "GRAFT", "--rows", "topic=a.csv", "--limit", "2"), "", ("--limit",)),
        (("eval", "GRAFT", "--text", "old=old/test.txt"), "", ("--rows NAME=FILE",)),
    ],
)
def test_mistakes_are_named(
    graft: Graft,
    served: Path,
    arguments: tuple[str, ...],
    stdin: str,
    named: tuple[str, ...],
) -> None:
    words = [str(served / "run/graft") if word == "GRAFT" else word for word in arguments]
    outcome = graft(*words, stdin=stdin.encode())
    assert (outcome.code, outcome.out) == (2, "")
    assert all(text in outcome.err for text in named), outcome.err
    assert outcome.err.count("\n") == 1


def test_a_graft_without_heads_is_refused(graft: Graft, trained: str) -> None:
    outcome = graft("predict", trained, "--task", "topic", stdin=b"a\n")
    assert outcome.code == 2
    assert trained in outcome.err
