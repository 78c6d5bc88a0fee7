"""A backbone whose batches have rows of several grafts: its own modules run once for all of them.

A row's answer is what it would be alone. Shape suffixes: B rows, T tokens of this pass, V tokens of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone, Call, JoinError, RowScopedHooks, RowScopeError, join, use_growing_layers
from graftlm.backbone.taps import check_conflicts
from graftlm.errors import GraftError
from graftlm.grafts.base import Graft, Trace, supports_row_groups
from graftlm.grafts.lanes import Batch, Lane, LaneCache, StandIn
from graftlm.grafts.model import GraftedModel, forward_traces


@dataclass(frozen=True)
class Team:
    """The grafts that act together on some rows, in the order in which they act; none for the bare backbone."""

    grafts: tuple[tuple[str, Graft], ...] = ()

    def __str__(self) -> str:
        return "+".join(name for name, _ in self.grafts) or "the bare backbone"


class RowsError(Exception):
    """What a graft raised while it acted on some rows, as the cause; the batch is as before the pass.

    Attributes:
        lane: the number of the lane in its batch; None where it is not known whose failure it is.
    """

    def __init__(self, lane: int | None) -> None:
        super().__init__("a pass failed")
        self.lane = lane


class MixedModel:
    """A backbone that carries several teams of grafts, each on rows of its own, for generation.

    As with `GraftedModel`, nothing else may attach to the backbone until `detach`.

    Args:
        backbone: a causal language model.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._bare = GraftedModel(backbone, {})  # freezes the backbone, and gives it back
        self._backbone = backbone
        self._tap_hooks: RowScopedHooks | None = None
        self._wired: tuple[Team, ...] = ()

    def wire(self, teams: Sequence[Team]) -> None:
        """Connect these teams, and no others.

        Raises:
            GraftError: a team's grafts conflict, or one can't act on some rows alone.
        """
        if set(teams) == set(self._wired):
            return
        taps: dict[Any, list[Any]] = {team: self._taps(team) for team in teams}
        self._unwire()
        self._tap_hooks = RowScopedHooks(self._backbone.model, self._backbone.sites, taps, _prepare)
        self._wired = tuple(teams)

    @property
    def wired(self) -> tuple[Team, ...]:
        """The teams that are connected."""
        return self._wired

    def _taps(self, team: Team) -> list[Any]:
        for name, graft in team.grafts:
            if not supports_row_groups(graft):
                raise GraftError(
                    f"The graft {name} brings modules of its own into the model, which act on every row: run it alone."
                )
            graft.eval()
        taps = {name: graft.taps() for name, graft in team.grafts}
        check_conflicts(self._backbone.sites, taps)
        return [tap for own in taps.values() for tap in own]

    def _unwire(self) -> None:
        if self._tap_hooks is not None:
            self._tap_hooks.remove()
        self._tap_hooks, self._wired = None, ()

    def detach(self) -> Backbone:
        """Take every tap off and give the backbone back as it was."""
        self._unwire()
        return self._bare.detach()

    @torch.inference_mode()
    def start(self, team: Team, prompts: Sequence[Sequence[int]], tags: Sequence[Any]) -> tuple[Batch, Tensor]:
        """A new batch of one team's rows, and (B, V) the logits of each row's next token.

        Raises:
            RowsError: it failed.
        """
        if team not in self._wired:
            self.wire([*self._wired, team])
        width, device = max(len(prompt) for prompt in prompts), self._backbone.device
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        shared = use_growing_layers(DynamicCache(config=self._backbone.model.config))
        lane = Lane.begin(team, len(prompts), shared, self._backbone.sites.n_layers)
        batch = Batch(shared, mask[:, :0].to(device), [lane], list(tags))
        logits = self._run(batch, ids.to(device), mask.to(device))
        batch.apart = not _joins(batch.cache)
        lane.kept_apart = not _joins(lane.cache)
        return batch, logits

    @torch.inference_mode()
    def step(self, batch: Batch, tokens_B: Sequence[int]) -> Tensor:
        """(B, V) the logits behind one more token of each row.

        Raises:
            RowsError: it failed, and the batch is as before.
        """
        ids = torch.tensor(tokens_B, device=self._backbone.device)[:, None]
        with _undone_by_failure(batch):
            return self._run(batch, ids, torch.ones_like(ids))

    def _run(self, batch: Batch, ids_BT: Tensor, new_BT: Tensor) -> Tensor:
        assert self._tap_hooks is not None, "a batch was begun"
        batch.mask = torch.cat([batch.mask, new_BT], dim=1)
        inputs: dict[str, Any] = {}
        if not bool(batch.mask.all()):
            places = self._backbone.sites.positions(batch.mask)
            inputs = {
                "attention_mask": batch.mask,
                "position_ids": None if places is None else places[:, -ids_BT.shape[1] :],
            }
        scopes = tuple(lane.row_scope() for lane in batch.lanes)
        try:
            with self._tap_hooks.announce(row_scopes=scopes) as calls:
                output: Any = self._backbone.model(
                    input_ids=ids_BT, past_key_values=batch.cache, use_cache=True, logits_to_keep=1, **inputs
                )
        except RowScopeError as error:
            raise RowsError(scopes.index(error.scope)) from _root(error)
        except Exception as error:
            raise RowsError(None) from error
        batch.calls = [call for _, call in self._tap_hooks.calls(calls[0])]
        return output.logits[:, -1]


