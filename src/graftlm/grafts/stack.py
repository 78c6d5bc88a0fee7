"""Several grafts that act together as one, as the stages of `graft grow` do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from graftlm.backbone import Call, Tap
from graftlm.grafts.base import Graft, Trace, Traceable


class Stack(Graft, Traceable):
    """Grafts that act through taps, in their order. Its config is that of the last.

    Args:
        grafts: at least one graft by name, all built for the same backbone.
    """

    def __init__(self, grafts: Mapping[str, Graft]) -> None:
        super().__init__()
        last = list(grafts.values())[-1]
        self.config = last.config
        self._fingerprint = last._fingerprint
        self.members = nn.ModuleDict(dict(grafts))
        self.takes_weight = all(graft.takes_weight for graft in grafts.values())

    def grafts(self) -> dict[str, Graft]:
        """Return the grafts by name."""
        return {name: cast("Graft", graft) for name, graft in self.members.items()}

    @property
    def decodes_in_one_graph(self) -> bool:
        return all(graft.decodes_in_one_graph for graft in self.grafts().values())

    @property
    def max_static_columns(self) -> int | None:
        limits = [graft.max_static_columns for graft in self.grafts().values()]
        return min((limit for limit in limits if limit is not None), default=None)

    def taps(self) -> list[Tap]:
        return [tap for graft in self.grafts().values() for tap in graft.taps()]

    def prepare(self, call: Call) -> None:
        for graft in self.grafts().values():
            graft.prepare(call)

    def cache_trace(self, cache: Cache) -> Trace | None:
        return self._trace(lambda graft: graft.cache_trace(cache))

    def forward_trace(self, call: Call) -> Trace | None:
        return self._trace(lambda graft: graft.forward_trace(call))

    def _trace(self, read: Callable[[Traceable], Trace | None]) -> Trace | None:
        """Return the traces of all grafts side by side, with the graft's name before each label."""
        labels: list[str] = []
        values = []
        for name, graft in self.grafts().items():
            trace = read(graft) if isinstance(graft, Traceable) else None
            if trace is not None:
                labels += [f"{name}: {label}" for label in trace.labels]
                values.append(trace.values)
        return Trace(labels, torch.cat(values, dim=-1)) if values else None
