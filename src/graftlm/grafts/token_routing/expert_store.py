"""Experts that are read from their folders when a route needs them.

A bounded number of them stays in memory; the least recently used is dropped first. A pass holds the experts of all of
its rows until the next pass, even if they are more than that number.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError
from graftlm.files.adapter_config import ADAPTER_CONFIG, ADAPTER_TENSORS
from graftlm.files.hub import fetch_folder
from graftlm.grafts.token_routing.adapters import parse_factors
from graftlm.grafts.token_routing.config import Combination, ExpertConfig
from graftlm.grafts.token_routing.expert_sources import placed
from graftlm.grafts.token_routing.experts import ExpertTarget, Factors
from graftlm.grafts.token_routing.mixture import (
    AdapterLayout,
    HeldExperts,
    Projection,
    RouteWeights,
    StackedFactors,
)


@dataclass(frozen=True)
class StoredExpert:
    """An adapter that was checked when the graft was built.

    Args:
        name: name of the expert.
        folder: its PEFT folder.
        sha256: SHA-256 of its tensor file.
        ranks: rank at each module, by path.
        scales: factor of the update at each module, by path.
    """

    name: str
    folder: Path
    sha256: str
    ranks: Mapping[str, int]
    scales: Mapping[str, float]

    @classmethod
    def of(cls, name: str, config: ExpertConfig, factors: Mapping[str, Factors]) -> Self:
        """Describe an adapter that was read.

        Args:
            name: name of the expert.
            config: its config, with path and hash.
            factors: its factors by module path, which are not kept.
        """
        assert config.path is not None, "only adapters are stored"
        assert config.sha256 is not None, "the adapter was read"
        return cls(
            name=name,
            folder=fetch_folder(Path(config.path).expanduser(), ADAPTER_CONFIG),
            sha256=config.sha256,
            ranks={path: len(own.a) for path, own in factors.items()},
            scales={path: own.scale for path, own in factors.items()},
        )

    def read(self, backbone: Backbone) -> dict[str, Factors]:
        """Read the factors by module path, on the backbone's device.

        Raises:
            ArtifactError: the tensor file is missing, can't be read, or is not the one that the graft was built with.
        """
        path = self.folder / ADAPTER_TENSORS
        remedy = f"restore the adapter in {self.folder}, or build the graft without the expert {self.name}"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"The expert {self.name} is needed, but {path} can't be read ({error.strerror}): {remedy}."
            ) from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ArtifactError(
                f"The expert {self.name} is needed, but {path} has changed since the graft was built (its "
                f"{len(data):,} bytes have another SHA-256): {remedy}."
            )
        factors = parse_factors(self.name, self.folder, data, self.scales)
        return {path: placed(own, backbone) for path, own in factors.items()}


class ExpertStore:
    """Reads experts, and keeps a bounded number of them in memory.

    Passes of several threads may share it.

    Args:
        experts: the adapters by the number of the expert; bare experts are missing.
        limit: number of experts that stay in memory, at least 1.
        backbone: the backbone of the routing.
    """

    def __init__(self, experts: Mapping[int, StoredExpert], limit: int, backbone: Backbone) -> None:
        self.experts = dict(experts)
        self.limit = limit
        self._backbone = backbone
        self._kept: OrderedDict[int, dict[str, Factors]] = OrderedDict()
        self._held: HeldExperts | None = None
        self._lock = threading.Lock()
        self.reads = 0
        """Number of times that an expert was read from its folder."""

    @property
    def in_memory(self) -> frozenset[int]:
        """Numbers of the experts whose factors are in memory."""
        held = () if self._held is None else self._held.factors
        return frozenset([*self._kept, *held])

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the factors in memory, including those that modules have concatenated."""
        held = [] if self._held is None else [self._held]
        tensors = [tensor for each in held for tensor in each.tensors()]
        for by_path in list(self._kept.values()):
            for own in by_path.values():
                tensors += [own.a, own.b]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def clear(self) -> None:
        """Drop all experts, such as after the backbone was moved to another device."""
        with self._lock:
            self._kept.clear()
            self._held = None

    @torch.compiler.disable(recursive=True)
    def hold(self, active: Collection[int] | None) -> HeldExperts:
        """Return the factors of experts, of which those that are not in memory are read.

        Args:
            active: numbers of the experts; None for all.

        Raises:
            ArtifactError: an expert can't be read; see `StoredExpert.read`.
        """
        needed = frozenset(self.experts if active is None else active)
        with self._lock:
            if self._held is not None and self._held.active == needed:
                return self._held
            self._held = None  # before others are read, so that both are not in memory
            self._make_room(needed & self.experts.keys())
            factors: dict[int, dict[str, Factors]] = {}
            for number in sorted(needed & self.experts.keys()):
                factors[number] = self._get(number)
            self._held = HeldExperts(needed, factors)
            return self._held

    def factors(self, number: int) -> dict[str, Factors]:
        """Return the factors of one expert that is not bare, by module path."""
        held = self._held
        if held is None or number not in held.factors:
            held = self.hold([number])
        return dict(held.factors[number])

    def _make_room(self, needed: frozenset[int]) -> None:
        """Drop the least recently used experts until those that are needed fit, if they can."""
        missing = len(needed - self._kept.keys())
        for number in list(self._kept):
            if len(self._kept) + missing <= self.limit:
                break
            if number not in needed:
                del self._kept[number]

    def _get(self, number: int) -> dict[str, Factors]:
        """Return the factors of one expert, as the most recently used one."""
        own = self._kept.pop(number, None)
        if own is None:
            own = self.experts[number].read(self._backbone)
            self.reads += 1
        self._kept[number] = own
        if len(self._kept) > self.limit:
            self._kept.popitem(last=False)
        return own


class StoredProjection(Projection):
    """The experts that change one module, which are read when a route needs them.

    Args:
        path: path of the module.
        store: the experts of all modules.
        layout: the experts that change this module.
        target: sizes of the module.
        combination: see `Projection`.
        device: device of the module.
    """

    def __init__(
        self,
        path: str,
        store: ExpertStore,
        layout: AdapterLayout,
        target: ExpertTarget,
        combination: Combination,
        device: torch.device,
    ) -> None:
        super().__init__(layout, target, combination, device)
        self._path = path
        self._store = store

    def factors(self, expert: int) -> Factors:
        return self._store.factors(expert)[self._path]

    def _active_stack(self, routes: RouteWeights) -> StackedFactors | None:
        held = routes.held or self._store.hold(routes.active)
        return held.stack(self._path, self._build)

    def _build(self, own: Mapping[int, Factors]) -> StackedFactors:
        return self._stack(tuple(sorted(own)), own)
