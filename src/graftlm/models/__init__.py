"""Architectures that are trained from scratch, as Hugging Face models. Each has its own package."""

from __future__ import annotations

from functools import cache
from importlib import import_module

REGISTRY: dict[str, str] = {"block-state": "graftlm.models.block_state"}
"""The modules that register architectures with transformers when they are imported, by `model_type`."""


@cache
def register() -> None:
    """Register every architecture with transformers' Auto classes. Repeated calls have no effect."""
    for module in REGISTRY.values():
        import_module(module)
