"""examples/export_onnx.py: an encoder with the heads of a graft in an ONNX file predicts what torch predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxruntime import InferenceSession
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from examples import export_onnx
from graftlm import GraftError
from graftlm.backbone import load_backbone
from graftlm.data.labelled import LabelledRow, TaskRows
from graftlm.data.labelled_batches import batches_by_length
from graftlm.generation.predict import TaskGraft, load_task_graft
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
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
    "topic": ("quick fox",), "pairs": ("lazy dog jumps", "fox"), "length": ("the quick brown fox jumps over",),
    "marks": ("fox",), "names": ("quick", "brown", "dog"), "where": ("which?", "the lazy brown dog"),
}  # fmt: skip


@pytest.fixture(scope="module")
def task_graft(tiny_backbone: BackboneFolder, tmp_path_factory: pytest.TempPathFactory) -> TaskGraft:
    """A graft with all modules, filled with random numbers."""
    folder = tmp_path_factory.mktemp("tasks") / "graft"
    backbone = load_backbone(tiny_backbone("bert"), kind="encoder")
    sizes: dict[str, Any] = {"max_length": 32, "block": 8, "task_width": 8, "bottleneck_width": 8}
    sizes |= {"attention": "blocks", "alignment": True, "norm": True, "bottleneck": "base", "frozen": 0.5}
    graft = build_graft(graft_config({"kind": "conditional-tasks", "tasks": TASKS} | sizes), backbone)
    with randomise(GraftedModel(backbone, {"graft": graft}), 0.2):
        pass
    save_graft(graft, backbone, folder, training={"length": 32})
    return load_task_graft(folder, device="cpu")


@pytest.mark.slow
def test_each_task_in_a_mixed_batch_is_as_torch_has_it(task_graft: TaskGraft, tmp_path: Path) -> None:
    export_onnx.export(task_graft, tmp_path)
    tasks, encoder, tokenizer = task_graft.tasks, task_graft.encoder, task_graft.backbone.need_tokenizer()
    rows = [
        (encoder.encode(TaskRows(tasks[name], [LabelledRow(TEXTS[name], None, name)])).rows[0], tasks[name], number)
        for number, name in enumerate(tasks)
    ]
    cut = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode_batch(["fox " * 100, "fox"])
    assert [len(row.ids) for row in cut] == [task_graft.length] * 2
    session = InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == [f"task:{name}" for name in TASKS]
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model, torch.no_grad():
        for size in (6, 1):  # all tasks together, and each by itself
            for indices, batch in batches_by_length(rows, size, tokenizer.pad_token_id):
                expected = model.eval().predict(**batch.prediction_inputs())
                marks = torch.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
                inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "token_type_ids": marks}
                values = session.run(None, {name: x.numpy() for name, x in (inputs | {"task": batch.task}).items()})
                for place, (index, row) in enumerate(zip(indices, expected, strict=True)):
                    tokens, own = len(rows[index][0]), torch.as_tensor(values[rows[index][2]][place])
                    pair = (own[:tokens], row[:tokens]) if row.ndim == 2 else (own, row)
                    torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)  # onnxruntime adds in another order
    described = json.loads((tmp_path / "tasks.json").read_text())
    assert described["length"] == 32
    assert described["tasks"]["length"] == {"number": 2, "type": "regression", "labels": [], "range": [1.0, 5.0]}
    assert AutoTokenizer.from_pretrained(tmp_path)("fox")["input_ids"] == tokenizer("fox")["input_ids"]


def test_all_rows_have_what_the_heads_say_of_their_own(task_graft: TaskGraft) -> None:
    inputs = export_onnx.example_inputs(task_graft, 6, 9)
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model, torch.no_grad():
        outputs = export_onnx.TaskOutputs(model.eval())(**inputs)
        own = model.predict(**{k: v for k, v in inputs.items() if k != "task"}, extras={"task": inputs["task"]})
    for row, expected in enumerate(own):
        tokens = int(inputs["attention_mask"][row].sum()) if expected.ndim == 2 else None
        torch.testing.assert_close(
            outputs[row][row][:tokens] if tokens else outputs[row][row], expected[:tokens] if tokens else expected
        )


def test_a_file_that_computes_something_else_is_refused(
    task_graft: TaskGraft, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("torch.export.export", lambda *args, **options: None)
    saved = type("Saved", (), {"save": lambda self, path: None})()
    monkeypatch.setattr("torch.onnx.export", lambda *args, **options: saved)
    monkeypatch.setattr(export_onnx, "difference", lambda *args: 0.5)
    with pytest.raises(GraftError, match="predictions differ from torch's by 0.5 of the largest"):
        export_onnx.export(task_graft, tmp_path)
