"""Conditional tasks beside fine-tuning and adapters, at their smallest: files, rows, the peer's exercise, errors."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Options, conditional_tasks, reproduce
from experiments.conditional_tasks import adapters_peer, peer
from experiments.conditional_tasks.cell import changed, weights_of
from experiments.conditional_tasks.plan import BY_UNCERTAINTY, PEERS, ROWS, Plan, next_rates
from experiments.conditional_tasks.run import aims
from experiments.conditional_tasks.setting import FULL, LABELS, MODULES, OFF
from experiments.conditional_tasks.texts import FEWEST, FILES, SNIPS, TASKS, Sizes, drawn, write_texts
from graftlm.data.labelled import read_held_out_rows, read_training_rows
from graftlm.data.labelled_batches import RowEncoder
from graftlm.errors import DataError, RecipeError, TrainingError
from graftlm.evaluation import Interval, Results, Row, value_of
from graftlm.evaluation.labelled import TaskTestSet
from tiny import tiny_tokenizer

COMMITTED = Path(conditional_tasks.__file__).parent
METRICS = {
    *TASKS,
    "average",
    "task_sigma",
    "data_share",
    "trained_parameters_ratio",
    "total_parameters_ratio",
    "seconds",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight sets in the forms of the real ones."""
    folder = tmp_path_factory.mktemp("data")
    for file in FILES:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
    cls = folder / "cls"
    intents = [[f"sentence {n} of intent {n % 3}", f"intent_{n % 3}"] for n in range(90)]
    parts = {"train": intents[:50], "val": intents[50:70], "test": intents[70:], "oos_train": []}
    write_json(cls / "clinc150/data_full.json", parts)
    for name, start in (("train", 0), ("test", 60)):
        rows = [(f'query, number {n} "{start}"', f"category_{n % 4}") for n in range(start, start + 60)]
        with (cls / "banking77" / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "category"), *rows])
    for intent in SNIPS:
        for name, count in (("train_{}_full", 20), ("validate_{}", 4)):
            rows = [
                {"data": [{"text": f"{intent} "}, {"text": f"é {name} {n}\n", "entity": "x"}]} for n in range(count)
            ]
            text = json.dumps({intent: rows}, ensure_ascii=False)
            (cls / "snips" / f"{name.format(intent)}.json").write_bytes(text.encode("latin-1"))
    pairs = [f"{n}\tWhat is number {n}?\tSentence {n // 2}.\t{('not_', '')[n % 2]}entailment" for n in range(80)]
    (cls / "qnli/dev.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *pairs]) + "\n")
    for name in ("train", "dev", "test"):
        lines = [f"What is {name} {n} ?\t{n % 6 / 5}\n" for n in range(40)]
        (cls / f"query_wellformedness/{name}.tsv").write_text("".join(lines))
    for folder_name, begin, labels in (("hucola", "cola", "01"), ("husst", "sst", ("negative", "neutral", "positive"))):
        for name in ("train", "dev"):
            rows = [{"id": str(n), "Sent": f"Mondat {name} {n}", "label": labels[n % len(labels)]} for n in range(60)]
            write_json(cls / folder_name / f"{begin}_{name}.json", rows)
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        sentences = [f"{name}\tO\nis{n}\tB-place\nin\tI-place\nhere\tO\n" for n in range(40)]
        (folder / "ner/wnut17" / name).write_text("\t\n".join(sentences))
    return folder


def write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")


def options(data: Path, out: Path, **changes: object) -> Options:
    return Options.parse({"data": data, "out": out, "quick": True, "jobs": 1, "seeds": (0,)} | changes)


@pytest.fixture(autouse=True)
def _without_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(peer.PYTHON, raising=False)


def read_texts(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".conll":
        return [" ".join(line.split("\t")[0] for line in one.splitlines()) for one in text.strip().split("\n\n")]
    rows = [json.loads(line) for line in text.splitlines()]
    return [row["sentence"] if "sentence" in row else row["text"] for row in rows]


@pytest.mark.parametrize("task", TASKS)
def test_nothing_of_a_test_is_read_in_training(data: Path, tmp_path: Path, task: str) -> None:
    files = write_texts(data, tmp_path, task, Sizes(14, 6, 8), 0)
    texts = {part: read_texts(file) for part, file in files.items()}
    assert {part: len(rows) for part, rows in texts.items()} == {"train": 14, "validation": 6, "test": 8}
    assert not set(texts["train"]) & {*texts["validation"], *texts["test"]}
    again = write_texts(data, tmp_path / "again", task, Sizes(14, 6, 8), 1)
    assert read_texts(again["train"]) != texts["train"], "training rows are drawn by the seed"
    assert read_texts(again["test"]) == texts["test"], "test rows are not"


@pytest.mark.parametrize("task", TASKS)
def test_the_real_sets(data_dir: Path, tmp_path: Path, task: str) -> None:
    files = write_texts(data_dir, tmp_path, task, Sizes(320, 50, 80), 0)
    texts = {part: read_texts(file) for part, file in files.items()}
    assert {part: len(rows) for part, rows in texts.items()} == {"train": 320, "validation": 50, "test": 80}
    assert not set(texts["train"]) & {*texts["validation"], *texts["test"]}


def test_every_class_is_drawn_even_a_rare_one() -> None:
    rows = [{"text": f"{n}", "label": "rare" if n in (50, 70) else "common"} for n in range(100)]
    train = drawn({"train": rows, "test": [{"text": "t", "label": "rare"}]}, Sizes(10, 5, 1), 0)["train"]
    assert Counter(row["label"] for row in train)["rare"] == FEWEST
    assert len(train) == 10


def test_rows_differ_in_nothing_but_their_difference(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]
) -> None:
    plan = Plan(options(data, tmp_path, backbone=str(tiny_backbone("bert"))))
    cells = {row: plan.row(row, 1e-3, 0) for row in plan.rows}
    assert sum(cell.training.steps for cell in cells["single_task"]) == cells["ca_mtl"][0].training.steps
    assert [list(cell.tasks) for cell in cells["single_task"]] == [[task] for task in TASKS]
    together = [of[0] for row, of in cells.items() if row != "single_task"]
    assert len({str((cell.tasks, cell.training, cell.length)) for cell in together}) == 1
    ladder = [{key for key, value in MODULES[row].items() if value != OFF[key]} for row in MODULES]
    assert all(before < after for before, after in pairwise(ladder))
    assert cells["ca_mtl"][0].graft == cells["ca_mtl_uniform"][0].graft == cells["+alignment_cln"][0].graft
    assert {row: of[0].sampler.policy for row, of in cells.items()} == {
        row: "uncertainty" if row in BY_UNCERTAINTY else "uniform" for row in cells
    }


def test_adapters_have_as_many_weights_as_our_modules(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = str(tiny_backbone("bert"))
    assert set(PEERS) & set(Plan(options(data, tmp_path, backbone=encoder)).rows) == set()
    monkeypatch.setenv(peer.PYTHON, "some-python")
    plan = Plan(options(data, tmp_path, backbone=encoder))
    assert plan.rows == list(ROWS)
    frozen, half = (plan.row(row, 1e-3, 0)[0].peer or {} for row in PEERS)
    added, layers, width = weights_of(encoder, plan.row("ca_mtl", 1e-3, 0)[0].graft, len(TASKS))
    inner = frozen["bottleneck"]
    theirs = len(TASKS) * layers * (2 * inner * width + inner + width)
    assert abs(theirs - added) <= len(TASKS) * layers * width
    assert (frozen["frozen_layers"], half["frozen_layers"]) == (layers, layers // 2)


def test_the_peer_is_asked_the_same_rows_and_scored_alike(data: Path, tmp_path: Path) -> None:
    plan = Plan(options(data, tmp_path, backbone="unused"))
    encoder = RowEncoder(tiny_tokenizer(), 40)
    for number, task in enumerate(("clinc150", "wellformed", "wnut17")):
        config = plan.files(task, 0)
        spec = read_training_rows(task, config).spec
        test = TaskTestSet(number, read_held_out_rows(task, config, spec), METRIC[task])
        rows = encoder.encode(test.rows).rows
        said = list(peer.exam(rows, test))
        assert [row["ids"] for row in said] == [row.ids.tolist() for row in rows]
        assert {row["task"] for row in said} == {number}
        perfect = (right_answer(row["target"], spec.outputs) for row in said)
        assert peer.score(test, rows, perfect) == pytest.approx(100)


METRIC: dict[str, Any] = {"clinc150": "accuracy", "wellformed": "pearson", "wnut17": "entity_f1"}


def right_answer(target: Any, outputs: int) -> Any:
    """Predictions that say what is right."""
    if isinstance(target, float):
        return target
    if isinstance(target, int):
        return [float(n == target) for n in range(outputs)]
    return [right_answer(one, outputs) for one in target]


def test_the_peers_batches_and_losses() -> None:
    rows = [{"ids": [5] * n, "types": [0] * n, "task": n % 2} for n in (7, 2, 9, 3, 8)]
    found = list(adapters_peer.pieces(rows, 2))
    assert [[len(row["ids"]) for row in piece] for piece in found] == [[2, 3], [8, 7], [9]]
    assert [row["task"] for row in found[1]] == [0, 1], "rows of one task stand together"
    inputs = adapters_peer.padded(found[0])
    assert inputs["input_ids"].tolist() == [[5, 5, 0], [5, 5, 5]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    tags, number = {"type": "tagging"}, {"type": "regression"}
    logits = torch.tensor([[0.0, 0.0], [9.0, -9.0]])
    assert adapters_peer.loss_of(tags, logits, [0, -100]).item() == pytest.approx(0.6931, abs=1e-4)
    assert adapters_peer.loss_of(number, torch.tensor(0.5), 0.2).item() == pytest.approx(0.09)


def test_a_peer_that_stops_is_named(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho first >&2\necho 'No module named adapters' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(TrainingError, match="run by .*python, stopped: No module named adapters"):
        peer.answers({}, tmp_path, str(script))


def test_changed_predictions_are_counted() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert changed({"a": [one, one]}, {"a": [one, other]}) == 1
    assert changed({"a": [one]}, {"a": [one.clone()]}) == 0


@pytest.mark.slow
def test_every_table_in_the_one_form(data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]) -> None:
    asked = options(data, tmp_path / "out", backbone=str(tiny_backbone("bert")))
    results = reproduce("conditional-tasks", asked)
    check_form(results, [row for row in ROWS if row not in PEERS], (2, len(TASKS)))
    assert results.row("few_added").metrics["old_changed"] == 0
    assert results.details["left_out"] == [peer.WITHOUT]
    assert {file.stem for file in (tmp_path / "out").glob("*.png")} >= {"scores", "few", "count", "similarity"}
    assert reproduce("conditional-tasks", asked).rows == results.rows, "what is finished is read back"


def check_form(results: Results, rows: list[str], counts: tuple[int, ...]) -> None:
    further = [f"{row}_{count}" for row in ("multi_task", "ca_mtl") for count in counts]
    similar = ["multi_task_similarity", "ca_mtl_similarity"]
    assert [row.id for row in results.rows] == [*rows, "few_added", "few_finetune", *further, *similar]
    for row in rows:
        metrics = results.row(row).metrics
        assert set(metrics) == METRICS, row
        assert 0 < value_of(metrics["data_share"]) <= 1
        assert results.row(row).label == LABELS[row]
    assert value_of(results.row("single_task").metrics["total_parameters_ratio"]) > len(TASKS)
    assert results.row("ca_mtl_uniform").metrics == results.row("+alignment_cln").metrics


def test_mistakes(data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]) -> None:
    encoder = str(tiny_backbone("bert"))
    with pytest.raises(RecipeError, match=r"There is no table 'fewer' in this experiment \(did you mean few"):
        reproduce("conditional-tasks", options(data, tmp_path, tables=("fewer",), backbone=encoder))
    with pytest.raises(DataError, match=r"lacks .*data_full.json: pass --data with a folder that holds cls/clinc150"):
        reproduce("conditional-tasks", options(tmp_path, tmp_path, backbone=encoder))


def test_without_an_encoder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match="The encoder is not in .*: put all-MiniLM-L6-v2 there"):
        Plan(options(data, tmp_path))


def test_what_has_one_seed_is_held_against_the_first_of_ours() -> None:
    def row(name: str, average: Any, **more: float) -> Row:
        return Row(id=name, label=name, metrics={"average": average, **more})

    rows = [
        row("multi_task", Interval(mean=49, low=48, high=50)),
        row("adapters_half", 49),
        row("ca_mtl_uniform", Interval(mean=50, low=49, high=51)),
        row("ca_mtl", Interval(mean=50, low=48, high=52), total_parameters_ratio=1.1, data_share=0.8),
    ]
    found = [(aim.aim, aim.measured, aim.met) for aim in aims(rows, first=48)]
    assert found == [(49, 50, True), (49, 48, False), (1.12, 1.1, True), (50, 50, True), (0.7, 0.8, False)]


def test_the_committed_results_are_of_this_form() -> None:
    results = Results.read(COMMITTED)
    check_form(results, list(ROWS), FULL.counts)
    assert all(aim.met is not None for aim in results.aims)
    assert results.row("few_added").metrics["old_changed"] == 0


@pytest.mark.parametrize(
    ("tried", "wanted"),
    [
        ({}, [2.0, 3.0]),
        ({2.0: 0.1, 3.0: 0.5}, [4.0]),
        ({2.0: 0.5, 3.0: 0.1}, [1.0]),
        ({2.0: 0.5, 3.0: 0.1, 1.0: 0.2}, []),
        ({2.0: 0.1, 3.0: 0.5, 4.0: 0.6}, []),
    ],
)
def test_the_search_goes_on_beyond_the_better_rate(tried: dict[float, float], wanted: list[float]) -> None:
    assert next_rates([1.0, 2.0, 3.0, 4.0], tried) == wanted
    assert next_rates([1.0], {}) == [1.0]
