"""The experiment of conditional tasks at its smallest size: files, rows, the script of adapters, errors."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Options, conditional_tasks, reproduce
from experiments.conditional_tasks import adapters_script
from experiments.conditional_tasks import runs as experiment_runs
from experiments.conditional_tasks.corpora import (
    FILES,
    MIN_CLASS_ROWS,
    TASKS,
    SplitSizes,
    draw_splits,
    write_splits,
)
from experiments.conditional_tasks.run import (
    ADAPTERS,
    BY_UNCERTAINTY,
    FULL,
    LABELS,
    MODULES,
    OFF,
    ConditionalTasksStudy,
    aims,
    next_rates,
)
from experiments.conditional_tasks.runs import AdaptersRun, count_changed, module_parameters
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
    """Eight small data sets in the formats of the real ones."""
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
    for intent in ("AddToPlaylist", *"abcdef"):
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
def _without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(experiment_runs.PYTHON, raising=False)


def read_texts(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".conll":
        return [
            " ".join(line.split("\t")[0] for line in sentence.splitlines()) for sentence in text.strip().split("\n\n")
        ]
    rows = [json.loads(line) for line in text.splitlines()]
    return [row["sentence"] if "sentence" in row else row["text"] for row in rows]


def write_task(data: Path, out: Path, task: str, sizes: SplitSizes, seed: int) -> dict[str, list[str]]:
    """Write a task; gives the texts by split."""
    files = write_splits(draw_splits(TASKS[task].read(data), sizes, seed), out, task)
    return {split: read_texts(file) for split, file in files.items()}


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_text_is_read_in_training(data: Path, tmp_path: Path, task: str) -> None:
    texts = write_task(data, tmp_path, task, SplitSizes(14, 6, 8), 0)
    assert {split: len(rows) for split, rows in texts.items()} == {"train": 14, "validation": 6, "test": 8}
    assert not set(texts["train"]) & {*texts["validation"], *texts["test"]}
    other = write_task(data, tmp_path, task, SplitSizes(14, 6, 8), 1)
    assert other["train"] != texts["train"], "the seed draws training rows"
    assert other["test"] == texts["test"], "the seed does not draw test rows"


@pytest.mark.parametrize("task", TASKS)
def test_the_real_sets(data_dir: Path, tmp_path: Path, task: str) -> None:
    texts = write_task(data_dir, tmp_path, task, SplitSizes(320, 50, 80), 0)
    assert {split: len(rows) for split, rows in texts.items()} == {"train": 320, "validation": 50, "test": 80}
    assert not set(texts["train"]) & {*texts["validation"], *texts["test"]}


def test_every_class_is_drawn_even_a_rare_class() -> None:
    rows = [{"text": f"{n}", "label": "rare" if n in (50, 70) else "common"} for n in range(100)]
    splits = {"train": rows, "test": [{"text": "t", "label": "rare"}]}
    train = draw_splits(splits, SplitSizes(10, 5, 1), 0)["train"]
    assert Counter(row["label"] for row in train)["rare"] == MIN_CLASS_ROWS
    assert len(train) == 10
    share = draw_splits(splits, SplitSizes("20%", 5, 1), 0)["train"]
    assert len(share) == 19, "20% of the 95 rows that are not held out"
    assert [row for row in share if row in train] == train, "a smaller set is part of a larger one"


def test_rows_differ_only_in_what_they_compare(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]
) -> None:
    study = ConditionalTasksStudy(options(data, tmp_path, backbone=str(tiny_backbone("bert"))))
    runs = {row: study.row_runs(row, 0, 1e-3) for row in study.rows}
    assert sum(run.training.steps for run in runs["single_task"]) == runs["ca_mtl"][0].training.steps
    assert [list(run.tasks) for run in runs["single_task"]] == [[task] for task in TASKS]
    together = [row_runs[0] for row, row_runs in runs.items() if row != "single_task"]
    assert len({str((run.tasks, run.training, run.length)) for run in together}) == 1
    ladder = [{key for key, value in MODULES[row].items() if value != OFF[key]} for row in MODULES]
    assert all(before < after for before, after in pairwise(ladder))
    assert runs["ca_mtl"][0].graft == runs["ca_mtl_uniform"][0].graft == runs["+alignment_cln"][0].graft
    assert {row: row_runs[0].sampler.policy for row, row_runs in runs.items()} == {
        row: "uncertainty" if row in BY_UNCERTAINTY else "uniform" for row in runs
    }


def test_adapters_have_as_many_parameters_as_our_modules(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = str(tiny_backbone("bert"))
    assert set(ADAPTERS) & set(ConditionalTasksStudy(options(data, tmp_path, backbone=encoder)).rows) == set()
    monkeypatch.setenv(experiment_runs.PYTHON, "some-python")
    study = ConditionalTasksStudy(options(data, tmp_path, backbone=encoder))
    assert study.rows == list(LABELS)
    frozen, half = (study.row_runs(row, 0, 1e-3)[0] for row in ADAPTERS)
    assert isinstance(frozen, AdaptersRun)
    assert isinstance(half, AdaptersRun)
    graft = study.row_runs("ca_mtl", 0, 1e-3)[0].graft
    added, layers, width = module_parameters(study.backbone, graft, len(TASKS))
    adapters = len(TASKS) * layers * (2 * frozen.bottleneck * width + frozen.bottleneck + width)
    assert abs(adapters - added) <= len(TASKS) * layers * width
    assert (frozen.frozen_layers, half.frozen_layers) == (layers, layers // 2)


def test_the_script_gets_the_same_rows_and_its_outputs_the_same_score(data: Path, tmp_path: Path) -> None:
    study = ConditionalTasksStudy(options(data, tmp_path, backbone="unused"))
    encoder = RowEncoder(tiny_tokenizer(), 40)
    for number, task in enumerate(("clinc150", "wellformed", "wnut17")):
        config = study.task(task, 0)
        spec = read_training_rows(task, config).spec
        test = TaskTestSet(number, read_held_out_rows(task, config, spec), METRIC[task])
        rows = encoder.encode(test.rows).rows
        plain = list(experiment_runs.plain_test_rows(rows, test))
        assert [row["ids"] for row in plain] == [row.ids.tolist() for row in rows]
        assert {row["task"] for row in plain} == {number}
        perfect = (right_answer(row["target"], spec.outputs) for row in plain)
        assert experiment_runs.score(test, rows, perfect).value == pytest.approx(100)


METRIC: dict[str, Any] = {"clinc150": "accuracy", "wellformed": "pearson", "wnut17": "entity_f1"}


def right_answer(target: Any, outputs: int) -> Any:
    """Perfect predictions."""
    if isinstance(target, float):
        return target
    if isinstance(target, int):
        return [float(n == target) for n in range(outputs)]
    return [right_answer(label, outputs) for label in target]


def test_the_scripts_batches_and_losses() -> None:
    rows = [{"ids": [5] * n, "types": [0] * n, "task": n % 2} for n in (7, 2, 9, 3, 8)]
    batches = list(adapters_script.micro_batches(rows, 2))
    assert [[len(row["ids"]) for row in batch] for batch in batches] == [[2, 3], [8, 7], [9]]
    assert [row["task"] for row in batches[1]] == [0, 1], "rows of one task are adjacent"
    inputs = adapters_script.pad(batches[0])
    assert inputs["input_ids"].tolist() == [[5, 5, 0], [5, 5, 5]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    tags, number = {"type": "tagging"}, {"type": "regression"}
    logits = torch.tensor([[0.0, 0.0], [9.0, -9.0]])
    assert adapters_script.row_loss(tags, logits, [0, -100]).item() == pytest.approx(0.6931, abs=1e-4)
    assert adapters_script.row_loss(number, torch.tensor(0.5), 0.2).item() == pytest.approx(0.09)


FAKE_PYTHON = """#!{python}
import json, sys
job = json.load(open(sys.argv[2]))
outputs = [task["outputs"] for task in job["tasks"]]
def output(row):
    n, target = outputs[row["task"]], row["target"]
    values = [[float(i == t) for i in range(n)] for t in (target if isinstance(target, list) else [target])]
    return values if isinstance(target, list) else target if isinstance(target, float) else values[0]
