"""Labelled rows of files.

They are texts or pairs with a class, a number, several labels, a tag for each word, an answer, the right one of some
choices, or two marked places and a class.

Errors contain the file and the line of the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_serializer

from graftlm.config import Config
from graftlm.data.conll import read_conll
from graftlm.data.label_reader import AnswerSpan, LabelReader, Target, split_blanks
from graftlm.data.marked_places import Mark, read_choices, read_marks
from graftlm.data.published_forms import FORM_TYPES, PAIR_FORMS, Form, check_label, read_form, read_glue
from graftlm.data.table_files import check_text, is_table, read_values
from graftlm.errors import DataError, did_you_mean, first_of
from graftlm.grafts.heads import FEWEST_LABELS, PLACES, TaskSpec, TaskType

OUTSIDE = "O"
Split = Literal["train", "test", "validation"]
Metric = Literal[
    "accuracy",
    "macro_f1",
    "matthews",
    "pearson",
    "spearman",
    "micro_f1",
    "entity_f1",
    "exact_match",
    "token_f1",
]
# The first metric of a type is the default score.
METRICS: dict[TaskType, tuple[Metric, ...]] = {
    "classification": ("accuracy", "macro_f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "multi-label": ("micro_f1", "macro_f1"),
    "tagging": ("entity_f1", "accuracy"),
    "span": ("token_f1", "exact_match"),
    "choice": ("accuracy",),
    "marked": ("accuracy", "macro_f1", "matthews"),
}
_NEW_KEYS = ("choices", "marks", "stride", "form")  # left out of serialized values while unset
_NAMED_LABELS = 3
_LISTED_LABELS = 20


class LabelledConfig(Config):
    """A task: its type, its files, and their columns."""

    type: TaskType = Field(description="What is predicted.")
    train: str | list[str] = Field(description="Training rows: CSV, TSV, JSON or parquet files, and for tagging CoNLL.")
    test: str | list[str] = Field([], description="Files of test rows, on which the report measures.")
    validation: str | list[str] = Field([], description="Files of rows for the choice of settings; also measured.")
    text: str | list[str] | None = Field(
        None,
        description="The column of the text, or the two of a pair; for span those of question and context.",
    )
    label: str | None = Field(None, description="The column of the labels; by default label, and for span answers.")
    choices: str | list[str] | None = Field(
        None, description="For choice: the column of lists of choices, by default choices, or a column for each choice."
    )
    marks: list[str] | None = Field(
        None, description="For marked: the two columns of the marked places; by default mark1 and mark2."
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="For span: longer rows are read in windows that begin this many tokens apart; unset cuts them.",
    )
    form: Form | None = Field(
        None, description="The published form of the files; except glue, it fixes text, label and columns."
    )
    columns: list[str] = Field([], description="Names of the columns of files without a header.")
    labels: list[str] = Field([], description="The classes in order; by default the sorted ones of the training rows.")
    separator: str = Field(",", min_length=1, description="The separator of several labels in one text.")
    limit: int | None = Field(None, ge=1, description="Maximum number of training rows, chosen at random.")
    seed: int = Field(0, ge=0, description="Seed of that choice.")
    metric: Metric | None = Field(None, description="The metric that is the task's score; see the table of metrics.")

    def _problems(self) -> Iterator[str]:
        names = listed(self.text)
        if self.text is not None:
            if self.type == "span" and len(names) != 2:
                yield f"the number of columns in text is {len(names)}, but a span task has two, of question and context"
            if self.type == "tagging" and len(names) != 1:
                yield f"the number of columns in text is {len(names)}, but a tagging task has one"
            if len(names) not in (1, 2):
                yield f"the number of columns in text is {len(names)}, but one, or two of a pair, are expected"
        yield from self._problems_of_inputs()
        columns = [*self.texts, *self.part_columns, self.label_column]
        if len(set(columns)) < len(columns):
            part = {"choice": ", choices", "marked": ", marks"}.get(self.type, "")
            yield f"text{part} and label name the columns {', '.join(columns)}: name each column once"
        if self.labels and self.type in ("regression", "span", "choice"):
            yield f"labels is set, but a {self.type} task has none: leave labels out"
        if self.metric is not None and self.metric not in METRICS[self.type]:
            yield f"{self.metric} is not a metric of {self.type} tasks: choose one of {', '.join(METRICS[self.type])}"

    def _problems_of_inputs(self) -> Iterator[str]:
        """Yield problems of the keys that only some types of tasks have."""
        for key, kind in (("choices", "choice"), ("marks", "marked"), ("stride", "span")):
            if getattr(self, key) is not None and self.type != kind:
                yield f"{key} is set, but only {kind} tasks use it and the type is {self.type}: leave {key} out"
        if self.marks is not None and len(self.marks) != PLACES:
            yield f"the number of columns in marks is {len(self.marks)}, but {PLACES} are expected"
        if self.choices is not None and not listed(self.choices):
            yield "choices names no column: name one of lists, or one for each choice"
        if self.form is None:
            return
        if self.type not in FORM_TYPES[self.form]:
            yield (
                f"form is {self.form}, whose rows have the type {' or '.join(FORM_TYPES[self.form])}, but the type is "
                f"{self.type}: correct one of them"
            )
        for key in ("text", "label", "columns", "choices", "marks"):
            if getattr(self, key) and self.form != "glue":
                yield f"{key} is set, but the form {self.form} has columns of its own: leave {key} or form out"

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Serialize the task without newer keys that are not set, so that earlier runs keep keys."""
        values = serialize(self)
        return {key: value for key, value in values.items() if value is not None or key not in _NEW_KEYS}

    @property
    def texts(self) -> list[str]:
        """The names of the one or two columns of text."""
        names = listed(self.text)
        if names:
            return names
        if self.type == "span":
            return ["question", "context"]
        return ["text", "text2"] if self.form in PAIR_FORMS else ["text"]

    @property
    def part_columns(self) -> list[str]:
        """The names of the columns of choices or of marked places; empty for other types."""
        if self.type == "choice":
            return listed(self.choices) or ["choices"]
        if self.type == "marked":
            return list(self.marks or ["mark1", "mark2"])
        return []

    @property
    def label_column(self) -> str:
        """The name of the column of labels."""
        if self.label:
            return self.label
        return "answers" if self.type == "span" else "label"

    def files(self, split: Split) -> list[Path]:
        """Return the files of a split, in which `~` is replaced by the home directory. They need not exist."""
        paths = {"train": self.train, "test": self.test, "validation": self.validation}
        return [Path(path).expanduser() for path in listed(paths[split])]


