"""`cache: recompute`: keys and values are computed again when route weights change.

Shape suffixes: B rows, T tokens of this pass, d the backbone's width, E experts and the bare backbone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafts.token_routing.routing_state import RouteSpans, RoutingState


class _ForcedWeights(threading.local):
    """Weights of a nested pass, per thread."""

    value: Tensor | None = None


class Recompute:
    """Computes the states of every token with the newest weights.

    When the weights change, the whole text is read again and the cache takes the new keys and values. A pass that
    covers several routes, such as scoring a text without a cache, takes one nested pass per route. This is slow.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._model: list[Any] = [backbone.model.base_model]
        self._layers = backbone.sites.n_layers
        self._forced = _ForcedWeights()

    def forced_weights(self) -> Tensor | None:
        """The weights (B, 1, E) of the pass that starts now, if it is a nested one."""
        return self._forced.value

    def taps(self) -> list[Tap]:
        """The tap that inserts the states of nested passes."""
        return [Tap(Site("norm"), "after", "replace", self._insert)]

    def __call__(self, call: Call, spans: RouteSpans, weights_BTE: Tensor, state: RoutingState | None) -> Tensor:
        """(B, 1, E) the newest weights, after older tokens were computed again with the weights that apply to them."""
        route_BT = spans.updates.long().cumsum(1)  # the number of each token's route within this pass
        route_BT = torch.where(spans.end < spans.past, 0, route_BT.gather(1, (spans.end - spans.past).clamp(min=0)))
        newest_B1E = weights_BTE[:, -1:]
        self._recompute_cache(call, spans, newest_B1E, state)
        older = []
        for route in range(int(route_BT.max())):
            mask = route_BT == route
            if mask.any():
                column = torch.where(mask.any(1), mask.long().argmax(1), weights_BTE.shape[1] - 1)
                weights = weights_BTE.gather(1, column[:, None, None].expand(-1, 1, weights_BTE.shape[-1]))
                older.append((mask & (route_BT < route_BT[:, -1:]), self._states(call, spans, weights)))
        call.scratch[self] = older
        return newest_B1E

    def _recompute_cache(self, call: Call, spans: RouteSpans, newest_B1E: Tensor, state: RoutingState | None) -> None:
        """Replace the cached keys and values by those of the newest weights."""
        if state is None or call.cache is None or torch.equal(state.weights[:, -1:], newest_B1E):
            return
        past = spans.past
        fresh = DynamicCache(config=self._model[0].config)
        mask = None if call.attention_mask is None else call.attention_mask[:, :past]
        self._run(spans.ids[:, :past], mask, newest_B1E, fresh)
        for index, new in enumerate(fresh.layers[: self._layers]):
            old = call.cache.layers[index]
            if isinstance(old, DynamicLayer) and isinstance(new, DynamicLayer):
                old.keys, old.values = new.keys, new.values
            else:  # such as a recurrent state
                call.cache.layers[index] = new

    def _states(self, call: Call, spans: RouteSpans, weights_B1E: Tensor) -> Tensor:
        """(B, T, d) last hidden states of this pass's tokens when the whole text is read with the given weights."""
        positions = call.position_ids if call.attention_mask is None and not spans.past else None
        output = self._run(spans.ids, call.attention_mask, weights_B1E, None, positions)
        return output.last_hidden_state[:, spans.past :]

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        weights_B1E: Tensor,
        cache: Cache | None,
        positions: Tensor | None = None,
    ) -> Any:
        if mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        with self._force(weights_B1E):
            return self._model[0](
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )

    @contextmanager
    def _force(self, weights_B1E: Tensor) -> Iterator[None]:
        outer, self._forced.value = self._forced.value, weights_B1E
        try:
            yield
        finally:
            self._forced.value = outer

    def _insert(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Replace the states of tokens whose route is not the newest."""
        for mask_BT, states_BTd in call.scratch.get(self, ()):
            outputs = torch.where(mask_BT[..., None], states_BTd, outputs)
        return outputs
