"""Scores of summaries: ROUGE, copied n-grams by origin, and what the source does not support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.summarize.corpora import Sample
from graftlm.evaluation import Interval, Row, combine_seeds
from graftlm.pipelines.summarize.metrics import (
    MAX_NGRAM,
    CopyShare,
    bootstrap,
    copy_shares,
    faithfulness,
    mean_copy_shares,
    rouge,
)
from graftlm.pipelines.summarize.text import split_sentences, split_words
from graftlm.pipelines.summarize.writer import introduction_text

Values = dict[str, float]


@dataclass(frozen=True)
class SummaryScores:
    """Scores of the summaries of one row and seed.

    Attributes:
        values: metrics of each document, by its id.
        copied: copy shares of each document.
    """

    values: Mapping[str, Mapping[str, float]]
    copied: Mapping[str, Sequence[CopyShare]]


def score_summaries(
    samples: Iterable[Sample],
    texts: Mapping[str, str],
    extracts: Mapping[str, str] | None = None,
    nll: Mapping[str, float] | None = None,
    *,
    with_rouge: bool = True,
) -> SummaryScores:
    """Score summaries.

    Args:
        samples: the documents.
        texts: their summaries, by document.
        extracts: the writer's extracts, an origin of copied n-grams; None if the summaries are extracts themselves,
            whose n-grams across joins are not copied.
        nll: nats per token of the human abstract.
        with_rouge: compare with the abstract; False for the abstracts themselves.
    """
    values: dict[str, dict[str, float]] = {}
    copied: dict[str, list[CopyShare]] = {}
    for sample in samples:
        text, source = texts[sample.id], sample.document.text
        extract = extracts[sample.id] if extracts else ""
        copied[sample.id] = copy_shares(text, source, extract, introduction_text(sample.document))
        sentences = [text[start:end] for start, end in split_sentences(text)]
        scores = rouge(sentences, sample.abstract) if with_rouge else {}
        scores |= {} if nll is None else {"abstract_nll": nll[sample.id]}
        values[sample.id] = scores | _faithfulness(text, source) | {"words": float(len(split_words(text)))}
    return SummaryScores(values, copied)


def _faithfulness(text: str, source: str) -> dict[str, float]:
    """Percent of pairs of words that are new, and of numbers and names that the source has."""
    shares = faithfulness(text, source)
    novelty = None if shares.bigrams is None else 1 - shares.bigrams
    named = {"novelty": novelty, "numbers": shares.numbers, "names": shares.names}
    return {name: 100 * share for name, share in named.items() if share is not None}


def summary_row(row: str, label: str, seeds: Sequence[SummaryScores]) -> Row:
    """A row over seeds. A single seed has the bootstrap interval over documents."""
    by_seed = [_metrics(scores) for scores in seeds]
    names = [name for name in by_seed[0] if all(name in metrics for metrics in by_seed)]
    return Row(id=row, label=label, metrics={name: combine_seeds([m[name] for m in by_seed]) for name in names})


def _metrics(scores: SummaryScores) -> dict[str, Interval]:
    """Means over the documents that have the metric; for n-grams, over those with enough words."""
    documents = list(scores.values.values())
    names = dict.fromkeys(name for values in documents for name in values)
    metrics = {name: bootstrap([values[name] for values in documents if name in values]) for name in names}
    for n in range(1, MAX_NGRAM + 1):
        shares = [100 * copied[n - 1].copied for copied in scores.copied.values() if len(copied) >= n]
        if shares:
            metrics[f"copy_{n}"] = bootstrap(shares)
    return metrics


def copy_curve(seeds: Sequence[SummaryScores]) -> dict[str, list[float]]:
    """Percent of copied n-grams by origin, for n from 1, over documents and seeds."""
    shares = mean_copy_shares(copied for scores in seeds for copied in scores.copied.values())
    columns = ("copied", "extract", "introduction", "rest")
    return {column: [round(100 * shares[n][column], 3) for n in sorted(shares)] for column in columns}


def paired_difference(first: Sequence[SummaryScores], second: Sequence[SummaryScores], metric: str) -> Interval:
    """The difference of a metric, first less second, paired over documents and seeds."""
    pairs = zip(first, second, strict=True)
    return bootstrap([a.values[name][metric] - b.values[name][metric] for a, b in pairs for name in a.values])


def scores_by_corpus(
    samples: Sequence[Sample], seeds: Sequence[SummaryScores], metrics: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Means of some metrics for each corpus."""
    means: dict[str, dict[str, float]] = {}
    for corpus in dict.fromkeys(sample.corpus for sample in samples):
        documents = [scores.values[sample.id] for scores in seeds for sample in samples if sample.corpus == corpus]
        values = {name: [scores[name] for scores in documents if name in scores] for name in metrics}
        means[corpus] = {name: round(fmean(numbers), 3) for name, numbers in values.items() if numbers}
    return means


def mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """The mean absolute difference of two curves, in points, over the lengths that both have."""
    return fmean(abs(a - b) for a, b in zip(first, second, strict=False))
