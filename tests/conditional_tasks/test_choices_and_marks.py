"""Rows of several sequences, and with marked places: by the literal equations, alone and in batches, and resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conditional_tasks import reference
from conditional_tasks.tools import host, random_model
from graftlm.data.labelled import LabelledConfig, LabelledRow, TaskRows, read_training_rows
from graftlm.data.labelled_batches import LabelledMixture, TaskBatch, TaskRow, collate_rows
from graftlm.data.marked_places import Mark
from graftlm.data.row_encoder import RowEncoder
from graftlm.data.samplers import SamplerConfig
from graftlm.errors import GraftError
from graftlm.evaluation.label_predictions import predict_labelled, predictor
from graftlm.generation.predict import evaluate_rows, load_task_graft, predict_rows, read_questions
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.heads import Heads, TaskSpec, row_tasks, uncertainty
from graftlm.runs.recipe import run_recipe
from graftlm.runs.task_run import TaskRecipe
from tiny import BackboneFolder, tiny_tokenizer
from training.tasks import WORDS

TASKS: dict[str, TaskSpec] = {
    "topics": TaskSpec(type="classification", labels=["x", "y"]),
    "causes": TaskSpec(type="choice"),
    "senses": TaskSpec(type="marked", labels=["false", "true"]),
    "answers": TaskSpec(type="span"),
}
NUMBERS = {name: number for number, name in enumerate(TASKS)}
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
TOKENIZER = tiny_tokenizer()
ENCODER = RowEncoder(TOKENIZER, 24, segments=False)
ROWS = {
    "topics": [LabelledRow(("dog fox",), "x", "topic"), LabelledRow(("quick brown fox jumps home",), "y", "topic")],
    "causes": [
        LabelledRow(("the moon",), 1, "two", choices=("a dog", "quick brown fox home")),
        LabelledRow(("a river", "why?"), 0, "three", choices=("thin", "lazy dog jumps", "house")),
    ],
    "senses": [
        LabelledRow(("the dog jumps", "a thin dog"), "true", "pair", marks=(Mark(0, 4, 7), Mark(1, 7, 10))),
        LabelledRow(("the fox and the moon",), "false", "one", marks=(Mark(0, 4, 7), Mark(0, 16, 20))),
    ],
}


def encoded_rows() -> list[TaskRow]:
    made: list[TaskRow] = []
    for name, rows in ROWS.items():
        spec = TASKS[name]
        for row in rows:  # of one text or two
            (encoded,) = ENCODER.encode(TaskRows(spec, [row])).rows
            made.append((encoded, spec, NUMBERS[name]))
    return made


def test_heads_and_gradients_equal_the_literal_equations() -> None:
    torch.manual_seed(0)
    heads = Heads(TASKS, 3, dropout=0).double()
    hidden = torch.randn(6, 4, 3, dtype=torch.double, requires_grad=True)
    task = torch.tensor([1, 1, 1, 2, 1, 1])  # three choices, a marked row, two choices
    parts = [3, 1, 2]
    marks = torch.zeros(6, 4, dtype=torch.long)
    marks[3] = torch.tensor([0, 1, 3, 2])  # the token 2 is in both places
    mask = torch.ones(6, 4)
    targets = [torch.tensor(2), torch.tensor(1), torch.tensor(0)]
    predictions = heads(hidden, mask, task, parts=parts, marks_BT=marks)
    losses = heads.losses(predictions, targets, row_tasks(task, parts))

    literal = hidden.detach().clone().requires_grad_()
    choice, marked = heads.linear("causes"), heads.linear("senses")
    weights = [parameter.detach().clone().requires_grad_() for parameter in (choice.weight, choice.bias)]
    weights += [parameter.detach().clone().requires_grad_() for parameter in (marked.weight, marked.bias)]
    rows = [list(literal[:3, 0]), list(literal[4:, 0])]
    logits = reference.marked_logits(literal[3, 0], literal[3], [[1, 2], [2, 3]], weights[2], weights[3])
    expected = [
        reference.choice_loss(rows[0], weights[0][0], weights[1][0], 2),
        torch.log(torch.exp(logits).sum()) - logits[1],
        reference.choice_loss(rows[1], weights[0][0], weights[1][0], 0),
    ]
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), check_dtype=False, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(predictions[1], logits, **CLOSE)
    literal_logits = reference.choice_logits(rows[0], weights[0][0], weights[1][0])
    torch.testing.assert_close(predictions[0], torch.stack(literal_logits), **CLOSE)

    torch.stack(losses).sum().backward()
    torch.stack(expected).sum().backward()
    parameters = (choice.weight, choice.bias, marked.weight, marked.bias)
    for parameter, other in zip((hidden, *parameters), (literal, *weights), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_scaled_losses_and_uncertainty_of_choices_are_1_at_chance() -> None:
    """However many choices a row has."""
    heads = Heads(TASKS, 4)
    predictions = [torch.zeros(2), torch.zeros(5), torch.zeros(2)]
    targets = [torch.tensor(1), torch.tensor(4), torch.tensor(0)]
    losses = heads.losses(predictions, targets, torch.tensor([1, 1, 2]), scaled=True)
    assert torch.stack(losses).tolist() == pytest.approx([1, 1, 1])
    scores = uncertainty(predictions, [TASKS["causes"], TASKS["causes"], TASKS["senses"]])
    assert [float(score) for score in scores] == pytest.approx([1, 1, 1])  # type: ignore[arg-type]
    (sure,) = uncertainty([torch.tensor([math.log(3.0), 0.0])], [TASKS["causes"]])
    assert float(sure) == pytest.approx(0.8113, abs=1e-4)  # type: ignore[arg-type]


def test_parts_and_marks_must_fit_the_batch() -> None:
    heads = Heads(TASKS, 4)
    with pytest.raises(GraftError, match="parts"):
        heads(torch.randn(3, 2, 4), None, torch.tensor([1, 1, 1]), parts=[2])
    with pytest.raises(GraftError, match="senses"):
        heads(torch.randn(1, 2, 4), None, torch.tensor([2]))


def predict(model: GraftedModel, batch: TaskBatch) -> list[Tensor]:
    return model.predict(**batch.prediction_inputs())


@torch.no_grad()
@pytest.mark.parametrize(("family", "pooling"), [("bert", "first"), ("modernbert", "mean"), ("llama", "last")])
def test_a_row_is_predicted_alike_alone_in_a_batch_and_beside_padding(family: str, pooling: str) -> None:
    with random_model(host(family, double=True), tasks=TASKS, pooling=pooling) as model:
        rows = encoded_rows()
        alone = [predict(model, collate_rows([row], 0))[0] for row in rows]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        whole = collate_rows(rows, 0)
        for index, prediction in zip(order, predict(model, whole), strict=True):
            torch.testing.assert_close(prediction, alone[index], **CLOSE)
        for start in range(0, len(rows), 2):  # micro-batches keep the sequences of a row together
            part = whole.rows(slice(start, start + 2))
            for index, prediction in zip(order[start : start + 2], predict(model, part), strict=True):
                torch.testing.assert_close(prediction, alone[index], **CLOSE)
        left = whole.prediction_inputs()
        moved = {}
        for name in ("input_ids", "attention_mask"):
            moved[name] = left[name].flip(1)
        for row, length in enumerate(whole.attention_mask.sum(1).tolist()):
            moved["input_ids"][row, -length:] = whole.input_ids[row, :length]
        assert whole.marks is not None
        marks = torch.zeros_like(whole.marks)
        for row, length in enumerate(whole.attention_mask.sum(1).tolist()):
            marks[row, -length:] = whole.marks[row, :length]
        extras = {**left["extras"], "marks": marks}
        del extras["padding"]
        for index, prediction in zip(order, model.predict(**moved, extras=extras), strict=True):
            torch.testing.assert_close(prediction, alone[index], **CLOSE)


@torch.no_grad()
def test_the_order_of_choices_only_orders_their_logits() -> None:
    with random_model(host(double=True), tasks=TASKS) as model:
        spec = TASKS["causes"]
        choices = ("thin", "lazy dog jumps", "house")
        logits = []
        for order in ((0, 1, 2), (2, 0, 1)):
            row = LabelledRow(("a river",), None, "row", choices=tuple(choices[index] for index in order))
            (encoded,) = ENCODER.encode(TaskRows(spec, [row])).rows
            (found,) = predict(model, collate_rows([(encoded, spec, 1)], 0))
            logits.append(found[torch.tensor(order).argsort()])
        torch.testing.assert_close(*logits, **CLOSE)


@torch.no_grad()
def test_moving_a_mark_changes_the_prediction() -> None:
    with random_model(host(double=True), tasks=TASKS) as model:
        spec = TASKS["senses"]
        found = []
        for mark in (Mark(0, 4, 7), Mark(0, 8, 13)):
            row = LabelledRow(("the dog jumps",), None, "row", marks=(Mark(0, 0, 3), mark))
            (encoded,) = ENCODER.encode(TaskRows(spec, [row])).rows
            found += predict(model, collate_rows([(encoded, spec, 2)], 0))
        assert (found[0] - found[1]).abs().max() > 1e-3


@torch.no_grad()
def test_rows_of_windows_and_choices_are_predicted_in_order_whatever_the_batch_size() -> None:
    with random_model(host(), tasks=TASKS) as model:
        context = " ".join(WORDS * 3)
        rows = [LabelledRow(("which", text), None, "row") for text in ("dog moon", context, "thin", context[40:])]
        for name, of_task in (
            ("answers", TaskRows(TASKS["answers"], rows, stride=6)),
            ("causes", TaskRows(TASKS["causes"], ROWS["causes"])),
        ):
            found = []
            for size in (1, 3, 64):
                found.append(predict_labelled(predictor(model), ENCODER, of_task, NUMBERS[name], batch_size=size))
            for one, other in zip(found[0] + found[1], found[2] * 2, strict=True):
                assert one.value == other.value
                assert one.probability == pytest.approx(other.probability, abs=1e-4)
            assert not any(prediction.truncated for prediction in found[0])


def test_rows_that_a_cut_leaves_without_an_end_are_not_learned() -> None:
    text = "the river ran under the old house and the garden"
    house = text.index("old house")
    spec = TaskSpec(type="marked", labels=["no", "yes"])
    whole = LabelledRow((text,), "yes", "a", marks=(Mark(0, 4, 9), Mark(0, 10, 13)))
    cut = LabelledRow((text,), "yes", "b", marks=(Mark(0, 4, 9), Mark(0, house, len(text))))
    inside = RowEncoder(TOKENIZER, 1000, segments=False).encode(TaskRows(spec, [cut])).rows[0]
    places = [place for place, mark in enumerate(inside.marks) if mark & 2]  # type: ignore[arg-type]
    encoder = RowEncoder(TOKENIZER, places[-1], segments=False)
    learned = encoder.encode(TaskRows(spec, [whole, cut]), training=True)
    assert (len(learned), learned.left_out) == (1, 1)
    assert len(encoder.encode(TaskRows(spec, [cut]))) == 1, "a test has all rows"


def test_choices_that_a_cut_makes_equal_are_not_learned() -> None:
    spec = TaskSpec(type="choice")
    same = "the old house and the garden " * 8
    alike = LabelledRow(("where",), 0, "a", choices=(same + "one", same + "two"))
    other = LabelledRow(("where",), 1, "b", choices=("a river", "a garden"))
    learned = ENCODER.encode(TaskRows(spec, [alike, other]), training=True)
    assert (len(learned), learned.left_out) == (1, 1)
    assert len(ENCODER.encode(TaskRows(spec, [alike, other]))) == 2


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def recipe(folder: Path, backbone: Path, out: str, steps: int) -> dict[str, Any]:
    causes, senses, answers = [], [], []
    for number in range(12):
        first, second = WORDS[number], WORDS[(number * 5 + 1) % 12]
        causes.append({"text": first, "choices": [first, second, "home"][: 2 + number % 2], "label": number % 2})
        text = f"{first} and {second}"
        places = {"mark1": [0, len(first)], "mark2": [len(first) + 5, len(text)]}
        senses.append({"text": text, "label": number % 2 == 0, **places})
        context = " ".join(WORDS[number:] + WORDS[:number])
        answers.append({"question": "which?", "context": context, "answers": second})
    tasks = {
        "causes": {"type": "choice", "train": write_lines(folder / "causes.jsonl", causes)},
        "senses": {"type": "marked", "train": write_lines(folder / "senses.jsonl", senses)},
        "answers": {"type": "span", "train": write_lines(folder / "answers.jsonl", answers), "stride": 8},
    }
    for task in tasks.values():
        task["test"] = task["train"]
    return {
        "backbone": {"name": str(backbone), "device": "cpu"},
        "graft": {"kind": "conditional-tasks"},
        "tasks": tasks,
        "sampler": {"policy": "uncertainty"},
        "length": 24,
        "training": {
            "steps": steps,
            "batch_size": 6,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "schedule": "constant",
            "checkpoint_every": 2,
        },
        "out": str(folder / out),
    }


def test_a_run_resumes_to_the_same_bits_and_loads_to_the_same_predictions(
    tmp_path: Path, tiny_backbone: BackboneFolder
) -> None:
    said: list[str] = []
    backbone = tiny_backbone("bert")
    whole = run_recipe(TaskRecipe.parse(recipe(tmp_path, backbone, "whole", 4)), progress=False, log=said.append)
    run_recipe(TaskRecipe.parse(recipe(tmp_path, backbone, "cut", 2)), progress=False, log=said.append)
    run_recipe(TaskRecipe.parse(recipe(tmp_path, backbone, "cut", 4)), progress=False, log=said.append)
    assert any("answers with more than 24 tokens are read in windows: 12 of 12" in line for line in said)
    tensors = [load_file(tmp_path / name / "graft/graft.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(tensors[1][name], tensor) for name, tensor in tensors[0].items())

    task_graft = load_task_graft(tmp_path / "whole/graft", device="cpu")
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("causes", "senses", "answers")}
    again = evaluate_rows(task_graft, files).rows[0].metrics
    for name in files:
        assert again[name] == pytest.approx(whole.rows[0].metrics[name], abs=1e-3)
    (choice, *_) = predict_rows(task_graft, "causes", read_questions(task_graft.config("causes"), files["causes"]))
    assert set(choice) == {"choice", "text", "probability"}
    lines = tmp_path / "lines.txt"
    lines.write_text("the dog jumps\tdog\tjumps\n")
    (label,) = predict_rows(task_graft, "senses", read_questions(task_graft.config("senses"), str(lines)))
    assert label["label"] in ("false", "true")
    lines.write_text("river\tdog\tmoon\thouse\n")
    (choice,) = predict_rows(task_graft, "causes", read_questions(task_graft.config("causes"), str(lines)))
    assert choice["text"] in ("dog", "moon", "house")


def test_rows_that_differ_give_other_fingerprints(tmp_path: Path) -> None:
    """In their later choices or their marks alone."""
    found = set()
    for last, end in (("dog", 3), ("fox", 3), ("dog", 7)):
        causes = [{"text": "moon", "choices": ["home", last], "label": 0}] * 2
        senses = [{"text": "the dog", "mark1": [0, 3], "mark2": [end - 3, end], "label": n} for n in range(2)]
        tasks = {
            "causes": {"type": "choice", "train": write_lines(tmp_path / "causes.jsonl", causes)},
            "senses": {"type": "marked", "train": write_lines(tmp_path / "senses.jsonl", senses)},
        }
        rows = {name: read_training_rows(name, LabelledConfig.parse(task)) for name, task in tasks.items()}
        found.add(LabelledMixture(rows, ENCODER, SamplerConfig(), 2).fingerprint())
    assert len(found) == 3
