"""The weighted sum of LoRA updates at one module, computed without merging.

    y = W x + sum over experts e of w_e s_e B_e A_e x

All A_e are stacked into A (R, in) and all B_e into B (R, out), where R is the sum of the ranks. A x is scaled by
w_e s_e block by block, then multiplied with B. That is two matrix products for any number of experts, with separate
weights for every token of every row.

Shape suffixes: B rows, T tokens, E experts, R sum of ranks, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """The experts of a stack in order, with their ranks and scales.

    Args:
        experts: number of each expert.
        ranks: rank of each expert.
        scales: factor s_e of each expert's update.
    """

    experts: tuple[int, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass
class RouteWeights:
    """The weights of the experts in one pass.

    Args:
        weights: (B, T, E), where T is 1 if all tokens have the same weights. The weights of a token sum to at most 1;
            the rest is the weight of the bare backbone.
        active: experts with a nonzero weight anywhere in the pass; None for all.
    """

    weights: Tensor
    active: frozenset[int] | None = None
    _scaled: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, weights_BTE: Tensor, *, sparse: bool) -> RouteWeights:
        """Build the weights of a pass.

        Args:
            weights_BTE: (B, T, E), the weight of each expert.
            sparse: whether to skip experts without any weight. The host then reads the weights.
        """
        if not sparse:
            return cls(weights_BTE)
        is_used_E = (weights_BTE != 0).flatten(0, 1).any(0)
        used = is_used_E.nonzero().flatten().tolist()
        if len(used) == weights_BTE.shape[-1]:
            return cls(weights_BTE)
        return cls(weights_BTE, active=frozenset(used))

    def scaled(self, layout: AdapterLayout, like: Tensor, *, root: bool = False) -> Tensor:
        """Compute w_e s_e for each column of a stack, once per pass and layout.

        Args:
            layout: the experts of the stack.
            like: tensor whose dtype and device the result has.
            root: whether to compute the square root of w_e s_e.

        Returns:
            (B, T, R) factors; those of an expert are repeated by its rank.
        """
        key = (layout, like.dtype, like.device, root)
        if key not in self._scaled:
            self._scaled[key] = self._compute_scaled(layout, like, root=root)
        return self._scaled[key]

    def _compute_scaled(self, layout: AdapterLayout, like: Tensor, *, root: bool) -> Tensor:
        weights = self.weights.to(like.device)
        parts = []
        # A loop, because copying a tensor of scales or ranks to a GPU would wait for the GPU.
        for expert, rank, scale in zip(layout.experts, layout.ranks, layout.scales, strict=True):
            own = weights[..., expert, None] * scale
            if root:
                own = own.sqrt()
            parts.append(own.to(like.dtype).expand(*weights.shape[:-1], rank))
        return torch.cat(parts, -1)


class _StackedFactors(NamedTuple):
    """The factors of several experts: `a` (R, in), `b` (R, out)."""

    layout: AdapterLayout
    a: Tensor
    b: Tensor


class MixedProjection(nn.Module):
    """The experts that change one module.

    Outside of training, the factors of all experts are views of one stack, so that they are in memory only once.

    Args:
        factors: factors of each expert, by the number of the expert.
        target: sizes of the module.
        combination: `exact`, or `linear`: (sum of sqrt(w_e s_e) B_e) (sum of sqrt(w_e s_e) A_e) x, which has cross
            terms between the experts.
        trained: numbers of the experts that are trained.
    """

    def __init__(
        self,
        factors: Mapping[int, Factors],
        target: ExpertTarget,
        combination: Combination,
        trained: frozenset[int],
    ) -> None:
        super().__init__()
        self.target = target
        self.combination = combination
        experts = tuple(sorted(factors))
        self.layout = AdapterLayout(
            experts=experts,
            ranks=tuple(len(factors[expert].a) for expert in experts),
            scales=tuple(factors[expert].scale for expert in experts),
        )
        self.a = nn.ParameterList()
        self.b = nn.ParameterList()
        for expert in experts:
            is_trained = expert in trained
            self.a.append(nn.Parameter(factors[expert].a, requires_grad=is_trained))
            self.b.append(nn.Parameter(factors[expert].b, requires_grad=is_trained))
        self._trains = not trained.isdisjoint(experts)
        self._full_stack: _StackedFactors | None = None
        self._subset_stacks: dict[tuple[int, ...], _StackedFactors] = {}

    def factors(self, expert: int) -> Factors:
        """Return the factors of one expert.

        Args:
            expert: number of the expert, which must change this module.
        """
        index = self.layout.experts.index(expert)
        return Factors(self.a[index], self.b[index], self.layout.scales[index])

    def forward(self, x: Tensor, routes: RouteWeights) -> Tensor | None:
        """Compute the weighted sum of the updates.

        Args:
            x: (B, T, d) inputs of the module, or (B, T) token ids for an embedding. It may contain only the last tokens
                of the pass.
            routes: weights of the experts in the pass.

        Returns:
            (B, T, o), or None if no active expert changes this module.
        """
        stack = self._active_stack(routes.active)
        if stack is None:
            return None
        is_linear = self.combination == "linear"
        projected_BTR = self._down(x, stack.a)
        all_factors = routes.scaled(stack.layout, projected_BTR, root=is_linear)
        factors_BTR = all_factors[:, -x.shape[1] :]
        scaled_BTR = projected_BTR * factors_BTR
        if is_linear:
            # Each factor is sqrt(w_e s_e): one is applied with A, the other with B.
            summed_BTR = _add_experts(scaled_BTR, len(stack.layout.experts))
            scaled_BTR = summed_BTR * factors_BTR
        delta = scaled_BTR @ stack.b.to(scaled_BTR.dtype)
        if self.target.scale == 1:
            return delta
        return delta * self.target.scale

    def _down(self, x: Tensor, a_Rd: Tensor) -> Tensor:
        if self.target.is_embedding:
            return a_Rd.T[x]
        dtype = torch.promote_types(x.dtype, a_Rd.dtype)
        return functional.linear(x.to(dtype), a_Rd.to(dtype))

    def _active_stack(self, active: frozenset[int] | None) -> _StackedFactors | None:
        """Return the factors of the active experts; None if none of them changes this module."""
        if self._trains and torch.is_grad_enabled():
            return self._stack(self.layout.experts)
        if torch.compiler.is_compiling():
            # Compiled code can't compare the storages of tensors.
            return self._full_stack or self._stack(self.layout.experts)
        full = self._current_full_stack()
        if active is None or self._trains:
            return full
        chosen = tuple(expert for expert in self.layout.experts if expert in active)
        if not chosen:
            return None
        if len(chosen) == len(self.layout.experts):
            return full
        return self._subset_stack(chosen)

    def _current_full_stack(self) -> _StackedFactors:
        """Return the stack of all experts, which is built again if parameters were moved or replaced."""
        full = self._full_stack
        if full is None or not _share_storage(self.a[0], full.a):
            self._subset_stacks.clear()
            full = self._stack(self.layout.experts)
            self._full_stack = full
            self._make_views(full)
        return full

    def _subset_stack(self, chosen: tuple[int, ...]) -> _StackedFactors:
        """Return the stack of some experts; the most recently built ones are cached."""
        if chosen not in self._subset_stacks:
            while len(self._subset_stacks) >= _CACHED_STACKS:
                oldest = next(iter(self._subset_stacks))
                del self._subset_stacks[oldest]
            self._subset_stacks[chosen] = self._stack(chosen)
        return self._subset_stacks[chosen]

    @torch.no_grad()
    def _make_views(self, stack: _StackedFactors) -> None:
        """Replace the data of the parameters by views of the stack."""
        if len(self.a) == 1 or any(isinstance(parameter, DTensor) for parameter in self.a):
            return
        _set_data(self.a, stack.a.split(self.layout.ranks))
        _set_data(self.b, stack.b.split(self.layout.ranks))

    def _stack(self, experts: tuple[int, ...]) -> _StackedFactors:
        """Concatenate the factors of some experts."""
        factors = [self.factors(expert) for expert in experts]
        layout = AdapterLayout(
            experts=experts,
            ranks=tuple(len(own.a) for own in factors),
            scales=tuple(own.scale for own in factors),
        )
        return _StackedFactors(
            layout=layout,
            a=_concatenate([own.a for own in factors]),
            b=_concatenate([own.b for own in factors]),
        )


def _add_experts(u_BTR: Tensor, experts: int) -> Tensor:
    """Replace the part of each expert by the sum over the experts, which have equal ranks."""
    sum_BTr = u_BTR.unflatten(-1, (experts, -1)).sum(-2)
    return sum_BTr.repeat(1, 1, experts)


def _share_storage(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _set_data(parameters: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate factors, which are gathered if they are sharded. A single one is not copied."""
    full = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    if len(full) == 1:
        return full[0]
    return torch.cat(full)
