"""What a block-state layer costs beside a block-recurrent one, a sliding window, full attention and the public package.

    python benchmarks/block_state.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

What is compared runs in one process, turn by turn, in rounds of alternating order, so that whatever else the machine
does falls on both sides of a ratio. A `ratio` is the block-recurrent layer's time over ours, the median over rounds,
its interval the smallest and the largest. All layers are random, of one width, with one FFN.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sequence_layers import MIXERS, OURS, PUBLIC, RECURRENT, FullAttention, Ours, Size, public_layer
from torch import nn
from transformers import DynamicCache
from turns import Clock, Turns, interval, rounds, seconds

from graftlm.evaluation import Aim, Interval, Metric, Results, Row, value_of, write_report

NAME = "bench-block-state"
NAMES = ("1k", "4k", "16k", "65k")
GROWTH, DECODE = 1.15, 1.1
HOW = {
    "forward": "seconds of one layer's forward pass without gradients, one row of text, hidden states in and out. "
    "ratio: of block_recurrent over bst_sh, round by round; over_NAME: the same over another of our layers; NAME_over: "
    "of another layer over bst_sh",
    "training": "forward and backward pass with gradients of weights and inputs: ratio_training",
    "growth_exponent": "slope of log(seconds) on log(length), from the second length to the longest",
    "decode_65k_vs_1k": "seconds of a step of one token, cached, behind the longer text over those behind the shorter; "
    "cache_bytes: what the caches hold",
    "public_package": "block-recurrent-transformer-pytorch, one recurrent layer with as many state vectors as the "
    "window has tokens; its embedding and its output of 16 tokens are part of its time",
}
QUICK = Size(32, 64, 2, 8, 4, (16, 32, 48, 64), 32, 48, 32, 3, 3, (32, 64), 3, 2)


class Layers:
    """All layers that are compared."""

    def __init__(self, size: Size, device: torch.device, clock: Clock) -> None:
        self.size, self.device, self.clock = size, device, clock
        torch.manual_seed(0)
        named: dict[str, nn.Module] = {name: Ours(size, values) for name, values in MIXERS.items()}
        named["full_attention"] = FullAttention(size)
        if (public := public_layer(size)) is not None:
            named[PUBLIC] = public
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.named = {name: layer.to(device) for name, layer in named.items()}

    def at(self, length: int) -> dict[str, nn.Module]:
        """Those that are timed at a length."""
        limits = dict.fromkeys((OURS, RECURRENT, "slide"), length) | {"full_attention": self.size.full_up_to}
        return {n: layer for n, layer in self.named.items() if length <= limits.get(n, self.size.others_up_to)}

    def forward(self, length: int) -> Turns:
        """Seconds of forward passes."""
        x = torch.randn(1, length, self.size.width, device=self.device)

        @torch.no_grad()  # the public package keeps tensors of one pass for the next, whatever mode that has
        def work(layer: nn.Module) -> None:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
                layer(x)

        return self._rounds(work, length, self.size.forward_rounds)

    def training(self, length: int) -> Turns:
        """Seconds of forward and backward passes."""
        x = torch.randn(1, length, self.size.width, device=self.device, requires_grad=True)

        def work(layer: nn.Module) -> None:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
                out = layer(x)
            out.float().square().mean().backward()
            layer.zero_grad()
            x.grad = None

        return self._rounds(work, length, self.size.training_rounds)

    def _rounds(self, work: Callable[[nn.Module], None], length: int, count: int) -> Turns:
        def turn(layer: nn.Module) -> Callable[[], float]:
            return lambda: seconds(lambda: work(layer), self.device, self.clock)

        return rounds({name: turn(layer) for name, layer in self.at(length).items()}, count)

    def decode(self) -> tuple[Turns, dict[str, int]]:
        """Seconds of a step behind the shorter and the longer text, and bytes of their caches."""
        model: Any = self.named[OURS].model
        model.eval()
        caches = {str(length): self._read(model, length) for length in self.size.decode}
        token = torch.randn(1, 1, self.size.width, device=self.device)

        @torch.inference_mode()
        def work(cache: DynamicCache) -> None:
            for _ in range(self.size.steps):
                model(inputs_embeds=token, past_key_values=cache, use_cache=True)

        def turn(cache: DynamicCache) -> Callable[[], float]:
            return lambda: seconds(lambda: work(cache), self.device, self.clock) / self.size.steps

        found = rounds({name: turn(cache) for name, cache in caches.items()}, self.size.decode_rounds)
        return found, {name: bytes_of(cache) for name, cache in caches.items()}

    @torch.inference_mode()
    def _read(self, model: Any, length: int) -> DynamicCache:
        cache = DynamicCache()
        model(
            inputs_embeds=torch.randn(1, length, self.size.width, device=self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return cache


def bytes_of(cache: DynamicCache) -> int:
    """What a cache holds."""
    layers: list[Any] = cache.layers
    return sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in layer.tensors.values())


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """All rows, with their aims and what belongs to them."""
    load = [os.getloadavg()[0]]
    layers = Layers(size, device, clock)
    forward = {length: layers.forward(length) for length in size.lengths}
    named = zip(NAMES, size.lengths, strict=True)
    rows = [row_of(name, length, forward[length], layers) for name, length in named]
    exponents, ends = growth(forward)
    rows.append(Row(id="growth_exponent", label=f"growth exponent from {ends[0]:,} to {ends[1]:,}", metrics=exponents))
    decoded, held = layers.decode()
    short, long = (decoded[str(length)] for length in size.decode)
    step = interval([a / b for a, b in zip(long, short, strict=True)])
    rows.append(Row(id="decode_65k_vs_1k", label="a decode step behind long text, over short", metrics={"value": step}))
    print(f"decode step: {step.mean:.3f}; growth exponent: {value_of(exponents['value']):.3f}", flush=True)
    load.append(os.getloadavg()[0])
    details = {
        "size": asdict(size) | {"lengths": list(size.lengths), "decode": list(size.decode)},
        "dtype": str(layers.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "load_average": load,
        "parameters": {name: sum(p.numel() for p in layer.parameters()) for name, layer in layers.named.items()},
        "seconds": {str(length): turns for length, turns in forward.items()} | {"decode": decoded},
        "cache_bytes": held,
        "how": HOW,
    }
    return Results.here(NAME, rows, aims=aims(rows, size, device), details=details)


def row_of(name: str, length: int, forward: Turns, layers: Layers) -> Row:
    """One length: ratios of forward passes and, where they are timed, of training."""
    metrics: dict[str, Metric] = {"ratio": ratios(forward[RECURRENT], forward[OURS])}
    if length <= layers.size.training_up_to:
        training = layers.training(length)
        metrics["ratio_training"] = ratios(training[RECURRENT], training[OURS])
    for ours in ("bst_mh", "bst_mf", "bst_sh_unstructured"):
        if ours in forward:
            metrics[f"over_{ours}"] = ratios(forward[RECURRENT], forward[ours])
    for other in ("slide", "full_attention", PUBLIC):
        if other in forward:
            metrics[f"{other}_over"] = ratios(forward[other], forward[OURS])
    shown = ", ".join(f"{key} {value_of(value):.2f}" for key, value in metrics.items())
    print(f"{length:,} tokens: {shown}", flush=True)
    return Row(id=f"forward_{name}", label=f"{length:,} tokens", metrics=metrics)


def ratios(over: list[float], under: list[float]) -> Interval:
    """Round by round."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def growth(forward: Mapping[int, Turns]) -> tuple[dict[str, Metric], tuple[int, int]]:
    """Slopes of log time on log length of every layer that has both ends; `value` is ours."""
    _, first, *_, last = forward

    def slope(name: str) -> Interval:
        pairs = zip(forward[last][name], forward[first][name], strict=True)
        return interval([math.log(a / b) / math.log(last / first) for a, b in pairs])

    names = [name for name in forward[first] if name in forward[last] and name != OURS]
    return {"value": slope(OURS)} | {name: slope(name) for name in names}, (first, last)


