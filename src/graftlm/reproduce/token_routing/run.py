"""Four LoRA experts on one backbone, mixed in every way of the table, for every seed.

All choices were made on validation text, with the first seed: the routing's policy and, for documents that change
domain, its window, in every run; the experts' targets and all learning rates by `--table choices`, which stand below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from graftlm.errors import RecipeError, did_you_mean
from graftlm.evaluation import Metric, Results, Row, combine_seeds
from graftlm.evaluation.report import write_report
from graftlm.reproduce import Options
from graftlm.reproduce.composed import bars, check_files
from graftlm.reproduce.token_routing import paper, switch
from graftlm.reproduce.token_routing.aims import EVERY, LABELS, aims
from graftlm.reproduce.token_routing.measure import Cell
from graftlm.reproduce.token_routing.plan import Plan, embedder_of, setting_of, trained_of
from graftlm.reproduce.token_routing.texts import DOMAINS, FILES

NAME = "token-routing"
TABLES = ("1", "switch")
FURTHER = ("choices",)
TRIED_TARGETS = {"all": ("attention", "ffn"), "qv": ("q_proj", "v_proj")}
TRIED_RATES = {"expert": (3e-3, 1e-2, 3e-2), "xlora": (1e-3, 1e-2, 3e-2)}
SHARP: tuple[dict[str, Any], ...] = (
    {"top": 1},
    {"temperature": 0.03},
    {"temperature": 0.1},
    {"temperature": 0.3},
    {"temperature": 0.1, "top": 2},
)
_CENTRED, _PLAIN = {"embedder": {"centre": True}}, {"embedder": {"centre": False}}
POLICIES: tuple[dict[str, Any], ...] = (
    *({**how, **where} for where in (_CENTRED, _PLAIN) for how in SHARP),
    *({**how, **_CENTRED, "examples": examples} for examples in ("prompt", "both") for how in SHARP),
)
WINDOWS = (16, 32, 64)
UNIFORM = {"temperature": 1e6}


def run(options: Options) -> Results:
    """Run the asked tables, by default all but `choices`, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table.
        DataError: the data folder lacks a file.
    """
    wanted = _checked(options)
    check_files(options, FILES)
    plan = Plan(options)
    if wanted == ("choices",):
        rows = choices(plan)
        results = Results.here(NAME, rows, seeds=plan.seeds[:1], details=setting_of(plan))
        write_report(results, options.out)
        return results
    adapters = train_experts(plan)
    policy, tried = choose_policy(plan, adapters[plan.seeds[0]])
    details = setting_of(plan) | {"policy": policy, "policies_on_validation": tried} | trained_of(plan, adapters)
    rows: list[Row] = []
    plots: dict[str, Figure] = {}
    if "1" in wanted:
        rows += table_1(plan, adapters, policy)
        plots["log-perplexity"] = draw_table_1(rows)
    if "switch" in wanted:
        found, figure, windows = table_switch(plan, adapters, policy)
        rows, plots["switch"] = [*rows, *found], figure
        details |= windows
    if "choices" in wanted:
        rows += choices(plan)
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


def choose_policy(plan: Plan, adapters: Mapping[str, Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The policy with the lowest log-perplexity on validation questions, with the first seed and k = 2; all tried."""
    seed = plan.seeds[0]
    policies = POLICIES[::8] if plan.options.quick else POLICIES
    names = [f"policy-{number}" for number in range(len(policies))]
    cells = [
        plan.cell(name, adapters, seed, routing={**policy, "every": 2}, part="validation")
        for name, policy in zip(names, policies, strict=True)
    ]
    found = plan.run(cells, "policies")
    tried = [{**policy, **found[cell.id]["metrics"]} for cell, policy in zip(cells, policies, strict=True)]
    best = min(range(len(tried)), key=lambda number: tried[number]["nll_average"])
    return dict(policies[best]), tried


