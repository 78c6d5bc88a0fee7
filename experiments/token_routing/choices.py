"""Choices made on validation text with the first seed: the routing's policy, its window, targets and learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from experiments.token_routing.study import TokenRoutingStudy, numbers_of
from experiments.token_routing.texts import DOMAINS
from graftlm.evaluation import Row

TRIED_TARGETS = {"all": ("attention", "ffn"), "qv": ("q_proj", "v_proj")}
TRIED_RATES = {"expert": (3e-3, 1e-2, 3e-2), "xlora": (1e-3, 1e-2, 3e-2, 1e-1)}
SHARPNESS: tuple[dict[str, Any], ...] = (
    {"top": 1},
    {"temperature": 0.03},
    {"temperature": 0.1},
    {"temperature": 0.3},
    {"temperature": 0.1, "top": 2},
)
EXAMPLES = ("whole", "prompt", "both")
WINDOWS = (8, 16, 32, 64)

Policies = list[dict[str, Any]]


def choose_policy(study: TokenRoutingStudy) -> tuple[dict[str, Any], dict[str, Policies]]:
    """The routing with the lowest log-perplexity on validation questions at k = 2, and all candidates.

    The embedder is chosen first, at temperature 0.1 with centroids of whole examples and of their prompts. Then
    temperatures, centring and the texts of the centroids are chosen with that embedder.
    """
    embedders = _measure_policies(study, "embedder", _embedder_policies(study), every=3)
    embedder = _best(embedders)["embedder"]
    policies = [{**sharpness, "embedder": embedder, "examples": text} for text in EXAMPLES for sharpness in SHARPNESS]
    plain = {"embedder": {**embedder, "centre": False}, "examples": "both"}
    policies += [{**sharpness, **plain} for sharpness in SHARPNESS]
    measured = _measure_policies(study, "policy", policies, every=8)
    return _best(measured), {"embedders_on_validation": embedders, "policies_on_validation": measured}


def _embedder_policies(study: TokenRoutingStudy) -> Policies:
    """Policies that differ in the hidden states that routes are embedded by, and whether these are whitened."""
    embedders = [
        {"layers": layers, "whiten": whiten, "centre": True}
        for layers in range(study.sizes.layers + 1)
        for whiten in (False, True)
    ]
    return [{"temperature": 0.1, "embedder": embedder, "examples": "both"} for embedder in embedders]


def choose_window(study: TokenRoutingStudy, policy: Mapping[str, Any]) -> tuple[int, dict[str, dict[str, float]]]:
    """The number of last tokens in a route with the lowest log-perplexity of validation documents."""
    seed = study.seeds[0]
    runs = {
        window: study.mixture(
            f"window-{window}",
            study.experts(seed),
            seed,
            routing=document_routing(policy, window),
            part="validation",
            reads="documents",
        )
        for window in WINDOWS
    }
    measured = study.measure(runs.values(), "windows")
    metrics = {window: numbers_of(measured, run) for window, run in runs.items()}
    best = min(metrics, key=lambda window: metrics[window]["nll_document"])
    return best, {str(window): of_window for window, of_window in metrics.items()}


def document_routing(policy: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """A routing for documents without a prompt."""
    return {**policy, "every": 2, "prompt": "causal", "window": window}


def _measure_policies(study: TokenRoutingStudy, name: str, policies: Policies, *, every: int) -> Policies:
    """Policies with their metrics on validation questions. A quick run measures one in `every` of them."""
    policies = policies[::every] if study.options.quick else policies
    seed = study.seeds[0]
    runs = [
        study.mixture(
            f"{name}-{number}",
            study.experts(seed),
            seed,
            routing={**policy, "every": 2},
            part="validation",
            trace=True,
        )
        for number, policy in enumerate(policies)
    ]
    measured = study.measure(runs, f"{name} candidates")
    return [{**policy, **numbers_of(measured, run)} for run, policy in zip(runs, policies, strict=True)]


def _best(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The policy of the lowest log-perplexity, without its metrics."""
    best = min(measured, key=lambda policy: policy["nll_average"])
    return {key: value for key, value in best.items() if not key.startswith(("nll_", "routing_"))}


def choice_rows(study: TokenRoutingStudy) -> list[Row]:
    """Targets and learning rates on validation text: of experts at a quarter of the steps, and of X-LoRA's router."""
    seed = study.seeds[0]
    short = study.sizes.model_copy(update={"steps": max(1, study.sizes.steps // 4)})
    experts = {
        (name, rate, domain): study.mixture(
            f"try-{name}-{rate:g}-{domain}",
            [study.expert(domain, seed, prefix=f"short-{name}-{rate:g}", learning_rate=rate, targets=t, sizes=short)],
            seed,
            part="validation",
        )
        for name, t in TRIED_TARGETS.items()
        for rate in TRIED_RATES["expert"]
        for domain in DOMAINS
    }
    routers = {
        rate: study.mixture(
            f"try-xlora-{rate:g}",
            study.experts(seed),
            seed,
            mixture_kind="xlora",
            router_learning_rate=rate,
            part="validation",
        )
        for rate in TRIED_RATES["xlora"]
    }
    measured = study.measure([*experts.values(), *routers.values()], "choices")
    rows = []
    for name, rate in dict.fromkeys((name, rate) for name, rate, _ in experts):
        nlls = [numbers_of(measured, experts[name, rate, domain])[f"nll_{domain}"] for domain in DOMAINS]
        names = [f"nll_{domain}" for domain in DOMAINS]
        metrics: dict[str, Any] = dict(zip(names, nlls, strict=True)) | {"nll_average": mean(nlls)}
        rows.append(Row(id=f"try_{name}_{rate:g}", label=f"experts on {name}, rate {rate:g}", metrics=metrics))
    for rate, run in routers.items():
        rows.append(
            Row(id=f"try_xlora_{rate:g}", label=f"X-LoRA, rate {rate:g}", metrics=dict(numbers_of(measured, run)))
        )
    return rows
