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

import numpy as np
import torch
from pair import QUICK, Pair, Reader, Size, bytes_of, count, random_ids, weight_bytes
from torch import Tensor, nn
from turns import AT_LEAST, AT_MOST, Clock, Turns, command, interval, made_aim, rounds

from graftlm.backbone import Site, Tap
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.training import TrainingConfig
from graftlm.training.loop import make_optimizer

NAME = "bench-composition"
LENGTHS = (128, 256, 512, 1024)  # a quick run has them divided by 16
ROWS = {  # row id -> label, aim
    "decode_step": ("a decode step, over the sum of both parents'", (AT_MOST, 1.1)),
    "generate_256_vs_recompute": ("256 tokens recomputed at every token, over 256 with the cache", (AT_LEAST, 10.0)),
    "train_step": ("a training step, over both parents' forward and the anchor's backward", None),
    "memory": ("weights and caches, over the sum of both parents'", None),
    **{f"recompute_{n}": (f"the token behind {n} tokens: recomputed, over cached", None) for n in LENGTHS},
}
HOW = {
    "decode_step": "seconds of a forward pass of one token behind a cached context; each parent has its own cache and "
    "output layer. bound: weights read by a composed step (without the augmenting model's output layer) over those "
    "read by both parents",
    "generate_256_vs_recompute": "one sequence, one forward pass a token, the first over the prompt. Recomputed: both "
    "models read the whole sequence again for every token, and the output layer its last token. Passes with the cache "
    "and without are timed in turn at some lengths (lengths), and summed over all by linear interpolation",
    "recompute": "one token behind so many: both models read the whole text again, over a step with their caches",
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


def measure_generation(pair: Pair, size: Size) -> tuple[Turns, dict[str, Any]]:
    """Seconds of a generation: `cached`, and `recomputed` without a cache."""
    ids = random_ids(size, 1, size.prompt + size.new_tokens, pair.composed.device)
    lengths = sampled_lengths(size)

    measured: Turns = {"cached": [], "recomputed": []}
    step_seconds: Turns = {}
    for _ in range(size.generate_rounds):
        step_seconds = {"cached": [], "recomputed": []}
        readers: list[Reader] = []
        start = pair.seconds(lambda readers=readers: readers.append(Reader(pair.composed.model, ids[:, : size.prompt])))
        for n in lengths:
            step_seconds["cached"].append(cached_step(pair, readers[0], ids[:, :n], size.steps))
            step_seconds["recomputed"].append(pair.seconds(lambda n=n: recompute(pair, ids[:, :n])))
        for name, values in step_seconds.items():
            measured[name].append(start + summed(lengths, values, size))
    return measured, {"lengths": lengths, "seconds_by_length": step_seconds}


def measure_lengths(pair: Pair, size: Size) -> dict[int, Turns]:
    """Seconds of one token behind so many tokens: a `cached` step, and everything `recomputed`."""
    measured = {}
    for n in size.lengths:
        ids = random_ids(size, 1, n + 1, pair.composed.device)
        reader = Reader(pair.composed.model, ids[:, :n])
        turns = {
            "cached": lambda reader=reader, ids=ids: cached_step(pair, reader, ids, size.steps),
            "recomputed": lambda ids=ids: pair.seconds(lambda: recompute(pair, ids)),
        }
        measured[n] = rounds(turns, size.generate_rounds)
    return measured


@torch.inference_mode()
def recompute(pair: Pair, ids: Tensor) -> None:
    """Both models read the whole text, and predict the token after it."""
    pair.composed.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)


def cached_step(pair: Pair, reader: Reader, ids: Tensor, steps: int) -> float:
    """Seconds of a step that reads the last of `ids` behind the others; the cache is cropped after it."""
    n = ids.shape[1]
    if missing := n - 1 - reader.cache.get_seq_length():
        reader.read(ids[:, n - 1 - missing : n - 1])
    step_seconds = pair.seconds(lambda: reader.step(ids[:, -1:], steps)) / steps
    reader.cache.crop(-steps)
    return step_seconds


def sampled_lengths(size: Size) -> list[int]:
    """The text lengths at which a pass is timed, the first and the last included."""
    last = size.prompt + size.new_tokens - 1
    return [*range(size.prompt + 1, last, size.every), last]


def summed(lengths: list[int], step_seconds: list[float], size: Size) -> float:
    """The seconds of all passes after the prompt, by linear interpolation between the timed lengths."""
    return float(np.interp(range(size.prompt + 1, size.prompt + size.new_tokens), lengths, step_seconds).sum())


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
    generation, of_generation = measure_generation(pair, size)
    measured["generate_256_vs_recompute"] = ratio_row(
        "generate_256_vs_recompute", generation["recomputed"], generation["cached"]
    )
    measured["memory"] = ratio_row("memory", [composed], [both])
    by_length = measure_lengths(pair, size)
    for n, of_length in zip(LENGTHS, by_length.values(), strict=True):
        measured[f"recompute_{n}"] = ratio_row(f"recompute_{n}", of_length["recomputed"], of_length["cached"])
    load.append(os.getloadavg()[0])
    details = {
        "size": asdict(size) | {"lengths": [*size.lengths]},
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
        "generate_256_vs_recompute": of_generation | {"seconds": generation},
        "recompute": {"seconds": {str(n): of_length for n, of_length in by_length.items()}},
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
