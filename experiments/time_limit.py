"""Stop an experiment after some minutes, on a machine that is at hand for no longer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from graftlm.errors import GraftError


class TimeIsUp(BaseException):
    """The minutes of an experiment are over; its finished runs are kept.

    Like `KeyboardInterrupt` it is no `Exception`, which code that goes on after errors would catch.
    """


@contextmanager
def time_limit(minutes: float | None) -> Iterator[None]:
    """Leave a `with` block by `TimeIsUp` after some minutes, between two operations of this thread.

    Args:
        minutes: the limit; None for none.

    Raises:
        GraftError: the system has no timers (Windows).
    """
    if minutes is None:
        yield
        return
    if not hasattr(signal, "setitimer"):
        raise GraftError("--minutes needs the timers of Linux or macOS, which this system lacks: leave it out.")

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp(
            f"The {minutes:g} minutes are over. Finished runs are kept, and the same command goes on with the others."
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
