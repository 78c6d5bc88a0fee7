"""Stateful batches: row b of a step continues row b of the step before, and a grafted model that reads them.

The rows of a long text, in order, are cut into `batch_size` streams of equal length. Row b of step s is row s of stream
b. All streams start again when they end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from graftlm.data import NEW, Batch, Mixture, TokenBlocks
from graftlm.data.rows import collate
from graftlm.errors import DataError, RecipeError
from graftlm.grafted.model import GraftedModel, GraftedOutput


@dataclass(frozen=True)
class StatefulBatch(Batch):
    """A batch whose rows continue those of the step before.

    `stream`, long (B,), is the index of each row's stream, and `starts`, bool (B,), whether a row is its first.
    """

    stream: Tensor | None = None
    starts: Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """The forward arguments of any batch, with `stream` and `starts`."""
        return super().inputs() | {"stream": self.stream, "starts": self.starts}


class StatefulBatches(Mixture):
    """Batches of one text in memory whose rows continue from step to step, in `batch_size` streams.

    `blocks` has the rows of the text in order, documents joined.

    Raises DataError if there are fewer rows than streams, and RecipeError if there are several processes.
    """

    def __init__(self, blocks: TokenBlocks, batch_size: int) -> None:
        if PartialState().num_processes > 1:
            raise RecipeError("data.stream needs a single process: start one, or set data.stream to false.")
        super().__init__({NEW: blocks}, {NEW: 1.0}, batch_size)
        self.rows = blocks.marked
        self.stream_length = len(blocks) // batch_size
        if not self.stream_length:
            raise DataError(
                f"The training text has {len(blocks)} rows of {blocks.length} tokens, but {batch_size} streams "
                "are read side by side: add text, or lower batch_size or data.length."
            )

    def batch(self, step: int) -> StatefulBatch:
        """The rows of one step, counted from 0."""
        stream = torch.arange(self.batch_size)
        position = step % self.stream_length
        rows = self.rows[stream.numpy() * self.stream_length + position]
        batch = collate(rows, np.full(self.batch_size, NEW), boundaries=self.boundaries, pad_id=self.pad_id)
        return StatefulBatch(**vars(batch), stream=stream, starts=torch.full((self.batch_size,), position == 0))

    def fingerprint(self) -> str:
        """Fingerprint of the rows; batches of another kind over the same rows have another one."""
        return f"stateful {super().fingerprint()}"


class StatefulModel(GraftedModel):
    """A grafted model that keeps one cache for each micro-batch of stateful batches; gradients stay inside a step."""

    def forward(self, *args: Any, stream: Tensor | None = None, starts: Tensor | None = None, **inputs: Any) -> Any:
        """One pass; rows of a `stream` that does not start continue the pass before."""
        if stream is None or starts is None:
            return super().forward(*args, **inputs)
        key, cache = int(stream[0]), None if bool(starts.all()) else self._caches[int(stream[0])]
        inputs = inputs | {"past_key_values": cache, "use_cache": True}
        inputs.pop("attention_mask", None)  # padding ends a stream, so that no token of it comes later
        output: GraftedOutput = super().forward(*args, **inputs)
        for layer in output.past_key_values.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        self._caches[key] = output.past_key_values
        return output

    @property
    def _caches(self) -> dict[int, Any]:
        """The caches by the first stream of a micro-batch."""
        return self.__dict__.setdefault("_stream_caches", {})

    def recurrent_state(self) -> dict[str, Tensor]:
        """The caches that the next step continues, as tensors by name."""
        tensors = {}
        for key, cache in self._caches.items():
            tensors[f"{key}/tokens"] = torch.tensor(cache.get_seq_length())
            for n, layer in enumerate(cache.layers):
                tensors |= {f"{key}/{n}/{name}": getattr(layer, name).contiguous() for name in ("keys", "values")}
        return tensors

    @torch.no_grad()
    def set_recurrent_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `recurrent_state` gave, in the layers that a pass makes."""
        self._caches.clear()
        for key in {int(name.partition("/")[0]) for name in tensors}:
            ids = torch.zeros(len(tensors[f"{key}/0/keys"]), 1, dtype=torch.long, device=self.device)
            cache = self._caches[key] = GraftedModel.forward(self, ids, use_cache=True).past_key_values
            for n, layer in enumerate(cache.layers):
                layer.keys, layer.values = (tensors[f"{key}/{n}/{name}"].to(self.device) for name in ("keys", "values"))
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = int(tensors[f"{key}/tokens"])
