"""Sets of tasks that one word names.

    retention    60 prompts of IFEval, BIG-Bench Hard and NQ-open: what a model should still be able to do

The items are drawn by a fixed seed, so they are the same wherever the data is. Answers are short, so that a small model
is measured in minutes on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.benchmarks.config import HarnessTaskConfig, duplicate_problem

PresetName = Literal["retention"]

EVAL_DATA_VARIABLE = "GRAFTLM_EVAL_DATA"
_SEED = 57
_RETENTION = {  # by the folder of the data
    "ifeval": HarnessTaskConfig(task="ifeval", shots=0, limit=60, max_tokens=128, seed=_SEED),
    "bbh": HarnessTaskConfig(task="bbh_zeroshot", name="bbh", limit=54, max_tokens=24, seed=_SEED),
    "nq_open": HarnessTaskConfig(task="nq_open", shots=5, limit=60, max_tokens=16, seed=_SEED),
}


def preset_labels(preset: PresetName | None) -> list[str]:
    """Return the names of the metrics of a preset's tasks; None has none."""
    return [] if preset is None else [task.label for task in _RETENTION.values()]


def preset_tasks(preset: PresetName | None, eval_data: str | None) -> list[HarnessTaskConfig]:
    """Return the tasks of a preset.

    Args:
        preset: name of the preset; None has no tasks.
        eval_data: folder with a folder for each task. None takes that of the variable GRAFTLM_EVAL_DATA, or the hub if
            it is not set either.

    Raises:
        DataError: the folder lacks the data of a task.
    """
    if preset is None:
        return []
    folder = eval_data or os.environ.get(EVAL_DATA_VARIABLE)
    tasks = []
    for name, task in _RETENTION.items():
        data = None if folder is None else _task_folder(Path(folder).expanduser(), name)
        tasks.append(task.model_copy(update={"data": data}))
    return tasks


def with_preset(
    harness: Sequence[HarnessTaskConfig], preset: PresetName | None, eval_data: str | None
) -> list[HarnessTaskConfig]:
    """Return tasks and those of a preset, see `preset_tasks`.

    Raises:
        DataError: the folder lacks the data of a task of the preset.
        EvaluationError: two tasks have one name.
    """
    tasks = [*harness, *preset_tasks(preset, eval_data)]
    problem = duplicate_problem(tasks)
    if problem is not None:
        raise EvaluationError(f"With the preset {preset}, {problem}.")
    return tasks


def _task_folder(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_dir():
        raise DataError(
            f"The folder {folder} has no folder {name} with the data of this task: name the folder that has one for "
            f"each of {', '.join(_RETENTION)} (--eval-data, or {EVAL_DATA_VARIABLE}), or none to read from the hub."
        )
    return str(path)
