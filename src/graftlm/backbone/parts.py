"""Taps of several owners on one live model, each acting on some rows of a batch.

The backbone's own modules run once for all rows. A tap is given the hidden states of its owner's rows and a `Call` of
them alone, and what it returns goes back to those rows: none of it reaches the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from graftlm.backbone.sites import Sites
from graftlm.backbone.taps import Call, Tap, Wiring
from graftlm.errors import TapError


@dataclass(frozen=True)
class Part:
    """Some rows of a pass, on which one owner's taps act.

    Args:
        owner: whose; several parts may have the same.
        rows: which; None for all.
        cache: of these rows; None for the pass's own.
        offset: how many columns of the batch stand before those that this cache has.
    """

    owner: Hashable
    rows: slice | None = None
    cache: Cache | None = None
    offset: int = 0


class PartError(Exception):
    """What was raised, as the cause, while a part's taps acted."""

    def __init__(self, part: Part) -> None:
        super().__init__(f"the taps of {part.owner} failed")
        self.part = part


class PartWiring(Wiring):
    """The hooks that carry the taps of several owners; a pass is announced with its `parts`, without any it is bare.

    Args:
        model: the live model.
        taps: each owner's taps; two owners may replace at one site, as they have rows of their own.
        prepare: called with the owner and the `Call` of its rows before each forward pass.

    Raises:
        TapError: a tap names a place that the model does not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sites,
        taps: Mapping[Any, Sequence[Tap]],
        prepare: Callable[[Hashable, Call], None],
    ) -> None:
        self._prepare_part = prepare
        super().__init__(model, sites, taps, self._prepare_parts)

    def _check(self, sites: Sites, taps: Mapping[Any, Sequence[Tap]]) -> None:
        pass

    def calls(self, call: Call) -> list[tuple[Part, Call]]:
        """The parts of a pass, with the `Call` that each was given, in the order of announcement."""
        found = call.scratch.get(self, {})
        return [(part, sub) for one in found.values() for part, sub in one]

    def _prepare_parts(self, call: Call) -> None:
        found: dict[Hashable, list[tuple[Part, Call]]] = {}
        for part in call.parts:
            found.setdefault(part.owner, []).append((part, _call_of(part, call)))
        call.scratch[self] = found
        for part, sub in self.calls(call):
            with self._acting(part):
                self._prepare_part(part.owner, sub)

    def _ask(self, owner: Any, tap: Tap, *tensors: Tensor) -> Tensor | None:
        parts = self._current().scratch.get(self, {}).get(owner, ())
        results = []
        for part, sub in parts:
            with self._acting(part):
                result = tap.function(sub, *(_rows(tensor, part, tap) for tensor in tensors))
            if result is not None:
                results.append((part, result))
        if not results:
            return None
        if len(results) == 1 and results[0][0].rows is None:
            return results[0][1]
        return _spread(results, tensors[-1], tap)

    @contextmanager
    def _acting(self, part: Part) -> Iterator[None]:
        """A pass that a tap runs inside of this one is its owner's alone."""
        outer = self._local.announced
        self._local.announced = ({"parts": (Part(part.owner),)}, [])
        try:
            yield
        except Exception as error:
            raise PartError(part) from error
        finally:
            self._local.announced = outer


def _call_of(part: Part, call: Call) -> Call:
    """The call of a part's rows; without its own rows and cache, the very call."""
    if part.rows is None and part.cache is None:
        return call
    rows = slice(None) if part.rows is None else part.rows
    places = call.position_ids
    return Call(
        None if call.input_ids is None else call.input_ids[rows],
        None if call.attention_mask is None else call.attention_mask[rows, part.offset :],
        places[rows] if places is not None and len(places) > 1 else places,
        part.cache,
        token_mask=None if call.token_mask is None else call.token_mask[rows],
        training=call.training,
        observing=call.observing,
    )


def _rows(tensor: Tensor, part: Part, tap: Tap) -> Tensor:
    if part.rows is None:
        return tensor
    if part.rows.stop > len(tensor):
        raise TapError(
            f"A tap acts on some rows at {tap.site}, but {len(tensor)} rows pass there, which are not those of the "
            "batch: answer requests for this graft one at a time."
        )
    return tensor[part.rows]


def _spread(results: list[tuple[Part, Tensor]], like: Tensor, tap: Tap) -> Tensor:
    """What several parts returned as one for all rows, which changes nothing in the rest."""
    if tap.act == "bias":
        return _spread_bias(results, len(like))
    whole = like.clone() if tap.act == "replace" else torch.zeros_like(like)
    for part, result in results:
        whole[slice(None) if part.rows is None else part.rows] = result.to(whole.dtype)
    return whole


def _spread_bias(results: list[tuple[Part, Tensor]], rows: int) -> Tensor:
    """(rows, H, T, S) of the widest S, keys ending together."""
    shapes = [result.shape for _, result in results]
    _, heads, queries, keys = (max(sizes) for sizes in zip(*shapes, strict=True))
    whole = results[0][1].new_zeros(rows, heads, queries, keys)
    for part, result in results:
        at = slice(None) if part.rows is None else part.rows
        whole[at, :, :, keys - result.shape[-1] :] = result
    return whole
