"""Four LoRA experts on one backbone, mixed in every way of the table, for every seed.

All choices are made on validation text with the first seed (`choices.py`). Every run chooses the routing's policy and
the window for documents. `--table choices` compares targets and learning rates; `experts.py` and `study.py` hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from safetensors.torch import load_file

from experiments import Options
from experiments.study import check_files
from experiments.token_routing.choices import choice_rows, choose_policy, choose_window, document_routing
from experiments.token_routing.measure import FIRST, SECOND, MixtureRun, switch_by_hand
from experiments.token_routing.results import INTERVALS, LABELS, aims, paper_rows, switch_plot, table_1_plot
from experiments.token_routing.study import XLORA_RATE, TokenRoutingStudy, embedder_folder, numbers_of
from experiments.token_routing.texts import DOMAINS, FILES
from graftlm.evaluation import Results, Row, combine_seeds
from graftlm.evaluation.report import write_report

NAME = "token-routing"
TABLES = ("1", "switch", "cache")
OPTIONAL_TABLES = ("minilm", "choices")
CACHE_WINDOW = 16
UNIFORM = {"temperature": 1e6}
# The paper's weighting, without centring, by the backbone's token embeddings. `minilm_k2` has the paper's embedder.
PUBLISHED: dict[str, Any] = {"policy": "nearest", "boost": 4.0, "embedder": {"name": "backbone", "centre": False}}

Metrics = dict[str, float]
Policy = Mapping[str, Any]


def run(options: Options) -> Results:
    """Run tables, by default all but `minilm` and `choices`, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: a table is not known.
        DataError: the data folder lacks a file.
    """
    tables = options.chosen((*TABLES, *OPTIONAL_TABLES), TABLES)
    check_files(options, FILES)
    embedder = embedder_folder(options) if "minilm" in tables else ""
    study = TokenRoutingStudy(options)
    if tables == ("choices",):
        results = Results.here(NAME, choice_rows(study), seeds=study.seeds[:1], details=study.details())
        write_report(results, options.out)
        return results
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
    results = Results.here(NAME, rows, seeds=study.seeds, aims=aims(rows), paper=paper_rows(), details=details)
    write_report(results, options.out, plots=plots)
    return results


def table_1(study: TokenRoutingStudy, policy: Policy) -> list[Row]:
    """Every row for every seed; the backbone's row has no seed."""
    runs = {(row, seed): run for seed in study.seeds for row, run in _table_1_runs(study, policy, seed)}
    base = study.mixture("base", (), 0, mixture_kind="none")
    measured = study.measure([base, *runs.values()], "rows")
    rows = {"base": [numbers_of(measured, base)]}
    for (row, _), mixture in runs.items():
        rows.setdefault(row, []).append(numbers_of(measured, mixture))
    rows["oracle"] = [_oracle({d: rows[f"expert_{d}"][n] for d in DOMAINS}) for n in range(len(study.seeds))]
    for seed, metrics in zip(study.seeds, rows["linear_k2"], strict=True):
        metrics["update_error"] = update_error([study.runs / expert.id for expert in study.experts(seed)])
    _copy_routing_accuracy(rows)
    return _rows(rows)


def _table_1_runs(study: TokenRoutingStudy, policy: Policy, seed: int) -> Iterable[tuple[str, MixtureRun]]:
    """The runs of one seed by row. Where only k differs, routing accuracy is measured once, at k = 2."""
    experts = study.experts(seed)
    for domain, expert in zip(DOMAINS, experts, strict=True):
        yield f"expert_{domain}", study.mixture(f"expert_{domain}", [expert], seed)
    routings: dict[str, dict[str, Any]] = {"uniform": UNIFORM}
    routings |= {f"routed_k{k}": {**policy, "every": k} for k in INTERVALS}
    routings |= {f"paper_k{k}": {**PUBLISHED, "every": k} for k in INTERVALS}
    routings["linear_k2"] = {**policy, "every": 2, "combination": "linear"}
    routings["prompt_only"] = {**policy, "every": 2, "reads": "prompt"}
    for row, routing in routings.items():
        yield row, study.mixture(row, experts, seed, routing=routing, trace=row.endswith("_k2"))
    yield "xlora", study.mixture("xlora", experts, seed, mixture_kind="xlora", router_learning_rate=XLORA_RATE)
    yield "arrow", study.mixture("arrow", experts, seed, mixture_kind="arrow")


def _oracle(experts: Mapping[str, Metrics]) -> Metrics:
    """Metrics of the domain's own expert for each domain."""
    metrics = {f"nll_{domain}": of_expert[f"nll_{domain}"] for domain, of_expert in experts.items()}
    metrics["nll_average"] = mean(metrics.values())
    return metrics | {"arc_accuracy": experts["science"]["arc_accuracy"]}


