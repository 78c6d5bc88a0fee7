"""What is used of the objects of lm-evaluation-harness, which is an optional package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Values: TypeAlias = dict[str, Any]
"""A row of a benchmark's data, or the keys of a task's YAML."""


class Request(Protocol):
    """One question to a model: a text to continue, or a continuation to score."""

    request_type: str
    doc: Values
    args: tuple[str, Values]
    idx: int
    doc_id: int
    repeats: int | None
    resps: list[object]
    filtered_resps: Mapping[str, object]


class TaskSettings(Protocol):
    """The config of a task."""

    task: str
    num_fewshot: int | None
    generation_kwargs: Values | None


class StockTask(Protocol):
    """A task."""

    config: TaskSettings
    eval_docs: Sequence[Values]
    instances: list[Request]
    OUTPUT_TYPE: str

    def fewshot_docs(self) -> Sequence[Values] | None: ...
    def set_config(self, key: str, value: object, update: bool = False) -> None: ...
    def set_fewshot_seed(self, seed: int | None = None) -> None: ...
    def build_all_requests(self, **options: object) -> None: ...
    def apply_filters(self) -> object: ...
    def process_results(self, doc: Values, results: Sequence[object]) -> Mapping[str, object]: ...


class TaskIndex(Protocol):
    """The index of tasks by name."""

    all_tasks: Sequence[str]
    task_index: Mapping[str, object]


class HarnessModel(Protocol):
    """A model that answers requests."""

    tokenizer_name: str
    apply_chat_template: Callable[..., str]
