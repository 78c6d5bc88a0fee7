"""Metrics of text, tasks and cost; results, tables, plots and reports.

A name is imported when it is first used, so that results are read and printed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.evaluation.examples import (
        Example,
        chrf,
        chrf_signature,
        exact_match,
        generate_answers,
        pass_at_1,
        score_answers,
    )
    from graftlm.evaluation.harness import run_lm_eval
    from graftlm.evaluation.metrics import (
        MemoryWatch,
        Scores,
        decode_speed,
        learning_and_forgetting,
        paired_difference,
        score,
    )
    from graftlm.evaluation.report import write_report
    from graftlm.evaluation.results import (
        Aim,
        Interval,
        Machine,
        Metric,
        PaperRow,
        Results,
        Row,
        combine_seeds,
        value_of,
    )
    from graftlm.evaluation.tables import print_table
    from graftlm.evaluation.tasks import Task, TaskConfig, TaskResult, measure_task, read_task

__all__ = [
    "Aim",
    "Example",
    "Interval",
    "Machine",
    "MemoryWatch",
    "Metric",
    "PaperRow",
    "Results",
    "Row",
    "Scores",
    "Task",
    "TaskConfig",
    "TaskResult",
    "chrf",
    "chrf_signature",
    "combine_seeds",
    "decode_speed",
    "exact_match",
    "generate_answers",
    "learning_and_forgetting",
    "measure_task",
    "paired_difference",
    "pass_at_1",
    "print_table",
    "read_task",
    "run_lm_eval",
    "score",
    "score_answers",
    "value_of",
    "write_report",
]

_MODULES = ("results", "tables", "report", "metrics", "harness", "examples", "tasks")  # the fastest import first


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            if (value := getattr(import_module(f"{__name__}.{module}"), name, None)) is not None:
                globals()[name] = value
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
