"""A key-value cache of rows that begin and end at different times.

Each row has a slot of a fixed number of columns, and its tokens are at the first of them. A row that has ended makes
room for another one, whose prompt may have any length. All tensors keep their shapes and addresses, so that a decode
step can be compiled once and run as a CUDA graph.

Shape suffixes: B rows, H key-value heads, L columns, W tokens of prompts, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from graftlm.backbone.decode_steps import decodes_in_one_graph
from graftlm.backbone.module_trace import ROPE_OF_LONGEST_TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def has_slots(model: PreTrainedModel) -> bool:
    """Return whether a model can decode with a `SlotCache`.

    Its layers must attend to all earlier tokens and keep no other state, its decode step must be one graph, and its
    rotary positions must not depend on the longest text of a batch.

    Args:
        model: a causal language model without grafts.
    """
    if not decodes_in_one_graph(model) or getattr(model, "has_decode_state", False):
        return False
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if rope.get("rope_type") in ROPE_OF_LONGEST_TEXT:
        return False
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer of the model.

    Args:
        keys_BHLd: keys of all slots.
        values_BHLd: values of all slots.
        cache: the cache of the layer, which has the position of each row's new token.
    """

    is_sliding = False
    is_compileable = True
    keys: Tensor
    values: Tensor

    def __init__(self, keys_BHLd: Tensor, values_BHLd: Tensor, cache: SlotCache) -> None:
        super().__init__()
        self.keys = keys_BHLd
        self.values = values_BHLd
        self.dtype = keys_BHLd.dtype
        self.device = keys_BHLd.device
        self.is_initialized = True
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the tensors exist already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one new token of each row at the row's position.

        Args:
            key_states: (B, H, 1, d), the new keys.
            value_states: (B, H, 1, d), the new values.
            args: not used.
            kwargs: not used.

        Returns:
            The keys and values of the first `SlotCache.shown` columns.
        """
        cache = self._cache
        self.keys[cache.rows, :, cache.positions] = key_states[:, :, 0]
        self.values[cache.rows, :, cache.positions] = value_states[:, :, 0]
        return self.keys[:, :, : cache.shown], self.values[:, :, : cache.shown]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that attention sees, and that of the columns before them."""
        return self._cache.shown, 0

    def get_seq_length(self) -> int:
        """Return the number of columns before the last one, so that causality hides none; `SlotCache.mask` hides."""
        return self._cache.shown - 1

    def get_max_length(self) -> int:
        """Return the number of columns."""
        return self.keys.shape[-2]


class SlotCache(Cache):
    """Slots for B rows of at most L tokens each.

    Args:
        filled: a cache of the same model, from which dtype, device and sizes are taken.
        rows: number B of slots.
        columns: number L of tokens of a slot.
        compiled: whether decode steps are compiled, which rely on the addresses of the tensors.

    Attributes:
        rows: (B,) indices of the rows.
        positions: (B,) the column of each row's next token, which is also its position.
        shown: how many of the first columns attention sees. It must exceed all positions.
    """

    def __init__(self, filled: Cache, rows: int, columns: int, *, compiled: bool = False) -> None:
        self._slot_layers: list[SlotLayer] = []
        for keys, values in _states_of(filled):
            layer = SlotLayer(_slots_like(keys, rows, columns), _slots_like(values, rows, columns), self)
            self._slot_layers.append(layer)
        super().__init__(layers=list(self._slot_layers))
        device = self._slot_layers[0].keys.device
        self.rows = torch.arange(rows, device=device)
        self.positions = torch.zeros(rows, dtype=torch.long, device=device)
        self.shown = columns
        self._columns = torch.arange(columns, device=device)
        if compiled:
            self._mark_addresses()

    def _mark_addresses(self) -> None:
        """Tell torch.compile that the tensors stay where they are, which CUDA graphs need to write to them."""
        tensors = [self.rows, self.positions, self._columns]
        for layer in self._slot_layers:
            tensors += [layer.keys, layer.values]
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)

    @property
    def columns(self) -> int:
        """The number L of tokens of a slot."""
        return len(self._columns)

    def mask(self) -> Tensor:
        """Return the attention mask (B, shown): 1 up to the next token of each row."""
        return (self._columns[: self.shown] <= self.positions[:, None]).long()

    def place(self, filled: Cache, lengths: Sequence[int], slots: Sequence[int]) -> None:
        """Begin rows with prompts.

        Args:
            filled: a cache of the prompts, which were padded on the left to W tokens.
            lengths: number of tokens of each prompt.
            slots: index of the slot of each prompt.
        """
        device = self.rows.device
        to = torch.tensor(slots, device=device)
        sizes = torch.tensor(lengths, device=device)
        self.positions[to] = sizes
        width = max(lengths)
        # Behind the end of a shorter prompt, its last token is repeated; these columns are masked or overwritten.
        source = (self._columns[:width] + (width - sizes)[:, None]).clamp(max=width - 1)
        for layer, (keys, values) in zip(self._slot_layers, _states_of(filled), strict=True):
            layer.keys[to, :, :width] = _moved(keys, source)
            layer.values[to, :, :width] = _moved(values, source)

    def shrink(self, slots: Sequence[int]) -> None:
        """Keep only some slots, in the given order. The tensors are new ones.

        Args:
            slots: indices of the slots to keep.
        """
        kept = torch.tensor(slots, device=self.rows.device)
        for layer in self._slot_layers:
            layer.keys = layer.keys[kept]
            layer.values = layer.values[kept]
        self.positions = self.positions[kept]
        self.rows = self.rows[: len(slots)]


def _slots_like(states_BHWd: Tensor, rows: int, columns: int) -> Tensor:
    """Return zeros of the shape (rows, H, columns, d)."""
    _, heads, _, width = states_BHWd.shape
    return states_BHWd.new_zeros(rows, heads, columns, width)


def _states_of(filled: Cache) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of all layers of a cache that a pass of the model has filled."""
    states = []
    for layer in filled.layers:
        assert isinstance(layer, DynamicLayer), "models with other layers have no slots"
        assert isinstance(layer.keys, Tensor)
        assert isinstance(layer.values, Tensor)
        states.append((layer.keys, layer.values))
    return states


def _moved(states_BHWd: Tensor, source_BW: Tensor) -> Tensor:
    """Return states whose columns are taken from the indices `source_BW` of each row."""
    _, heads, _, width = states_BHWd.shape
    index = source_BW[:, None, :, None].expand(-1, heads, -1, width)
    return states_BHWd.gather(2, index)
