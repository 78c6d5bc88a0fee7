"""Speed of neutral residues: training compared with LoRA of equal size, decoding compared with the bare backbone.

    python benchmarks/neutral_residues.py --out DIR [--quick] [--device DEVICE]

Both sides of a ratio run in the same process, in alternating turns, so that other load of the machine affects both. A
row's `ratio` is the median over rounds, and its interval is the smallest and the largest ratio. The backbone is a Llama
with random weights, since the speed does not depend on their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Clock, Turns, command, interval, rounds, seconds

from graftlm.backbone import Backbone
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, GraftConfig, build_graft, graft_config
from graftlm.training import TrainingConfig
from graftlm.training.optimizer import make_optimizer

NAME = "bench-neutral-residues"
CAPACITY = 0.2
ROWS = {  # row id -> label, aim
    "train": ("training, over PEFT LoRA of equal size on the FFN", 1.0),
    "decode_closed": ("decoding with closed gates, over the bare backbone", 0.97),
    "decode_open": ("decoding with open gates, over the bare backbone", 0.8),
}
HOW = {
    "training": "one update: forward, loss with the local loss, backward, AdamW; bfloat16 autocast; gated: gates as at "
    "the start of training; open: all gates held open; parameters: number of trained parameters",
    "decoding": "greedy, one sequence, with a cache, prefill included; a bias holds all gates closed or open, and the "
    "gates are still computed; bound_open: weights of the bare backbone over weights read with open gates",
}


@dataclass(frozen=True)
class Size:
    """Sizes of the backbone and of the work. One row of a batch in ten belongs to the old domain."""

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


QUICK = Size(
    width=64,
    ffn=128,
    layers=2,
    heads=4,
    vocabulary=512,
    rows=10,
    length=16,
    prompt=4,
    new_tokens=8,
    train_rounds=3,
    decode_rounds=3,
)


class Training:
    """Training of a graft on its own backbone, with bfloat16 autocast."""

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
        """Run an update, and return its tokens per second."""
        return self.batch["input_ids"].numel() / seconds(self._step, self.model.device)

    def _step(self) -> None:
        with torch.autocast(self.model.device.type, torch.bfloat16):
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def decoding_speed(backbone: Backbone, graft: Graft | None, prompt: Tensor, new_tokens: int) -> float:
    """Decode a sequence greedily with a cache, and return its new tokens per second, prefill included.

    Without a graft the bare backbone is measured.
    """
    model: Any = backbone.model

    def decode() -> None:
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )

    if graft is None:
        return new_tokens / seconds(decode, backbone.device)
    with GraftedModel(backbone, {"graft": graft}):
        return new_tokens / seconds(decode, backbone.device)


def random_backbone(size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> Backbone:
    """Return a Llama with tied embeddings, as usual for models of this size, which never ends a text."""
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
    """Return random tokens and their domain marks."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=generator).to(device)
    domain = torch.ones(size.rows, dtype=torch.long, device=device)
    domain[: size.rows // 10] = 0
    return {"input_ids": ids, "labels": ids, "domain": domain}


def gated(**changes: Any) -> GraftConfig:
    """Return the config of neutral residues at the measured capacity."""
    return graft_config({"kind": "neutral-residues", "capacity": CAPACITY} | changes)


@torch.no_grad()
def hold(graft: Graft, bias: float) -> None:
    """Hold all gates open or closed by a bias; the gates are still computed."""
    for name, parameter in graft.named_parameters():
        if name.endswith("gate.bias"):
            parameter.fill_(bias)


@torch.no_grad()
def held_graft(backbone: Backbone, bias: float) -> Graft:
    """Return an adapter with random weights, in the backbone's precision, with its gates held open or closed."""
    graft = build_graft(gated(init="he"), backbone)
    for name, parameter in graft.named_parameters():
        if name.endswith("w_o.weight"):
            parameter.normal_(0, 0.02)
    hold(graft, bias)
    return graft.to(backbone.model.dtype).eval()


def open_share(model: GraftedModel, ids: Tensor) -> float:
    """Return the share of open gates, over tokens and layers."""
    statistics = model.observe(input_ids=ids, use_cache=False)
    return statistics["graft"]["open_share"].mean().item()


def measure_training(size: Size, device: torch.device) -> tuple[Turns, dict[str, Any]]:
    """Measure the speeds of `lora`, of `gated` with gates as at the start, and of `open` with all gates held open."""
    trainings = {
        "lora": Training(graft_config({"kind": "lora", "capacity": CAPACITY}), size, device),
        "gated": Training(gated(gate_init="random"), size, device),
        "open": Training(gated(), size, device),
    }
    hold(trainings["open"].graft, 10.0)
    gated_model = trainings["gated"].model
    ids = trainings["gated"].batch["input_ids"]
    details: dict[str, Any] = {
        "open_share_gated": open_share(gated_model, ids),
        "open_share_open": open_share(trainings["open"].model, ids),
    }
    turns = {name: training.speed for name, training in trainings.items()}
    speeds = rounds(turns, size.train_rounds)
    details["open_share_gated_at_the_end"] = open_share(gated_model, ids)
    for name, training in trainings.items():
        details[f"parameters_{name}"] = training.parameters
    return speeds, details


def measure_decoding(size: Size, device: torch.device, dtype: torch.dtype) -> tuple[Turns, dict[str, Any]]:
    """Measure the speeds of the `bare` backbone, and of the backbone with all gates `closed` and `open`."""
    backbone = random_backbone(size, device, dtype)
    prompt = random_batch(size, device)["input_ids"][:1, : size.prompt]
    closed = held_graft(backbone, -10.0)
    opened = held_graft(backbone, 10.0)
    details: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    for name, graft in (("closed", closed), ("open", opened)):
        with GraftedModel(backbone, {"graft": graft}) as model:
            details[f"open_share_{name}"] = open_share(model, prompt)
    turns = {
        "bare": partial(decoding_speed, backbone, None, prompt, size.new_tokens),
        "closed": partial(decoding_speed, backbone, closed, prompt, size.new_tokens),
        "open": partial(decoding_speed, backbone, opened, prompt, size.new_tokens),
    }
    details["bound_open"] = weight_bound(backbone, opened)
    return rounds(turns, size.decode_rounds), details


def weight_bound(backbone: Backbone, graft: Graft) -> float:
    """Return the ratio of decoding speeds if reading the weights is all that takes time."""
    bare = sum(parameter.numel() for parameter in backbone.model.parameters())
    added = sum(parameter.numel() for parameter in graft.parameters())
    return bare / (bare + added)


def ratios(speeds: Turns, over: str, under: str) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(speeds[over], speeds[under], strict=True)]


def benchmark(size: Size, device: torch.device) -> Results:
    """Run the benchmark."""
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
    """Return the aims; a quick run does not decide them, since its backbone is too small."""
    made = []
    for name, (text, aim) in ROWS.items():
        if size == QUICK:
            made.append(Aim(text=text, metric="ratio", aim=aim))
        else:
            median = found[name].mean
            made.append(Aim(text=text, metric="ratio", aim=aim, measured=median, met=median >= aim))
    return made


def run(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Run the benchmark at full or at quick size."""
    return benchmark(QUICK if quick else Size(), device)


if __name__ == "__main__":
    command(
        "bench-neutral-residues",
        "How fast neutral residues are, in ratios.",
        run,
        {name: aim for name, (_, aim) in ROWS.items()},
        options=("device",),
    )
