"""The runs: extracts of documents, and writers that continue a small language model, each with its own context."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from experiments.study import losses
from experiments.summarize.corpora import DocumentRun, Part, Sample, evenly
from graftlm.evaluation import Row
from graftlm.io import write_atomically
from graftlm.pipelines.summarize import (
    Budget,
    Extract,
    LanguageModelWriter,
    LeadSelector,
    PromptLayout,
    Selector,
    SelectorExample,
    SelectorTrainingConfig,
    SummaryDecoding,
    SumySelector,
    load_selector,
    load_writer,
    oracle_extract,
    select,
    train_selector,
)
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.pipelines.summarize.writer import (
    MODEL,
    WriterExample,
    drop_partial_sentence,
    rest_text,
    summary_likelihoods,
    train_writer,
)
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, RunContext
from graftlm.training import TrainingConfig
from graftlm.training.checkpoint import HISTORY
from graftlm.training.language_model import new_model, read_model, read_tokenizer, train_tokenizer

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


Context = Literal["none", "gold", "model"]  # the extract of a prompt: none, the gold extract, or a selector's
BATCH_SIZE = 16  # documents that are written at once
_TOKENIZER_CHARACTERS = 4000  # characters of each document that the tokenizer learns from


class WriterTrainingRun(DocumentRun):
    """A run that trains a writer.

    Args:
        documents: training documents, evenly spaced in time.
        window: maximum number of tokens of a row.
    """

    documents: int = Field(ge=1)
    window: int = Field(ge=32)
    training: TrainingConfig

    def artefacts(self) -> tuple[str, ...]:
        return (f"{MODEL}/config.json",)

    def train(
        self, writer: LanguageModelWriter, examples: Sequence[WriterExample], folder: Path, *, rest_fraction: float
    ) -> Measurement:
        """Train in place, and measure the cost."""
        started = time.process_time()
        train_writer(writer, examples, self.training, folder, rest_fraction=rest_fraction, progress=False)
        metrics = {
            "training_cpu_s": round(time.process_time() - started, 1),
            "parameters": count_parameters(writer.model.parameters()),
        }
        return Measurement(Row(id=self.id, label=self.id, metrics=metrics), {"losses": losses(folder / HISTORY)})


class CommonModelRun(WriterTrainingRun):
    """Train the model that all writers continue, on the documents without their introductions.

    Args:
        start: folder of a model to continue; None trains a new one.
        model: config of a new model, with `model_type`.
        vocab_size: of a new model's tokenizer.
    """

    start: str | None
    model: dict[str, Any]
    vocab_size: int = Field(ge=300)

    def measure(self, context: RunContext) -> Measurement:
        samples = evenly(self.parts["train"], self.documents)
        model, tokenizer = self._load(samples)
        decoding = SummaryDecoding(max_new_tokens=self.window // 3)
        writer = LanguageModelWriter(model, tokenizer, "the common model", PromptLayout(window=self.window), decoding)
        examples = [WriterExample(_first_sentence(sample), "") for sample in samples]
        return self.train(writer, examples, context.folder, rest_fraction=1)

    def _load(self, samples: Sequence[Sample]) -> tuple[Any, PreTrainedTokenizerBase]:
        """The model and its tokenizer."""
        if self.start is not None:
            tokenizer = read_tokenizer(self.start)
            return read_model(self.start, tokenizer), tokenizer
        texts = (rest_text(sample.document)[:_TOKENIZER_CHARACTERS] for sample in samples)
        tokenizer = train_tokenizer(texts, self.vocab_size)
        return new_model(self.model, tokenizer, self.training.seed), tokenizer


class WriterRun(WriterTrainingRun):
    """Train a writer, and write summaries of the test documents in each context.

    A writer depends on the run of the common model, first. With extracts it depends on the oracle and selectors too.

    Args:
        context: the extracts of training.
        tested: the contexts of the test.
        extract_size: sentences of a selector's extract.
    """

    context: Context
    tested: tuple[Context, ...]
    extract_size: int = Field(ge=1)
    decoding: SummaryDecoding

    def measure(self, context: RunContext) -> Measurement:
        common, *folders = context.dependencies.values()
        rankings: dict[Context, Rankings] = {}
        if ORACLE in context.dependencies:
            selectors = [folder for folder in folders if folder != context.dependencies[ORACLE]]
            rankings = {"gold": read_rankings(context.dependencies[ORACLE]), "model": read_rankings(*selectors)}
        layout = PromptLayout(window=self.window)
        if self.context == "none":
            layout = PromptLayout(window=self.window, extract=None)
        start = load_writer(common / MODEL, device="cpu")
        writer = LanguageModelWriter(start.model, start.tokenizer, "the writer", layout, self.decoding)
        examples = self._examples(evenly(self.parts["train"], self.documents), self.context, rankings)
        measurement = self.train(writer, examples, context.folder, rest_fraction=0)
        validation = _nats_per_token(writer, self._examples(self.parts["validation"], self.context, rankings))
        measurement.add_metrics({"validation_nll": sum(validation) / len(validation)})
        measurement.details["contexts"] = {name: self._test(writer, name, rankings) for name in self.tested}
        return measurement

    def _test(
        self, writer: LanguageModelWriter, context: Context, rankings: Mapping[Context, Rankings]
    ) -> dict[str, Any]:
        """Nats per token of each abstract, and the written summary, by document."""
        samples = self.parts["test"]
        examples = self._examples(samples, context, rankings)
        names = [sample.id for sample in samples]
        nats = dict(zip(names, _nats_per_token(writer, examples), strict=True))
        return {"nll": nats, "texts": dict(zip(names, _write(writer, examples), strict=True))}

    def _examples(
        self, samples: Sequence[Sample], context: Context, rankings: Mapping[Context, Rankings]
    ) -> list[WriterExample]:
        """Documents with the extract of a context, and their abstracts."""
        return [WriterExample(self._extract(sample, context, rankings), sample.summary) for sample in samples]

    def _extract(self, sample: Sample, context: Context, rankings: Mapping[Context, Rankings]) -> Extract:
        """The gold extract, a selector's first sentences, or without an extract one sentence that is not read."""
        if context == "none":
            return _first_sentence(sample)
        ranking = rankings[context][sample.id]
        return extract_of(sample, ranking, len(ranking) if context == "gold" else self.extract_size)


def _first_sentence(sample: Sample) -> Extract:
    return select(sample.document, LeadSelector(), Budget(amount=1))


def _nats_per_token(writer: LanguageModelWriter, examples: Sequence[WriterExample]) -> list[float]:
    return [likelihood.nats / likelihood.tokens for likelihood in summary_likelihoods(writer, examples)]


def _write(writer: LanguageModelWriter, examples: Sequence[WriterExample]) -> list[str]:
    prompts = [writer.build_prompt(example.extract)[0] for example in examples]
    batches = (prompts[first : first + BATCH_SIZE] for first in range(0, len(prompts), BATCH_SIZE))
    return [
        drop_partial_sentence(text.strip()) if truncated else text.strip()
        for batch in batches
        for text, truncated in writer.complete_batch(batch)
    ]
