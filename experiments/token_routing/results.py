"""What stands beside the measured rows: labels, aims, the paper's figures, plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.study import bars
from experiments.token_routing.measure import Documents
from experiments.token_routing.texts import DOMAINS
from graftlm.evaluation import Aim, PaperRow, Row, value_of
from graftlm.evaluation.plots import PALETTE

INTERVALS = (1, 2, 3, 4)  # k: routes are renewed every k tokens
SHOWN_TOKENS = 48
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
# Percentage of right answers, graded by hand, on 15 questions of each task. The paper's "Specialized" is each task's
# own expert; its "Token-level Adaptation (k)" renews the route every k tokens.
_PAPER_COLUMNS = ("accuracy_average", "accuracy_arc", "accuracy_gsm8k", "accuracy_codealpaca", "accuracy_squad")
PAPER_TABLE_1 = {
    "base": (16.7, 33.3, 0.00, 6.67, 26.7),
    "oracle": (40.0, 26.7, 26.7, 26.7, 80.0),
    "paper_k1": (36.7, 53.3, 6.67, 46.7, 40.0),
    "paper_k2": (48.3, 73.3, 6.67, 53.3, 60.0),
    "paper_k3": (38.3, 66.7, 20.0, 13.3, 53.3),
    "paper_k4": (36.6, 53.3, 6.67, 13.3, 73.3),
}


def paper_rows() -> list[PaperRow]:
    """Every published figure. Our measures and model differ, so that only the order of the rows can be compared."""
    return [
        PaperRow(id=name, metrics=dict(zip(_PAPER_COLUMNS, values, strict=True)), where="Table 1")
        for name, values in PAPER_TABLE_1.items()
    ]


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The aims of the measured tables."""
    metrics = {row.id: {name: value_of(metric) for name, metric in row.metrics.items()} for row in rows}
    table_1 = _aims_of_table_1(metrics) if "routed_k2" in metrics else []
    return table_1 + (_aims_of_switch(metrics) if "switch_routed" in metrics else [])


def _aims_of_table_1(metrics: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    routed = metrics["routed_k2"]
    limits = {"oracle": 1.02, "uniform": 1.0, "base": 1.0, "paper_k2": 1.0, "arrow": 1.0, "xlora": 1.0}
    ratios = [
        _aim_below(
            f"log-perplexity at k = 2 over that of: {LABELS[other]}",
            "nll_average",
            limit,
            routed["nll_average"] / metrics[other]["nll_average"],
        )
        for other, limit in limits.items()
    ]
    text, fraction = "prompts with the right expert", routed["routing_accuracy"]
    return [*ratios, Aim(text=text, metric="routing_accuracy", aim=0.95, measured=fraction, met=fraction >= 0.95)]


def _aims_of_switch(metrics: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    routed = metrics["switch_routed"]
    single = min(metrics[f"switch_expert_{domain}"]["nll_document"] for domain in DOMAINS)
    text = "changing documents: log-perplexity over the best single expert's"
    tokens = "changing documents: tokens until the route has switched, median"
    return [
        _aim_below(text, "nll_document", 1.0, routed["nll_document"] / single),
        _aim_below(tokens, "switch_tokens", 32, routed["switch_tokens"]),
    ]


def _aim_below(text: str, metric: str, aim: float, value: float) -> Aim:
    """An upper limit. A ratio to another row, whose aim is 1, must stay below it; other values may reach it."""
    return Aim(text=text, metric=metric, aim=aim, measured=value, met=value < aim or (aim != 1 and value == aim))


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
        positions, means = _weights_around_boundary(of_row["documents"])
        for index, name in enumerate(of_row["names"]):
            axes.plot(positions, means[:, index], color=PALETTE[index], linewidth=1.8, label=f"{name} expert")
        axes.axvline(0, color="#222222", linewidth=0.9)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_ylabel("weight")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens from the boundary: code before it, prose behind it")
    panels[0].legend(loc="center left", frameon=False, fontsize=9)
    return figure


def _weights_around_boundary(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Positions relative to the boundary, and the mean weights there; every document reaches so far."""
    reach = [min(document["first"], len(document["weights"]) - document["first"]) for document in documents]
    cut = min(SHOWN_TOKENS, *reach)
    spans = [np.array(d["weights"])[d["first"] - cut : d["first"] + cut] for d in documents]
    return np.arange(-cut, cut), np.mean(spans, axis=0)
