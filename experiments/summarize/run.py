"""Selectors of sentences on five collections of proposals, at equal numbers of words, and two small writers.

The default selector's weights are learned on the oldest documents of each collection and chosen on later ones. The
newest quarter is the test. Differences are paired over documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import Options
from experiments.study import Measurements, Study, bars, check_files, mini_lm, numbers_of
from experiments.summarize.corpora import CORPORA, FILES, CorpusSizes, Sample, load
from experiments.summarize.learned import PARTS, SelectorRun, VectorsRun, WriterRun, copy_curve
from experiments.summarize.runs import LEARNED, METRICS, TRAINED, WRITTEN, ExtractRun, Kind, mean_metrics
from experiments.summarize.weights import LEADS, WeightsRun
from graftlm.evaluation import Aim, Results, Row, bootstrap
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
MIN_COLLECTIONS = 4  # collections on which the default selector should be better than its rivals

_LSTM = {
    "embedding_size": 64,
    "hidden_size": 64,
    "num_layers": 1,
    "dropout": 0.3,
    "vocab_size": 4096,
    "max_tokens": 20,
}
_TRAINING: dict[str, Any] = {
    "steps": 300,
    "batch_size": 16,
    "evaluate_every": 50,
    "patience": 3,
}
_QUICK: dict[str, Any] = {
    "steps": 2,
    "batch_size": 2,
    "evaluate_every": 1,
}
_QUICK_WRITER = {"vocab_size": 100, "size": 4, "epochs": 1}
FULL = CorpusSizes(validation=0.15, test=0.25)
QUICK = CorpusSizes(validation=0.2, test=0.2, max_documents=8)

Scores = Mapping[str, Sequence[Mapping[str, float]]]  # scores by document, for each budget
Runs = Mapping[Kind, Sequence[ExtractRun]]  # runs of each row, one for each seed


def run(options: Options) -> Results:
    """Learn the weights, train the rivals, measure all rows, and compare them in pairs."""
    check_files(options, FILES)
    study = Study(options)
    documents: dict[str, Any] = {
        "longdocs": str(options.data / "longdocs"),
        "sizes": QUICK if options.quick else FULL,
    }
    draws = 2000 if options.quick else 100_000
    weights = WeightsRun(id="weights", seeds=study.seeds, draws=draws, **documents)
    trained = _trained_runs(study, documents)
    runs: dict[Kind, list[ExtractRun]] = {kind: _extract_runs(study, kind, documents) for kind in LABELS}
    extract_runs = [run for several in runs.values() for run in several]
    measured = study.execute([weights, *trained, *extract_runs], "selectors")
    parts = load(documents["longdocs"], documents["sizes"])
    scores: dict[Kind, Scores] = {kind: _row_scores(several, measured) for kind, several in runs.items()}
    rows = []
    for kind, label in LABELS.items():
        rows.append(Row(id=kind, label=label, metrics={**mean_metrics(scores[kind])}))
    differences = {kind: paired_differences(parts["test"], scores, kind) for kind in LEARNED}
    details = {
        "documents": {part: _by_corpus(samples) for part, samples in parts.items()},
        "differences": differences,
        "corpora": {kind: corpus_means(parts["test"], scores[kind]) for kind in LABELS},
        "default_less": {kind: paired_differences(parts["test"], scores, "default", (kind,)) for kind in ADDED},
        "by_seed": {kind: _numbers_by_seed(runs[kind], measured) for kind in SEEDED},
        "copy": _copy_curves(parts["test"], runs, measured),
        "training": {run.id: measured[run.id].details for run in trained},
        "search": measured["weights"].details["search"],
        "kept": measured["weights"].details["kept"],
    }
    names = {f"{name}_lead{LEADS[0]}": name for name in METRICS}
    plots = {"rouge": bars(rows, names, f"F1 at the words of Lead-{LEADS[0]}, %")}
    return study.write(
        NAME,
        rows,
        aims=aims(differences["default"]),
        details=details,
        plots=plots,
    )


def _extract_runs(study: Study, kind: Kind, documents: Mapping[str, Any]) -> list[ExtractRun]:
    """Return the runs of a row: one for each seed, or only one if the row has no seed."""
    seeds = study.seeds if kind in SEEDED else study.seeds[:1]
    runs = []
    for seed in seeds:
        run = ExtractRun(
            id=f"{kind}_s{seed}",
            kind=kind,
            seed=seed,
            depends_on=_source(kind, seed),
            **documents,
        )
        runs.append(run)
    return runs


def _source(kind: Kind, seed: int) -> tuple[str, ...]:
    """Return the run whose output a row reads."""
    if kind in (*TRAINED, *WRITTEN):
        return (f"train_{kind}_s{seed}",)
    return ("weights",) if kind in LEARNED else ()


def _trained_runs(study: Study, documents: Mapping[str, Any]) -> list[Run]:
    """Return the runs of the embeddings, then those that train selectors and writers."""
    options = study.options
    encoder = options.backbone or mini_lm(options.data, "The encoder of a trained selector")
    runs: list[Run] = [VectorsRun(id=f"vectors_{part}", part=part, encoder=encoder, **documents) for part in PARTS]
    vectors = tuple(run.id for run in runs)
    sizes = _QUICK_WRITER if options.quick else {}
    for seed in study.seeds:
        for kind in TRAINED:
            run = SelectorRun(
                id=f"train_{kind}_s{seed}",
                training=_selector_training(kind, seed, quick=options.quick),
                depends_on=vectors if kind == "modern" else (),
                **documents,
            )
            runs.append(run)
        for kind in WRITTEN:
            run = WriterRun(
                id=f"train_{kind}_s{seed}",
                seed=seed,
                has_copy=kind == "pointer_generator",
                **sizes,
                **documents,
            )
            runs.append(run)
    return runs


def _selector_training(kind: Kind, seed: int, *, quick: bool) -> SelectorTrainingConfig:
    values: dict[str, Any] = {"kind": kind, "seed": seed, **_TRAINING}
    if kind == "modern":
        values["learning_rate"] = 1e-3
    else:
        values["learning_rate"] = 2e-3
        values["model"] = _LSTM
    if quick:
        values.update(_QUICK)
    return SelectorTrainingConfig.parse(values)


def _row_scores(runs: Sequence[ExtractRun], measured: Measurements) -> Scores:
    """Return the scores of a row: the mean over its runs."""
    return mean_scores([measured[run.id].details["scores"] for run in runs])


def _numbers_by_seed(runs: Sequence[ExtractRun], measured: Measurements) -> list[Any]:
    return [numbers_of([measured[run.id].row]) for run in runs]


def _copy_curves(samples: Sequence[Sample], runs: Runs, measured: Measurements) -> dict[str, Any]:
    """Return the copy curves of writers, for each seed, and of the human abstracts."""
    curves: dict[str, Any] = {}
    for kind in WRITTEN:
        curves[kind] = [measured[run.id].details["copy"] for run in runs[kind]]
    abstracts = {sample.id: sample.summary for sample in samples}
    curves["human"] = [copy_curve(samples, abstracts)]
    return curves


def _by_corpus(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the number of documents of each collection."""
    counts = Counter(sample.corpus for sample in samples)
    return {corpus: counts[corpus] for corpus in CORPORA}


