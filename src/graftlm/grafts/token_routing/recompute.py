"""`cache: recompute`: the keys and values of all tokens are those of the newest weights.

Shape suffixes: B rows, T tokens of this pass, P tokens before, S = P + T, E experts, d the backbone's width.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.backbone.cache import is_static_layer
from graftlm.errors import GraftError
from graftlm.grafts.token_routing.routing_state import RouteSpans, RoutingState


class Recompute:
    """The computation of every token's states with the newest weights.

    When the weights change, the whole text is read again, and the cache takes the new keys and values. A pass that
    covers several routes, such as scoring a text without a cache, takes one nested pass per route, which is slow.

    Args:
        backbone: the backbone of the routing.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._layers = backbone.sites.n_layers
        self._forced = threading.local()  # the weights of a nested pass

    def forced_weights(self) -> Tensor | None:
        """Return the weights (B, 1, E + 1) of the nested pass that is running in this thread, or None without one."""
        return getattr(self._forced, "weights", None)

    def tap(self) -> Tap:
        """Return the tap that inserts the states of nested passes."""
        return Tap(Site("norm"), "after", "replace", self._insert)

    def __call__(
        self,
        call: Call,
        spans: RouteSpans,
        weights_BTE: Tensor,
        state: RoutingState | None,
    ) -> Tensor:
        """Compute the text again with other weights than those of its first pass, where that is necessary.

        If the weights have changed, the cache gets new keys and values. The states of tokens of this pass with older
        routes are stored in `call.scratch` for the tap.

        Args:
            call: the pass.
            spans: the spans of the pass.
            weights_BTE: weights of each token of the pass.
            state: state of the tokens in the cache; None without one.

        Returns:
            (B, 1, E + 1) the newest weights.

        Raises:
            GraftError: the cache is static, and its keys and values can't be replaced.
        """
        if call.cache is not None and any(is_static_layer(layer) for layer in call.cache.layers):
            raise GraftError(
                "The cache is static, but with cache set to recompute its keys and values must be replaced: generate "
                "without cache_implementation, or set cache to keep."
            )
        newest_B1E = weights_BTE[:, -1:]
        self._recompute_cache(call, spans, newest_B1E, state)
        call.scratch[self] = self._older_states(call, spans, weights_BTE)
        return newest_B1E

    def _older_states(self, call: Call, spans: RouteSpans, weights_BTE: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Run one nested pass per route.

        Returns:
            For each route, a mask (B, T) of the tokens that have it and not the newest route, and the states (B, T, d)
            of the pass.
        """
        route_BT = _route_numbers(spans)
        is_older_BT = route_BT < route_BT[:, -1:]
        positions = None if spans.past else call.position_ids
        last_column = weights_BTE.shape[1] - 1
        older = []
        for route in range(int(route_BT.max())):
            mask_BT = route_BT == route
            if not mask_BT.any():
                continue
            column_B = torch.where(mask_BT.any(1), mask_BT.long().argmax(1), last_column)
            index_B1E = column_B[:, None, None].expand(-1, 1, weights_BTE.shape[-1])
            output = self._run(
                call,
                ids=spans.ids,
                mask=call.attention_mask,
                weights_B1E=weights_BTE.gather(1, index_B1E),
                position_ids=positions,
                use_cache=False,
            )
            states_BTd = output.last_hidden_state[:, spans.past :]
            older.append((mask_BT & is_older_BT, states_BTd))
        return older

    def _recompute_cache(
        self,
        call: Call,
        spans: RouteSpans,
        newest_B1E: Tensor,
        state: RoutingState | None,
    ) -> None:
        """Replace the keys and values in the cache if the weights have changed."""
        if state is None or call.cache is None or torch.equal(state.weights[:, -1:], newest_B1E):
            return
        past = spans.past
        assert call.model is not None
        fresh = DynamicCache(config=call.model.config)
        self._run(
            call,
            ids=spans.ids[:, :past],
            mask=None if call.attention_mask is None else call.attention_mask[:, :past],
            weights_B1E=newest_B1E,
            past_key_values=fresh,
            use_cache=True,
        )
        for index, new in enumerate(fresh.layers[: self._layers]):
            old = call.cache.layers[index]
            if isinstance(old, DynamicLayer) and isinstance(new, DynamicLayer):
                old.keys = new.keys
                old.values = new.values
            else:  # for example a recurrent state
                call.cache.layers[index] = new

    def _run(self, call: Call, ids: Tensor, mask: Tensor | None, weights_B1E: Tensor, **inputs: object) -> Any:
        """Run a nested pass with the given weights, and return the output of the body."""
        if mask is not None:
            inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        outer = self.forced_weights()
        self._forced.weights = weights_B1E
        try:
            body = cast("nn.Module", call.model).base_model
            return cast("nn.Module", body)(input_ids=ids, attention_mask=mask, **inputs)
        finally:
            self._forced.weights = outer

    def _insert(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        for mask_BT, states_BTd in call.scratch.get(self, ()):
            outputs = torch.where(mask_BT[..., None], states_BTd, outputs)
        return outputs


def _route_numbers(spans: RouteSpans) -> Tensor:
    """Return the number of each token's route within a pass, (B, T)."""
    counts_BT = spans.updates.long().cumsum(1)
    with_cached_route = nn.functional.pad(counts_BT, (1, 0))
    return with_cached_route.gather(1, spans.columns)
