"""Four LoRA experts on one backbone, mixed in every way of the table, for every seed.

All choices are made on validation text with the first seed (`study.py`). Every run chooses the routing's policy and
the window for documents. `--table choices` compares targets and learning rates.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from safetensors.torch import load_file

from experiments import Options
from experiments.study import aim, bars, check_files, combined_row, numbers_of, published
from experiments.token_routing.runs import FIRST, SECOND, Documents, MixtureRun, half_nats
from experiments.token_routing.study import (
    XLORA_RATE,
    Metrics,
    Policy,
    TokenRoutingStudy,
    choice_rows,
    choose_policy,
    choose_window,
    document_routing,
    embedder_folder,
    numbers,
)
from experiments.token_routing.texts import DOMAINS, FILES
from graftlm.evaluation import Aim, Results, Row
from graftlm.evaluation.plots import PALETTE

NAME = "token-routing"
TABLES = ("1", "switch", "cache")
OPTIONAL_TABLES = ("minilm", "choices")
INTERVALS = (1, 2, 3, 4)  # k: routes are renewed every k tokens
LABELS = {
    "base": "backbone",
    **{f"expert_{domain}": f"{domain} expert everywhere" for domain in DOMAINS},
    "uniform": "uniform mixture",
    "oracle": "each domain's own expert",
    **{f"routed_k{k}": f"routed, k = {k}" for k in INTERVALS},
    **{f"paper_k{k}": f"the paper's weighting, k = {k}" for k in INTERVALS},
    "linear_k2": "routed, k = 2, factors summed as published",
    "prompt_only": "routed by the prompt alone",
    "xlora": "X-LoRA (PEFT)",
    "arrow": "Arrow (PEFT)",
    "switch_routed": "documents: routed by the last tokens",
    "switch_routed_all": "documents: routed by all text so far",
    "switch_by_hand": "documents: the right expert for each half",
    "switch_base": "documents: backbone",
    **{f"switch_expert_{domain}": f"documents: {domain} expert" for domain in DOMAINS},
    **{f"cache_k{k}": f"keys and values kept or made again, k = {k}" for k in INTERVALS},
    "cache_documents": "documents: keys and values kept or made again",
}
CACHE_WINDOW = 16
SHOWN_TOKENS = 48
UNIFORM = {"temperature": 1e6}
# The paper's weighting, without centring, by the backbone's token embeddings. `minilm_k2` has the paper's embedder.
PUBLISHED: dict[str, Any] = {"policy": "nearest", "boost": 4.0, "embedder": {"name": "backbone", "centre": False}}


def run(options: Options) -> Results:
    """Run tables, by default all but `minilm` and `choices`."""
    tables = options.chosen((*TABLES, *OPTIONAL_TABLES), TABLES)
    check_files(options, FILES)
    embedder = embedder_folder(options) if "minilm" in tables else ""
    study = TokenRoutingStudy(options)
    if tables == ("choices",):
        return study.write(NAME, choice_rows(study), seeds=study.seeds[:1], details=study.details())
    policy, candidates = choose_policy(study)
    details = study.details() | {"policy": policy} | candidates | study.expert_details()
    rows: list[Row] = []
    plots: dict[str, Figure] = {}
    if "1" in tables:
        rows += table_1(study, policy)
        plots["log-perplexity"] = table_1_plot(rows)
    if "switch" in tables:
        switch_rows, plots["switch"], windows = table_switch(study, policy)
        rows += switch_rows
        details |= windows
    if "cache" in tables:
        rows += table_cache(study, policy)
    if "minilm" in tables:
        rows.append(minilm_row(study, embedder))
    if "choices" in tables:
        rows += choice_rows(study)
    paper = published(__file__, {row.id for row in rows})
    return study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)


def table_1(study: TokenRoutingStudy, policy: Policy) -> list[Row]:
    """Every row for every seed; the backbone's row has no seed."""
    runs = [study.mixture("base", 0, (), mixture_kind="none")]
    rows = study.numbers([*runs, *(run for seed in study.seeds for run in _table_1_runs(study, policy, seed))], "rows")
    rows["oracle"] = [_oracle({d: rows[f"expert_{d}"][n] for d in DOMAINS}) for n in range(len(study.seeds))]
    for seed, metrics in zip(study.seeds, rows["linear_k2"], strict=True):
        metrics["update_error"] = update_error([study.runs / expert.id for expert in study.experts(seed)])
    _copy_routing_accuracy(rows)
    return _rows(rows)