def listed(values: str | list[str] | None) -> list[str]:
    """Return a list of texts that a config may have as one text, or not at all."""
    if values is None:
        return []
    return [values] if isinstance(values, str) else list(values)


@dataclass(frozen=True)
class LabelledRow:
    """A row of a task.

    Attributes:
        texts: the text, or both texts of a pair; for span question and context; for tagging the words.
        target: a label, a number, the number of a choice, several labels, a tag for each word, or an answer; None for a
            row without labels.
        where: the file and the line or row, for error messages.
        choices: for choice the choices.
        marks: for marked the two marked places.
    """

    texts: tuple[str, ...]
    target: Target
    where: str
    choices: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class TaskRows:
    """The rows of a task.

    Attributes:
        spec: the specification of the task's head.
        rows: the rows.
        notes: warnings about labels with too few rows, and counts of what was skipped, as sentences.
        stride: for span, tokens from the start of a window to that of the next one; None cuts longer rows.
    """

    spec: TaskSpec
    rows: list[LabelledRow]
    notes: tuple[str, ...] = ()
    stride: int | None = None

    def __len__(self) -> int:
        return len(self.rows)


def read_training_rows(name: str, config: LabelledConfig) -> TaskRows:
    """Read the training rows of a task.

    The labels of the task and the range of its numbers are those of all rows, before `limit` selects some.

    Args:
        name: the name of the task, for error messages.
        config: the task.

    Raises:
        DataError: a file is missing or can't be read, a column is missing, a row is invalid or has a label that is not
            in `config.labels`, there is no row, there are fewer labels than the type needs, or the numbers of a
            regression task are too close for float32.
    """
    rows, skipped = _read(name, config, "train")
    spec = _build_spec(name, config, rows)
    if config.limit is not None and config.limit < len(rows):
        generator = np.random.default_rng(config.seed)
        selected = generator.choice(len(rows), config.limit, replace=False)
        rows = [rows[index] for index in sorted(selected)]
    notes = (*_label_notes(name, spec, rows), *skipped)
    return TaskRows(spec, rows, notes, config.stride)


