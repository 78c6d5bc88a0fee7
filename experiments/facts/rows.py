"""The rows of the experiment: what each one trains, on which old text, and how answers follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.protocol import Comparison
from graftlm.runs.graft_recipe import Recipe

OldText = Literal["", "own", "near"]

LORA = {"kind": "lora", "capacity": 0.1, "scale": 2.0}
ADAPTER = {"kind": "adapter", "capacity": 0.1}
NEUTRAL = {"kind": "neutral-residues", "capacity": 0.1, "init": "he"}
GATED = {**NEUTRAL, "alpha": 10.0}
UNGATED = {**NEUTRAL, "gate": "none", "local_loss": "l1", "alpha": 10.0}
GATE_ONLY = {**NEUTRAL, "alpha": 0.0}
DEFAULT_RECIPE = Path(__file__).parents[2] / "examples" / "teach-facts.yaml"
"""The recipe of the row `routed`: a LoRA expert that acts where the prompt has a rare word of the conversations."""
DEFAULT = Recipe.from_yaml(DEFAULT_RECIPE)

LORA_RATES = (5e-4, 1e-3, 2e-3)
ADAPTER_RATES = (2e-3, 4e-3, 8e-3)
NEUTRAL_RATES = (3e-3, 6e-3, 1.2e-2)
FINETUNE_RATES = (2e-5, 5e-5, 1e-4)


class FactsRow(NamedTuple):
    """A row with a graft.

    Attributes:
        label: label of the row.
        graft: config of its graft.
        rates: learning rates with which the search begins; none to take that of the default recipe, without a search.
        old: the old text: none, own text, or own text near the new.
        objective: how old text is learned.
        shared_with: another row whose runs it shares.
        by_recipe: whether it has the batches and passes of the default recipe.
        searched_by: what its search maximizes: facts right and answers kept (`both`), or only facts right (`learned`).
    """

    label: str
    graft: Mapping[str, Any]
    rates: tuple[float, ...]
    old: OldText = ""
    objective: Literal["replay", "distil"] = "distil"
    searched_by: Literal["both", "learned"] = "both"
    shared_with: str = ""
    by_recipe: bool = False


def _graft_of(recipe: Recipe) -> dict[str, Any]:
    assert recipe.graft is not None, "the recipe trains one graft"
    return recipe.graft.model_dump(mode="json")


TRAINED = {
    "finetune": FactsRow("fine-tuning", {"kind": "finetune", "embeddings": False}, FINETUNE_RATES),
    "lora": FactsRow("LoRA", LORA, LORA_RATES),
    "lora-learned": FactsRow(
        "LoRA, the rate of most facts right", LORA, LORA_RATES, searched_by="learned", shared_with="lora"
    ),
    "adapter": FactsRow("adapters", ADAPTER, ADAPTER_RATES),
    "neutral": FactsRow("neutral residues", GATE_ONLY, NEUTRAL_RATES),
    "lora-own": FactsRow("LoRA, own text", LORA, LORA_RATES, "own"),
    "adapter-own": FactsRow("adapters, own text", ADAPTER, ADAPTER_RATES, "own"),
    "neutral-own": FactsRow("neutral residues, own text", GATED, NEUTRAL_RATES, "own"),
    "finetune-near": FactsRow(
        "fine-tuning, near own text", {"kind": "finetune", "embeddings": False}, FINETUNE_RATES, "near"
    ),
    "lora-near": FactsRow("LoRA, near own text", LORA, LORA_RATES, "near"),
    "lora-near-replay": FactsRow("LoRA, near own text replayed", LORA, LORA_RATES, "near", "replay"),
    "adapter-near": FactsRow("adapters, near own text", ADAPTER, ADAPTER_RATES, "near"),
    "neutral-near": FactsRow("neutral residues, near own text", GATED, NEUTRAL_RATES, "near"),
    "neutral-near-ungated": FactsRow("local loss without gate, near own text", UNGATED, NEUTRAL_RATES, "near"),
    "neutral-near-gate-only": FactsRow("gate without local loss, near own text", GATE_ONLY, NEUTRAL_RATES, "near"),
    "routed": FactsRow("LoRA where the prompt has a taught word", _graft_of(DEFAULT), LORA_RATES, by_recipe=True),
    "default": FactsRow(
        "the recipe as it is, with its rate", _graft_of(DEFAULT), (), shared_with="routed", by_recipe=True
    ),
}
PROMPTED = {
    "prompt": "all facts in the prompt",
    "retrieval": "the three nearest facts in the prompt",
}
UNTRAINED = {
    "routed-majority": "the most frequent answer of the relation where the prompt has a taught word",
    "routed-lookup": "answer of the nearest taught question where the prompt has a taught word",
    "routed-retrieval": "the three nearest facts in the prompt where it has a taught word",
}
# Rows that follow from another row's run, with its weights scaled back.
SCALED = {"lora-scaled": "lora"}
SCALED_LABELS = {"lora-scaled": "LoRA scaled back"}
STRENGTHS = (0.8, 0.6)
"""Strengths of the scaled rows. The search chooses one of them."""

SEARCH_SEED = 100
"""The seed of the facts of the search."""
CONFIRMATION_SEEDS = (3, 4, 5)
"""The seeds of the declared comparisons. No row was measured with them before the comparisons were declared."""
SEEN_SEEDS = frozenset([0, 1, 2])
"""Seeds whose results were known when comparisons, rows, questions and rules were chosen."""

MAIN = (
    "prompt",
    "retrieval",
    "routed-majority",
    "routed-lookup",
    "routed-retrieval",
    "lora",
    "lora-learned",
    "lora-own",
    "lora-near",
    "neutral-near",
    "neutral-near-ungated",
    "routed",
)
"""The rows of 120 facts, declared before the run except `routed-majority`, which is in no comparison."""

LARGE = ("lora", "routed")
"""The rows of 1,000 facts."""

OF_PAGES = ("retrieval", "routed-lookup", "routed-retrieval", "routed")
"""The rows of facts of real pages."""

DECLARED = (
    Comparison("routed", "lora", "locality_near"),
    Comparison("routed", "lora-learned", "generalization", margin=0.05),
    Comparison("routed", "routed-lookup", "generalization"),
    Comparison("routed", "routed-retrieval", "generalization"),
    Comparison("lora-near", "lora-own", "locality_near"),
    Comparison("neutral-near", "neutral-near-ungated", "locality_near"),
    Comparison("neutral-near", "neutral-near-ungated", "generalization", margin=0.05),
    Comparison("neutral-near", "lora-near", "locality_near"),
    Comparison("neutral-near", "lora-near", "generalization", margin=0.05),
)
"""The primary comparisons, which the README lists. They hold for the seeds of the confirmation."""

COMPARED_ON_PAGES = (Comparison("routed", "routed-lookup", "generalization"),)
"""The comparison on facts of real pages, chosen after the run."""

AIMS = {"generalization": 0.9, "locality_near": 0.95, "locality_far": 0.97}
MAX_SPILL = 0.01
MAX_SECONDS = 1200.0

EVERY_ROW = (*PROMPTED, *UNTRAINED, *TRAINED, *SCALED)


def amended(seeds: Collection[int]) -> str:
    """Return why the declared comparisons decide nothing for some seeds; empty if they were declared before."""
    seen = sorted(SEEN_SEEDS.intersection(seeds))
    if not seen:
        return ""
    numbers = ", ".join(str(seed) for seed in seen)
    return f"comparisons, rows and rules were changed after results of seeds {numbers}"


def label_of(name: str) -> str:
    """Return the label of a row."""
    if name in TRAINED:
        return TRAINED[name].label
    return {**PROMPTED, **UNTRAINED, **SCALED_LABELS}[name]


def trained_rows(names: tuple[str, ...]) -> list[str]:
    """Return the rows to train for some rows, in order: those among them, and those that others follow from."""
    needed = {SCALED.get(name, name) for name in names}
    return [name for name in TRAINED if name in needed]
