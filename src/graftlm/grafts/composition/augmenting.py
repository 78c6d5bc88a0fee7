"""A frozen augmenting model: its pass during each pass of the anchor, and its layers in the cache of a generation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, Tap, TapHooks, load_backbone, max_sequence_length
from graftlm.backbone.cache import StateLayer, slots
from graftlm.errors import BackboneError, GraftError
from graftlm.grafts.composition.alignment import AlignedInputs, CharacterAlignment, PositionAlignment
from graftlm.grafts.composition.attention import AttentionPositions, Visibility
from graftlm.grafts.composition.config import RANDOM, VANILLA, AugmentingConfig, CompositionConfig


@dataclass(frozen=True)
class AugmentingStates:
    """The states of one augmenting model for a pass of the anchor.

    Args:
        states: new hidden states (B, S, A) for each pair; None if nothing new was read.
        visibility: which augmenting tokens each anchor token sees, among all so far.
        caches: cache layer of the cross-attention of each pair; None without a cache.
        is_empty: whether no augmenting token has been read yet.
        positions: positions of the anchor's tokens and of the new augmenting tokens; None for attention without
            positions.
        last: new last hidden states (B, S, A), which the model's output layer reads; None if nothing new was read.
    """

    states: list[Tensor] | None
    visibility: Visibility
    caches: Sequence[CacheLayerMixin] | None
    is_empty: bool
    positions: AttentionPositions | None
    last: Tensor | None


class _UncroppableLayer(DynamicLayer):
    """Keys and values that can't be cropped, as they do not correspond one to one to the anchor's tokens."""

    is_croppable = False

    def crop(self, tokens_to_remove: int) -> None:
        raise GraftError(
            "Tokens are to be removed from the cache, as in assisted decoding, but a composition with two tokenizers "
            "or with refresh set to prompt can't remove the matching tokens of its models: generate without an "
            "assistant and without prompt_lookup_num_tokens."
        )


@dataclass(frozen=True)
class _CacheLayers:
    """The layers of one augmenting model in the cache of a generation.

    Args:
        own: cache of the augmenting model's own pass; None if it reads only the prompt, or without a cache.
        pairs: layer of the cross-attention of each pair; None without a cache.
        state: layer of a character alignment; None for other alignments, or without a cache.
    """

    own: Cache | None = None
    pairs: Sequence[CacheLayerMixin] | None = None
    state: StateLayer | None = None

    def augmenting_tokens(self) -> int:
        """Return the number of augmenting tokens in the cache."""
        if self.pairs:
            return int(self.pairs[0].get_seq_length())
        if self.own is not None and self.own.layers:
            return int(self.own.get_seq_length())
        return 0

    def has_read(self) -> bool:
        """Return whether the model has read anything in this generation."""
        if self.state is None:
            return self.augmenting_tokens() > 0
        return self.state.keys is not None


def load_augmenting(name: str, config: AugmentingConfig, anchor: Backbone) -> Backbone:
    """Load an augmenting model, or make a control.

    Args:
        name: name of the model in the graft's config.
        config: which checkpoint to load, or which control to make.
        anchor: the backbone of the composition, on whose device the model is.

    Raises:
        BackboneError: the model can't be loaded, or its architecture is not supported.
    """
    if config.name == VANILLA:
        return Backbone.wrap(copy.deepcopy(anchor.model), anchor.tokenizer, f"{VANILLA} {anchor.name}")
    if config.name == RANDOM:
        like = anchor if config.like is None else _load(name, config, config.like, anchor.device)
        return _random_model(like, config.seed)
    return _load(name, config, config.name, anchor.device)


def _load(name: str, config: AugmentingConfig, checkpoint: str, device: torch.device) -> Backbone:
    """Load a checkpoint with the settings of an augmenting model."""
    try:
        return load_backbone(
            checkpoint,
            device=device,
            tokenizer_required=False,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
    except BackboneError as error:
        key = "like" if config.name == RANDOM else "name"
        raise BackboneError(
            f"The augmenting model {name} (augmenting.{name}.{key} in the graft's config) can't be used. {error}"
        ) from error


def _random_model(like: Backbone, seed: int) -> Backbone:
    """Return a model of an architecture with random weights, which depend on the seed and not on the device."""
    model_class = cast("Callable[[PreTrainedConfig], PreTrainedModel]", type(like.model))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = model_class(copy.deepcopy(like.model.config))
    model = nn.Module.to(model, device=like.device, dtype=like.model.dtype)
    return Backbone.wrap(model, like.tokenizer, f"{RANDOM} {like.name}")


class AugmentingModel:
    """One frozen augmenting model of an anchor.

    Args:
        name: name of the model in the graft's config.
        backbone: the augmenting model.
        layers: layer of the augmenting model in each pair, counted from 0.
        anchor: the backbone of the composition.
        config: configuration of the composition.

    Raises:
        GraftError: the models are the same object, the augmenting model is not causal while the anchor is, or their
            tokens can't be aligned as configured.
        BackboneError: tokens are matched by characters, but a model has no tokenizer.
    """

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        layers: list[int],
        anchor: Backbone,
        config: CompositionConfig,
    ) -> None:
        _check_model(name, backbone, anchor)
        self.name = name
        self.backbone = backbone
        self._layers = layers
        backbone.model.requires_grad_(False).eval()
        self._prompt_only = config.refresh == "prompt"
        self._has_positions = config.positions != "none"
        self._anchor_layers = anchor.sites.n_layers
        self._alignment = choose_alignment(name, backbone, anchor, config)
        self.reads_characters = isinstance(self._alignment, CharacterAlignment)
        if config.readout != "none" and self.reads_characters:
            raise GraftError(
                f"The tokens of {name} are matched with the backbone's by characters, but readout {config.readout} "
                "mixes probabilities of the same tokens: set readout to none, or name a model with the backbone's "
                "tokenizer and set alignment to auto."
            )
        self._own_layers = 0 if self._prompt_only else backbone.sites.n_layers
        taps = [_recording_tap(layer) for layer in sorted(set(layers))]
        self._tap_hooks = TapHooks(backbone.model, backbone.sites, {name: taps}, _prepare_nothing)

    def read(self, call: Call) -> AugmentingStates:
        """Run the model on the new tokens of a pass of the anchor.

        Args:
            call: the pass of the anchor.

        Raises:
            GraftError: the pass has no token ids, has only part of a prompt although `refresh` is `prompt`, or exceeds
                the model's maximum length; or the cache was filled without this graft.
        """
        past = call.past()
        self._check_pass(call, past)
        cache_layers = self._cache_layers(call.cache)
        if past and not cache_layers.has_read():
            raise GraftError(
                f"The cache contains tokens that the augmenting model {self.name} has not read: start the generation "
                "again with the graft attached, and without guidance_scale, which uses a second cache."
            )
        cached = cache_layers.augmenting_tokens()
        aligned = self._alignment.align(call, past, cache_layers.state, cached)
        states, last = self._run(aligned, cache_layers.own)
        return AugmentingStates(
            states=states,
            visibility=aligned.visibility,
            caches=cache_layers.pairs,
            is_empty=states is None and cached == 0,
            positions=aligned.positions if self._has_positions else None,
            last=last,
        )

    def _check_pass(self, call: Call, past: int) -> None:
        """Raise `GraftError` without token ids, or if with `refresh: prompt` a prompt is read in several passes."""
        if call.input_ids is None:
            raise GraftError(
                "The pass has embeddings as inputs, but in a composition the augmenting models read token ids, too: "
                "pass input_ids."
            )
        if past and self._prompt_only and call.prompt is not None:
            raise GraftError(
                "The prompt is read in several passes, but with refresh set to prompt the augmenting models read it in "
                "one pass: generate without prefill_chunk_size, or set refresh to every."
            )

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """Return the logits of the output layer for last hidden states.

        Args:
            last: (B, K, A) last hidden states.

        Returns:
            (B, K, V) logits over the augmenting model's vocabulary.
        """
        head = cast("nn.Module", self.backbone.model.get_output_embeddings())
        return head(last)

    def _run(self, aligned: AlignedInputs, own_cache: Cache | None) -> tuple[list[Tensor] | None, Tensor | None]:
        """Return the states of each pair and the last states; None if there is nothing new to read."""
        if aligned.inputs is None:
            return None, None
        self._check_length(aligned.inputs, own_cache)
        inputs: dict[str, object] = {
            **aligned.inputs,
            "attention_mask": self._attention_mask(aligned.inputs["attention_mask"]),
            "past_key_values": own_cache,
            "use_cache": own_cache is not None,
        }
        # The taps of the augmenting model do not read padding, so that they need no mask.
        with torch.no_grad(), self._tap_hooks.announce(attention_mask=None) as calls:
            last = self.backbone.model.base_model(**inputs)[0]
        states = [calls[0].scratch["states", layer] for layer in self._layers]
        return states, last

    def _attention_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the mask in the form that the model's attention accepts: only SDPA takes booleans."""
        model = self.backbone.model
        if mask is None or mask.dim() < 4 or model.config._attn_implementation == "sdpa":
            return mask
        lowest = torch.full((), torch.finfo(model.dtype).min, dtype=model.dtype, device=mask.device)
        return torch.where(mask, lowest.new_zeros(()), lowest)

    def _check_length(self, inputs: Mapping[str, Tensor | None], own_cache: Cache | None) -> None:
        """Raise `GraftError` if the text exceeds the model's maximum length after this pass."""
        limit = self._max_length()
        needed = cast("Tensor", inputs["input_ids"]).shape[1]
        if own_cache is not None:
            needed += int(own_cache.get_seq_length())
        positions = inputs["position_ids"]
        if needed > limit and positions is not None:  # padding has columns but no positions
            needed = int(positions.max()) + 1
        if needed > limit:
            raise GraftError(
                f"The text has {needed} tokens of the augmenting model {self.name}, but the model reads at most "
                f"{limit}: shorten the text."
            )

    def _max_length(self) -> int:
        """Return the maximum number of tokens that the model can read with this alignment."""
        config = self.backbone.sites.config
        limit = max_sequence_length(self.backbone)
        layer_types = getattr(config, "layer_types", None)
        has_window = not layer_types or "sliding_attention" in layer_types
        window = getattr(config, "sliding_window", None)
        if self.reads_characters and has_window and window:
            # The mask of the tree replaces that of the window, so a longer text would be read without a window.
            limit = min(limit, window)
        return limit

    def _cache_layers(self, cache: Cache | None) -> _CacheLayers:
        """Return this model's layers in the cache of a generation; the first call appends them.

        All layers keep the full past, even those of a sliding window: these layers do not exist yet when `generate`
        prepares the cache's layers for cropping.
        """
        if cache is None:
            return _CacheLayers()
        is_croppable = not self.reads_characters and not self._prompt_only
        layer_class = DynamicLayer if is_croppable else _UncroppableLayer
        own = self._own_layers
        attention_layers = own + len(self._layers)
        classes: list[type[CacheLayerMixin]] = [layer_class] * attention_layers
        if self.reads_characters:
            classes.append(StateLayer)
        remaining = iter(classes)

        def next_layer() -> CacheLayerMixin:
            return next(remaining)()

        indices = slots(
            cache,
            owner=f"{self.name} {id(self)}",
            count=len(classes),
            backbone_layers=self._anchor_layers,
            make=next_layer,
        )
        layers: list[Any] = [cache.layers[index] for index in indices]
        layers[0].counts_tokens = is_croppable  # read by `counted_tokens`
        return _CacheLayers(
            own=Cache(layers=layers[:own]) if own else None,
            pairs=layers[own:attention_layers],
            state=layers[-1] if self.reads_characters else None,
        )


