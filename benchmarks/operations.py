"""What grafts add to the host's work in a decode step: ATen operations, and the time of hooks and operations.

    python benchmarks/operations.py --out DIR [--quick] [--clock wall|cpu]

A decode step on an accelerator waits for the host, which is why the sizes of tensors do not matter here: the models
have the layers and heads of Llama-3.2-1B, but narrow ones, so that the time of a step is nearly all of it time of
Python and of the dispatch of operations. Counts are exact. Times are the smallest of many rounds, in which the grafted
models and the bare one take turns; on a busy machine they are rough all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from routed import random_words, word_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from turns import AT_MOST, Clock, Turns, command, made_aim, rounds, seconds

from graftlm.backbone import Backbone
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.grafts.base import FitsOnText
from graftlm.grafts.composition import Composition, CompositionConfig
from graftlm.testing.operations import Decoding, decode_operations

NAME = "bench-operations"
CPU = torch.device("cpu")
MEMORY = {"kind": "memory", "window": 64, "heads": 2, "head_width": 8}
TASKS = {"topics": {"type": "classification", "labels": ["sport", "politics"]}}
IN_PAPER = ("q_proj", "v_proj")  # the modules that experts change in the paper of token routing
EVERYWHERE = ("attention", "ffn")


@dataclass(frozen=True)
class Size:
    """The sizes of the models and of the work.

    Args:
        layers: number of layers, in the augmenting model of a composition as well.
        heads: number of attention heads, of which four share keys and values.
        width: width of the hidden states.
        vocabulary: number of tokens.
        context: number of tokens before the first counted step.
        rounds: rounds of the measurement, in each of which every model reads one token.
    """

    layers: int = 16
    heads: int = 32
    width: int = 128
    vocabulary: int = 512
    context: int = 16
    rounds: int = 120


SIZE = Size()
QUICK = replace(SIZE, layers=4, rounds=3)
ROWS = {
    "neutral_residues": "neutral residues with open gates",
    "adapter": "plain adapters",
    "lora": "LoRA of PEFT on the FFN",
    "routing_1": "one routed expert on q_proj and v_proj",
    "routing_4": "four routed experts on q_proj and v_proj",
    "routing_4_everywhere": "four routed experts on all seven matrices",
    "composition": "a composition with four pairs of layers, over both parents",
    "memory": "a memory with two states",
    "llama_pro": "one block of LLaMA Pro",
}
AIMS = {
    "neutral_residues": (AT_MOST, 1.3),
    "adapter": (AT_MOST, 1.3),
    "routing_4": (AT_MOST, 1.4),
    "composition": (AT_MOST, 1.15),
}
BEFORE = {
    "neutral_residues": 1.2864,
    "adapter": 1.1644,
    "lora": 1.4085,
    "routing_1": 1.3958,
    "routing_4": 1.4534,
    "routing_4_everywhere": 2.2669,
    "composition": 1.1462,
    "memory": 1.3059,
    "llama_pro": 1.0627,
}
"""The ratio of operations in commit 50d6bfc1, before operations were saved."""


class Models:
    """Bare and grafted models, and the text that they read.

    Args:
        size: sizes of the models.
    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self._tokenizer = word_tokenizer(size.vocabulary)
        generator = torch.Generator().manual_seed(0)
        self.prompt: Tensor = torch.randint(2, size.vocabulary, (1, size.context), generator=generator)

    def backbone(self, seed: int = 0) -> Backbone:
        """Return a new random backbone."""
        size = self._size
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=4 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 4,
            tie_word_embeddings=True,
            eos_token_id=None,
        )
        return Backbone.wrap(LlamaForCausalLM(config).eval(), self._tokenizer, name="a random Llama")

    def grafted(self, row: str) -> PreTrainedModel:
        """Return a new backbone with the graft of a row."""
        backbone = self.backbone()
        torch.manual_seed(1)
        graft = self._graft(row, backbone)
        return GraftedModel(backbone, {"graft": graft}).eval().model

    def _graft(self, row: str, backbone: Backbone) -> Graft:
        if row == "composition":
            config = CompositionConfig.parse({"augmenting": {"specialist": {"name": "in memory"}}})
            return Composition(config, backbone, augmenting={"specialist": self.backbone(seed=1)})
        graft = build_graft(graft_config(self._configs()[row]), backbone)
        if isinstance(graft, FitsOnText):
            graft.fit({})
        return graft

    def _configs(self) -> dict[str, dict[str, Any]]:
        return {
            "neutral_residues": {"kind": "neutral-residues", "gate_init": "open"},
            "adapter": {"kind": "adapter"},
            "lora": {"kind": "lora", "capacity": 0.1},
            "routing_1": self._routing(1, IN_PAPER),
            "routing_4": self._routing(4, IN_PAPER),
            "routing_4_everywhere": self._routing(4, EVERYWHERE),
            "memory": MEMORY,
            "llama_pro": {"kind": "llama-pro", "blocks": 1},
        }

    def _routing(self, count: int, targets: tuple[str, ...]) -> dict[str, Any]:
        experts = {}
        for number in range(count):
            text = random_words(number, self._size.vocabulary)
            experts[f"expert{number}"] = {"rank": 4, "targets": list(targets), "texts": [text]}
        return {"kind": "token-routing", "experts": experts}


