"""Extracts of documents: the oracle's, and those of trained and untrained selectors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from experiments.summarize.corpora import DocumentRun, Part, Sample, evenly
from graftlm.evaluation import Row
from graftlm.io import write_atomically
from graftlm.pipelines.summarize import (
    Budget,
    Extract,
    LeadSelector,
    Selector,
    SelectorExample,
    SelectorTrainingConfig,
    SumySelector,
    load_selector,
    oracle_extract,
    select,
    train_selector,
)
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.runs.run import Measurement, RunContext

RANKINGS, SELECTOR, ORACLE = "rankings.json", "selector", "oracle"
Rankings = Mapping[str, Sequence[int]]  # indices of sentences, by document


def read_rankings(*folders: Path) -> Rankings:
    """The rankings that runs wrote."""
    rankings: dict[str, Sequence[int]] = {}
    for folder in folders:
        rankings |= json.loads((folder / RANKINGS).read_text(encoding="utf-8"))
    return rankings


def _write_rankings(folder: Path, rankings: Rankings) -> None:
    write_atomically(folder / RANKINGS, json.dumps(rankings).encode())


class OracleRun(DocumentRun):
    """The gold extract of all documents: for each sentence of the abstract the two nearest."""

    def artefacts(self) -> tuple[str, ...]:
        return (RANKINGS,)

    def measure(self, context: RunContext) -> Measurement:
        extracts = {}
        for sample in chain.from_iterable(self.parts.values()):
            selectable = sample.document.selectable
            sentences = [sample.document.sentences[index].text for index in selectable]
            extracts[sample.id] = [selectable[i] for i in oracle_extract(sentences, sample.abstract)]
        _write_rankings(context.folder, extracts)
        return Measurement(Row(id=self.id, label=self.id, metrics={"documents": len(extracts)}))


class SelectorRun(DocumentRun):
    """A selector, and its rankings of documents. A run with a training config trains it on the oracle's extracts.

    Args:
        kind: an untrained selector, `train`, or `load`, which takes the selector of the run it depends on.
        training: hyperparameters of `train`.
        documents: to train on, evenly spaced, with a quarter as many held out; None takes all.
        training_sentences: number of each document's first sentences that training reads. Ranking reads all.
        ranked: parts whose documents are ranked.
        top: number of sentences of a ranking.
        precision: bf16 for matrix products.
    """

    kind: Literal["lead", "lexrank", "sumbasic", "lsa", "train", "load"]
    training: SelectorTrainingConfig | None = None
    documents: int | None = Field(None, ge=1)
    training_sentences: int | None = Field(None, ge=1)
    ranked: tuple[Part, ...] = ("test",)
    top: int = Field(20, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"

    def artefacts(self) -> tuple[str, ...]:
        return (RANKINGS,)

    def measure(self, context: RunContext) -> Measurement:
        samples = [sample for part in self.ranked for sample in self.parts[part]]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            started = time.process_time()
            selector, losses = self._selector(context)
            trained = time.process_time()
            ranked = {sample.id: selector.rank(sample.document)[: self.top] for sample in samples}
            ranking_s = time.process_time() - trained
        _write_rankings(context.folder, {name: [sentence.index for sentence in row] for name, row in ranked.items()})
        sentences = sum(len(sample.document.selectable) for sample in samples)
        metrics: dict[str, Any] = {"training_cpu_s": round(trained - started, 1)}
        metrics["sentences_per_s"] = sentences / ranking_s
        return Measurement(Row(id=self.id, label=self.id, metrics=metrics), {"losses": losses})

    def _selector(self, context: RunContext) -> tuple[Selector, list[list[float]]]:
        """The selector, and the losses of its training."""
        if self.kind == "load":
            (folder,) = context.dependencies.values()
            return load_selector(folder / SELECTOR, device="cpu"), []
        if self.kind == "lead":
            return LeadSelector(), []
        if self.kind != "train":
            return SumySelector(self.kind), []
        assert self.training is not None, "a run that trains has a config of training"
        train, validation = self.parts["train"], self.parts["validation"]
        if self.documents is not None:
            train, validation = evenly(train, self.documents), evenly(validation, max(1, self.documents // 4))
        gold = read_rankings(context.dependencies[ORACLE])
        examples, held_out = ([self._example(sample, gold) for sample in part] for part in (train, validation))
        selector = train_selector(examples, held_out, self.training)
        selector.save(context.folder / SELECTOR)
        return selector, selector.record["losses"]

    def _example(self, sample: Sample, gold: Rankings) -> SelectorExample:
        selectable = sample.document.selectable[: self.training_sentences]
        positions = {index: position for position, index in enumerate(selectable)}
        sentences = tuple(sample.document.sentences[index].text for index in selectable)
        return SelectorExample(sentences, tuple(positions[index] for index in gold[sample.id] if index in positions))


def extract_of(sample: Sample, ranking: Sequence[int], amount: int) -> Extract:
    """The first sentences of a ranking, in the document's order."""
    return select(sample.document, FixedSelector(ranking), Budget(amount=amount))
