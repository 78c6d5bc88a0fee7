"""What it saves to compute logits only before targets: a step of training, over one with the logits of all tokens.

    python benchmarks/target_logits.py --out DIR [--quick] [--clock cpu]

SmolLM2-135M-Instruct reads 4 rows of 128 tokens, a quarter of which are targets, as in conversations. The speeds of
both are measured in turns in one process. Memory is measured in one process for each, which does a few steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from turns import Clock, Turns, command, interval, rounds, seconds

from graftlm.backbone import Backbone, load_backbone
from graftlm.evaluation import Interval, Results, Row
from graftlm.evaluation.cost import MemoryWatch
from graftlm.grafted.losses import IGNORED
from graftlm.grafted.model import GraftedModel, OldObjective
from graftlm.grafts import build_graft, graft_config
from graftlm.testing.tiny import tiny_model, tiny_tokenizer
from graftlm.training import TrainingConfig
from graftlm.training.optimizer import make_optimizer

NAME = "bench-target-logits"
PEAK = "--peak-of"  # marks the processes that `peak_bytes` starts
PEAK_STEPS = 3
MODEL = "smollm2-135m-instruct"
ROWS_PER_STEP = 4
LENGTH = 128
TARGETS = LENGTH // 4
ROUNDS = 9
QUICK_ROUNDS = 2
LABELS = {
    "replay": "tokens per second of training, logits before targets over all logits",
    "distil": "tokens per second where half of the rows are distilled",
    "memory": "peak memory of training, logits before targets over all logits",
}
HOW = {
    "replay": "one update of LoRA: forward, loss, backward, AdamW; float32",
    "distil": "the bare backbone computes the logits that its own rows need in both cases",
    "memory": "of a process that does three updates: all that it holds, including the interpreter and the weights",
}


class Training:
    """Training of LoRA on rows that end with targets.

    Args:
        objective: the objective of the first half of the rows.
        quick: whether the model is tiny.
    """

    def __init__(self, objective: OldObjective, quick: bool) -> None:
        backbone = _backbone(quick)
        torch.manual_seed(1)
        graft = build_graft(graft_config({"kind": "lora"}), backbone)
        self.model = GraftedModel(backbone, {"graft": graft}, old_objective=objective).train()
        config = TrainingConfig(steps=1, learning_rate=1e-4)
        self.optimiser = make_optimizer(self.model.trainable_parameters(), config)
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(4, 300, (ROWS_PER_STEP, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        self.labels[:, :-TARGETS] = IGNORED
        self.domain = (torch.arange(ROWS_PER_STEP) >= ROWS_PER_STEP / 2).long()

    def speed(self, return_logits: bool, clock: Clock) -> float:
        """Return the tokens per second of one update."""
        step = partial(self.step, return_logits)
        return self.ids.numel() / seconds(step, self.model.device, clock)

    def step(self, return_logits: bool) -> None:
        """Do one update.

        Args:
            return_logits: whether to compute the logits of all tokens.
        """
        output = self.model(
            input_ids=self.ids,
            labels=self.labels,
            domain=self.domain,
            return_logits=return_logits,
        )
        output.loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def _backbone(quick: bool) -> Backbone:
    if quick:
        return Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    return load_backbone(MODEL, device=torch.device("cpu"), dtype="float32")


def peak_bytes(return_logits: bool, quick: bool) -> int:
    """Return the peak memory of a new process that trains, because a process may keep memory that it freed."""
    process = subprocess.run(
        [sys.executable, __file__, PEAK, json.dumps(return_logits), json.dumps(quick)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return int(process.stdout)


def print_peak(return_logits: str, quick: str) -> None:
    """Do the updates of a process of `peak_bytes`, and print their peak memory."""
    training = Training("replay", json.loads(quick))
    with MemoryWatch() as watch:
        for _ in range(PEAK_STEPS):
            training.step(json.loads(return_logits))
    print(watch.peak)


def benchmark(quick: bool, clock: Clock) -> Results:
    """Measure all rows; none has an aim."""
    speeds: dict[str, Turns] = {}
    ratios: dict[str, Interval] = {}
    objectives: tuple[OldObjective, ...] = ("replay", "distil")
    for objective in objectives:
        training = Training(objective, quick)
        turns = {
            "all logits": partial(training.speed, True, clock),
            "before targets": partial(training.speed, False, clock),
        }
        speeds[objective] = rounds(turns, QUICK_ROUNDS if quick else ROUNDS)
        ratios[objective] = _speed_ratio(speeds[objective])
    peaks = {"all logits": peak_bytes(True, quick), "before targets": peak_bytes(False, quick)}
    memory = peaks["before targets"] / peaks["all logits"]
    ratios["memory"] = Interval(mean=memory, low=memory, high=memory)
    rows = [Row(id=name, label=label, metrics={"ratio": ratios[name]}) for name, label in LABELS.items()]
    return Results.here(NAME, rows, details=details_of(speeds, peaks, clock))


def _speed_ratio(speeds: Turns) -> Interval:
    pairs = zip(speeds["all logits"], speeds["before targets"], strict=True)
    return interval([fewer / every for every, fewer in pairs])


def details_of(speeds: Mapping[str, Turns], peaks: Mapping[str, int], clock: Clock) -> dict[str, Any]:
    """Return the details of the results."""
    return {
        "model": MODEL,
        "rows": ROWS_PER_STEP,
        "length": LENGTH,
        "targets_per_row": TARGETS,
        "threads": torch.get_num_threads(),
        "clock": clock,
        "how": HOW,
        "tokens_per_s": dict(speeds),
        "peak_bytes": dict(peaks),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [PEAK]:
        print_peak(*sys.argv[2:])
        sys.exit()
    command(
        NAME,
        "What logits before targets only save in training, in ratios.",
        lambda quick, device, clock: benchmark(quick, clock),
        dict.fromkeys(LABELS),
        options=("clock",),
    )