def _copy_routing_accuracy(rows: Mapping[str, Sequence[Metrics]]) -> None:
    """Copy the accuracy at k = 2 to all rows of the same routing: a prompt's route does not depend on k."""
    for row, measured in rows.items():
        source = "routed_k2" if row == "prompt_only" else f"{row.partition('_k')[0]}_k2"
        if source in rows:
            for metrics, other in zip(measured, rows[source], strict=True):
                metrics["routing_accuracy"] = other["routing_accuracy"]


def update_error(adapters: Sequence[Path]) -> float:
    """Distance of the published combination, which sums factors before their product, from the sum of the updates.

    The mean over modules of |(sum of B_e) (sum of A_e) - sum of B_e A_e| / |sum of B_e A_e|, in Frobenius norms.
    Experts of one rank and scale with equal weights give it in both combinations.
    """
    experts = [load_file(folder / "adapter_model.safetensors") for folder in adapters]
    errors = []
    for key in experts[0]:
        if not key.endswith(".lora_A.weight"):
            continue
        factors = [(expert[key], expert[key.replace("lora_A", "lora_B")]) for expert in experts]
        exact: Any = sum(b @ a for a, b in factors)
        sum_a: Any = sum(a for a, _ in factors)
        sum_b: Any = sum(b for _, b in factors)
        published = sum_b @ sum_a
        errors.append(float((published - exact).norm() / exact.norm()))
    return mean(errors)


def table_switch(study: TokenRoutingStudy, policy: Policy) -> tuple[list[Row], Figure, dict[str, Any]]:
    """Documents of code and then prose: every single expert, and routes by the last tokens and by all tokens."""
    window, windows = choose_window(study, policy)
    runs: dict[tuple[str, int], MixtureRun] = {}
    for seed in study.seeds:
        experts = study.experts(seed)
        for domain, expert in zip(DOMAINS, experts, strict=True):
            row = f"switch_expert_{domain}"
            runs[row, seed] = study.mixture(row, [expert], seed, reads="documents")
        for row, size in (("switch_routed", window), ("switch_routed_all", None)):
            runs[row, seed] = study.mixture(
                row, experts, seed, routing=document_routing(policy, size), reads="documents"
            )
    base = study.mixture("switch_base", (), 0, mixture_kind="none", reads="documents")
    measured = study.measure([base, *runs.values()], "documents")
    rows = {"switch_base": [numbers_of(measured, base)]}
    for (row, _), mixture in runs.items():
        rows.setdefault(row, []).append(numbers_of(measured, mixture))
    details = {key: measured[mixture.id].details for key, mixture in runs.items()}
    rows["switch_by_hand"] = [
        switch_by_hand(*(details[f"switch_expert_{half}", seed]["documents"] for half in (FIRST, SECOND)))
        for seed in study.seeds
    ]
    figure = switch_plot({LABELS[row]: details[row, study.seeds[0]] for row in ("switch_routed", "switch_routed_all")})
    return _rows(rows), figure, {"window": window, "windows_on_validation": windows}


def table_cache(study: TokenRoutingStudy, policy: Policy) -> list[Row]:
    """Distance of `cache: keep` from `recompute` with the first seed: on right answers, and on documents."""
    seed = study.seeds[0]
    experts = study.experts(seed)
    runs = {
        f"cache_k{k}": study.mixture(
            f"cache_k{k}", experts, seed, routing={**policy, "every": k}, reads="cache-questions"
        )
        for k in INTERVALS
    }
    routing = document_routing(policy, CACHE_WINDOW)
    runs["cache_documents"] = study.mixture("cache_documents", experts, seed, routing=routing, reads="cache-documents")
    measured = study.measure(runs.values(), "keys and values")
    return _rows({row: [numbers_of(measured, mixture)] for row, mixture in runs.items()})


def minilm_row(study: TokenRoutingStudy, embedder: str) -> Row:
    """The paper's weighting by the paper's embedder with the first seed alone: each renewal reads all text again."""
    seed = study.seeds[0]
    routing = {**PUBLISHED, "embedder": {"name": embedder, "centre": False}, "every": 2}
    mixture = study.mixture("minilm_k2", study.experts(seed), seed, routing=routing, trace=True)
    metrics = numbers_of(study.measure([mixture], "MiniLM"), mixture)
    return Row(id="minilm_k2", label="the paper's weighting and embedder, k = 2", metrics=dict(metrics))


def _rows(rows: Mapping[str, Sequence[Metrics]]) -> list[Row]:
    """Rows over seeds, in the order of the labels."""
    return [
        Row(
            id=name,
            label=label,
            metrics={key: combine_seeds([metrics[key] for metrics in rows[name]]) for key in rows[name][0]},
        )
        for name, label in LABELS.items()
        if name in rows
    ]
