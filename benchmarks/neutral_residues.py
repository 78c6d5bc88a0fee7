"""How fast neutral residues are: training beside LoRA of equal size, decoding beside the bare backbone.

    python benchmarks/neutral_residues.py --out DIR [--quick] [--device DEVICE]

What is compared runs in one process, turn by turn, in rounds of alternating order, so that whatever else the machine
does falls on both sides of a ratio. A row's `ratio` is the median over rounds, its interval the smallest and the
largest. The backbone is a random Llama: what is timed does not depend on what its weights say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Turns, command, interval, rounds, seconds

from graftlm.backbone import Backbone
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, GraftConfig, build_graft, graft_config
from graftlm.training import TrainingConfig
from graftlm.training.loop import make_optimizer

NAME = "bench-neutral-residues"
CAPACITY = 0.2
ROWS = {  # row id -> label, aim
    "train": ("training, over PEFT LoRA of equal size on the FFN", 1.0),
    "decode_closed": ("decoding with closed gates, over the bare backbone", 0.97),
    "decode_open": ("decoding with open gates, over the bare backbone", 0.8),
}
HOW = {
    "training": "one update: forward, loss with the local loss, backward, AdamW; bfloat16 autocast; gated: as training "
    "starts; open: all gates held open; parameters: those trained",
    "decoding": "greedy, one sequence, with a cache, prefill included; a bias holds all gates closed or open, and they "
    "are computed all the same; bound_open: weights read by the bare backbone over those read with open gates",
}


@dataclass(frozen=True)
class Size:
    """How large the backbone and the work are; one row of a batch in ten is of the old domain."""

    width: int = 768
    ffn: int = 2048
    layers: int = 12
    heads: int = 12
    vocabulary: int = 32_000
    rows: int = 10
    length: int = 128
    prompt: int = 16
    new_tokens: int = 32
    train_rounds: int = 9
    decode_rounds: int = 25


QUICK = Size(64, 128, 2, 4, 512, rows=10, length=16, prompt=4, new_tokens=8, train_rounds=3, decode_rounds=3)


class Training:
    """Training of one graft on a backbone of its own, in bfloat16 autocast."""

    def __init__(self, config: GraftConfig, size: Size, device: torch.device) -> None:
        backbone = random_backbone(size, device)
        torch.manual_seed(1)
        self.graft = build_graft(config, backbone)
        self.model = GraftedModel(backbone, {"graft": self.graft}).train()
        parameters = self.model.trainable_parameters()
        self.parameters = sum(parameter.numel() for parameter in parameters.values())
        self.optimiser = make_optimizer(parameters, TrainingConfig(steps=1, learning_rate=1e-4))
        self.batch = random_batch(size, device)

    def speed(self) -> float:
        """Tokens per second of one update."""
        return self.batch["input_ids"].numel() / seconds(self._step, self.model.device)

    def _step(self) -> None:
        with torch.autocast(self.model.device.type, torch.bfloat16):
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def decoding_speed(backbone: Backbone, graft: Graft | None, prompt: Tensor, new_tokens: int) -> float:
    """New tokens per second of greedy decoding of one sequence with a cache, prefill included; None: the bare model."""

    def decode() -> None:
        mask = torch.ones_like(prompt)
        options: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
        backbone.model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=new_tokens, **options)  # type: ignore[operator]

    if graft is None:
        return new_tokens / seconds(decode, backbone.device)
    with GraftedModel(backbone, {"graft": graft}):
        return new_tokens / seconds(decode, backbone.device)


def random_backbone(size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> Backbone:
    """A Llama with tied embeddings, as models of this size have; it never ends a text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return Backbone.wrap(model.to(device, dtype), name="a random Llama")


def random_batch(size: Size, device: torch.device) -> dict[str, Tensor]:
    """Random tokens and their domain marks."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=generator).to(device)
    domain = torch.ones(size.rows, dtype=torch.long, device=device)
    domain[: size.rows // 10] = 0
    return {"input_ids": ids, "labels": ids, "domain": domain}


def gated(**changes: Any) -> GraftConfig:
    """Neutral residues at the capacity that is measured."""
    return graft_config({"kind": "neutral-residues", "capacity": CAPACITY} | changes)


@torch.no_grad()
def hold(graft: Graft, bias: float) -> None:
    """Let a bias decide all gates, which are computed all the same."""
    for name, parameter in graft.named_parameters():
        if name.endswith("gate.bias"):
            parameter.fill_(bias)


@torch.no_grad()
def held_graft(backbone: Backbone, bias: float) -> Graft:
    """An adapter with random weights everywhere, in the backbone's own precision, its gates held open or closed."""
    graft = build_graft(gated(init="he"), backbone)
    for name, parameter in graft.named_parameters():
        if name.endswith("w_o.weight"):
            parameter.normal_(0, 0.02)
    hold(graft, bias)
    return graft.to(backbone.model.dtype).eval()


