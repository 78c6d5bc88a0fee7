"""Count the tokens in a key-value cache without waiting for an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graftlm.backbone.cache import counted_tokens

COUNT_KEY = "_graft_count"
"""The attribute of a cache that stores its number of tokens and the version of the tensor that counts them."""


def may_read(tensor: Tensor) -> bool:
    """Return whether Python may branch on values of a tensor: on a CPU, outside compiled code.

    On an accelerator, a read waits for all work that is queued there.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


class TokenCount:
    """The number of tokens in a cache at the beginning of a pass, read by the host only when it is needed.

    A static cache counts its tokens on its device. To avoid a synchronization in each decode step, a count that was
    read is stored in the cache together with the new tokens of the pass. It is valid until something else changes the
    cache. Compiled code uses the length of a graft's cache layer that `counts_tokens`.

    Args:
        cache: the cache; None counts as empty.
        new: number of tokens that the pass adds.
    """

    def __init__(self, cache: Cache | None, new: int) -> None:
        self._cache = cache
        self._new = new
        self._version = 0
        self._count: Any = 0 if cache is None else cache.get_seq_length()
        if cache is not None and isinstance(self._count, Tensor):
            self._count = self._known_count(cache, self._count)

    def _known_count(self, cache: Cache, count: Tensor) -> int | Tensor:
        """Return the count as a number if that needs no synchronization, else a copy of the tensor."""
        known: int | None
        if torch.compiler.is_compiling():
            known = counted_tokens(cache)
        else:
            self._version = _version(count)
            stored, version = getattr(cache, COUNT_KEY, (None, None))
            known = stored if version == self._version else None
        if may_read(count):
            known = int(count)
        return count.clone() if known is None else known  # the pass changes the tensor in place

    @property
    def is_known(self) -> bool:
        """Whether `read` returns without a synchronization."""
        return not isinstance(self._count, Tensor)

    def read(self) -> int:
        """Return the number of tokens."""
        self._count = int(self._count)
        return self._count

    def columns(self, device: torch.device) -> Tensor:
        """Return the columns (T) of the new tokens in the cache, without a synchronization."""
        return torch.arange(self._new, device=device) + self._count

    def keep(self) -> None:
        """Store the count in the cache at the end of the pass, if it is known."""
        if self._cache is None or torch.compiler.is_compiling():
            return
        count: Any = self._cache.get_seq_length()
        if not self.is_known or not isinstance(count, Tensor):
            return
        version = self._version + 1
        if _version(count) == version:  # Only this pass changed the cache.
            setattr(self._cache, COUNT_KEY, (self._count + self._new, version))


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -2 for inference tensors, which don't count."""
    return -2 if tensor.is_inference() else tensor._version
