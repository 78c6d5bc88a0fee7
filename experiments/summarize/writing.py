"""The writers: one small language model reads the documents, and three go on from it, each with its own context."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from experiments.jobs import Job
from experiments.summarize.corpora import Sample, Sizes, load
from experiments.summarize.selecting import evenly, extract_of
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
from graftlm.training import TrainingConfig
from graftlm.training.checkpoint import HISTORY, read_history
from graftlm.training.language_model import new_model, read_model, read_tokenizer, train_tokenizer

Context = Literal["none", "gold", "model"]
Rankings = Mapping[Context, Mapping[str, Sequence[int]]]  # of each document, by what chose them
_LEARNED_FROM = 4000  # characters of a document that the tokenizer learns from


class Reading(Job):
    """The model that all writers go on from, trained on what is no introduction.

    Args:
        start: folder of a model to go on from; None begins with a new one.
        model: config of a new one, with `model_type`.
        vocab_size: of its tokenizer.
        documents: that it reads, evenly spaced in time.
        window: tokens of a row.
    """

    data: str
    sizes: Sizes
    start: str | None
    model: dict[str, Any]
    vocab_size: int = Field(ge=300)
    documents: int = Field(ge=1)
    window: int = Field(ge=32)
    training: TrainingConfig


class Writing(Job):
    """One writer, and what it makes of the test documents in each context that it is given.

    Args:
        start: folder of the model to go on from.
        context: what it learns with: no extract, the gold one, or the selector's.
        tested: contexts that it is measured with.
        documents: that it learns from, evenly spaced in time.
        extract_size: sentences of a selector's extract.
        batch_size: documents that are written at a time.
    """

    data: str
    sizes: Sizes
    start: str
    context: Context
    tested: tuple[Context, ...]
    documents: int = Field(ge=1)
    extract_size: int = Field(ge=1)
    window: int = Field(ge=32)
    training: TrainingConfig
    decoding: SummaryDecoding
    batch_size: int = Field(16, ge=1)


def read(job: Reading, folder: Path) -> dict[str, Any]:
    """Train the job's model; gives where it lies, its size and its losses."""
    samples = evenly(load(job.data, job.sizes)["train"], job.documents)
    model, tokenizer = _begin(job, samples)
    decoding = SummaryDecoding(max_new_tokens=job.window // 3)
    writer = LanguageModelWriter(model, tokenizer, "the common model", PromptLayout(window=job.window), decoding)
    started = time.process_time()
    lessons = [WriterExample(_first(sample), "") for sample in samples]
    train_writer(writer, lessons, job.training, folder, rest_fraction=1, progress=False)
    seconds = time.process_time() - started
    said = {"folder": str(folder / MODEL), "parameters": count_parameters(model.parameters())}
    return said | {"training_cpu_s": round(seconds, 1), "losses": _losses(folder)}


def _begin(job: Reading, samples: Sequence[Sample]) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model to go on from, or a new one, and its tokenizer."""
    if job.start is not None:
        tokenizer = read_tokenizer(job.start)
        return read_model(job.start, tokenizer), tokenizer
    texts = (rest_text(sample.document)[:_LEARNED_FROM] for sample in samples)
    tokenizer = train_tokenizer(texts, job.vocab_size)
    return new_model(job.model, tokenizer, job.training.seed), tokenizer


def write(job: Writing, folder: Path, rankings: Rankings) -> dict[str, Any]:
    """Train a writer on its lessons, then measure it on the test documents in every context."""
    parts = load(job.data, job.sizes)
    layout = PromptLayout(window=job.window) if job.context != "none" else PromptLayout(window=job.window, extract=None)
    before = load_writer(job.start, device="cpu")
    writer = LanguageModelWriter(before.model, before.tokenizer, "the writer", layout, job.decoding)
    started = time.process_time()
    lessons = lessons_of(evenly(parts["train"], job.documents), job.context, rankings, job.extract_size)
    train_writer(writer, lessons, job.training, folder, rest_fraction=0, progress=False)
    trained = time.process_time() - started
    found = {context: _measure(writer, parts["test"], context, job, rankings) for context in job.tested}
    held_out = lessons_of(parts["validation"], job.context, rankings, job.extract_size)
    validation = [one.nats / one.tokens for one in summary_likelihoods(writer, held_out)]
    cost = {"training_cpu_s": round(trained, 1), "losses": _losses(folder)}
    return {"contexts": found, "validation_nll": sum(validation) / len(validation)} | cost


def lessons_of(samples: Sequence[Sample], context: Context, rankings: Rankings, size: int) -> list[WriterExample]:
    """What is learned from, or tested on: documents with the extract of a context, and their abstracts."""
    return [WriterExample(context_of(sample, context, rankings, size), sample.summary) for sample in samples]


def context_of(sample: Sample, context: Context, rankings: Rankings, size: int) -> Extract:
    """The extract that the writer is given: the gold one whole, a selector's first sentences; without one, any."""
    if context == "none":
        return _first(sample)
    ranked = rankings[context][sample.id]
    return extract_of(sample, ranked, len(ranked) if context == "gold" else size)


def _first(sample: Sample) -> Extract:
    """For a writer that does not read it."""
    return select(sample.document, LeadSelector(), Budget(amount=1))


def _measure(
    writer: LanguageModelWriter, samples: Sequence[Sample], context: Context, job: Writing, rankings: Rankings
) -> dict[str, Any]:
    """Nats per token of each abstract, and what the writer writes, by document."""
    lessons = lessons_of(samples, context, rankings, job.extract_size)
    likely = summary_likelihoods(writer, lessons)
    names = [sample.id for sample in samples]
    nats = {name: one.nats / one.tokens for name, one in zip(names, likely, strict=True)}
    return {"nll": nats, "texts": dict(zip(names, _written(writer, lessons, job.batch_size), strict=True))}


def _written(writer: LanguageModelWriter, lessons: Sequence[WriterExample], batch_size: int) -> list[str]:
    prompts = [writer.build_prompt(lesson.extract)[0] for lesson in lessons]
    found = []
    for first in range(0, len(prompts), batch_size):
        for text, cut in writer.complete_batch(prompts[first : first + batch_size]):
            found.append(drop_partial_sentence(text.strip()) if cut else text.strip())
    return found


def _losses(folder: Path) -> list[list[float]]:
    return [[line["step"], line["loss"]] for line in read_history(folder / HISTORY)]
