"""What the loss in chunks costs and saves in training, relative to the loss of all logits.

    python benchmarks/training.py --out DIR [--quick] [--clock cpu]

SmolLM2-135M-Instruct with LoRA. Speeds of both are measured in turns in one process. Memory is measured in one process
for each, which does one update.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from turns import AT_MOST, Clock, Turns, command, interval, made_aim, rounds, seconds

from graftlm.backbone import Backbone, load_backbone
from graftlm.evaluation import Interval, Results, Row
from graftlm.evaluation.cost import MemoryWatch
from graftlm.grafted.losses import IGNORED
from graftlm.grafted.model import GraftedModel, OldObjective
from graftlm.grafts import build_graft, graft_config
from graftlm.testing.tiny import tiny_model, tiny_tokenizer
from graftlm.training import TrainingConfig
from graftlm.training.optimizer import make_optimizer

NAME = "bench-training"
PEAK = "--peak-of"  # marks the processes that `peak_bytes` starts
MODEL = "smollm2-135m-instruct"
ROUNDS = 9
QUICK_ROUNDS = 2


class Form(NamedTuple):
    """The form of the rows of an update.

    Attributes:
        rows: number of rows.
        length: tokens per row.
        targets: number of targets at the end of each row.
        objective: how the first half of the rows is learned.
        checkpointing: whether activations are recomputed.
    """

    rows: int
    length: int
    targets: int
    objective: OldObjective = "replay"
    checkpointing: bool = False


SPEEDS = {
    "text": Form(4, 128, 127),
    "conversations": Form(4, 128, 32),
    "distil": Form(4, 128, 32, "distil"),
}
MEMORY = {
    "memory_text": Form(8, 1024, 1023, checkpointing=True),
    "memory_distil": Form(8, 1024, 1023, "distil", checkpointing=True),
    "memory_conversations": Form(4, 128, 32),
}
ONLY_USED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Lets glibc return freed tensors to the system, of which it would otherwise keep gigabytes."""
QUICK_FORM = {"rows": 2, "length": 16, "targets": 8}
LABELS = {
    "text": "tokens per second, all tokens are targets",
    "conversations": "tokens per second, a quarter of the tokens are targets",
    "distil": "tokens per second, of these half are distilled",
    "memory_text": "peak memory of 8 x 1,024 tokens, all targets",
    "memory_distil": "peak memory of 8 x 1,024 tokens, half are distilled",
    "memory_conversations": "peak memory of 4 x 128 tokens, a quarter are targets",
}
AIMS = {"memory_text": 0.5}


class Training:
    """Training of LoRA on rows that end with targets.

    Args:
        form: the form of the rows.
        quick: whether the model is tiny.
    """

    def __init__(self, form: Form, quick: bool) -> None:
        backbone = _backbone(quick)
        torch.manual_seed(1)
        graft = build_graft(graft_config({"kind": "lora"}), backbone)
        self.model = GraftedModel(backbone, {"graft": graft}, old_objective=form.objective).train()
        if form.checkpointing:
            self.model.enable_gradient_checkpointing()
        config = TrainingConfig(steps=1, learning_rate=1e-4)
        self.optimiser = make_optimizer(self.model.trainable_parameters(), config)
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(4, 300, (form.rows, form.length), generator=generator)
        self.labels = self.ids.clone()
        self.labels[:, : -form.targets] = IGNORED
        self.domain = (torch.arange(form.rows) >= form.rows / 2).long()

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


def peak_bytes(name: str, return_logits: bool, quick: bool) -> int:
    """Return the peak memory of a new process that trains, because a process may keep memory that it freed."""
    process = subprocess.run(
        [sys.executable, __file__, PEAK, name, json.dumps(return_logits), json.dumps(quick)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ONLY_USED_MEMORY,
    )
    return int(process.stdout)


def print_peak(name: str, return_logits: str, quick: str) -> None:
    """Do the update of a process of `peak_bytes`, and print its peak memory."""
    is_quick = json.loads(quick)
    training = Training(_form(MEMORY[name], is_quick), is_quick)
    with MemoryWatch() as watch:
        training.step(json.loads(return_logits))
    print(watch.peak)


def _form(form: Form, quick: bool) -> Form:
    return form._replace(**QUICK_FORM) if quick else form


def benchmark(quick: bool, clock: Clock) -> Results:
    """Measure all rows."""
    speeds: dict[str, Turns] = {}
    ratios: dict[str, Interval] = {}
    for name, form in SPEEDS.items():
        training = Training(_form(form, quick), quick)
        turns = {
            "all logits": partial(training.speed, True, clock),
            "chunks": partial(training.speed, False, clock),
        }
        speeds[name] = rounds(turns, QUICK_ROUNDS if quick else ROUNDS)
        pairs = zip(speeds[name]["all logits"], speeds[name]["chunks"], strict=True)
        ratios[name] = interval([chunks / every for every, chunks in pairs])
    peaks: dict[str, dict[str, int]] = {}
    for name in MEMORY:
        peaks[name] = {"all logits": peak_bytes(name, True, quick), "chunks": peak_bytes(name, False, quick)}
        memory = peaks[name]["chunks"] / peaks[name]["all logits"]
        ratios[name] = Interval(mean=memory, low=memory, high=memory)
    rows = [Row(id=name, label=label, metrics={"ratio": ratios[name]}) for name, label in LABELS.items()]
    aims = []
    for name, limit in AIMS.items():
        measured = None if quick else ratios[name].mean
        aims.append(made_aim(LABELS[name], "ratio", (AT_MOST, limit), measured))
    return Results.here(NAME, rows, aims=aims, details=details_of(speeds, peaks, clock))


def details_of(speeds: Mapping[str, Turns], peaks: Mapping[str, Mapping[str, int]], clock: Clock) -> dict[str, Any]:
    """Return the details of the results."""
    forms = {name: form._asdict() for name, form in {**SPEEDS, **MEMORY}.items()}
    return {
        "model": MODEL,
        "how": "one update of LoRA, of the gradient too, in float32; memory is all that the process uses",
        "forms": forms,
        "threads": torch.get_num_threads(),
        "clock": clock,
        "tokens_per_s": dict(speeds),
        "peak_bytes": {name: dict(values) for name, values in peaks.items()},
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [PEAK]:
        print_peak(*sys.argv[2:])
        sys.exit()
    command(
        NAME,
        "What the loss in chunks costs and saves in training, in ratios.",
        lambda quick, device, clock: benchmark(quick, clock),
        {name: AIMS.get(name) for name in LABELS},
        options=("clock",),
    )
