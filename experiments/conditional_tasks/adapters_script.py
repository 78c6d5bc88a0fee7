"""Train parallel bottlenecks of the package `adapters`, one for each task, on given batches, and predict given rows.

    python adapters_script.py INPUT.json OUTPUT.json

The package needs transformers 4, so this file runs in an environment of its own and imports nothing of GraftLM. Rows
are tokenised already and batches are lists of rows, so that every method reads the same.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PREDICTION_ROWS = 32  # rows of a forward pass in evaluation
PlainRow = dict[str, Any]


class AdapterEncoder(nn.Module):
    """An encoder with one bottleneck and one head for each task."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        import adapters  # type: ignore[import-not-found]  # of the other environment
        from transformers import AutoModel

        self.tasks: list[dict[str, Any]] = job["tasks"]
        self.frozen: int = job["frozen_layers"]
        self.encoder: Any = AutoModel.from_pretrained(job["backbone"])
        adapters.init(self.encoder)
        width = self.encoder.config.hidden_size
        config = adapters.ParBnConfig(reduction_factor=width / job["bottleneck"])
        names = [task["name"] for task in self.tasks]
        for name in names:
            self.encoder.add_adapter(name, config=config)
        self.encoder.train_adapter(adapters.composition.Parallel(*names))
        heads = [nn.Linear(width, task["outputs"]) for task in self.tasks]
        for head in heads:
            nn.init.normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)
        self.heads = nn.ModuleList(heads)
        self.dropout = nn.Dropout(job["dropout"])
        self.pools_first = job["pooling"] == "first"
        for layer in list(self.encoder.encoder.layer)[self.frozen :]:
            layer.requires_grad_(True)

    def train(self, mode: bool = True) -> AdapterEncoder:
        """Frozen layers stay in evaluation mode, without dropout."""
        super().train(mode)
        for frozen in (self.encoder.embeddings, *list(self.encoder.encoder.layer)[: self.frozen]):
            frozen.eval()
        return self

    def forward(self, rows: Sequence[PlainRow]) -> list[Tensor]:
        """The prediction for each row. Rows of one task must be adjacent."""
        from adapters.composition import BatchSplit  # type: ignore[import-not-found]  # of the other environment

        counts = Counter(row["task"] for row in rows)  # in the order of the rows
        names = [self.tasks[task]["name"] for task in counts]
        active = names[0] if len(names) == 1 else BatchSplit(*names, batch_sizes=list(counts.values()))
        self.encoder.set_active_adapters(active)
        inputs = pad(rows)
        hidden = self.encoder(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"]
        return [self._head(row["task"], hidden[n], mask[n]) for n, row in enumerate(rows)]

    def _head(self, task: int, hidden: Tensor, mask: Tensor) -> Tensor:
        if self.tasks[task]["type"] == "tagging":
            return self.heads[task](self.dropout(hidden[: int(mask.sum())]))
        weights = mask.to(hidden.dtype)
        pooled = hidden[0] if self.pools_first else (hidden * weights[:, None]).sum(0) / weights.sum()
        output = self.heads[task](self.dropout(pooled))
        return output.squeeze(-1) if self.tasks[task]["type"] == "regression" else output


def pad(rows: Sequence[PlainRow]) -> dict[str, Tensor]:
    """Model inputs of some rows, padded with zeros at the end."""
    length = max(len(row["ids"]) for row in rows)
    values = {
        "input_ids": [row["ids"] for row in rows],
        "token_type_ids": [row["types"] for row in rows],
        "attention_mask": [[1] * len(row["ids"]) for row in rows],
    }
    return {name: torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in lists]) for name, lists in values.items()}


def row_loss(task: dict[str, Any], prediction: Tensor, target: Any) -> Tensor:
    """A row's cross-entropy (for tagging the mean over labelled tokens), or its squared error."""
    if task["type"] == "regression":
        return (prediction - float(target)).square()
    return functional.cross_entropy(prediction.float(), torch.tensor(target), ignore_index=-100)


def micro_batches(rows: Sequence[PlainRow], size: int) -> Iterator[list[PlainRow]]:
    """The rows by length, `size` at a time, each micro-batch ordered by task."""
    ordered = sorted(rows, key=lambda row: len(row["ids"]))
    for start in range(0, len(ordered), size):
        yield sorted(ordered[start : start + size], key=lambda row: row["task"])


def train(model: AdapterEncoder, batches: Sequence[Sequence[PlainRow]], training: dict[str, Any]) -> list[float]:
    """Train on all batches; gives the loss of each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=1.0, betas=tuple(training["betas"]), weight_decay=0.0, fused=True)
    model.train()
    losses = []
    for rate, batch in zip(training["rates"], batches, strict=True):
        total = 0.0
        for rows in micro_batches(batch, training["micro_batch_size"]):
            with autocast(training["precision"]):
                predictions = model(rows)
            pairs = zip(rows, predictions, strict=True)
            row_losses = [row_loss(model.tasks[row["task"]], output, row["target"]) for row, output in pairs]
            loss = torch.stack(row_losses).sum() / len(batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, training["clip"])
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad()
        losses.append(total)
    return losses


@torch.inference_mode()
def predict(model: AdapterEncoder, rows: Sequence[PlainRow], precision: str) -> list[Any]:
    """The model's outputs for all rows, in order."""
    model.eval()
    outputs: list[Any] = [None] * len(rows)
    numbered = [row | {"number": number} for number, row in enumerate(rows)]
    for batch in micro_batches(numbered, PREDICTION_ROWS):
        with autocast(precision):
            predictions = model(batch)
        for row, prediction in zip(batch, predictions, strict=True):
            outputs[row["number"]] = prediction.float().tolist()
    return outputs


def autocast(precision: str) -> AbstractContextManager[Any]:
    """bfloat16 for the precision bf16."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def main(input_file: str, output_file: str) -> None:
    """Train and predict."""
    torch.set_num_threads(1)
    job = json.loads(Path(input_file).read_text(encoding="utf-8"))
    training = job["training"]
    torch.manual_seed(training["seed"])
    model = AdapterEncoder(job)
    started = time.process_time()
    losses = train(model, job["batches"], training)
    output = {
        "seconds": time.process_time() - started,
        "losses": losses,
        "predictions": predict(model, job["tests"], training["precision"]),
        "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "total": sum(parameter.numel() for parameter in model.parameters()),
    }
    Path(output_file).write_text(json.dumps(output), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
