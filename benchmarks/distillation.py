"""What distilling costs: a step that follows the bare backbone on its old rows, over a step that replays them.

    python benchmarks/distillation.py --out DIR [--quick] [--device DEVICE]

The speeds of both objectives are measured in turns in one process. Memory is measured in one process per objective,
which does a few steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from turns import Turns, command, interval, rounds, seconds

from graftlm.evaluation import Interval, Results, Row
from graftlm.evaluation.cost import MemoryWatch
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft
from graftlm.training import TrainingConfig
from graftlm.training.loop import make_optimizer
from neutral_residues import CAPACITY, QUICK, Size, gated, random_backbone

NAME = "bench-distillation"
PEAK = "--peak-of"  # marks the processes that `peak_bytes` starts
PEAK_STEPS = 3
SIZE = replace(Size(), vocabulary=49_152, rows=8)
OBJECTIVES = ("replay", "distil")
OLD_FRACTION = 0.25
ROWS = {
    "step": "tokens per second of training, distil over replay",
    "memory": "peak memory of training, distil over replay",
}
HOW = {
    "step": "one update: forward, loss with the local loss, backward, AdamW; bfloat16 autocast; a quarter of the rows "
    "is old; distil adds the bare backbone's forward pass on those rows",
    "memory": "of a process that does three updates: all that it holds, including the interpreter; the allocated "
    "memory on a GPU",
}


class Training:
    """Training of neutral residues with one objective on old rows.

    Args:
        objective: `replay` or `distil`.
        size: size of the model and its batches.
        device: device of the training.
    """

    def __init__(self, objective: Any, size: Size, device: torch.device) -> None:
        backbone = random_backbone(size, device)
        torch.manual_seed(1)
        graft = build_graft(gated(), backbone)
        self.model = GraftedModel(backbone, {"graft": graft}, old_objective=objective).train()
        config = TrainingConfig(steps=1, learning_rate=1e-4)
        self.optimiser = make_optimizer(self.model.trainable_parameters(), config)
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=generator)
        self.ids = ids.to(device)
        rows = torch.arange(size.rows, device=device)
        self.domain = (rows >= OLD_FRACTION * size.rows).long()

    def speed(self) -> float:
        """Return the tokens per second of one update."""
        return self.ids.numel() / seconds(self.step, self.model.device)

    def step(self) -> None:
        """Do one update."""
        with torch.autocast(self.model.device.type, torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.ids, domain=self.domain).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def peak_bytes(objective: str, size: Size, device: torch.device) -> int:
    """Return the peak memory of a new process that trains, because a process may keep memory that it freed."""
    arguments = [objective, json.dumps(asdict(size)), str(device)]
    process = subprocess.run(
        [sys.executable, __file__, PEAK, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return int(process.stdout)


def print_peak(objective: str, size: str, device: str) -> None:
    """Do the updates of a process of `peak_bytes`, and print their peak memory."""
    training = Training(objective, Size(**json.loads(size)), torch.device(device))
    with MemoryWatch() as watch:
        for _ in range(PEAK_STEPS):
            training.step()
    print(watch.peak)


def benchmark(size: Size, device: torch.device) -> Results:
    """Measure both rows; neither has an aim."""
    speeds = measure_speeds(size, device)
    step_ratios = []
    for replay, distil in zip(speeds["replay"], speeds["distil"], strict=True):
        step_ratios.append(distil / replay)
    peaks = {objective: peak_bytes(objective, size, device) for objective in OBJECTIVES}
    memory_ratio = peaks["distil"] / peaks["replay"]
    ratios = {
        "step": interval(step_ratios),
        "memory": Interval(mean=memory_ratio, low=memory_ratio, high=memory_ratio),
    }
    rows = [Row(id=name, label=label, metrics={"ratio": ratios[name]}) for name, label in ROWS.items()]
    return Results.here(NAME, rows, details=details_of(size, speeds, peaks))


def measure_speeds(size: Size, device: torch.device) -> Turns:
    """Return the tokens per second of both objectives in each round; their models are freed afterwards."""
    trainings = {objective: Training(objective, size, device) for objective in OBJECTIVES}
    turns = {objective: training.speed for objective, training in trainings.items()}
    return rounds(turns, size.train_rounds)


def details_of(size: Size, speeds: Turns, peaks: Mapping[str, int]) -> dict[str, Any]:
    """Return the details of the results."""
    return {
        "size": asdict(size),
        "capacity": CAPACITY,
        "old_fraction": OLD_FRACTION,
        "threads": torch.get_num_threads(),
        "how": HOW,
        "tokens_per_s": speeds,
        "peak_bytes": dict(peaks),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [PEAK]:
        print_peak(*sys.argv[2:])
        sys.exit()
    command(
        NAME,
        "What distilling costs compared with replay, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else SIZE, device),
        dict.fromkeys(ROWS),
        options=("device",),
    )
