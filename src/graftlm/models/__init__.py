"""Architectures that are trained from scratch, as Hugging Face models. Each has a package and a registry entry."""

from __future__ import annotations

from functools import cache
from importlib import import_module

REGISTRY: dict[str, str] = {"block-state": "graftlm.models.block_state"}


@cache
def register() -> None:
    """Register every architecture with transformers' Auto classes; repeated calls have no effect."""
    for module in REGISTRY.values():
        import_module(module)
