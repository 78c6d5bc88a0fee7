"""Row-scoped hooks: the taps of several owners on one live model, each acting on some rows of a batch.

The backbone's own modules run once for all rows. A tap gets the hidden states of its owner's rows and a `Call` of these
rows; what it returns changes only these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graftlm.backbone.families import Sites
from graftlm.backbone.taps import Call, Tap, TapHooks
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
    owner and the `Call` of its rows.

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
        super().__init__(model, sites, taps, self._prepare_scopes)

    def calls(self, call: Call) -> list[tuple[RowScope, Call]]:
        """The scopes of a pass and their calls; scopes of one owner are adjacent."""
        return [pair for pairs in call.scratch.get(self, {}).values() for pair in pairs]

    def _prepare_scopes(self, call: Call) -> None:
        by_owner = call.scratch[self] = {scope.owner: [] for scope in call.row_scopes}
        for scope in call.row_scopes:
            by_owner[scope.owner].append((scope, _scoped_call(scope, call)))
        for scope, scoped in self.calls(call):
            with self._acting(scope):
                self._prepare_owner(scope.owner, scoped)

    def _apply(self, owner: Any, tap: Tap, *tensors: Tensor) -> Tensor | None:
        results = []
        for scope, call in self._current().scratch.get(self, {}).get(owner, ()):
            with self._acting(scope):
                result = tap.function(call, *(_select_rows(tensor, scope, tap) for tensor in tensors))
            if result is not None:
                results.append((scope, result))
        if not results:
            return None
        if len(results) == 1 and results[0][0].rows is None:
            return results[0][1]
        return _scatter(results, tensors[-1], tap)

    @contextmanager
    def _acting(self, scope: RowScope) -> Iterator[None]:
        """Within it, forward passes that a tap itself runs belong to the scope's owner."""
        try:
            with self.announce(row_scopes=(RowScope(scope.owner),)):
                yield
        except Exception as error:
            raise RowScopeError(scope) from error


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
        model=call.model,
    )


def _select_rows(tensor: Tensor, scope: RowScope, tap: Tap) -> Tensor:
    if scope.rows is not None and scope.rows.stop > len(tensor):
        raise TapError(
            f"A tap acts on some rows at {tap.site}, but {len(tensor)} rows pass there, which are not those of the "
            "batch: answer requests for this graft one at a time."
        )
    return tensor if scope.rows is None else tensor[scope.rows]


def _scatter(results: list[tuple[RowScope, Tensor]], like: Tensor, tap: Tap) -> Tensor:
    """One tensor of all rows, without effect in rows that have no result; the last keys of biases are aligned."""
    if tap.act == "bias":
        shapes = [result.shape[1:] for _, result in results]
        full = results[0][1].new_zeros(len(like), *map(max, zip(*shapes, strict=True)))
    else:
        full = like.clone() if tap.act == "replace" else torch.zeros_like(like)
    for scope, result in results:
        full[scope.rows or slice(None)][..., -result.shape[-1] :] = result.to(full.dtype)
    return full
