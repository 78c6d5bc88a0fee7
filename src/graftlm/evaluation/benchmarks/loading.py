"""Load tasks of lm-evaluation-harness with the items that are measured."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

from graftlm.errors import EvaluationError, first_line
from graftlm.evaluation.benchmarks.cloze import cloze_keys
from graftlm.evaluation.benchmarks.config import HarnessTaskConfig
from graftlm.evaluation.benchmarks.ifeval import is_checkable, offline_checker
from graftlm.evaluation.benchmarks.local_files import LocalTask, read_local_tasks
from graftlm.evaluation.harness import check_task_names, quiet_harness
from graftlm.evaluation.harness_tasks import (
    PURPOSE,
    allowed_code,
    refuse_unsafe_code,
    stock_keys,
    task_manager,
    unsafe_code_error,
)
from graftlm.evaluation.harness_types import StockTask, TaskIndex, Values
from graftlm.evaluation.reachable_hub import HubState, offline_if_unreachable
from graftlm.files.extras import import_extra

_IFEVAL = "ifeval"
_TEST = "test"
_SHOTS = "train"
_NO_HUB: dict[HubState, tuple[str, str]] = {
    "offline mode": ("it was not fetched before, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE once"),
    "unreachable": ("the Hugging Face hub can't be reached", "connect to the hub"),
}
"""By the state of the hub, why data is missing and what to do."""


@dataclass(frozen=True)
class ChosenTask:
    """A task with its items.

    Attributes:
        task: the task.
        items: the numbers of the items that are measured, in rising order.
        examples: number of solved examples that can be shown.
    """

    task: StockTask
    items: list[int]
    examples: int


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that is ready to be measured.

    Attributes:
        config: its config.
        tasks: its tasks: one, or those of a group, each with at least one item.
        left_out: number of items that can't be scored.
        runs_code: whether its metrics may execute code that the model writes.
    """

    config: HarnessTaskConfig
    tasks: list[ChosenTask]
    left_out: int = 0
    runs_code: bool = False

    @property
    def label(self) -> str:
        """The name of its metrics."""
        return self.config.label

    @property
    def is_chat(self) -> bool | None:
        """Whether it is asked in the chat template; None if it is where there is a template."""
        if self.config.chat is None and self.config.task == _IFEVAL:
            return None
        return bool(self.config.chat)


def load_benchmarks(configs: Sequence[HarnessTaskConfig], *, confirm_unsafe_code: bool = False) -> list[Benchmark]:
    """Load benchmarks: from local files where a config names them, else from the hub or its cache.

    Args:
        configs: what to load.
        confirm_unsafe_code: whether tasks that run generated code are loaded.

    Raises:
        MissingExtraError: lm-eval is not installed.
        DataError: local data can't be read.
        EvaluationError: a task is unknown or runs generated code without confirmation, its data is on the hub and the
            hub can't be reached, or there are fewer examples than shots.
    """
    if not configs:
        return []
    import_extra("harness", "lm_eval", PURPOSE)
    with quiet_harness(), allowed_code(allow=confirm_unsafe_code):
        return [_load(config, confirm_unsafe_code) for config in configs]


def _load(config: HarnessTaskConfig, confirm_unsafe_code: bool) -> Benchmark:
    if config.data is None:
        benchmark = _load_from_hub(config, confirm_unsafe_code)
    else:
        benchmark = _load_local(config, config.data)
    for chosen in benchmark.tasks:
        _set_up(chosen, config)
    return benchmark


def _set_up(chosen: ChosenTask, config: HarnessTaskConfig) -> None:
    """Set the shots and the length of answers."""
    task = chosen.task
    shots = config.shots if config.shots is not None else (task.config.num_fewshot or 0)
    task.set_config("num_fewshot", shots)
    if config.max_tokens is not None and task.OUTPUT_TYPE == "generate_until":
        others = {key: value for key, value in (task.config.generation_kwargs or {}).items() if "max_" not in key}
        task.set_config("generation_kwargs", others | {"max_gen_toks": config.max_tokens})
    if shots > chosen.examples:
        raise _shots_error(config, chosen.examples)


