"""Academic tasks on a grafted model, through lm-evaluation-harness."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from graftlm.errors import EvaluationError, MissingExtraError, did_you_mean
from graftlm.evaluation.metrics import evaluation_mode


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
    """Run tasks of lm-evaluation-harness; gives {task: {metric: value}}, with `<metric>_stderr` where it is known.

    Args:
        model: a Hugging Face model; of a grafted one, whose grafts hang on its live model, that live model is taken.
        tokenizer: the model's; a copy is given to the harness, which may change its padding token.
        tasks: names of tasks or groups; a group gives its own row and one for each of its tasks.
        limit: of questions per task; None takes all.
        num_fewshot: examples before each question; None leaves it to the task.
        batch_size: of questions.
        include_path: a folder with tasks of the user's own.

    Raises:
        MissingExtraError: lm-eval is not installed.
        EvaluationError: a task has an unknown name, or its data can't be had.
    """
    names = list(tasks)
    try:
        # As values of any type: the harness decorates its functions in ways that hide their parameters.
        evaluator: Any = import_module("lm_eval.evaluator")
        adapters: Any = import_module("lm_eval.models.huggingface")
        task_index: Any = import_module("lm_eval.tasks")
    except ImportError:
        raise MissingExtraError("lm-eval", "harness", "Running academic tasks") from None
    manager = _task_manager(task_index, names, include_path)
    _check_names(names, manager.all_tasks)
    with evaluation_mode(hf_model(model)), _quiet():
        adapter = adapters.HFLM(pretrained=hf_model(model), tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
        try:
            found = evaluator.simple_evaluate(
                adapter,
                tasks=names,
                num_fewshot=num_fewshot,
                batch_size=batch_size,
                limit=limit,
                log_samples=False,
                bootstrap_iters=1000,
                task_manager=manager,
            )
        except (OSError, ConnectionError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise EvaluationError(
                f"The data of the tasks {', '.join(names)} can't be had ({reason}): "
                "check the connection, or name a task whose data is on this machine."
            ) from error
    return {} if found is None else _plain(found)


def hf_model(model: Any) -> Any:
    """The Hugging Face model that a grafted model wraps, its grafts attached; any other model as it is."""
    from transformers import PreTrainedModel

    inner = getattr(model, "model", None)
    return inner if not isinstance(model, PreTrainedModel) and isinstance(inner, PreTrainedModel) else model


def _task_manager(task_index: Any, names: list[str], include_path: str | Path | None) -> Any:
    if include_path is None:
        return task_index.TaskManager()
    # Reading the index of all tasks takes seconds, which tasks of the user's own don't need.
    own = task_index.TaskManager(include_path=str(include_path), include_defaults=False)
    return own if {*names} <= {*own.all_tasks} else task_index.TaskManager(include_path=str(include_path))


def _check_names(names: list[str], known: list[str]) -> None:
    if not names:
        raise EvaluationError("No task is named: name at least one, such as hellaswag.")
    available = set(known)
    for name in names:
        if name not in available:
            hint = did_you_mean(name, known)
            # The harness knows thousands of tasks: too many for one sentence.
            hint = hint if hint.startswith(" (did") else ""
            raise EvaluationError(f"There is no task {name!r}{hint}: `lm-eval ls tasks` lists those that exist.")


def _plain(found: Any) -> dict[str, dict[str, float]]:
    """Metrics by task, each under its bare name: the harness writes `acc,none` and `acc_stderr,none`."""
    rows: dict[str, dict[str, float]] = {}
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        rows[task] = {}
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not isinstance(value, int | float) or metric in ("sample_len", "sample_count"):
                continue
            rows[task][metric if chosen in ("", "none") else f"{metric}_{chosen.replace('-', '_')}"] = float(value)
    return rows


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness warns about every live model that it is given; here that is the purpose."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
