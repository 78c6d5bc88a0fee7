"""Sizes of the experiment, and which jobs there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.jobs import digest, run_jobs
from experiments.study import mini_lm
from experiments.summarize.corpora import Labels, Part, Parts, Sizes, label, load, mean_sentences
from experiments.summarize.selecting import Gold, Selecting, rank
from experiments.summarize.writing import Context, Reading, Writing, read, write
from graftlm.config import Config
from graftlm.pipelines.summarize import SelectorTrainingConfig, SummaryDecoding
from graftlm.training import TrainingConfig

TABLES = ("extracts", "writers")
UNTRAINED = {"lead_10": "lead", "lead_k": "lead", "lexrank": "lexrank", "sumbasic": "sumbasic", "lsa": "lsa"}
TRAINED = {"sent_clf": "classifier", "sent_ptr": "pointer", "sent_modern": "modern"}
WRITERS: dict[Context, tuple[Context, ...]] = {"none": ("none",), "gold": ("model", "gold"), "model": ("model",)}


class Setting(Config):
    """Sizes of everything.

    Args:
        selectors: how each is trained, by row; the encoder of the modern one is added.
        documents: that the modern selector learns from, evenly spaced in time.
        seen: sentences of a document that selectors learn from, its first.
        start: the model that writers go on from, in the data folder; None begins with a new one.
        lessons: documents that writers learn from, evenly spaced in time.
        model: config of a new one.
        vocab_size: of its tokenizer.
        window: tokens of a row, introduction, extract and summary together.
        reading: the training on the rest of the documents that all writers share.
        writing: the training of each writer on its layout.
        decoding: how summaries are written.
    """

    sizes: Sizes = Field(default_factory=Sizes)
    selectors: dict[str, SelectorTrainingConfig]
    documents: int
    seen: int
    start: str | None
    lessons: int
    model: dict[str, Any]
    vocab_size: int
    window: int
    reading: TrainingConfig
    writing: TrainingConfig
    decoding: SummaryDecoding


_LSTM = {"embedding_size": 64, "hidden_size": 64, "num_layers": 1, "dropout": 0.3, "vocab_size": 4096, "max_tokens": 20}
_SHORT = {"steps": 600, "batch_size": 16, "learning_rate": 2e-3, "evaluate_every": 60, "patience": 3}
FULL = Setting(
    selectors={
        "sent_clf": SelectorTrainingConfig.parse({"kind": "classifier", "model": _LSTM} | _SHORT),
        "sent_ptr": SelectorTrainingConfig.parse({"kind": "pointer", "model": _LSTM} | _SHORT),
        "sent_modern": SelectorTrainingConfig.parse({"kind": "modern"} | _SHORT | {"learning_rate": 1e-3}),
    },
    documents=400,
    seen=80,
    start="models/english-novels-4m",
    lessons=800,
    model={},
    vocab_size=4096,
    window=512,
    reading=TrainingConfig(
        steps=160, batch_size=4, learning_rate=1.5e-3, warmup_steps=10, min_ratio=0.3, precision="bf16"
    ),
    writing=TrainingConfig(steps=110, batch_size=4, learning_rate=1e-3, warmup_steps=5, precision="bf16"),
    decoding=SummaryDecoding(method="sample", max_new_tokens=160),
)
QUICK = Setting(
    sizes=Sizes(most=8, validation=0.2, test=0.2),
    selectors={
        row: SelectorTrainingConfig.parse(
            {"kind": kind, "steps": 2, "batch_size": 2, "evaluate_every": 1}
            | {"model": {"hidden_size": 4, "num_layers": 1} | ({} if kind == "modern" else {"vocab_size": 300})}
        )
        for row, kind in TRAINED.items()
    },
    documents=4,
    seen=40,
    start=None,
    lessons=20,
    model={
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    vocab_size=400,
    window=256,
    reading=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3),
    writing=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3),
    decoding=SummaryDecoding(method="sample", max_new_tokens=40),
)


class Plan:
    """Which jobs there are, and what they found."""

    def __init__(self, options: Options, setting: Setting | None = None) -> None:
        self.options = options
        self.setting = setting or (QUICK if options.quick else FULL)
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self._where = {"data": str(options.data), "sizes": self.setting.sizes}

    @cached_property
    def parts(self) -> Parts:
        """All documents."""
        return load(str(self.options.data), self.setting.sizes)

    @cached_property
    def sentences(self) -> int:
        """Of an extract that is measured: as many as abstracts have in training on average, rounded."""
        return mean_sentences(self.parts["train"])

    @cached_property
    def gold(self) -> Gold:
        """The oracle's extracts."""
        job = Labels(id="labels", **self._where)
        return self._run([job], label, "labels")[job.id]["gold"]

    @cached_property
    def extract_size(self) -> int:
        """Of an extract that is read by a writer: as many sentences as gold extracts have in training on average."""
        sizes = [len(self.gold[sample.id]) for sample in self.parts["train"]]
        return max(1, round(sum(sizes) / len(sizes)))

    def rankings(self) -> dict[tuple[str, int], dict[str, Any]]:
        """What selectors found, by row and seed; those that learn nothing have one."""
        plain = {(row, 0): self._untrained(row) for row in UNTRAINED if row != "lead_k"}
        trained = {(row, seed): self._trained(row, seed) for seed in self.seeds for row in TRAINED}
        found = self._select([*plain.values(), *trained.values()], "selectors")
        rows = {key: found[job.id] for key, job in (plain | trained).items()}
        return rows | {("lead_k", 0): rows["lead_10", 0]}

    def on_training(self, row: str) -> dict[int, dict[str, Any]]:
        """What a trained selector makes of the documents that it was trained on, by seed."""
        trained = {seed: self._trained(row, seed) for seed in self.seeds}
        jobs = {
            seed: Selecting(
                id=f"{row}-train_s{seed}",
                after=digest(job.key()),
                kind="trained",
                folder=str(self.options.out / "jobs" / job.id / "selector"),
                parts=("train",),
                **self._where,
            )
            for seed, job in trained.items()
        }
        found = self._select(list(jobs.values()), "extracts")
        return {seed: found[job.id] for seed, job in jobs.items()}

    def written(
        self, chosen: dict[int, dict[str, Sequence[int]]]
    ) -> tuple[dict[int, Any], dict[tuple[Context, int], Any]]:
        """What the common model measured by seed, and every writer, by what it learned with and seed.

        Args:
            chosen: rankings of all documents by the selector whose extracts writers are given, by seed.
        """
        common, writers = {}, {}
        for seed in self.seeds:
            rankings: dict[Context, Gold] = {"gold": self.gold, "model": chosen[seed]}
            reading = self._reading(seed)
            common[seed] = self._run([reading], read, "the common model")[reading.id]
            jobs = {
                context: self._writing(
                    context, seed, common[seed]["folder"], digest(reading.key(), [rankings.get(one) for one in tested])
                )
                for context, tested in WRITERS.items()
            }
            found = self._run(list(jobs.values()), partial(write, rankings=rankings), "writers")
            writers |= {(context, seed): found[job.id] for context, job in jobs.items()}
        return common, writers

    def _untrained(self, row: str) -> Selecting:
        return Selecting(id=row, kind=UNTRAINED[row], **self._where)  # type: ignore[arg-type]  # its kinds are these

    def _trained(self, row: str, seed: int) -> Selecting:
        training = self.setting.selectors[row].model_copy(update={"seed": seed})
        modern = training.kind == "modern"
        if modern:
            encoder = self.options.backbone or mini_lm(self.options.data, "The modern selector's encoder")
            training = training.model_copy(update={"sentence_encoder": encoder})
        return Selecting(
            id=f"{row}_s{seed}",
            kind="trained",
            training=training,
            documents=self.setting.documents if modern else None,
            seen=self.setting.seen,
            precision="bf16" if modern else "fp32",
            parts=("test",) if modern else ("validation", "test"),
            **self._where,
        )

    def _reading(self, seed: int) -> Reading:
        s = self.setting
        training = s.reading.model_copy(update={"seed": seed, "checkpoint_every": max(1, s.reading.steps // 2)})
        sizes = {"model": s.model, "vocab_size": s.vocab_size, "documents": s.lessons, "window": s.window}
        start = None if s.start is None else str(self.options.data / s.start)
        return Reading(id=f"common_s{seed}", start=start, training=training, **sizes, **self._where)

    def _writing(self, context: Context, seed: int, start: str, after: str) -> Writing:
        s = self.setting
        training = s.writing.model_copy(update={"seed": seed, "checkpoint_every": max(1, s.writing.steps // 2)})
        return Writing(
            id=f"writer-{context}_s{seed}",
            after=after,
            start=start,
            context=context,
            tested=WRITERS[context],
            documents=s.lessons,
            extract_size=self.extract_size,
            window=s.window,
            training=training,
            decoding=s.decoding.model_copy(update={"seed": seed}),
            **self._where,
        )

    def _select(self, jobs: Sequence[Selecting], title: str) -> dict[str, dict[str, Any]]:
        return self._run(jobs, partial(rank, gold=self.gold), title)

    def _run(self, jobs: Sequence[Any], work: Any, title: str) -> dict[str, dict[str, Any]]:
        return run_jobs(jobs, work, self.options.out / "jobs", processes=self.options.jobs, title=title)


def of_part(found: dict[str, Any], *parts: Part) -> dict[str, Sequence[int]]:
    """Rankings by document, of some parts."""
    return {name: ranked for part in parts for name, ranked in found["ranked"].get(part, {}).items()}
