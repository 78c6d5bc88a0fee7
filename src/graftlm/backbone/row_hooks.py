"""Row-scoped hooks: the taps of several owners on one live model, each acting on some rows of a batch.

The backbone's own modules run once for all rows. A tap receives the hidden states of its owner's rows and a `Call` of
these rows; its result changes only these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graftlm.backbone.call import Call
from graftlm.backbone.sites import Site, Sites
from graftlm.backbone.taps import Tap, TapHooks
from graftlm.backbone.token_count import TokenCount
from graftlm.errors import TapError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TapFunction = Callable[..., Tensor | None]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RowScope:
    """The rows of a pass on which one owner's taps act.

    Attributes:
        owner: the owner of the taps; several scopes may have the same.
        rows: a slice of the batch; None for all rows.
        cache: the cache of these rows; None for the cache of the whole pass.
        offset: number of columns of the batch before the first column of this cache.
        weights: names and weights of the owner's grafts that have another weight than 1.
    """

    owner: Hashable
    rows: slice | None = None
    cache: Cache | None = None
    offset: int = 0
    weights: tuple[tuple[str, float], ...] = ()


class RowScopeError(Exception):
    """A tap of a scope failed; the cause is the tap's exception.

    Attributes:
        scope: the scope whose tap failed.
    """

    def __init__(self, scope: RowScope) -> None:
        super().__init__(f"the taps of {scope.owner} failed")
        self.scope = scope


class _TapKey(NamedTuple):
    """What taps of several owners must have in common to share a hook."""

    number: int
    site: Site
    when: Literal["before", "after"]
    act: Literal["add", "replace", "bias"]


class RowScopedHooks(TapHooks):
    """Registers the taps of several owners on one live model.

    A pass is announced with `row_scopes`, in the order of their rows; without scopes it is a bare pass. Two owners may
    replace at one site, because their rows differ.

    Args:
        model: the live model, on which hooks are registered.
        sites: the sites of this model.
        taps: taps by owner.
        prepare: called before each forward pass with the owner of each scope and the `Call` of its rows.

    Raises:
        TapError: a tap uses a site that the model does not have, or adds a bias where the model takes none.
    """

    _replaces_once = False

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sites,
        taps: Mapping[Hashable, Sequence[Tap]],
        prepare: Callable[[Hashable, Call], None],
    ) -> None:
        self._prepare_owner = prepare
        merged = {"all owners": self._merged(taps)} if taps else {}
        super().__init__(model, sites, merged, self._prepare_scopes)

    def _merged(self, taps: Mapping[Hashable, Sequence[Tap]]) -> list[Tap]:
        """Merge the taps of all owners that act alike, so that they share a hook. Owners keep the order of their taps.

        Returns:
            The merged taps, whose function runs the function of each owner on its rows.
        """
        functions: dict[_TapKey, dict[Hashable, _TapFunction]] = {}
        for owner, owner_taps in taps.items():
            for number, tap in enumerate(owner_taps):
                key = _TapKey(number, tap.site, tap.when, tap.act)
                functions.setdefault(key, {})[owner] = tap.function
        merged = []
        for key in sorted(functions, key=lambda key: key.number):
            function = partial(self._run, functions[key], key.site, key.act)
            merged.append(Tap(key.site, key.when, key.act, function))
        return merged

    def calls(self, call: Call) -> list[tuple[RowScope, Call]]:
        """Return the scopes of a pass in the order in which they were announced, with their calls."""
        return call.scratch.get(self, [])

    def _prepare_scopes(self, call: Call) -> None:
        scopes = [scope for scope in call.row_scopes if isinstance(scope, RowScope)]
        call.scratch[self] = [(scope, _scoped_call(scope, call)) for scope in scopes]
        for scope, scoped in self.calls(call):
            self._act(scope, self._prepare_owner, scope.owner, scoped)

    def _run(
        self,
        functions: Mapping[Hashable, _TapFunction],
        site: Site,
        act: str,
        call: Call,
        *tensors: Tensor,
    ) -> Tensor | None:
        """Run each owner's function on its rows, and join the results: the function of a merged tap."""
        results = []
        for scope, scoped in self.calls(call):
            function = functions.get(scope.owner)
            if function is None:
                continue
            result = self._act(scope, _run_on_rows, function, scope, site, scoped, tensors)
            if result is not None:
                results.append((scope, result))
        if not results:
            return None
        if len(results) == 1:
            scope, result = results[0]
            if scope.rows is None:
                return result
        if act == "bias":
            return _join_biases(results, len(tensors[-1]))
        return _join_rows(results, tensors[-1], act)

    def _act(self, scope: RowScope, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Call a function of a scope's owner. Forward passes that it runs itself belong to that owner.

        Raises:
            RowScopeError: the function failed.
        """
        outer = self._stack.announced
        self._stack.announced = ({"row_scopes": (RowScope(scope.owner, weights=scope.weights),)}, [])
        try:
            return function(*arguments)
        except Exception as error:
            raise RowScopeError(scope) from error
        finally:
            self._stack.announced = outer


def _scoped_call(scope: RowScope, call: Call) -> Call:
    """Return the call of a scope's rows, which is the pass's own call if the scope has neither rows nor a cache."""
    if scope.rows is None and scope.cache is None:
        call.weights = dict(scope.weights)
        return call
    rows = scope.rows or slice(None)
    positions = call.position_ids
    if positions is not None and len(positions) > 1:  # A single row of positions belongs to all rows.
        positions = positions[rows]
    return Call(
        input_ids=None if call.input_ids is None else call.input_ids[rows],
        attention_mask=None if call.attention_mask is None else call.attention_mask[rows, scope.offset :],
        position_ids=positions,
        cache=scope.cache,
        token_mask=None if call.token_mask is None else call.token_mask[rows],
        training=call.training,
        observing=call.observing,
        count=TokenCount(scope.cache, 0),  # counted now, before the first layer adds the pass's tokens
        model=call.model,
        weights=dict(scope.weights),
    )


def _run_on_rows(
    function: _TapFunction, scope: RowScope, site: Site, call: Call, tensors: Sequence[Tensor]
) -> Tensor | None:
    """Call the function of a tap with the rows of its scope."""
    rows = scope.rows
    if rows is None:
        return function(call, *tensors)
    length = min(len(tensor) for tensor in tensors)
    if rows.stop > length:
        raise TapError(
            f"A tap acts on row {rows.stop - 1} at {site}, but the number of rows that arrive there is {length}, not "
            "that of the batch: answer requests for this graft one at a time."
        )
    return function(call, *[tensor[rows] for tensor in tensors])


def _join_biases(results: Sequence[tuple[RowScope, Tensor]], rows: int) -> Tensor:
    """Return one bias of all rows, whose last keys are aligned; 0 in rows without a bias."""
    shapes = [result.shape[1:] for _, result in results]
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    joined = results[0][1].new_zeros(rows, *largest)
    for scope, result in results:
        own_rows = joined[scope.rows or slice(None)]
        own_rows[..., -result.shape[-1] :] = result
    return joined


def _join_rows(results: Sequence[tuple[RowScope, Tensor]], like: Tensor, act: str) -> Tensor:
    """Return one tensor of all rows, which does not change the rows without a result.

    Args:
        results: the results of scopes, in the order of their rows.
        like: (B, T, d), the hidden states of all rows.
        act: `add` or `replace`.
    """
    parts: list[Tensor] = []
    end = 0
    for scope, result in results:
        rows = scope.rows or slice(0, len(like))
        if rows.start > end:
            parts.append(_unchanged(like[end : rows.start], act))
        parts.append(result.to(like.dtype).expand(rows.stop - rows.start, *like.shape[1:]))
        end = rows.stop
    if end < len(like):
        parts.append(_unchanged(like[end:], act))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unchanged(rows: Tensor, act: str) -> Tensor:
    return rows if act == "replace" else torch.zeros_like(rows)
