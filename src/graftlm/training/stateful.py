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
from torch import Tensor
from transformers.cache_utils import Cache

from graftlm.data import NEW, Batch, Mixture, TokenBlocks
from graftlm.data.rows import collate
from graftlm.errors import DataError, RecipeError
from graftlm.grafted.model import GraftedModel, GraftedOutput
from graftlm.processes import process_state


@dataclass(frozen=True)
class StatefulBatch(Batch):
    """A batch whose rows continue those of the step before.

    Attributes:
        stream: (B,) int64, the index of each row's stream.
        starts: (B,) bool, True where a row is the first of its stream.
    """

    stream: Tensor | None = None
    starts: Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward: those of any batch, `stream` and `starts`."""
        return {**super().inputs(), "stream": self.stream, "starts": self.starts}


class StatefulBatches(Mixture):
    """Batches of one text in memory whose rows continue from step to step, in `batch_size` streams.

    If the number of rows is not a multiple of the number of streams, the last rows are left out.

    Args:
        blocks: the rows of the text in order, with joined documents.
        batch_size: number of streams, which is the number of rows of a step.

    Raises:
        DataError: there are fewer rows than streams.
        RecipeError: the run has several processes.
    """

    def __init__(self, blocks: TokenBlocks, batch_size: int) -> None:
        if process_state().num_processes > 1:
            raise RecipeError(
                f"The run has {process_state().num_processes} processes, but data.stream needs a single one: start one "
                "process, or set data.stream to false."
            )
        super().__init__({NEW: blocks}, {NEW: 1.0}, batch_size)
        self.rows = blocks.marked
        self.stream_length = len(blocks) // batch_size
        if not self.stream_length:
            raise DataError(
                f"The training text has {len(blocks)} rows of {blocks.length} tokens, but data.stream reads "
                f"{batch_size} rows in parallel: add text, or lower training.batch_size or data.length."
            )

    def batch(self, step: int) -> StatefulBatch:
        """Return the rows of a step: one row of each stream.

        Args:
            step: the step, counted from 0; after the end of the streams they start again.
        """
        stream = torch.arange(self.batch_size)
        position = step % self.stream_length
        first_rows = stream.numpy() * self.stream_length
        batch = collate(
            self.rows[first_rows + position],
            np.full(self.batch_size, NEW),
            boundaries=self.boundaries,
            pad_id=self.pad_id,
        )
        starts = torch.full((self.batch_size,), position == 0)
        return StatefulBatch(**vars(batch), stream=stream, starts=starts)

    def fingerprint(self) -> str:
        """Return a hash of the rows, marked as stateful because `Mixture` orders the same rows differently."""
        return f"stateful {super().fingerprint()}"


class StatefulModel(GraftedModel):
    """A grafted model that keeps a cache for each micro-batch of stateful batches.

    The next step continues the caches without gradients, which stay inside a step. A micro-batch is recognized by its
    first stream, so micro-batches must consist of the same streams in every step.
    """

    def forward(
        self,
        *args: Any,
        stream: Tensor | None = None,
        starts: Tensor | None = None,
        **inputs: Any,
    ) -> GraftedOutput:
        """Run one pass, and keep its cache for the next step.

        Args:
            args: positional arguments of `GraftedModel.forward`.
            stream: (B,) index of each row's stream; None for independent rows, which use no kept cache.
            starts: (B,) bool, True where a row is the first of its stream. If all rows are, the pass starts with an
                empty cache; otherwise it continues the last pass with the same first stream.
            inputs: keyword arguments of `GraftedModel.forward`.

        Returns:
            The output of `GraftedModel.forward`.
        """
        if stream is None or starts is None:
            return super().forward(*args, **inputs)
        key = int(stream[0])
        inputs["past_key_values"] = None if bool(starts.all()) else self._caches[key]
        inputs["use_cache"] = True
        # Padding is at the end of a stream, so no token after it needs the mask.
        inputs.pop("attention_mask", None)
        output = super().forward(*args, **inputs)
        for layer in output.past_key_values.layers:
            layer.keys = layer.keys.detach()
            layer.values = layer.values.detach()
        self._caches[key] = output.past_key_values
        return output

    @property
    def _caches(self) -> dict[int, Cache]:
        """The caches by the first stream of a micro-batch."""
        return self.__dict__.setdefault("_stream_caches", {})

    def recurrent_state(self) -> dict[str, Tensor]:
        """Return the caches that the next step continues, as tensors by name, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for key, cache in self._caches.items():
            tensors[f"{key}/tokens"] = torch.tensor(cache.get_seq_length())
            layers: list[Any] = list(cache.layers)
            for number, layer in enumerate(layers):
                tensors[f"{key}/{number}/keys"] = layer.keys.contiguous()
                tensors[f"{key}/{number}/values"] = layer.values.contiguous()
        return tensors

    @torch.no_grad()
    def set_recurrent_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the caches by those that `recurrent_state` returned.

        A forward pass over dummy tokens creates their layers.

        Args:
            tensors: the tensors by name; without tensors, all caches are removed.
        """
        self._caches.clear()
        keys = {int(name.partition("/")[0]) for name in tensors}
        for key in keys:
            cache = self._new_cache(rows=len(tensors[f"{key}/0/keys"]))
            self._caches[key] = cache
            for number, layer in enumerate(cache.layers):
                layer.keys = tensors[f"{key}/{number}/keys"].to(self.device)
                layer.values = tensors[f"{key}/{number}/values"].to(self.device)
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = int(tensors[f"{key}/tokens"])

    def _new_cache(self, rows: int) -> Any:
        """Return the cache of a pass over one token per row."""
        ids = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        return GraftedModel.forward(self, ids, use_cache=True).past_key_values
