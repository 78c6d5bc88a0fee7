"""Rows with labels, out of files: texts or pairs with a class, a number or several labels, tagged words, answers.

Labels are text always: a number in a file is its digits. Every row that does not fit is named by its file and line.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from graftlm.config import Config
from graftlm.data.conll import read_conll
from graftlm.data.labels import LabelReader, read_number, read_several
from graftlm.data.tables import check_text, is_table, read_values
from graftlm.errors import DataError, did_you_mean
from graftlm.grafts.heads import TaskSpec, TaskType

OUTSIDE = "O"
Metric = Literal[
    "accuracy", "macro_f1", "matthews", "pearson", "spearman", "micro_f1", "entity_f1", "exact_match", "token_f1"
]
METRICS: dict[TaskType, tuple[Metric, ...]] = {  # of each type, that which counts unless a task says otherwise first
    "classification": ("accuracy", "macro_f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "multi-label": ("micro_f1", "macro_f1"),
    "tagging": ("entity_f1", "accuracy"),
    "span": ("token_f1", "exact_match"),
}
_FEWEST: dict[TaskType, int] = {"classification": 2, "tagging": 2, "multi-label": 1}
_NAMED = 3  # labels that a note names


class LabelledConfig(Config):
    """A task: its type, its files, and which of their columns say what."""

    type: TaskType = Field(description="What is predicted.")
    train: str | list[str] = Field(
        description="Files of rows to learn from: CSV, TSV, JSON, parquet; for tagging CoNLL as well."
    )
    test: str | list[str] = Field([], description="Files of rows that the report measures on.")
    validation: str | list[str] = Field([], description="Files of rows to choose settings by; measured as well.")
    text: str | list[str] | None = Field(
        None, description="The column of text, or the two of a pair; for span those of question and context."
    )
    label: str | None = Field(None, description="The column of what is predicted: by default label, for span answers.")
    columns: list[str] = Field([], description="Names of the columns, for files without a header.")
    labels: list[str] = Field([], description="The classes in order; by default those of the training rows, sorted.")
    separator: str = Field(",", min_length=1, description="What stands between several labels in one text.")
    limit: int | None = Field(None, ge=1, description="Learn from at most so many rows, chosen at random.")
    seed: int = Field(0, ge=0, description="Of that choice.")
    metric: Metric | None = Field(None, description="Which metric is the task's score; see the table of metrics.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [self.text] if isinstance(self.text, str) else list(self.text or [])
        if self.text is not None and (not 1 <= len(names) <= 2 or (self.type == "span" and len(names) == 1)):
            raise ValueError("text names one column, or two of a pair; for span those of question and context")
        if self.type == "tagging" and len(names) > 1:
            raise ValueError("a tagging task has one text: name one column")
        if len({*names, self.label}) <= len(names):
            raise ValueError("text and label name one column twice: name each once")
        if self.labels and self.type in ("regression", "span"):
            raise ValueError(f"a {self.type} task has no labels: leave them out")
        if self.metric is not None and self.metric not in METRICS[self.type]:
            raise ValueError(
                f"the metrics of {self.type} are {', '.join(METRICS[self.type])}, and {self.metric} is none"
            )
        return self

    @property
    def texts(self) -> list[str]:
        """The columns of text: one, or two."""
        if self.text is None:
            return ["question", "context"] if self.type == "span" else ["text"]
        return [self.text] if isinstance(self.text, str) else list(self.text)

    @property
    def label_column(self) -> str:
        """The column of labels."""
        return self.label or ("answers" if self.type == "span" else "label")

    def files(self, split: Literal["train", "test", "validation"]) -> list[Path]:
        """The files of one split."""
        given = getattr(self, split)
        return [Path(path).expanduser() for path in ([given] if isinstance(given, str) else given)]


class Span(NamedTuple):
    """An answer in a context: its first character and the one behind its last, and every text that counts as right."""

    start: int
    end: int
    answers: tuple[str, ...]


Target = str | float | tuple[str, ...] | Span | None


@dataclass(frozen=True)
class LabelledRow:
    """One row.

    Attributes:
        texts: the text, or both of a pair; of span question and context; of tagging the words.
        target: a label, a number, several labels, a tag for each word, or a span; None of a row without labels.
        where: file and line, for messages.
    """

    texts: tuple[str, ...]
    target: Target
    where: str


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task, and what its head has to say.

    Attributes:
        notes: what a user should know of them, a sentence each.
    """

    spec: TaskSpec
    rows: list[LabelledRow]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def fingerprint(self) -> str:
        """SHA-256 over what the rows say."""
        said = repr((self.spec, [(row.texts, row.target) for row in self.rows]))
        return hashlib.sha256(said.encode()).hexdigest()


