"""A frozen augmenting model: its pass beside each pass of the anchor, and its layers in the generation's cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, Tap, TapHooks, load_backbone, max_sequence_length
from graftlm.backbone.cache import StateLayer, slots
from graftlm.errors import BackboneError, GraftError, UnknownFamilyError
from graftlm.grafts.composition.alignment import AlignedInputs, CharacterAlignment, PositionAlignment
from graftlm.grafts.composition.attention import AttentionPositions, Visibility
from graftlm.grafts.composition.config import AugmentingConfig, CompositionConfig


@dataclass(frozen=True)
class AugmentingStates:
    """What one augmenting model provides for a pass of the anchor.

    Args:
        states: per pair, new hidden states (B, S, A); None if nothing new was read.
        visibility: of all augmenting tokens so far.
        caches: per pair, the cache layer of its cross-attention; None without a cache.
        is_empty: no augmenting token was read so far.
        positions: of the anchor's tokens and of the new augmenting tokens; None for attention without positions.
        last: the new last hidden states (B, S, A), which the model's output layer reads.
    """

    states: list[Tensor] | None
    visibility: Visibility
    caches: Sequence[CacheLayerMixin] | None
    is_empty: bool
    positions: AttentionPositions | None
    last: Tensor | None


class _UncroppableLayer(DynamicLayer):
    """Keys and values that do not correspond one to one to the anchor's tokens, so that cropping is impossible."""

    is_croppable = False

    def crop(self, tokens_to_remove: int) -> None:
        raise GraftError(
            "Assisted decoding removes rejected tokens from the cache, which a composition with two tokenizers or "
            "refresh: prompt can't do: decode without an assistant or prompt_lookup_num_tokens."
        )


def load_augmenting(name: str, config: AugmentingConfig, device: torch.device) -> Backbone:
    """Load an augmenting model; a `BackboneError` if it can't be loaded, or is no language model."""
    try:
        options = config.model_dump(include={"dtype", "trust_remote_code"})
        return load_backbone(config.name, device=device, tokenizer_required=False, **options)
    except (BackboneError, UnknownFamilyError) as error:
        raise BackboneError(
            f"The augmenting model {name} can't be used. {error} It is set by the key augmenting.{name}.name of the "
            "graft's config."
        ) from error