def _table_1_runs(study: TokenRoutingStudy, policy: Policy, seed: int) -> Iterator[MixtureRun]:
    """The runs of one seed. Where only k differs, routing accuracy is measured once, at k = 2."""
    for domain in DOMAINS:
        yield study.mixture(f"expert_{domain}", seed, [study.expert(domain, seed)])
    routings: dict[str, dict[str, Any]] = {"uniform": UNIFORM}
    routings |= {f"routed_k{k}": {**policy, "every": k} for k in INTERVALS}
    routings |= {f"paper_k{k}": {**PUBLISHED, "every": k} for k in INTERVALS}
    routings["linear_k2"] = {**policy, "every": 2, "combination": "linear"}
    routings["prompt_only"] = {**policy, "every": 2, "reads": "prompt"}
    for row, routing in routings.items():
        yield study.mixture(row, seed, routing=routing, trace=row.endswith("_k2"))
    yield study.mixture("xlora", seed, mixture_kind="xlora", router_learning_rate=XLORA_RATE)
    yield study.mixture("arrow", seed, mixture_kind="arrow")


def _oracle(experts: Mapping[str, Metrics]) -> Metrics:
    """Metrics of the domain's own expert for each domain."""
    metrics = {f"nll_{domain}": of_expert[f"nll_{domain}"] for domain, of_expert in experts.items()}
    return metrics | {"nll_average": mean(metrics.values()), "arc_accuracy": experts["science"]["arc_accuracy"]}


def _copy_routing_accuracy(rows: Mapping[str, Sequence[Metrics]]) -> None:
    """Copy the accuracy at k = 2 to all rows of the same routing: a prompt's route does not depend on k."""
    for row, measured in rows.items():
        source = "routed_k2" if row == "prompt_only" else f"{row.partition('_k')[0]}_k2"
        for metrics, other in zip(measured, rows.get(source, ()), strict=False):
            metrics["routing_accuracy"] = other["routing_accuracy"]


def update_error(adapters: Sequence[Path]) -> float:
    """Distance of the published combination, which sums factors before their product, from the sum of the updates.

    The mean over modules of |(sum of B_e) (sum of A_e) - sum of B_e A_e| / |sum of B_e A_e|, in Frobenius norms.
    Experts of one rank and scale with equal weights give it in both combinations.
    """
    experts = [load_file(folder / "adapter_model.safetensors") for folder in adapters]
    errors = []
    for key in experts[0]:
        if key.endswith(".lora_A.weight"):
            factors = [(expert[key], expert[key.replace("lora_A", "lora_B")]) for expert in experts]
            sums: Any = [sum(values) for values in zip(*((b @ a, a, b) for a, b in factors), strict=True)]
            exact, sum_a, sum_b = sums
            errors.append(float((sum_b @ sum_a - exact).norm() / exact.norm()))
    return mean(errors)


def table_switch(study: TokenRoutingStudy, policy: Policy) -> tuple[list[Row], Figure, dict[str, Any]]:
    """Documents of code and then prose: every single expert, and routes by the last tokens and by all tokens."""
    window, windows = choose_window(study, policy)
    routed = {"switch_routed": window, "switch_routed_all": None}
    runs = [study.mixture("switch_base", 0, (), mixture_kind="none", reads="documents")]
    for seed in study.seeds:
        runs += [
            study.mixture(f"switch_expert_{domain}", seed, [study.expert(domain, seed)], reads="documents")
            for domain in DOMAINS
        ]
        for row, size in routed.items():
            runs.append(study.mixture(row, seed, routing=document_routing(policy, size), reads="documents"))
    measured = study.measure(runs, "documents")
    rows = {row: list(map(numbers, of_seeds)) for row, of_seeds in measured.items()}
    halves = zip(*(measured[f"switch_expert_{half}"] for half in (FIRST, SECOND)), strict=True)
    rows["switch_by_hand"] = [half_nats(*(half.details["documents"] for half in pair)) for pair in halves]
    figure = switch_plot({LABELS[row]: measured[row][0].details for row in routed})
    return _rows(rows), figure, {"window": window, "windows_on_validation": windows}


