"""Paired measurements in one process, and the command line of the benchmarks.

The compared turns run one after another, in rounds of alternating order, so that other load of the machine affects both
sides of a ratio. A ratio is the median over rounds; its interval has the smallest and the largest value.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from pydantic import JsonValue

import graftlm
from graftlm.evaluation import Aim, Interval, Results, write_report
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.origin import Machine
from graftlm.runs.execute import execute
from graftlm.runs.run import Run, RunContext

AT_MOST = "at most"
AT_LEAST = "at least"
Clock = Literal["wall", "cpu"]
_SOURCES = (Path(__file__).parent, Path(graftlm.__file__).parent)
Turns = dict[str, list[float]]
"""The values of each turn by name, one for each round."""


def rounds(turns: Mapping[str, Callable[[], float]], count: int) -> Turns:
    """Run all turns `count` times after a warm-up, every other round in reverse order."""
    for turn in turns.values():
        turn()
    measured: Turns = {name: [] for name in turns}
    for number in range(count):
        for name in in_order(turns, number):
            measured[name].append(turns[name]())
    return measured


def in_order(turns: Iterable[str], number: int) -> list[str]:
    """Return the names of turns in the order of a round: as given, or reversed in every other round."""
    names = list(turns)
    if number % 2 == 1:
        names.reverse()
    return names


def seconds(work: Callable[[], object], device: torch.device, clock: Clock = "wall") -> float:
    """Return the time that `work` takes, including its work on a GPU.

    Args:
        work: the measured function.
        device: the device that it uses.
        clock: `wall`, or `cpu` for the CPU time of the process, summed over threads. With one thread the CPU time is
            the wall time of an idle machine.
    """
    start = _now(device, clock)
    work()
    return _now(device, clock) - start


def _now(device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() if clock == "wall" else time.process_time()


def interval(values: Sequence[float]) -> Interval:
    """Return the median, with the smallest and the largest value."""
    return Interval(mean=statistics.median(values), low=min(values), high=max(values))


def draw(results: Results, aims: Mapping[str, float | None], axis: str, *, logarithmic: bool = False) -> Figure:
    """Return a plot of each ratio with its interval, and a tick at its aim."""
    figure = Figure(figsize=(6.4, 2.2), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(reversed(results.rows)):
        ratio = row.metrics["ratio"]
        aim = aims[row.id]
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
    """Return an aim, and whether it is met.

    Args:
        label: the measured quantity.
        metric: name of the metric.
        aim: AT_MOST or AT_LEAST, and a value.
        measured: the measured value; None leaves the aim undecided, as for small models.
    """
    side, value = aim
    text = f"{label}: {side} {value:g}"
    if measured is None:
        return Aim(text=text, metric=metric, aim=value)
    is_met = measured <= value if side == AT_MOST else measured >= value
    return Aim(
        text=text,
        metric=metric,
        aim=value,
        measured=measured,
        met=is_met,
    )


class TableRun(Run):
    """All rows of a benchmark, whose turns alternate in one process.

    The sources and the machine are part of the key, so that times of other code or of another machine are not reused.
    """

    sources: tuple[str, ...]
    quick: bool
    device: str
    clock: Clock
    machine: dict[str, JsonValue]


def command(
    name: str,
    about: str,
    benchmark: Callable[[bool, torch.device, Clock], Results],
    plots: Callable[[Results], dict[str, Figure]] | Mapping[str, float | None],
    options: Sequence[str] = ("device", "clock"),
) -> None:
    """Run the command line of a benchmark: measure, and write `results.json`, `report.md` and a plot.

    Args:
        name: name of the results.
        about: description of the benchmark, for the help.
        benchmark: measures; its arguments are whether the models are small, the device and the clock.
        plots: returns the plots of the results by file name; or the aim of each row's ratio, for a plot of the ratios.
        options: which of `--device` and `--clock` the benchmark has.
    """
    chosen = _parse(name, about, options)

    class Table(TableRun):
        def measure(self, context: RunContext) -> Measurement:
            results = benchmark(self.quick, torch.device(self.device), self.clock)
            return Measurement(results.rows[0], {"results": results.model_dump(mode="json")})

    run = Table(
        id=name,
        sources=_source_files(),
        machine={**Machine.here().model_dump(mode="json"), "threads": torch.get_num_threads()},
        quick=chosen.quick,
        device=chosen.device,
        clock=chosen.clock,
    )
    measurement = execute([run], chosen.out)[name]
    results = Results.model_validate(measurement.details["results"])
    if callable(plots):
        figures = plots(results)
    else:
        figures = {"ratios": draw(results, plots, "ratio", logarithmic=True)}
    write_report(results, chosen.out, plots=figures)
    print(f"written to {chosen.out}")


def _source_files() -> tuple[str, ...]:
    return tuple(str(path) for folder in _SOURCES for path in sorted(folder.rglob("*.py")))


def _parse(name: str, about: str, options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=Path("runs") / name)
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu", clock="wall")
    if "device" in options:
        parser.add_argument("--device")
    if "clock" in options:
        parser.add_argument("--clock", choices=["wall", "cpu"], help="cpu: own time, for a busy machine")
    return parser.parse_args()
