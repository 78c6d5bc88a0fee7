"""Sizes of the experiment, and its runs."""

from __future__ import annotations

from functools import cached_property
from statistics import fmean
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.study import Study, mini_lm
from experiments.summarize.corpora import CorpusSizes, Parts, load
from experiments.summarize.runs import (
    ORACLE,
    CommonModelRun,
    Context,
    OracleRun,
    Rankings,
    SelectorRun,
    WriterRun,
    read_rankings,
)
from graftlm.config import Config
from graftlm.pipelines.summarize import SelectorTrainingConfig, SummaryDecoding
from graftlm.runs.run import Run
from graftlm.training import TrainingConfig

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

    @cached_property
    def parts(self) -> Parts:
        """All documents."""
        return load(self._documents["longdocs"], self.size.corpora)

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

    def rankings(self, *runs: Run) -> Rankings:
        """The rankings that finished runs wrote."""
        return read_rankings(*(self.runs / run.id for run in runs))

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

    def common_model(self, seed: int) -> CommonModelRun:
        """The run of the model that the writers of a seed continue."""
        size = self.size
        return CommonModelRun(
            id=f"common_s{seed}",
            start=None if size.start is None else str(self.options.data / size.start),
            model=size.model,
            vocab_size=size.vocab_size,
            **self._writer_fields(size.common_training, seed),
        )

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
        runs: list[Run] = [self.oracle]
        for seed in self.seeds:
            selector = self.selector(chosen, seed)
            runs += [selector, self.training_extracts(selector), self.common_model(seed)]
            runs += self.writers(seed, selector).values()
        return runs

    def all_rankings(self, chosen: str, seed: int) -> Rankings:
        """The rankings of all documents by a selector."""
        selector = self.selector(chosen, seed)
        return self.rankings(selector, self.training_extracts(selector))