def _shots_error(config: HarnessTaskConfig, most: int) -> EvaluationError:
    return EvaluationError(
        f"{config.label} is to be asked with {config.shots} shots, but its data has {most} solved examples that are "
        "not measured: lower shots."
    )


def _load_local(config: HarnessTaskConfig, data: str) -> Benchmark:
    sources = [_LocalSource(local, config) for local in read_local_tasks(config.task, data)]
    left_out = sum(source.left_out for source in sources)
    if not any(source.rows for source in sources):
        raise EvaluationError(f"The data of {config.label} has no items that can be scored: name other data.")
    _check_limit(config, len(sources))
    items = choose_items([source.most_items for source in sources], config.limit, config.seed)
    tasks = [source.task(chosen) for source, chosen in zip(sources, items, strict=True) if chosen]
    if not tasks:
        largest = max(len(source.rows) for source in sources)
        raise _shots_error(config, largest - 1)
    return Benchmark(config, tasks, left_out)


class _LocalSource:
    """The rows of a task, and its definition in the harness.

    Args:
        local: the rows.
        config: the config of the benchmark.

    Attributes:
        rows: the rows that can be scored.
        left_out: number of other rows.
        most_items: number of rows that can be measured; without a file of solved examples, some are kept for them.
    """

    def __init__(self, local: LocalTask, config: HarnessTaskConfig) -> None:
        self.local = local
        self.rows = _scorable(local.rows, config.task)
        self.left_out = len(local.rows) - len(self.rows)
        tasks = Path(import_extra("harness", "lm_eval.tasks", PURPOSE).__file__).parent
        with offline_checker():
            self.keys = stock_keys(tasks / local.definition)
        for key in ("group", "tag", "task_list"):
            self.keys.pop(key, None)
        if config.cloze:
            self.keys |= cloze_keys(self.rows[0], config.task)
        shots = self.keys.get("num_fewshot") if config.shots is None else config.shots
        kept = 0 if local.shots or _own_examples(self.keys) else shots or 0
        self.most_items = max(len(self.rows) - kept, 0)

    def task(self, items: Sequence[int]) -> ChosenTask:
        """Return the stock task over the rows of these numbers, with others for solved examples."""
        chosen = set(items)
        measured = [self.rows[number] for number in items]
        shown = self.local.shots or [row for number, row in enumerate(self.rows) if number not in chosen]
        task = _task_of(self.keys, {_TEST: measured, _SHOTS: shown})
        return ChosenTask(task, list(range(len(measured))), len(_own_examples(self.keys) or shown))


def _scorable(rows: list[Values], task: str) -> list[Values]:
    return [row for row in rows if is_checkable(row)] if task == _IFEVAL else rows


def _check_limit(config: HarnessTaskConfig, tasks: int) -> None:
    """Raise `EvaluationError` if a limit leaves some tasks of a group without an item."""
    if config.limit is not None and config.limit < tasks:
        raise EvaluationError(
            f"The limit of {config.label} is {config.limit}, but the group has {tasks} tasks, of which each needs an "
            f"item: raise the limit to at least {tasks}, or name single tasks."
        )


