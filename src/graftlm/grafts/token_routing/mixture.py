"""The weighted sum of LoRA updates at one module, computed without merging.

    y = W x + sum over experts e of w_e s_e B_e A_e x

All A_e are stacked into A (R, in) and all B_e into B (R, out), where R is the sum of the ranks. A x is scaled by
w_e s_e block by block, then multiplied with B. That is two matrix products for any number of experts, with separate
weights for every token of every row.

Shape suffixes: B rows, T tokens, E experts, R sum of ranks, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from graftlm.grafts.token_routing.config import Combination
from graftlm.grafts.token_routing.experts import ExpertTarget, Factors

_CACHED_STACKS = 4  # stacks of expert subsets that a module caches: routes change seldom, and subsets recur


class AdapterLayout(NamedTuple):
    """The experts of a stack, in order, with their ranks and scales."""

    experts: tuple[int, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass
class RouteWeights:
    """The experts' weights in one pass.

    Attributes:
        weights: (B, T, E); T is 1 where all tokens share them. The remainder to 1 belongs to the bare backbone.
        active: experts with a nonzero weight anywhere in the pass; None for all.
    """

    weights: Tensor
    active: frozenset[int] | None = None
    _scaled: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, weights_BTE: Tensor, *, sparse: bool) -> RouteWeights:
        """From weights; with `sparse`, experts without any weight are skipped, which reads the weights."""
        if not sparse:
            return cls(weights_BTE)
        used = (weights_BTE != 0).flatten(0, 1).any(0).nonzero().flatten().tolist()
        return cls(weights_BTE, frozenset(used) if len(used) < weights_BTE.shape[-1] else None)

    def scaled(self, layout: AdapterLayout, like: Tensor, *, root: bool = False) -> Tensor:
        """(B, T, R): w_e s_e, or its square root, repeated by rank; computed once per pass and layout."""
        key = (layout, like.dtype, like.device, root)
        if key not in self._scaled:
            weights = self.weights.to(like.device)
            parts = []  # no tensor of scales or ranks, whose copy to a GPU would wait for it
            for expert, rank, scale in zip(*layout, strict=True):
                own = weights[..., expert, None] * scale
                parts.append((own.sqrt() if root else own).to(like.dtype).expand(*weights.shape[:-1], rank))
            self._scaled[key] = torch.cat(parts, -1)
        return self._scaled[key]


class _StackedFactors(NamedTuple):
    """The factors of several experts: `a` (R, in), `b` (R, out)."""

    layout: AdapterLayout
    a: Tensor
    b: Tensor


class MixedProjection(nn.Module):
    """The experts that change one module.

    Outside training, each expert's factors are views of one stack, so that they are in memory once.

    Args:
        factors: by the expert's number.
        target: sizes of the module.
        combination: `exact`, or `linear`: (sum of sqrt(w_e s_e) B_e) (sum of sqrt(w_e s_e) A_e) x, with cross terms.
        trained: numbers of the experts that are trained.
    """

    def __init__(
        self, factors: Mapping[int, Factors], target: ExpertTarget, combination: Combination, trained: frozenset[int]
    ) -> None:
        super().__init__()
        self.target, self.combination = target, combination
        experts = tuple(sorted(factors))
        ranks, scales = (tuple(factors[e].a.shape[0] for e in experts), tuple(factors[e].scale for e in experts))
        self.layout = AdapterLayout(experts, ranks, scales)
        self.a = nn.ParameterList(nn.Parameter(factors[e].a, requires_grad=e in trained) for e in experts)
        self.b = nn.ParameterList(nn.Parameter(factors[e].b, requires_grad=e in trained) for e in experts)
        self._trains = not trained.isdisjoint(experts)
        self._full_stack: _StackedFactors | None = None
        self._subset_stacks: dict[tuple[int, ...], _StackedFactors] = {}

    def factors(self, expert: int) -> Factors:
        """The factors of one expert."""
        index = self.layout.experts.index(expert)
        return Factors(self.a[index], self.b[index], self.layout.scales[index])

    def forward(self, x: Tensor, routes: RouteWeights) -> Tensor | None:
        """The weighted sum of updates, (B, T, o); None where no expert has a weight.

        x is (B, T, d), or (B, T) token ids for an embedding; it may hold only the last tokens of the pass.
        """
        stack = self._active_stack(routes.active)
        if stack is None:
            return None
        u_BTR = self._down(x, stack.a)
        linear = self.combination == "linear"
        weights = routes.scaled(stack.layout, u_BTR, root=linear)[:, -x.shape[1] :]
        u_BTR = u_BTR * weights
        if linear:
            experts = len(stack.layout.experts)
            u_BTR = u_BTR.unflatten(-1, (experts, -1)).sum(-2).repeat(1, 1, experts) * weights
        delta = u_BTR @ stack.b.to(u_BTR.dtype)
        return delta if self.target.scale == 1 else delta * self.target.scale

    def _down(self, x: Tensor, a_Rd: Tensor) -> Tensor:
        if self.target.is_embedding:
            return a_Rd.T[x]
        dtype = torch.promote_types(x.dtype, a_Rd.dtype)
        return functional.linear(x.to(dtype), a_Rd.to(dtype))

    def _active_stack(self, active: frozenset[int] | None) -> _StackedFactors | None:
        """The factors of the active experts; None when none of them changes this module."""
        if self._trains and torch.is_grad_enabled():
            return self._stack(self.layout.experts)
        first, full = self.a[0], self._full_stack
        if torch.compiler.is_compiling():  # without the check below, which compiled code can't make
            return full or self._stack(self.layout.experts)
        if full is None or first.untyped_storage()._cdata != full.a.untyped_storage()._cdata:
            self._subset_stacks.clear()  # parameters were moved or replaced
            full = self._full_stack = self._stack(self.layout.experts)
            self._make_views(full)
        if active is None or self._trains:
            return full
        chosen = tuple(e for e in self.layout.experts if e in active)
        if not chosen or len(chosen) == len(self.layout.experts):
            return full if chosen else None
        if chosen not in self._subset_stacks:
            while len(self._subset_stacks) >= _CACHED_STACKS:
                del self._subset_stacks[next(iter(self._subset_stacks))]
            self._subset_stacks[chosen] = self._stack(chosen)
        return self._subset_stacks[chosen]

    @torch.no_grad()
    def _make_views(self, stack: _StackedFactors) -> None:
        if len(self.a) == 1 or any(isinstance(parameter, DTensor) for parameter in self.a):
            return
        for own, stacked in ((self.a, stack.a), (self.b, stack.b)):
            for parameter, rows in zip(own, stacked.split(self.layout.ranks), strict=True):
                parameter.data = rows

    def _stack(self, experts: tuple[int, ...]) -> _StackedFactors:
        factors = [self.factors(expert) for expert in experts]
        ranks, scales = tuple(len(own.a) for own in factors), tuple(own.scale for own in factors)
        a, b = (  # sharded or not
            [p.full_tensor() if isinstance(p, DTensor) else p for p in own]
            for own in zip(*((own.a, own.b) for own in factors), strict=True)
        )
        layout = AdapterLayout(experts, ranks, scales)
        return _StackedFactors(layout, *(a[0], b[0]) if len(a) == 1 else (torch.cat(a), torch.cat(b)))
