"""Progress of long work: a bar in a terminal, and lines at intervals where the output is piped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

SECONDS_BETWEEN_LINES = 30.0
SHARE = "{task.percentage:>3.0f}%"
"""A column with the share of the steps that are done."""


@contextmanager
def progress_bar(title: str, total: int, *columns: Any, show: bool, **fields: Any) -> Iterator[Callable[..., None]]:
    """Show the progress of the work in the block, with an estimate of the remaining time.

    A terminal shows a bar. Other outputs get a line at most every `SECONDS_BETWEEN_LINES` seconds. If there were lines
    and the block ends without an error, the last line has the duration.

    Args:
        title: name of the work.
        total: number of steps.
        columns: columns of rich before the remaining time. A string is a template such as
            `"loss {task.fields[loss]}"`. Lines show only the templates.
        show: whether to show anything.
        fields: initial values of the templates' fields. The field `completed` is the number of steps that are already
            done.

    Yields:
        A function that changes the progress: `update(advance=1)`, or `update(completed=10, loss="2.31")`.
    """
    from rich import get_console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = get_console()  # the console that the command line directs to stderr
    if show and not console.is_terminal:
        templates = [column for column in columns if isinstance(column, str)]
        lines = _ProgressLines(title, total, templates, console.print, **fields)
        yield lines.update
        lines.finish()
        return
    inner = [TextColumn(column) if isinstance(column, str) else column for column in columns]
    all_columns = (TextColumn("{task.description}"), BarColumn(), *inner, TimeRemainingColumn())
    with Progress(*all_columns, console=console, disable=not show) as progress:
        task = progress.add_task(title, total=total, **fields)
        yield partial(progress.update, task)


class _ProgressLines:
    """Prints progress as lines, at most one in `SECONDS_BETWEEN_LINES` seconds."""

    def __init__(
        self,
        title: str,
        total: int,
        templates: list[str],
        write: Callable[[str], None],
        *,
        completed: float = 0,
        **fields: str,
    ) -> None:
        self._title = title
        self._total = total
        self._templates = templates
        self._write = write
        self._start = completed
        self._completed = completed
        self._fields = fields
        self._started_at = time.monotonic()
        self._written_at = self._started_at

    def update(self, *, advance: float = 0, completed: float | None = None, **fields: str) -> None:
        """Change the progress as `rich.progress.Progress.update` does."""
        self._completed = self._completed + advance if completed is None else completed
        self._fields.update(fields)
        now = time.monotonic()
        is_due = now - self._written_at >= SECONDS_BETWEEN_LINES
        if is_due and self._completed < self._total:
            self._written_at = now
            self._write_line(f"{_minutes(self._seconds_left(now))} left")

    def finish(self) -> None:
        """Print the last line, with the duration of the work, if there were others."""
        if self._written_at > self._started_at:
            self._write_line(f"{_minutes(time.monotonic() - self._started_at)} in all")

    def _seconds_left(self, now: float) -> float | None:
        done = self._completed - self._start
        if done <= 0:
            return None
        seconds_per_step = (now - self._started_at) / done
        return seconds_per_step * (self._total - self._completed)

    def _write_line(self, duration: str) -> None:
        task = SimpleNamespace(
            fields=self._fields,
            completed=self._completed,
            total=self._total,
            percentage=100 * self._completed / max(1, self._total),
        )
        details = [template.format(task=task) for template in self._templates if "{" in template]
        count = f"{self._completed:,.0f}/{self._total:,}"
        text = ", ".join([count, *details, duration])
        self._write(f"{self._title} {text}")


def _minutes(seconds: float | None) -> str:
    """Format seconds as M:SS; None is an unknown duration."""
    if seconds is None:
        return "unknown time"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