def _recording_tap(layer: int) -> Tap:
    """Return a tap that records the hidden states after a layer."""
    return Tap(
        site=Site("layer", layer),
        when="after",
        act="replace",
        function=partial(_record, layer),
    )


def _record(layer: int, call: Call, inputs: Tensor, outputs: Tensor) -> None:
    call.scratch["states", layer] = outputs


def _prepare_nothing(call: Call) -> None:
    pass


def _check_model(name: str, augmenting: Backbone, anchor: Backbone) -> None:
    """Raise `GraftError` if an augmenting model is the anchor, or would reveal tokens that the anchor predicts."""
    if augmenting.model is anchor.model:
        raise GraftError(
            f"The augmenting model {name} is the backbone itself: load it a second time, or name another model."
        )
    if anchor.sites.family.causal and not augmenting.sites.family.causal:
        raise GraftError(
            f"The augmenting model {name} ({augmenting.sites.model_type}) is not causal, so its states would reveal "
            "the tokens that the backbone has to predict: name a causal language model."
        )


def choose_alignment(
    name: str,
    augmenting: Backbone,
    anchor: Backbone,
    config: CompositionConfig,
) -> PositionAlignment | CharacterAlignment:
    """Choose how the tokens of an augmenting model and of the anchor are aligned.

    Args:
        name: name of the augmenting model in error messages.
        augmenting: the augmenting model.
        anchor: the backbone of the composition.
        config: configuration of the composition; `alignment: auto` compares the tokenizers.

    Raises:
        GraftError: tokens are aligned by position, but the augmenting model lacks embeddings for some; or by
            characters, but the anchor is not causal or a tokenizer has no character offsets.
        BackboneError: tokens are aligned by characters, but a model has no tokenizer.
    """
    prompt_only = config.refresh == "prompt"
    causal = anchor.sites.family.causal
    alignment = config.alignment
    if alignment == "auto":
        is_shared = same_tokenizer(anchor.tokenizer, augmenting.tokenizer)
        alignment = "position" if is_shared else "characters"
    if alignment == "position":
        _check_vocabulary(name, augmenting, anchor)
        return PositionAlignment(causal=causal, prompt_only=prompt_only)
    if not causal:
        raise GraftError(
            f"The tokens of {name} are to be matched with the backbone's by characters, but the backbone "
            f"({anchor.sites.model_type}) is not causal, as this requires: name a model with the backbone's tokenizer, "
            "and set alignment to auto."
        )
    return CharacterAlignment(
        anchor=anchor.need_tokenizer(),
        augmenting=augmenting.need_tokenizer(),
        prompt_only=prompt_only,
        name=name,
    )


