"""Generation with several graft sets on one backbone: its own modules run once for the rows of all sets.

Each row's logits equal those of the row alone. Shape suffixes: B rows, T tokens of this pass, V in the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone import Backbone, Call, left_padded
from graftlm.backbone.cache import GrowingLayer, is_joinable, join, move_own_layers, use_growing_layers
from graftlm.backbone.row_hooks import RowScope, RowScopedHooks, RowScopeError
from graftlm.backbone.taps import check_conflicts
from graftlm.errors import GraftError
from graftlm.grafted.model import GraftedModel, forward_traces
from graftlm.grafted.row_groups import LayerView, MixedBatch, RowGroup, RowGroupCache
from graftlm.grafts.base import Graft, ReplacesModel, Trace
from graftlm.grafts.heads import pooled


def supports_row_groups(graft: Graft) -> bool:
    """Whether a graft acts through taps alone, so that other grafts can act on other rows of the same batch."""
    return not (isinstance(graft, ReplacesModel) and graft.changes_all_rows())


@dataclass(frozen=True)
class GraftSet:
    """Grafts that act together on the same rows, in the order in which they act; empty for the bare backbone."""

    grafts: tuple[tuple[str, Graft], ...] = ()

    def __str__(self) -> str:
        return "+".join(name for name, _ in self.grafts) or "the bare backbone"


class RowGroupError(Exception):
    """A forward pass failed; the cause is the graft's exception, and the batch is as it was before the pass.

    Attributes:
        group: index of the row group whose grafts failed; None if the failure belongs to no group.
    """

    def __init__(self, group: int | None) -> None:
        super().__init__("a forward pass failed")
        self.group = group


class MultiGraftModel:
    """A backbone, a causal language model, with several graft sets attached, each acting on its own rows.

    It generates. As with `GraftedModel`, nothing else may attach to the backbone until `detach`.

    Attributes:
        wired: the graft sets whose taps are connected.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._bare = GraftedModel(backbone, {})  # freezes the backbone until `detach`
        self._model, self._sites, self._device = backbone.model, backbone.sites, backbone.device
        self._tap_hooks: RowScopedHooks | None = None
        self.wired: tuple[GraftSet, ...] = ()

    def wire(self, graft_sets: Sequence[GraftSet]) -> None:
        """Connect the taps of these graft sets, and of no others.

        Raises GraftError if the grafts of a set conflict, or a graft acts on all rows of a batch.
        """
        if set(graft_sets) == set(self.wired):
            return
        taps: dict[Any, list[Any]] = {graft_set: self._taps(graft_set) for graft_set in graft_sets}
        self._unwire()
        self._tap_hooks = RowScopedHooks(self._model, self._sites, taps, _prepare)
        self.wired = tuple(graft_sets)

    def _taps(self, graft_set: GraftSet) -> list[Any]:
        for name, graft in graft_set.grafts:
            if not supports_row_groups(graft):
                raise GraftError(
                    f"The graft {name} brings modules of its own into the model, which act on every row: run it alone."
                )
            graft.eval()
        taps = {name: graft.taps() for name, graft in graft_set.grafts}
        check_conflicts(self._sites, taps)
        return [tap for own in taps.values() for tap in own]

    def _unwire(self) -> None:
        if self._tap_hooks is not None:
            self._tap_hooks.remove()
        self._tap_hooks, self.wired = None, ()

    def detach(self) -> Backbone:
        """Remove all taps and return the backbone as it was."""
        self._unwire()
        return self._bare.detach()

    @torch.inference_mode()
    def prefill(
        self,
        graft_sets: GraftSet | Sequence[GraftSet],
        prompts: Sequence[Sequence[int]],
        tags: Sequence[Any],
        pasts: Sequence[Cache] = (),
    ) -> tuple[MixedBatch, Tensor]:
        """Read prompts; returns a new batch, and (B, V) the logits of each row's next token.

        Each prompt may have a graft set of its own; consecutive rows with the same one form a group. `pasts` are for
        each row a cache with the tokens before the prompt; the prompts then have one length and one graft set.

        Raises RowGroupError if the pass failed.
        """
        owners = [graft_sets] * len(prompts) if isinstance(graft_sets, GraftSet) else graft_sets
        batch, inputs = self._new_batch(owners, prompts, tags, pasts)
        logits = self._forward(batch, *inputs).logits[:, -1]
        batch.separate = not is_joinable(batch.cache)
        for group in batch.groups:
            group.separate = not is_joinable(group.cache)
        return batch, logits

    @torch.inference_mode()
    def embed(self, graft_set: GraftSet, texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, D) the mean of the last hidden states of each text's tokens. Raises RowGroupError if the pass failed."""
        batch, inputs = self._new_batch([graft_set] * len(texts), texts, [None] * len(texts), ())
        h_BTD = self._forward(batch, *inputs, output_hidden_states=True).hidden_states[-1].float()
        return pooled(h_BTD, inputs[1], "mean")

    def _new_batch(
        self, owners: Sequence[GraftSet], prompts: Sequence[Sequence[int]], tags: Sequence[Any], pasts: Sequence[Cache]
    ) -> tuple[MixedBatch, tuple[Tensor, Tensor]]:
        """A batch behind `pasts`, and ids and mask (B, T) of the prompts."""
        self.wire([*self.wired, *(owner for owner in dict.fromkeys(owners) if owner not in self.wired)])
        inputs = left_padded(prompts, 0, self._device)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        lengths = [past.get_seq_length() for past in pasts] or [0] * len(prompts)
        paddings = [max(lengths) - length for length in lengths]
        known = torch.tensor([[0] * by + [1] * length for by, length in zip(paddings, lengths, strict=True)]).to(ids)
        empty = use_growing_layers(DynamicCache(config=self._model.config))
        shared, layers = join(pasts, paddings) if pasts else empty, self._sites.n_layers
        groups = [RowGroup.create(owner, len(list(rows)), shared, layers) for owner, rows in groupby(owners)]
        assert len(groups) == 1 or not pasts, "own layers of pasts belong to one graft set"
        move_own_layers(shared, groups[0].cache, layers)
        return MixedBatch(shared, known, groups, list(tags)), (ids, mask)

    def decode(self, batch: MixedBatch, tokens_B: Sequence[int]) -> Tensor:
        """(B, V) the logits after one more token of each row; errors as of `extend`."""
        return self.extend(batch, [[token] for token in tokens_B])

    @torch.inference_mode()
    def extend(self, batch: MixedBatch, tokens_BT: Sequence[Sequence[int]]) -> Tensor:
        """(B, V) the logits after T more tokens of each row; RowGroupError if it fails, with the batch as it was."""
        ids = torch.tensor(tokens_BT, device=self._device)
        with _restored_on_failure(batch):
            return self._forward(batch, ids, torch.ones_like(ids)).logits[:, -1]

    def _forward(self, batch: MixedBatch, ids_BT: Tensor, mask_BT: Tensor, **options: bool) -> Any:
        assert self._tap_hooks is not None, "prefill connects the taps"
        batch.mask = torch.cat([batch.mask, mask_BT], dim=1)
        inputs: dict[str, Any] = {**options}
        if not bool(batch.mask.all()):
            positions = self._sites.positions(batch.mask)
            new_positions = None if positions is None else positions[:, -ids_BT.shape[1] :]
            inputs |= {"attention_mask": batch.mask, "position_ids": new_positions}
        scopes = tuple(RowScope(each.owner, each.span.rows, each.cache, each.span.offset) for each in batch.groups)
        try:
            with self._tap_hooks.announce(row_scopes=scopes) as calls:
                output: Any = self._model(
                    input_ids=ids_BT, past_key_values=batch.cache, use_cache=True, logits_to_keep=1, **inputs
                )
        except RowScopeError as error:
            raise RowGroupError(scopes.index(error.scope)) from _root_cause(error)
        except Exception as error:
            raise RowGroupError(None) from error
        batch.calls = [call for _, call in self._tap_hooks.calls(calls[0])]
        return output