def read_training_rows(name: str, config: LabelledConfig) -> TaskRows:
    """The rows that a task learns from; its labels are those of all rows, of which `limit` then takes some.

    Raises:
        DataError: a row does not fit, or there is none, or too few classes.
    """
    rows = _read(name, config, "train")
    if config.labels:
        _check_known(name, rows, config.labels, "not among the task's labels")
    labels = config.labels or sorted({label for row in rows for label in labels_of(row)})
    if len(labels) < _FEWEST.get(config.type, 0):
        raise DataError(
            f"The task {name} has {f'the one label {labels[0]!r}' if labels else 'no label'} in all of its "
            f"{len(rows):,} rows, and there is nothing to tell apart: name files with more, or leave the task out."
        )
    spec = TaskSpec(type=config.type, labels=labels if config.type not in ("regression", "span") else [])
    chosen = _limited(rows, config)
    return TaskRows(spec, chosen, tuple(_notes(name, spec, chosen)))


def read_held_out_rows(
    name: str, config: LabelledConfig, spec: TaskSpec, split: Literal["test", "validation"] = "test"
) -> TaskRows:
    """The rows of a test or validation set.

    Raises:
        DataError: a row does not fit, or has a label that the task does not know, or there is none.
    """
    rows = _read(name, config, split)
    _check_known(name, rows, spec.labels, "not seen in training")
    return TaskRows(spec, rows)


def labels_of(row: LabelledRow) -> tuple[str, ...]:
    """The labels that a row has: one, several, or none; of tagging those of its words."""
    if isinstance(row.target, str):
        return (row.target,)
    return row.target if isinstance(row.target, tuple) and not isinstance(row.target, Span) else ()


def score_metric(config: LabelledConfig, spec: TaskSpec) -> Metric:
    """Which metric is a task's score: entities count where tags are of the form B-PLACE, and else words."""
    if config.metric is None and spec.type == "tagging" and not any(label[1:2] == "-" for label in spec.labels):
        return "accuracy"
    return config.metric or METRICS[spec.type][0]


def _read(name: str, config: LabelledConfig, split: Literal["train", "test", "validation"]) -> list[LabelledRow]:
    reader = LabelReader(config.label_column)
    rows: list[LabelledRow] = []
    files = config.files(split)
    for path in files:
        if not path.is_file():
            raise DataError(f"There is no file {path}: check {split} of the task {name}.")
        rows += _read_file(path, config, reader)
    if not rows:
        where = ", ".join(map(str, files)) or f"its {split} names no file"
        raise DataError(f"The task {name} has no rows ({where}): name a file with at least one, or leave it out.")
    return rows


def _read_file(path: Path, config: LabelledConfig, reader: LabelReader) -> Iterator[LabelledRow]:
    columns = {"text": config.texts[0]} | ({"text.1": config.texts[1]} if len(config.texts) > 1 else {})
    columns["label"] = config.label_column
    if config.type == "tagging" and not is_table(path):
        for words, tags, where in read_conll(path, columns, config.columns):
            yield LabelledRow(tuple(words), tuple(reader.read(tag, where) for tag in tags), where)
        return
    for (*texts, label), where in read_values(path, columns, "task", config.columns):
        if config.type == "tagging":
            yield _tagged(texts[0], label, config, reader, where)
            continue
        whole = tuple(_filled(text, name, where) for text, name in zip(texts, config.texts, strict=True))
        yield LabelledRow(whole, _target(label, whole, config, reader, where), where)


