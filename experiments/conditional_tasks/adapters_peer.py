"""The peer: parallel bottlenecks of the package `adapters`, one a task, on the rows and batches that a file names.

    python adapters_peer.py EXERCISE.json ANSWERS.json

The package needs transformers 4, so this file runs in an environment of its own and imports nothing of GraftLM. Rows
are tokens already and batches are lists of rows, so that every method reads the same.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
Row = dict[str, Any]


class Peer(nn.Module):
    """An encoder with one bottleneck and one head for each task."""

    def __init__(self, exercise: dict[str, Any]) -> None:
        super().__init__()
        import adapters  # type: ignore[import-not-found]  # of the other environment
        from transformers import AutoModel

        self.tasks: list[dict[str, Any]] = exercise["tasks"]
        self.frozen: int = exercise["frozen_layers"]
        self.encoder: Any = AutoModel.from_pretrained(exercise["backbone"])
        adapters.init(self.encoder)
        width = self.encoder.config.hidden_size
        config = adapters.ParBnConfig(reduction_factor=width / exercise["bottleneck"])
        names = [task["name"] for task in self.tasks]
        for name in names:
            self.encoder.add_adapter(name, config=config)
        self.encoder.train_adapter(adapters.composition.Parallel(*names))
        self.heads = nn.ModuleList(nn.Linear(width, task["outputs"]) for task in self.tasks)
        for head in self.heads:
            assert isinstance(head, nn.Linear), "a ModuleList does not tell what it holds"
            nn.init.normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)
        self.dropout = nn.Dropout(exercise["dropout"])
        self.pools_first = exercise["pooling"] == "first"
        for layer in list(self.encoder.encoder.layer)[self.frozen :]:
            layer.requires_grad_(True)

    def train(self, mode: bool = True) -> Peer:
        """Without dropout in what stays as it is."""
        super().train(mode)
        for frozen in (self.encoder.embeddings, *list(self.encoder.encoder.layer)[: self.frozen]):
            frozen.eval()
        return self

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Each row's prediction; rows of one task must stand together."""
        from adapters.composition import BatchSplit  # type: ignore[import-not-found]  # of the other environment

        counts: dict[int, int] = {}
        for row in rows:
            counts[row["task"]] = counts.get(row["task"], 0) + 1
        names = [self.tasks[task]["name"] for task in counts]
        one = len(names) == 1
        self.encoder.set_active_adapters(names[0] if one else BatchSplit(*names, batch_sizes=list(counts.values())))
        inputs = padded(rows)
        hidden = self.encoder(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"]
        return [self._head(row["task"], hidden[n], mask[n]) for n, row in enumerate(rows)]

    def _head(self, task: int, hidden: Tensor, mask: Tensor) -> Tensor:
        if self.tasks[task]["type"] == "tagging":
            return self.heads[task](self.dropout(hidden[: int(mask.sum())]))
        weights = mask.to(hidden.dtype)
        pooled = hidden[0] if self.pools_first else (hidden * weights[:, None]).sum(0) / weights.sum()
        out = self.heads[task](self.dropout(pooled))
        return out.squeeze(-1) if self.tasks[task]["type"] == "regression" else out


def padded(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows side by side, zeros behind the shorter ones."""
    length = max(len(row["ids"]) for row in rows)

    def wide(values: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[*one, *[0] * (length - len(one))] for one in values])

    return {
        "input_ids": wide([row["ids"] for row in rows]),
        "token_type_ids": wide([row["types"] for row in rows]),
        "attention_mask": wide([[1] * len(row["ids"]) for row in rows]),
    }


def loss_of(task: dict[str, Any], prediction: Tensor, target: Any) -> Tensor:
    """A row's cross-entropy, a mean over labelled tokens, or squared error."""
    if task["type"] == "regression":
        return (prediction - float(target)).square()
    return functional.cross_entropy(prediction.float(), torch.tensor(target), ignore_index=IGNORED)


def pieces(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Rows of like length side by side, `size` at a time, each piece ordered by task."""
    ordered = sorted(rows, key=lambda row: len(row["ids"]))
    for start in range(0, len(ordered), size):
        yield sorted(ordered[start : start + size], key=lambda row: row["task"])


def fit(peer: Peer, exercise: dict[str, Any]) -> list[float]:
    """Train on all batches; the losses."""
    said = exercise["training"]
    trained = [parameter for parameter in peer.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1.0, betas=tuple(said["betas"]), weight_decay=0.0, fused=True)
    peer.train()
    losses = []
    for rate, batch in zip(said["rates"], exercise["batches"], strict=True):
        total = 0.0
        for piece in pieces(batch, said["micro_batch_size"]):
            with lower_precision(said["precision"]):
                predictions = peer(piece)
            found = [loss_of(peer.tasks[r["task"]], p, r["target"]) for r, p in zip(piece, predictions, strict=True)]
            loss = torch.stack(found).sum() / len(batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, said["clip"])
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad()
        losses.append(total)
    return losses


@torch.inference_mode()
def answer(peer: Peer, rows: Sequence[Row], size: int, precision: str) -> list[Any]:
    """What the peer says of every row, in their order."""
    peer.eval()
    found: list[Any] = [None] * len(rows)
    numbered = [row | {"number": number} for number, row in enumerate(rows)]
    for piece in pieces(numbered, size):
        with lower_precision(precision):
            predictions = peer(piece)
        for row, prediction in zip(piece, predictions, strict=True):
            found[row["number"]] = prediction.float().tolist()
    return found


def lower_precision(precision: str) -> AbstractContextManager[Any]:
    """bfloat16 where it is asked for."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def count(parameters: Iterator[nn.Parameter], *, trained: bool = False) -> int:
    """Numbers in parameters, or in those that are trained."""
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad or not trained)


def main(exercise_file: str, answers_file: str) -> None:
    """Train and answer."""
    torch.set_num_threads(1)
    exercise = json.loads(Path(exercise_file).read_text(encoding="utf-8"))
    torch.manual_seed(exercise["training"]["seed"])
    peer = Peer(exercise)
    started = time.process_time()
    losses = fit(peer, exercise)
    seconds = time.process_time() - started
    precision = exercise["training"]["precision"]
    answers = {part: answer(peer, rows, 32, precision) for part, rows in exercise["exams"].items()}
    found = {
        "answers": answers,
        "losses": losses,
        "seconds": seconds,
        "trained": count(peer.parameters(), trained=True),
        "total": count(peer.parameters()),
    }
    Path(answers_file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
