"""Extracts and written summaries of technical proposals, in the form of Table 2.2, with copy curves as in Figure 2.2.

Documents are split by time within each collection. Selectors are trained on oracle extracts. A small language model
reads the training documents, and three writers continue it: given the introduction (I), or the introduction and an
extract (I+E), gold (G) or a selector's (M), in training and in use.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.study import Measurements, aim, bars, check_files, combined_row, metric, numbers_of, published
from experiments.summarize.corpora import FILES, Sample
from experiments.summarize.runs import TRAINED, UNTRAINED, WRITERS, Context, Rankings, SummarizeStudy, extract_of
from graftlm.evaluation import Aim, Interval, Results, Row, value_of
from graftlm.evaluation.plots import PALETTE
from graftlm.pipelines.summarize.metrics import CopyShare, bootstrap, copy_shares, faithfulness, mean_copy_shares, rouge
from graftlm.pipelines.summarize.text import split_sentences, split_words
from graftlm.pipelines.summarize.writer import introduction_text


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


def _metrics(scores: SummaryScores) -> dict[str, Interval]:
    """Means over the documents that have the metric, with bootstrap intervals; of n-grams, if enough words."""
    documents = list(scores.values.values())
    names = dict.fromkeys(name for values in documents for name in values)
    metrics = {name: bootstrap([values[name] for values in documents if name in values]) for name in names}
    for n in range(max(map(len, scores.copied.values()), default=0)):
        metrics[f"copy_{n + 1}"] = bootstrap([100 * c[n].copied for c in scores.copied.values() if len(c) > n])
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


NAME = "summarize"
TABLES = ("extracts", "writers")
LEAD = 10
LABELS = {
    "lead_10": "Lead-10",
    "lead_k": "Lead-k",
    "lexrank": "LexRank",
    "sumbasic": "SumBasic",
    "lsa": "LSA",
    "sent_clf": "Sent-CLF",
    "sent_ptr": "Sent-PTR",
    "sent_modern": "modern selector",
    "gold_extract": "gold extract",
    "tlm_i": "TLM-I",
    "tlm_ie_gm": "TLM-I+E (G,M)",
    "tlm_ie_mm": "TLM-I+E (M,M)",
    "tlm_ie_gg": "TLM-I+E (G,G)",
    "human": "human abstracts",
}
WRITTEN: dict[str, tuple[Context, Context]] = {  # contexts in training and in the test
    "tlm_i": ("none", "none"),
    "tlm_ie_gm": ("gold", "model"),
    "tlm_ie_mm": ("model", "model"),
    "tlm_ie_gg": ("gold", "gold"),
}
CANDIDATES = ("sent_ptr", "sent_clf")  # selectors whose extracts writers may get
DRAWN_ROWS = ("human", "tlm_i", "tlm_ie_gm", "sent_ptr")
Table = dict[str, list[SummaryScores]]  # by row, for each seed
Curves = Mapping[str, Mapping[str, Sequence[float]]]


def run(options: Options) -> Results:
    """Run extracts and writers, or extracts alone (`--table extracts`)."""
    tables = options.chosen(TABLES)
    check_files(options, FILES)
    study = SummarizeStudy(options)
    started = time.perf_counter()
    selectors = study.selectors()
    measured = study.execute([study.oracle, *selectors.values()], "selectors")
    test = study.parts["test"]
    table: Table = {row: [] for row in (*UNTRAINED, *TRAINED)}
    for (row, _), selector in selectors.items():
        amount = LEAD if row == "lead_10" else study.sentences
        table[row].append(_score_extracts(test, study.rankings(selector), amount))
    gold = {sample.id: extract_of(sample, study.gold[sample.id]).text for sample in test}
    table["gold_extract"] = [score_summaries(test, gold)]
    abstracts = {sample.id: sample.summary for sample in test}
    table["human"] = [score_summaries(test, abstracts, gold, with_rouge=False)]
    chosen, validation = choose_selector(study)
    details: dict[str, Any] = {"chosen_selector": chosen, "validation": validation}
    if "writers" in tables:
        details |= _add_writers(table, study, chosen, gold)
    rows = [combined_row(row, label, list(map(_metrics, table[row]))) for row, label in LABELS.items() if row in table]
    curves = {row.id: copy_curve(table[row.id]) for row in rows}
    names = {f"{row}_s{seed}": selector.id for (row, seed), selector in selectors.items()}
    details |= _details(study, table, measured, names)
    details |= {"copy": curves, "wall_s": round(time.perf_counter() - started, 1)}
    paper = published(__file__, table)
    with_rouge = [row for row in rows if "rouge1" in row.metrics]
    rouge_bars = bars(with_rouge, {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}, "F1, %")
    plots = {"copy": draw_copies(curves), "rouge": rouge_bars}
    return study.write(NAME, rows, aims=aims(rows, curves), paper=paper, details=details, plots=plots)


def _score_extracts(samples: Sequence[Sample], rankings: Rankings, amount: int) -> SummaryScores:
    return score_summaries(samples, {s.id: extract_of(s, rankings[s.id], amount).text for s in samples})


def choose_selector(study: SummarizeStudy) -> tuple[str, dict[str, dict[str, float]]]:
    """The selector whose extracts writers get, and the scores of both candidates on validation documents.

    The larger sum of ROUGE-1 and 2 decides, with the first seed. The modern selector is no candidate: its encoder
    would have to read all training documents.
    """
    scores: dict[str, dict[str, float]] = {}
    for row in CANDIDATES:
        rankings = study.rankings(study.selector(row, study.seeds[0]))
        extracts = _score_extracts(study.parts["validation"], rankings, study.sentences)
        metrics = _metrics(extracts)
        scores[row] = {name: round(value_of(metrics[name]), 3) for name in ("rouge1", "rouge2")}
    return max(CANDIDATES, key=lambda row: sum(scores[row].values())), scores


def _add_writers(table: Table, study: SummarizeStudy, chosen: str, gold: Mapping[str, str]) -> dict[str, Any]:
    """Add the writers' scores to the table; gives their details."""
    test = study.parts["test"]
    measured = study.execute(study.writer_runs(chosen), "writers")
    table |= {row: [] for row in WRITTEN}
    for seed in study.seeds:
        rankings = study.rankings(study.selector(chosen, seed))
        extracts = {
            "none": {sample.id: "" for sample in test},
            "gold": gold,
            "model": {sample.id: extract_of(sample, rankings[sample.id], study.extract_size).text for sample in test},
        }
        for row, (context, tested) in WRITTEN.items():
            output = measured[f"writer-{context}_s{seed}"].details["contexts"][tested]
            table[row].append(score_summaries(test, output["texts"], extracts[tested], output["nll"]))
    first = study.seeds[0]
    common = measured[f"common_s{first}"]
    writers = {context: measured[f"writer-{context}_s{first}"] for context in WRITERS}
    pairs = {row: paired_difference(table[row], table["tlm_i"], "abstract_nll") for row in WRITTEN if row != "tlm_i"}
    return {
        "extract_size": study.extract_size,
        "writer_parameters": metric(common, "parameters"),
        "nll_less_than_tlm_i": {row: interval.model_dump() for row, interval in pairs.items()},
        "validation_nll": {context: metric(writer, "validation_nll") for context, writer in writers.items()},
        "writer_cpu_s": {name: metric(run, "training_cpu_s") for name, run in ({"common": common} | writers).items()},
        "losses": {"common model": common.details["losses"]}
        | {f"writer, {context}": writer.details["losses"] for context, writer in writers.items()},
    }