def _target(label: Any, texts: Sequence[str], config: LabelledConfig, reader: LabelReader, where: str) -> Target:
    if config.type == "classification":
        return reader.read(label, where)
    if config.type == "regression":
        return read_number(label, config.label_column, where)
    if config.type == "multi-label":
        return read_several(label, reader, config.separator, where)
    return read_span(label, texts[1], config.label_column, where)


def _tagged(words: Any, tags: Any, config: LabelledConfig, reader: LabelReader, where: str) -> LabelledRow:
    """A row of a table: lists of words and tags, or texts with blanks between them."""
    found = tuple(_filled(word, config.texts[0], where) for word in _parts(words, config.texts[0], where))
    given = [reader.read(tag, where) for tag in _parts(tags, config.label_column, where)]
    if len(given) != len(found) or not found:
        raise DataError(
            f"{where} has {len(found)} words and {len(given)} tags, but as many of both, and at least one, are "
            "expected: correct the row."
        )
    return LabelledRow(found, tuple(given), where)


def _parts(value: Any, column: str, where: str) -> list[Any]:
    """A list, or what stands between the blanks of a text."""
    if not isinstance(value, str | list):
        found = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise DataError(f"{where} has {found} in the column {column!r}, but a list or a text is expected.")
    return value.split() if isinstance(value, str) else value


def _filled(text: Any, column: str, where: str) -> str:
    """A text that says something."""
    if not check_text(text, column, where).strip():
        raise DataError(f"{where} has an empty text in the column {column!r}: fill it in, or leave the row out.")
    return text


def read_span(value: Any, context: str, column: str, where: str) -> Span:
    """An answer: a text that stands in the context, a list of them, or SQuAD's {text: [...], answer_start: [...]}.

    The first one is learned; without a start it is where the context has it first.

    Raises:
        DataError: there is no answer, or the context does not have it.
    """
    starts: list[Any] = []
    if isinstance(value, dict):
        value, starts = value.get("text"), list(value.get("answer_start") or [])
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) and one.strip() for one in answers):
        raise DataError(
            f"{where} has no answer in the column {column!r}: give a text that stands in the context, or leave the row "
            "out."
        )
    start = starts[0] if starts else context.find(answers[0])
    if not isinstance(start, int) or start < 0 or context[start : start + len(answers[0])] != answers[0]:
        there = f"at character {start}" if starts else "anywhere"
        raise DataError(
            f"{where} has the answer {answers[0][:60]!r}, which does not stand in its context {there}: correct the row."
        )
    return Span(start, start + len(answers[0]), tuple(answers))


def _check_known(name: str, rows: Iterable[LabelledRow], labels: Sequence[str], why: str) -> None:
    known = set(labels)
    for row in rows:
        for label in labels_of(row):
            if label not in known:
                raise DataError(
                    f"{row.where} has the label {label!r}, which is {why} of the task {name}"
                    f"{did_you_mean(label, labels) if len(labels) < 20 else ''}: correct the row, or train with it."
                )


def _limited(rows: list[LabelledRow], config: LabelledConfig) -> list[LabelledRow]:
    if config.limit is None or config.limit >= len(rows):
        return rows
    chosen = np.random.default_rng(config.seed).choice(len(rows), config.limit, replace=False)
    return [rows[place] for place in sorted(chosen)]


def _notes(name: str, spec: TaskSpec, rows: Sequence[LabelledRow]) -> Iterator[str]:
    counts = Counter(label for row in rows for label in labels_of(row))
    where = {label: row.where for row in reversed(rows) for label in labels_of(row)}
    once = [label for label in spec.labels if counts[label] == 1]
    if once:
        named = ", ".join(f"{label!r} ({where[label]})" for label in once[:_NAMED])
        more = f" and {len(once) - _NAMED} more" if len(once) > _NAMED else ""
        yield (
            f"The task {name} has {len(once)} labels with one example, {named}{more}: "
            "what is learned of them is left to chance."
        )
    if never := [label for label in spec.labels if not counts[label]]:
        yield f"The task {name} has {len(never)} labels without any example, such as {never[0]!r}."
