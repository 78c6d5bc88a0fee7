"""Turns that are taken in pairs, in one process, and their command line: what the benchmarks share.

What is compared runs turn by turn, in rounds of alternating order, so that whatever else the machine does falls on both
sides of a ratio. A ratio is the median over rounds, its interval the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure

from graftlm.evaluation import Aim, Interval, Results, write_report

AT_MOST, AT_LEAST = "at most", "at least"
Clock = Literal["wall", "cpu"]
Turns = dict[str, list[float]]
"""What each turn measured, by name, round by round."""


def rounds(turns: Mapping[str, Callable[[], float]], count: int) -> Turns:
    """Take all turns `count` times after a warm-up, every other time in reverse."""
    for turn in turns.values():
        turn()
    measured: Turns = {name: [] for name in turns}
    for index in range(count):
        for name in list(turns)[:: -1 if index % 2 else 1]:
            measured[name].append(turns[name]())
    return measured


def seconds(work: Callable[[], object], device: torch.device, clock: Clock = "wall") -> float:
    """How long `work` takes, what it leaves to a GPU included.

    The clock `cpu` is the process's own time on the cores, all threads together: it stands still while other work has
    them. With one thread it is what a clock on the wall would say of a machine that does nothing else.
    """
    start = _now(device, clock)
    work()
    return _now(device, clock) - start


def _now(device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() if clock == "wall" else time.process_time()


def interval(values: Sequence[float]) -> Interval:
    """The median, the smallest and the largest."""
    return Interval(mean=statistics.median(values), low=min(values), high=max(values))


def draw(results: Results, aims: Mapping[str, float | None], axis: str, *, logarithmic: bool = False) -> Figure:
    """Each ratio with its interval, and its aim as a tick, where it has one."""
    figure = Figure(figsize=(6.4, 2.2), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(results.rows)):
        ratio, aim = row.metrics["ratio"], aims[row.id]
        assert isinstance(ratio, Interval)
        axes.plot([ratio.low, ratio.high], [place, place], color="#0072B2", linewidth=2)
        axes.plot(ratio.mean, place, "o", color="#0072B2")
        if aim is not None:
            axes.plot(aim, place, "|", color="#D55E00", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(results.rows)), [row.id for row in reversed(results.rows)])
    axes.set_ylim(-0.6, len(results.rows) - 0.4)
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(f"{axis}: median, smallest and largest; tick: aim")
    return figure


def made_aim(label: str, metric: str, aim: tuple[str, float], measured: float | None) -> Aim:
    """An aim, AT_MOST or AT_LEAST a value, and whether it is met; None is a size that says nothing about it."""
    side, value = aim
    text = f"{label}: {side} {value:g}"
    if measured is None:
        return Aim(text=text, metric=metric, aim=value)
    met = measured <= value if side == AT_MOST else measured >= value
    return Aim(text=text, metric=metric, aim=value, measured=measured, met=met)


def command(
    name: str,
    about: str,
    benchmark: Callable[[bool, torch.device, Clock], Results],
    aims: Mapping[str, float | None],
) -> None:
    """A benchmark's command line: measure, and write `results.json`, `report.md` and a plot.

    Args:
        name: of its results.
        about: one sentence.
        benchmark: given whether models are small, the device and the clock.
        aims: of each row's ratio, for the plot.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=Path("runs") / name)
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: own time, for a busy machine")
    chosen = parser.parse_args()
    results = benchmark(chosen.quick, torch.device(chosen.device), chosen.clock)
    write_report(results, chosen.out, plots={"ratios": draw(results, aims, "ratio", logarithmic=True)})
    print(f"written to {chosen.out}")
