"""The grafts: one folder a method, one line of the registry each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graftlm.backbone import Backbone
from graftlm.errors import RecipeError, did_you_mean
from graftlm.grafts.base import Graft, GraftConfig
from graftlm.grafts.model import GraftedModel, GraftedOutput, grafted

REGISTRY: dict[str, str] = {
    "composition": "graftlm.grafts.composition:Composition",
    "neutral-residues": "graftlm.grafts.neutral_residues:NeutralResidues",
    "adapter": "graftlm.grafts.neutral_residues:VanillaAdapter",
    "conditional-tasks": "graftlm.grafts.conditional_tasks:ConditionalTasks",
    "token-routing": "graftlm.grafts.token_routing:TokenRouting",
    "lora": "graftlm.grafts.baselines:LowRank",
    "finetune": "graftlm.grafts.baselines:FineTuning",
}


def kinds() -> list[str]:
    """The kinds of graft, as a recipe names them."""
    return list(REGISTRY)


def graft_class(kind: str) -> type[Graft]:
    """The class of a kind; its room is imported now.

    Raises:
        RecipeError: there is no such kind.
    """
    if kind not in REGISTRY:
        raise RecipeError(f"There is no graft of the kind {kind!r}{did_you_mean(kind, REGISTRY)}.")
    module, _, name = REGISTRY[kind].partition(":")
    return getattr(import_module(module), name)


def graft_config(values: dict[str, Any], where: str = "graft") -> GraftConfig:
    """The config that a recipe's `graft` section describes.

    Raises:
        RecipeError: the kind is missing or unknown, or a value does not fit.
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise RecipeError(f"{where}: the key kind is missing or not a word; one of {', '.join(REGISTRY)} is expected.")
    return graft_class(kind).Config.parse(values, where=where)


def default_config(kind: str) -> GraftConfig | None:
    """The config of a kind that needs to be told nothing; None for one that does."""
    config = graft_class(kind).Config
    if config.needs_tasks or any(field.is_required() for field in config.model_fields.values()):
        return None
    return config()  # type: ignore[call-arg]  # `kind` has a default in every room's config


def build_graft(config: GraftConfig, backbone: Backbone) -> Graft:
    """A fresh graft for a backbone; random choices come from torch's generator."""
    return graft_class(config.kind)(config, backbone)


__all__ = [
    "REGISTRY",
    "Graft",
    "GraftConfig",
    "GraftedModel",
    "GraftedOutput",
    "build_graft",
    "default_config",
    "graft_class",
    "graft_config",
    "grafted",
    "kinds",
]
