"""Write an encoder with a graft of conditional tasks as one ONNX file, which onnxruntime runs without torch.

    pip install 'graftlm[onnx]'
    python examples/export_onnx.py runs/tasks/graft FOLDER

The folder gets `model.onnx`, the tokenizer, which truncates at the graft's length, and `tasks.json` with that length
and with the number, type and labels of each task.

| input | shape | |
|---|---|---|
| `input_ids` | (rows, tokens) | |
| `attention_mask` | (rows, tokens) | padding on the right |
| `token_type_ids` | (rows, tokens) | only if the encoder has segments |
| `task` | (rows,) | number of the task of each row |

The output `task:NAME` has the logits of this task for all rows, or numbers in the unit of a regression. A batch may mix
tasks: read the output of its task for each row. Outputs at padding have no meaning. Before the script ends, it compares
the file with torch.
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
from graftlm.grafts.heads import Heads, pooled

TOLERANCE = 1e-4  # relative to the largest value, since onnxruntime adds in another order
EXPORTED_SHAPE = (3, 7)


class TaskOutputs(nn.Module):
    """The predictions of each task for all rows.

    Args:
        model: The encoder with an attached graft that has heads.
    """

    def __init__(self, model: GraftedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        task: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Predict by all heads.

        Args:
            input_ids: Token ids (rows, tokens).
            attention_mask: 1 at tokens and 0 at padding (rows, tokens).
            task: Number of the task of each row (rows,).
            token_type_ids: Segments of the tokens (rows, tokens).

        Returns:
            A tensor (rows, ...) for each task; of a choice task, whose rows are single choices, a logit for each.
        """
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.model.encode(input_ids, attention_mask, extras={"task": task}, **segments)
        heads: Heads = self.model.grafts["graft"].heads
        vectors = pooled(hidden, attention_mask.bool(), heads.pooling)
        outputs = []
        for name, spec in heads.specs.items():
            output = heads.linear(name)(hidden if spec.of_tokens else vectors)
            if spec.type == "regression":
                lowest = spec.range[0]
                output = output.squeeze(-1) * spec.unit + lowest
            outputs.append(output)
        return tuple(outputs)


def export(task_graft: TaskGraft, folder: Path) -> None:
    """Write the model, the tokenizer and the tasks.

    Args:
        task_graft: The encoder and its graft.
        folder: The folder to write to.

    Raises:
        GraftError: A task has marked places, which are no input of the file, or the predictions of onnxruntime differ
            from those of torch.
    """
    marked = [name for name, spec in task_graft.tasks.items() if spec.type == "marked"]
    if marked:
        raise GraftError(
            f"The task {marked[0]} reads marked places, which the ONNX file has no input for: use graft serve, or "
            "train a graft without this task."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(task_graft, folder)
    write_tokenizer(task_graft, folder)
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model, torch.no_grad():
        outputs = TaskOutputs(model.eval()).eval()
        write_model(outputs, task_graft, folder)
        all_tasks = example_inputs(task_graft, max(4, len(task_graft.tasks)), 11)
        one_row = example_inputs(task_graft, 1, 3)
        gap = max(difference(folder, outputs, inputs) for inputs in (all_tasks, one_row))
    if not gap <= TOLERANCE:  # also if it is NaN
        raise GraftError(
            f"The predictions of onnxruntime differ from those of torch by {gap:.2g} of the largest value: use graft "
            "serve."
        )


def write_tasks(task_graft: TaskGraft, folder: Path) -> None:
    """Write the length of rows and the specifications of the tasks to `tasks.json`."""
    tasks = {}
    for number, (name, spec) in enumerate(task_graft.tasks.items()):
        tasks[name] = {"number": number, **spec.model_dump()}
    document = {"length": task_graft.length, "tasks": tasks}
    (folder / "tasks.json").write_text(json.dumps(document), encoding="utf-8")


def write_tokenizer(task_graft: TaskGraft, folder: Path) -> None:
    """Write the tokenizer. Its `tokenizer.json` truncates and pads by itself, as in training."""
    tokenizer: Any = copy.deepcopy(task_graft.backbone.need_tokenizer())
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.enable_truncation(task_graft.length)
        tokenizer.backend_tokenizer.enable_padding(pad_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token)
    tokenizer.model_max_length = task_graft.length
    tokenizer.save_pretrained(folder)


def write_model(outputs: TaskOutputs, task_graft: TaskGraft, folder: Path) -> None:
    """Write `model.onnx`, for any number of rows and tokens."""
    inputs = example_inputs(task_graft, *EXPORTED_SHAPE)
    shapes = {name: dict.fromkeys(range(value.ndim), torch.export.Dim.DYNAMIC) for name, value in inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter uses deprecated functions
        program = torch.export.export(outputs, (), inputs, dynamic_shapes=shapes, strict=True)
        exported: Any = torch.onnx.export(
            program,
            input_names=list(inputs),
            output_names=[f"task:{name}" for name in task_graft.tasks],
            dynamo=True,
            verbose=False,
        )
        exported.save(folder / "model.onnx")


def example_inputs(task_graft: TaskGraft, rows: int, tokens: int) -> dict[str, Tensor]:
    """Return a batch of all tasks in turn.

    Args:
        task_graft: The encoder and its graft.
        rows: Number of rows.
        tokens: Number of tokens of the first row; each further row has one token less, but at least two.
    """
    config = task_graft.backbone.config
    lengths = (tokens - torch.arange(rows)).clamp(min=2)
    mask = torch.arange(tokens) < lengths[:, None]
    inputs = {
        "input_ids": torch.arange(rows * tokens).view(rows, tokens) * 7 % config.vocab_size,
        "attention_mask": mask.long(),
        "task": torch.arange(rows) % len(task_graft.tasks),
    }
    if getattr(config, "type_vocab_size", 0) > 1:
        segments = torch.arange(tokens) > tokens // 2
        inputs["token_type_ids"] = segments.long().repeat(rows, 1)
    return inputs


def difference(folder: Path, outputs: TaskOutputs, inputs: dict[str, Tensor]) -> float:
    """Return the largest difference between onnxruntime and torch, relative to the largest value of each task.

    Args:
        folder: The folder with `model.onnx`.
        outputs: The model in torch.
        inputs: The batch to compare on; predictions at padding are not compared.
    """
    session = InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    computed = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    mask = inputs["attention_mask"].bool()
    gaps = []
    for values, expected in zip(computed, outputs(**inputs), strict=True):
        actual = torch.as_tensor(values)
        if expected.ndim == 3:
            actual = actual[mask]
            expected = expected[mask]
        largest = expected.abs().max().clamp(min=1e-6)
        gap = (actual - expected).abs().max() / largest
        gaps.append(float(gap))
    return max(gaps)


if __name__ == "__main__":
    export(load_task_graft(sys.argv[1], device="cpu"), Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")  # noqa: T201  # a script