def _check_vocabulary(name: str, augmenting: Backbone, anchor: Backbone) -> None:
    """Raise `GraftError` if the augmenting model lacks embeddings for tokens of the anchor."""
    embeddings = cast("Tensor", augmenting.model.get_input_embeddings().weight)
    known = len(embeddings)
    used = int(anchor.sites.config.vocab_size) if anchor.tokenizer is None else len(anchor.tokenizer)
    if known < used:
        raise GraftError(
            f"The backbone's tokens have ids up to {used - 1}, but the augmenting model {name} has only {known} "
            "embeddings: set alignment to characters, or name a model with the same tokenizer."
        )


def same_tokenizer(first: PreTrainedTokenizerBase | None, second: PreTrainedTokenizerBase | None) -> bool:
    """Return whether two tokenizers give the same ids, as far as their vocabularies and rules show.

    Args:
        first: the tokenizer of one model; None is assumed to be the same as the other.
        second: the tokenizer of the other model; None is assumed to be the same as the other.
    """
    if first is None or second is None:
        return True
    return first.get_vocab() == second.get_vocab() and _rules(first) == _rules(second)


def _rules(tokenizer: PreTrainedTokenizerBase) -> object:
    """Return the rules that determine a tokenizer's ids in addition to its vocabulary, such as merges."""
    if not tokenizer.is_fast:
        return type(tokenizer).__name__
    state = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # defined by fast tokenizers
    return [state[part] for part in ("normalizer", "pre_tokenizer", "model")]