def mean_scores(by_seed: Sequence[Scores]) -> Scores:
    """Return the mean over seeds of each document's scores."""
    means: dict[str, list[dict[str, float]]] = {}
    for name, rows in by_seed[0].items():
        means[name] = []
        for position, row in enumerate(rows):
            mean = {}
            for metric in row:
                values = [scores[name][position][metric] for scores in by_seed]
                mean[metric] = sum(values) / len(values)
            means[name].append(mean)
    return means


def _values(scores: Scores, names: Sequence[str], position: int, metric: str) -> list[float]:
    """Return a metric of documents at a budget."""
    return [scores[name][position][metric] for name in names]


def _ids_by_corpus(samples: Sequence[Sample]) -> dict[str, list[str]]:
    return {corpus: [sample.id for sample in samples if sample.corpus == corpus] for corpus in CORPORA}


def corpus_means(samples: Sequence[Sample], scores: Scores) -> dict[str, dict[str, float]]:
    """Return the means of a row by collection, for each metric and budget."""
    means: dict[str, dict[str, float]] = {}
    for corpus, names in _ids_by_corpus(samples).items():
        means[corpus] = {}
        for position, count in enumerate(LEADS):
            for metric in METRICS:
                values = _values(scores, names, position, metric)
                means[corpus][f"{metric}_lead{count}"] = round(sum(values) / len(values), 3)
    return means


def paired_differences(
    samples: Sequence[Sample],
    scores: Mapping[Kind, Scores],
    kind: Kind,
    rivals: Sequence[Kind] = RIVALS,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return a row less the best of its rivals, with bootstrap intervals.

    Args:
        samples: test documents.
        scores: scores of each row.
        kind: the row.
        rivals: rows of which the best is subtracted, for each collection, metric and budget.

    Returns:
        By collection, metric and budget: the rival, and the mean difference with its interval.
    """
    differences: dict[str, dict[str, dict[str, Any]]] = {}
    for corpus, names in _ids_by_corpus(samples).items():
        differences[corpus] = {}
        for position, count in enumerate(LEADS):
            for metric in METRICS:
                totals: dict[Kind, float] = {}
                for rival in rivals:
                    totals[rival] = sum(_values(scores[rival], names, position, metric))
                best = max(totals, key=totals.__getitem__)
                ours = _values(scores[kind], names, position, metric)
                theirs = _values(scores[best], names, position, metric)
                interval = bootstrap([own - other for own, other in zip(ours, theirs, strict=True)])
                differences[corpus][f"{metric}_lead{count}"] = {"rival": best, **interval.model_dump()}
    return differences


def aims(differences: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Aim]:
    """Return an aim for each metric and budget: on four collections the interval of the difference is above 0."""
    first = next(iter(CORPORA))
    made = []
    for name in differences[first]:
        metric, _, budget = name.partition("_lead")
        count = sum(differences[corpus][name]["low"] > 0 for corpus in CORPORA)
        aim = Aim(
            text=(
                f"collections where the default is above Lead-{budget} and LexRank, {metric}, "
                f"at the words of Lead-{budget}"
            ),
            metric=name,
            aim=MIN_COLLECTIONS,
            measured=count,
            met=count >= MIN_COLLECTIONS,
        )
        made.append(aim)
    return made
