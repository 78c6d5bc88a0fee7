"""Paired measurements in one process, and their command line: what the benchmarks share.

The compared turns run one after another in rounds of alternating order, so that other load of the machine affects both
sides of a ratio. A ratio is the median over rounds; its interval has the smallest and the largest value.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

import graftlm
from graftlm.evaluation import Aim, Interval, Results, write_report
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.results import Machine
from graftlm.runs.execute import execute
from graftlm.runs.run import Run, RunContext

AT_MOST, AT_LEAST = "at most", "at least"
Clock = Literal["wall", "cpu"]
_OPTIONS = ("quick", "device", "clock")
_SOURCES = (Path(__file__).parent, Path(graftlm.__file__).parent)
Turns = dict[str, list[float]]
"""The values of each turn by name, one for each round."""


def rounds(turns: Mapping[str, Callable[[], float]], count: int) -> Turns:
    """Run all turns `count` times after a warm-up, every other round in reverse order."""
    for turn in turns.values():
        turn()
    measured: Turns = {name: [] for name in turns}
    for index in range(count):
        for name in list(turns)[:: -1 if index % 2 else 1]:
            measured[name].append(turns[name]())
    return measured


def seconds(work: Callable[[], object], device: torch.device, clock: Clock = "wall") -> float:
    """The time that `work` takes, including its work on a GPU.

    The clock `cpu` is the CPU time of the process, summed over threads. With one thread it is the wall time of an idle
    machine.
    """
    start = _now(device, clock)
    work()
    return _now(device, clock) - start


def _now(device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() if clock == "wall" else time.process_time()


def interval(values: Sequence[float]) -> Interval:
    """The median, with the smallest and the largest value."""
    return Interval(mean=statistics.median(values), low=min(values), high=max(values))


def draw(results: Results, aims: Mapping[str, float | None], axis: str, *, logarithmic: bool = False) -> Figure:
    """A plot of each ratio with its interval, and a tick at its aim."""
    figure = Figure(figsize=(6.4, 2.2), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(reversed(results.rows)):
        ratio, aim = row.metrics["ratio"], aims[row.id]
        assert isinstance(ratio, Interval)
        axes.plot([ratio.low, ratio.high], [position, position], color="#0072B2", linewidth=2)
        axes.plot(ratio.mean, position, "o", color="#0072B2")
        if aim is not None:
            axes.plot(aim, position, "|", color="#D55E00", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(results.rows)), [row.id for row in reversed(results.rows)])
    axes.set_ylim(-0.6, len(results.rows) - 0.4)
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(f"{axis}: median, smallest and largest; tick: aim")
    return figure


def made_aim(label: str, metric: str, aim: tuple[str, float], measured: float | None) -> Aim:
    """An aim, AT_MOST or AT_LEAST a value, and whether it is met; with None (small models) it is not judged."""
    side, value = aim
    text = f"{label}: {side} {value:g}"
    if measured is None:
        return Aim(text=text, metric=metric, aim=value)
    met = measured <= value if side == AT_MOST else measured >= value
    return Aim(text=text, metric=metric, aim=value, measured=measured, met=met)


class TableRun(Run):
    """All rows of a benchmark, since their turns alternate in one process.

    Times of other code or another machine are not read back: the sources and the machine are part of the key.
    """

    sources: tuple[str, ...]
    quick: bool
    device: str
    clock: Clock
    machine: dict[str, Any]


def command(
    name: str,
    about: str,
    benchmark: Callable[[bool, torch.device, Clock], Results],
    plots: Callable[[Results], dict[str, Figure]] | Mapping[str, float | None],
    options: Sequence[str] = ("device", "clock"),
) -> None:
    """The command line of a benchmark: measure, and write `results.json`, `report.md` and a plot.

    Args:
        name: name of the results.
        about: one sentence for the help.
        benchmark: called with whether models are small, the device and the clock.
        plots: draws the results, by file name; or the aim of each row's ratio.
        options: which of `--device` and `--clock` the benchmark has.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=Path("runs") / name)
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu", clock="wall")
    if "device" in options:
        parser.add_argument("--device")
    if "clock" in options:
        parser.add_argument("--clock", choices=["wall", "cpu"], help="cpu: own time, for a busy machine")
    chosen = parser.parse_args()

    class Table(TableRun):
        def measure(self, context: RunContext) -> Measurement:
            results = benchmark(self.quick, torch.device(self.device), self.clock)
            return Measurement(results.rows[0], {"results": results.model_dump(mode="json")})

    machine = Machine.here().model_dump(mode="json") | {"threads": torch.get_num_threads()}
    sources = tuple(str(path) for folder in _SOURCES for path in sorted(folder.rglob("*.py")))
    run = Table(id=name, sources=sources, machine=machine, **{key: vars(chosen)[key] for key in _OPTIONS})
    results = Results.model_validate(execute([run], chosen.out)[name].details["results"])
    figures = plots(results) if callable(plots) else {"ratios": draw(results, plots, "ratio", logarithmic=True)}
    write_report(results, chosen.out, plots=figures)
    print(f"written to {chosen.out}")
