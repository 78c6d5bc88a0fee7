"""Frozen models: loading, sites, taps, the growable cache and the fingerprint."""

from graftlm.backbone.cache import JoinError, StateLayer, join, slots
from graftlm.backbone.fingerprint import Fingerprint, fingerprint
from graftlm.backbone.growing import GrowingLayer, growing
from graftlm.backbone.load import (
    UNLIMITED,
    Backbone,
    BackboneKind,
    default_device,
    leading_bos,
    load_backbone,
    max_sequence_length,
    padding_id,
)
from graftlm.backbone.parts import Part, PartError, PartWiring
from graftlm.backbone.sites import FAMILIES, Family, Site, Sites, Span, register_family
from graftlm.backbone.taps import Call, Tap, Wiring

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
    "Part",
    "PartError",
    "PartWiring",
    "Site",
    "Sites",
    "Span",
    "StateLayer",
    "Tap",
    "Wiring",
    "default_device",
    "fingerprint",
    "growing",
    "join",
    "leading_bos",
    "load_backbone",
    "max_sequence_length",
    "padding_id",
    "register_family",
    "slots",
]
