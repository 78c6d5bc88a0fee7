"""The runs and their sizes: extracts of documents, and writers that continue a small language model in a context."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from experiments import Options
from experiments.study import Study, losses, mini_lm
from experiments.summarize.corpora import CorpusSizes, DocumentRun, Part, Sample, evenly
from graftlm.config import Config
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
from graftlm.runs.run import Measurement, Run, RunContext
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
        metrics = {"training_cpu_s": round(trained - started, 1), "sentences_per_s": sentences / ranking_s}
        return Measurement(Row(id=self.id, label=self.id, metrics={**metrics}), {"losses": losses})

    def _selector(self, context: RunContext) -> tuple[Selector, list[list[float]]]:
        """The selector, and the losses of its training."""
        if self.kind == "load":
            (folder,) = context.dependencies.values()
            return load_selector(folder / SELECTOR, device="cpu"), []
        if self.kind != "train":
            return LeadSelector() if self.kind == "lead" else SumySelector(self.kind), []
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


def extract_of(sample: Sample, ranking: Sequence[int], amount: int | None = None) -> Extract:
    """The first sentences of a ranking, by default all, in the document's order."""
    return select(sample.document, FixedSelector(ranking), Budget(amount=len(ranking) if amount is None else amount))


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
        """Documents with the extract of a context, and their abstracts.

        It is the gold extract, a selector's first sentences, or without an extract one sentence that is not read.
        """
        if context == "none":
            return [WriterExample(_first_sentence(sample), sample.summary) for sample in samples]
        amount = None if context == "gold" else self.extract_size
        return [WriterExample(extract_of(s, rankings[context][s.id], amount), s.summary) for s in samples]


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


UNTRAINED = {"lead_10": "lead", "lead_k": "lead", "lexrank": "lexrank", "sumbasic": "sumbasic", "lsa": "lsa"}
TRAINED = {"sent_clf": "classifier", "sent_ptr": "pointer", "sent_modern": "modern"}
WRITERS: dict[Context, tuple[Context, ...]] = {  # the contexts that each writer is tested with
    "none": ("none",),
    "gold": ("model", "gold"),
    "model": ("model",),
}


class SummarizeSize(Config):
    """Sizes of data, models and training.

    Args:
        selectors: training of each selector, by row; the modern one gets its encoder from the study.
        modern_documents: training documents of the modern selector, evenly spaced in time.
        training_sentences: number of a document's first sentences that selectors learn from.
        start: the model that writers continue, in the data folder; None trains a new one.
        writer_documents: training documents of writers, evenly spaced in time.
        model: config of a new model.
        vocab_size: of its tokenizer.
        window: maximum tokens of introduction, extract and summary together.
        common_training: training of the common model on the rest of the documents.
        writer_training: training of each writer on its layout.
        decoding: decoding of summaries.
    """

    corpora: CorpusSizes = Field(default_factory=CorpusSizes)
    selectors: dict[str, SelectorTrainingConfig]
    modern_documents: int
    training_sentences: int
    start: str | None
    writer_documents: int
    model: dict[str, Any]
    vocab_size: int
    window: int
    common_training: TrainingConfig
    writer_training: TrainingConfig
    decoding: SummaryDecoding


_LSTM = {"embedding_size": 64, "hidden_size": 64, "num_layers": 1, "dropout": 0.3, "vocab_size": 4096, "max_tokens": 20}
_SHORT = {"steps": 600, "batch_size": 16, "learning_rate": 2e-3, "evaluate_every": 60, "patience": 3}
FULL = SummarizeSize(
    selectors={
        "sent_clf": SelectorTrainingConfig.parse({"kind": "classifier", "model": _LSTM} | _SHORT),
        "sent_ptr": SelectorTrainingConfig.parse({"kind": "pointer", "model": _LSTM} | _SHORT),
        "sent_modern": SelectorTrainingConfig.parse({"kind": "modern"} | _SHORT | {"learning_rate": 1e-3}),
    },
    modern_documents=400,
    training_sentences=80,
    start="models/english-novels-4m",
    writer_documents=800,
    model={},
    vocab_size=4096,
    window=512,
    common_training=TrainingConfig(
        steps=160, batch_size=4, learning_rate=1.5e-3, warmup_steps=10, min_ratio=0.3, precision="bf16"
    ),
    writer_training=TrainingConfig(steps=110, batch_size=4, learning_rate=1e-3, warmup_steps=5, precision="bf16"),
    decoding=SummaryDecoding(method="sample", max_new_tokens=160),
)
QUICK = SummarizeSize(
    corpora=CorpusSizes(max_documents=8, validation=0.2, test=0.2),
    selectors={
        row: SelectorTrainingConfig.parse(
            {"kind": kind, "steps": 2, "batch_size": 2, "evaluate_every": 1}
            | {"model": {"hidden_size": 4, "num_layers": 1} | ({} if kind == "modern" else {"vocab_size": 300})}
        )
        for row, kind in TRAINED.items()
    },
    modern_documents=4,
    training_sentences=40,
    start=None,
    writer_documents=20,
    model={"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256},
    vocab_size=400,
    window=256,
    common_training=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3),
    writer_training=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3),
    decoding=SummaryDecoding(method="sample", max_new_tokens=40),
)


