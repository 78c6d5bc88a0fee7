"""examples/export_onnx.py: the ONNX file of an encoder with the heads of a graft predicts what torch predicts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnxruntime import InferenceSession
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from examples import export_onnx
from graftlm import GraftError
from graftlm.backbone import load_backbone
from graftlm.data.labelled import LabelledRow, TaskRows
from graftlm.data.labelled_batches import TaskBatch, batches_by_length
from graftlm.generation.predict import TaskGraft, load_task_graft
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.heads import TaskSpec
from graftlm.store.artifact import save_graft
from graftlm.testing import randomise
from tiny import BackboneFolder

TASKS: dict[str, dict[str, Any]] = {
    "topic": {"type": "classification", "labels": ["x", "y", "z"]},
    "pairs": {"type": "classification", "labels": ["no", "yes"]},
    "length": {"type": "regression", "range": [1.0, 5.0]},
    "marks": {"type": "multi-label", "labels": ["dog", "fox"]},
    "names": {"type": "tagging", "labels": ["O", "B-P"]},
    "where": {"type": "span"},
}
TEXTS = {
    "topic": ("quick fox",),
    "pairs": ("lazy dog jumps", "fox"),
    "length": ("the quick brown fox jumps over",),
    "marks": ("fox",),
    "names": ("quick", "brown", "dog"),
    "where": ("which?", "the lazy brown dog"),
}


@pytest.fixture(scope="module")
def task_graft(tiny_backbone: BackboneFolder, tmp_path_factory: pytest.TempPathFactory) -> TaskGraft:
    """A graft with all modules, filled with random numbers."""
    folder = tmp_path_factory.mktemp("tasks") / "graft"
    backbone = load_backbone(tiny_backbone("bert"), kind="encoder")
    config = {
        "kind": "conditional-tasks",
        "tasks": TASKS,
        "max_length": 32,
        "block": 8,
        "task_width": 8,
        "bottleneck_width": 8,
        "attention": "blocks",
        "alignment": True,
        "norm": True,
        "bottleneck": "base",
        "frozen": 0.5,
    }
    graft = build_graft(graft_config(config), backbone)
    with randomise(GraftedModel(backbone, {"graft": graft}), 0.2):
        pass
    save_graft(graft, backbone, folder, training={"length": 32})
    return load_task_graft(folder, device="cpu")


class OnnxModel:
    """The written file, with the outputs of each row's task."""

    def __init__(self, folder: Path) -> None:
        self.session = InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])

    def outputs(self, batch: TaskBatch) -> list[Tensor]:
        """Return the outputs of all tasks for a batch."""
        segments = batch.token_type_ids
        if segments is None:
            segments = torch.zeros_like(batch.input_ids)
        inputs = {
            "input_ids": batch.input_ids.numpy(),
            "attention_mask": batch.attention_mask.numpy(),
            "token_type_ids": segments.numpy(),
            "task": batch.task.numpy(),
        }
        return [torch.as_tensor(values) for values in self.session.run(None, inputs)]


@pytest.mark.slow
def test_each_task_in_a_mixed_batch_is_as_in_torch(task_graft: TaskGraft, tmp_path: Path) -> None:
    export_onnx.export(task_graft, tmp_path)
    onnx = OnnxModel(tmp_path)
    assert [output.name for output in onnx.session.get_outputs()] == [f"task:{name}" for name in TASKS]
    tokenizer = task_graft.backbone.need_tokenizer()
    rows = []
    for number, (name, task) in enumerate(task_graft.tasks.items()):
        encoded = task_graft.encoder.encode(TaskRows(task, [LabelledRow(TEXTS[name], None, name)]))
        rows.append((encoded.rows[0], task, number))
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model, torch.no_grad():
        model.eval()
        for size in (6, 1):  # all tasks together, and each alone
            for indices, batch in batches_by_length(rows, size, tokenizer.pad_token_id):
                outputs = onnx.outputs(batch)
                expected = model.predict(**batch.prediction_inputs())
                for place, index in enumerate(indices):
                    encoded_row, _, number = rows[index]
                    check_close(outputs[number][place], expected[place], len(encoded_row))


def check_close(actual: Tensor, expected: Tensor, tokens: int) -> None:
    """Compare the predictions of a row, without those at padding. The tolerance is for another order of sums."""
    if expected.ndim == 2:
        actual = actual[:tokens]
        expected = expected[:tokens]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_the_folder_has_the_tasks_and_a_tokenizer_that_truncates(task_graft: TaskGraft, tmp_path: Path) -> None:
    export_onnx.write_tasks(task_graft, tmp_path)
    export_onnx.write_tokenizer(task_graft, tmp_path)
    document = json.loads((tmp_path / "tasks.json").read_text())
    assert document["length"] == 32
    assert document["tasks"]["length"] == {"number": 2, "type": "regression", "labels": [], "range": [1.0, 5.0]}
    rows = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode_batch(["fox " * 100, "fox"])
    assert [len(row.ids) for row in rows] == [task_graft.length] * 2
    tokenizer = task_graft.backbone.need_tokenizer()
    assert AutoTokenizer.from_pretrained(tmp_path)("fox")["input_ids"] == tokenizer("fox")["input_ids"]


def test_all_rows_have_the_predictions_of_their_heads(task_graft: TaskGraft) -> None:
    inputs = export_onnx.example_inputs(task_graft, 6, 9)
    without_task = {name: value for name, value in inputs.items() if name != "task"}
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model, torch.no_grad():
        outputs = export_onnx.TaskOutputs(model.eval())(**inputs)
        expected = model.predict(**without_task, extras={"task": inputs["task"]})
    for row, prediction in enumerate(expected):
        output = outputs[row][row]
        if prediction.ndim == 2:
            tokens = int(inputs["attention_mask"][row].sum())
            output = output[:tokens]
            prediction = prediction[:tokens]
        torch.testing.assert_close(output, prediction)


def test_a_task_with_marked_places_is_refused(tmp_path: Path) -> None:
    task_graft = SimpleNamespace(tasks={"senses": TaskSpec(type="marked", labels=["x", "y"])})
    with pytest.raises(GraftError, match="senses"):
        export_onnx.export(task_graft, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_file_that_computes_something_else_is_refused(
    task_graft: TaskGraft,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_onnx, "write_model", lambda *args: None)
    monkeypatch.setattr(export_onnx, "difference", lambda *args: 0.5)
    with pytest.raises(GraftError) as error:
        export_onnx.export(task_graft, tmp_path)
    assert "0.5" in str(error.value)
