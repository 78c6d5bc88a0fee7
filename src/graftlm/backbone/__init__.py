"""Frozen models: loading, families, taps, cache layers and fingerprints."""

from graftlm.backbone.cache import (
    GrowingLayer,
    JoinError,
    StateLayer,
    clone_cache,
    join,
    join_columns,
    slots,
    use_growing_layers,
)
from graftlm.backbone.families import FAMILIES, Family, Site, Sites, Sublayer, register_family
from graftlm.backbone.load import (
    UNLIMITED,
    Backbone,
    BackboneKind,
    Fingerprint,
    default_device,
    fingerprint,
    leading_bos,
    load_backbone,
    max_sequence_length,
    padding_id,
)
from graftlm.backbone.row_hooks import RowScope, RowScopedHooks, RowScopeError
from graftlm.backbone.taps import Call, Tap, TapHooks

__all__ = [
    "FAMILIES",
    "UNLIMITED",
    "Backbone",
    "BackboneKind",
    "Call",
    "Family",
    "Fingerprint",
    "GrowingLayer",
    "JoinError",
    "RowScope",
    "RowScopeError",
    "RowScopedHooks",
    "Site",
    "Sites",
    "StateLayer",
    "Sublayer",
    "Tap",
    "TapHooks",
    "clone_cache",
    "default_device",
    "fingerprint",
    "join",
    "join_columns",
    "leading_bos",
    "load_backbone",
    "max_sequence_length",
    "padding_id",
    "register_family",
    "slots",
    "use_growing_layers",
]
