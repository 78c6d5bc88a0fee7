"""Progress bars of long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def progress_bar(title: str, total: int, *columns: Any, show: bool, **fields: Any) -> Iterator[Callable[..., None]]:
    """Show a bar while the block runs; yields what changes it, as in `update(advance=1)`.

    `columns` are rich's before the time that is left; words stand for themselves, with `fields` filled in.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    extra = [TextColumn(column) if isinstance(column, str) else column for column in columns]
    shown = (TextColumn("{task.description}"), BarColumn(), *extra, TimeRemainingColumn())
    with Progress(*shown, disable=not show) as progress:
        yield partial(progress.update, progress.add_task(title, total=total, **fields))
