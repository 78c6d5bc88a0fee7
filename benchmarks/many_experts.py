"""The cost of routing between hundreds of LoRA experts, in memory or read when a route needs them, over four.

    python benchmarks/many_experts.py --out DIR [--quick] [--device DEVICE] [--clock wall|cpu]

Both sides of a ratio run in one process, in rounds of alternating order, so that other load affects both. The `ratio`
of a row is the median over the rounds; its interval is the smallest and the largest value. The backbone and the
adapters are those of `token_routing.py`. The two experts of the largest weights act on a token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from routed import QUICK, Clocked, Reader, RoutingBenchmark, Size
from turns import AT_MOST, Clock, Turns, command, interval, made_aim, rounds, seconds

from composition import ratios
from graftlm.evaluation import Aim, Metric, Results, Row, value_of
from token_routing import storage_bytes

NAME = "bench-many-experts"
FEW = 4
MANY = 300
KEPT = 8
CHANGING = {"window": 1, "every": 1}
ROWS: dict[str, tuple[str, tuple[str, float] | None]] = {  # row id -> label, aim of its ratio
    "memory": ("bytes of the experts of which 8 stay in memory, over those of all 300", (AT_MOST, 0.05)),
    "route": ("time of the routes of 300 experts, over that of 4", None),
    "decode_all": ("a decode step with 300 experts in memory, over one with 4", (AT_MOST, 1.1)),
    "decode_stored": ("a decode step with 8 of 300 experts in memory, over one with 4", (AT_MOST, 1.1)),
    "decode_all_changing": ("the same with 300 in memory, where nearly every token has other experts", None),
    "decode_stored_changing": ("the same with 8 in memory, where nearly every token has other experts", None),
    "read": ("reading one expert, over a decode step with 4", None),
}
HOW = {
    "experts": f"random LoRA adapters on q_proj and v_proj; {MANY} of them, {KEPT} of which stay in memory, or {FEW}",
    "memory": "bytes of the factors after each turn of decode_stored_changing, with those that modules have "
    "concatenated, over the bytes of the factors of all experts",
    "route": "seconds inside the graft's prepare per decode step, with all experts in memory. share: of the step",
    "changing": "a new route for each token by the last token alone. reads: experts read per step",
    "read": "an expert whose file is in the operating system's cache, with its SHA-256",
}

Metrics = dict[str, Metric]
Model = tuple[Any, Clocked]


def benchmark(size: Size, device: torch.device, clock: Clock) -> Results:
    """Measure all rows, and return them with their aims and details."""
    with TemporaryDirectory() as folder:
        return measure(RoutingBenchmark(size, Path(folder), device, clock))


def measure(bench: RoutingBenchmark) -> Results:
    """Measure all rows with a benchmark whose adapters are written."""
    load = [os.getloadavg()[0]]
    size = bench.size
    adapters = bench.write(MANY, size.low_rank)
    models = build(bench, adapters)
    rows: dict[str, Metrics] = {}
    decoding, rows_of_decoding = measure_decoding(bench, models)
    rows |= rows_of_decoding
    routes, rows["route"] = measure_routes(bench, models)
    reading, rows["read"] = measure_reading(bench, models)
    for name, (label, _) in ROWS.items():
        values = ", ".join(f"{key} {value_of(value):.4g}" for key, value in rows[name].items())
        print(f"{label}: {values}", flush=True)
    load.append(os.getloadavg()[0])
    details = {
        "size": asdict(size) | {"lengths": list(size.lengths)},
        "dtype": str(bench.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "clock": bench.clock,
        "load_average": load,
        "how": HOW,
        "decode": decoding,
        "route": routes,
        "read": reading,
    }
    made = [Row(id=name, label=label, metrics=rows[name]) for name, (label, _) in ROWS.items()]
    return Results.here(NAME, made, aims=aims(rows, is_judged=size.vocabulary != QUICK.vocabulary), details=details)


def build(bench: RoutingBenchmark, adapters: list[Path]) -> dict[str, Model]:
    """Return the models by name. Those with stored experts have a store each."""
    few = bench.routing(adapters[:FEW], top=2)
    everything = bench.routing(adapters, top=2)
    return {
        "few": few,
        "all": everything,
        "stored": bench.routing(adapters, top=2, experts_in_memory=KEPT),
        "few_changing": bench.again(few[1], **CHANGING),
        "all_changing": bench.again(everything[1], **CHANGING),
        "stored_changing": bench.routing(adapters, top=2, experts_in_memory=KEPT, **CHANGING),
    }


def measure_decoding(bench: RoutingBenchmark, models: Mapping[str, Model]) -> tuple[dict[str, Any], dict[str, Metrics]]:
    """Measure a decode step of each model, and the bytes of the stored experts.

    Returns:
        The details, and the metrics of the rows.
    """
    size = bench.size
    ids = bench.ids(1, size.context)
    graft = models["stored_changing"][1]
    assert graft.store is not None
    in_all = storage_bytes(models["all"][1].parameters())
    shares: list[float] = []
    reads: list[float] = []

    def step(name: str, reader: Reader) -> float:
        assert graft.store is not None
        before = graft.store.reads
        spent = bench.step(reader)
        if name == "stored_changing":
            shares.append(graft.store.bytes_in_memory / in_all)
            reads.append((graft.store.reads - before) / size.steps)
        return spent

    turns = {name: partial(step, name, Reader(model, ids)) for name, (model, _) in models.items()}
    measured = rounds(turns, size.decode_rounds)
    rows: dict[str, Metrics] = {"memory": {"ratio": interval(shares[1:])}}
    for name in ("all", "stored", "all_changing", "stored_changing"):
        over = "few_changing" if name.endswith("changing") else "few"
        rows[f"decode_{name}"] = {"ratio": ratios(measured[name], measured[over])}
    rows["decode_stored_changing"]["reads"] = interval(reads[1:])
    details = {"seconds": measured, "bytes_of_all_experts": in_all, "reads_per_step": reads[1:]}
    return details, rows


def measure_routes(bench: RoutingBenchmark, models: Mapping[str, Model]) -> tuple[Turns, Metrics]:
    """Measure the time inside `prepare` per decode step, and its share of the step with many experts.

    Returns:
        The seconds, and the metrics of the row.
    """
    size = bench.size
    ids = bench.ids(1, size.context)
    steps: list[float] = []

    def route(name: str, graft: Clocked, reader: Reader) -> float:
        graft.spent = 0.0
        spent = bench.step(reader)
        if name == "all":
            steps.append(graft.spent / size.steps / spent)
        return graft.spent / size.steps

    turns = {}
    for name in ("few", "all"):
        model, graft = models[name]
        turns[name] = partial(route, name, graft, Reader(model, ids))
    measured = rounds(turns, size.decode_rounds)
    return measured, {"ratio": ratios(measured["all"], measured["few"]), "share": interval(steps[1:])}


def measure_reading(bench: RoutingBenchmark, models: Mapping[str, Model]) -> tuple[Turns, Metrics]:
    """Measure the time to read one expert, and a decode step.

    Returns:
        The seconds, and the metrics of the row.
    """
    size = bench.size
    store = models["stored"][1].store
    assert store is not None
    backbone = bench.backbone()
    turns = {
        "read": lambda: seconds(partial(store.experts[0].read, backbone), bench.device, bench.clock),
        "few": partial(bench.step, Reader(models["few"][0], bench.ids(1, size.context))),
    }
    measured = rounds(turns, size.decode_rounds)
    return measured, {"ratio": ratios(measured["read"], measured["few"])}


def aims(rows: Mapping[str, Metrics], *, is_judged: bool) -> list[Aim]:
    """Return the aims; they apply to the full size, so a quick run does not judge them."""
    made = []
    for name, (label, aim) in ROWS.items():
        if aim is not None:
            made.append(made_aim(label, "ratio", aim, value_of(rows[name]["ratio"]) if is_judged else None))
    return made


if __name__ == "__main__":
    command(
        NAME,
        "The cost of hundreds of LoRA experts over four.",
        lambda quick, device, clock: benchmark(QUICK if quick else replace(Size(), low_rank=8), device, clock),
        {name: None if aim is None else aim[1] for name, (_, aim) in ROWS.items()},
    )
