"""The keys of a recipe that measure what a model retains, which all tables of the experiment share."""

from __future__ import annotations

from typing import Any

from experiments import Options


def retention(options: Options) -> dict[str, Any]:
    """Return keys of `evaluation`: the preset `retention`, or in a quick run two questions of NQ-open."""
    folder = options.data / "eval"
    if not options.quick:
        return {"preset": "retention", "eval_data": str(folder)}
    task = {"task": "nq_open", "data": str(folder / "nq_open"), "shots": 0, "limit": 2, "max_tokens": 2}
    return {"harness": [task]}
