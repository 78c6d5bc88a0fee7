"""Grafts: the contract, the grafted model, the registry, and one package for each method."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graftlm.grafts.base import (
    Exportable,
    ExportedAdapter,
    ExportsAdapter,
    FitsOnText,
    Graft,
    GraftConfig,
    HasHeads,
    HasTensors,
    ReadsModels,
    ReplacesModel,
    Trace,
    Traceable,
)
from graftlm.grafts.registry import build_graft, default_config, graft_class, graft_config, kinds, register_graft

if TYPE_CHECKING:
    from graftlm.grafts.model import GraftedModel, GraftedOutput


def __getattr__(name: str) -> Any:
    if name not in ("GraftedModel", "GraftedOutput"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("graftlm.grafts.model"), name)  # it takes seconds to import
