"""Grafts: the contract, the grafted model, the registry, and one package for each method."""

from graftlm.grafts.base import (
    AdapterForm,
    ChangesAtEnd,
    ChoosesByPrompt,
    Exportable,
    ExportedAdapter,
    ExportsAdapter,
    ExportsLowRank,
    FitsOnText,
    Graft,
    GraftConfig,
    HasHeads,
    HasTensors,
    LowRankUpdate,
    ReadsModels,
    ReplacesModel,
    Trace,
    Traceable,
    TrainsOnSets,
)
from graftlm.grafts.registry import (
    build_graft,
    default_config,
    graft_class,
    graft_config,
    kinds,
    new_graft,
    register_graft,
)
from graftlm.grafts.sizes import HasSizes, Sizes
