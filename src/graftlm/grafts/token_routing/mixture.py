"""The exact mixture of experts at one module, without merging anything.

    y = W x + sum over experts e of w_e s_e B_e A_e x

All A_e are stacked to A (R, in) and all B_e to B (R, out), R the sum of the ranks. A x is scaled by w_e s_e, rank block
by rank block, and multiplied with B: two products, whatever the number of experts, and weights of its own for every
token of every row.

Shape suffixes: B rows, T tokens, E experts, r one rank, R sum of ranks, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from graftlm.grafts.token_routing.config import Combination
from graftlm.grafts.token_routing.experts import Factors, Place

# Stacks of chosen experts that a module keeps: routes change seldom, and come back.
_KEPT_STACKS = 4


@dataclass(frozen=True)
class Layout:
    """Which experts a stack holds, with their ranks and scales."""

    experts: tuple[int, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    def some(self, experts: tuple[int, ...]) -> Layout:
        """The layout of a part."""
        places = [self.experts.index(expert) for expert in experts]
        return Layout(experts, tuple(self.ranks[i] for i in places), tuple(self.scales[i] for i in places))


@dataclass
class Routes:
    """The experts' weights in one pass.

    Attributes:
        weights: (B, T, E) of every expert; T is 1 where all tokens share them. What they lack to 1 is the backbone's.
        active: experts with a weight anywhere in the pass, None for all.
    """

    weights: Tensor
    active: frozenset[int] | None = None
    _spread: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, weights_BTE: Tensor, *, sparse: bool) -> Routes:
        """Routes; with `sparse`, experts without any weight are found, which a GPU is waited for."""
        if not sparse:
            return cls(weights_BTE)
        used = (weights_BTE != 0).flatten(0, 1).any(0).nonzero().flatten().tolist()
        return cls(weights_BTE, frozenset(used) if len(used) < weights_BTE.shape[-1] else None)

    def spread(self, layout: Layout, like: Tensor, *, root: bool = False) -> Tensor:
        """(B, T, R): w_e s_e, or its root, as often as the rank; made once a pass for all modules that are alike."""
        key = (layout, like.dtype, like.device, root)
        if key not in self._spread:
            weights = self.weights.to(like.device)[..., list(layout.experts)]
            weights = weights * torch.tensor(layout.scales, device=like.device)
            ranks = torch.tensor(layout.ranks, device=like.device)
            weights = (weights.sqrt() if root else weights).to(like.dtype)
            self._spread[key] = weights.repeat_interleave(ranks, dim=-1, output_size=sum(layout.ranks))
        return self._spread[key]


@dataclass(frozen=True)
class _Stack:
    """Some experts' factors in one piece."""

    layout: Layout
    a: Tensor
    b: Tensor


class Mixture(nn.Module):
    """The experts that change one module.

    Outside of training each expert's factors are views of one stack, so that they are in memory once.

    Args:
        factors: by the expert's number.
        place: the module's sizes.
        combination: `exact`, or `linear`: (sum of sqrt(w_e s_e) B_e) (sum of sqrt(w_e s_e) A_e) x, with cross terms.
        trained: numbers of the experts that are trained here.
    """

    def __init__(
        self, factors: Mapping[int, Factors], place: Place, combination: Combination, trained: frozenset[int]
    ) -> None:
        super().__init__()
        self.place, self.combination = place, combination
        experts = tuple(sorted(factors))
        ranks, scales = (tuple(factors[e].a.shape[0] for e in experts), tuple(factors[e].scale for e in experts))
        self.layout = Layout(experts, ranks, scales)
        self.a = nn.ParameterList(nn.Parameter(factors[e].a, requires_grad=e in trained) for e in experts)
        self.b = nn.ParameterList(nn.Parameter(factors[e].b, requires_grad=e in trained) for e in experts)
        self._trains = not trained.isdisjoint(experts)
        self._whole: _Stack | None = None
        self._some: dict[tuple[int, ...], _Stack] = {}

    def factors(self, expert: int) -> Factors:
        """One expert's."""
        index = self.layout.experts.index(expert)
        return Factors(self.a[index], self.b[index], self.layout.scales[index])

    def forward(self, x: Tensor, routes: Routes) -> Tensor | None:
        """What the experts add to the module's output; None where none of them has a weight.

        Args:
            x: (B, T, d), or (B, T) token ids for an embedding.
            routes: of the pass; x may hold its last tokens alone.
        """
        stack = self._stack(routes.active)
        if stack is None:
            return None
        u_BTR = self._down(x, stack.a)
        linear = self.combination == "linear"
        weights = routes.spread(stack.layout, u_BTR, root=linear)[:, -x.shape[1] :]
        u_BTR = u_BTR * weights
        if linear:
            experts = len(stack.layout.experts)
            u_BTR = u_BTR.unflatten(-1, (experts, -1)).sum(-2).repeat(1, 1, experts) * weights
        delta = u_BTR @ stack.b.to(u_BTR.dtype)
        return delta if self.place.scale == 1 else delta * self.place.scale

    def _down(self, x: Tensor, a_Rd: Tensor) -> Tensor:
        if self.place.embedding:
            return a_Rd.T[x]
        dtype = torch.promote_types(x.dtype, a_Rd.dtype)
        return functional.linear(x.to(dtype), a_Rd.to(dtype))

    def _stack(self, active: frozenset[int] | None) -> _Stack | None:
        """The factors of the active experts; None when none of them changes this module."""
        if self._trains and torch.is_grad_enabled():
            return self._put_together(self.layout.experts)
        whole = self._all()
        if active is None or self._trains:
            return whole
        chosen = tuple(e for e in self.layout.experts if e in active)
        if not chosen or len(chosen) == len(self.layout.experts):
            return whole if chosen else None
        if chosen not in self._some:
            while len(self._some) >= _KEPT_STACKS:
                del self._some[next(iter(self._some))]
            self._some[chosen] = self._put_together(chosen)
        return self._some[chosen]

    def _all(self) -> _Stack:
        first = self.a[0]
        if self._whole is None or first.data_ptr() != self._whole.a.data_ptr() or first.dtype != self._whole.a.dtype:
            self._some.clear()
            self._whole = self._put_together(self.layout.experts)
            self._become_views(self._whole)
        return self._whole

    @torch.no_grad()
    def _become_views(self, whole: _Stack) -> None:
        if len(self.a) == 1 or any(isinstance(parameter, DTensor) for parameter in self.a):
            return
        start = 0
        for index, rank in enumerate(self.layout.ranks):
            rows = slice(start, start + rank)
            self.a[index].data, self.b[index].data = whole.a[rows], whole.b[rows]
            start += rank

    def _put_together(self, experts: tuple[int, ...]) -> _Stack:
        layout = self.layout.some(experts)
        places = [self.layout.experts.index(expert) for expert in experts]
        a, b = ([_local(own[i]) for i in places] for own in (self.a, self.b))
        return _Stack(layout, *(a[0], b[0]) if len(a) == 1 else (torch.cat(a), torch.cat(b)))


def _local(parameter: Tensor) -> Tensor:
    """A parameter that is sharded over processes, whole."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
