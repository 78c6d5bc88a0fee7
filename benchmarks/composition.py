"""The cost of a composition against its two parents: decoding, generation, training, memory.

    python benchmarks/composition.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

Both sides of a ratio run in one process, in rounds of alternating order, so that other load affects both.
A row's `ratio` is the median over rounds; its interval is the smallest and the largest. Anchor and augmenting model are
random Llamas, and the parents are copies of them without a graft.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from pair import QUICK, Pair, Reader, Size, bytes_of, count, random_ids, weight_bytes
from torch import nn
from turns import AT_MOST, Clock, Turns, command, interval, made_aim, rounds

from graftlm.backbone import Site, Tap
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.grafts import Graft, GraftedModel
from graftlm.training import TrainingConfig
from graftlm.training.loop import make_optimizer

NAME = "bench-composition"
LENGTHS = (128, 256, 512, 1024)
ROWS: dict[str, tuple[str, tuple[str, float] | None]] = {  # row id -> label, aim
    "decode_step": ("a decode step, over the sum of both parents'", (AT_MOST, 1.1)),
    **{f"recompute_{n}": (f"a token behind {n} recomputed, over one with the cache", None) for n in LENGTHS},
    "train_step": ("a training step, over both parents' forward and the anchor's backward", None),
    "memory": ("weights and caches, over the sum of both parents'", None),
}
HOW = {
    "decode_step": "seconds of a forward pass of one token behind a cached context; each parent has its own cache and "
    "output layer. bound: weights read by a composed step (without the augmenting model's output layer) over those "
    "read by both parents",
    "recompute_N": "one sequence: a pass of one token behind N tokens in the cache, and a pass of both models over all "
    "N + 1 tokens without a cache, as in the public code; the output layer reads the last token alone",
    "train_step": "composed: forward, loss, backward and AdamW of the composition's parameters. bound: forward of the "
    "augmenting model without gradient or output layer, forward and loss of the anchor, and its backward with a "
    "trainable vector added behind the first paired layer, which sends gradients through all activations from there on",
    "memory": "exact bytes of weights, and of keys and values after prompt and new tokens of the generation, without "
    "the activations of a pass; training: bytes of gradients and AdamW's moments come on top",
}


def measure_decoding(pair: Pair, size: Size) -> tuple[Turns, dict[str, Any]]:
    """Seconds of a decode step of `composed`, `anchor` and `augmenting`; the cache is cropped after each."""
    ids = random_ids(size, 1, size.context, pair.composed.device)

    def decode(reader: Reader) -> float:
        step_seconds = pair.seconds(lambda: reader.step(ids[:, :1], size.steps)) / size.steps
        reader.cache.crop(-size.steps)
        return step_seconds

    readers = {name: Reader(model, ids) for name, model in pair.models.items()}
    turns = {name: lambda reader=reader: decode(reader) for name, reader in readers.items()}
    return rounds(turns, size.decode_rounds), {"bound": weight_bound(pair)}


def weight_bound(pair: Pair) -> float:
    """The ratio of decode steps whose time is that of reading the weights."""
    parents = count(pair.anchor.model) + count(pair.augmenting.model)
    unread = count(pair.augmenting.model.get_input_embeddings())  # tied to the output layer
    return (parents - unread + count(pair.graft)) / parents


def measure_recomputing(pair: Pair, size: Size, length: int) -> Turns:
    """Seconds of a token behind `length` others: `cached`, and `recomputed` without a cache."""
    ids = random_ids(size, 1, length + 1, pair.composed.device)
    reader = Reader(pair.composed.model, ids[:, :length])

    def cached() -> float:
        step_seconds = pair.seconds(lambda: reader.step(ids[:, length:], size.steps)) / size.steps
        reader.cache.crop(-size.steps)
        return step_seconds

    @torch.inference_mode()
    def recompute() -> None:
        pair.composed.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)

    return rounds({"cached": cached, "recomputed": lambda: pair.seconds(recompute)}, size.recompute_rounds)


class TrainableVector(Graft):
    """A trainable vector after one layer: the smallest graft whose backward pass reaches that layer."""

    def __init__(self, layer: int, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.vector = nn.Parameter(torch.zeros(width))

    def taps(self) -> list[Tap]:
        """The vector is added to the layer's output."""
        return [
            Tap(Site("layer", self.layer), "after", "add", lambda call, inputs, outputs: self.vector.expand_as(outputs))
        ]


