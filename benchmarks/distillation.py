"""What distilling costs: a step that follows the bare backbone on its old rows, over one that replays them.

    python benchmarks/distillation.py --out DIR [--quick] [--device DEVICE]

Speed is measured turn by turn in one process; memory in a process for each objective, which does a few steps alone.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from turns import command, interval, rounds, seconds

from graftlm.evaluation import Interval, Results, Row
from graftlm.evaluation.metrics import MemoryWatch
from graftlm.grafts import GraftedModel, build_graft
from graftlm.training import TrainingConfig
from graftlm.training.loop import make_optimizer
from neutral_residues import CAPACITY, QUICK, Size, gated, random_backbone

NAME = "bench-distillation"
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


def peak_bytes(objective: str, size: Size, device: torch.device, threads: int) -> int:
    """The peak memory of a process that trains."""
    torch.set_num_threads(threads)
    training, watch = Training(objective, size, device), MemoryWatch()
    with watch:
        for _ in range(3):
            training.step()
    return watch.peak


def benchmark(size: Size, device: torch.device) -> Results:
    """Both rows; neither has an aim."""
    trainings = {objective: Training(objective, size, device) for objective in OBJECTIVES}
    speeds = rounds({name: training.speed for name, training in trainings.items()}, size.train_rounds)
    del trainings
    peaks = {}
    for objective in OBJECTIVES:  # a process for each, since freed memory may stay with a process
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            peaks[objective] = pool.submit(peak_bytes, objective, size, device, torch.get_num_threads()).result()
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
    command(
        NAME,
        "What distilling costs beside replay, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else SIZE, device),
        dict.fromkeys(ROWS),
        options=("device",),
    )
