"""The base of cache layers that hold recurrent states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from graftlm.errors import GraftError


class RecurrentCacheLayer(CacheLayerMixin):
    """A cache layer of states, batch first, which follow beams and batches but can't go back in time."""

    is_sliding = False

    @abstractmethod
    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every state by the function of it."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `GraftError` if there is a token to remove."""
        if tokens_to_remove and self.is_initialized:
            raise GraftError(
                "A recurrent state can't be taken back by some tokens, as assisted decoding needs: decode greedily, "
                "with beams or by sampling, without an assistant or prompt_lookup_num_tokens."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._apply(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda state: state[indices.to(state.device), ...])