predictions = [output(row) for row in job["tests"]]
result = {{"predictions": predictions, "losses": [1.0] * len(job["batches"]), "seconds": 1, "trained": 5, "total": 9}}
json.dump(result, open(sys.argv[3], "w"))
"""


def test_an_adapters_run_scores_the_scripts_outputs(
    data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv(experiment_runs.PYTHON, str(python))
    study = ConditionalTasksStudy(options(data, tmp_path, backbone=str(tiny_backbone("bert"))))
    runs = study.row_runs("adapters", 0, 1e-3)
    study.execute(runs, "adapters")
    assert set(study.scores(runs, "validation")) == set(TASKS)
    # Truncated words of WNUT17 count as outside; every other task is perfect.
    assert all(score == pytest.approx(100) for task, score in study.scores(runs).items() if task != "wnut17")
    measurement = study.measured[runs[0].id]
    assert sum(measurement.details["picked"].values()) == study.size.training.steps * study.size.training.batch_size


def test_a_script_that_stops_is_named(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho first >&2\necho 'No module named adapters' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(TrainingError, match="run by .*python, stopped: No module named adapters"):
        experiment_runs.run_script({}, tmp_path, str(script))


def test_changed_predictions_are_counted() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert count_changed({"a": [first, first]}, {"a": [first, second]}) == 1
    assert count_changed({"a": [first]}, {"a": [first.clone()]}) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_table_in_the_one_form(data: Path, tmp_path: Path, tiny_backbone: Callable[[str], Path]) -> None:
    quick = options(data, tmp_path / "out", backbone=str(tiny_backbone("bert")))
    results = reproduce("conditional-tasks", quick)
    check_form(results, [row for row in LABELS if row not in ADAPTERS], (2, len(TASKS)))
    assert results.row("few_added").metrics["old_changed"] == 0
    assert results.details["left_out"] == [experiment_runs.MISSING]
    assert {file.stem for file in (tmp_path / "out").glob("*.png")} >= {"scores", "few", "count", "similarity"}
    assert reproduce("conditional-tasks", quick).rows == results.rows, "finished runs are read back"


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
        ConditionalTasksStudy(options(data, tmp_path))


def test_a_row_of_one_seed_is_compared_with_our_first_seed() -> None:
    def row(name: str, average: Any, **more: float) -> Row:
        return Row(id=name, label=name, metrics={"average": average, **more})

    rows = [
        row("multi_task", Interval(mean=49, low=48, high=50)),
        row("adapters_half", 49),
        row("ca_mtl_uniform", Interval(mean=50, low=49, high=51)),
        row("ca_mtl", Interval(mean=50, low=48, high=52), total_parameters_ratio=1.1, data_share=0.8),
    ]
    values = [(aim.aim, aim.measured, aim.met) for aim in aims(rows, first=48)]
    assert values == [(49, 50, True), (49, 48, False), (1.12, 1.1, True), (50, 50, True), (0.7, 0.8, False)]


def test_the_committed_results_are_of_this_form() -> None:
    results = Results.read(COMMITTED)
    check_form(results, list(LABELS), FULL.counts)
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