class SummarizeStudy(Study):
    """The runs of the experiment, and what they wrote."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.size = QUICK if options.quick else FULL
        self._documents: dict[str, Any] = {"longdocs": str(options.data / "longdocs"), "sizes": self.size.corpora}
        self.oracle = OracleRun(id=ORACLE, **self._documents)
        self.parts = self.oracle.parts

    @cached_property
    def sentences(self) -> int:
        """Sentences of a measured extract: the mean of training abstracts, rounded."""
        return max(1, round(fmean(len(sample.abstract) for sample in self.parts["train"])))

    @cached_property
    def gold(self) -> Rankings:
        """The oracle's extracts, once its run is finished."""
        return self.rankings(self.oracle)

    @cached_property
    def extract_size(self) -> int:
        """Sentences of an extract that a writer reads: the mean of the gold extracts in training, rounded."""
        return max(1, round(fmean(len(self.gold[sample.id]) for sample in self.parts["train"])))

    def rankings(self, run: Run) -> Rankings:
        """The rankings that a finished run wrote."""
        return read_rankings(self.runs / run.id)

    def selectors(self) -> dict[tuple[str, int], SelectorRun]:
        """The runs of selectors by row and seed; untrained ones have the seed 0 alone."""
        untrained = {
            (row, 0): SelectorRun(id=kind, kind=kind, **self._documents)  # type: ignore[arg-type]  # known kinds
            for row, kind in UNTRAINED.items()
        }
        return untrained | {(row, seed): self.selector(row, seed) for seed in self.seeds for row in TRAINED}

    def selector(self, row: str, seed: int) -> SelectorRun:
        """The run that trains a selector. The encoder of the modern one is slow, so it ranks test documents only."""
        training = self.size.selectors[row].model_copy(update={"seed": seed})
        modern = training.kind == "modern"
        if modern:
            encoder = self.options.backbone or mini_lm(self.options.data, "The modern selector's encoder")
            training = training.model_copy(update={"sentence_encoder": encoder})
        return SelectorRun(
            id=f"{row}_s{seed}",
            depends_on=(ORACLE,),
            kind="train",
            training=training,
            documents=self.size.modern_documents if modern else None,
            training_sentences=self.size.training_sentences,
            precision="bf16" if modern else "fp32",
            ranked=("test",) if modern else ("validation", "test"),
            **self._documents,
        )

    def training_extracts(self, selector: SelectorRun) -> SelectorRun:
        """The run that ranks the training documents by a trained selector."""
        fields: dict[str, Any] = {"depends_on": (selector.id,), "kind": "load", "ranked": ("train",), **self._documents}
        return SelectorRun(id=f"{selector.id}-train", **fields)

    def writers(self, seed: int, selector: SelectorRun) -> dict[Context, WriterRun]:
        """The runs of writers by their context in training; those with extracts depend on the selector's."""
        extracts = ORACLE, selector.id, self.training_extracts(selector).id
        return {
            context: WriterRun(
                id=f"writer-{context}_s{seed}",
                depends_on=(f"common_s{seed}", *(extracts if context != "none" else ())),
                context=context,
                tested=tested,
                extract_size=self.extract_size,
                decoding=self.size.decoding.model_copy(update={"seed": seed}),
                **self._writer_fields(self.size.writer_training, seed),
            )
            for context, tested in WRITERS.items()
        }

    def _writer_fields(self, training: TrainingConfig, seed: int) -> dict[str, Any]:
        update = {"seed": seed, "checkpoint_every": max(1, training.steps // 2)}
        sizes = {"documents": self.size.writer_documents, "window": self.size.window}
        return {"training": training.model_copy(update=update), **sizes, **self._documents}

    def writer_runs(self, chosen: str) -> list[Run]:
        """The runs of all writers that get the extracts of the selector `chosen`, with what they depend on."""
        size, runs = self.size, list[Run]([self.oracle])
        for seed in self.seeds:
            selector = self.selector(chosen, seed)
            common = CommonModelRun(
                id=f"common_s{seed}",
                start=None if size.start is None else str(self.options.data / size.start),
                **size.model_dump(include={"model", "vocab_size"}),
                **self._writer_fields(size.common_training, seed),
            )
            runs += [selector, self.training_extracts(selector), common, *self.writers(seed, selector).values()]
        return runs
