"""What a generation remembers of its routes, and how keys and values are made anew when they change.

Shape suffixes: B rows, T tokens of this pass, P tokens before, S both, E experts and the bare backbone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.backbone.cache import joined_columns, slots
from graftlm.errors import GraftError
from graftlm.grafts.token_routing.embedders import Memo
from graftlm.grafts.token_routing.reading import Before, Reading

_OWNED = "token routing {}"


class Remembered(DynamicLayer):
    """A cache layer for what a routing remembers.

    Keys are ids, (B, 1, S, 1); values are weights and the number of given tokens, (B, 1, S, E + 2).
    `memo` is for the embedder's running sums; it is forgotten whenever rows or tokens are rearranged.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memo = Memo()

    def reset(self) -> None:
        self.memo = Memo()
        super().reset()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self.memo = Memo()
        super().crop(*args, **kwargs)

    def reorder_cache(self, beam_idx: Any) -> None:
        self.memo = Memo()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.memo = Memo()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.memo = Memo()
        super().batch_select_indices(indices)

    def join(self, layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> Remembered:
        """One layer of the rows of several, see `backbone.cache.join`."""
        found = joined_columns(layers, paddings)
        assert isinstance(found, Remembered)
        found.memo = Memo()
        return found


@dataclass(frozen=True)
class History:
    """What is remembered of a generation's tokens, in a layer of its cache, so that beams and crops reach it."""

    layer: Remembered

    @classmethod
    def of(cls, call: Call, owner: object, backbone_layers: int) -> History | None:
        """The history of the pass's generation, None without a cache.

        Raises:
            GraftError: the cache was begun without this graft.
        """
        if call.cache is None:
            return None
        past = int(call.cache.get_seq_length())
        (index,) = slots(call.cache, _OWNED.format(id(owner)), 1, backbone_layers, Remembered)
        layer = call.cache.layers[index]
        assert isinstance(layer, Remembered)
        if layer.get_seq_length() != past:
            raise GraftError(
                f"The cache holds {past} tokens that the routing has not read: begin the generation anew with the "
                "graft attached."
            )
        return cls(layer)

    @classmethod
    def found(cls, cache: Cache, owner: object) -> History | None:
        """The history in a cache, if there is one."""
        taken = getattr(cache, "_graft_slots", {}).get(_OWNED.format(id(owner)))
        if taken is None:
            return None
        layer = cache.layers[taken[0]]
        assert isinstance(layer, Remembered)
        return cls(layer)

    def before(self) -> Before | None:
        """What is remembered; None before the first pass."""
        keys, values = self.layer.keys, self.layer.values
        if not self.layer.is_initialized or keys is None or values is None or not keys.numel():
            return None
        return Before(keys[:, 0, :, 0], values[:, 0, :, :-1], values[:, 0, -1, -1].long())

    def add(self, reading: Reading, weights_BTE: Tensor) -> None:
        """Remember the tokens of a pass."""
        ids = reading.ids[:, reading.past :]
        given = reading.given[..., None].to(weights_BTE.dtype)
        self.layer.update(ids[:, None, :, None], torch.cat([weights_BTE, given], dim=-1)[:, None])


class _Local(threading.local):
    """The weights of the pass that this thread runs inside of another one."""

    forced: Tensor | None = None


class Rewriting:
    """Under `cache: recompute`, every token's states are those of the newest weights.

    When a route changes, all text is read again with the new weights, and the cache takes the new keys and values. A
    pass over several routes, as of whole text without a cache, takes one further pass for each: that is what it means,
    and it is slow.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._model: list[Any] = [backbone.model.base_model]
        self._layers = backbone.sites.n_layers
        self._local = _Local()

    def forced(self) -> Tensor | None:
        """The weights (B, 1, E) that hold for the pass that begins now, when it is one of ours."""
        return self._local.forced

    def taps(self) -> list[Tap]:
        """Where states of other passes are put in."""
        return [Tap(Site("norm"), "after", "replace", self._stitch)]

    def rewrite(self, call: Call, reading: Reading, weights_BTE: Tensor, before: Before | None) -> Tensor:
        """(B, 1, E) the newest weights, after what was computed with older ones has been computed again."""
        turns_BT = reading.anew.long().cumsum(1)  # tokens of one turn share a route
        turns_BT = torch.where(_reads_past(reading), 0, turns_BT.gather(1, _columns(reading)))
        newest_B1E = weights_BTE[:, -1:]
        self._restate_past(call, reading, newest_B1E, before)
        stitched = []
        for turn in range(int(turns_BT.max())):
            chosen = turns_BT == turn
            if chosen.any():
                at = torch.where(chosen.any(1), chosen.long().argmax(1), weights_BTE.shape[1] - 1)
                weights = weights_BTE.gather(1, at[:, None, None].expand(-1, 1, weights_BTE.shape[-1]))
                stitched.append((chosen & (turns_BT < turns_BT[:, -1:]), self._states(call, reading, weights)))
        call.scratch[self] = stitched
        return newest_B1E

    def _restate_past(self, call: Call, reading: Reading, newest_B1E: Tensor, before: Before | None) -> None:
        """Give the cache the keys and values that the newest weights make of the tokens before."""
        if before is None or call.cache is None or torch.equal(before.weights[:, -1:], newest_B1E):
            return
        past = reading.past
        fresh = DynamicCache(config=self._model[0].config)
        mask = None if call.attention_mask is None else call.attention_mask[:, :past]
        self._run(reading.ids[:, :past], mask, newest_B1E, fresh)
        for place, new in enumerate(fresh.layers[: self._layers]):
            old = call.cache.layers[place]
            if isinstance(old, DynamicLayer) and isinstance(new, DynamicLayer):
                old.keys, old.values = new.keys, new.values
            else:  # a backbone that keeps something else, such as states
                call.cache.layers[place] = new

    def _states(self, call: Call, reading: Reading, weights_B1E: Tensor) -> Tensor:
        """(B, T, d) the last states of this pass's tokens when all text is read with some weights."""
        places = call.position_ids if call.attention_mask is None and not reading.past else None
        output = self._run(reading.ids, call.attention_mask, weights_B1E, None, places)
        return output.last_hidden_state[:, reading.past :]

    def _run(
        self, ids: Tensor, mask: Tensor | None, weights_B1E: Tensor, cache: Cache | None, places: Tensor | None = None
    ) -> Any:
        if mask is not None:
            places = (mask.long().cumsum(-1) - 1).clamp(min=0)
        with self._force(weights_B1E):
            return self._model[0](
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=cache is not None,
            )

    @contextmanager
    def _force(self, weights_B1E: Tensor) -> Iterator[None]:
        outer, self._local.forced = self._local.forced, weights_B1E
        try:
            yield
        finally:
            self._local.forced = outer

    def _stitch(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """States of tokens whose route is not the newest."""
        for chosen_BT, states_BTd in call.scratch.get(self, ()):
            outputs = torch.where(chosen_BT[..., None], states_BTd, outputs)
        return outputs


def _columns(reading: Reading) -> Tensor:
    return (reading.until - reading.past).clamp(min=0)


def _reads_past(reading: Reading) -> Tensor:
    return reading.until < reading.past