def keeps_columns(batch: MixedBatch, group: RowGroup) -> bool:
    """Whether all that a new batch remembers of a group are keys and values, with a column for each token."""
    layers: list[Any] = [layer for layer, _ in batch.layers_of(group.span.rows.start)]
    types = {type(layer) for layer in layers} <= {GrowingLayer, DynamicLayer}
    return types and {layer.get_seq_length() for layer in layers} == {batch.mask.shape[1]}


def latest_traces(batch: MixedBatch, rows: Sequence[int]) -> dict[int, dict[str, float]]:
    """The traces of some rows' newest tokens: row -> label -> value."""
    traces_by_row: dict[int, dict[str, float]] = {}
    for group, call in zip(batch.groups, batch.calls, strict=True):
        span = group.span.rows
        own = [row for row in rows if span.start <= row < span.stop]
        if own:
            assert isinstance(group.owner, GraftSet)
            traces = forward_traces(dict(group.owner.grafts), call)
            traces_by_row |= {row: trace_values(traces, row - span.start) for row in own}
    return traces_by_row


def trace_values(traces: Mapping[str, Trace], row: int, token: int = -1) -> dict[str, float]:
    """The trace values of one token by label. If several grafts trace, the graft's name precedes the label."""
    return {
        f"{name}: {label}" if len(traces) > 1 else label: value
        for name, trace in traces.items()
        for label, value in zip(trace.labels, trace.values[row, token].tolist(), strict=True)
    }


def _prepare(owner: Hashable, call: Call) -> None:
    assert isinstance(owner, GraftSet)
    for name, graft in owner.grafts:
        graft.prepare(call)
        if isinstance(call.cache, RowGroupCache) and not _has_views_first(call.cache):
            raise GraftError(
                f"The graft {name} exchanges what this backbone remembers of a text, which it can't do for some rows "
                "alone: ask the backbone, or another graft."
            )


def _has_views_first(cache: RowGroupCache) -> bool:
    """Whether a graft has left the layer views in their positions."""
    is_view = [isinstance(layer, LayerView) for layer in cache.layers]
    return is_view[:1] == [True] and is_view == sorted(is_view, reverse=True)


def _root_cause(error: BaseException) -> BaseException:
    """The exception of the innermost pass."""
    while isinstance(error, RowScopeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _restored_on_failure(batch: MixedBatch) -> Iterator[None]:
    """Restore mask and caches of a batch if a pass fails."""
    mask = batch.mask
    restores = [_snapshot(cache) for cache in (batch.cache, *(group.cache for group in batch.groups))]
    try:
        yield
    except RowGroupError:
        batch.mask = mask
        for restore in restores:
            restore()
        raise


def _snapshot(cache: Cache) -> Callable[[], None]:
    """A function that restores a cache to its current state; tensors are assumed never to be written in place."""
    own = {name: copy.copy(value) for name, value in vars(cache).items()}
    layers = [
        (layer, {name: value if isinstance(value, Tensor) else copy.copy(value) for name, value in vars(layer).items()})
        for layer in cache.layers
        if not isinstance(layer, LayerView)
    ]

    def restore() -> None:
        vars(cache).clear()
        vars(cache).update(own)
        for layer, values in layers:
            vars(layer).clear()
            vars(layer).update(values)

    return restore