def table_1(plan: Plan, adapters: Mapping[int, Mapping[str, Path]], policy: Mapping[str, Any]) -> list[Row]:
    """Every row for every seed; what the backbone does is the same for all."""
    cells = {(row, seed): cell for seed in plan.seeds for row, cell in _cells_of(plan, adapters[seed], policy, seed)}
    base = plan.cell("base", {}, 0, mixes="none")
    measured = plan.run([base, *cells.values()], "rows")
    rows = {"base": [measured[base.id]["metrics"]]}
    for (row, _), cell in cells.items():
        rows.setdefault(row, []).append(measured[cell.id]["metrics"])
    rows["oracle"] = [_oracle({d: rows[f"expert_{d}"][n] for d in DOMAINS}) for n in range(len(plan.seeds))]
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
    routings |= {f"paper_k{k}": {**_published(plan), "every": k} for k in EVERY}
    routings["prompt_only"] = {**policy, "every": 2, "reads": "prompt"}
    for row, routing in routings.items():
        yield row, plan.cell(row, adapters, seed, routing=routing, traced=row.endswith("_k2"))
    yield "xlora", plan.cell("xlora", adapters, seed, mixes="xlora")
    yield "arrow", plan.cell("arrow", adapters, seed, mixes="arrow")


def _published(plan: Plan) -> dict[str, Any]:
    """The paper's routing: nearest times 4, without centring, by its embedder where that is at hand."""
    return {"policy": "nearest", "boost": 4.0, "embedder": {"name": embedder_of(plan.options), "centre": False}}


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
            routing = _causal(policy, size)
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


def choose_window(
    plan: Plan, adapters: Mapping[str, Path], policy: Mapping[str, Any]
) -> tuple[int, dict[str, dict[str, float]]]:
    """How many of the last tokens a route reads: the lowest log-perplexity of validation documents, first seed."""
    cells = {
        window: plan.cell(
            f"window-{window}",
            adapters,
            plan.seeds[0],
            routing=_causal(policy, window),
            part="validation",
            asks="documents",
        )
        for window in WINDOWS
    }
    found = plan.run(cells.values(), "windows")
    tried = {w: switch.metrics_of(found[c.id]["documents"], found[c.id]["names"]) for w, c in cells.items()}
    return min(tried, key=lambda w: tried[w]["nll_document"]), {str(w): metrics for w, metrics in tried.items()}


def _causal(policy: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    return {**policy, "every": 2, "prompt": "causal", "window": window}


def choices(plan: Plan) -> list[Row]:
    """Targets and learning rates on validation text, with the first seed: experts at a quarter of the steps."""
    seed = plan.seeds[0]
    short = plan.setting.model_copy(update={"steps": max(1, plan.setting.steps // 4)})
    hows = {(name, rate): t for name, t in TRIED_TARGETS.items() for rate in TRIED_RATES["expert"]}
    lessons = {
        f"try-{name}-{rate:g}-{domain}": lesson
        for (name, rate), targets in hows.items()
        for domain, lesson in plan.experts(seed, rate=rate, targets=targets, setting=short).items()
    }
    folders = plan.train(lessons)
    cells = {name: plan.cell(name, {name.split("-")[-1]: folders[name]}, seed, part="validation") for name in lessons}
    routers = [
        plan.cell(f"try-xlora-{rate:g}", train_experts(plan)[seed], seed, mixes="xlora", rate=rate, part="validation")
        for rate in TRIED_RATES["xlora"]
    ]
    found = plan.run([*cells.values(), *routers], "choices")
    rows = []
    for name, rate in hows:
        of = {d: found[cells[f"try-{name}-{rate:g}-{d}"].id]["metrics"][f"nll_{d}"] for d in DOMAINS}
        metrics = {f"nll_{domain}": value for domain, value in of.items()} | {"nll_average": mean(of.values())}
        rows.append(Row(id=f"try_{name}_{rate:g}", label=f"experts on {name}, rate {rate:g}", metrics=metrics))
    for cell in routers:
        label = f"X-LoRA, rate {cell.rate:g}"
        rows.append(Row(id=f"try_xlora_{cell.rate:g}", label=label, metrics=found[cell.id]["metrics"]))
    return rows


def _row(name: str, measured: Sequence[Mapping[str, float]]) -> Row:
    metrics: dict[str, Metric] = {key: combine_seeds([one[key] for one in measured]) for key in measured[0]}
    return Row(id=name, label=LABELS[name], metrics=metrics)


def _checked(options: Options) -> tuple[str, ...]:
    for table in options.tables:
        if table not in (*TABLES, *FURTHER):
            known = did_you_mean(table, (*TABLES, *FURTHER))
            raise RecipeError(f"There is no table {table!r} in this reproduction{known}.")
    return options.tables or TABLES
