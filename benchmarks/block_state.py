"""The cost of a block-state layer beside block-recurrent, sliding window, full attention and the public package.

    python benchmarks/block_state.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

All layers run in one process, in rounds of alternating order, so that other load on the machine affects both sides of a
ratio. A `ratio` is the block-recurrent layer's time over that of single-head S4D: the median over rounds, with the
smallest and the largest as its interval. All layers have random weights, one width and one FFN.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from turns import Clock, Turns, command, interval, rounds, seconds

from graftlm.evaluation import Aim, Interval, Metric, Results, Row, value_of
from graftlm.models.block_state import BlockStateConfig, BlockStateModel

NAME = "bench-block-state"
NAMES = ("1k", "4k", "16k", "65k")
GROWTH, DECODE = 1.15, 1.1
HOW = {
    "forward": "seconds of one layer's forward pass without gradients, one row of text, hidden states in and out. "
    "ratio: of block_recurrent over bst_sh, round by round; over_NAME: the same over another block-state layer; "
    "NAMEover: of another layer over bst_sh",
    "training": "forward and backward pass with gradients of weights and inputs: ratio_training",
    "growth_exponent": "slope of log(seconds) on log(length), from the second length to the longest",
    "decode_65k_vs_1k": "seconds of a cached step of one token after the longer text over those after the shorter; "
    "cache_bytes: the size of the caches",
    "public_package": "block-recurrent-transformer-pytorch, one recurrent layer with as many state vectors as the "
    "window has tokens; its embedding and its output of 16 tokens are part of its time",
}
OURS, RECURRENT, PUBLIC = "bst_sh", "block_recurrent", "public_package"
MIXERS: dict[str, dict[str, Any]] = {
    OURS: {"mixer": "block-state", "context": "sh"},
    "bst_mh": {"mixer": "block-state", "context": "mh"},
    "bst_mf": {"mixer": "block-state", "context": "mf"},
    "bst_sh_unstructured": {"mixer": "block-state", "context": "sh", "kernel": "unstructured"},
    RECURRENT: {"mixer": "recurrent"},
    "slide": {"mixer": "slide"},
}


@dataclass(frozen=True)
class LayerBenchmarkConfig:
    """Sizes of the layers and of the work."""

    width: int = 512
    ffn: int = 2048
    heads: int = 16
    window: int = 128
    state: int = 16
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    """One for each of `NAMES`; the aims hold from the second on."""
    full_up_to: int = 4096
    """The longest text for full attention."""
    others_up_to: int = 16_384
    """The longest text for all layers but single-head, block-recurrent and sliding window."""
    training_up_to: int = 4096
    forward_rounds: int = 7
    training_rounds: int = 5
    decode: tuple[int, int] = (1024, 65_536)
    decode_rounds: int = 9
    steps: int = 16
    """Tokens of a measurement of decoding."""


class FullAttention(nn.Module):
    """A layer with full causal attention by torch's fused kernels, with the same norms and FFN."""

    def __init__(self, size: LayerBenchmarkConfig) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(self.norms[1](x))))


class BlockStateModelLayer(nn.Module):
    """One layer of a `BlockStateModel`, without embeddings."""

    def __init__(self, size: LayerBenchmarkConfig, values: Mapping[str, Any]) -> None:
        super().__init__()
        config = BlockStateConfig(
            vocab_size=2,
            hidden_size=size.width,
            intermediate_size=size.ffn,
            num_hidden_layers=1,
            num_attention_heads=size.heads,
            window=size.window,
            state_size=size.state,
            mixer_layers=[0],
            positional_ssm=False,
            kernel_length=size.lengths[1],
            kernel_limit=max(size.lengths),
            **values,
        )
        self.model = BlockStateModel(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d)."""
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class PublicPackageLayer(nn.Module):
    """The layer of the public package, which reads token ids."""

    def __init__(self, size: LayerBenchmarkConfig, model_class: Any) -> None:
        super().__init__()
        self.model = model_class(
            num_tokens=16,
            dim=size.width,
            depth=1,
            dim_head=size.width // size.heads,
            heads=size.heads,
            ff_mult=size.ffn // size.width,
            max_seq_len=max(size.lengths),
            block_width=size.window,
            num_state_vectors=size.window,
            recurrent_layers=(1,),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 16) for hidden states (B, T, d), of which only the shape is used: all token ids are zero."""
        return self.model(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device))[0]


def public_layer(size: LayerBenchmarkConfig) -> PublicPackageLayer | None:
    """The layer of the public package; None, with a message, if it is not installed."""
    try:
        from block_recurrent_transformer_pytorch import BlockRecurrentTransformer  # type: ignore[import-not-found]
    except ImportError:
        print(
            "The public package is not installed, so its figures are left out: "
            "run `pip install block-recurrent-transformer-pytorch`."
        )
        return None
    return PublicPackageLayer(size, BlockRecurrentTransformer)


QUICK = LayerBenchmarkConfig(32, 64, 2, 8, 4, (16, 32, 48, 64), 32, 48, 32, 3, 3, (32, 64), 3, 2)


