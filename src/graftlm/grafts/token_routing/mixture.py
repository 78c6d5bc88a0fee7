"""The weighted sum of LoRA updates at one module, computed without merging.

    y = W x + sum over experts e of w_e s_e B_e A_e x

All A_e are stacked into A (R, in) and all B_e into B (R, out), where R is the sum of the ranks. A x is scaled by
w_e s_e block by block, then multiplied with B. That is two matrix products for any number of experts, with separate
weights for every token of every row. Every decoded token passes every module, so rows and tokens are one dimension
there, and what all modules share is computed once in a pass.

Shape suffixes: B rows, T tokens, N = B*T tokens, E experts, R sum of ranks, d inputs, o outputs.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graftlm.grafts.exports import LowRankUpdate
from graftlm.grafts.token_routing.config import Combination
from graftlm.grafts.token_routing.experts import ExpertTarget, Factors

_KNOWN_LAYOUTS = 4096  # layouts of experts that are kept
_CACHED_STACKS = 4  # stacks of expert subsets that a module caches: routes change seldom, and subsets recur


@dataclass(frozen=True, eq=False)
class AdapterLayout:
    """The experts of a stack in order, with their ranks and scales. Equal layouts are the same object, see `of`.

    Args:
        experts: number of each expert.
        ranks: rank of each expert.
        scales: factor s_e of each expert's update.
    """

    experts: tuple[int, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @classmethod
    @functools.lru_cache(maxsize=_KNOWN_LAYOUTS)
    def of(cls, experts: tuple[int, ...], ranks: tuple[int, ...], scales: tuple[float, ...]) -> AdapterLayout:
        """Return the layout with these values, the same while it is in use; it is found by identity in a dict."""
        return cls(experts, ranks, scales)


class StackedFactors(NamedTuple):
    """The factors of several experts.

    Args:
        layout: the experts.
        a: A, transposed, (in, R).
        b: B, (R, out).
        columns: (R,) the number of each column's expert.
    """

    layout: AdapterLayout
    a: Tensor
    b: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class HeldExperts:
    """The factors of some experts, and what modules have computed of them.

    Args:
        active: numbers of the experts.
        factors: factors by the number of the expert and by module path; a bare expert has none.
    """

    active: frozenset[int]
    factors: Mapping[int, Mapping[str, Factors]]
    _stacks: dict[str, StackedFactors] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all factors and stacks."""
        for by_path in self.factors.values():
            for own in by_path.values():
                yield from (own.a, own.b)
        for stack in self._stacks.values():
            yield from (stack.a, stack.b)

    def stack(self, path: str, build: Callable[[Mapping[int, Factors]], StackedFactors]) -> StackedFactors | None:
        """Return the stack of the experts that change a module, which is built once; None if there are none.

        Args:
            path: path of the module.
            build: builds the stack from the factors by expert.
        """
        if path not in self._stacks:
            own = {expert: by_path[path] for expert, by_path in self.factors.items() if path in by_path}
            if not own:
                return None
            self._stacks[path] = build(own)
        return self._stacks[path]


@dataclass
class RouteWeights:
    """The weights of the experts in one pass.

    Args:
        weights: (B, T, E), where T is 1 if all tokens have the same weights. The weights of a token sum to at most 1;
            the rest is the weight of the bare backbone.
        active: experts with a nonzero weight anywhere in the pass; None for all.
        held: factors of the active experts that were read for this pass; None if all experts are in memory.
    """

    weights: Tensor
    active: frozenset[int] | None = None
    held: HeldExperts | None = None
    _scaled: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

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

    def scaled(self, stack: StackedFactors, like: Tensor, shape: torch.Size, *, root: bool = False) -> Tensor:
        """Compute w_e s_e for each column of a stack, once per pass and layout.

        Args:
            stack: the factors of the experts.
            like: tensor whose dtype and device the result has.
            shape: (B, T) of the tokens, which are the last T of the pass.
            root: whether to compute the square root of w_e s_e.

        Returns:
            (N, R) factors; those of an expert are repeated by its rank.
        """
        key = (stack.layout, like.dtype, like.device, root)
        if key not in self._scaled:
            scaled_BTR = self._compute_scaled(stack, like, root=root)
            self._scaled[key] = scaled_BTR, scaled_BTR.flatten(0, 1)
        scaled_BTR, scaled_NR = self._scaled[key]
        if scaled_BTR.shape[:2] == shape:
            return scaled_NR
        return scaled_BTR[:, -shape[1] :].expand(*shape, -1).flatten(0, 1)

    def _compute_scaled(self, stack: StackedFactors, like: Tensor, *, root: bool) -> Tensor:
        scales = stack.layout.scales
        weights_BTE = self.weights.to(like.device)
        own_BTR = weights_BTE.index_select(-1, stack.columns)
        if len(set(scales)) == 1:
            own_BTR = own_BTR * scales[0]
        else:
            # Copying a tensor of scales to a GPU would wait for the GPU.
            parts = own_BTR.split(stack.layout.ranks, dim=-1)
            own_BTR = torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)], dim=-1)
        if root:
            own_BTR = own_BTR.sqrt()
        return own_BTR.to(like.dtype)


