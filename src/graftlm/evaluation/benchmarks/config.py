"""The config of one task of lm-evaluation-harness."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pydantic import Field

from graftlm.config import Config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TAKEN = {"old", "new", "learned", "forgotten", "spill", "own_kl", "chat_kl", "new_kl", "stops", "kept_answers"}
"""Metrics of a recipe or of an audit."""


class HarnessTaskConfig(Config):
    """A task of lm-evaluation-harness, and which of its items are measured."""

    task: str = Field(min_length=1, description="A task or group, such as ifeval; see `lm-eval ls tasks`.")
    name: str | None = Field(None, description="Name of its metrics; by default the task's.")
    data: str | None = Field(None, description="A file or folder with the task's data, instead of the hub.")
    shots: int | None = Field(None, ge=0, description="Solved examples before a prompt; by default as the task.")
    limit: int | None = Field(None, ge=1, description="Most items, in equal shares of the tasks of a group.")
    seed: int | None = Field(None, ge=0, description="Draws these items; by default they are the first.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of an answer; by default as the task.")
    chat: bool | None = Field(
        None, description="Ask in the chat template; by default IFEval is, if there is a template, and no other task."
    )
    cloze: bool = Field(
        False,
        description="Score the text of each answer as the continuation of the question, normalised by length, also "
        "where the task scores letters.",
    )

    @property
    def label(self) -> str:
        """The name of the task's metrics."""
        return self.name or (f"{self.task}_cloze" if self.cloze else self.task)

    def _problems(self) -> Iterator[str]:
        if not _NAME.fullmatch(self.label):
            yield f"the name {self.label!r} can't be used for metrics: use letters, digits, _, - and ."
        if self.label in _TAKEN:
            yield f"the name {self.label} is that of another metric: choose another"


def duplicate_problem(tasks: Sequence[HarnessTaskConfig]) -> str | None:
    """Return a clause about two tasks whose metrics would have one name; None if there are none."""
    labels = [task.label for task in tasks]
    for label in labels:
        if labels.count(label) > 1:
            return f"harness measures {label} twice: leave one out, or give it another name"
    return None