def choose_items(sizes: Sequence[int], limit: int | None, seed: int | None) -> list[list[int]]:
    """Return the numbers of the items that are measured of each task of a benchmark, in rising order.

    Args:
        sizes: number of items of each task.
        limit: most items in all, in equal shares of the tasks; None takes all.
        seed: draws the items of each task; None takes the first.
    """
    chosen = []
    for number, size in enumerate(sizes):
        share = size
        if limit is not None:
            share = min(size, limit // len(sizes) + (number < limit % len(sizes)))
        numbers = list(range(size))
        if seed is not None:
            numbers = random.Random(seed).sample(numbers, share)
        chosen.append(sorted(numbers[:share]))
    return chosen


def _own_examples(keys: Values) -> Sequence[Values]:
    """Return the solved examples that a task's YAML has itself."""
    samples = (keys.get("fewshot_config") or {}).get("samples") or ()
    return cast("Sequence[Values]", samples() if callable(samples) else samples)


def _task_of(keys: Values, splits: Mapping[str, Sequence[Values]]) -> StockTask:
    """Return a task of the harness over rows in memory.

    Args:
        keys: the keys of the task, as in its YAML.
        splits: rows by split, `test` and `train`; the train split may be empty.
    """
    import datasets

    from_harness = import_extra("harness", "lm_eval.api.task", PURPOSE)
    filled = datasets.DatasetDict()
    for name, rows in splits.items():
        if rows:
            filled[name] = datasets.Dataset.from_list(list(rows))
    shots = _SHOTS if _SHOTS in filled else None
    changed: Values = {
        "custom_dataset": lambda **_: filled,
        "test_split": _TEST,
        "validation_split": None,
        "training_split": shots,
        "fewshot_split": None if _own_examples(keys) else shots,
    }
    return from_harness.ConfigurableTask(config=keys | changed)


def _load_from_hub(config: HarnessTaskConfig, confirm_unsafe_code: bool) -> Benchmark:
    task_index = import_extra("harness", "lm_eval.tasks", PURPOSE)
    manager = task_manager([config.task])
    check_task_names([config.task], manager.all_tasks)
    refuse_unsafe_code(manager, [config.task], confirmed=confirm_unsafe_code)
    tasks = _stock_tasks(task_index, manager, config, confirm_unsafe_code)
    _check_limit(config, len(tasks))
    left_out = 0
    scorable = []
    for task in tasks:
        rows = list(task.eval_docs)
        numbers = [n for n, row in enumerate(rows) if config.task != _IFEVAL or is_checkable(row)]
        left_out += len(rows) - len(numbers)
        scorable.append(numbers)
    chosen = choose_items([len(numbers) for numbers in scorable], config.limit, config.seed)
    kept = []
    for task, numbers, items in zip(tasks, scorable, chosen, strict=True):
        if items:
            examples = len(list(task.fewshot_docs() or ()))
            kept.append(ChosenTask(task, [numbers[item] for item in items], examples))
    return Benchmark(config, kept, left_out, runs_code=confirm_unsafe_code)


def _stock_tasks(
    task_index: ModuleType, manager: TaskIndex, config: HarnessTaskConfig, confirm_unsafe_code: bool
) -> list[StockTask]:
    """Return the tasks of a name, with their data from the hub or its cache."""
    with offline_if_unreachable() as hub, offline_checker():
        try:
            found = _loaded(task_index, manager, config.task)
        except ModuleNotFoundError as error:
            raise EvaluationError(
                f"The task {config.task} needs the package {error.name}, which is not installed: install it, or name "
                "its data with the key data."
            ) from error
        except (OSError, ValueError) as error:
            problem, remedy = _NO_HUB.get(hub, (first_line(error), "connect to the hub"))
            raise EvaluationError(
                f"The data of the task {config.task} can't be loaded ({problem}): {remedy}, or name a local copy with "
                "the key data."
            ) from error
    for task in found:
        if getattr(task, "UNSAFE_CODE", False) and not confirm_unsafe_code:
            raise unsafe_code_error(config.task)
    return [_as_cloze(task, config.task) for task in found] if config.cloze else found


def _loaded(task_index: ModuleType, manager: TaskIndex, name: str) -> list[StockTask]:
    load = getattr(manager, "load", None)
    if load is not None:
        return list(load([name])["tasks"].values())
    return _flat(task_index.get_task_dict([name], manager))  # versions before 0.4.11


def _flat(tasks: Mapping[object, object]) -> list[StockTask]:
    """Return the tasks of a nested mapping of groups."""
    found = []
    for value in tasks.values():
        found += _flat(value) if isinstance(value, Mapping) else [value]
    return found


def _as_cloze(task: StockTask, name: str) -> StockTask:
    """Return a task that scores the texts of the answers of another task's rows."""
    rows = list(task.eval_docs)
    keys = {"task": task.config.task, "num_fewshot": task.config.num_fewshot} | cloze_keys(rows[0], name)
    return _task_of(keys, {_TEST: rows, _SHOTS: list(task.fewshot_docs() or [])})
