"""Definitions of lm-evaluation-harness' tasks: their keys, and whether they run code that a model wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from graftlm.errors import EvaluationError
from graftlm.evaluation.harness_types import TaskIndex, Values
from graftlm.files.extras import import_extra

PURPOSE = "Running academic tasks"
_UNSAFE_VARIABLE = "HF_ALLOW_CODE_EVAL"


def stock_keys(path: Path, *, resolve: bool = True) -> Values:
    """Return the keys of a task's YAML.

    Args:
        path: the YAML file.
        resolve: import the functions that it names, rather than keep their names.
    """
    try:
        from lm_eval.tasks._yaml_loader import load_yaml
    except ModuleNotFoundError:  # versions before 0.4.11
        load_config = import_extra("harness", "lm_eval.utils", PURPOSE).load_yaml_config
        return load_config(yaml_path=str(path), mode="full" if resolve else "simple")
    return load_yaml(path, resolve_func=resolve)


def task_manager(names: Sequence[str]) -> TaskIndex:
    """Return an index of the harness' tasks that has these names, if they exist.

    The index of all tasks takes seconds to read. It is not needed for tasks and groups that a file of their name
    defines, such as `arc_easy.yaml` or `_mmlu.yaml`.

    Args:
        names: names of tasks or groups.
    """
    task_index = import_extra("harness", "lm_eval.tasks", PURPOSE)
    files = [_file_of(name) for name in names]
    folders = sorted({str(file.parent) for file in files if file is not None})
    if names and None not in files:
        manager = task_index.TaskManager(include_path=folders, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    return _full_index()


@lru_cache(maxsize=1)
def _full_index() -> TaskIndex:
    return import_extra("harness", "lm_eval.tasks", PURPOSE).TaskManager()


def _file_of(name: str) -> Path | None:
    """Return the YAML of the harness that defines a name, if it is called by it."""
    for file in _files().get(name, ()):
        keys = stock_keys(file, resolve=False)
        if name in (keys.get("task"), keys.get("group")):
            return file
    return None


@lru_cache(maxsize=1)
def _files() -> dict[str, list[Path]]:
    """Return the YAML files of the harness by name, without the suffix and a leading underscore."""
    root = Path(import_extra("harness", "lm_eval.tasks", PURPOSE).__file__).parent
    found: dict[str, list[Path]] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".yaml"):
                found.setdefault(name.removesuffix(".yaml").removeprefix("_"), []).append(Path(folder, name))
    return found


def refuse_unsafe_code(manager: TaskIndex, names: Sequence[str], *, confirmed: bool) -> None:
    """Check that no task runs code that a model wrote, before anything of it is imported.

    Args:
        manager: the index of the harness' tasks.
        names: names of tasks that exist; the tasks of a group are not looked up.
        confirmed: whether the user has confirmed such tasks.

    Raises:
        EvaluationError: a task runs such code, and that is not confirmed.
    """
    if confirmed:
        return
    for name in names:
        entry = manager.task_index[name]
        path = entry["yaml_path"] if isinstance(entry, dict) else getattr(entry, "yaml_path", None)
        if not path or path == -1:
            continue
        if stock_keys(Path(path), resolve=False).get("unsafe_code"):
            raise unsafe_code_error(name)


def unsafe_code_error(task: str) -> EvaluationError:
    """Return the error that a task runs code without confirmation."""
    return EvaluationError(
        f"The task {task} runs code that the model writes, on this machine and without a sandbox: confirm it with "
        "confirm_unsafe_code: true (--confirm-unsafe-code), best in a container."
    )


@contextmanager
def allowed_code(*, allow: bool) -> Iterator[None]:
    """Set the variable with which metrics that run code do so, in a `with` block.

    Args:
        allow: whether to set it.
    """
    if not allow:
        yield
        return
    before = os.environ.get(_UNSAFE_VARIABLE)
    os.environ[_UNSAFE_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[_UNSAFE_VARIABLE]
        if before is not None:
            os.environ[_UNSAFE_VARIABLE] = before
