"""What a text leaves behind for the tokens after it: windows of keys and values, and states; nothing that grows.

(Unstructured kernels alone have no state: they keep what they convolve.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from graftlm.backbone.cache import StateLayer
from graftlm.errors import GraftError


class LayerMemory(StateLayer):
    """Named tensors of one layer, batch first, and how many tokens each row has had."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.columns = 0

    def keep(self, name: str, value: Tensor, *, detach: bool) -> None:
        """Remember a tensor (B, ...) under a name; without its gradients while a model trains."""
        self.tensors[name] = value.detach() if detach else value
        if not self.is_initialized:
            self.lazy_initialization(value)

    def get_seq_length(self) -> int:
        return self.columns

    def reset(self) -> None:
        super().reset()
        self.tensors, self.columns = {}, 0

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
