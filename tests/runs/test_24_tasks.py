"""The recipe of 24 tasks, on small files of each published form: trained, reported, predicted and served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from graftlm.backbone import load_backbone
from graftlm.generation.predict import TaskGraft, load_task_graft, predict_rows, read_questions
from graftlm.runs.recipe import run_recipe
from graftlm.runs.task_run import TaskRecipe
from graftlm.serving.service import open_service
from graftlm.serving.settings import ServerSettings
from published import COPA, HEADER, MRQA, MULTIRC, RECORD, WIC, WSC, write_lines
from serving.web import running
from tiny import BackboneFolder

EXAMPLE = Path(__file__).parents[2] / "examples/24-tasks.yaml"
ROWS = 6
PAIRS = [("The boat is red.", "A boat has a colour."), ("Snow fell.", "It was warm."), ("Ann ran.", "Ann moved.")]
GLUE = {
    "cola": ([], ("0", "1")),
    "sst2": (["sentence", "label"], ("0", "1")),
    "mrpc": (["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ("0", "1")),
    "stsb": (["index", "genre", "sentence1", "sentence2", "score"], ("0.5", "2.250", "5.000")),
    "qqp": (["id", "qid1", "qid2", "question1", "question2", "is_duplicate"], ("0", "1")),
    "mnli": (["index", "sentence1", "sentence2", "label1", "gold_label"], ("entailment", "neutral", "contradiction")),
    "qnli": (["index", "question", "sentence", "label"], ("entailment", "not_entailment")),
    "rte": (["index", "sentence1", "sentence2", "label"], ("entailment", "not_entailment")),
    "wnli": (["index", "sentence1", "sentence2", "label"], ("0", "1")),
}
"""Header of each file of GLUE, and its labels; the file of CoLA has no header, and four columns."""
FIRST, SECOND = {"sentence", "sentence1", "question", "question1", "#1 String"}, {"sentence2", "question2", "#2 String"}
LABEL = {"label", "Quality", "is_duplicate", "score", "gold_label"}


def glue_cell(column: str, header: list[str], label: str, number: int) -> str:
    """A cell of a row of GLUE."""
    first, second = PAIRS[number % len(PAIRS)]
    has_question = "question" in header  # in QNLI the sentence is the second text
    if column in LABEL:
        return label
    if column in SECOND or (has_question and column == "sentence"):
        return second
    return f'{first} "{number}"' if column in FIRST else str(number)


def write_glue(path: Path, header: list[str], labels: tuple[str, ...]) -> None:
    """Write a file of GLUE, in which quotation marks are text."""
    lines = ["\t".join(header)] if header else []
    for number in range(ROWS):
        label = labels[number % len(labels)]
        if header:
            cells = [glue_cell(column, header, label, number) for column in header]
        else:
            cells = ["gj04", label, "", glue_cell("sentence", header, label, number)]
        lines.append("\t".join(cells))
    path.write_text("\n".join(lines) + "\n")


def labelled(name: str, number: int) -> dict[str, Any]:
    """A row of SuperGLUE."""
    first, second = PAIRS[number % len(PAIRS)]
    even = number % 2 == 0
    rows: dict[str, dict[str, Any]] = {
        "boolq": {"question": "is it red", "passage": f"{first} {number}", "idx": number, "label": even},
        "cb": {"premise": first, "hypothesis": second, "idx": number, "label": "neutral" if even else "entailment"},
        "copa": {**COPA, "idx": number, "label": number % 2},
        "multirc": {**MULTIRC, "idx": number},
        "record": {**RECORD, "idx": number},
        "superglue-rte": {"premise": first, "hypothesis": second, "idx": number, "label": ("entailment", "not")[even]},
        "wic": {**WIC, "idx": number, "label": even},
        "wsc": {**WSC, "idx": number, "label": even},
    }
    return rows[name]


def write_task(name: str, path: Path) -> None:
    """Write a small file in the form in which the task's data is published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in GLUE:
        write_glue(path, *GLUE[name])
    elif name == "wnut":
        words = "Anna\tB-person\nwent\tO\nto\tO\nNew\tB-location\nYork\tI-location"
        path.write_text(f"{words}\n\n" * ROWS)
    elif path.suffix == ".gz":
        contexts = [{**MRQA, "id": str(number)} for number in range(ROWS)]
        write_lines(path, [HEADER, *contexts])
    else:
        write_lines(path, [labelled(name, number) for number in range(ROWS)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> tuple[Path, TaskRecipe]:
    """The example on small files, below one folder, and a tiny encoder."""
    folder = tmp_path_factory.mktemp("tasks24")
    recipe = yaml.safe_load(EXAMPLE.read_text())
    for name, task in recipe["tasks"].items():
        for split in ("train", "test"):
            task[split] = str(folder / task[split])
            write_task(name, Path(task[split]))
        if "stride" in task:
            task["stride"] = 16
    recipe["backbone"] = {"name": str(tiny_backbone("bert")), "device": "cpu"}
    recipe["graft"] |= {"max_length": 64, "task_width": 8, "bottleneck_width": 8}
    recipe["training"] |= {"steps": 8, "batch_size": 8, "warmup_steps": 2}
    recipe |= {"length": 48, "out": str(folder / "run")}
    parsed = TaskRecipe.parse(recipe)
    run_recipe(parsed, progress=False, log=lambda _: None)
    return folder / "run", parsed


@pytest.fixture(scope="module")
def task_graft(run: tuple[Path, TaskRecipe]) -> TaskGraft:
    return load_task_graft(run[0] / "graft")


def test_every_task_is_measured_and_reported(run: tuple[Path, TaskRecipe]) -> None:
    folder, recipe = run
    results = json.loads((folder / "results.json").read_text())
    report = (folder / "report.md").read_text()
    assert len(recipe.tasks) == 24
    for row in results["rows"]:
        missing = recipe.tasks.keys() - row["metrics"].keys()
        assert not missing, row["id"]
    assert [name for name in recipe.tasks if name not in report] == []


def test_every_test_file_is_predicted(run: tuple[Path, TaskRecipe], task_graft: TaskGraft) -> None:
    for name, task in run[1].tasks.items():
        rows = list(read_questions(task_graft.config(name), str(task.test)))
        assert len(rows) >= ROWS, name
        assert all(row.target is None for row in rows)
        answers = list(predict_rows(task_graft, name, rows))
        assert len(answers) == len(rows)


@pytest.fixture(scope="module")
def address(run: tuple[Path, TaskRecipe], tiny_backbone: BackboneFolder) -> Iterator[str]:
    backbone = load_backbone(tiny_backbone("bert"), kind="encoder")
    settings = ServerSettings(port=0)
    with running(open_service(backbone, {"tasks": run[0] / "graft"}, name="tiny", settings=settings)) as address:
        yield address


def texts_of(name: str, task_graft: TaskGraft) -> Any:
    """The text of a request for a task."""
    config = task_graft.config(name)
    if config.type == "tagging":
        return ["Anna", "slept"]
    if config.type == "span":
        return [MRQA["qas"][0]["question"], MRQA["context"]]
    if config.form == "copa":
        return [COPA["premise"], COPA["choice1"], COPA["choice2"]]
    if config.form == "record":
        return [RECORD["passage"]["text"], "The loser was Rome.", "The loser was Paris."]
    if config.form == "wic":
        return [WIC["sentence1"], WIC["sentence2"], "bank", "bank"]
    if config.form == "wsc":
        return [WSC["text"], "Mary Ann", "she"]
    return list(PAIRS[0][: len(config.texts)])


def test_every_task_is_served(address: str, task_graft: TaskGraft) -> None:
    rows = [{"task": name, "text": texts_of(name, task_graft)} for name in task_graft.tasks]
    assert len(rows) == 24
    answer = httpx.post(f"{address}/v1/graftlm/predict", json={"model": "tasks", "rows": rows}, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()["data"]
    assert [row["task"] for row in found] == [row["task"] for row in rows]
    assert not [row for row in found if "error" in row]
    labels = {row["task"]: row.get("label") for row in found}
    assert labels["mnli"] in GLUE["mnli"][1]
    assert labels["cola"] in GLUE["cola"][1]
