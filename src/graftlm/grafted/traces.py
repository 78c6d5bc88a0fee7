"""Values that grafts record for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers.cache_utils import Cache

from graftlm.backbone import Call
from graftlm.grafts.base import Graft, Trace, Traceable


def forward_traces(grafts: Mapping[str, Graft], call: Call) -> dict[str, Trace]:
    """Return the traces of the tokens of a pass, by the graft's name, without grafts that have no trace.

    Args:
        grafts: the grafts by name.
        call: the pass, after it has run.
    """

    def read(graft: Traceable) -> Trace | None:
        return graft.forward_trace(call)

    return _collect_traces(grafts, read)


def cache_traces(grafts: Mapping[str, Graft], cache: Cache) -> dict[str, Trace]:
    """Return the traces of all tokens in a cache, by the graft's name, without grafts that have no trace.

    Args:
        grafts: the grafts by name.
        cache: the cache of the generation, filled while these grafts were attached.
    """

    def read(graft: Traceable) -> Trace | None:
        return graft.cache_trace(cache)

    return _collect_traces(grafts, read)


def _collect_traces(grafts: Mapping[str, Graft], read: Callable[[Traceable], Trace | None]) -> dict[str, Trace]:
    """Return the traces that `read` returns, by the name of the graft."""
    traces: dict[str, Trace] = {}
    for name, graft in grafts.items():
        if not isinstance(graft, Traceable):
            continue
        trace = read(graft)
        if trace is not None:
            traces[name] = trace
    return traces


def trace_values(traces: Mapping[str, Trace], row: int, token: int = -1) -> dict[str, float]:
    """Return the trace values of a token by label. With several traces, "NAME: " of the graft precedes the label.

    Args:
        traces: the traces by the graft's name.
        row: index of the row in the traces' values.
        token: index of the token in the row; negative values count from the end.
    """
    values_by_label: dict[str, float] = {}
    for name, trace in traces.items():
        prefix = f"{name}: " if len(traces) > 1 else ""
        values = trace.values[row, token].tolist()
        for label, value in zip(trace.labels, values, strict=True):
            values_by_label[prefix + label] = value
    return values_by_label
