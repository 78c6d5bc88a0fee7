"""Compiled decode steps of mixed batches: the step of a batch in which all rows have the same grafts is one graph.

A batch is copied to static memory when its rows change, and its layers become views of that memory, so that rows join
and leave as in any other batch. Compiled code holds for every bucket of rows and columns, except that a single row has
its own. On CUDA, the step of each bucket is recorded as a CUDA graph at its first use.

Grafts with layers of their own in the cache, such as the keys and values of a second model, keep them where they are: a
step makes them longer, or replaces their state. Their code is compiled for any number of rows and columns, their
buckets have no rows of padding, and their steps are not recorded. The same holds for all layers of a backbone that
keeps a state instead of columns.

Shape suffixes: b rows of the batch, B rows of its bucket, V tokens of the vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from graftlm.backbone.cache import slots_of
from graftlm.backbone.compiled_code import guard_hooks, many_versions
from graftlm.backbone.growing_layer import GrowingLayer
from graftlm.backbone.step_buffers import Bucket, StepBuffers, StepInputs, bucket_of, layers_with_states
from graftlm.errors import first_line
from graftlm.grafted.cache_snapshots import snapshot
from graftlm.grafted.row_groups import MixedBatch

BACKEND = "inductor"
"""The backend of torch.compile."""

RECORDING_DEVICES = ("cuda",)
"""Types of devices on which the step of each bucket is recorded, so that no operation is launched by itself."""

_LOG = logging.getLogger(__name__)


class StaticPass(Protocol):
    """A forward pass with inputs in static memory, in which the same grafts act on all rows."""

    def __call__(self, owner: Hashable, inputs: StepInputs) -> Tensor:
        """Return the logits (B, V) of each row's next token.

        Args:
            owner: the grafts.
            inputs: its inputs. In static memory, a pass writes the column of the new tokens, always the same values.
        """
        ...


class CompiledSteps:
    """Compiles and runs the decode steps of one model.

    Args:
        forward: the pass of a step, which is compiled.
        most_columns: the largest number of columns with which a pass with these grafts is one graph; 0 if it never is.
        most: the largest bucket; larger batches are left to the caller.
        in_place: whether the backbone's layers have a state instead of columns, and stay where they are.

    Attributes:
        graphs: number of graphs that were compiled since the start.
        most: the largest bucket.
    """

    def __init__(
        self, forward: StaticPass, most_columns: Callable[[Hashable], int], most: Bucket, *, in_place: bool = False
    ) -> None:
        self.graphs = 0
        self._in_place = in_place
        self._forward = forward
        self._most_columns = most_columns
        self.most = most
        self._buffers = StepBuffers()
        self._loaded: _Loaded | None = None
        self._user: Callable[[], MixedBatch | None] = _nobody  # whose layers were last made views of the memory
        self._refused: set[tuple[Hashable, Bucket | None]] = set()
        self._said: set[str] = set()
        self._owners: dict[Hashable, Hashable] = {}  # one object for equal owners, because code is compiled for objects
        self._compiled: Callable[[StaticPass, Hashable, StepInputs], Tensor] | None = None
        self._kept: list[object] = []  # compiled code, whose kernels recorded graphs call
        self._recorded: dict[tuple[Hashable, Bucket], Callable[[], Tensor]] = {}
        self._recorded_moves = 0  # moves of the memory before the steps were recorded
        self._pool = None

    def forget(self) -> None:
        """Forget all code, because hooks or grafts have changed."""
        self._compiled = None
        self._forget_recorded()
        self._kept.clear()
        self._refused.clear()
        self._owners.clear()

    def _forget_recorded(self) -> None:
        self._recorded.clear()
        self._recorded_moves = self._buffers.moves
        self._pool = None

    def decode(self, batch: MixedBatch, tokens_b: Sequence[int]) -> Tensor | None:
        """Append a token to each row of a batch.

        Args:
            batch: the batch, which has no traces of this pass. It does not change if the step is not compiled.
            tokens_b: the new token of each row.

        Returns:
            The logits (b, V) of each row's next token; None if the step is not compiled, and the caller has to run it.
        """
        problem = self._problem(batch)
        bucket = None if problem is not None else self._bucket(batch)
        if bucket is None:
            self._say(f"A decode step is not compiled: {problem or 'it is larger than the largest bucket'}.")
            return None
        owner = batch.groups[0].owner
        owner = self._owners.setdefault(owner, owner)
        if (owner, None) in self._refused or (owner, bucket) in self._refused:
            return None
        try:
            return self._run(batch, owner, bucket, tokens_b)
        except Exception as error:  # whatever a compiler raises; a request must not be lost by it
            self._refuse(owner, bucket, error)
            return None

    def _problem(self, batch: MixedBatch) -> str | None:
        """Return why the step of a batch is not compiled, as the end of a sentence; None if it is."""
        if self._loaded is not None and self._loaded.holds(batch):
            return None
        if len(batch.groups) != 1:
            return "rows of the batch have different grafts"
        (group,) = batch.groups
        if not self._most_columns(group.owner):
            return f"{group.owner} is not one graph"
        if group.span.offset:
            return f"{group.owner} does not see the first columns of the batch"
        if self._in_place:
            return None
        if not _has_plain_columns(batch):
            return "a layer of the backbone does not keep one column for each token"
        user = self._user()
        if user is not None and user is not batch and len(user) > 0 and self._buffers.holds(user.cache):
            return "another batch uses the memory"
        return None

    def _bucket(self, batch: MixedBatch) -> Bucket | None:
        """Return the bucket of a batch whose rows have the same grafts; None if there is none that is large enough."""
        (group,) = batch.groups
        most = self.most._replace(columns=min(self.most.columns, self._most_columns(group.owner)))
        bucket = bucket_of(len(batch), batch.mask.shape[1] + 1, most)
        if bucket is not None and (self._in_place or _own_layers(batch)):
            return bucket._replace(rows=len(batch))
        return bucket

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _LOG.debug(message)

    def _refuse(self, owner: Hashable, bucket: Bucket, error: Exception) -> None:
        """Note that a step can't be compiled: not for this bucket if memory lacks, else not for this owner."""
        lacks_memory = isinstance(error, torch.OutOfMemoryError)
        self._refused.add((owner, bucket if lacks_memory else None))
        _LOG.warning(
            "The decode step of %s can't be compiled for %d rows and %d columns, and is slower from now on (%s: %s)",
            owner,
            bucket.rows,
            bucket.columns,
            type(error).__name__,
            first_line(error),
        )

    def _run(self, batch: MixedBatch, owner: Hashable, bucket: Bucket, tokens_b: Sequence[int]) -> Tensor:
        loaded = self._loaded
        if loaded is None or loaded.bucket != bucket or not loaded.holds(batch):
            loaded = self._load(batch, bucket)
        inputs = loaded.inputs
        new = torch.tensor(list(tokens_b), dtype=torch.long)
        inputs.ids[: len(batch), 0].copy_(new, non_blocking=True)
        if inputs.columns is not None:
            inputs.columns.newest.fill_(batch.mask.shape[1])
        inputs.mark_own_layers()
        restore = snapshot(inputs.cache) if inputs.own_layers else None
        try:
            logits_BV = self._step(owner, bucket, inputs)
        except Exception:
            if restore is not None:
                restore()
            raise
        loaded.advance(batch)
        return logits_BV[: len(batch)].clone()  # the next step writes to the same memory

    def _load(self, batch: MixedBatch, bucket: Bucket) -> _Loaded:
        """Copy a batch to the static memory, of which its layers become views, unless they stay where they are."""
        self._loaded = None
        if self._in_place:
            inputs = StepInputs.in_place(len(batch), batch.cache, batch.mask.device)
        else:
            self._user = weakref.ref(batch)
            inputs = self._buffers.load(bucket, batch.cache, batch.mask)
        inputs.add_layers(_own_layers(batch), slots_of(batch.groups[0].cache))
        if self._buffers.moves != self._recorded_moves:  # since this load, or one that failed
            self._forget_recorded()
        self._loaded = _Loaded(batch, bucket, inputs)
        return self._loaded

    def _step(self, owner: Hashable, bucket: Bucket, inputs: StepInputs) -> Tensor:
        """Return the logits (B, V), which the next step may overwrite."""
        key = (owner, bucket)
        if key in self._recorded:
            return self._recorded[key]()

        def step() -> Tensor:
            assert self._compiled is not None
            with many_versions():
                return self._compiled(self._forward, owner, inputs)

        if self._compiled is None:
            guard_hooks()
            self._compiled = torch.compile(_run_forward, fullgraph=True, backend=self._compile)
        if inputs.own_layers or inputs.ids.device.type not in RECORDING_DEVICES:
            return step()
        self._recorded[key] = self._record(step, inputs.ids.device)
        return self._recorded[key]()

    def _compile(self, module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend(BACKEND)(module, examples)
        self.graphs += 1
        self._kept.append(compiled)
        return compiled

    def _record(self, step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        """Record a step as a CUDA graph, and return a function that replays it.

        torch.compile's own CUDA graphs belong to a thread, and fail outside the main thread before torch 2.15. A step
        may run repeatedly, because it writes the same values to the same places.
        """
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles, and allocates what lasts
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                logits_BV = step()

        def replay() -> Tensor:
            graph.replay()
            return logits_BV

        return replay


class _Loaded:
    """A batch in static memory.

    Args:
        batch: the batch, whose layers are views of the memory.
        bucket: the bucket of the memory.
        inputs: the memory, with the batch's keys and values.
    """

    def __init__(self, batch: MixedBatch, bucket: Bucket, inputs: StepInputs) -> None:
        self.bucket = bucket
        self.inputs = inputs
        self._batch = weakref.ref(batch)
        self._note(batch)

    def _note(self, batch: MixedBatch) -> None:
        self._cache = batch.cache
        self._mask = batch.mask
        self._states = _states(batch.cache)
        self._own_layers = _own_layers(batch)

    def holds(self, batch: MixedBatch) -> bool:
        """Return whether a batch has not changed since its layers became views of this memory."""
        if self._batch() is not batch or batch.cache is not self._cache or batch.mask is not self._mask:
            return False
        if len(batch.groups) != 1:  # a group was split, because its grafts failed
            return False
        return _are_same(_states(batch.cache), self._states) and _are_same(_own_layers(batch), self._own_layers)

    def advance(self, batch: MixedBatch) -> None:
        """Let the batch see the column that a step has written."""
        rows, columns = batch.mask.shape
        if self.inputs.columns is not None:
            for layer, source in zip(layers_with_states(batch.cache), self.inputs.layers, strict=True):
                layer.keys = _first(source.keys, rows, columns + 1)
                layer.values = _first(source.values, rows, columns + 1)
        (group,) = batch.groups
        first = len(batch.cache.layers)
        group.cache.layers[first:] = self.inputs.cache.layers[first:]  # a graft may have replaced them
        batch.mask = functional.pad(batch.mask, (0, 1), value=1)
        batch.lengths = [length + 1 for length in batch.lengths]
        batch.calls = []
        self._note(batch)


def _nobody() -> None:
    return None


def _own_layers(batch: MixedBatch) -> list[CacheLayerMixin]:
    """Return the layers that the grafts of a batch's group have in its cache."""
    (group,) = batch.groups
    return cast("list[CacheLayerMixin]", group.cache.layers[len(batch.cache.layers) :])


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences have the same objects, in the same order."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _states(cache: Cache) -> list[object]:
    return [states for layer in layers_with_states(cache) for states in (layer.keys, layer.values)]


def _first(states: Tensor, rows: int, columns: int) -> Tensor:
    return states[:rows, :, :columns]


def _has_plain_columns(batch: MixedBatch) -> bool:
    """Return whether all layers of the backbone keep the keys and values of every token."""
    columns = batch.mask.shape[1]
    for layer in batch.cache.layers:
        if not isinstance(layer, DynamicLayer) or type(layer) not in (GrowingLayer, DynamicLayer):
            return False
        if layer.get_seq_length() != columns:
            return False
    return True


def _run_forward(forward: StaticPass, owner: Hashable, inputs: StepInputs) -> Tensor:
    return forward(owner, inputs)
