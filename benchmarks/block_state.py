"""The cost of a block-state layer, compared with block-recurrent, sliding-window and full attention layers.

    python benchmarks/block_state.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

All layers run in one process, in rounds of alternating order, so that other load on the machine affects both sides of a
ratio. A `ratio` is the block-recurrent layer's time over that of single-head S4D: the median over rounds, with the
smallest and the largest as its interval. All layers have random weights, the same width and the same FFN. The package
block-recurrent-transformer-pytorch is measured too, if it is installed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from turns import Clock, Turns, command, interval, rounds, seconds

from graftlm.evaluation import Aim, Interval, Metric, Results, Row, value_of
from graftlm.models.block_state import BlockStateConfig, BlockStateModel
from graftlm.models.block_state.cache import LayerCache

NAME = "bench-block-state"
NAMES = ("1k", "4k", "16k", "65k")
GROWTH = 1.15
DECODE = 1.1
HOW = {
    "forward": "seconds of the forward pass of one layer without gradients, for one row of hidden states. ratio: "
    "block_recurrent over bst_sh, in each round; over_NAME: block_recurrent over another block-state layer; "
    "NAME_over: another layer over bst_sh",
    "training": "forward and backward pass with gradients of weights and inputs: ratio_training",
    "growth_exponent": "slope of log(seconds) over log(length), from the second length to the longest",
    "decode_65k_vs_1k": "seconds of a cached step of one token after the longer text over those after the shorter; "
    "cache_bytes: size of the caches",
    "public_package": "block-recurrent-transformer-pytorch, one recurrent layer with as many state vectors as the "
    "window has tokens; its time includes its embedding and its output of 16 tokens",
}
OURS = "bst_sh"
RECURRENT = "block_recurrent"
PUBLIC = "public_package"
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
    """Sizes of the layers and of the measurements.

    Args:
        width: hidden size d.
        ffn: hidden size of the FFN.
        heads: attention heads.
        window: window length in tokens.
        state: state size of the state-space models.
        lengths: lengths of the texts, one for each of `NAMES`; the aims apply from the second on.
        full_up_to: longest text for full attention.
        others_up_to: longest text for all layers but single-head, block-recurrent and sliding window.
        training_up_to: longest text for training.
        forward_rounds: rounds of forward passes.
        training_rounds: rounds of training.
        decode: lengths of the texts before a decode step.
        decode_rounds: rounds of decoding.
        steps: number of tokens decoded in a measurement.
    """

    width: int = 512
    ffn: int = 2048
    heads: int = 16
    window: int = 128
    state: int = 16
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    full_up_to: int = 4096
    others_up_to: int = 16_384
    training_up_to: int = 4096
    forward_rounds: int = 7
    training_rounds: int = 5
    decode: tuple[int, int] = (1024, 65_536)
    decode_rounds: int = 9
    steps: int = 16


QUICK = LayerBenchmarkConfig(
    width=32,
    ffn=64,
    heads=2,
    window=8,
    state=4,
    lengths=(16, 32, 48, 64),
    full_up_to=32,
    others_up_to=48,
    training_up_to=32,
    forward_rounds=3,
    training_rounds=3,
    decode=(32, 64),
    decode_rounds=3,
    steps=2,
)


class FullAttention(nn.Module):
    """A layer with full causal attention by PyTorch's fused kernels, with the same norms and FFN."""

    def __init__(self, size: LayerBenchmarkConfig) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to hidden states (B, T, d)."""
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        out = functional.scaled_dot_product_attention(
            self._split_heads(q),
            self._split_heads(k),
            self._split_heads(v),
            is_causal=True,
        )
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(self.norms[1](x))))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


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
        """Apply the layer to hidden states (B, T, d)."""
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class PublicPackageLayer(nn.Module):
    """A layer of the public package, which reads token ids."""

    def __init__(self, size: LayerBenchmarkConfig, model_class: Callable[..., nn.Module]) -> None:
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
        """Compute logits (B, T, 16) for hidden states (B, T, d), whose shape alone is used: all token ids are zero."""
        ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        logits, *_ = self.model(ids)
        return logits


def public_layer(size: LayerBenchmarkConfig) -> PublicPackageLayer | None:
    """Build the layer of the public package; prints a message and returns None if it is not installed."""
    try:
        from block_recurrent_transformer_pytorch import BlockRecurrentTransformer  # type: ignore[import-not-found]
    except ImportError:
        print(
            "The public package is not installed, so it is not measured: "
            "run `pip install block-recurrent-transformer-pytorch`."
        )
        return None
    return PublicPackageLayer(size, BlockRecurrentTransformer)


class LayerBenchmark:
    """All compared layers, and their measurements."""

    def __init__(self, size: LayerBenchmarkConfig, device: torch.device, clock: Clock) -> None:
        self.size = size
        self.device = device
        self.clock: Clock = clock
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        named: dict[str, nn.Module] = {name: BlockStateModelLayer(size, values) for name, values in MIXERS.items()}
        named["full_attention"] = FullAttention(size)
        public = public_layer(size)
        if public is not None:
            named[PUBLIC] = public
        self.named = {name: layer.to(device) for name, layer in named.items()}

    def at(self, length: int) -> dict[str, nn.Module]:
        """Return the layers that are measured at a length."""
        return {name: layer for name, layer in self.named.items() if self._is_measured(name, length)}

    def _is_measured(self, name: str, length: int) -> bool:
        if name in (OURS, RECURRENT, "slide"):
            return True
        if name == "full_attention":
            return length <= self.size.full_up_to
        return length <= self.size.others_up_to

    def forward(self, length: int) -> Turns:
        """Measure the seconds of forward passes."""
        x = torch.randn(1, length, self.size.width, device=self.device)

        # Not inference_mode, since the public package keeps tensors of one pass for the next.
        @torch.no_grad()
        def work(layer: nn.Module) -> None:
            with self._autocast():
                layer(x)

        return self._rounds(work, length, self.size.forward_rounds)

    def training(self, length: int) -> Turns:
        """Measure the seconds of forward and backward passes."""
        x = torch.randn(1, length, self.size.width, device=self.device, requires_grad=True)

        def work(layer: nn.Module) -> None:
            with self._autocast():
                out = layer(x)
            out.float().square().mean().backward()
            layer.zero_grad()
            x.grad = None

        return self._rounds(work, length, self.size.training_rounds)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16)

    def _rounds(self, work: Callable[[nn.Module], None], length: int, count: int) -> Turns:
        """Measure the seconds of `work` for all layers at a length."""
        turns = {name: partial(self._seconds, partial(work, layer)) for name, layer in self.at(length).items()}
        return rounds(turns, count)

    def _seconds(self, work: Callable[[], None]) -> float:
        return seconds(work, self.device, self.clock)

    def decode(self) -> tuple[Turns, dict[str, int]]:
        """Measure the seconds of a decode step after the shorter and the longer text, and the bytes of their caches."""
        layer = self.named[OURS]
        assert isinstance(layer, BlockStateModelLayer)
        model = layer.model.eval()
        caches = {str(length): self._read(model, length) for length in self.size.decode}
        token = torch.randn(1, 1, self.size.width, device=self.device)

        @torch.inference_mode()
        def work(cache: DynamicCache) -> None:
            for _ in range(self.size.steps):
                model(inputs_embeds=token, past_key_values=cache, use_cache=True)

        def turn(cache: DynamicCache) -> float:
            return self._seconds(partial(work, cache)) / self.size.steps

        turns = {name: partial(turn, cache) for name, cache in caches.items()}
        timed = rounds(turns, self.size.decode_rounds)
        return timed, {name: bytes_of(cache) for name, cache in caches.items()}

    @torch.inference_mode()
    def _read(self, model: BlockStateModel, length: int) -> DynamicCache:
        """Return the cache after a random text."""
        cache = DynamicCache()
        x = torch.randn(1, length, self.size.width, device=self.device)
        model(inputs_embeds=x, past_key_values=cache, use_cache=True)
        return cache


def bytes_of(cache: DynamicCache) -> int:
    """Return the size of a cache in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(cache))


