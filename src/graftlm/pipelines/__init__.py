"""Pipelines around generation: `summarize` selects before it writes, `clarify` asks before it writes."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def pipeline(name: str) -> Any:
    """Import the package of a pipeline by name. The command line uses it, so it imports no pipeline by itself."""
    return import_module(f"{__name__}.{name}")
