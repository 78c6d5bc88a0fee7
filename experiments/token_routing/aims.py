"""What rows are called, and what the issue asks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.token_routing.texts import DOMAINS
from graftlm.evaluation import Aim, Row, value_of

EVERY = (1, 2, 3, 4)
LABELS = {
    "base": "backbone",
    **{f"expert_{domain}": f"{domain} expert everywhere" for domain in DOMAINS},
    "uniform": "uniform mixture",
    "oracle": "each domain's own expert",
    **{f"routed_k{k}": f"routed, k = {k}" for k in EVERY},
    **{f"paper_k{k}": f"the paper's weighting, k = {k}" for k in EVERY},
    "linear_k2": "routed, k = 2, factors summed as published",
    "prompt_only": "routed by the prompt alone",
    "xlora": "X-LoRA (PEFT)",
    "arrow": "Arrow (PEFT)",
    "switch_routed": "documents: routed by the last tokens",
    "switch_routed_all": "documents: routed by all text so far",
    "switch_by_hand": "documents: the right expert for each half",
    "switch_base": "documents: backbone",
    **{f"switch_expert_{domain}": f"documents: {domain} expert" for domain in DOMAINS},
    **{f"cache_k{k}": f"keys and values kept or made again, k = {k}" for k in EVERY},
    "cache_documents": "documents: keys and values kept or made again",
}
# The paper's weighting by the paper's embedder, which reads all text again: for `--table minilm`.
MINI_LM = {"minilm_k2": "the paper's weighting and embedder, k = 2"}


def aims(rows: Sequence[Row]) -> list[Aim]:
    """What the issue asks of the rows at hand."""
    found = {row.id: {name: value_of(metric) for name, metric in row.metrics.items()} for row in rows}
    of_table = _of_table_1(found) if "routed_k2" in found else []
    return of_table + (_of_switch(found) if "switch_routed" in found else [])


def _of_table_1(found: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    ours = found["routed_k2"]
    limits = {"oracle": 1.02, "uniform": 1.0, "base": 1.0, "paper_k2": 1.0, "arrow": 1.0, "xlora": 1.0}
    ratios = {other: ours["nll_average"] / found[other]["nll_average"] for other in limits}
    made = [
        _under(f"log-perplexity at k = 2 over that of: {LABELS[other]}", "nll_average", limits[other], ratio)
        for other, ratio in ratios.items()
    ]
    text, share = "prompts with the right expert", ours["routing_accuracy"]
    return [*made, Aim(text=text, metric="routing_accuracy", aim=0.95, measured=share, met=share >= 0.95)]


def _of_switch(found: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    ours = found["switch_routed"]
    single = min(found[f"switch_expert_{domain}"]["nll_document"] for domain in DOMAINS)
    text, ratio = "changing documents: log-perplexity over the best single expert's", ours["nll_document"] / single
    tokens = "changing documents: tokens until the route has switched, median"
    return [
        _under(text, "nll_document", 1.0, ratio),
        _under(tokens, "switch_tokens", 32, ours["switch_tokens"]),
    ]


def _under(text: str, metric: str, aim: float, value: float) -> Aim:
    """An aim to stay below; at it is enough but where it says to be better than another row."""
    return Aim(text=text, metric=metric, aim=aim, measured=value, met=value < aim or (aim != 1 and value == aim))