def open_share(model: GraftedModel, ids: Tensor) -> float:
    """The share of open gates, over tokens and layers."""
    return model.observe(input_ids=ids, use_cache=False)["graft"]["open_share"].mean().item()


def measure_training(size: Size, device: torch.device) -> tuple[Turns, dict[str, Any]]:
    """Speeds of `lora`, of `gated` as training starts, and of `open`: the same with all gates held open."""
    trainings = {
        "lora": Training(graft_config({"kind": "lora", "capacity": CAPACITY}), size, device),
        "gated": Training(gated(gate_init="random"), size, device),
        "open": Training(gated(), size, device),
    }
    hold(trainings["open"].graft, 10.0)
    ids = trainings["gated"].batch["input_ids"]
    shares = {f"open_share_{name}": open_share(trainings[name].model, ids) for name in ("gated", "open")}
    speeds = rounds({name: training.speed for name, training in trainings.items()}, size.train_rounds)
    shares["open_share_gated_at_the_end"] = open_share(trainings["gated"].model, ids)
    sizes = {f"parameters_{name}": training.parameters for name, training in trainings.items()}
    return speeds, shares | sizes


def measure_decoding(size: Size, device: torch.device, dtype: torch.dtype) -> tuple[Turns, dict[str, Any]]:
    """Speeds of the `bare` backbone, and with all gates `closed` and `open`."""
    backbone = random_backbone(size, device, dtype)
    prompt = random_batch(size, device)["input_ids"][:1, : size.prompt]
    grafts = {"bare": None, "closed": held_graft(backbone, -10.0), "open": held_graft(backbone, 10.0)}
    details: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    for name, graft in grafts.items():
        if graft is not None:
            with GraftedModel(backbone, {"graft": graft}) as model:
                details[f"open_share_{name}"] = open_share(model, prompt)
    turns = {
        name: lambda graft=graft: decoding_speed(backbone, graft, prompt, size.new_tokens)
        for name, graft in grafts.items()
    }
    details["bound_open"] = weight_bound(backbone, grafts["open"])
    return rounds(turns, size.decode_rounds), details


def weight_bound(backbone: Backbone, graft: Graft | None) -> float:
    """The ratio to expect of decoding that waits for weights alone: those of the bare backbone over those of both."""
    bare = sum(parameter.numel() for parameter in backbone.model.parameters())
    return bare / (bare + sum(parameter.numel() for parameter in graft.parameters())) if graft is not None else 1.0


def ratios(speeds: Turns, over: str, under: str) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(speeds[over], speeds[under], strict=True)]


def benchmark(size: Size, device: torch.device) -> Results:
    """All rows, with their aims and what belongs to them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    training, of_training = measure_training(size, device)
    decoding, of_decoding = measure_decoding(size, device, dtype)
    found = {
        "train": interval(ratios(training, "gated", "lora")),
        "decode_closed": interval(ratios(decoding, "closed", "bare")),
        "decode_open": interval(ratios(decoding, "open", "bare")),
    }
    of_training["open_over_lora"] = interval(ratios(training, "open", "lora")).model_dump()
    details = {
        "size": asdict(size),
        "capacity": CAPACITY,
        "threads": torch.get_num_threads(),
        "how": HOW,
        "training": of_training | {"tokens_per_s": training},
        "decoding": of_decoding | {"tokens_per_s": decoding},
    }
    rows = [Row(id=name, label=ROWS[name][0], metrics={"ratio": ratio}) for name, ratio in found.items()]
    return Results.here(NAME, rows, aims=aims(found, size), details=details)


def aims(found: Mapping[str, Interval], size: Size) -> list[Aim]:
    """What the ratios should be, of a backbone of this size; a small one says nothing about them."""
    if size == QUICK:
        return [Aim(text=text, metric="ratio", aim=aim) for text, aim in ROWS.values()]
    medians = {name: ratio.mean for name, ratio in found.items()}
    return [
        Aim(text=text, metric="ratio", aim=aim, measured=medians[name], met=medians[name] >= aim)
        for name, (text, aim) in ROWS.items()
    ]


if __name__ == "__main__":
    command(
        "bench-neutral-residues",
        "How fast neutral residues are, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else Size(), device),
        {name: aim for name, (_, aim) in ROWS.items()},
        options=("device",),
    )
