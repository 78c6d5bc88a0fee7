"""Use as many threads as there are free cores.

Two threads that share a core with another program wait for each other after every operation, and are several times
slower than one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from graftlm.runs.run import Log

_VARIABLE = "OMP_NUM_THREADS"
_SECONDS = 0.5


def free_threads() -> int:
    """Return how many of torch's threads have a core for themselves, at least 1; takes half a second.

    If the user set OMP_NUM_THREADS, it is that number.
    """
    threads = torch.get_num_threads()
    if threads == 1 or _VARIABLE in os.environ:
        return threads
    cores = psutil.cpu_count() or threads
    busy = psutil.cpu_percent(interval=_SECONDS) / 100 * cores
    return max(1, min(threads, round(cores - busy)))


@contextmanager
def threads_on_free_cores(log: Log) -> Iterator[None]:
    """Compute with as many threads as there are free cores in a `with` block.

    Args:
        log: called with a sentence if these are fewer than usual.
    """
    usual = torch.get_num_threads()
    chosen = free_threads()
    if chosen < usual:
        log(
            f"Other programs use this machine, so {chosen} of {usual} threads {'is' if chosen == 1 else 'are'} used; "
            f"{_VARIABLE} sets another number."
        )
    torch.set_num_threads(chosen)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