def table_cache(study: TokenRoutingStudy, policy: Policy) -> list[Row]:
    """Distance of `cache: keep` from `recompute` with the first seed: on right answers, and on documents."""
    runs = [study.mixture(f"cache_k{k}", routing={**policy, "every": k}, reads="cache-questions") for k in INTERVALS]
    routing = document_routing(policy, CACHE_WINDOW)
    runs.append(study.mixture("cache_documents", routing=routing, reads="cache-documents"))
    return _rows(study.numbers(runs, "keys and values"))


def minilm_row(study: TokenRoutingStudy, embedder: str) -> Row:
    """The paper's weighting by the paper's embedder with the first seed alone: each renewal reads all text again."""
    routing = {**PUBLISHED, "embedder": {"name": embedder, "centre": False}, "every": 2}
    metrics: dict[str, Any]
    ((metrics,),) = study.numbers([study.mixture("minilm_k2", routing=routing, trace=True)], "MiniLM").values()
    return Row(id="minilm_k2", label="the paper's weighting and embedder, k = 2", metrics=metrics)


def _rows(rows: Mapping[str, Sequence[Metrics]]) -> list[Row]:
    """Rows over seeds, in the order of the labels."""
    return [combined_row(row, label, rows[row]) for row, label in LABELS.items() if row in rows]


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The aims of the measured tables."""
    metrics = numbers_of(rows)
    measured: list[Aim] = []
    if routed := metrics.get("routed_k2"):
        limits = {"oracle": 1.02, "uniform": 1.0, "base": 1.0, "paper_k2": 1.0, "arrow": 1.0, "xlora": 1.0}
        for other, limit in limits.items():
            text = f"log-perplexity at k = 2 over that of: {LABELS[other]}"
            ratio = routed["nll_average"] / metrics[other]["nll_average"]
            measured.append(aim(text, "nll_average", limit, ratio, operator.lt if limit == 1 else operator.le))
        share, metric = routed["routing_accuracy"], "routing_accuracy"
        measured.append(aim("prompts with the right expert", metric, 0.95, share, operator.ge))
    if routed := metrics.get("switch_routed"):
        ratio = routed["nll_document"] / min(metrics[f"switch_expert_{d}"]["nll_document"] for d in DOMAINS)
        text = "changing documents: log-perplexity over the best single expert's"
        measured.append(aim(text, "nll_document", 1.0, ratio))
        text = "changing documents: tokens until the route has switched, median"
        measured.append(aim(text, "switch_tokens", 32, routed["switch_tokens"], operator.le))
    return measured


def table_1_plot(rows: Sequence[Row]) -> Figure:
    """Log-perplexity by row and domain."""
    figure = bars(rows, {f"nll_{domain}": domain for domain in DOMAINS}, "nats per answer token")
    figure.axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)  # the bars fill the axes
    return figure


def switch_plot(details: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The mean weight of every expert around the boundary: a panel for each row.

    Args:
        details: `documents` and `names` of each row, by label.
    """
    figure = Figure(figsize=(9.2, 1.2 + 2.4 * len(details)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(details), 1, sharex=True, sharey=True))
    for axes, (label, of_row) in zip(panels, details.items(), strict=True):
        means = _weights_around_boundary(of_row["documents"])
        positions = np.arange(len(means)) - len(means) // 2
        for index, name in enumerate(of_row["names"]):
            axes.plot(positions, means[:, index], color=PALETTE[index], linewidth=1.8, label=f"{name} expert")
        axes.axvline(0, color="#222222", linewidth=0.9)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_ylabel("weight")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens from the boundary: code before it, prose behind it")
    panels[0].legend(loc="center left", frameon=False, fontsize=9)
    return figure


def _weights_around_boundary(documents: Documents) -> np.ndarray:
    """The mean weights at as many tokens before the boundary as after it; every document reaches so far."""
    reach = [min(document["first"], len(document["weights"]) - document["first"]) for document in documents]
    cut = min(SHOWN_TOKENS, *reach)
    return np.mean([np.array(d["weights"])[d["first"] - cut : d["first"] + cut] for d in documents], axis=0)
