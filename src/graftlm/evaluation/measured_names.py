"""Names of what a run measures: no two may give a metric the same name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_NAME = re.compile(r"\w[\w.-]*")
_OWN_METRICS = frozenset(
    [
        "learned",
        "forgotten",
        "own_kl",
        "chat_kl",
        "kept_answers",
        "spill",
        "taught_answers",
        "strength",
        "trainable_parameters",
        "total_parameters",
        "peak_memory_bytes",
        "train_tokens",
        "train_seconds",
        "train_tokens_per_s",
        "decode_old_tokens_per_s",
        "decode_new_tokens_per_s",
        "rows_without_target",
        "steps_without_target",
    ]
)
"""Metrics that are not those of a text or task."""


def name_problems(tests: Iterable[str], benchmarks: Iterable[str], *, with_sets: bool) -> Iterator[str]:
    """Yield what is wrong with the names of test texts and benchmarks, as clauses.

    Args:
        tests: names of the test texts. Names without sets are not checked for their letters.
        benchmarks: names of the metrics of benchmarks.
        with_sets: whether the test texts are named after sets.
    """
    owners = dict.fromkeys(_OWN_METRICS, "another measurement")
    for name in tests:
        if with_sets and not _NAME.fullmatch(name):
            yield f"a set of texts is named {name!r}, but letters, digits, _, - and . are expected: choose another name"
        for metric in _metrics_of_text(name):
            if metric in owners:
                yield _clash(f"the test text {name}", metric, owners[metric])
            owners[metric] = f"the test text {name}"
    for name in benchmarks:
        for metric in (name, f"{name}_change"):
            if metric in owners:
                yield _clash(f"the benchmark {name}", metric, owners[metric])
            owners[metric] = f"the benchmark {name}"


def _metrics_of_text(name: str) -> list[str]:
    """Return the names of the metrics of a test text. The changes of `old` and `new` are `forgotten` and `learned`."""
    own = [name, f"{name}_bpb", f"{name}_kl"]
    return own if name in ("old", "new") else [*own, f"learned_{name}", f"forgotten_{name}"]


def _clash(owner: str, metric: str, other: str) -> str:
    return f"{owner} has a metric {metric}, which is the name of {other}: give it another name"
