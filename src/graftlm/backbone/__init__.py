"""Frozen models: loading, families, taps, cache layers and fingerprints."""

from graftlm.backbone.cache import GrowingLayer, StateLayer, slots
from graftlm.backbone.families import FAMILIES, Family, Site, Sites, Sublayer, register_family
from graftlm.backbone.load import (
    UNLIMITED,
    Backbone,
    BackboneKind,
    Fingerprint,
    default_device,
    end_ids,
    fingerprint,
    generate_rows,
    leading_bos,
    load_backbone,
    max_sequence_length,
    need_backbone,
    padding_id,
    token_texts,
)
from graftlm.backbone.taps import Call, GenerationPrompt, Tap, TapHooks, TokenCount, left_padded, may_read
