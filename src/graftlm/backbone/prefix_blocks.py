"""Keep the keys and values of texts that were read, for later prompts that begin with the same tokens."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone.cache import set_slots
from graftlm.backbone.growing_layer import use_growing_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BLOCK_TOKENS = 32
"""Number of tokens of a block."""

Block = list[tuple[Tensor, Tensor]]
"""Keys and values (1, H, 32, d) of each layer, the backbone's layers first."""


class _BlockKey(NamedTuple):
    """Identifies a block.

    Attributes:
        owner: the grafts that were active.
        before: number of the block before; 0 for the first block of a text.
        tokens: token ids of the block.
    """

    owner: Hashable
    before: int
    tokens: tuple[int, ...]


class _NumberedBlock(NamedTuple):
    number: int
    block: Block


class PrefixBlocks:
    """Keys and values of texts that were read. Not thread-safe.

    A text is cut into blocks of 32 tokens. A block is identified by its grafts and by all tokens up to its end, which
    are compared by value. The blocks that were used last are kept.

    Args:
        tokens: maximum number of tokens of all blocks together.
    """

    def __init__(self, tokens: int) -> None:
        self.limit = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[_BlockKey, _NumberedBlock] = OrderedDict()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._blocks)

    def longest(self, owner: Hashable, prompt: Sequence[int]) -> list[Block]:
        """Return the known blocks at the start of a prompt.

        Args:
            owner: the grafts that are active.
            prompt: token ids. The last token belongs to no block, because it is always read.
        """
        keys = [key for key in self._walk(owner, prompt[:-1]) if key in self._blocks]
        self._touch(keys)
        return [self._blocks[key].block for key in keys]

    def add(self, owner: Hashable, text: Sequence[int], layers: Sequence[tuple[Any, int]]) -> None:
        """Keep the blocks of a text.

        Args:
            owner: the grafts that were active.
            text: token ids.
            layers: the cache layers, each with the row of the text in it. The last columns are those of `text`.
        """
        keys = []
        for number, key in enumerate(self._walk(owner, text)):
            if key not in self._blocks:
                columns_after_start = len(text) - number * BLOCK_TOKENS
                block = [_cut_block(layer, row, columns_after_start) for layer, row in layers]
                self._blocks[key] = _NumberedBlock(next(self._numbers), block)
            keys.append(key)
        self._touch(keys)
        while len(self._blocks) > self.limit:
            self._blocks.popitem(last=False)

    def keep(self, condition: Callable[[Hashable], bool]) -> None:
        """Forget the blocks of owners for which the condition is false."""
        for key in list(self._blocks):
            if not condition(key.owner):
                del self._blocks[key]

    def _walk(self, owner: Hashable, text: Sequence[int]) -> Iterator[_BlockKey]:
        """Yield the keys of a text's blocks up to the first unknown block, which the caller may add."""
        before = 0
        blocks = min(len(text) // BLOCK_TOKENS, self.limit)
        for index in range(blocks):
            start = index * BLOCK_TOKENS
            key = _BlockKey(owner, before, tuple(text[start : start + BLOCK_TOKENS]))
            yield key
            if key not in self._blocks:
                return
            before = self._blocks[key].number

    def _touch(self, keys: Sequence[_BlockKey]) -> None:
        """Make a text's blocks the newest, the first block last: later blocks are useless without earlier ones."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _cut_block(layer: Any, row: int, columns_after_start: int) -> tuple[Tensor, Tensor]:
    """Copy the keys and values of a block in one layer.

    Args:
        layer: the cache layer.
        row: the row of the text.
        columns_after_start: number of columns from the start of the block to the end of the layer.
    """
    first = layer.get_seq_length() - columns_after_start
    index = (slice(row, row + 1), slice(None), slice(first, first + BLOCK_TOKENS))
    return layer.keys[index].clone(), layer.values[index].clone()


def as_cache(blocks: Sequence[Block], length: int, config: PreTrainedConfig, own: Mapping[str, range]) -> Cache:
    """Make a cache of one row from blocks.

    Args:
        blocks: consecutive blocks of a text from its start on, at least one.
        length: number of tokens of the cache, at most those of the blocks.
        config: the config of the backbone, which determines the types of its cache layers.
        own: the layer indices of each graft, which follow the backbone's.
    """
    layers = len(blocks[0])
    cache = use_growing_layers(DynamicCache(config=config))
    while len(cache.layers) < layers:
        cache.layers.append(DynamicLayer())
    set_slots(cache, own)
    for index in range(layers):
        keys = torch.cat([block[index][0] for block in blocks], dim=-2)
        values = torch.cat([block[index][1] for block in blocks], dim=-2)
        cache.update(keys[..., :length, :], values[..., :length, :], index)
    return cache
