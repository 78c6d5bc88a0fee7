"""Whether a server takes requests on."""

from __future__ import annotations

import threading


class Phase:
    """Open, until somebody closes it for good."""

    def __init__(self) -> None:
        self._closing = threading.Event()

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """From now on nothing new is taken."""
        self._closing.set()
