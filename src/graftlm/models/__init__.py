"""Architectures trained from scratch, as Hugging Face models: one room each, one line of the registry each."""

from __future__ import annotations

from importlib import import_module

REGISTRY: dict[str, str] = {
    "block-state": "graftlm.models.block_state",
}


def register() -> None:
    """Make every architecture of the house known to transformers' Auto classes; harmless to call again."""
    for module in REGISTRY.values():
        import_module(module)


__all__ = ["REGISTRY", "register"]
