"""Academic tasks on a grafted model, through lm-evaluation-harness."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedTokenizerBase

from graftlm.errors import EvaluationError, did_you_mean, first_line
from graftlm.evaluation.harness_tasks import PURPOSE, allowed_code, refuse_unsafe_code, task_manager
from graftlm.evaluation.harness_types import HarnessModel, TaskIndex
from graftlm.evaluation.inference import LanguageModel, evaluation_mode
from graftlm.evaluation.reachable_hub import offline_if_unreachable
from graftlm.files.extras import import_extra


def run_lm_eval(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Iterable[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    include_path: str | Path | None = None,
    confirm_unsafe_code: bool = False,
) -> dict[str, dict[str, float]]:
    """Run tasks of lm-evaluation-harness.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's tokenizer; the harness gets a copy, whose padding token it may change.
        tasks: names of tasks or groups; a group adds one entry for itself and one for each of its tasks.
        limit: maximum number of questions per task; None takes all.
        num_fewshot: number of solved examples before each question; None takes the task's own number.
        batch_size: questions per forward pass.
        include_path: a folder with the user's own tasks.
        confirm_unsafe_code: whether tasks may execute code that the model writes.

    Returns:
        Metrics by task, {task: {metric: value}}, with `<metric>_stderr` where it is known. Empty in all processes but
        the first.

    Raises:
        MissingExtraError: lm-eval is not installed.
        EvaluationError: no task is named, a task is unknown or executes code without confirmation, or the data of a
            task can't be loaded.
    """
    names = list(tasks)
    evaluator = import_extra("harness", "lm_eval.evaluator", PURPOSE)
    task_index = import_extra("harness", "lm_eval.tasks", PURPOSE)
    manager = _task_manager(task_index, names, include_path)
    check_task_names(names, manager.all_tasks)
    refuse_unsafe_code(manager, names, confirmed=confirm_unsafe_code)
    with evaluation_mode(model), quiet_harness(), allowed_code(allow=confirm_unsafe_code), offline_if_unreachable():
        try:
            output = evaluator.simple_evaluate(
                harness_model(model, tokenizer, batch_size),
                tasks=names,
                num_fewshot=num_fewshot,
                batch_size=batch_size,
                limit=limit,
                log_samples=False,
                bootstrap_iters=1000,
                task_manager=manager,
                confirm_run_unsafe_code=confirm_unsafe_code,
            )
        except OSError as error:
            raise EvaluationError(
                f"The data of the tasks {', '.join(names)} can't be loaded ({first_line(error)}): "
                "connect to the Hugging Face hub, or name a task whose data is on this machine."
            ) from error
    return {} if output is None else _metrics_by_task(output)


def harness_model(model: LanguageModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> HarnessModel:
    """Return a model of the harness that wraps a live model.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's tokenizer, which is copied.
        batch_size: rows per forward pass.

    Raises:
        MissingExtraError: lm-eval is not installed.
    """
    adapters = import_extra("harness", "graftlm.evaluation.lm_eval_model", PURPOSE)
    from graftlm.grafted.model import GraftedModel  # takes seconds to import

    tokenizer = copy.deepcopy(tokenizer)
    if isinstance(model, GraftedModel):
        return adapters.GraftedHFLM(model, tokenizer=tokenizer, batch_size=batch_size)
    return adapters.TextPairHFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Silence the harness in a `with` block: it warns about every model that is passed as an object."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _task_manager(task_index: ModuleType, names: Sequence[str], include_path: str | Path | None) -> TaskIndex:
    if include_path is None:
        return task_manager(names)
    # Reading the index of all tasks takes seconds, and the user's own tasks don't need it.
    manager = task_index.TaskManager(include_path=str(include_path), include_defaults=False)
    if set(names) <= set(manager.all_tasks):
        return manager
    return task_index.TaskManager(include_path=str(include_path))


def check_task_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Check that there are names, and that the harness knows them.

    Args:
        names: names of tasks.
        known: all names.

    Raises:
        EvaluationError: there are no names, or one is unknown.
    """
    if not names:
        raise EvaluationError("No task is named: name at least one, such as hellaswag.")
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known).partition(" (known")[0]  # The harness has thousands of tasks.
            raise EvaluationError(f"There is no task {name!r}{hint}: `lm-eval ls tasks` lists those that exist.")


def _metrics_by_task(output: Mapping[str, Mapping[str, Mapping[str, object]]]) -> dict[str, dict[str, float]]:
    """Return metrics by task; the harness's `acc,none` becomes `acc`, and `acc,get-answer` `acc_get_answer`."""
    results = {**output["results"], **output.get("groups", {})}
    rows: dict[str, dict[str, float]] = {}
    for task, values in results.items():
        rows[task] = {}
        for key, value in values.items():
            metric, _, answer_filter = key.partition(",")
            if not isinstance(value, int | float) or metric in ("sample_len", "sample_count"):
                continue
            if answer_filter not in ("", "none"):
                metric += "_" + answer_filter.replace("-", "_")
            rows[task][metric] = float(value)
    return rows
