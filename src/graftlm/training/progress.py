"""The progress bar of a run."""

from __future__ import annotations

from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Steps done, loss, tokens per second and time left; silent unless `show`."""

    def __init__(self, steps: int, done: int, *, show: bool) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
            disable=not show,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, loss="–", rate="–")

    def update(self, done: int, loss: float, tokens_per_s: float) -> None:
        rate = f"{tokens_per_s:,.0f}" if tokens_per_s else "–"
        self._progress.update(self._task, completed=done, loss=f"{loss:.4f}", rate=rate)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
