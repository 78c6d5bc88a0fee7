"""Memory and time by arithmetic, and what a server does by its benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.generate.markdown import table
from graftlm.grafted.chunked_losses import OTHER_CHUNK_BYTES

ROOT = Path(__file__).parents[2]
GB = 1e9
# NVIDIA's data sheets: dense bfloat16 operations of either card, and bytes of memory traffic, per second.
PEAK_FLOPS = 989e12
BANDWIDTHS = {"H100 (SXM)": 3350 * GB, "H200": 4800 * GB}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like backbone; `kv_width` is the width of all key-value heads together."""

    name: str
    layers: int
    width: int
    ffn_width: int
    kv_width: int
    vocabulary: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Number of parameters: embedding, output layer, and per layer attention, FFN and two norms."""
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        attention = 2 * self.width * (self.width + self.kv_width)
        layer = attention + 3 * self.width * self.ffn_width + 2 * self.width
        return embeddings + self.layers * layer + self.width

    def saved_activations(self, graft_parameters: int) -> float:
        """Return the numbers that are saved for the backward pass per token.

        The backbone is frozen. Gated adapters act in parallel to the FFN of every layer, and all gates are open.
        The attention and the FFN of the first layer need no gradient. Of the logits, the gradient of the last hidden
        states is saved.
        """
        layer = 3 * self.ffn_width + 5 * self.width + 2 * self.kv_width
        adapters = 4 * graft_parameters / (3 * self.width)  # 4 w per layer; the graft has 3 d w parameters per layer
        return (self.layers - 1) * layer + 3 * self.width + adapters


SHAPES = (
    Shape("0.1B (SmolLM2-135M)", 30, 576, 1536, 192, 49_152, True),
    Shape("0.5B (Qwen2.5-0.5B)", 24, 896, 4864, 128, 151_936, True),
    Shape("1B (Llama-3.2-1B)", 16, 2048, 8192, 512, 128_256, True),
    Shape("3B (Llama-3.2-3B)", 28, 3072, 8192, 1024, 128_256, True),
    Shape("8B (Llama-3.1-8B)", 32, 4096, 14_336, 1024, 128_256, False),
)


@dataclass(frozen=True)
class Requirements:
    """Memory in bytes and time in seconds of one graft on one backbone."""

    backbone: float
    graft_training: float
    activations: float
    graft: float
    cache: float
    products: float
    flops_per_token: float

    @property
    def training(self) -> float:
        """Bytes of weights, optimizer state and saved activations."""
        return self.backbone + self.graft_training + self.activations

    @property
    def serving(self) -> float:
        """Bytes of weights and cache."""
        return self.backbone + self.graft + self.cache

    def decode_rate(self, bandwidth: float) -> float:
        """Return the upper bound of tokens per second of one row: each token reads the weights of all products once."""
        return bandwidth / (self.products + self.graft)


def requirements(
    shape: Shape, *, capacity: float = 0.2, tokens: int = 2048, context: int = 4096, number: int = 2
) -> Requirements:
    """Compute what one graft needs.

    Args:
        shape: The backbone.
        capacity: Parameters of the graft divided by those of the backbone.
        tokens: Tokens of one forward pass in training: rows of a micro-batch times their length.
        context: Tokens in the cache of one row in serving.
        number: Bytes of a number of the backbone and of the activations; in training the graft has 4.
    """
    backbone = shape.parameters
    graft = capacity * backbone
    products = backbone if shape.tied else backbone - shape.vocabulary * shape.width  # without the lookup of embeddings
    chunk = 3 * OTHER_CHUNK_BYTES  # logits of a chunk, their logarithms and their gradient
    return Requirements(
        backbone=number * backbone,
        graft_training=16 * graft,  # float32: weight, gradient and two moments of AdamW
        activations=tokens * number * shape.saved_activations(int(graft)) + chunk,
        graft=number * graft,  # as it is served
        cache=context * number * 2 * shape.layers * shape.kv_width,
        products=number * products,
        flops_per_token=4 * products + 6 * graft,
    )


def memory(arguments: str, page: Path) -> str:
    """Return the memory of each shape."""
    head = ["backbone", "weights", "graft in training", "activations", "training, sum", "cache", "serving, sum"]
    rows = []
    for shape in SHAPES:
        needs = requirements(shape)
        sizes = [
            needs.backbone,
            needs.graft_training,
            needs.activations,
            needs.training,
            needs.cache,
            needs.serving,
        ]
        rows.append([shape.name, *(f"{size / GB:.1f}" for size in sizes)])
    return table(head, rows)


def time(arguments: str, page: Path) -> str:
    """Return upper bounds of the speeds of each shape on two accelerators, from counted operations and bytes."""
    head = ["backbone", "training, either card", *(f"decoding a row, {name}" for name in BANDWIDTHS)]
    rows = []
    for shape in SHAPES:
        needs = requirements(shape)
        rates = [PEAK_FLOPS / needs.flops_per_token]
        rates += [needs.decode_rate(bandwidth) for bandwidth in BANDWIDTHS.values()]
        rows.append([shape.name, *(f"{_two_digits(rate):,}" for rate in rates)])
    return table(head, rows)


def _two_digits(number: float) -> int:
    return int(float(f"{number:.1e}"))


@dataclass(frozen=True)
class ServingRates:
    """What one replica did in the benchmark `serving`.

    Attributes:
        alone: Tokens per second that it writes for one client.
        batch: Tokens per second that it writes for 16 clients together.
        prompt: Tokens per second of a prompt that it reads for the first time.
        known: Seconds to the first token of a prompt of which 1,000 tokens are in the prefix cache.
        grafts: Rate with four grafts in one batch divided by the rate with one.
    """

    alone: float
    batch: float
    prompt: float
    known: float
    grafts: float

    def seconds(self, prompt: int, answer: int, *, is_known: bool = False) -> float:
        """Return the seconds of a replica that a request takes."""
        reading = self.known if is_known else prompt / self.prompt
        return reading + answer / self.batch


def serving_rates(results: Mapping[str, Any]) -> ServingRates:
    """Return the rates in a `results.json` of the benchmark."""
    means = {}
    for row in results["rows"]:
        means[row["id"]] = {name: metric["mean"] for name, metric in row["metrics"].items()}
    prefix = means["prefix_1000"]
    return ServingRates(
        alone=means["clients_1"]["tokens_per_s"],
        batch=means["clients_16"]["tokens_per_s"],
        prompt=(results["details"]["size"]["prefix"] + 20) / prefix["first_s"],  # 20 tokens follow the prefix
        known=prefix["second_s"],
        grafts=means["mixed_grafts_4"]["ratio"],
    )


def sizing(arguments: str, page: Path) -> str:
    """Return what a server of SmolLM2 needs and does."""
    path = ROOT / "benchmarks" / "results" / "serving" / "results.json"
    rates = serving_rates(json.loads(path.read_text(encoding="utf-8")))
    shape = SHAPES[0]
    token = requirements(shape, context=1).cache
    new = rates.seconds(1000, 200)
    known = rates.seconds(1000, 200, is_known=True)
    rows = [
        ["weights", f"{requirements(shape).backbone / GB:.2f} GB"],
        ["keys and values of a token", f"{token / 1e3:.1f} kB"],
        ["reading new prompts", f"{rates.prompt:,.0f} tokens/s"],
        ["first token after 1,000 cached tokens", f"{rates.known:.2f} s"],
        ["answers, one client", f"{rates.alone:.0f} tokens/s"],
        ["answers, 16 clients together", f"{rates.batch:.0f} tokens/s"],
        ["the same with four grafts, relative to one", f"{rates.grafts:.2f}"],
        ["a request of 1,000 new and 200 answer tokens", f"{new:.1f} s of a replica"],
        ["the same with a cached prompt", f"{known:.1f} s of a replica"],
        ["replicas for 5 such requests per second", f"{_replicas(5, new)}, or {_replicas(5, known)} if cached"],
    ]
    return table(["SmolLM2-135M in bfloat16, two CPU cores", ""], rows)


def _replicas(rate: float, seconds: float) -> int:
    """Return the replicas that are busy for 70% of the time."""
    return math.ceil(rate * seconds / 0.7)
