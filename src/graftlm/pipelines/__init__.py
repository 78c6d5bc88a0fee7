"""What happens around generation: select and then write, ask and then answer. Each folder is a room."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def pipeline(name: str) -> Any:
    """The public names of the room `name`, imported when needed; the command line knows no more of rooms."""
    return import_module(f"{__name__}.{name}")


__all__ = ["pipeline"]