def _build_spec(name: str, config: LabelledConfig, rows: Sequence[LabelledRow]) -> TaskSpec:
    """Return the specification of the task's head, with the labels or the range of numbers of its training rows."""
    if config.type == "regression":
        return TaskSpec(type=config.type, range=_number_range(name, rows))
    if config.type in ("span", "choice"):
        return TaskSpec(type=config.type)
    labels = config.labels
    if labels:
        _check_known(name, rows, labels, "add the label to the labels of the task")
    else:
        labels = sorted({label for row in rows for label in labels_of(row)})
    if len(labels) < FEWEST_LABELS.get(config.type, 0):
        found = f"only the label {labels[0]!r}" if labels else "no label"
        raise DataError(
            f"The task {name} has {found}, so there is nothing to learn (number of training rows: {len(rows):,}): name "
            "files with more labels, or leave the task out."
        )
    return TaskSpec(type=config.type, labels=labels)


def _number_range(name: str, rows: Sequence[LabelledRow]) -> tuple[float, float]:
    """Return the smallest and the largest number of the rows of a regression task."""
    numbers = [row.target for row in rows if isinstance(row.target, float)]
    low = min(numbers)
    high = max(numbers)
    if high - low <= 1e-5 * max(-low, high):
        raise DataError(
            f"The task {name} has numbers from {low:g} to {high:g}, whose differences are too small for float32: "
            "subtract a constant, or leave the task out."
        )
    return low, high


def read_held_out_rows(name: str, config: LabelledConfig, spec: TaskSpec, split: Split = "test") -> TaskRows:
    """Read the rows of a test or validation set.

    Args:
        name: the name of the task, for error messages.
        config: the task.
        spec: the specification of the task's head, with the labels of the training rows.
        split: which set to read.

    Raises:
        DataError: a file is missing or can't be read, a column is missing, a row is invalid or has a label that is not
            in `spec.labels`, or there is no row.
    """
    rows, skipped = _read(name, config, split)
    _check_known(name, rows, spec.labels, "train with this label")
    return TaskRows(spec, rows, tuple(skipped), config.stride)


def labels_of(row: LabelledRow) -> tuple[str, ...]:
    """Return the class of a row, its several labels, or the tags of its words.

    The result is empty for a number, a choice, an answer, or a row without labels.
    """
    if isinstance(row.target, str):
        return (row.target,)
    if isinstance(row.target, tuple) and not isinstance(row.target, AnswerSpan):
        return row.target
    return ()


def score_metric(config: LabelledConfig, spec: TaskSpec) -> Metric:
    """Return the metric that is the task's score: that of the config, or the first of `METRICS`.

    The default of a tagging task is `entity_f1` if any of its tags looks like B-PLACE, and `accuracy` otherwise.
    """
    if config.metric is not None:
        return config.metric
    if spec.type == "tagging" and not any(label[1:2] == "-" for label in spec.labels):
        return "accuracy"
    return METRICS[spec.type][0]


def _read(name: str, config: LabelledConfig, split: Split) -> tuple[list[LabelledRow], list[str]]:
    """Read all rows of a split, and notes on what was skipped."""
    skipped = Counter[str]()
    reader = LabelReader(config.type, config.label_column, config.separator)
    rows: list[LabelledRow] = []
    files = config.files(split)
    for path in files:
        if not path.is_file():
            raise DataError(f"There is no file {path}: correct the files under {split} of the task {name}.")
        rows += _read_file(path, config, reader, skipped)
    if not rows:
        where = ", ".join(str(path) for path in files) or f"its {split} names no file"
        left_out = "".join(f"; {kind} are skipped: {count:,}" for kind, count in skipped.items())
        raise DataError(
            f"The task {name} has no rows under {split} ({where}{left_out}): name a file with at least one row, or "
            "leave the task out."
        )
    notes = [
        f"The files under {split} of the task {name} have {kind} ({count:,} in all), which are skipped."
        for kind, count in skipped.items()
    ]
    return rows, notes


def _read_file(
    path: Path,
    config: LabelledConfig,
    reader: LabelReader,
    skipped: Counter[str],
) -> Iterator[LabelledRow]:
    """Yield the rows of a file, after checking their texts and targets, and count what is skipped."""
    names = [*config.texts, *config.part_columns]
    for values, where in _read_columns(path, config, skipped):
        *inputs, label = values
        row = read_inputs(config, inputs, names, where)
        if config.form not in (None, "glue"):
            check_label(label, config.form, where)
        target = reader.target(label, row.choices or row.texts, where)
        yield replace(row, target=target)