def aims(rows: list[Row], size: Size, device: torch.device) -> list[Aim]:
    """What the figures of layers of this size should be; small ones say nothing about them."""
    by_id = {row.id: row for row in rows}
    least = 6.0 if device.type == "cuda" else 1.5
    made: list[tuple[str, str, float, str, bool]] = [
        (f"{row.label}: at least {least:g} times as fast as block-recurrent", "ratio", least, row.id, True)
        for row in rows[1 : len(NAMES)]
    ]
    made.append((f"growth exponent at most {GROWTH:g}", "value", GROWTH, "growth_exponent", False))
    made.append(
        (f"a decode step behind long text at most {DECODE:g} times", "value", DECODE, "decode_65k_vs_1k", False)
    )
    found = []
    for text, metric, aim, row_id, at_least in made:
        value = value_of(by_id[row_id].metrics[metric])
        met = value >= aim if at_least else value <= aim
        known: dict[str, Any] = {} if size == QUICK else {"measured": value, "met": met}
        found.append(Aim(text=text, metric=metric, aim=aim, **known))
    return found


def draw(results: Results, size: Size) -> Figure:
    """Seconds against length, a line for each layer."""
    figure = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = figure.subplots()
    timed: Any = results.details["seconds"]
    for name in timed[str(size.lengths[0])]:
        points = [(length, timed[str(length)][name]) for length in size.lengths if name in timed[str(length)]]
        axes.plot([length for length, _ in points], [sorted(t)[len(t) // 2] for _, t in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds of a forward pass, median")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Measure, print, and write `results.json`, `report.md` and a plot."""
    parser = argparse.ArgumentParser(description="What a block-state layer costs beside others, in ratios.")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-block-state"))
    parser.add_argument("--quick", action="store_true", help="small layers, to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: own time, for a busy machine")
    chosen = parser.parse_args()
    size = QUICK if chosen.quick else Size()
    results = benchmark(size, torch.device(chosen.device), chosen.clock)
    write_report(results, chosen.out, plots={"seconds": draw(results, size)})
    print(f"written to {chosen.out}")


if __name__ == "__main__":
    main()
