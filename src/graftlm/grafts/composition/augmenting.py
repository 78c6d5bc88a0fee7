"""An augmenting model at work: what it reads in each pass of the anchor, and where its cache lies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, Tap, TapHooks, load_backbone, max_sequence_length
from graftlm.backbone.cache import StateLayer, slots
from graftlm.errors import BackboneError, GraftError, UnknownFamilyError
from graftlm.grafts.composition.alignment import ByPosition, Reading
from graftlm.grafts.composition.attention import Places, Visible
from graftlm.grafts.composition.config import AugmentingConfig, CompositionConfig
from graftlm.grafts.composition.spelling import Spelling


@dataclass(frozen=True)
class Read:
    """What a pass of the anchor finds of an augmenting model.

    Args:
        states: of each pair, (B, S, A) new hidden states; None when nothing new was read.
        visible: who sees what, of all that was read.
        keys_and_values: of each pair, its layer of the cache; None without a cache.
        nothing: whether nothing was read so far.
        places: of the anchor's tokens and the new augmenting ones; None where attention does not ask.
    """

    states: list[Tensor] | None
    visible: Visible
    keys_and_values: Sequence[CacheLayerMixin] | None
    nothing: bool
    places: Places | None


class _Kept(DynamicLayer):
    """Keys and values that do not go one by one with the anchor's tokens, so that those can't be taken back."""

    is_croppable = False

    def crop(self, tokens_to_remove: int) -> None:
        raise GraftError(
            "Assisted decoding tries tokens and takes them back, which a composition of two tokenizers, or one that "
            "reads the prompt alone, can't: decode without an assistant or prompt_lookup_num_tokens."
        )


def load_augmenting(name: str, config: AugmentingConfig, device: torch.device) -> Backbone:
    """Load an augmenting model.

    Raises:
        BackboneError: there is none, or it is no language model.
    """
    try:
        return load_backbone(
            config.name,
            dtype=config.dtype,
            device=device,
            trust_remote_code=config.trust_remote_code,
            tokenizer_required=False,
        )
    except (BackboneError, UnknownFamilyError) as error:
        raise BackboneError(
            f"The augmenting model {name} can't be used. {error} Its place is the key augmenting.{name}.name of the "
            "graft's config."
        ) from error


class Augmenting:
    """One frozen augmenting model beside an anchor.

    Args:
        name: what the config calls it.
        backbone: the augmenting model.
        layers: its paired layers, one of each pair.
        anchor: the backbone that reads it.
        config: of the composition.

    Raises:
        GraftError: the two do not fit.
    """

    def __init__(
        self, name: str, backbone: Backbone, layers: list[int], anchor: Backbone, config: CompositionConfig
    ) -> None:
        if backbone.model is anchor.model:
            raise GraftError(
                f"The augmenting model {name} is the backbone itself: load it a second time, or name another model."
            )
        if anchor.sites.family.causal and not backbone.sites.family.causal:
            raise GraftError(
                f"The augmenting model {name} ({backbone.sites.model_type}) lets a token see those after it, which "
                "would tell the backbone what it is to predict: name a causal language model."
            )
        self.name, self.backbone, self._layers = name, backbone, layers
        backbone.model.requires_grad_(False)
        backbone.model.eval()
        self._prompt_only = config.refresh == "prompt"
        self._rotary = config.positions != "none"
        self._anchor_layers = anchor.sites.n_layers
        self._aligned = choose_alignment(name, backbone, anchor, config)
        taps = [Tap(Site("layer", layer), "after", "replace", self._recorder(layer)) for layer in sorted(set(layers))]
        self._tap_hooks = TapHooks(backbone.model, backbone.sites, {name: taps}, lambda call: None)

    def _recorder(self, layer: int) -> Any:
        def record(call: Call, inputs: Tensor, outputs: Tensor) -> None:
            call.scratch["states", layer] = outputs

        return record

    def read(self, call: Call) -> Read:
        """Run the model on what a pass of the anchor brings.

        Raises:
            GraftError: the pass has no token ids, or a cache that was begun without this graft.
        """
        if call.input_ids is None:
            raise GraftError(
                "A composition reads token ids, as the augmenting model needs them too: pass input_ids, not embeddings."
            )
        past = 0 if call.cache is None else int(call.cache.get_seq_length())
        own, keys_and_values, state = self._cache(call.cache)
        before = int(keys_and_values[0].get_seq_length()) if keys_and_values else 0
        if isinstance(self._aligned, Spelling):
            if past and state is not None and state.keys is None:
                self._refuse_foreign_cache(past)
            reading = self._aligned.read(call, past, state)
        else:
            if past and not before:
                self._refuse_foreign_cache(past)
            reading = self._aligned.read(call, past, before)
        states = self._run(reading, own)
        nothing = states is None and not before
        return Read(states, reading.visible, keys_and_values, nothing, reading.places if self._rotary else None)

    def _run(self, reading: Reading, own: Cache | None) -> list[Tensor] | None:
        """The hidden states of each pair's layer."""
        if reading.inputs is None:
            return None
        self._check_length(reading.inputs, own)
        with torch.no_grad(), self._tap_hooks.announce() as calls:
            inputs = reading.inputs | {"past_key_values": own, "use_cache": own is not None}
            self.backbone.model.base_model(**self._for_attention(inputs))
        return [calls[0].scratch["states", layer] for layer in self._layers]

    def _for_attention(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A mask of who attends to whom in the form that the model's attention takes."""
        mask = inputs["attention_mask"]
        if mask is None or mask.dim() != 4 or self.backbone.model.config._attn_implementation == "sdpa":
            return inputs
        dtype = self.backbone.model.dtype
        lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
        return inputs | {"attention_mask": torch.where(mask, lowest.new_zeros(()), lowest)}

    def _check_length(self, inputs: dict[str, Any], own: Cache | None) -> None:
        """Refuse what the model has no positions for."""
        config, spelled = self.backbone.sites.config, isinstance(self._aligned, Spelling)
        needed = inputs["input_ids"].shape[1] + (0 if own is None else int(own.get_seq_length()))
        limits = [max_sequence_length(self.backbone)]
        if spelled and "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"]):
            limits.append(getattr(config, "sliding_window", None))  # its own mask can't say who is too far away
        limit = min(size for size in limits if size)
        if needed > limit and inputs["position_ids"] is not None:  # padding takes columns, and no positions
            needed = int(inputs["position_ids"].max()) + 1
        if needed > limit:
            raise GraftError(
                f"The augmenting model {self.name} reads {limit} tokens at most here, and the text makes {needed}: "
                "shorten the text."
            )

    def _cache(self, cache: Cache | None) -> tuple[Cache | None, Sequence[CacheLayerMixin] | None, StateLayer | None]:
        """The model's own part of a generation's cache, each pair's keys and values, and the state of the spelling."""
        if cache is None:
            return None, None, None
        own = 0 if self._prompt_only else self.backbone.sites.n_layers
        pairs = len(self._layers)
        spelled = isinstance(self._aligned, Spelling)
        owner = f"{self.name} {id(self)}"
        taken = slots(cache, owner, own + pairs + spelled, self._anchor_layers, self._fresh_layers().__next__)
        mine: list[Any] = [cache.layers[index] for index in taken]
        state = mine[-1] if spelled else None
        assert state is None or isinstance(state, StateLayer)
        return Cache(layers=mine[:own]) if own else None, mine[own : own + pairs], state

    def _fresh_layers(self) -> Iterator[CacheLayerMixin]:
        # All of them keep the whole past, whatever a layer's window: `generate` asks layers to record what they forget,
        # so that tokens can be taken back, before these are there.
        spelled = isinstance(self._aligned, Spelling)
        kind = _Kept if spelled or self._prompt_only else DynamicLayer
        own = 0 if self._prompt_only else self.backbone.sites.n_layers
        yield from (kind() for _ in range(own + len(self._layers)))
        if spelled:
            yield StateLayer()

    def _refuse_foreign_cache(self, past: int) -> None:
        raise GraftError(
            f"The cache holds {past} tokens that the augmenting model {self.name} has not read: begin the generation "
            "anew with the graft attached."
        )