class Projection(nn.Module, ABC):
    """The experts that change one module.

    Args:
        layout: the experts, with their ranks and scales.
        target: sizes of the module.
        combination: `exact`, or `linear`: (sum of sqrt(w_e s_e) B_e) (sum of sqrt(w_e s_e) A_e) x, which has cross
            terms between the experts.
        device: device of the module.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        target: ExpertTarget,
        combination: Combination,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.target = target
        self.combination = combination
        self.layout = layout
        numbers = torch.tensor(layout.experts).repeat_interleave(torch.tensor(layout.ranks))
        self.columns: Tensor
        self.register_buffer("columns", numbers.to(device), persistent=False)

    @abstractmethod
    def factors(self, expert: int) -> Factors:
        """Return the factors of one expert.

        Args:
            expert: number of the expert, which must change this module.
        """

    @abstractmethod
    def _active_stack(self, routes: RouteWeights) -> StackedFactors | None:
        """Return the factors of the active experts; None if none of them changes this module."""

    @torch.no_grad()
    def low_rank_update(self, weights: Sequence[float]) -> LowRankUpdate | None:
        """Return the weighted sum of the updates as one update; None if no expert with a weight changes this module.

        Args:
            weights: the weight of each expert of the graft, by the expert's number.
        """
        a_parts = []
        b_parts = []
        for expert in self.layout.experts:
            if not weights[expert]:
                continue
            factors = self.factors(expert)
            weight = weights[expert] * factors.scale
            if self.combination == "linear":
                a_parts.append(math.sqrt(weight) * factors.a)
                b_parts.append(math.sqrt(weight) * factors.b.T)
            else:
                a_parts.append(factors.a)
                b_parts.append(weight * factors.b.T)
        if not a_parts:
            return None
        if self.combination == "linear":
            return LowRankUpdate(torch.stack(a_parts).sum(0), torch.stack(b_parts).sum(0))
        return LowRankUpdate(torch.cat(a_parts), torch.cat(b_parts, dim=1))

    def forward(self, x: Tensor, routes: RouteWeights) -> Tensor | None:
        """Compute the weighted sum of the updates.

        Args:
            x: (B, T, d) inputs of the module, or (B, T) token ids for an embedding. It may contain only the last tokens
                of the pass.
            routes: weights of the experts in the pass.

        Returns:
            (B, T, o), or None if no active expert changes this module.
        """
        stack = self._active_stack(routes)
        if stack is None:
            return None
        shape = x.shape[:2]
        is_linear = self.combination == "linear"
        projected_NR = self._down(x, stack.a)
        factors_NR = routes.scaled(stack, projected_NR, shape, root=is_linear)
        scaled_NR = projected_NR * factors_NR
        if is_linear:
            # Each factor is sqrt(w_e s_e): one is applied with A, the other with B.
            scaled_NR = _add_experts(scaled_NR, len(stack.layout.experts)) * factors_NR
        delta_No = scaled_NR @ stack.b.to(scaled_NR.dtype)
        if self.target.scale != 1:
            delta_No = delta_No * self.target.scale
        return delta_No.view(*shape, -1)

    def _down(self, x: Tensor, a_dR: Tensor) -> Tensor:
        """Return A x, (N, R)."""
        if self.target.is_embedding:
            return a_dR[x.flatten()]
        x_Nd = x.reshape(-1, x.shape[-1])
        if x_Nd.dtype != a_dR.dtype:
            dtype = torch.promote_types(x_Nd.dtype, a_dR.dtype)
            x_Nd = x_Nd.to(dtype)
            a_dR = a_dR.to(dtype)
        return x_Nd @ a_dR

    def _stack(self, experts: tuple[int, ...], own: Mapping[int, Factors] | None = None) -> StackedFactors:
        """Concatenate the factors of some experts.

        Args:
            experts: numbers of the experts, in the order of the layout.
            own: the factors by expert; by default those of `factors`.
        """
        if own is None:
            own = {expert: self.factors(expert) for expert in experts}
        layout = self.layout
        columns = self.columns
        if experts != layout.experts:
            chosen = [layout.experts.index(expert) for expert in experts]
            parts = columns.split(layout.ranks)
            columns = torch.cat([parts[index] for index in chosen])
            layout = AdapterLayout.of(
                experts,
                tuple(layout.ranks[index] for index in chosen),
                tuple(layout.scales[index] for index in chosen),
            )
        return StackedFactors(
            layout=layout,
            a=_concatenate([own[expert].a for expert in experts]).T,
            b=_concatenate([own[expert].b for expert in experts]),
            columns=columns,
        )


class MixedProjection(Projection):
    """The experts that change one module, all of which are in memory.

    Outside of training, the factors of all experts are views of one stack, so that they are in memory only once.

    Args:
        factors: factors of each expert, by the number of the expert.
        target: sizes of the module.
        combination: see `Projection`.
        trained: numbers of the experts that are trained.
    """

    def __init__(
        self,
        factors: Mapping[int, Factors],
        target: ExpertTarget,
        combination: Combination,
        trained: frozenset[int],
    ) -> None:
        experts = tuple(sorted(factors))
        ranks = tuple(len(factors[expert].a) for expert in experts)
        scales = tuple(factors[expert].scale for expert in experts)
        layout = AdapterLayout.of(experts, ranks, scales)
        super().__init__(layout, target, combination, factors[experts[0]].a.device)
        self.a = nn.ParameterList()
        self.b = nn.ParameterList()
        for expert in experts:
            is_trained = expert in trained
            self.a.append(nn.Parameter(factors[expert].a, requires_grad=is_trained))
            self.b.append(nn.Parameter(factors[expert].b, requires_grad=is_trained))
        self._trains = not trained.isdisjoint(experts)
        self._full_stack: StackedFactors | None = None
        self._full_storage = 0
        self._subset_stacks: dict[tuple[int, ...], StackedFactors] = {}

    def factors(self, expert: int) -> Factors:
        index = self.layout.experts.index(expert)
        return Factors(self.a[index], self.b[index], self.layout.scales[index])

    def _active_stack(self, routes: RouteWeights) -> StackedFactors | None:
        if self._trains and torch.is_grad_enabled():
            return self._stack(self.layout.experts)
        if torch.compiler.is_compiling():
            # Compiled code can't compare the storages of tensors.
            return self._full_stack or self._stack(self.layout.experts)
        full = self._current_full_stack()
        active = routes.active
        if active is None or self._trains:
            return full
        chosen = tuple(expert for expert in self.layout.experts if expert in active)
        if not chosen:
            return None
        if len(chosen) == len(self.layout.experts):
            return full
        return self._subset_stack(chosen)

    def _current_full_stack(self) -> StackedFactors:
        """Return the stack of all experts, which is built again if parameters were moved or replaced."""
        full = self._full_stack
        if full is None or _storage(self.a[0]) != self._full_storage:
            self._subset_stacks.clear()
            full = self._stack(self.layout.experts)
            self._full_stack = full
            self._full_storage = _storage(full.a)
            self._make_views(full)
        return full

    def _subset_stack(self, chosen: tuple[int, ...]) -> StackedFactors:
        """Return the stack of some experts; the most recently built ones are cached."""
        if chosen not in self._subset_stacks:
            while len(self._subset_stacks) >= _CACHED_STACKS:
                oldest = next(iter(self._subset_stacks))
                del self._subset_stacks[oldest]
            self._subset_stacks[chosen] = self._stack(chosen)
        return self._subset_stacks[chosen]

    @torch.no_grad()
    def _make_views(self, stack: StackedFactors) -> None:
        """Replace the data of the parameters by views of the stack."""
        if len(self.a) == 1 or any(isinstance(parameter, DTensor) for parameter in self.a):
            return
        _set_data(self.a, stack.a.T.split(self.layout.ranks))
        _set_data(self.b, stack.b.split(self.layout.ranks))


def _add_experts(u_NR: Tensor, experts: int) -> Tensor:
    """Replace the part of each expert by the sum over the experts, which have equal ranks."""
    sum_Nr = u_NR.unflatten(-1, (experts, -1)).sum(-2)
    return sum_Nr.repeat(1, experts)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _set_data(parameters: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate factors, which are gathered if they are sharded. A single one is not copied."""
    full = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    if len(full) == 1:
        return full[0]
    return torch.cat(full)
