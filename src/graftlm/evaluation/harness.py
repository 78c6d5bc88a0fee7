"""Academic tasks on a grafted model, through lm-evaluation-harness."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graftlm.errors import EvaluationError, did_you_mean, first_line
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.files.extras import import_extra


def run_lm_eval(
    model: Any,
    tokenizer: Any,
    tasks: Iterable[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    include_path: str | Path | None = None,
) -> dict[str, dict[str, float]]:
    """Run tasks of lm-evaluation-harness; returns {task: {metric: value}}, with `<metric>_stderr` where it is known.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's tokenizer; the harness gets a copy, whose padding token it may change.
        tasks: names of tasks or groups; a group adds one entry for itself and one for each of its tasks.
        limit: maximum number of questions per task; None takes all.
        num_fewshot: examples before each question; None takes the task's own number.
        include_path: a folder with the user's own tasks.

    Raises MissingExtraError if lm-eval is not installed, and EvaluationError if a task is unknown or can't be loaded.
    """
    from graftlm.grafted.model import GraftedModel

    names = list(tasks)
    evaluator, task_index, adapters = (
        import_extra("harness", module, "Running academic tasks")
        for module in ("lm_eval.evaluator", "lm_eval.tasks", "graftlm.evaluation.lm_eval_model")
    )
    manager = _task_manager(task_index, names, include_path)
    _check_names(names, manager.all_tasks)
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the harness warns about every model object that it is given
    with evaluation_mode(model):
        own: Any = {"tokenizer": copy.deepcopy(tokenizer), "batch_size": batch_size}
        grafted = isinstance(model, GraftedModel)
        adapter = adapters.GraftedHFLM(model, **own) if grafted else adapters.HFLM(pretrained=model, **own)
        try:
            options = {"num_fewshot": num_fewshot, "batch_size": batch_size, "limit": limit, "log_samples": False}
            options |= {"bootstrap_iters": 1000, "task_manager": manager}
            output = evaluator.simple_evaluate(adapter, tasks=names, **options)
        except (OSError, ConnectionError) as error:
            reason = first_line(error)
            raise EvaluationError(
                f"The data of the tasks {', '.join(names)} can't be had ({reason}): "
                "check the connection, or name a task whose data is on this machine."
            ) from error
        finally:
            logger.setLevel(level)
    return {} if output is None else _metrics_by_task(output)


def _task_manager(task_index: Any, names: list[str], include_path: str | Path | None) -> Any:
    if include_path is None:
        return task_index.TaskManager()
    # Reading the index of all tasks takes seconds, and the user's own tasks don't need it.
    own = task_index.TaskManager(include_path=str(include_path), include_defaults=False)
    return own if {*names} <= {*own.all_tasks} else task_index.TaskManager(include_path=str(include_path))


def _check_names(names: list[str], known: list[str]) -> None:
    if not names:
        raise EvaluationError("No task is named: name at least one, such as hellaswag.")
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known).partition(" (known")[0]  # the harness has thousands of tasks
            raise EvaluationError(f"There is no task {name!r}{hint}: `lm-eval ls tasks` lists those that exist.")


def _metrics_by_task(output: Any) -> dict[str, dict[str, float]]:
    """Metrics by task; the harness's `acc,none` becomes `acc`, and `acc,get-answer` becomes `acc_get_answer`."""
    rows: dict[str, dict[str, float]] = {}
    for task, values in {**output["results"], **output.get("groups", {})}.items():
        rows[task] = {}
        for key, value in values.items():
            metric, _, answer_filter = key.partition(",")
            if isinstance(value, int | float) and metric not in ("sample_len", "sample_count"):
                name = metric if answer_filter in ("", "none") else f"{metric}_{answer_filter.replace('-', '_')}"
                rows[task][name] = float(value)
    return rows
