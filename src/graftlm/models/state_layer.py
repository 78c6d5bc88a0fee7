"""The base class of cache layers with recurrent states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from graftlm.errors import GraftError


class RecurrentCacheLayer(CacheLayerMixin):
    """A cache layer of recurrent states, with the batch as their first dimension.

    States can be reordered and selected along the batch, as beam search needs, but they can't be rewound.
    """

    is_sliding = False

    @abstractmethod
    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every state by `function(state)`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `GraftError` if tokens would have to be removed, since a recurrent state can't be rewound.

        Args:
            tokens_to_remove: number of tokens to remove from the end.
        """
        if tokens_to_remove and self.is_initialized:
            raise GraftError(
                "Tokens are to be removed from the cache, as in assisted decoding, but a recurrent state can't be "
                "rewound: use greedy decoding, beam search or sampling, without an assistant or "
                "prompt_lookup_num_tokens."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._apply(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda state: state[indices.to(state.device), ...])
