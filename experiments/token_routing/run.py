"""Four LoRA experts on one backbone, mixed in every way of the table, for every seed.

All choices were made on validation text, with the first seed (`choose.py`): how routes are embedded and weighed and,
for documents that change domain, their window, in every run; the experts' targets and all learning rates by
`--table choices`, which stand in `plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from experiments import Options
from experiments.study import bars, check_files
from experiments.token_routing import paper, switch
from experiments.token_routing.aims import EVERY, LABELS, MINI_LM, aims
from experiments.token_routing.choose import causal, choices, choose_policy, choose_window
from experiments.token_routing.measure import Cell
from experiments.token_routing.plan import Plan, embedder_folder, setting_of, trained_of
from experiments.token_routing.summed import update_error
from experiments.token_routing.texts import DOMAINS, FILES
from graftlm.evaluation import Metric, Results, Row, combine_seeds
from graftlm.evaluation.report import write_report

NAME = "token-routing"
TABLES = ("1", "switch", "cache")
FURTHER = ("minilm", "choices")
DRIFT_WINDOW = 16
UNIFORM = {"temperature": 1e6}
# The paper's weighting, without centring; by the backbone's token embeddings but in `minilm_k2`.
PUBLISHED: dict[str, Any] = {"policy": "nearest", "boost": 4.0, "embedder": {"name": "backbone", "centre": False}}


def run(options: Options) -> Results:
    """Run the asked tables, by default all but `minilm` and `choices`, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table.
        DataError: the data folder lacks a file.
    """
    wanted = options.chosen((*TABLES, *FURTHER), TABLES)
    check_files(options, FILES)
    embedder = embedder_folder(options) if "minilm" in wanted else ""
    plan = Plan(options)
    adapters = train_experts(plan)
    if wanted == ("choices",):
        rows = choices(plan, adapters[plan.seeds[0]])
        results = Results.here(NAME, rows, seeds=plan.seeds[:1], details=setting_of(plan))
        write_report(results, options.out)
        return results
    policy, tried = choose_policy(plan, adapters[plan.seeds[0]])
    details = setting_of(plan) | {"policy": policy} | tried | trained_of(plan, adapters)
    rows: list[Row] = []
    plots: dict[str, Figure] = {}
    if "1" in wanted:
        rows += table_1(plan, adapters, policy)
        plots["log-perplexity"] = draw_table_1(rows)
    if "switch" in wanted:
        found, figure, windows = table_switch(plan, adapters, policy)
        rows, plots["switch"] = [*rows, *found], figure
        details |= windows
    if "cache" in wanted:
        rows += table_cache(plan, adapters[plan.seeds[0]], policy)
    if "minilm" in wanted:
        rows.append(row_of_minilm(plan, adapters[plan.seeds[0]], embedder))
    if "choices" in wanted:
        rows += choices(plan, adapters[plan.seeds[0]])
    aimed, published = aims(rows), paper.rows()
    results = Results.here(NAME, rows, seeds=plan.seeds, aims=aimed, paper=published, details=details)
    write_report(results, options.out, plots=plots)
    return results


def train_experts(plan: Plan) -> dict[int, dict[str, Path]]:
    """The experts' folders, by seed and domain."""
    lessons = {
        f"adapter-{domain}_s{seed}": lesson for seed in plan.seeds for domain, lesson in plan.experts(seed).items()
    }
    folders = plan.train(lessons)
    return {seed: {domain: folders[f"adapter-{domain}_s{seed}"] for domain in DOMAINS} for seed in plan.seeds}


def table_1(plan: Plan, adapters: Mapping[int, Mapping[str, Path]], policy: Mapping[str, Any]) -> list[Row]:
    """Every row for every seed; what the backbone does is the same for all."""
    cells = {(row, seed): cell for seed in plan.seeds for row, cell in _cells_of(plan, adapters[seed], policy, seed)}
    base = plan.cell("base", {}, 0, mixes="none")
    measured = plan.run([base, *cells.values()], "rows")
    rows = {"base": [measured[base.id]["metrics"]]}
    for (row, _), cell in cells.items():
        rows.setdefault(row, []).append(measured[cell.id]["metrics"])
    rows["oracle"] = [_oracle({d: rows[f"expert_{d}"][n] for d in DOMAINS}) for n in range(len(plan.seeds))]
    for seed, metrics in zip(plan.seeds, rows["linear_k2"], strict=True):
        metrics["update_error"] = update_error(adapters[seed])
    _same_routes(rows)
    return [_row(name, rows[name]) for name in LABELS if name in rows]


def draw_table_1(rows: Sequence[Row]) -> Figure:
    """Log-perplexity by row and domain."""
    figure = bars(rows, {f"nll_{domain}": domain for domain in DOMAINS}, "nats per answer token")
    figure.axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)  # beside the bars, which fill it
    return figure


