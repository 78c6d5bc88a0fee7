"""The writers: a small language model reads the documents, and three writers continue it, each with its own context."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from experiments.summarize.corpora import DocumentRun, Sample, evenly
from experiments.summarize.selectors import ORACLE, Rankings, extract_of, read_rankings
from graftlm.evaluation import Row
from graftlm.pipelines.summarize import (
    Extract,
    LanguageModelWriter,
    LeadSelector,
    PromptLayout,
    SummaryDecoding,
    load_writer,
    select,
)
from graftlm.pipelines.summarize.selection import Budget
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
from graftlm.training.checkpoint import HISTORY, read_history
from graftlm.training.language_model import new_model, read_model, read_tokenizer, train_tokenizer

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
        losses = [[line["step"], line["loss"]] for line in read_history(folder / HISTORY)]
        return Measurement(Row(id=self.id, label=self.id, metrics=metrics), {"losses": losses})


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