class LayerBenchmark:
    """All compared layers, and their measurements."""

    def __init__(self, size: LayerBenchmarkConfig, device: torch.device, clock: Clock) -> None:
        self.size, self.device, self.clock = size, device, clock
        torch.manual_seed(0)
        named: dict[str, nn.Module] = {name: BlockStateModelLayer(size, values) for name, values in MIXERS.items()}
        named["full_attention"] = FullAttention(size)
        if (public := public_layer(size)) is not None:
            named[PUBLIC] = public
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.named = {name: layer.to(device) for name, layer in named.items()}

    def at(self, length: int) -> dict[str, nn.Module]:
        """The layers that are timed at a length."""
        limits = dict.fromkeys((OURS, RECURRENT, "slide"), length) | {"full_attention": self.size.full_up_to}
        return {n: layer for n, layer in self.named.items() if length <= limits.get(n, self.size.others_up_to)}

    def forward(self, length: int) -> Turns:
        """Seconds of forward passes."""
        x = torch.randn(1, length, self.size.width, device=self.device)

        @torch.no_grad()  # not inference_mode: the public package keeps tensors of one pass for the next
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
        """Seconds of a step after the shorter and the longer text, and the bytes of their caches."""
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

        timed = rounds({name: turn(cache) for name, cache in caches.items()}, self.size.decode_rounds)
        return timed, {name: bytes_of(cache) for name, cache in caches.items()}

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
    """The size of a cache."""
    layers: list[Any] = cache.layers
    return sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in layer.tensors.values())


def benchmark(size: LayerBenchmarkConfig, device: torch.device, clock: Clock) -> Results:
    """All rows, with their aims and details."""
    load = [os.getloadavg()[0]]
    layers = LayerBenchmark(size, device, clock)
    forward = {length: layers.forward(length) for length in size.lengths}
    named = zip(NAMES, size.lengths, strict=True)
    rows = [row_of(name, length, forward[length], layers) for name, length in named]
    exponents, ends = growth(forward)
    rows.append(Row(id="growth_exponent", label=f"growth exponent from {ends[0]:,} to {ends[1]:,}", metrics=exponents))
    decoded, cache_bytes = layers.decode()
    short, long = (decoded[str(length)] for length in size.decode)
    step = interval([a / b for a, b in zip(long, short, strict=True)])
    rows.append(Row(id="decode_65k_vs_1k", label="a decode step after long text, over short", metrics={"value": step}))
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
        "cache_bytes": cache_bytes,
        "how": HOW,
    }
    return Results.here(NAME, rows, aims=aims(rows, size, device), details=details)


def row_of(name: str, length: int, forward: Turns, layers: LayerBenchmark) -> Row:
    """The row of one length: ratios of forward passes and, up to a length, of training."""
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
    """Ratios round by round."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def growth(forward: Mapping[int, Turns]) -> tuple[dict[str, Metric], tuple[int, int]]:
    """Slopes of log time over log length of every layer with both ends; `value` is that of single-head S4D."""
    _, first, *_, last = forward

    def slope(name: str) -> Interval:
        pairs = zip(forward[last][name], forward[first][name], strict=True)
        return interval([math.log(a / b) / math.log(last / first) for a, b in pairs])

    names = [name for name in forward[first] if name in forward[last] and name != OURS]
    return {"value": slope(OURS)} | {name: slope(name) for name in names}, (first, last)


def aims(rows: list[Row], size: LayerBenchmarkConfig, device: torch.device) -> list[Aim]:
    """The aims for layers of full size; the quick size does not measure them."""
    by_id = {row.id: row for row in rows}
    least = 6.0 if device.type == "cuda" else 1.5
    specs: list[tuple[str, str, float, str, bool]] = [
        (f"{row.label}: at least {least:g} times as fast as block-recurrent", "ratio", least, row.id, True)
        for row in rows[1 : len(NAMES)]
    ]
    specs.append((f"growth exponent at most {GROWTH:g}", "value", GROWTH, "growth_exponent", False))
    specs.append(
        (f"a decode step after long text at most {DECODE:g} times", "value", DECODE, "decode_65k_vs_1k", False)
    )
    checked = []
    for text, metric, aim, row_id, at_least in specs:
        value = value_of(by_id[row_id].metrics[metric])
        met = value >= aim if at_least else value <= aim
        outcome: dict[str, Any] = {} if size == QUICK else {"measured": value, "met": met}
        checked.append(Aim(text=text, metric=metric, aim=aim, **outcome))
    return checked


def draw(results: Results) -> Figure:
    """Seconds over length, one line for each layer."""
    figure = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = figure.subplots()
    details: Any = results.details
    timed, lengths = details["seconds"], details["size"]["lengths"]
    for name in timed[str(lengths[0])]:
        points = [(length, timed[str(length)][name]) for length in lengths if name in timed[str(length)]]
        axes.plot([length for length, _ in points], [sorted(t)[len(t) // 2] for _, t in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds of a forward pass, median")
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    command(
        NAME,
        "The cost of a block-state layer beside others, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else LayerBenchmarkConfig(), device, clock),
        lambda results: {"seconds": draw(results)},
    )
