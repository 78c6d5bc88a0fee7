"""Grafts: the contract, the grafted model, the registry, and one package for each method."""

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
