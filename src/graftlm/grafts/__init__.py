"""Grafts: the contract, the grafted model, the registry, and one package for each method."""

from graftlm.grafts.base import (
    ChangesAtEnd,
    FitsOnText,
    Graft,
    GraftConfig,
    HasHeads,
    HasTensors,
    ReadsModels,
    ReplacesModel,
    Trace,
    Traceable,
    TrainsOnSets,
)
from graftlm.grafts.exports import (
    AdapterForm,
    ChoosesByPrompt,
    Exportable,
    ExportedAdapter,
    ExportsAdapter,
    ExportsLowRank,
    LowRankUpdate,
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