class AugmentingModel:
    """One frozen augmenting model of an anchor; `layers` has its layer in each pair."""

    def __init__(
        self, name: str, backbone: Backbone, layers: list[int], anchor: Backbone, config: CompositionConfig
    ) -> None:
        if backbone.model is anchor.model:
            raise GraftError(
                f"The augmenting model {name} is the backbone itself: load it a second time, or name another model."
            )
        if anchor.sites.family.causal and not backbone.sites.family.causal:
            raise GraftError(
                f"The augmenting model {name} ({backbone.sites.model_type}) is not causal, so its states would reveal "
                "the tokens that the backbone has to predict: name a causal language model."
            )
        self.name, self.backbone, self._layers = name, backbone, layers
        backbone.model.requires_grad_(False).eval()
        self._prompt_only = config.refresh == "prompt"
        self._has_positions = config.positions != "none"
        self._anchor_layers = anchor.sites.n_layers
        self._alignment = choose_alignment(name, backbone, anchor, config)
        if config.readout != "none" and isinstance(self._alignment, CharacterAlignment):
            raise GraftError(
                f"The tokenizer of {name} is not the backbone's, and readout: mixture mixes probabilities of the same "
                "tokens: set readout to none, or name a model with the backbone's tokenizer."
            )
        self._own_layers = 0 if self._prompt_only else backbone.sites.n_layers  # in the generation's cache
        taps = [Tap(Site("layer", layer), "after", "replace", partial(_record, layer)) for layer in sorted(set(layers))]
        self._tap_hooks = TapHooks(backbone.model, backbone.sites, {name: taps}, lambda call: None)

    def read(self, call: Call) -> AugmentingStates:
        """Run the model on the new tokens of a pass of the anchor.

        Raises GraftError if the pass has no token ids, or its cache was filled without this graft.
        """
        if call.input_ids is None:
            raise GraftError(
                "A composition needs token ids, as the augmenting model reads them too: pass input_ids, not embeddings."
            )
        past = call.past()
        if past and self._prompt_only and call.prompt is not None:
            raise GraftError(
                "With refresh: prompt the augmenting model reads the prompt at once, but a pass was given only a part: "
                "generate without prefill_chunk_size, or set refresh: every."
            )
        own_cache, caches, state = self._cache_layers(call.cache)
        counting: Any = caches or (own_cache.layers if own_cache else ())  # without pairs, the model's own layers
        cached = int(counting[0].get_seq_length()) if counting else 0
        if past and (not cached if state is None else state.keys is None):
            raise GraftError(
                f"The cache holds {past} tokens that the augmenting model {self.name} has not read: start the "
                "generation again with the graft attached, and without guidance_scale, whose second cache it does not "
                "see."
            )
        aligned = self._alignment.align(call, past, state, cached)
        states, last = self._run(aligned, own_cache)
        positions = aligned.positions if self._has_positions else None
        return AugmentingStates(states, aligned.visibility, caches, states is None and not cached, positions, last)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """The output layer's logits of last hidden states."""
        head: Any = self.backbone.model.get_output_embeddings()
        return head(last)

    def _run(self, aligned: AlignedInputs, own_cache: Cache | None) -> tuple[list[Tensor] | None, Tensor | None]:
        """The states of each pair, and the last ones; None if there is nothing new to read."""
        if aligned.inputs is None:
            return None, None
        self._check_length(aligned.inputs, own_cache)
        inputs = aligned.inputs | {"past_key_values": own_cache, "use_cache": own_cache is not None}
        mask, model = inputs["attention_mask"], self.backbone.model
        if mask is not None and mask.dim() == 4 and model.config._attn_implementation != "sdpa":
            lowest = torch.full((), torch.finfo(model.dtype).min, dtype=model.dtype, device=mask.device)
            inputs["attention_mask"] = torch.where(mask, lowest.new_zeros(()), lowest)  # only SDPA takes booleans
        with torch.no_grad(), self._tap_hooks.announce(attention_mask=None) as calls:  # its taps read no padding
            last = model.base_model(**inputs)[0]
        return [calls[0].scratch["states", layer] for layer in self._layers], last

    def _check_length(self, inputs: dict[str, Any], own_cache: Cache | None) -> None:
        config = self.backbone.sites.config
        needed = inputs["input_ids"].shape[1] + (0 if own_cache is None else int(own_cache.get_seq_length()))
        limits: list[int | None] = [max_sequence_length(self.backbone)]
        has_window = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
        if isinstance(self._alignment, CharacterAlignment) and has_window:
            limits.append(getattr(config, "sliding_window", None))  # the tree's mask has no window
        limit = min(size for size in limits if size)
        if needed > limit and inputs["position_ids"] is not None:  # padding has columns but no positions
            needed = int(inputs["position_ids"].max()) + 1
        if needed > limit:
            raise GraftError(
                f"The augmenting model {self.name} reads at most {limit} tokens, and the text has {needed}: "
                "shorten the text."
            )

    def _cache_layers(
        self, cache: Cache | None
    ) -> tuple[Cache | None, Sequence[CacheLayerMixin] | None, StateLayer | None]:
        """This model's layers in a generation's cache: its own, each pair's, and the state of a character alignment."""
        if cache is None:
            return None, None, None
        own, pairs = self._own_layers, len(self._layers)
        has_state = isinstance(self._alignment, CharacterAlignment)
        # All layers keep the full past, even with sliding windows: when `generate` asks layers to record what they
        # drop, so that they can be cropped, these do not exist yet.
        layer_class = _UncroppableLayer if has_state or self._prompt_only else DynamicLayer
        new_layers = iter([layer_class] * (own + pairs) + [StateLayer] * has_state)
        owner = f"{self.name} {id(self)}"
        indices = slots(cache, owner, own + pairs + has_state, self._anchor_layers, lambda: next(new_layers)())
        layers: list[Any] = [cache.layers[index] for index in indices]
        layers[0].counts_tokens = layer_class is DynamicLayer
        return Cache(layers=layers[:own]) if own else None, layers[own : own + pairs], layers[-1] if has_state else None


def _record(layer: int, call: Call, inputs: Tensor, outputs: Tensor) -> None:
    call.scratch["states", layer] = outputs


def choose_alignment(
    name: str, augmenting: Backbone, anchor: Backbone, config: CompositionConfig
) -> PositionAlignment | CharacterAlignment:
    """The alignment of the tokens of both models; a `GraftError` if they can't be aligned as configured."""
    prompt_only, causal = config.refresh == "prompt", anchor.sites.family.causal
    alignment = config.alignment
    if alignment == "auto":
        alignment = "position" if same_tokenizer(anchor.tokenizer, augmenting.tokenizer) else "characters"
    if alignment == "position":
        known = len(augmenting.model.get_input_embeddings().weight)  # type: ignore[arg-type]  # an Embedding's, a matrix
        used = len(anchor.tokenizer) if anchor.tokenizer is not None else int(anchor.sites.config.vocab_size)
        if known < used:
            raise GraftError(
                f"The backbone's tokens go up to {used - 1}, and the augmenting model {name} has {known} embeddings: "
                "set alignment to characters, or name a model with the same tokenizer."
            )
        return PositionAlignment(causal, prompt_only)
    if not causal:
        raise GraftError(
            f"The backbone ({anchor.sites.model_type}) is not causal, and its tokenizer is not that of {name}: "
            "tokens are matched by characters for causal language models only; name a model with the same tokenizer."
        )
    return CharacterAlignment(anchor.need_tokenizer(), augmenting.need_tokenizer(), prompt_only=prompt_only, name=name)


def same_tokenizer(first: PreTrainedTokenizerBase | None, second: PreTrainedTokenizerBase | None) -> bool:
    """Whether two tokenizers give the same ids; a model without a tokenizer is assumed to share the other's."""
    if first is None or second is None:
        return True
    return first.get_vocab() == second.get_vocab() and _rules(first) == _rules(second)


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What determines a fast tokenizer's ids beside its vocabulary, such as merges."""
    if not tokenizer.is_fast:
        return type(tokenizer).__name__
    state = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # a fast one has it
    return [state[part] for part in ("normalizer", "pre_tokenizer", "model")]
