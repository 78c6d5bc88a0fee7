"""One growable cache for backbone, augmenting models and grafts.

transformers' `generate` makes a `DynamicCache` with as many layers as the backbone has. A graft that needs keys and
values, or a state, of its own appends layers; beam reordering, cropping and batch selection then reach them with the
rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from graftlm.errors import GraftError

_SLOTS = "_graft_slots"


def slots(
    cache: Cache, owner: str, count: int, backbone_layers: int, make: Callable[[], CacheLayerMixin] = DynamicLayer
) -> range:
    """The indices of `owner`'s layers in `cache`, appended at the first call.

    Args:
        cache: the cache of one generation.
        owner: who asks, such as the graft's name; the same owner gets the same layers again.
        count: how many layers it needs.
        backbone_layers: how many layers the backbone itself fills (they may not exist yet in a lazy cache).
        make: builds one layer.
    """
    taken: dict[str, range] = cache.__dict__.setdefault(_SLOTS, {})
    if owner not in taken:
        replicate = getattr(cache, "layer_class_to_replicate", None)
        while len(cache.layers) < backbone_layers and replicate is not None:
            cache.layers.append(replicate())
        start = len(cache.layers)
        cache.layers.extend(make() for _ in range(count))
        taken[owner] = range(start, start + count)
    return taken[owner]


class StateLayer(CacheLayerMixin):
    """A cache layer for a recurrent state of fixed size, batch first, such as a state-space model's.

    The state is kept in `keys`, a second one where needed in `values`, so that every batch operation of
    `CacheLayerMixin` applies. A state can't be cropped back in time, and says so.
    """

    is_croppable = False
    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor | None = None, *args: object, **kwargs: object):
        """Replace the state by `key_states` (B, ...), and the second one by `value_states` (B, ...)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        self.keys = key_states
        self.values = key_states.new_empty((key_states.shape[0], 0)) if value_states is None else value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, which a state can't.

        Raises:
            GraftError: there is a token to take back.
        """
        if tokens_to_remove and self.is_initialized:
            raise GraftError(
                "A graft keeps a state here that can't be taken back by some tokens, as assisted decoding asks: decode "
                "greedily, with beams or by sampling, without an assistant or prompt_lookup_num_tokens."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._apply(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda state: state[indices.to(state.device), ...])

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = function(self.keys), function(self.values)
