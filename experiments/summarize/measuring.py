"""What summaries are worth: ROUGE beside the human abstract, what they copy and from where, what the source lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.summarize.corpora import Sample
from graftlm.evaluation import Interval, Metric, Row, combine_seeds
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
class Figures:
    """Of one row and seed, by document: the values of its metrics, and its copy shares."""

    values: Mapping[str, Values]
    copied: Mapping[str, Sequence[CopyShare]]


def figures_of(
    samples: Iterable[Sample],
    texts: Mapping[str, str],
    extracts: Mapping[str, str] | None = None,
    likely: Mapping[str, float] | None = None,
    *,
    against_abstract: bool = True,
) -> Figures:
    """All figures of summaries.

    Args:
        samples: the documents.
        texts: their summaries.
        extracts: what the writer was given, as an origin of what it copies; None for an extract itself, whose words
            are copied from the document, but not across its joins.
        likely: nats per token of the human abstract.
        against_abstract: whether ROUGE says anything; of the abstract itself it does not.
    """
    values: dict[str, Values] = {}
    copied: dict[str, list[CopyShare]] = {}
    for sample in samples:
        text, source = texts[sample.id], sample.document.text
        found = rouge(_sentences(text), sample.abstract) if against_abstract else {}
        if likely is not None:
            found["abstract_nll"] = likely[sample.id]
        copied[sample.id] = copy_shares(
            text, source, extracts[sample.id] if extracts else "", introduction_text(sample.document)
        )
        values[sample.id] = found | _faithful(text, source) | {"words": float(len(split_words(text)))}
    return Figures(values, copied)


def _faithful(text: str, source: str) -> Values:
    """Percent of pairs of words that are new, and of numbers and names that the source has."""
    found = faithfulness(text, source)
    new = None if found.bigrams is None else 1 - found.bigrams
    shares = {"novelty": new, "numbers": found.numbers, "names": found.names}
    return {name: 100 * share for name, share in shares.items() if share is not None}


def _sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in split_sentences(text)]


def row_of(row: str, label: str, seeds: Sequence[Figures], more: Mapping[str, Metric] | None = None) -> Row:
    """A row over seeds; a single one has the interval over documents."""
    of_seeds = [_metrics(one) for one in seeds]
    names = [name for name in of_seeds[0] if all(name in one for one in of_seeds)]
    metrics: dict[str, Metric] = {name: combine_seeds([one[name] for one in of_seeds]) for name in names}
    return Row(id=row, label=label, metrics=metrics | dict(more or {}))


def _metrics(figures: Figures) -> dict[str, Interval]:
    """Means over the documents that have the figure; of n-grams, over those with so many words."""
    names = dict.fromkeys(name for values in figures.values.values() for name in values)
    rows = list(figures.values.values())
    found = {name: bootstrap([values[name] for values in rows if name in values]) for name in names}
    for n in range(1, MAX_NGRAM + 1):
        shares = [100 * one[n - 1].copied for one in figures.copied.values() if len(one) >= n]
        if shares:
            found[f"copy_{n}"] = bootstrap(shares)
    return found


def curve_of(seeds: Sequence[Figures]) -> dict[str, list[float]]:
    """Percent of n-grams by origin, for n from 1, over documents and seeds."""
    shares = mean_copy_shares(copied for figures in seeds for copied in figures.copied.values())
    lengths = sorted(shares)
    columns = ("copied", "extract", "introduction", "rest")
    return {column: [round(100 * shares[n][column], 3) for n in lengths] for column in columns}


def paired(first: Sequence[Figures], second: Sequence[Figures], name: str) -> Interval:
    """The difference of a metric, first less second, over the same documents."""
    pairs = zip(first, second, strict=True)
    return bootstrap([a.values[one][name] - b.values[one][name] for a, b in pairs for one in a.values])


def by_corpus(samples: Sequence[Sample], seeds: Sequence[Figures], names: Sequence[str]) -> dict[str, Any]:
    """Means of some metrics for each corpus."""
    found: dict[str, Any] = {}
    for corpus in dict.fromkeys(sample.corpus for sample in samples):
        ids = [sample.id for sample in samples if sample.corpus == corpus]
        values = {name: [one.values[i][name] for one in seeds for i in ids if name in one.values[i]] for name in names}
        found[corpus] = {name: round(sum(of) / len(of), 3) for name, of in values.items() if of}
    return found


def distance(curve: Sequence[float], other: Sequence[float]) -> float:
    """The mean difference of two curves, in points, over the lengths that both have."""
    pairs = list(zip(curve, other, strict=False))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
