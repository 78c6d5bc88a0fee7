"""Generation with several graft sets on one backbone, whose modules run once for the rows of all sets.

The logits of each row equal those of the row in a batch of its own.

Shape suffixes: B rows, T tokens of this pass, V in the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from graftlm.backbone import Backbone, Call, Tap, decodes_in_one_graph, left_padded
from graftlm.backbone.cache import move_own_layers
from graftlm.backbone.cache_joining import is_joinable, join
from graftlm.backbone.growing_layer import GrowingLayer, use_growing_layers
from graftlm.backbone.row_hooks import RowScope, RowScopedHooks, RowScopeError
from graftlm.backbone.slot_cache import has_slots
from graftlm.backbone.step_buffers import Bucket, StepInputs
from graftlm.backbone.taps import check_conflicts
from graftlm.errors import GraftError
from graftlm.grafted.cache_snapshots import snapshot
from graftlm.grafted.compiled_steps import CompiledSteps
from graftlm.grafted.model import GraftedModel
from graftlm.grafted.row_groups import LayerView, MixedBatch, RowGroup, RowGroupCache
from graftlm.grafted.traces import forward_traces, trace_values
from graftlm.grafts.base import Graft, ReplacesModel
from graftlm.grafts.heads import pooled
from graftlm.grafts.sums import check_weight, weighted_taps


def supports_row_groups(graft: Graft) -> bool:
    """Return whether a graft acts through taps only, which allows other grafts on other rows of the same batch.

    Args:
        graft: the graft, attached or not.
    """
    return not (isinstance(graft, ReplacesModel) and graft.changes_all_rows())


@dataclass(frozen=True)
class GraftSet:
    """Grafts that act together on the same rows.

    Attributes:
        grafts: the grafts with their names, in the order in which they act; empty for the bare backbone.
        weights: names and weights of the grafts that have another weight than 1.
    """

    grafts: tuple[tuple[str, Graft], ...] = ()
    weights: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, grafts: Mapping[str, Graft], weights: Mapping[str, float]) -> GraftSet:
        """Return a weighted sum.

        Args:
            grafts: the grafts by name.
            weights: weights by name; 1 for others.

        Raises:
            GraftError: a graft has a weight, which has no meaning for its kind.
        """
        for name, weight in weights.items():
            check_weight(name, grafts[name], weight)
        return cls(tuple(grafts.items()), tuple((name, weight) for name, weight in weights.items() if weight != 1))

    @property
    def unweighted(self) -> GraftSet:
        """The same grafts without weights, whose taps are those of all weights."""
        return GraftSet(self.grafts) if self.weights else self

    def __str__(self) -> str:
        weights = dict(self.weights)
        names = [f"{name}:{weights[name]:g}" if name in weights else name for name, _ in self.grafts]
        return "+".join(names) or "the bare backbone"


class RowGroupError(Exception):
    """A failed forward pass of a mixed batch, which is unchanged. `__cause__` is the original exception.

    Attributes:
        group: index of the row group whose grafts failed; None if the failure belongs to no group.
    """

    def __init__(self, group: int | None) -> None:
        place = "" if group is None else f" in the grafts of row group {group}"
        super().__init__(f"a forward pass failed{place}")
        self.group = group


class MultiGraftModel:
    """A causal language model with several graft sets attached, each of which acts on its own rows.

    As with `GraftedModel`, nothing else may be attached to the backbone until `detach`.

    Args:
        backbone: the backbone, which stays frozen until `detach`.

    Attributes:
        wired: the graft sets whose taps are connected.
        steps: the compiled decode steps; None if every step is eager.

    Raises:
        BackboneError: `backbone` is not a `Backbone`.
        TapConflictError: the backbone has grafts already.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._bare = GraftedModel(backbone, {})  # freezes the backbone
        self._model = backbone.model
        self._sites = backbone.sites
        self._device = backbone.device
        self._tap_hooks: RowScopedHooks | None = None
        self.wired: tuple[GraftSet, ...] = ()
        self.steps: CompiledSteps | None = None

    @property
    def can_compile_steps(self) -> bool:
        """Whether a step of the bare backbone is one graph, with a column for each token or a state of its own."""
        if self._has_state:
            return decodes_in_one_graph(self._model)
        return has_slots(self._model) and not self._sites.family.counts_positions

    @property
    def _has_state(self) -> bool:
        return bool(getattr(self._model, "has_decode_state", False))

    def compile_steps(self, rows: int, columns: int) -> None:
        """Compile the decode steps of batches from now on, wherever all rows have the same grafts and they allow it.

        Args:
            rows: largest number of rows of such a batch.
            columns: largest number of columns of such a batch.

        Raises:
            GraftError: `can_compile_steps` is false.
        """
        if not self.can_compile_steps:
            raise GraftError(
                f"The decode step of this {self._sites.model_type} model is no single graph with a column for each "
                "token, so it can't be compiled: leave compilation of decode steps out."
            )
        self.steps = CompiledSteps(self._static_pass, _most_columns, Bucket(rows, columns), in_place=self._has_state)

    def warm_up(self, graft_set: GraftSet) -> None:
        """Compile the decode step of a graft set now, for one row and for several, if it can be compiled.

        A row comes and leaves, because code for layers of grafts depends on whether rows have changed.

        Args:
            graft_set: the graft set, which is connected if it is not yet.

        Raises:
            RowGroupError: a pass failed.
            TapConflictError: two grafts of the set replace the same activation.
            GraftError: a graft acts on all rows of a batch.
        """
        if self.steps is None or not _most_columns(graft_set):
            return
        batch, _ = self.prefill(graft_set, prompts=[[0]], tags=[None])
        self._decode_twice(batch)
        if self.steps.most.rows > 1:
            second, _ = self.prefill(graft_set, prompts=[[0, 0]], tags=[None])
            batch.join(second)
            self._decode_twice(batch)
            batch.keep([0])
            self._decode_twice(batch)

    def _decode_twice(self, batch: MixedBatch) -> None:
        for _ in range(2):
            self.decode(batch, [0] * len(batch))

    def wire(self, graft_sets: Sequence[GraftSet]) -> None:
        """Connect the taps of these graft sets, and disconnect all others. The grafts are put into evaluation mode.

        Taps are those of all weights, so that other weights connect nothing.

        Args:
            graft_sets: the graft sets; the same sets in another order change nothing.

        Raises:
            TapConflictError: two grafts of a set replace the same activation.
            GraftError: a graft acts on all rows of a batch.
        """
        graft_sets = list(dict.fromkeys(graft_set.unweighted for graft_set in graft_sets))
        if set(graft_sets) == set(self.wired):
            return
        taps: dict[Hashable, Sequence[Tap]] = {graft_set: self._taps(graft_set) for graft_set in graft_sets}
        self._unwire()
        self._tap_hooks = RowScopedHooks(self._model, self._sites, taps, _prepare)
        self.wired = tuple(graft_sets)

    def _taps(self, graft_set: GraftSet) -> list[Tap]:
        """Check the grafts of a set, put them into evaluation mode, and return their taps."""
        for name, graft in graft_set.grafts:
            if not supports_row_groups(graft):
                raise GraftError(
                    f"The graft {name} changes the model and so acts on every row of a batch, but here each graft must "
                    "act on its own rows only: attach it with GraftedModel, or serve it alone."
                )
            graft.eval()
        taps = {name: weighted_taps(graft, partial(_weight_in_pass, name)) for name, graft in graft_set.grafts}
        check_conflicts(self._sites, taps)
        return [tap for taps_of_graft in taps.values() for tap in taps_of_graft]

    def _unwire(self) -> None:
        if self._tap_hooks is not None:
            self._tap_hooks.remove()
        self._tap_hooks = None
        self.wired = ()
        if self.steps is not None:
            self.steps.forget()

    def detach(self) -> Backbone:
        """Remove all taps and return the unchanged backbone."""
        self._unwire()
        self.steps = None
        return self._bare.detach()

    @torch.inference_mode()
    def prefill(
        self,
        graft_sets: GraftSet | Sequence[GraftSet],
        prompts: Sequence[Sequence[int]],
        tags: Sequence[object],
        pasts: Sequence[Cache] = (),
    ) -> tuple[MixedBatch, Tensor]:
        """Run prompts through the model, and start a batch that `decode` and `extend` continue.

        Graft sets that are not yet connected are connected first, see `wire`.

        Args:
            graft_sets: the graft set of all prompts, or one per prompt; consecutive rows with the same set form a
                group.
            prompts: token ids of each prompt. There is at least one prompt, and none is empty.
            tags: any object for each prompt, which `MixedBatch.tags` keeps with its row.
            pasts: a cache for each prompt, with the tokens before it; empty if no tokens precede the prompts. With
                caches, the prompts must have the same length and the same graft set.

        Returns:
            A new batch, and the logits (B, V) of each row's next token.

        Raises:
            RowGroupError: the pass failed.
            TapConflictError: two grafts of a set replace the same activation.
            GraftError: a graft acts on all rows of a batch, or caches of `pasts` can't be joined.
        """
        if isinstance(graft_sets, GraftSet):
            graft_sets = [graft_sets] * len(prompts)
        ids, mask = self._padded(prompts)
        batch = self._new_batch(graft_sets, tags, pasts)
        new_B = [len(prompt) for prompt in prompts]
        logits = self._forward(batch, ids, mask, new_B).logits
        assert logits is not None
        batch.separate = not is_joinable(batch.cache)
        for group in batch.groups:
            group.separate = not is_joinable(group.cache)
        return batch, logits[:, -1]

    @torch.inference_mode()
    def embed(self, graft_set: GraftSet, texts: Sequence[Sequence[int]]) -> Tensor:
        """Compute the mean of the last hidden states of each text's tokens.

        Args:
            graft_set: the graft set of all texts.
            texts: token ids of each text. There is at least one text, and none is empty.

        Returns:
            (B, D) in float32.

        Raises:
            RowGroupError: the pass failed.
            TapConflictError: two grafts of the set replace the same activation.
            GraftError: a graft acts on all rows of a batch.
        """
        ids, mask = self._padded(texts)
        owners = [graft_set] * len(texts)
        batch = self._new_batch(owners, tags=[None] * len(texts), pasts=())
        new_B = [len(text) for text in texts]
        output = self._forward(batch, ids, mask, new_B, output_hidden_states=True)
        assert output.hidden_states is not None
        h_BTD = output.hidden_states[-1].float()
        return pooled(h_BTD, mask, "mean")

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the ids and the attention mask, both (B, T), of prompts that are padded on the left."""
        inputs = left_padded(prompts, 0, self._device)
        return inputs["input_ids"], inputs["attention_mask"]

    def _new_batch(self, owners: Sequence[GraftSet], tags: Sequence[object], pasts: Sequence[Cache]) -> MixedBatch:
        """Connect new graft sets, and return a batch whose rows have the tokens of `pasts`, or no tokens."""
        new = [owner for owner in dict.fromkeys(owners) if owner.unweighted not in self.wired]
        self.wire([*self.wired, *new])
        lengths = [past.get_seq_length() for past in pasts] or [0] * len(owners)
        longest = max(lengths)
        paddings = [longest - length for length in lengths]
        if pasts:
            shared = join(pasts, paddings)
        else:
            shared = use_growing_layers(DynamicCache(config=self._model.config))
        layers = self._sites.n_layers
        groups = []
        for owner, rows in groupby(owners):
            groups.append(RowGroup.create(owner, len(list(rows)), shared, layers))
        assert len(groups) == 1 or not pasts, "the grafts' own layers of pasts belong to a single graft set"
        move_own_layers(shared, groups[0].cache, layers)
        known = [[0] * padding + [1] * length for padding, length in zip(paddings, lengths, strict=True)]
        mask = torch.tensor(known, dtype=torch.long, device=self._device)
        return MixedBatch(cache=shared, mask=mask, lengths=lengths, groups=groups, tags=list(tags))

    @torch.inference_mode()
    def decode(self, batch: MixedBatch, tokens_B: Sequence[int], *, traced: bool = False) -> Tensor:
        """Append a token to each row of a batch, by a compiled step where there is one.

        Args:
            batch: a batch of this model.
            tokens_B: the new token of each row.
            traced: whether the caller reads `latest_traces`, which a compiled step does not record.

        Returns:
            The logits (B, V) of each row's next token.

        Raises:
            RowGroupError: the pass failed; the batch is unchanged.
        """
        if self.steps is not None and not traced:
            logits = self.steps.decode(batch, tokens_B)
            if logits is not None:
                return logits
        return self.extend(batch, [[token] for token in tokens_B])

    @torch.inference_mode()
    def extend(self, batch: MixedBatch, tokens_BT: Sequence[Sequence[int]]) -> Tensor:
        """Append T tokens to each row of a batch.

        Args:
            batch: a batch of this model.
            tokens_BT: the new tokens of each row, equally many in all rows.

        Returns:
            The logits (B, V) of the token after the last of each row.

        Raises:
            RowGroupError: the pass failed; the batch is unchanged.
        """
        ids = torch.tensor(tokens_BT, device=self._device)
        with _restored_on_failure(batch):
            new_B = [len(tokens) for tokens in tokens_BT]
            logits = self._forward(batch, ids, torch.ones_like(ids), new_B).logits
        assert logits is not None
        return logits[:, -1]

    def _forward(
        self,
        batch: MixedBatch,
        ids_BT: Tensor,
        mask_BT: Tensor,
        new_B: Sequence[int],
        **options: bool,
    ) -> CausalLMOutputWithPast:
        """Run a pass of a batch, whose mask, lengths and calls are updated; raise `RowGroupError` if it fails.

        Args:
            batch: the batch.
            ids_BT: new tokens, padded on the left.
            mask_BT: 1 for real tokens.
            new_B: number of real tokens of each row.
            options: further arguments of the model.
        """
        assert self._tap_hooks is not None, "prefill connects the taps"
        batch.mask = torch.cat([batch.mask, mask_BT], dim=1)
        batch.lengths = [length + new for length, new in zip(batch.lengths, new_B, strict=True)]
        inputs: dict[str, object] = dict(options)
        if batch.has_padding:
            positions = self._sites.positions(batch.mask)
            inputs["attention_mask"] = batch.mask
            inputs["position_ids"] = None if positions is None else positions[:, -ids_BT.shape[1] :]
        scopes = tuple(_scope(group) for group in batch.groups)
        try:
            with self._tap_hooks.announce(row_scopes=scopes) as calls:
                output = self._model(
                    input_ids=ids_BT,
                    past_key_values=batch.cache,
                    use_cache=True,
                    logits_to_keep=1,
                    **inputs,
                )
        except RowScopeError as error:
            raise RowGroupError(scopes.index(error.scope)) from _root_cause(error)
        except Exception as error:
            raise RowGroupError(None) from error
        batch.calls = [call for _, call in self._tap_hooks.calls(calls[0])]
        return output

    def _static_pass(self, owner: Hashable, inputs: StepInputs) -> Tensor:
        """Run a decode step in which the grafts of one set act on all rows; see `StaticPass`."""
        assert self._tap_hooks is not None, "prefill connects the taps"
        given: dict[str, Tensor] = {}
        announced: dict[str, object] = {"row_scopes": (RowScope(owner),)}
        if inputs.columns is not None:
            mask = inputs.columns.mask
            mask.index_fill_(1, inputs.columns.newest.reshape(1), 1)
            positions = self._sites.positions(mask)
            assert positions is not None, "can_compile_steps excludes other models"
            # Later columns are not real, and don't count.
            given = {"attention_mask": mask, "position_ids": positions[:, -1:]}
            announced["column_mask"] = mask.bool()
        with self._tap_hooks.announce(**announced):
            output = self._model(
                input_ids=inputs.ids,
                past_key_values=inputs.cache,
                use_cache=True,
                logits_to_keep=1,
                **given,
            )
        return output.logits[:, -1]


def _most_columns(owner: Hashable) -> int:
    """Return the largest number of columns with which a decode step of these grafts is one graph; 0 for none."""
    assert isinstance(owner, GraftSet)
    if owner.weights:  # every new weight would be compiled again
        return 0
    most = sys.maxsize
    for _, graft in owner.grafts:
        if not graft.decodes_in_one_graph:
            return 0
        most = min(most, graft.max_static_columns or most)
    return most


def _scope(group: RowGroup) -> RowScope:
    assert isinstance(group.owner, GraftSet)
    return RowScope(
        owner=group.owner.unweighted,
        rows=group.span.rows,
        cache=group.cache,
        offset=group.span.offset,
        weights=group.owner.weights,
    )


def _weight_in_pass(name: str, call: Call) -> float:
    """Return the weight of a graft in the rows of a pass."""
    return call.weights.get(name, 1.0)


def keeps_columns(batch: MixedBatch, group: RowGroup) -> bool:
    """Return whether all caches of a group keep the keys and values of every token, one column for each token.

    Args:
        batch: a batch whose rows and columns have not changed since `prefill`.
        group: one of its groups.
    """
    layers: list[Any] = [layer for layer, _ in batch.layers_of(group.span.rows.start)]
    types = {type(layer) for layer in layers}
    if not layers or not types <= {GrowingLayer, DynamicLayer}:
        return False
    lengths = {layer.get_seq_length() for layer in layers}
    return lengths == {batch.mask.shape[1]}


def latest_traces(batch: MixedBatch, rows: Sequence[int]) -> dict[int, dict[str, float]]:
    """Return the trace values of the newest tokens of some rows.

    Args:
        batch: a batch after a pass, which was not a compiled step.
        rows: the rows to read.

    Returns:
        A dict from row to label to value. Rows in groups without traces have an empty dict.
    """
    traces_by_row: dict[int, dict[str, float]] = {}
    if not rows:
        return traces_by_row
    for group, call in zip(batch.groups, batch.calls, strict=True):
        span = group.span.rows
        rows_of_group = [row for row in rows if span.start <= row < span.stop]
        if not rows_of_group:
            continue
        assert isinstance(group.owner, GraftSet)
        traces = forward_traces(dict(group.owner.grafts), call)
        for row in rows_of_group:
            traces_by_row[row] = trace_values(traces, row - span.start)
    return traces_by_row


def _prepare(owner: Hashable, call: Call) -> None:
    """Prepare a pass for the grafts of a row group; raise `GraftError` if one replaced the backbone's cache layers."""
    assert isinstance(owner, GraftSet)
    for name, graft in owner.grafts:
        graft.prepare(call)
        if isinstance(call.cache, RowGroupCache) and not _has_views_first(call.cache):
            raise GraftError(
                f"The graft {name} replaces layers of the backbone's cache, which is not possible for some rows of a "
                "batch only: use the bare backbone, or another graft."
            )


def _has_views_first(cache: RowGroupCache) -> bool:
    """Return whether the layer views are still the first layers of the cache."""
    is_view = [isinstance(layer, LayerView) for layer in cache.layers]
    views = sum(is_view)
    return views > 0 and all(is_view[:views])


def _root_cause(error: BaseException) -> BaseException:
    """Return the exception of the innermost pass."""
    while isinstance(error, RowScopeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _restored_on_failure(batch: MixedBatch) -> Iterator[None]:
    """Restore mask, lengths and caches of a batch if a pass fails."""
    mask, lengths = batch.mask, batch.lengths
    caches = [batch.cache, *(group.cache for group in batch.groups)]
    restores = [snapshot(cache) for cache in caches]
    try:
        yield
    except RowGroupError:
        batch.mask, batch.lengths = mask, lengths
        for restore in restores:
            restore()
        raise
