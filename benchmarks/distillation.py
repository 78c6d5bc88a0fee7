"""What distilling costs: a step that follows the bare backbone on its old rows, over one that replays them.

    python benchmarks/distillation.py --out DIR [--quick] [--device DEVICE]

Speed is measured turn by turn in one process; memory in a process for each objective, which does a few steps alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from turns import command, interval, rounds, seconds

from graftlm.evaluation import Interval, Results, Row
from graftlm.evaluation.metrics import MemoryWatch
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft
from graftlm.training import TrainingConfig
from graftlm.training.optimizer import make_optimizer
from neutral_residues import CAPACITY, QUICK, Size, gated, random_backbone

NAME = "bench-distillation"
PEAK = "--peak-of"  # of the process that `peak_bytes` starts
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
    "memory": "of a process that does three updates: all that it holds, the interpreter too; the allocated memory on a "
    "GPU",
}


class Training:
    """Training of neutral residues with one objective on old rows."""

    def __init__(self, objective: Any, size: Size, device: torch.device) -> None:
        backbone = random_backbone(size, device)
        torch.manual_seed(1)
        self.model = GraftedModel(backbone, {"graft": build_graft(gated(), backbone)}, old_objective=objective).train()
        self.optimiser = make_optimizer(self.model.trainable_parameters(), TrainingConfig(steps=1, learning_rate=1e-4))
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=generator).to(device)
        self.domain = (torch.arange(size.rows, device=device) >= OLD_FRACTION * size.rows).long()

    def speed(self) -> float:
        """Tokens per second of one update."""
        return self.ids.numel() / seconds(self.step, self.model.device)

    def step(self) -> None:
        """One update."""
        with torch.autocast(self.model.device.type, torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.ids, domain=self.domain).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def peak_bytes(objective: str, size: Size, device: torch.device) -> int:
    """The peak memory of a process of its own that trains, since freed memory may stay with a process."""
    command = [sys.executable, __file__, PEAK, objective, json.dumps(asdict(size)), str(device)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def print_peak(objective: str, size: str, device: str) -> None:
    """What the process of `peak_bytes` does: three updates."""
    training, watch = Training(objective, Size(**json.loads(size)), torch.device(device)), MemoryWatch()
    with watch:
        for _ in range(3):
            training.step()
    print(watch.peak)


def benchmark(size: Size, device: torch.device) -> Results:
    """Both rows; neither has an aim."""
    trainings = {objective: Training(objective, size, device) for objective in OBJECTIVES}
    speeds = rounds({name: training.speed for name, training in trainings.items()}, size.train_rounds)
    del trainings
    peaks = {objective: peak_bytes(objective, size, device) for objective in OBJECTIVES}
    memory = peaks["distil"] / peaks["replay"]
    found = {
        "step": interval([d / r for d, r in zip(speeds["distil"], speeds["replay"], strict=True)]),
        "memory": Interval(mean=memory, low=memory, high=memory),
    }
    details: dict[str, Any] = {
        "size": asdict(size),
        "capacity": CAPACITY,
        "old_fraction": OLD_FRACTION,
        "threads": torch.get_num_threads(),
        "how": HOW,
        "tokens_per_s": speeds,
        "peak_bytes": peaks,
    }
    rows = [Row(id=name, label=label, metrics={"ratio": found[name]}) for name, label in ROWS.items()]
    return Results.here(NAME, rows, details=details)


if __name__ == "__main__":
    if sys.argv[1:2] == [PEAK]:
        sys.exit(print_peak(*sys.argv[2:]))
    command(
        NAME,
        "What distilling costs beside replay, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else SIZE, device),
        dict.fromkeys(ROWS),
        options=("device",),
    )
