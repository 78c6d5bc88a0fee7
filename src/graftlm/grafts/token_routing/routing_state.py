"""The text that each token's route depends on, the routing state in a generation's cache, and `cache: recompute`.

The tokens of a document are counted from 0. The first n are the prompt; without a known prompt, n = 1. The route of
token i depends on the document up to token b(i), so that it changes every k tokens:

    b(i) = n - 1                            for i < n      (the whole prompt, which is known at once)
    b(i) = i - ((i + 1 - n) mod k)          for i >= n

For n = 1 this is i - (i mod k), and no token's route depends on a later token.

Shape suffixes: B rows, T tokens of this pass, P tokens before, S = P + T, E experts, d the backbone's width.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.backbone.cache import is_static_layer, slots
from graftlm.backbone.cache_joining import join_columns
from graftlm.errors import GraftError
from graftlm.grafts.token_routing.config import TokenRoutingConfig


class RoutingState(NamedTuple):
    """What a generation's cache keeps of the tokens before this pass.

    Ids are (B, P), route weights (B, P, E + 1) with the bare backbone's last, and numbers of prompt tokens (B,).
    """

    ids: Tensor
    weights: Tensor
    prompt_length: Tensor


@dataclass
class RunningSum:
    """Sums of embeddings over the tokens so far, (B, d), their counts, (B, 1), and the number of columns covered."""

    length: int = 0
    sums: Tensor | float = 0.0
    counts: Tensor | float = 0.0


class RoutingCacheLayer(DynamicLayer):
    """A cache layer that holds a `RoutingState`, so that beam search, cropping and batch selection apply to it.

    Keys are ids, (B, 1, S, 1). Values are weights and the prompt length, (B, 1, S, E + 2).
    """

    counts_tokens = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running_sum = RunningSum()
        self._summed_keys: Tensor | None = None

    @property
    def running_sum(self) -> RunningSum:
        """The embedder's running sum; a new one after an operation on rows or columns, which replaces the keys."""
        if self._summed_keys is not self.keys:
            self._running_sum, self._summed_keys = RunningSum(), self.keys
        return self._running_sum

    @property
    def state(self) -> RoutingState | None:
        """The stored state; None before the first pass."""
        if not self.is_initialized or self.keys is None or self.values is None or not self.keys.numel():
            return None
        keys, values = self.keys, self.values
        return RoutingState(keys[:, 0, :, 0], values[:, 0, :, :-1], values[:, 0, -1, -1].long())

    def append(self, spans: RouteSpans, weights_BTE: Tensor) -> None:
        """Store the tokens of a pass with their weights."""
        ids_BT = spans.ids[:, spans.past :]
        prompt_length = spans.prompt_length[..., None].to(weights_BTE.dtype)
        self.update(ids_BT[:, None, :, None], torch.cat([weights_BTE, prompt_length], dim=-1)[:, None])
        self._summed_keys = self.keys

    def join(self, layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
        """One layer with the rows of several, see `backbone.cache.join`."""
        return join_columns(layers, paddings)


def cache_owner(graft: object) -> str:
    """The name under which a graft's routing layer is registered in a cache."""
    return f"token routing {id(graft)}"


def routing_layer(call: Call, graft: object, backbone_layers: int) -> RoutingCacheLayer | None:
    """The routing layer of the pass's cache, appended on the first pass; None without a cache.

    Raises GraftError if the cache was filled without this graft.
    """
    if call.cache is None:
        return None
    (index,) = slots(call.cache, cache_owner(graft), 1, backbone_layers, RoutingCacheLayer)
    layer = call.cache.layers[index]
    assert isinstance(layer, RoutingCacheLayer)
    if layer.get_seq_length() != call.past():
        raise GraftError(
            f"The cache holds {call.past()} tokens that the routing has not read: start the generation again with the "
            "graft attached, and without guidance_scale, whose second cache it does not see."
        )
    return layer


@dataclass(frozen=True)
class RouteSpans:
    """The text span that determines the route of each token of one pass.

    Attributes:
        ids: (B, S) all token ids so far.
        start: (B, T) column in S of the first token of each token's document.
        end: (B, T) last column, inclusive, that each token's route depends on.
        prompt_length: (B, T) n of the module's equations.
        window: the route depends on this many last tokens of the span only; None for all.
    """

    ids: Tensor
    start: Tensor
    end: Tensor
    prompt_length: Tensor
    window: int | None

    @property
    def past(self) -> int:
        """P, the number of columns before this pass."""
        return self.ids.shape[1] - self.end.shape[1]

    @property
    def columns(self) -> Tensor:
        """(B, T) the column in this pass, from 1, where each span ends; 0 for spans that end before this pass."""
        return (self.end - self.past).clamp(min=-1) + 1

    @property
    def updates(self) -> Tensor:
        """(B, T) True at tokens of this pass where new weights are computed: the ends of spans."""
        updates = torch.zeros(len(self.end), self.end.shape[1] + 1, dtype=torch.bool, device=self.end.device)
        return updates.scatter(1, self.columns, True)[:, 1:]


def route_spans(call: Call, config: TokenRoutingConfig, state: RoutingState | None, *, causal: bool) -> RouteSpans:
    """The spans of a pass, given the state of the tokens in the cache.

    In training and in encoders, every route depends on the whole document.
    """
    ids_BT = call.input_ids
    assert ids_BT is not None
    past_ids = state.ids if state is not None else ids_BT[:, :0]
    ids_BS = torch.cat([past_ids, ids_BT], dim=1)
    columns = torch.arange(ids_BS.shape[1], device=ids_BS.device)[past_ids.shape[1] :].expand_as(ids_BT)
    positions = call.positions_in_documents()
    index = columns if positions is None else positions.to(columns.device).expand_as(columns)
    start = columns - index
    mask = call.token_mask if call.attention_mask is None else call.attention_mask[:, -ids_BT.shape[1] :]
    real = torch.ones_like(ids_BT, dtype=torch.bool) if mask is None else mask.bool().to(ids_BT.device)
    if call.training or not causal:
        in_document = (start[:, :, None] == start[:, None, :]) & real[:, None, :]
        end = torch.where(in_document, columns[:, None, :], start[:, :, None]).amax(-1)  # its last column
        return RouteSpans(ids_BS, start, end, torch.ones_like(start), config.window)
    n = _prompt_lengths(call, config, state, start, real)
    generated = index + 1 - n
    b = torch.where(generated <= 0, n - 1, index - generated % config.every)
    if config.reads == "prompt":
        b = torch.where((n > 1) & (generated > 0), n - 1, b)
    return RouteSpans(ids_BS, start, start + b, n, config.window)


def _prompt_lengths(
    call: Call, config: TokenRoutingConfig, state: RoutingState | None, start: Tensor, real: Tensor
) -> Tensor:
    """(B, T) n: the number of prompt tokens of each token's document, at least one."""
    length = start.shape[1]
    if state is not None:
        if call.prompt is not None and config.prompt == "whole" and config.fixed is None:
            raise GraftError(
                "With prompt: whole the routes of a prompt depend on all of it, but a pass was given only a part: "
                "generate without prefill_chunk_size and without a filled cache, or set prompt: causal."
            )
        return state.prompt_length[:, None].expand(-1, length)
    if call.prompt is not None and config.prompt == "whole":
        prompt, first = call.prompt.to(start.device) & real, start.clamp(max=length - 1)
        counts = torch.zeros_like(start).scatter_add(1, first, prompt.long())
        return counts.gather(1, first).clamp(min=1)
    if call.cache is not None and config.prompt == "whole":  # the first pass of a generation
        return real.sum(1, keepdim=True).clamp(min=1).expand(-1, length)
    return torch.ones_like(start)


class Recompute:
    """Computes the states of every token with the newest weights.

    When the weights change, the whole text is read again and the cache takes the new keys and values. A pass that
    covers several routes, such as scoring a text without a cache, takes one nested pass per route. This is slow.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._layers = backbone.sites.n_layers
        self._forced = threading.local()  # the weights of a nested pass

    def forced_weights(self) -> Tensor | None:
        """The weights (B, 1, E + 1) of the pass that starts now, if it is a nested one."""
        return getattr(self._forced, "weights", None)

    def tap(self) -> Tap:
        """It inserts the states of nested passes."""
        return Tap(Site("norm"), "after", "replace", self._insert)

    def __call__(self, call: Call, spans: RouteSpans, weights_BTE: Tensor, state: RoutingState | None) -> Tensor:
        """(B, 1, E + 1) the newest weights, after older tokens were computed again with their own weights.

        Raises GraftError if the cache is static, so that it can't take new keys and values.
        """
        if call.cache is not None and any(is_static_layer(layer) for layer in call.cache.layers):
            raise GraftError(
                "cache: recompute replaces the keys and values of a generation, which a static cache does not allow: "
                "generate without cache_implementation, or set cache: keep."
            )
        # The number of each token's route within this pass.
        route_BT = nn.functional.pad(spans.updates.long().cumsum(1), (1, 0)).gather(1, spans.columns)
        newest_B1E = weights_BTE[:, -1:]
        self._recompute_cache(call, spans, newest_B1E, state)
        positions = None if spans.past else call.position_ids
        older = []
        for route in range(int(route_BT.max())):
            mask = route_BT == route
            if mask.any():
                column = torch.where(mask.any(1), mask.long().argmax(1), weights_BTE.shape[1] - 1)
                weights = weights_BTE.gather(1, column[:, None, None].expand(-1, 1, weights_BTE.shape[-1]))
                output = self._run(
                    call, spans.ids, call.attention_mask, weights, position_ids=positions, use_cache=False
                )
                older.append((mask & (route_BT < route_BT[:, -1:]), output.last_hidden_state[:, spans.past :]))
        call.scratch[self] = older
        return newest_B1E

    def _recompute_cache(self, call: Call, spans: RouteSpans, newest_B1E: Tensor, state: RoutingState | None) -> None:
        if state is None or call.cache is None or torch.equal(state.weights[:, -1:], newest_B1E):
            return
        past = spans.past
        assert call.model is not None
        fresh = DynamicCache(config=call.model.config)
        mask = None if call.attention_mask is None else call.attention_mask[:, :past]
        self._run(call, spans.ids[:, :past], mask, newest_B1E, past_key_values=fresh, use_cache=True)
        for index, new in enumerate(fresh.layers[: self._layers]):
            old = call.cache.layers[index]
            if isinstance(old, DynamicLayer) and isinstance(new, DynamicLayer):
                old.keys, old.values = new.keys, new.values
            else:  # such as a recurrent state
                call.cache.layers[index] = new

    def _run(self, call: Call, ids: Tensor, mask: Tensor | None, weights_B1E: Tensor, **inputs: Any) -> Any:
        if mask is not None:
            inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        outer, self._forced.weights = self.forced_weights(), weights_B1E
        try:
            return cast("Any", call.model).base_model(input_ids=ids, attention_mask=mask, **inputs)
        finally:
            self._forced.weights = outer

    def _insert(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        for mask_BT, states_BTd in call.scratch.get(self, ()):
            outputs = torch.where(mask_BT[..., None], states_BTd, outputs)
        return outputs
