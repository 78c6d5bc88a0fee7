"""Extracts of documents: by selectors that are trained here, and by those that learn nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from experiments.jobs import Job
from experiments.summarize.corpora import Part, Parts, Sample, Sizes, load
from graftlm.pipelines.summarize import (
    Budget,
    Extract,
    LeadSelector,
    Selector,
    SelectorExample,
    SelectorTrainingConfig,
    SumySelector,
    load_selector,
    select,
    train_selector,
)
from graftlm.pipelines.summarize.selection import FixedSelector

UNTRAINED: dict[str, Selector] = {
    "lead": LeadSelector(),
    "lexrank": SumySelector("lexrank"),
    "sumbasic": SumySelector("sumbasic"),
    "lsa": SumySelector("lsa"),
}
Gold = Mapping[str, Sequence[int]]


class Selecting(Job):
    """One selector, trained or not, and its rankings.

    Args:
        kind: one of `UNTRAINED`, or `trained`.
        training: how it is trained; None reads it from `folder`.
        folder: of a selector that was trained before.
        documents: to train on, evenly spaced, with a quarter as many held out; all when absent.
        seen: of each document in training, the first so many sentences; in ranking there are all.
        parts: that are ranked.
        kept: of each ranking, the first so many.
        precision: bf16 for matrices' products, where a large encoder reads.
    """

    data: str
    sizes: Sizes
    kind: Literal["lead", "lexrank", "sumbasic", "lsa", "trained"]
    training: SelectorTrainingConfig | None = None
    folder: str | None = None
    documents: int | None = Field(None, ge=1)
    seen: int | None = Field(None, ge=1)
    parts: tuple[Part, ...] = ("test",)
    kept: int = Field(20, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"


def rank(job: Selecting, folder: Path, gold: Gold) -> dict[str, Any]:
    """Train the job's selector where it is one to train, and rank the sentences of each document."""
    parts = load(job.data, job.sizes)
    with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
        return _ranked(job, folder, parts, gold)


def _ranked(job: Selecting, folder: Path, parts: Parts, gold: Gold) -> dict[str, Any]:
    started = time.process_time()
    selector, losses = _selector(job, folder, parts["train"], parts["validation"], gold)
    trained = time.process_time() - started
    started = time.process_time()
    ranked = {part: {one.id: _ranking(selector, one, job.kept) for one in parts[part]} for part in job.parts}
    count = sum(len(one.document.selectable) for part in job.parts for one in parts[part])
    seconds = time.process_time() - started
    return {"ranked": ranked, "losses": losses, "training_cpu_s": round(trained, 1), "sentences_per_s": count / seconds}


def _selector(
    job: Selecting, folder: Path, train: Sequence[Sample], held_out: Sequence[Sample], gold: Gold
) -> tuple[Selector, list[list[float]]]:
    """The selector, and the losses of its training."""
    if job.kind != "trained":
        return UNTRAINED[job.kind], []
    if job.training is None:
        assert job.folder is not None, "a selector that is not trained here was trained before"
        return load_selector(job.folder, device="cpu"), []
    if job.documents is not None:
        train, held_out = evenly(train, job.documents), evenly(held_out, max(1, job.documents // 4))
    learned, kept = ([_example(one, gold, job.seen) for one in part] for part in (train, held_out))
    selector = train_selector(learned, kept, job.training)
    selector.save(folder / "selector")
    return selector, selector.record["losses"]


def evenly(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many, evenly spaced."""
    count = min(most, len(samples))
    return [samples[place * len(samples) // count] for place in range(count)]


def _example(sample: Sample, gold: Gold, seen: int | None) -> SelectorExample:
    selectable = sample.document.selectable[:seen]
    places = {index: place for place, index in enumerate(selectable)}
    sentences = tuple(sample.document.sentences[index].text for index in selectable)
    return SelectorExample(sentences, tuple(places[index] for index in gold[sample.id] if index in places))


def _ranking(selector: Selector, sample: Sample, kept: int) -> list[int]:
    return [one.index for one in selector.rank(sample.document)[:kept]]


def extract_of(sample: Sample, ranked: Sequence[int], amount: int) -> Extract:
    """The first sentences of a ranking, in the document's order."""
    return select(sample.document, FixedSelector(ranked), Budget(amount=amount))
