"""Selectors of sentences on five collections of proposals, at equal numbers of words, and two small writers.

The default selector's weights are learned on the oldest documents of each collection and chosen on later ones. The
newest quarter is the test. Differences are paired over documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import Options
from experiments.study import Measurements, Study, bars, check_files, mini_lm, numbers_of
from experiments.summarize.corpora import CORPORA, FILES, CorpusSizes, Sample, load
from experiments.summarize.learned import PARTS, SelectorRun, VectorsRun, WriterRun, copy_curve
from experiments.summarize.runs import (
    LEADS,
    LEARNED,
    METRICS,
    TRAINED,
    WRITTEN,
    ExtractRun,
    Kind,
    WeightsRun,
    mean_metrics,
)  # fmt: skip
from graftlm.evaluation import Aim, Interval, Results, Row, bootstrap
from graftlm.pipelines.summarize import SelectorTrainingConfig
from graftlm.runs.run import Run

NAME = "summarize"
LABELS: dict[Kind, str] = {
    "random": "random sentences",
    "lead": "the first sentences (Lead-3, Lead-10)",
    "lexrank": "LexRank",
    "textrank": "TextRank",
    "centroid": "similarity to the centroid",
    "lsa": "LSA",
    "sumbasic": "SumBasic",
    "classifier": "Sent-CLF, trained",
    "pointer": "Sent-PTR, trained",
    "modern": "MiniLM vectors, trained",
    "seq2seq": "seq2seq (written, own length)",
    "pointer_generator": "pointer-generator (written, own length)",
    "default": "the default selector",
    "plain": "the default, without wording",
    "single": "the default, without redundancy",
    "linear": "the default, without a hidden layer",
    "unfiltered": "the default, without the rules for short sentences and sections",
    "transfer": "the default, learned on the other four collections",
    "oracle": "oracle sentences",
    "fragments": "oracle fragments (of any length)",
}
RIVALS: tuple[Kind, ...] = ("lead", "lexrank")
ADDED: tuple[Kind, ...] = ("textrank", "centroid", "lsa", "sumbasic", *TRAINED, *WRITTEN)
SEEDED: tuple[Kind, ...] = ("random", "default", *TRAINED, *WRITTEN)
_LSTM = {"embedding_size": 64, "hidden_size": 64, "num_layers": 1, "dropout": 0.3, "vocab_size": 4096, "max_tokens": 20}
_TRAINING = {"steps": 300, "batch_size": 16, "evaluate_every": 50, "patience": 3}
_QUICK: dict[str, Any] = {"steps": 2, "batch_size": 2, "evaluate_every": 1}
FULL = CorpusSizes(validation=0.15, test=0.25)
QUICK = CorpusSizes(validation=0.2, test=0.2, max_documents=8)
Scores = Mapping[str, Sequence[Mapping[str, float]]]  # by document, for each budget


def run(options: Options) -> Results:
    """Learn the weights, train the rivals, measure all rows, and compare them in pairs."""
    check_files(options, FILES)
    study = Study(options)
    documents: dict[str, Any] = {"longdocs": str(options.data / "longdocs"), "sizes": QUICK if options.quick else FULL}
    weights = WeightsRun(id="weights", seeds=study.seeds, draws=2000 if options.quick else 100_000, **documents)
    trained = _trained(study, documents)
    runs = {
        kind: [
            ExtractRun(id=f"{kind}_s{seed}", kind=kind, seed=seed, depends_on=_source(kind, seed), **documents)
            for seed in (study.seeds if kind in SEEDED else study.seeds[:1])
        ]
        for kind in LABELS
    }
    measured = study.execute([weights, *trained, *(run for several in runs.values() for run in several)], "selectors")
    parts = load(documents["longdocs"], documents["sizes"])
    scores: Any = {
        kind: mean_scores([measured[run.id].details["scores"] for run in several]) for kind, several in runs.items()
    }
    rows = [Row(id=kind, label=label, metrics={**mean_metrics(scores[kind])}) for kind, label in LABELS.items()]
    human = {sample.id: sample.summary for sample in parts["test"]}
    differences = {kind: paired_differences(parts["test"], scores, kind) for kind in LEARNED}
    details = {
        "documents": {part: _by_corpus(samples) for part, samples in parts.items()},
        "differences": differences,
        "corpora": {kind: corpus_means(parts["test"], scores[kind]) for kind in LABELS},
        "default_less": {kind: paired_differences(parts["test"], scores, "default", (kind,)) for kind in ADDED},
        "by_seed": {kind: [numbers_of([measured[run.id].row]) for run in runs[kind]] for kind in SEEDED},
        "copy": {kind: [measured[run.id].details["copy"] for run in runs[kind]] for kind in WRITTEN}
        | {"human": [copy_curve(parts["test"], human)]},
        "training": {run.id: measured[run.id].details for run in trained},
        **_search(measured),
    }
    names = {f"{name}_lead{LEADS[0]}": name for name in METRICS}
    plots = {"rouge": bars(rows, names, f"F1 at the words of Lead-{LEADS[0]}, %")}
    return study.write(NAME, rows, aims=aims(differences["default"]), details=details, plots=plots)


def _trained(study: Study, documents: Mapping[str, Any]) -> list[Run]:
    """The runs that train selectors and writers, behind those of the vectors."""
    quick = study.options.quick
    encoder = study.options.backbone or mini_lm(study.options.data, "The encoder of a trained selector")
    runs: list[Run] = [VectorsRun(id=f"vectors_{part}", part=part, encoder=encoder, **documents) for part in PARTS]
    vectors = tuple(run.id for run in runs)
    sizes = {"vocab_size": 100, "size": 4, "epochs": 1} if quick else {}
    for seed in study.seeds:
        for kind in TRAINED:
            changes: Any = {"learning_rate": 1e-3} if kind == "modern" else {"learning_rate": 2e-3, "model": _LSTM}
            training = SelectorTrainingConfig.parse(
                {"kind": kind, "seed": seed} | _TRAINING | changes | (_QUICK if quick else {})
            )
            needs = vectors if kind == "modern" else ()
            runs.append(SelectorRun(id=f"train_{kind}_s{seed}", training=training, depends_on=needs, **documents))
        for kind in WRITTEN:
            has_copy = kind == "pointer_generator"
            runs.append(WriterRun(id=f"train_{kind}_s{seed}", seed=seed, has_copy=has_copy, **sizes, **documents))
    return runs


def _source(kind: Kind, seed: int) -> tuple[str, ...]:
    """The run that a row's run reads."""
    if kind in (*TRAINED, *WRITTEN):
        return (f"train_{kind}_s{seed}",)
    return ("weights",) if kind in LEARNED else ()


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
    samples: Sequence[Sample], scores: Mapping[Kind, Scores], kind: Kind, rivals: Sequence[Kind] = RIVALS
) -> dict[str, dict[str, dict[str, Any]]]:
    """By collection, metric and budget: a row less the best of its rivals there, and the bootstrap interval."""
    differences: dict[str, dict[str, dict[str, Any]]] = {}
    for corpus in CORPORA:
        names = [sample.id for sample in samples if sample.corpus == corpus]
        differences[corpus] = {}
        for position, count in enumerate(LEADS):
            for metric in METRICS:
                values = {row: [scores[row][name][position][metric] for name in names] for row in (kind, *rivals)}
                best = max(rivals, key=lambda row, values=values: sum(values[row]))
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
