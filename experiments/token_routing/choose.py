"""What is chosen on validation text, with the first seed: how routes are embedded and weighed, windows, rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.token_routing import switch
from experiments.token_routing.plan import Plan
from experiments.token_routing.texts import DOMAINS
from graftlm.evaluation import Row

TRIED_TARGETS = {"all": ("attention", "ffn"), "qv": ("q_proj", "v_proj")}
TRIED_RATES = {"expert": (3e-3, 1e-2, 3e-2), "xlora": (1e-3, 1e-2, 3e-2, 1e-1)}
SHARP: tuple[dict[str, Any], ...] = (
    {"top": 1},
    {"temperature": 0.03},
    {"temperature": 0.1},
    {"temperature": 0.3},
    {"temperature": 0.1, "top": 2},
)
EXAMPLES = ("whole", "prompt", "both")
WINDOWS = (8, 16, 32, 64)

Tried = list[dict[str, Any]]


def choose_policy(plan: Plan, adapters: Mapping[str, Path]) -> tuple[dict[str, Any], dict[str, Tried]]:
    """The routing with the lowest log-perplexity on validation questions at k = 2, and all that were tried.

    First the embedder, at temperature 0.1 with centroids of whole examples and of their prompts; then, with that
    embedder, temperatures, centring, and of which texts centroids are.
    """
    embedder, embedders = choose_embedder(plan, adapters)
    plain = {"embedder": {**embedder, "centre": False}}
    policies = [{**how, "embedder": embedder, "examples": of} for of in EXAMPLES for how in SHARP]
    policies += [{**how, **plain, "examples": "both"} for how in SHARP]
    tried = _try(plan, adapters, "policy", policies[::8] if plan.options.quick else policies)
    return _best(tried), {"embedders_on_validation": embedders, "policies_on_validation": tried}


def choose_embedder(plan: Plan, adapters: Mapping[str, Path]) -> tuple[dict[str, Any], Tried]:
    """The hidden states that routes are embedded by, and whether they are whitened."""
    embedders = [
        {"layers": layers, "whiten": whiten, "centre": True}
        for layers in range(plan.setting.layers + 1)
        for whiten in (False, True)
    ]
    policies = [{"temperature": 0.1, "embedder": one, "examples": "both"} for one in embedders]
    tried = _try(plan, adapters, "embedder", policies[::3] if plan.options.quick else policies)
    return _best(tried)["embedder"], tried


def choose_window(
    plan: Plan, adapters: Mapping[str, Path], policy: Mapping[str, Any]
) -> tuple[int, dict[str, dict[str, float]]]:
    """How many of the last tokens a route reads: the lowest log-perplexity of validation documents, first seed."""
    cells = {
        window: plan.cell(
            f"window-{window}",
            adapters,
            plan.seeds[0],
            routing=causal(policy, window),
            part="validation",
            asks="documents",
        )
        for window in WINDOWS
    }
    found = plan.run(cells.values(), "windows")
    tried = {w: switch.metrics_of(found[c.id]["documents"], found[c.id]["names"]) for w, c in cells.items()}
    return min(tried, key=lambda w: tried[w]["nll_document"]), {str(w): metrics for w, metrics in tried.items()}


def causal(policy: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """A routing for documents without a prompt."""
    return {**policy, "every": 2, "prompt": "causal", "window": window}


def _try(plan: Plan, adapters: Mapping[str, Path], name: str, policies: Sequence[dict[str, Any]]) -> Tried:
    """What policies give on validation questions, with the first seed and k = 2."""
    cells = [
        plan.cell(
            f"{name}-{number}",
            adapters,
            plan.seeds[0],
            routing={**policy, "every": 2},
            part="validation",
            traced=True,
        )
        for number, policy in enumerate(policies)
    ]
    found = plan.run(cells, f"{name}s")
    return [{**policy, **found[cell.id]["metrics"]} for cell, policy in zip(cells, policies, strict=True)]


def _best(tried: Tried) -> dict[str, Any]:
    """The policy of the lowest log-perplexity, without what was measured of it."""
    best = min(tried, key=lambda one: one["nll_average"])
    return {key: value for key, value in best.items() if not key.startswith(("nll_", "routing_"))}


def choices(plan: Plan, adapters: Mapping[str, Path]) -> list[Row]:
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
        plan.cell(f"try-xlora-{rate:g}", adapters, seed, mixes="xlora", rate=rate, part="validation")
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