def turn(models: list[PreTrainedModel], prompt: Tensor, clock: Clock) -> Callable[[], float]:
    """Return a function that measures the seconds of a decode step in which each model reads a token."""
    decodings = [Decoding(model, prompt) for model in models]

    def step() -> None:
        for decoding in decodings:
            decoding.step(prompt[:, -1:])

    return partial(seconds, step, CPU, clock)


def benchmark(size: Size, clock: Clock, *, judged: bool) -> Results:
    """Measure all rows, and judge the aims if the sizes are those for which they were set."""
    models = Models(size)
    bare = models.backbone().model
    other = models.backbone(seed=1).model
    grafted = {row: models.grafted(row) for row in ROWS}
    parents = {row: [bare, other] if row == "composition" else [bare] for row in ROWS}
    counts = {row: decode_operations([grafted[row]], models.prompt).total() for row in ROWS}
    bare_counts = {row: decode_operations(parents[row], models.prompt).total() for row in ROWS}
    work = {row: [grafted[row]] for row in ROWS} | {"bare": [bare], "parents": [bare, other]}
    turns = {name: turn(chosen, models.prompt, clock) for name, chosen in work.items()}
    measured = rounds(turns, size.rounds)
    rows = []
    for row, label in ROWS.items():
        baseline = "parents" if row == "composition" else "bare"
        metrics: dict[str, Any] = {
            "operations_ratio": counts[row] / bare_counts[row],
            "python_us_per_layer": added_time(measured, row, baseline) / size.layers,
        }
        if judged:
            metrics["operations_ratio_before"] = BEFORE[row]
        rows.append(Row(id=row, label=label, metrics=metrics))
    details = {
        "size": asdict(size),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "operations": counts,
        "operations_of_bare_models": bare_counts,
        "microseconds_of_a_step": {name: 1e6 * min(values) for name, values in measured.items()},
    }
    return Results.here(NAME, rows, aims=judge(rows, judged=judged), details=details)


def added_time(measured: Turns, row: str, baseline: str) -> float:
    """Return the microseconds that a graft adds to the fastest step."""
    return 1e6 * (min(measured[row]) - min(measured[baseline]))


def judge(rows: list[Row], *, judged: bool) -> list[Aim]:
    """Return the aims of the operations."""
    by_id: Mapping[str, Row] = {row.id: row for row in rows}
    aims = []
    for row, aim in AIMS.items():
        measured = value_of(by_id[row].metrics["operations_ratio"]) if judged else None
        aims.append(made_aim(f"operations with {ROWS[row]}", "operations_ratio", aim, measured))
    return aims


def draw(results: Results) -> dict[str, Figure]:
    """Return a plot of the ratios of operations, with a tick at each aim."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    shown = list(reversed(results.rows))
    for position, row in enumerate(shown):
        axes.plot(value_of(row.metrics["operations_ratio"]), position, "o", color="#0072B2")
        if row.id in AIMS:
            axes.plot(AIMS[row.id][1], position, "|", color="#D55E00", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(shown)), [row.id for row in shown])
    axes.set_xlabel("operations of a decode step, over the bare model's; tick: aim")
    return {"operations": figure}


if __name__ == "__main__":
    command(
        NAME,
        "What grafts add to the host's work in a decode step.",
        lambda quick, device, clock: benchmark(QUICK if quick else SIZE, clock, judged=not quick),
        draw,
        options=("clock",),
    )
