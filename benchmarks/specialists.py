"""The cost of a composition by the number of its specialists: a decode step, and memory.

    python benchmarks/specialists.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

All models of a measurement run in one process, in rounds of alternating order, so that other load affects all. The
`ratio` of a row is a decode step of the composition over the sum of the steps of its models without a graft; the
interval is the smallest and the largest value over the rounds. `memory_ratio` is the same for the bytes of weights,
and of keys and values after the context.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from pair import QUICK, Reader, Size, count, random_ids, random_llama, randomise_outputs, weight_bytes, wrap
from transformers import PreTrainedModel
from turns import Clock, Turns, command, interval, rounds, seconds

from composition import cache_bytes, ratios
from graftlm.evaluation import Interval, Results, Row
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.composition import Composition, CompositionConfig

NAME = "bench-specialists"
COUNTS = (1, 2, 3)
ROWS = {f"specialists_{n}": f"anchor and {n} specialist{'s' if n > 1 else ''}" for n in COUNTS}


class Composed:
    """An anchor with several specialists, composed, and a copy of each model without a graft.

    Args:
        specialists: number of specialists.
        size: sizes of the models.
        device: device of the models.
        dtype: dtype of the weights.
    """

    def __init__(self, specialists: int, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        def model(shape: Any, seed: int) -> PreTrainedModel:
            return random_llama(shape, size.vocabulary, seed=seed).to(device=device, dtype=dtype)

        anchor = model(size.anchor, 0)
        augmenting = {f"specialist{n}": model(size.augmenting, n) for n in range(1, specialists + 1)}
        self.alone = [copy.deepcopy(anchor), *(copy.deepcopy(one) for one in augmenting.values())]
        config = CompositionConfig.parse(
            {"augmenting": {name: {"name": "in memory"} for name in augmenting}, "stride": size.stride}
        )
        torch.manual_seed(specialists + 1)
        backbone = wrap(anchor)
        graft = Composition(config, backbone, augmenting={name: wrap(one) for name, one in augmenting.items()})
        self.graft = graft.to(dtype)
        randomise_outputs(self.graft)
        self.model = GraftedModel(backbone, {"graft": self.graft}).model


def measure_decoding(composed: Composed, size: Size, device: torch.device, clock: Clock) -> Turns:
    """Measure the seconds of a decode step of the `composition`, and of each model alone; each step is undone."""
    ids = random_ids(size, 1, size.context, device)

    def decode(reader: Reader) -> float:
        taken = seconds(lambda: reader.step(ids[:, :1], size.steps), device, clock) / size.steps
        reader.cache.crop(-size.steps)
        return taken

    models = {"composition": composed.model}
    for number, model in enumerate(composed.alone):
        models[f"alone_{number}"] = model
    turns = {name: partial(decode, Reader(model, ids)) for name, model in models.items()}
    return rounds(turns, size.decode_rounds)


@torch.inference_mode()
def measure_memory(composed: Composed, size: Size, device: torch.device) -> dict[str, int]:
    """Measure the bytes of weights and caches after the context, composed and of all models alone."""
    ids = random_ids(size, 1, size.context, device)
    weights = sum(weight_bytes(model) for model in composed.alone)
    return {
        "composition": weights + weight_bytes(composed.graft) + cache_bytes(composed.model, ids),
        "alone": weights + sum(cache_bytes(model, ids) for model in composed.alone),
    }


def measure(specialists: int, size: Size, device: torch.device, clock: Clock) -> tuple[dict[str, Interval], Any]:
    """Measure a row: its ratios, and the details."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    composed = Composed(specialists, size, device, dtype)
    turns = measure_decoding(composed, size, device, clock)
    alone = [sum(steps) for steps in zip(*(turns[one] for one in turns if one != "composition"), strict=True)]
    memory = measure_memory(composed, size, device)
    ratios_of_row = {
        "ratio": ratios(turns["composition"], alone),
        "memory_ratio": interval([memory["composition"] / memory["alone"]]),
    }
    print(
        f"{specialists}: {ratios_of_row['ratio'].mean:.3f}, memory {ratios_of_row['memory_ratio'].mean:.3f}", flush=True
    )
    return ratios_of_row, {"seconds": turns, "bytes": memory, "parameters": count(composed.graft)}


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """Measure all rows."""
    rows = []
    measured: dict[str, Any] = {}
    for specialists, (name, label) in zip(COUNTS, ROWS.items(), strict=True):
        metrics, measured[name] = measure(specialists, size, device, clock)
        rows.append(Row(id=name, label=label, metrics=dict(metrics)))
    details = {
        "size": asdict(size) | {"lengths": list(size.lengths)},
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "threads": torch.get_num_threads(),
        "clock": clock,
        "measured": measured,
    }
    return Results.here(NAME, rows, details=details)


if __name__ == "__main__":
    command(
        NAME,
        "The cost of a composition by the number of its specialists, in ratios.",
        lambda quick, device, clock: benchmark(QUICK if quick else Size(), device, clock),
        dict.fromkeys(ROWS),
    )
