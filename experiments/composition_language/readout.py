"""What an output layer can say of frozen models' last states: the price of speaking through an anchor's.

    logits_BTV = (h_BTA W^T + c) E^T

h_BTA are the last states of some models side by side, as each model's own output layer takes them. E (V, D) is the
anchor's frozen output layer, or the identity, where the layer may be any. W (D, A) and c (D,) alone are trained.

Shape suffixes: N rows, T tokens of a row, M tokens in all, A the models' widths together, D the anchor's, V pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.composed import ComposedStudy
from experiments.parents import read_texts
from graftlm.backbone import load_backbone
from graftlm.evaluation import Row, score
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, Run, RunContext

LABELS = {
    "readout_frozen": "m_A read by the anchor's output layer",
    "readout_free": "m_A read by a free output layer",
    "readout_free_both": "m_A and the anchor read by a free output layer",
}
_AT_ONCE = 8  # rows that the frozen models read at a time


class ReadoutRun(Run):
    """One output layer over models' last states, fitted to a text and measured on others.

    Args:
        models: folders of the models whose states are read; they share a tokenizer.
        through: the model whose frozen output layer stands behind the map; None for a free one.
        text: JSON Lines of what is fitted.
        tests: JSON Lines to measure, by name.
        length: tokens of a row.
        epochs: passes over the text.
        tokens: of a step.
    """

    models: tuple[str, ...]
    through: str | None
    text: str
    tests: dict[str, str]
    length: int
    epochs: int = 4
    tokens: int = 2048
    learning_rate: float = 3e-3
    seed: int = 0

    def measure(self, context: RunContext) -> Measurement:
        """Fit the readout, and measure bits per byte of every test text."""
        torch.manual_seed(self.seed)
        backbones = [load_backbone(name, device="cpu") for name in self.models]
        tokenizer = backbones[0].need_tokenizer()
        anchor: Any = load_backbone(self.through, device="cpu").model if self.through else None
        layer = anchor.get_output_embeddings().weight if anchor else None
        readout = Readout([backbone.model for backbone in backbones], layer)
        fit(readout, rows_of_text(read_texts(Path(self.text)), tokenizer, self.length), self)
        metrics: dict[str, Any] = {}
        for name, file in self.tests.items():
            scores = score(readout, tokenizer, read_texts(Path(file)), length=self.length)
            metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")
        metrics["trainable_parameters"] = count_parameters(readout.map.parameters())
        return Measurement(Row(id=self.id, label=self.label, metrics=metrics))


class Readout(nn.Module):
    """A linear map of the last states of `models`, into an output layer's (V, D) input or, without one, to logits."""

    def __init__(self, models: Sequence[Any], layer_VD: Tensor | None) -> None:
        super().__init__()
        self._models = list(models)  # frozen, and no part of this module
        widths = sum(model.config.hidden_size for model in models)
        self.layer_VD = layer_VD
        self.map = nn.Linear(widths, models[0].config.vocab_size if layer_VD is None else layer_VD.shape[1])
        nn.init.zeros_(self.map.bias)

    @torch.no_grad()
    def states(self, ids_BT: Tensor) -> Tensor:
        """(B, T, A)."""
        read = [model.base_model(input_ids=ids_BT, use_cache=False) for model in self._models]
        return torch.cat([output.last_hidden_state.float() for output in read], -1)

    def logits(self, states_A: Tensor) -> Tensor:
        """(..., A) -> (..., V)."""
        mapped = self.map(states_A)
        return mapped if self.layer_VD is None else functional.linear(mapped, self.layer_VD)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        """As a causal language model's; rows are padded on the right, where no token sees it."""
        return SimpleNamespace(logits=self.logits(self.states(input_ids)))


def fit(readout: Readout, rows_NT: Tensor, run: ReadoutRun) -> None:
    """Train the map in place, by Adam with a cosine schedule, to predict each token of each row but its first."""
    states_MA = torch.cat([readout.states(rows[:, :-1]).flatten(0, 1) for rows in rows_NT.split(_AT_ONCE)])
    targets_M = rows_NT[:, 1:].flatten()
    optimiser = torch.optim.Adam(readout.map.parameters(), lr=run.learning_rate)
    per_epoch = math.ceil(len(targets_M) / run.tokens)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, run.epochs * per_epoch)
    order = torch.Generator().manual_seed(run.seed)
    for _ in range(run.epochs):
        for chosen in torch.randperm(len(targets_M), generator=order).split(run.tokens):
            loss = functional.cross_entropy(readout.logits(states_MA[chosen]), targets_M[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()


def rows_of_text(texts: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """(N, length + 1) tokens of whole rows within documents, each beginning with the last token of the one before."""
    rows = []
    for text in texts:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
        if len(ids) > length:
            rows.append(ids.unfold(0, length + 1, length))
    return torch.cat(rows)


def readout_rows(study: ComposedStudy) -> list[Row]:
    """The rows of those readouts that are wanted, fitted to the compositions' own French."""
    texts, french, anchor = study.texts, str(study.parents.french), str(study.parents.anchor)
    tests = {name: str(texts / f"{name}.jsonl") for name in ("new", "validation_new")}
    shared: dict[str, Any] = {"text": str(texts / "french-part.jsonl"), "tests": tests, "length": study.length}
    models = {
        "readout_frozen": ((french,), anchor),
        "readout_free": ((french,), None),
        "readout_free_both": ((french, anchor), None),
    }
    runs = [
        ReadoutRun(id=name, label=LABELS[name], models=read, through=through, **shared)
        for name, (read, through) in models.items()
        if name in study.wanted
    ]
    return [measurement.row for measurement in study.execute(runs, "readouts").values()]
