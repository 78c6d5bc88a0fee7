"""Selectors of sentences on five collections of proposals, at equal numbers of words.

The default selector's weights are learned on the oldest documents of each collection and chosen on later ones. The
newest quarter is the test. Differences are paired over documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import Options
from experiments.study import Measurements, Study, bars, check_files, combined_row
from experiments.summarize.corpora import CORPORA, FILES, CorpusSizes, Sample, load
from experiments.summarize.runs import LEADS, LEARNED, METRICS, ExtractRun, Kind, WeightsRun
from graftlm.evaluation import Aim, Interval, Results
from graftlm.pipelines.summarize.metrics import bootstrap

NAME = "summarize"
LABELS: dict[Kind, str] = {
    "random": "random sentences",
    "lead": "the first sentences (Lead-3, Lead-10)",
    "lexrank": "LexRank",
    "textrank": "TextRank",
    "centroid": "similarity to the centroid",
    "default": "the default selector",
    "plain": "the default, without wording",
    "single": "the default, without redundancy",
    "linear": "the default, without a hidden layer",
    "transfer": "the default, learned on the other four collections",
    "oracle": "oracle sentences",
    "fragments": "oracle fragments (of any length)",
}
RIVALS: tuple[Kind, ...] = ("lead", "lexrank")
FULL = CorpusSizes(validation=0.15, test=0.25)
QUICK = CorpusSizes(validation=0.2, test=0.2, max_documents=8)
Scores = Mapping[str, Sequence[Mapping[str, float]]]  # by document, for each budget


def run(options: Options) -> Results:
    """Learn the weights, measure all selectors, and compare them in pairs."""
    check_files(options, FILES)
    study = Study(options)
    documents: dict[str, Any] = {
        "longdocs": str(options.data / "longdocs"),
        "sizes": QUICK if options.quick else FULL,
    }
    weights = WeightsRun(id="weights", seeds=study.seeds, draws=2000 if options.quick else 100_000, **documents)
    runs = {
        kind: [
            ExtractRun(
                id=f"{kind}_s{seed}",
                kind=kind,
                seed=seed,
                depends_on=("weights",) if kind in LEARNED else (),
                **documents,
            )
            for seed in (study.seeds if kind in ("random", "default") else study.seeds[:1])
        ]
        for kind in LABELS
    }
    measured = study.execute([weights, *(run for several in runs.values() for run in several)], "selectors")
    rows = [
        combined_row(kind, label, [measured[run.id].row.metrics for run in runs[kind]])
        for kind, label in LABELS.items()
    ]
    parts = load(documents["longdocs"], documents["sizes"])
    scores: Any = {
        kind: mean_scores([measured[run.id].details["scores"] for run in several]) for kind, several in runs.items()
    }
    differences = {kind: paired_differences(parts["test"], scores, kind) for kind in LEARNED}
    details = {
        "documents": {part: _by_corpus(samples) for part, samples in parts.items()},
        "differences": differences,
        "corpora": {kind: corpus_means(parts["test"], scores[kind]) for kind in LABELS},
        **_search(measured),
    }
    names = {f"{name}_lead{LEADS[0]}": name for name in METRICS}
    plots = {"rouge": bars(rows, names, f"F1 at the words of Lead-{LEADS[0]}, %")}
    return study.write(NAME, rows, aims=aims(differences["default"]), details=details, plots=plots)


def _search(measured: Measurements) -> dict[str, Any]:
    details = measured["weights"].details
    return {name: details[name] for name in ("search", "kept")}


def _by_corpus(samples: Sequence[Sample]) -> dict[str, int]:
    return {corpus: sum(sample.corpus == corpus for sample in samples) for corpus in CORPORA}


def mean_scores(by_seed: Sequence[Scores]) -> Scores:
    """The mean over seeds of each document's scores."""
    return {
        name: [
            {metric: sum(scores[name][position][metric] for scores in by_seed) / len(by_seed) for metric in values}
            for position, values in enumerate(rows)
        ]
        for name, rows in by_seed[0].items()
    }


def corpus_means(samples: Sequence[Sample], scores: Scores) -> dict[str, dict[str, float]]:
    """Means of a row by collection, for each metric and budget."""
    return {
        corpus: {
            f"{name}_lead{count}": round(float(sum(values) / len(values)), 3)
            for position, count in enumerate(LEADS)
            for name in METRICS
            for values in [[scores[sample.id][position][name] for sample in samples if sample.corpus == corpus]]
        }
        for corpus in CORPORA
    }


def paired_differences(
    samples: Sequence[Sample], scores: Mapping[Kind, Scores], kind: Kind
) -> dict[str, dict[str, dict[str, Any]]]:
    """By collection, metric and budget: a row less the better of Lead and LexRank there, and the bootstrap interval."""
    differences: dict[str, dict[str, dict[str, Any]]] = {}
    for corpus in CORPORA:
        names = [sample.id for sample in samples if sample.corpus == corpus]
        differences[corpus] = {}
        for position, count in enumerate(LEADS):
            for metric in METRICS:
                values = {row: [scores[row][name][position][metric] for name in names] for row in (kind, *RIVALS)}
                best = max(RIVALS, key=lambda row, values=values: sum(values[row]))
                pairs = zip(values[kind], values[best], strict=True)
                interval: Interval = bootstrap([own - other for own, other in pairs])
                differences[corpus][f"{metric}_lead{count}"] = {"rival": best, **interval.model_dump()}
    return differences


def aims(differences: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Aim]:
    """At each budget and metric, on at least four collections the interval of the difference is above 0."""
    made = []
    for name in differences[next(iter(CORPORA))]:
        metric, _, budget = name.partition("_lead")
        count = sum(differences[corpus][name]["low"] > 0 for corpus in CORPORA)
        text = (
            f"collections where the default is above Lead-{budget} and LexRank, {metric}, at the words of Lead-{budget}"
        )
        made.append(Aim(text=text, metric=name, aim=4, measured=count, met=count >= 4))
    return made