def choose_alignment(
    name: str, augmenting: Backbone, anchor: Backbone, config: CompositionConfig
) -> ByPosition | Spelling:
    """How the tokens of both models are matched.

    Raises:
        GraftError: they can't be matched as asked.
    """
    prompt_only, causal = config.refresh == "prompt", anchor.sites.family.causal
    wanted = config.alignment
    if wanted == "auto":
        wanted = "position" if same_tokenizer(anchor.tokenizer, augmenting.tokenizer) else "characters"
    if wanted == "position":
        _check_vocabulary(name, augmenting, anchor)
        return ByPosition(causal, prompt_only)
    if not causal:
        raise GraftError(
            f"The backbone ({anchor.sites.model_type}) reads texts whole, and its tokenizer is not that of {name}: "
            "tokens are matched by characters for causal language models only; name a model with the same tokenizer."
        )
    return Spelling(anchor.need_tokenizer(), augmenting.need_tokenizer(), prompt_only=prompt_only, name=name)


def same_tokenizer(one: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None) -> bool:
    """Whether two tokenizers give the same ids; a model without one takes the other's."""
    if one is None or other is None:
        return True
    return one.get_vocab() == other.get_vocab() and _rules(one) == _rules(other)


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What decides a fast tokenizer's ids beside its vocabulary, such as merges."""
    if not tokenizer.is_fast:
        return type(tokenizer).__name__
    whole = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # fast, as asked
    return [whole[part] for part in ("normalizer", "pre_tokenizer", "model")]


def _check_vocabulary(name: str, augmenting: Backbone, anchor: Backbone) -> None:
    known = len(augmenting.model.get_input_embeddings().weight)  # type: ignore[arg-type]  # an Embedding's, a matrix
    used = len(anchor.tokenizer) if anchor.tokenizer is not None else int(anchor.sites.config.vocab_size)
    if known < used:
        raise GraftError(
            f"The backbone's tokens go up to {used - 1}, and the augmenting model {name} knows {known}: set alignment "
            "to characters, or name a model with the same tokenizer."
        )