def read_inputs(config: LabelledConfig, values: Sequence[object], names: Sequence[str], where: str) -> LabelledRow:
    """Return the row of a task without a label.

    Args:
        config: the task.
        values: the texts, followed by the choices or the marked places.
        names: the columns of the values, for error messages.
        where: the location of the row, for error messages.

    Raises:
        DataError: a text is empty or not a string, or choices or marked places can't be read.
    """
    if config.type == "tagging":
        words = split_blanks(values[0], names[0], where)
        return LabelledRow(tuple(check_not_empty(word, names[0], where) for word in words), None, where)
    count = len(config.texts)
    named = zip(values[:count], names[:count], strict=True)
    texts = tuple(check_not_empty(value, name, where) for value, name in named)
    row = LabelledRow(texts, None, where)
    if config.type == "choice":
        return replace(row, choices=read_choices(values[count:], names[count:], where))
    if config.type == "marked":
        return replace(row, marks=read_marks(values[count:], names[count:], texts, where))
    return row


def input_columns(texts: Sequence[str], parts: Sequence[str], kind: str) -> dict[str, str]:
    """Return the names of columns by the config key that sets each.

    Args:
        texts: the names of the columns of texts.
        parts: the names of the columns of choices or marked places.
        kind: the type of the task.
    """
    columns: dict[str, str] = {"text": texts[0]}
    if len(texts) > 1:
        columns["text.1"] = texts[1]
    key = "choices" if kind == "choice" else "marks"
    for number, name in enumerate(parts):
        columns[key if len(parts) == 1 else f"{key}.{number}"] = name
    return columns


def _read_columns(
    path: Path,
    config: LabelledConfig,
    skipped: Counter[str],
) -> Iterator[tuple[Sequence[Any], str]]:
    """Yield the values of the columns of inputs and labels of each row, and the row's location."""
    columns = input_columns(config.texts, config.part_columns, config.type)
    columns["label"] = config.label_column
    if config.form == "glue":
        return read_glue(path, columns, config.columns, skipped)
    if config.form is not None:
        return read_form(path, config.form, skipped)
    if config.type == "tagging" and not is_table(path):
        return read_conll(path, columns, config.columns, skipped)
    return read_values(path, columns, "task", config.columns)


def check_not_empty(text: object, column: str, where: str) -> str:
    """Return a text if it has more than white space.

    Args:
        text: the value of a column, of any type.
        column: the name of the column, for error messages.
        where: the location of its row, for error messages.

    Raises:
        DataError: the value is not a string, has a lone surrogate, or has only white space.
    """
    checked = check_text(text, column, where)
    if not checked.strip():
        raise DataError(f"{where} has an empty text in the column {column!r}: fill it in, or leave the row out.")
    return checked


def _check_known(name: str, rows: Iterable[LabelledRow], labels: Sequence[str], remedy: str) -> None:
    """Raise `DataError` if a row has a label that is not one of `labels`; `remedy` is what the user can do."""
    for row in rows:
        for label in labels_of(row):
            if label not in labels:
                suggestion = did_you_mean(label, labels) if len(labels) < _LISTED_LABELS else ""
                raise DataError(
                    f"{row.where} has the label {label!r}, which is not among the labels of the task "
                    f"{name}{suggestion}: correct the row, or {remedy}."
                )


def _label_notes(name: str, spec: TaskSpec, rows: Sequence[LabelledRow]) -> Iterator[str]:
    """Yield warnings about labels with one row or none."""
    counts: Counter[str] = Counter()
    first_row: dict[str, str] = {}
    for row in rows:
        for label in labels_of(row):
            counts[label] += 1
            first_row.setdefault(label, row.where)
    single = [label for label in spec.labels if counts[label] == 1]
    if single:
        named = first_of([f"{label!r} ({first_row[label]})" for label in single], _NAMED_LABELS)
        yield f"The task {name} has labels with a single example, which is too few to learn them: {named}."
    missing = [label for label in spec.labels if not counts[label]]
    if missing:
        yield f"The task {name} has labels without an example, such as {missing[0]!r}: {len(missing)} in all."
