"""`Measurement`: the measured result of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from graftlm.data.mixture import SourceRead
from graftlm.evaluation.results import Row


class TrainingDetails(TypedDict):
    """What a report says about a training, as plain JSON values.

    Attributes:
        learning_rate: the highest learning rate.
        steps: number of updates of the weights.
        rows_per_step: number of rows of a step.
        read: how much of each source was read.
    """

    learning_rate: float
    steps: int
    rows_per_step: int
    read: list[SourceRead]


class FrozenModel(TypedDict):
    """Another model that a graft reads, as plain JSON values.

    Attributes:
        name: its name in the graft.
        model: its name as a model, or its folder.
        parameters: number of its parameters.
        row: its row in the report.
        problem: why it has no row.
    """

    name: str
    model: str
    parameters: int
    row: NotRequired[dict[str, object]]
    problem: NotRequired[str]


@dataclass
class Measurement:
    """The measured result of one run.

    Attributes:
        row: its metrics as a row of a report.
        details: further plain JSON values, such as `statistics`, `losses` and `tasks`.
    """

    row: Row
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the measurement as plain JSON values."""
        return {"row": self.row.model_dump(mode="json"), "details": self.details}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measurement:
        """Make a measurement from the values that `to_json` returned.

        Raises:
            KeyError: the row or the details are missing.
            ValueError: the row is invalid.
        """
        return cls(row=Row.model_validate(values["row"]), details=dict(values["details"]))

    def add_metrics(self, metrics: Mapping[str, object]) -> None:
        """Add metrics to the row by name; they replace metrics of the same name."""
        self.row = self.row.model_copy(update={"metrics": {**self.row.metrics, **metrics}})