def _tensors_of(cache: DynamicCache) -> Iterator[Tensor]:
    for layer in cache.layers:
        assert isinstance(layer, LayerCache)
        yield from layer.tensors.values()


def benchmark(size: LayerBenchmarkConfig, device: torch.device, clock: Clock) -> Results:
    """Measure all rows, with their aims and details."""
    load = [os.getloadavg()[0]]
    layers = LayerBenchmark(size, device, clock)
    forward = {length: layers.forward(length) for length in size.lengths}
    rows = []
    for name, length in zip(NAMES, size.lengths, strict=True):
        rows.append(row_of(name, length, forward[length], layers))
    exponents = growth(forward, size)
    label = f"growth exponent from {size.lengths[1]:,} to {size.lengths[-1]:,}"
    rows.append(Row(id="growth_exponent", label=label, metrics=exponents))
    decoded, cache_bytes = layers.decode()
    short, long = (decoded[str(length)] for length in size.decode)
    step = ratios(long, short)
    rows.append(Row(id="decode_65k_vs_1k", label="a decode step after long text, over short", metrics={"value": step}))
    print(f"decode step: {step.mean:.3f}; growth exponent: {value_of(exponents['value']):.3f}", flush=True)
    load.append(os.getloadavg()[0])
    timed: dict[str, Turns] = {str(length): turns for length, turns in forward.items()}
    timed["decode"] = decoded
    details = {
        "size": {**asdict(size), "lengths": list(size.lengths), "decode": list(size.decode)},
        "dtype": str(layers.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "load_average": load,
        "parameters": {name: _count_parameters(layer) for name, layer in layers.named.items()},
        "seconds": timed,
        "cache_bytes": cache_bytes,
        "how": HOW,
    }
    return Results.here(NAME, rows, aims=aims(rows, size, device), details=details)


def _count_parameters(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def row_of(name: str, length: int, forward: Turns, layers: LayerBenchmark) -> Row:
    """Return the row of one length: ratios of forward passes and, up to `training_up_to`, of training."""
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
    """Return the interval of the ratios of all rounds."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def growth(forward: Mapping[int, Turns], size: LayerBenchmarkConfig) -> dict[str, Metric]:
    """Return the slopes of log time over log length of all layers measured at both ends.

    Args:
        forward: seconds of forward passes, by length.
        size: sizes, whose second and last lengths are the ends.

    Returns:
        Slopes by the names of layers; `value` is the slope of single-head S4D.
    """
    first = size.lengths[1]
    last = size.lengths[-1]

    def slope(name: str) -> Interval:
        pairs = zip(forward[last][name], forward[first][name], strict=True)
        return interval([math.log(a / b) / math.log(last / first) for a, b in pairs])

    slopes: dict[str, Metric] = {"value": slope(OURS)}
    for name in forward[first]:
        if name in forward[last] and name != OURS:
            slopes[name] = slope(name)
    return slopes


def aims(rows: list[Row], size: LayerBenchmarkConfig, device: torch.device) -> list[Aim]:
    """Return the aims for layers of full size; the quick size does not measure them."""
    by_id = {row.id: row for row in rows}
    is_measured = size != QUICK
    least = 6.0 if device.type == "cuda" else 1.5
    checked = []
    for row in rows[1 : len(NAMES)]:
        text = f"{row.label}: at least {least:g} times as fast as block-recurrent"
        value = value_of(row.metrics["ratio"])
        checked.append(_aim(text, "ratio", least, value, value >= least, is_measured))
    exponent = value_of(by_id["growth_exponent"].metrics["value"])
    text = f"growth exponent at most {GROWTH:g}"
    checked.append(_aim(text, "value", GROWTH, exponent, exponent <= GROWTH, is_measured))
    step = value_of(by_id["decode_65k_vs_1k"].metrics["value"])
    text = f"a decode step after long text at most {DECODE:g} times"
    checked.append(_aim(text, "value", DECODE, step, step <= DECODE, is_measured))
    return checked


def _aim(text: str, metric: str, aim: float, value: float, met: bool, is_measured: bool) -> Aim:
    if is_measured:
        return Aim(text=text, metric=metric, aim=aim, measured=value, met=met)
    return Aim(text=text, metric=metric, aim=aim)


def draw(results: Results) -> Figure:
    """Plot the seconds over the length, with a line for each layer."""
    figure = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = figure.subplots()
    details: Any = results.details
    timed: dict[str, Turns] = details["seconds"]
    lengths: list[int] = details["size"]["lengths"]
    for name in timed[str(lengths[0])]:
        measured = [length for length in lengths if name in timed[str(length)]]
        medians = [_upper_median(timed[str(length)][name]) for length in measured]
        axes.plot(measured, medians, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds of a forward pass, median")
    axes.legend(frameon=False)
    return figure


def _upper_median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _measure(quick: bool, device: torch.device, clock: Clock) -> Results:
    size = QUICK if quick else LayerBenchmarkConfig()
    return benchmark(size, device, clock)


def _plots(results: Results) -> dict[str, Figure]:
    return {"seconds": draw(results)}


if __name__ == "__main__":
    command(NAME, "The cost of a block-state layer compared with others, as ratios.", _measure, _plots)
