"""Definitions of lm-evaluation-harness' tasks: their keys, and whether they run code that a model wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftlm.errors import EvaluationError

_UNSAFE_VARIABLE = "HF_ALLOW_CODE_EVAL"


def stock_keys(path: Path, *, resolve: bool = True) -> dict[str, Any]:
    """Return the keys of a task's YAML.

    Args:
        path: the YAML file.
        resolve: import the functions that it names, rather than keep their names.
    """
    try:
        from lm_eval.tasks._yaml_loader import load_yaml
    except ModuleNotFoundError:  # versions before 0.4.11
        from lm_eval.utils import load_yaml_config

        return load_yaml_config(yaml_path=str(path), mode="full" if resolve else "simple")
    return load_yaml(path, resolve_func=resolve)


def refuse_unsafe_code(manager: Any, names: Sequence[str], *, confirmed: bool) -> None:
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
        path = entry["yaml_path"] if isinstance(entry, dict) else entry.yaml_path
        if not path or path == -1:
            continue
        if stock_keys(Path(path), resolve=False).get("unsafe_code"):
            raise EvaluationError(
                f"The task {name} runs code that the model writes, on this machine and without a sandbox: confirm it "
                "with confirm_unsafe_code: true (--confirm-unsafe-code), best in a container."
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