def newest_traces(batch: Batch, wanted: Sequence[int]) -> dict[int, dict[str, float]]:
    """What the grafts of some rows did at their newest tokens, by label; by graft and label where several tell."""
    found: dict[int, dict[str, float]] = {}
    for lane, call in zip(batch.lanes, batch.calls, strict=True):
        rows = [row for row in wanted if lane.view.rows.start <= row < lane.view.rows.stop]
        if rows:
            assert isinstance(lane.owner, Team)
            traces = forward_traces(dict(lane.owner.grafts), call)
            found |= {row: newest(traces, row - lane.view.rows.start) for row in rows}
    return found


def newest(traces: Mapping[str, Trace], row: int) -> dict[str, float]:
    """What traces, by the graft's name, tell of one row's newest token, by label; with names where several tell."""
    return {
        f"{name}: {label}" if len(traces) > 1 else label: value
        for name, trace in traces.items()
        for label, value in zip(trace.labels, trace.values[row, -1].tolist(), strict=True)
    }


def _prepare(owner: Hashable, call: Call) -> None:
    assert isinstance(owner, Team)
    for name, graft in owner.grafts:
        graft.prepare(call)
        if isinstance(call.cache, LaneCache) and not _stands(call.cache):
            raise GraftError(
                f"The graft {name} exchanges what this backbone remembers of a text, which it can't do for some rows "
                "alone: ask the backbone, or another graft."
            )


def _stands(cache: LaneCache) -> bool:
    first = next((n for n, layer in enumerate(cache.layers) if not isinstance(layer, StandIn)), len(cache.layers))
    return first > 0 and not any(isinstance(layer, StandIn) for layer in cache.layers[first:])


def _root(error: BaseException) -> BaseException:
    """What was raised first, in the innermost pass."""
    while isinstance(error, RowScopeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _joins(cache: Cache) -> bool:
    """Whether a cache can be joined with others of its kind."""
    try:
        join([cache], [0])
    except JoinError:
        return False
    return True


@contextmanager
def _undone_by_failure(batch: Batch) -> Iterator[None]:
    """Give a batch back as it was, if a pass fails in its middle."""
    mask, undo = batch.mask, [_undo(cache) for cache in (batch.cache, *(lane.cache for lane in batch.lanes))]
    try:
        yield
    except RowsError:
        batch.mask = mask
        for one in undo:
            one()
        raise


def _undo(cache: Cache) -> Callable[[], None]:
    """What gives a cache back as it is now. Tensors are taken for never written to."""
    own = {name: copy.copy(value) for name, value in vars(cache).items()}
    layers = [(layer, _copied(vars(layer))) for layer in cache.layers if not isinstance(layer, StandIn)]

    def restore() -> None:
        vars(cache).clear()
        vars(cache).update(own)
        for layer, values in layers:
            vars(layer).clear()
            vars(layer).update(values)

    return restore


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, Tensor) else copy.copy(value) for name, value in values.items()}