def _details(
    study: SummarizeStudy, table: Table, measured: Measurements, selectors: Mapping[str, str]
) -> dict[str, Any]:
    """Details beside the rows; `selectors` has the id of each selector's run."""
    metrics = ("rouge1", "rouge2", "rougeL", "abstract_nll")
    losses = {name: measured[run].details["losses"] for name, run in selectors.items()}
    test = study.parts["test"]
    return {
        "size": study.size.model_dump(mode="json"),
        "documents": {part: len(samples) for part, samples in study.parts.items()},
        "sentences": study.sentences,
        "corpora": {row: scores_by_corpus(test, scores, metrics) for row, scores in table.items() if row != "human"},
        "selector_cpu_s": {name: metric(measured[run], "training_cpu_s") for name, run in selectors.items()},
        "selector_losses": {name: values for name, values in losses.items() if values},
    }


def aims(rows: Sequence[Row], curves: Curves) -> list[Aim]:
    """Selectors beat Lead-10, LexRank and Lead of their own length; extracts help writers, which copy as people do."""
    by_id = numbers_of(rows)
    selector_aims: list[Aim] = []
    for name in ("rouge1", "rouge2"):
        bound = max(by_id[row][name] for row in ("lead_10", "lexrank"))
        texts = {row: f"{LABELS[row]} is above Lead-10 and LexRank" for row in TRAINED}
        selector_aims += [aim(text, name, bound, by_id[row][name], operator.gt) for row, text in texts.items()]
        best = max(TRAINED, key=lambda row, name=name: by_id[row][name])
        text = f"the best trained selector ({LABELS[best]}) is above Lead of as many sentences"
        selector_aims.append(aim(text, name, by_id["lead_k"][name], by_id[best][name], operator.gt))
    return [*selector_aims, *_writer_aims(by_id, curves)] if WRITTEN.keys() <= by_id.keys() else selector_aims


def _writer_aims(by_id: Mapping[str, Mapping[str, float]], curves: Curves) -> list[Aim]:
    without, extract = by_id["tlm_i"], by_id["tlm_ie_gm"]
    text = f"{LABELS['tlm_ie_gm']} is above {LABELS['tlm_i']}"
    rouge_aims = [aim(text, name, without[name], extract[name], operator.gt) for name in ("rouge1", "rouge2")]
    text, metric = "human abstracts are likelier given I+E (G,M) than given I", "abstract_nll"
    likelier = aim(text, metric, without[metric], extract[metric])
    human = curves["human"]["copied"]
    nearest = min(mean_difference(curves[row]["copied"], human) for row in TRAINED)
    writer = mean_difference(curves["tlm_ie_gm"]["copied"], human)
    text = "copy curve: points between TLM-I+E (G,M) and human abstracts, beside those of the nearest extracts"
    return [*rouge_aims, likelier, aim(text, "copy", nearest, writer)]


def draw_copies(curves: Curves) -> Figure:
    """A panel for each of `DRAWN_ROWS`: percent of n-grams that occur in the document, by origin."""
    shown = [row for row in DRAWN_ROWS if row in curves]
    figure = Figure(figsize=(3.2 * len(shown), 3.4), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    origins = ("extract", "introduction", "rest")
    for panel, row in zip(panels, shown, strict=True):
        lengths = range(1, len(curves[row]["copied"]) + 1)
        panel.stackplot(lengths, *(curves[row][origin] for origin in origins), colors=PALETTE[:3], labels=origins)
        human = curves["human"]["copied"]
        panel.plot(range(1, len(human) + 1), human, color="#222222", linestyle="--", linewidth=1.2, label="human")
        panel.set_title(LABELS[row], fontsize=10)
        panel.set_xlabel("n")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("n-grams copied from the document, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
