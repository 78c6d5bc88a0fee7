"""Row-scoped hooks: the taps of several owners on one live model, each acting on some rows of a batch.

The backbone's own modules run once for all rows. A tap gets the hidden states of its owner's rows and a `Call` of these
rows; what it returns changes only these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graftlm.backbone.sites import Site, Sites
from graftlm.backbone.taps import Call, Tap, TapHooks, TokenCount
from graftlm.errors import TapError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RowScope:
    """The rows of a pass on which one owner's taps act.

    Args:
        owner: the owner of the taps; several scopes may have the same.
        rows: a slice of the batch; None for all rows.
        cache: the cache of these rows; None for the pass's own.
        offset: number of columns of the batch before the first one of this cache.
    """

    owner: Hashable
    rows: slice | None = None
    cache: Cache | None = None
    offset: int = 0


class RowScopeError(Exception):
    """A tap of one scope failed; the cause is the tap's exception."""

    def __init__(self, scope: RowScope) -> None:
        super().__init__(f"the taps of {scope.owner} failed")
        self.scope = scope


class RowScopedHooks(TapHooks):
    """Registers the taps of several owners. A pass is announced with `row_scopes`; without them it is bare.

    Two owners may replace at one site, as their rows differ. Before each forward pass, `prepare` is called with each
    owner and the `Call` of its rows. Scopes are announced in the order of their rows.

    Raises TapError if a tap names a site that the model does not have.
    """

    _replaces_once = False

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sites,
        taps: Mapping[Any, Sequence[Tap]],
        prepare: Callable[[Hashable, Call], None],
    ) -> None:
        self._prepare_owner = prepare
        super().__init__(model, sites, {"all owners": self._merged(taps)} if taps else {}, self._prepare_scopes)

    def _merged(self, taps: Mapping[Any, Sequence[Tap]]) -> list[Tap]:
        """One tap, and so one hook, for those of several owners that act alike. Owners keep their order of taps."""
        functions: dict[tuple[Any, ...], dict[Any, Callable[..., Tensor | None]]] = {}
        for owner, owner_taps in taps.items():
            for number, tap in enumerate(owner_taps):
                functions.setdefault((number, tap.site, tap.when, tap.act), {})[owner] = tap.function
        merged = sorted(functions.items(), key=lambda item: item[0][0])
        return [
            Tap(site, when, act, partial(self._run, by_owner, site, act)) for (_, site, when, act), by_owner in merged
        ]

    def calls(self, call: Call) -> list[tuple[RowScope, Call]]:
        """The scopes of a pass, as they were announced, and their calls."""
        return call.scratch.get(self, [])

    def _prepare_scopes(self, call: Call) -> None:
        call.scratch[self] = [(scope, _scoped_call(scope, call)) for scope in call.row_scopes]
        for scope, scoped in self.calls(call):
            self._act(scope, self._prepare_owner, scope.owner, scoped)

    def _run(
        self, functions: Mapping[Any, Callable[..., Tensor | None]], site: Site, act: str, call: Call, *tensors: Tensor
    ) -> Tensor | None:
        """Run each owner's function on its rows; the function of a merged tap."""
        results = []
        for scope, scoped in self.calls(call):
            if (function := functions.get(scope.owner)) is None:
                continue
            if (result := self._act(scope, _run_on_rows, function, scope, site, scoped, tensors)) is not None:
                results.append((scope, result))
        if not results or (len(results) == 1 and results[0][0].rows is None):
            return results[0][1] if results else None
        return _join_biases(results, len(tensors[-1])) if act == "bias" else _join_rows(results, tensors[-1], act)

    def _act(self, scope: RowScope, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function. Forward passes that it runs itself belong to the scope's owner."""
        outer, self._stack.announced = self._stack.announced, ({"row_scopes": (RowScope(scope.owner),)}, [])
        try:
            return function(*arguments)
        except Exception as error:
            raise RowScopeError(scope) from error
        finally:
            self._stack.announced = outer


def _scoped_call(scope: RowScope, call: Call) -> Call:
    """The call of a scope's rows; the pass's own call where the scope has neither rows nor a cache."""
    if scope.rows is None and scope.cache is None:
        return call
    rows, positions = scope.rows or slice(None), call.position_ids
    return Call(
        None if call.input_ids is None else call.input_ids[rows],
        None if call.attention_mask is None else call.attention_mask[rows, scope.offset :],
        positions[rows] if positions is not None and len(positions) > 1 else positions,
        scope.cache,
        token_mask=None if call.token_mask is None else call.token_mask[rows],
        training=call.training,
        observing=call.observing,
        count=TokenCount(scope.cache, 0),  # now, before the first layer adds the pass's tokens
        model=call.model,
    )


def _run_on_rows(
    function: Callable[..., Tensor | None], scope: RowScope, site: Site, call: Call, tensors: Sequence[Tensor]
) -> Tensor | None:
    rows = scope.rows
    if rows is None:
        return function(call, *tensors)
    if rows.stop > (length := min(map(len, tensors))):
        raise TapError(
            f"A tap acts on some rows at {site}, but {length} rows pass there, which are not those of the "
            "batch: answer requests for this graft one at a time."
        )
    return function(call, *[tensor[rows] for tensor in tensors])


def _join_biases(results: list[tuple[RowScope, Tensor]], rows: int) -> Tensor:
    """One bias of all rows, whose last keys are aligned; 0 in rows that have none."""
    shapes = [result.shape[1:] for _, result in results]
    full = results[0][1].new_zeros(rows, *map(max, zip(*shapes, strict=True)))
    for scope, result in results:
        full[scope.rows or slice(None)][..., -result.shape[-1] :] = result
    return full


def _join_rows(results: list[tuple[RowScope, Tensor]], like: Tensor, act: str) -> Tensor:
    """One tensor of all rows; rows that have no result stay as they are, where 0 is added to them."""
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
