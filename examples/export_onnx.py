"""An encoder with a graft of conditional tasks as one ONNX file, which onnxruntime runs without torch.

    pip install 'graftlm[onnx]'
    python examples/export_onnx.py runs/tasks/graft FOLDER

writes `model.onnx`, the tokenizer, which cuts at the graft's length, and `tasks.json` with that length and each task's
number, type and labels. The inputs are
`input_ids`, `attention_mask` with padding on the right, and `token_type_ids` where the encoder has segments, all of
shape (rows, tokens), and the number of each row's task, `task` (rows,). An output `task:NAME` has this task's logits
for all rows, or a number in its unit, so that a batch may mix tasks; those at padding mean nothing. The file is
compared with torch before it is called written.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn

from graftlm import GraftedModel, GraftError
from graftlm.generation.predict import TaskGraft, load_task_graft
from graftlm.grafts.heads import pooled

TOLERANCE = 1e-4  # of the largest value: onnxruntime adds in another order


class TaskOutputs(nn.Module):
    """The predictions of each task for all rows."""

    def __init__(self, model: GraftedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, task: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """A tensor (rows, ...) for each task."""
        marks = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.model.encode(input_ids, attention_mask, extras={"task": task}, **marks)
        heads: Any = self.model.grafts["graft"].heads
        vectors, outputs = pooled(hidden, attention_mask.bool(), heads.pooling), []
        for name, spec in heads.specs.items():
            out = heads.linear(name)(hidden if spec.of_tokens else vectors)
            outputs.append(out.squeeze(-1) * spec.unit + spec.range[0] if spec.type == "regression" else out)
        return tuple(outputs)


def export(task_graft: TaskGraft, folder: Path) -> None:
    """Write the folder. Raises GraftError if onnxruntime does not predict what torch predicts."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = {name: {"number": n} | spec.model_dump() for n, (name, spec) in enumerate(task_graft.tasks.items())}
    (folder / "tasks.json").write_text(json.dumps({"length": task_graft.length, "tasks": specs}), encoding="utf-8")
    tokenizer: Any = copy.deepcopy(task_graft.backbone.need_tokenizer())
    if tokenizer.is_fast:  # tokenizer.json of itself cuts as the graft was trained, and pads by the batch
        tokenizer.backend_tokenizer.enable_truncation(task_graft.length)
        tokenizer.backend_tokenizer.enable_padding(pad_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token)
    tokenizer.model_max_length = task_graft.length
    tokenizer.save_pretrained(folder)
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model, torch.no_grad():
        outputs, inputs = TaskOutputs(model.eval()).eval(), example_inputs(task_graft, 3, 7)
        shapes = {name: dict.fromkeys(range(value.ndim), torch.export.Dim.DYNAMIC) for name, value in inputs.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own
            program = torch.export.export(outputs, (), inputs, dynamic_shapes=shapes, strict=True)
            names = {"input_names": [*inputs], "output_names": [f"task:{name}" for name in specs]}
            exported: Any = torch.onnx.export(program, **names, dynamo=True, verbose=False)
            exported.save(folder / "model.onnx")
        gap = max(
            difference(folder, outputs, example_inputs(task_graft, *size))
            for size in ((max(4, len(specs)), 11), (1, 3))
        )
    if not gap <= TOLERANCE:
        raise GraftError(f"onnxruntime's predictions differ from torch's by {gap:.2g} of the largest: use graft serve.")


def example_inputs(task_graft: TaskGraft, rows: int, tokens: int) -> dict[str, Tensor]:
    """Rows of falling length, of all tasks in turn."""
    config = task_graft.backbone.config
    ids = torch.arange(rows * tokens).view(rows, tokens) * 7 % config.vocab_size
    mask = (torch.arange(tokens) < (tokens - torch.arange(rows)).clamp(min=2)[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "task": torch.arange(rows) % len(task_graft.tasks)}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (torch.arange(tokens) > tokens // 2).long().repeat(rows, 1)
    return inputs


def difference(folder: Path, outputs: TaskOutputs, inputs: dict[str, Tensor]) -> float:
    """The largest difference from torch over the largest value of a task; tokens of padding do not count."""
    session = InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    computed = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    mask, gaps = inputs["attention_mask"].bool(), []
    for values, expected in zip(computed, outputs(**inputs), strict=True):
        own, other = (x[mask] if x.ndim == 3 else x for x in (torch.as_tensor(values), expected))
        gaps.append(float((own - other).abs().max() / other.abs().max().clamp(min=1e-6)))
    return max(gaps)


if __name__ == "__main__":
    export(load_task_graft(sys.argv[1], device="cpu"), Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")  # noqa: T201  # a script
