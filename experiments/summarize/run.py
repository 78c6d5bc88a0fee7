"""Extracts and written summaries of technical proposals, in the form of Table 2.2, with copy curves as in Figure 2.2.

Documents are split by time within each collection. Selectors are trained on oracle extracts; a small language model
reads the training documents, and three writers go on from it: given the introduction (I), or the introduction and an
extract (I+E), gold (G) or a selector's (M), in training and in use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.study import bars
from experiments.summarize import paper
from experiments.summarize.corpora import Sample
from experiments.summarize.measuring import Figures, by_corpus, curve_of, distance, figures_of, paired, row_of
from experiments.summarize.plan import TABLES, TRAINED, UNTRAINED, Plan, of_part
from experiments.summarize.selecting import extract_of
from experiments.summarize.writing import Context
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.plots import PALETTE
from graftlm.evaluation.report import write_report

NAME = "summarize"
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
WRITTEN: dict[str, tuple[Context, Context]] = {  # what each learned with, and what it is given
    "tlm_i": ("none", "none"),
    "tlm_ie_gm": ("gold", "model"),
    "tlm_ie_mm": ("model", "model"),
    "tlm_ie_gg": ("gold", "gold"),
}
CHOICES = ("sent_ptr", "sent_clf")  # whose extracts writers may be given
DRAWN = ("human", "tlm_i", "tlm_ie_gm", "sent_ptr")
Table = dict[str, list[Figures]]  # by row, one for each seed
Extracts = Mapping[str, str]


def run(options: Options) -> Results:
    """Run extracts and writers, or extracts alone (`--table extracts`); write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table.
        DataError: a collection or the encoder is missing.
    """
    tables = options.chosen(TABLES)
    plan = Plan(options)
    started = time.perf_counter()
    found = plan.rankings()
    test = plan.parts["test"]
    table = {row: _extracted(plan, row, found) for row in (*UNTRAINED, *TRAINED)}
    gold = {one.id: extract_of(one, plan.gold[one.id], len(plan.gold[one.id])).text for one in test}
    table["gold_extract"] = [figures_of(test, gold)]
    table["human"] = [figures_of(test, {one.id: one.summary for one in test}, gold, against_abstract=False)]
    chosen, tried = choose(plan, found)
    details: dict[str, Any] = {"chosen_selector": chosen, "validation": tried}
    if "writers" in tables:
        written, said = _written(plan, chosen, found, gold)
        table |= written
        details |= said
    rows = [row_of(row, label, table[row]) for row, label in LABELS.items() if row in table]
    curves = {row: curve_of(table[row]) for row in LABELS if row in table}
    details |= _details(plan, table, found) | {"copy": curves, "wall_s": round(time.perf_counter() - started, 1)}
    results = Results.here(
        NAME, rows, seeds=plan.seeds, aims=aims(rows, curves), paper=paper.rows(table), details=details
    )
    write_report(results, options.out, plots={"copy": draw_copies(curves), "rouge": _rouge(rows)})
    return results


def _extracted(plan: Plan, row: str, found: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[Figures]:
    """The extracts of one row on the test documents, of every seed."""
    amount = LEAD if row == "lead_10" else plan.sentences
    seeds = [ranked["ranked"]["test"] for (name, _), ranked in found.items() if name == row]
    return [_of_ranking(plan.parts["test"], ranked, amount) for ranked in seeds]


def _of_ranking(samples: Sequence[Sample], ranked: Mapping[str, Sequence[int]], amount: int) -> Figures:
    texts = {one.id: extract_of(one, ranked[one.id], amount).text for one in samples}
    return figures_of(samples, texts)


def choose(plan: Plan, found: Mapping[tuple[str, int], Mapping[str, Any]]) -> tuple[str, dict[str, dict[str, float]]]:
    """Which of the thesis' two selectors writers are given extracts of, and what each has on validation documents.

    The larger sum of ROUGE-1 and 2, with the first seed. The modern one is no choice, as its encoder would have to read
    all training documents.
    """
    samples, seed = plan.parts["validation"], plan.seeds[0]
    tried: dict[str, dict[str, float]] = {}
    for row in CHOICES:
        figures = _of_ranking(samples, found[row, seed]["ranked"]["validation"], plan.sentences)
        metrics = row_of(row, row, [figures]).metrics
        tried[row] = {name: round(value_of(metrics[name]), 3) for name in ("rouge1", "rouge2")}
    return max(CHOICES, key=lambda row: sum(tried[row].values())), tried


def _written(
    plan: Plan, chosen: str, found: Mapping[tuple[str, int], Mapping[str, Any]], gold: Extracts
) -> tuple[Table, dict[str, Any]]:
    """The writers' figures, and what else is said of them."""
    learned = plan.on_training(chosen)
    rankings = {
        seed: of_part(learned[seed], "train") | of_part(dict(found[chosen, seed]), "validation", "test")
        for seed in plan.seeds
    }
    common, writers = plan.written(rankings)
    table: Table = {}
    for row, (context, given) in WRITTEN.items():
        table[row] = []
        for seed in plan.seeds:
            one = writers[context, seed]["contexts"][given]
            extracts = _given(plan, given, rankings[seed], gold)
            table[row].append(figures_of(plan.parts["test"], one["texts"], extracts, one["nll"]))
    first = plan.seeds[0]
    pairs = {row: paired(table[row], table["tlm_i"], "abstract_nll") for row in WRITTEN if row != "tlm_i"}
    details = {
        "extract_size": plan.extract_size,
        "writer_parameters": common[first]["parameters"],
        "nll_less_than_tlm_i": {row: interval.model_dump() for row, interval in pairs.items()},
        "validation_nll": {context: writers[context, first]["validation_nll"] for context, _ in WRITTEN.values()},
        "writer_cpu_s": {"common": common[first]["training_cpu_s"]}
        | {context: writers[context, first]["training_cpu_s"] for context, _ in WRITTEN.values()},
        "losses": {"common model": common[first]["losses"]}
        | {f"writer, {context}": writers[context, first]["losses"] for context in ("none", "gold", "model")},
    }
    return table, details