def measure_training(pair: Pair, size: Size) -> tuple[Turns, dict[str, Any]]:
    """Seconds of a `composed` training step, and of its `bound`."""
    device = pair.composed.device
    ids = random_ids(size, size.rows, size.length, device)
    optimiser = make_optimizer(pair.composed.trainable_parameters(), TrainingConfig(steps=1, learning_rate=1e-4))
    first = min(layer for _, layer in pair.pairs)
    vector = TrainableVector(first, pair.anchor.sites.width).to(device, pair.anchor.model.dtype)

    def step() -> None:
        pair.composed(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    def lower_bound() -> None:
        with torch.no_grad():
            pair.augmenting.model.base_model(input_ids=ids, use_cache=False)
        bounding(ids, labels=ids).loss.backward()
        bounding.zero_grad()

    pair.composed.train()
    with GraftedModel(pair.anchor, {"vector": vector}).train() as bounding:
        turns = {"composed": lambda: pair.seconds(step), "bound": lambda: pair.seconds(lower_bound)}
        measured = rounds(turns, size.train_rounds)
    pair.composed.eval()
    return measured, {"first_paired_layer": first}


@torch.inference_mode()
def measure_memory(pair: Pair, size: Size) -> dict[str, dict[str, int]]:
    """Bytes of weights and of caches at the end of a generation, composed and of both parents."""
    ids = random_ids(size, 1, size.prompt + size.new_tokens, pair.composed.device)

    def of_cache(model: Any) -> int:
        layers: list[Any] = Reader(model, ids).cache.layers
        return sum(bytes_of(layer.keys) + bytes_of(layer.values) for layer in layers)

    caches = {name: of_cache(model) for name, model in pair.models.items()}
    weights = {name: weight_bytes(pair.models[name]) for name in ("anchor", "augmenting")}
    added = weight_bytes(pair.graft)
    return {
        "composed": {"weights": sum(weights.values()) + added, "caches": caches["composed"]},
        "parents": {"weights": sum(weights.values()), "caches": caches["anchor"] + caches["augmenting"]},
        "training": {"gradients": added, "moments": 2 * added},
    }


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """All rows, with their aims and details."""
    load = [os.getloadavg()[0]]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pair = Pair(size, device, dtype, clock)
    decoding, of_decoding = measure_decoding(pair, size)
    parents = [a + b for a, b in zip(decoding["anchor"], decoding["augmenting"], strict=True)]
    measured = {"decode_step": ratio_row("decode_step", decoding["composed"], parents)}
    memory = measure_memory(pair, size)
    composed, both = (float(sum(memory[side].values())) for side in ("composed", "parents"))
    training, of_training = measure_training(pair, size)
    measured["train_step"] = ratio_row("train_step", training["composed"], training["bound"])
    recomputing = {}
    for name, length in zip((name for name in ROWS if name.startswith("recompute")), size.lengths, strict=True):
        recomputing[name] = measure_recomputing(pair, size, length)
        measured[name] = ratio_row(name, recomputing[name]["recomputed"], recomputing[name]["cached"])
    measured["memory"] = ratio_row("memory", [composed], [both])
    load.append(os.getloadavg()[0])
    details = {
        "size": asdict(size) | {"lengths": list(size.lengths)},
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "load_average": load,
        "pairs": [list(layers) for layers in pair.pairs],
        "parameters": {
            "anchor": count(pair.anchor.model),
            "augmenting": count(pair.augmenting.model),
            "composition": count(pair.graft),
        },
        "how": HOW,
        "decode_step": of_decoding | {"seconds": decoding},
        "recompute": recomputing,
        "train_step": of_training | {"seconds": training},
        "memory": {"bytes": memory},
    }
    rows = [Row(id=name, label=label, metrics={"ratio": measured[name]}) for name, (label, _) in ROWS.items()]
    return Results.here(NAME, rows, aims=aims(measured, size), details=details)


def ratio_row(name: str, over: list[float], under: list[float]) -> Interval:
    """Compute and print a row's ratio."""
    ratio, (label, aim) = ratios(over, under), ROWS[name]
    aimed = f", aim {aim[0]} {aim[1]:g}" if aim else ""
    print(f"{label}: {ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f}){aimed}", flush=True)
    return ratio


def ratios(over: list[float], under: list[float]) -> Interval:
    """The ratios, round by round, as an interval."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def aims(measured: Mapping[str, Interval], size: Size) -> list[Aim]:
    """The aims; they hold for the full size, so a quick run measures none."""
    return [
        made_aim(label, "ratio", aim, None if size == QUICK else measured[name].mean)
        for name, (label, aim) in ROWS.items()
        if aim is not None
    ]


if __name__ == "__main__":
    command(
        NAME,
        "What a composition costs beside its parents, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else Size(), device, clock),
        {name: aim and aim[1] for name, (_, aim) in ROWS.items()},
    )
