"""Many conversations at once, a bounded number of them at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(function: Callable[[T], R], items: Iterable[T], concurrency: int) -> Iterator[R]:
    """Apply a function to items in several threads, and yield the results in the order of the items.

    At most `concurrency` calls run at a time, and at most as many further items are read ahead. After an error no new
    call begins; those that run are awaited, so that their replies are kept (`journal.Journal`).

    Args:
        function: the function, which several threads may call.
        items: its arguments.
        concurrency: number of threads, at least 1. With 1 everything runs in the caller's thread.

    Raises:
        Exception: what the function raised for the first item, in their order, for which it failed.
    """
    if concurrency == 1:
        yield from map(function, items)
        return
    remaining = iter(items)
    failed = threading.Event()

    def call(item: T) -> R:
        if failed.is_set():
            raise CancelledError
        try:
            return function(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(concurrency) as executor:
        running: deque[Future[R]] = deque()
        try:
            for item in islice(remaining, 2 * concurrency):
                running.append(executor.submit(call, item))
            while running:
                yield running.popleft().result()
                for item in islice(remaining, 1):
                    running.append(executor.submit(call, item))
        finally:
            for future in running:
                future.cancel()