def _cells_of(
    plan: Plan, adapters: Mapping[str, Path], policy: Mapping[str, Any], seed: int
) -> Iterable[tuple[str, Cell]]:
    """The cells of one seed by row; where only k differs, the prompts' routes are measured once."""
    for domain in DOMAINS:
        yield f"expert_{domain}", plan.cell(f"expert_{domain}", {domain: adapters[domain]}, seed)
    routings: dict[str, dict[str, Any]] = {"uniform": UNIFORM}
    routings |= {f"routed_k{k}": {**policy, "every": k} for k in EVERY}
    routings |= {f"paper_k{k}": {**PUBLISHED, "every": k} for k in EVERY}
    routings["linear_k2"] = {**policy, "every": 2, "combination": "linear"}
    routings["prompt_only"] = {**policy, "every": 2, "reads": "prompt"}
    for row, routing in routings.items():
        yield row, plan.cell(row, adapters, seed, routing=routing, traced=row.endswith("_k2"))
    yield "xlora", plan.cell("xlora", adapters, seed, mixes="xlora")
    yield "arrow", plan.cell("arrow", adapters, seed, mixes="arrow")


def _oracle(experts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found = {f"nll_{domain}": metrics[f"nll_{domain}"] for domain, metrics in experts.items()}
    found["nll_average"] = mean(found.values())
    return found | {"arc_accuracy": experts["science"]["arc_accuracy"]}


def _same_routes(rows: Mapping[str, Sequence[dict[str, float]]]) -> None:
    """Give all rows of a routing the share of right prompts that was measured at k = 2: a prompt's route has no k."""
    for row, measured in rows.items():
        source = "routed_k2" if row == "prompt_only" else f"{row.partition('_k')[0]}_k2"
        if source in rows:
            for metrics, other in zip(measured, rows[source], strict=True):
                metrics["routing_accuracy"] = other["routing_accuracy"]


def table_switch(
    plan: Plan, adapters: Mapping[int, Mapping[str, Path]], policy: Mapping[str, Any]
) -> tuple[list[Row], Figure, dict[str, Any]]:
    """Documents of code and then prose: every single expert, and the route by the last tokens and by all."""
    window, tried = choose_window(plan, adapters[plan.seeds[0]], policy)
    cells: dict[tuple[str, int], Cell] = {}
    for seed in plan.seeds:
        said: dict[str, Any] = {"seed": seed, "asks": "documents"}
        for domain in DOMAINS:
            one = {domain: adapters[seed][domain]}
            cells[f"expert_{domain}", seed] = plan.cell(f"switch_expert_{domain}", one, **said)
        for row, size in (("routed", window), ("routed_all", None)):
            routing = causal(policy, size)
            cells[row, seed] = plan.cell(f"switch_{row}", adapters[seed], routing=routing, **said)
    base = plan.cell("switch_base", {}, 0, mixes="none", asks="documents")
    found = plan.run([base, *cells.values()], "documents")
    rows = {"switch_base": [switch.metrics_of(found[base.id]["documents"], [])]}
    for (row, _), cell in cells.items():
        one = found[cell.id]
        rows.setdefault(f"switch_{row}", []).append(switch.metrics_of(one["documents"], one["names"]))
    halves = (f"expert_{switch.FIRST}", f"expert_{switch.SECOND}")
    rows["switch_by_hand"] = [
        switch.by_hand(*(found[cells[half, seed].id]["documents"] for half in halves)) for seed in plan.seeds
    ]
    shown = {LABELS[f"switch_{row}"]: found[cells[row, plan.seeds[0]].id] for row in ("routed", "routed_all")}
    figure = switch.draw({label: (one["documents"], one["names"]) for label, one in shown.items()})
    details = {"window": window, "windows_on_validation": tried}
    return [_row(name, rows[name]) for name in LABELS if name in rows], figure, details


def table_cache(plan: Plan, adapters: Mapping[str, Path], policy: Mapping[str, Any]) -> list[Row]:
    """How far `cache: keep` is from `recompute`, with the first seed: on right answers, and on documents."""
    seed = plan.seeds[0]
    cells = [plan.cell(f"cache_k{k}", adapters, seed, routing={**policy, "every": k}, asks="drift") for k in EVERY]
    documents = {"routing": causal(policy, DRIFT_WINDOW), "asks": "drift of documents"}
    cells.append(plan.cell("cache_documents", adapters, seed, **documents))
    found = plan.run(cells, "keys and values")
    return [_row(cell.id.rpartition("_s")[0], [found[cell.id]["metrics"]]) for cell in cells]


def row_of_minilm(plan: Plan, adapters: Mapping[str, Path], embedder: str) -> Row:
    """The paper's weighting by the paper's embedder, with the first seed alone: it reads all text at every renewal."""
    ((name, label),) = MINI_LM.items()
    routing = {**PUBLISHED, "embedder": {"name": embedder, "centre": False}, "every": 2}
    cell = plan.cell(name, adapters, plan.seeds[0], routing=routing, traced=True)
    return Row(id=name, label=label, metrics=plan.run([cell], "MiniLM")[cell.id]["metrics"])


def _row(name: str, measured: Sequence[Mapping[str, float]]) -> Row:
    metrics: dict[str, Metric] = {key: combine_seeds([one[key] for one in measured]) for key in measured[0]}
    return Row(id=name, label=LABELS[name], metrics=metrics)
