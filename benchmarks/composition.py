"""The cost of a composition compared with its two parents: decoding, generation, training, memory.

    python benchmarks/composition.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

Both sides of a ratio run in one process, in rounds of alternating order, so that other load affects both.
The `ratio` of a row is the median over the rounds; its interval is the smallest and the largest value. Anchor and
augmenting model are random Llamas, and the parents are copies of them without a graft.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from pair import QUICK, Pair, Reader, Size, bytes_of, count, random_ids, weight_bytes
from torch import Tensor, nn
from transformers import PreTrainedModel
from turns import AT_LEAST, AT_MOST, Clock, Turns, command, interval, made_aim, rounds

from graftlm.backbone import Call, Site, Tap
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.training import TrainingConfig
from graftlm.training.optimizer import make_optimizer

NAME = "bench-composition"
LENGTHS = (128, 256, 512, 1024)  # divided by 16 in a quick run
ROWS: dict[str, tuple[str, tuple[str, float] | None]] = {  # row id -> label, aim
    "decode_step": ("a decode step, over the sum of both parents'", (AT_MOST, 1.1)),
    "generate_256_vs_recompute": ("256 tokens recomputed at every token, over 256 with the cache", (AT_LEAST, 10.0)),
    "train_step": ("a training step, over both parents' forward and the anchor's backward", None),
    "memory": ("weights and caches, over the sum of both parents'", None),
    **{f"recompute_{n}": (f"the token after {n} tokens: recomputed, over cached", None) for n in LENGTHS},
}
HOW = {
    "decode_step": "seconds of a forward pass of one token after a cached context; each parent has its own cache and "
    "output layer. bound: weights that a composed step reads (without the output layer of the augmenting model) over "
    "those that both parents read",
    "generate_256_vs_recompute": "one sequence, one forward pass per token, the first over the prompt. Recomputed: "
    "both models read the whole sequence again for every token, and the output layer reads its last token. Passes with "
    "the cache and without it are timed alternately at some lengths (lengths), and summed over all lengths by linear "
    "interpolation",
    "recompute": "one token after a text: both models read the whole text again, over a step with their caches",
    "train_step": "composed: forward, loss, backward and AdamW of the composition's parameters. bound: forward of the "
    "augmenting model without gradient or output layer, forward and loss of the anchor, and its backward with a "
    "trainable vector added after the first paired layer, which propagates gradients through all later activations",
    "memory": "exact bytes of weights, and of keys and values after the prompt and the new tokens of the generation, "
    "without the activations of a pass. training: bytes of gradients and of AdamW's moments, in addition",
}


def measure_decoding(pair: Pair, size: Size) -> tuple[Turns, dict[str, Any]]:
    """Measure the seconds of a decode step of `composed`, `anchor` and `augmenting`; each step is undone."""
    ids = random_ids(size, 1, size.context, pair.composed.device)

    def decode(reader: Reader) -> float:
        step_seconds = pair.seconds(lambda: reader.step(ids[:, :1], size.steps)) / size.steps
        reader.cache.crop(-size.steps)
        return step_seconds

    turns = {name: partial(decode, Reader(model, ids)) for name, model in pair.models.items()}
    return rounds(turns, size.decode_rounds), {"bound": weight_bound(pair)}


def weight_bound(pair: Pair) -> float:
    """Return the ratio of decode steps whose time is that of reading the weights."""
    parents = count(pair.anchor.model) + count(pair.augmenting.model)
    unread = count(pair.augmenting.model.get_input_embeddings())  # tied to the output layer
    return (parents - unread + count(pair.graft)) / parents


def measure_generation(pair: Pair, size: Size) -> tuple[Turns, dict[str, Any]]:
    """Measure the seconds of a generation: `cached`, and `recomputed` without a cache."""
    ids = random_ids(size, 1, size.prompt + size.new_tokens, pair.composed.device)
    lengths = sampled_lengths(size)
    measured: Turns = {"cached": [], "recomputed": []}
    step_seconds: Turns = {}
    for _ in range(size.generate_rounds):
        prompt_seconds, step_seconds = time_generation(pair, size, ids, lengths)
        for name, values in step_seconds.items():
            measured[name].append(prompt_seconds + summed(lengths, values, size))
    return measured, {"lengths": lengths, "seconds_by_length": step_seconds}


def time_generation(pair: Pair, size: Size, ids: Tensor, lengths: list[int]) -> tuple[float, Turns]:
    """Return the seconds of the pass over the prompt, and of a pass at each length with the cache and without it."""
    readers: list[Reader] = []

    def read_prompt() -> None:
        readers.append(Reader(pair.composed.model, ids[:, : size.prompt]))

    prompt_seconds = pair.seconds(read_prompt)
    cached = []
    recomputed = []
    for n in lengths:
        text = ids[:, :n]
        cached.append(cached_step(pair, readers[0], text, size.steps))
        recomputed.append(pair.seconds(partial(recompute, pair, text)))
    return prompt_seconds, {"cached": cached, "recomputed": recomputed}


def measure_lengths(pair: Pair, size: Size) -> dict[int, Turns]:
    """Measure the seconds of one token after texts of each length: a `cached` step, and the whole text `recomputed`."""
    measured = {}
    for n in size.lengths:
        ids = random_ids(size, 1, n + 1, pair.composed.device)
        reader = Reader(pair.composed.model, ids[:, :n])
        turns = {
            "cached": partial(cached_step, pair, reader, ids, size.steps),
            "recomputed": partial(pair.seconds, partial(recompute, pair, ids)),
        }
        measured[n] = rounds(turns, size.generate_rounds)
    return measured


@torch.inference_mode()
def recompute(pair: Pair, ids: Tensor) -> None:
    """Read the whole text with both models, and predict the token after it."""
    pair.composed.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        logits_to_keep=1,
    )


def cached_step(pair: Pair, reader: Reader, ids: Tensor, steps: int) -> float:
    """Return the seconds of a step that reads the last of `ids` after the others; the step is undone."""
    n = ids.shape[1]
    missing = n - 1 - reader.cache.get_seq_length()
    if missing:
        reader.read(ids[:, n - 1 - missing : n - 1])
    step_seconds = pair.seconds(lambda: reader.step(ids[:, -1:], steps)) / steps
    reader.cache.crop(-steps)
    return step_seconds


def sampled_lengths(size: Size) -> list[int]:
    """Return the text lengths at which a pass is timed, including the first and the last."""
    last = size.prompt + size.new_tokens - 1
    return [*range(size.prompt + 1, last, size.every), last]


def summed(lengths: list[int], step_seconds: list[float], size: Size) -> float:
    """Return the seconds of all passes after the prompt, by linear interpolation between the timed lengths."""
    all_lengths = range(size.prompt + 1, size.prompt + size.new_tokens)
    return float(np.interp(all_lengths, lengths, step_seconds).sum())


class TrainableVector(Graft):
    """A trainable vector that is added after one layer: the smallest graft whose backward pass reaches that layer.

    Args:
        layer: number of the layer.
        width: width of the hidden states.
    """

    def __init__(self, layer: int, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.vector = nn.Parameter(torch.zeros(width))

    def taps(self) -> list[Tap]:
        """Return the tap that adds the vector to the output of the layer."""
        return [Tap(Site("layer", self.layer), "after", "add", self._add)]

    def _add(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        return self.vector.expand_as(outputs)


def measure_training(pair: Pair, size: Size) -> tuple[Turns, dict[str, Any]]:
    """Measure the seconds of a `composed` training step, and of its `bound`."""
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
        turns = {
            "composed": partial(pair.seconds, step),
            "bound": partial(pair.seconds, lower_bound),
        }
        measured = rounds(turns, size.train_rounds)
    pair.composed.eval()
    return measured, {"first_paired_layer": first}


@torch.inference_mode()
def measure_memory(pair: Pair, size: Size) -> dict[str, dict[str, int]]:
    """Measure the bytes of weights and of caches at the end of a generation, composed and of both parents."""
    ids = random_ids(size, 1, size.prompt + size.new_tokens, pair.composed.device)
    caches = {name: cache_bytes(model, ids) for name, model in pair.models.items()}
    parents = weight_bytes(pair.anchor.model) + weight_bytes(pair.augmenting.model)
    added = weight_bytes(pair.graft)
    return {
        "composed": {"weights": parents + added, "caches": caches["composed"]},
        "parents": {"weights": parents, "caches": caches["anchor"] + caches["augmenting"]},
        "training": {"gradients": added, "moments": 2 * added},
    }


def cache_bytes(model: PreTrainedModel, ids: Tensor) -> int:
    """Return the bytes of a model's cache after a text."""
    layers: list[Any] = Reader(model, ids).cache.layers
    return sum(bytes_of(layer.keys) + bytes_of(layer.values) for layer in layers)


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """Measure all rows, and return them with their aims and details."""
    load = [os.getloadavg()[0]]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pair = Pair(size, device, dtype, clock)
    measured: dict[str, Interval] = {}
    decoding, decoding_details = measure_decoding(pair, size)
    parents = [a + b for a, b in zip(decoding["anchor"], decoding["augmenting"], strict=True)]
    measured["decode_step"] = ratio_row("decode_step", decoding["composed"], parents)
    memory = measure_memory(pair, size)
    training, training_details = measure_training(pair, size)
    measured["train_step"] = ratio_row("train_step", training["composed"], training["bound"])
    generation, generation_details = measure_generation(pair, size)
    measured["generate_256_vs_recompute"] = ratio_row(
        "generate_256_vs_recompute",
        generation["recomputed"],
        generation["cached"],
    )
    composed_bytes = float(sum(memory["composed"].values()))
    parents_bytes = float(sum(memory["parents"].values()))
    measured["memory"] = ratio_row("memory", [composed_bytes], [parents_bytes])
    by_length = measure_lengths(pair, size)
    for n, turns in zip(LENGTHS, by_length.values(), strict=True):
        measured[f"recompute_{n}"] = ratio_row(f"recompute_{n}", turns["recomputed"], turns["cached"])
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
        "decode_step": decoding_details | {"seconds": decoding},
        "generate_256_vs_recompute": generation_details | {"seconds": generation},
        "recompute": {"seconds": {str(n): turns for n, turns in by_length.items()}},
        "train_step": training_details | {"seconds": training},
        "memory": {"bytes": memory},
    }
    rows = [Row(id=name, label=label, metrics={"ratio": measured[name]}) for name, (label, _) in ROWS.items()]
    return Results.here(NAME, rows, aims=aims(measured, size), details=details)


def ratio_row(name: str, over: list[float], under: list[float]) -> Interval:
    """Compute and print the ratio of a row."""
    ratio = ratios(over, under)
    label, aim = ROWS[name]
    aim_text = f", aim {aim[0]} {aim[1]:g}" if aim else ""
    print(f"{label}: {ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f}){aim_text}", flush=True)
    return ratio


def ratios(over: list[float], under: list[float]) -> Interval:
    """Return the ratios of the rounds as an interval."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def aims(measured: Mapping[str, Interval], size: Size) -> list[Aim]:
    """Return the aims; they apply to the full size, so a quick run does not judge them."""
    made = []
    for name, (label, aim) in ROWS.items():
        if aim is not None:
            value = None if size == QUICK else measured[name].mean
            made.append(made_aim(label, "ratio", aim, value))
    return made


def run(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Run the benchmark with small models (`quick`) or full ones."""
    return benchmark(QUICK if quick else Size(), device, clock)


def main() -> None:
    """Measure, print, and write `results.json`, `report.md` and a plot."""
    command(
        NAME,
        "The cost of a composition compared with its parents, in ratios.",
        run,
        {name: aim[1] if aim else None for name, (_, aim) in ROWS.items()},
    )


if __name__ == "__main__":
    main()
