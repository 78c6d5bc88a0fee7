"""Frozen models: loading, families, taps, cache layers and fingerprints."""

from graftlm.backbone.added_tokens import AddedTokens, ExtendedVocabulary
from graftlm.backbone.answer_ends import Stops, answer_end_ids, marker_ids, read_stops, turn_end_ids
from graftlm.backbone.backbone import Backbone, BackboneKind, default_device, need_backbone
from graftlm.backbone.cache import StateLayer, slots
from graftlm.backbone.call import Call
from graftlm.backbone.compiled_code import guard_hooks
from graftlm.backbone.decode_steps import compiled_decoding, decodes_in_one_graph
from graftlm.backbone.detokenizer import IncrementalDetokenizer, continuation_text
from graftlm.backbone.families import FAMILIES, Family, Sublayer, register_family
from graftlm.backbone.fingerprint import Fingerprint, fingerprint
from graftlm.backbone.generation_prompt import GenerationPrompt
from graftlm.backbone.growing_layer import GrowingLayer
from graftlm.backbone.load import load_backbone
from graftlm.backbone.output_layer import OutputLayer
from graftlm.backbone.sites import Site, Sites
from graftlm.backbone.taps import Tap, TapHooks, acts_after_norm
from graftlm.backbone.text_parts import TextParts, common_length, continuation_ids, encode_parts
from graftlm.backbone.token_count import TokenCount, may_read
from graftlm.backbone.token_rows import TokenRows
from graftlm.backbone.token_selection import TokenSelection
from graftlm.backbone.tokens import (
    UNLIMITED,
    end_ids,
    generate_rows,
    leading_bos,
    left_padded,
    max_sequence_length,
    padding_id,
    token_texts,
)
