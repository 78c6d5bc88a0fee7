"""Pipelines around generation: `summarize` selects sentences and `clarify` asks a question before a model writes."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def pipeline(name: str) -> Any:
    """Import and return the package of a pipeline.

    The command line calls this function so that it imports a pipeline only when one is used.

    Args:
        name: `summarize` or `clarify`.
    """
    return import_module(f"{__name__}.{name}")
