"""What a text leaves behind for the tokens after it: windows of keys and values, and states; nothing that grows.

(Unstructured kernels alone have no state: they keep what they convolve.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from graftlm.errors import GraftError


class LayerMemory(CacheLayerMixin):
    """Named tensors of one layer, batch first, and how many columns it has read.

    What a pass takes of a batch, a beam's reordering takes of all of them.
    """

    is_croppable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.columns = 0

    def keep(self, name: str, value: Tensor, *, detach: bool) -> None:
        """Remember a tensor (B, ...) under a name, and nothing that it is a view of; `detach`: no gradients."""
        value = value.detach() if detach else value
        if not torch.compiler.is_compiling() and value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()
        self.tensors[name] = value
        if not self.is_initialized:
            self.lazy_initialization(value)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        """Raise: what is kept here has names."""
        raise GraftError("A block-state model keeps states, not keys and values for others: give each model a cache.")

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reset(self) -> None:
        self.tensors, self.columns, self.is_initialized = {}, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, which a state can't.

        Raises:
            GraftError: there is a token to take back.
        """
        if tokens_to_remove and self.is_initialized:
            raise GraftError(
                "A block-state model can't take tokens back, as assisted decoding asks: decode greedily, with beams or "
                "by sampling, without an assistant or prompt_lookup_num_tokens."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._apply(lambda value: value.index_select(0, beam_idx.to(value.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda value: value.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda value: value[indices.to(value.device), ...])

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self.tensors = {name: function(value) for name, value in self.tensors.items()}


def memories(cache: Cache, layers: int) -> list[LayerMemory]:
    """The layers of a cache that belong to a model: put in where an empty cache has transformers' own.

    Raises:
        GraftError: the cache is another model's.
    """
    own = cache.layers[:layers]
    if not (len(own) == layers and all(isinstance(layer, LayerMemory) for layer in own)):
        if any(getattr(layer, "is_initialized", False) for layer in own):
            raise GraftError(
                "This cache holds keys and values of another model: pass past_key_values as this model returned them, "
                "or a new DynamicCache()."
            )
        own = [LayerMemory() for _ in range(layers)]
        cache.layers[:layers] = own
    return own  # type: ignore[return-value]  # all of them are, by now


def saved(cache: Cache) -> dict[str, Tensor]:
    """All that a cache remembers, as tensors: for a checkpoint of a text that is read in pieces."""
    return {f"{number}.{name}": value for number, layer in _own(cache) for name, value in layer.tensors.items()} | {
        f"{number}.columns": torch.tensor(layer.columns) for number, layer in _own(cache)
    }


def restored(tensors: dict[str, Tensor]) -> Cache:
    """The cache that `saved` wrote down."""
    found: dict[int, LayerMemory] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        memory = found.setdefault(int(number), LayerMemory())
        if name == "columns":
            memory.columns = int(value)
        else:
            memory.keep(name, value, detach=True)
    cache = DynamicCache()
    cache.layers[:] = [found[number] for number in sorted(found)]
    return cache


def _own(cache: Cache) -> list[tuple[int, LayerMemory]]:
    return [(number, layer) for number, layer in enumerate(cache.layers) if isinstance(layer, LayerMemory)]