def _given(plan: Plan, given: Context, ranked: Mapping[str, Sequence[int]], gold: Extracts) -> Extracts:
    """The extracts that a writer was given, as texts."""
    test = plan.parts["test"]
    if given == "none":
        return {one.id: "" for one in test}
    return (
        gold if given == "gold" else {one.id: extract_of(one, ranked[one.id], plan.extract_size).text for one in test}
    )


def _details(plan: Plan, table: Table, found: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    rouge = ("rouge1", "rouge2", "rougeL", "abstract_nll")
    test = plan.parts["test"]
    return {
        "setting": plan.setting.model_dump(mode="json"),
        "documents": {part: len(samples) for part, samples in plan.parts.items()},
        "sentences": plan.sentences,
        "corpora": {row: by_corpus(test, figures, rouge) for row, figures in table.items() if row != "human"},
        "selector_cpu_s": {f"{row}_s{seed}": one["training_cpu_s"] for (row, seed), one in found.items()},
        "selector_losses": {f"{row}_s{seed}": one["losses"] for (row, seed), one in found.items() if one["losses"]},
    }


def aims(rows: Sequence[Row], curves: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Aim]:
    """Selectors beat Lead-10, LexRank and Lead of their own length; extracts help writers, which copy as people do."""
    by_id = {row.id: row for row in rows}
    found = []
    for metric in ("rouge1", "rouge2"):
        bound = max(value_of(by_id[row].metrics[metric]) for row in ("lead_10", "lexrank"))
        for row in TRAINED:
            text = f"{LABELS[row]} is above Lead-10 and LexRank"
            found.append(_above(text, metric, bound, value_of(by_id[row].metrics[metric])))
        best = max(TRAINED, key=lambda row, metric=metric: value_of(by_id[row].metrics[metric]))
        text = f"the best trained selector ({LABELS[best]}) is above Lead of as many sentences"
        bound = value_of(by_id["lead_k"].metrics[metric])
        found.append(_above(text, metric, bound, value_of(by_id[best].metrics[metric])))
    return [*found, *_writer_aims(by_id, curves)] if WRITTEN.keys() <= by_id.keys() else found


def _writer_aims(by_id: Mapping[str, Row], curves: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Aim]:
    with_i, with_e = by_id["tlm_i"].metrics, by_id["tlm_ie_gm"].metrics
    found = []
    for metric in ("rouge1", "rouge2"):
        text = f"{LABELS['tlm_ie_gm']} is above {LABELS['tlm_i']}"
        found.append(_above(text, metric, value_of(with_i[metric]), value_of(with_e[metric])))
    nats, bound = value_of(with_e["abstract_nll"]), value_of(with_i["abstract_nll"])
    text = "human abstracts are likelier given I+E (G,M) than given I"
    found.append(Aim(text=text, metric="abstract_nll", aim=bound, measured=nats, met=nats < bound))
    human = curves["human"]["copied"]
    extracts = min(distance(curves[row]["copied"], human) for row in TRAINED)
    writer = distance(curves["tlm_ie_gm"]["copied"], human)
    text = "copy curve: points between TLM-I+E (G,M) and human abstracts, beside those of the nearest extracts"
    return [*found, Aim(text=text, metric="copy", aim=extracts, measured=writer, met=writer < extracts)]


def _above(text: str, metric: str, bound: float, value: float) -> Aim:
    return Aim(text=text, metric=metric, aim=bound, measured=value, met=value > bound)


def draw_copies(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """A panel for each row that is drawn: percent of n-grams that stand in the document, by where they stand."""
    shown = [row for row in DRAWN if row in curves]
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


def _rouge(rows: Sequence[Row]) -> Figure:
    shown = [row for row in rows if "rouge1" in row.metrics]
    return bars(shown, {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}, "F1, %")
