"""Labelled rows out of files: texts or pairs with a class, a number or several labels, tagged words, answer spans.

Labels are always text; a number in a file becomes its digits. An error names the file and line of a row.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from graftlm.config import Config
from graftlm.data.table_files import check_columns, check_text, is_table, read_values, type_name
from graftlm.errors import DataError, did_you_mean
from graftlm.files.reading import read_text
from graftlm.grafts.heads import FEWEST_LABELS, TaskSpec, TaskType

OUTSIDE = "O"
Split = Literal["train", "test", "validation"]
Metric = Literal[
    "accuracy", "macro_f1", "matthews", "pearson", "spearman", "micro_f1", "entity_f1", "exact_match", "token_f1"
]
METRICS: dict[TaskType, tuple[Metric, ...]] = {  # the first of each type is the score by default
    "classification": ("accuracy", "macro_f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "multi-label": ("micro_f1", "macro_f1"),
    "tagging": ("entity_f1", "accuracy"),
    "span": ("token_f1", "exact_match"),
}
_NAMED_LABELS = 3  # labels that a note names


class LabelledConfig(Config):
    """A task: its type, its files, and the meaning of their columns."""

    type: TaskType = Field(description="What is predicted.")
    train: str | list[str] = Field(description="Training rows: CSV, TSV, JSON, parquet; for tagging CoNLL as well.")
    test: str | list[str] = Field([], description="Files of rows that the report measures on.")
    validation: str | list[str] = Field([], description="Files of rows to choose settings by; measured as well.")
    text: str | list[str] | None = Field(
        None, description="The column of text, or the two of a pair; for span those of question and context."
    )
    label: str | None = Field(None, description="The column of what is predicted: by default label, for span answers.")
    columns: list[str] = Field([], description="Names of the columns, for files without a header.")
    labels: list[str] = Field([], description="The classes in order; by default those of the training rows, sorted.")
    separator: str = Field(",", min_length=1, description="The separator of several labels in one text.")
    limit: int | None = Field(None, ge=1, description="Maximum number of training rows, chosen at random.")
    seed: int = Field(0, ge=0, description="Seed of that choice.")
    metric: Metric | None = Field(None, description="Which metric is the task's score; see the table of metrics.")

    def _problems(self) -> Iterator[str]:
        names = _listed(self.text)
        if self.text is not None and (not 1 <= len(names) <= 2 or (self.type == "span" and len(names) == 1)):
            yield "text names one column, or two of a pair; for span those of question and context"
        if self.type == "tagging" and len(names) > 1:
            yield "a tagging task has one text: name one column"
        if len({*self.texts, self.label_column}) <= len(self.texts):
            yield "text and label name one column twice: name each once"
        if self.labels and self.type in ("regression", "span"):
            yield f"a {self.type} task has no labels: leave them out"
        if self.metric is not None and self.metric not in METRICS[self.type]:
            yield f"{self.metric} is no metric of {self.type}: choose {', '.join(METRICS[self.type])}"

    @property
    def texts(self) -> list[str]:
        """The columns of text: one, or two."""
        return _listed(self.text) or (["question", "context"] if self.type == "span" else ["text"])

    @property
    def label_column(self) -> str:
        """The column of labels."""
        return self.label or ("answers" if self.type == "span" else "label")

    def files(self, split: Split) -> list[Path]:
        """The files of one split."""
        return [Path(path).expanduser() for path in _listed(getattr(self, split))]


def _listed(values: str | list[str] | None) -> list[str]:
    return [values] if isinstance(values, str) else list(values or [])


class AnswerSpan(NamedTuple):
    """An answer in a context: the range of its characters, and all texts that count as right."""

    start: int
    end: int
    answers: tuple[str, ...]


Target = str | float | tuple[str, ...] | AnswerSpan | None


@dataclass(frozen=True)
class LabelledRow:
    """One row.

    Attributes:
        texts: the text, or both of a pair; for span question and context; for tagging the words.
        target: a label, a number, several labels, a tag per word, or a span; None for a row without labels.
        where: file and line, for messages.
    """

    texts: tuple[str, ...]
    target: Target
    where: str


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task, the specification of its head, and `notes`: warnings for the user, a sentence each."""

    spec: TaskSpec
    rows: list[LabelledRow]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)


def read_training_rows(name: str, config: LabelledConfig) -> TaskRows:
    """The training rows of a task; its labels are those of all rows, before `limit` selects some.

    Raises DataError if a row is invalid, or there are too few rows or classes.
    """
    rows = _read(name, config, "train")
    if config.labels:
        _check_known(name, rows, config.labels, "not among the task's labels")
    labels = config.labels or sorted({label for row in rows for label in labels_of(row)})
    if len(labels) < FEWEST_LABELS.get(config.type, 0):
        raise DataError(
            f"The task {name} has {f'the one label {labels[0]!r}' if labels else 'no label'} in all of its "
            f"{len(rows):,} rows, and there is nothing to tell apart: name files with more, or leave the task out."
        )
    spec = TaskSpec(type=config.type, labels=labels if config.type not in ("regression", "span") else [])
    numbers = [float(row.target) for row in rows if isinstance(row.target, float)]
    if numbers:
        low, high = min(numbers), max(numbers)
        if high - low <= 1e-5 * max(-low, high):
            why = f"The task {name} has numbers from {low:g} to {high:g}, which float32 hardly tells apart"
            raise DataError(f"{why}: subtract what they have in common, or leave the task out.")
        spec = spec.model_copy(update={"range": (low, high)})
    if config.limit is not None and config.limit < len(rows):
        selected = np.random.default_rng(config.seed).choice(len(rows), config.limit, replace=False)
        rows = [rows[index] for index in sorted(selected)]
    return TaskRows(spec, rows, tuple(_notes(name, spec, rows)))


def read_held_out_rows(name: str, config: LabelledConfig, spec: TaskSpec, split: Split = "test") -> TaskRows:
    """The rows of a test or validation set; DataError if there is none, one is invalid or has an unknown label."""
    rows = _read(name, config, split)
    _check_known(name, rows, spec.labels, "not seen in training")
    return TaskRows(spec, rows)


def labels_of(row: LabelledRow) -> tuple[str, ...]:
    """The labels of a row: one, several, or none; for tagging those of its words."""
    if isinstance(row.target, str):
        return (row.target,)
    return row.target if isinstance(row.target, tuple) and not isinstance(row.target, AnswerSpan) else ()


def score_metric(config: LabelledConfig, spec: TaskSpec) -> Metric:
    """The metric that is a task's score. Tagging counts entities where tags look like B-PLACE, else words."""
    if config.metric is None and spec.type == "tagging" and not any(label[1:2] == "-" for label in spec.labels):
        return "accuracy"
    return config.metric or METRICS[spec.type][0]


def _read(name: str, config: LabelledConfig, split: Split) -> list[LabelledRow]:
    reader = LabelReader(config)
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
    names = config.texts
    columns = dict(zip(("text", "text.1"), names, strict=False)) | {"label": config.label_column}
    tagging = config.type == "tagging"
    conll = tagging and not is_table(path)
    rows = read_conll(path, columns, config.columns) if conll else read_values(path, columns, "task", config.columns)
    for (*values, label), where in rows:
        if tagging:
            values = _split_blanks(values[0], names[0], where)
        text_names = names * len(values) if tagging else names
        texts = tuple(check_not_empty(value, name, where) for value, name in zip(values, text_names, strict=True))
        yield LabelledRow(texts, reader.target(label, texts, where), where)


def _split_blanks(value: Any, column: str, where: str) -> list[Any]:
    if not isinstance(value, str | list):
        raise DataError(f"{where} has {type_name(value)} in the column {column!r}, but a list or a text is expected.")
    return value.split() if isinstance(value, str) else value


def check_not_empty(text: Any, column: str, where: str) -> str:
    """Return a text that is more than white space; else raise `DataError`."""
    if not check_text(text, column, where).strip():
        raise DataError(f"{where} has an empty text in the column {column!r}: fill it in, or leave the row out.")
    return text


def answer_span(value: Any, context: str, column: str, where: str) -> AnswerSpan:
    """The span of an answer: a text that occurs in the context, a list of them, or SQuAD's {text, answer_start}.

    The first answer is learned; without a start, its first occurrence in the context counts.

    Raises DataError if there is no answer, or it does not occur in the context.
    """
    starts: list[Any] = []
    if isinstance(value, dict):
        value, starts = value.get("text"), list(value.get("answer_start") or [])
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise DataError(
            f"{where} has no answer in the column {column!r}: give a text that stands in the context, or leave the row "
            "out."
        )
    start = starts[0] if starts else context.find(answers[0])
    if not isinstance(start, int) or start < 0 or context[start : start + len(answers[0])] != answers[0]:
        position = f"at character {start}" if starts else "anywhere"
        raise DataError(
            f"{where} has the answer {answers[0][:60]!r}, which does not stand in its context {position}: correct the "
            "row."
        )
    return AnswerSpan(start, start + len(answers[0]), tuple(answers))


def _check_known(name: str, rows: Iterable[LabelledRow], labels: Sequence[str], why: str) -> None:
    for row in rows:
        if unknown := [label for label in labels_of(row) if label not in labels]:
            raise DataError(
                f"{row.where} has the label {unknown[0]!r}, which is {why} of the task {name}"
                f"{did_you_mean(unknown[0], labels) if len(labels) < 20 else ''}: correct the row, or train with it."
            )


def _notes(name: str, spec: TaskSpec, rows: Sequence[LabelledRow]) -> Iterator[str]:
    counts = Counter(label for row in rows for label in labels_of(row))
    where = {label: row.where for row in reversed(rows) for label in labels_of(row)}
    if single := [label for label in spec.labels if counts[label] == 1]:
        named = ", ".join(f"{label!r} ({where[label]})" for label in single[:_NAMED_LABELS])
        more = f" and {len(single) - _NAMED_LABELS} more" if len(single) > _NAMED_LABELS else ""
        yield (
            f"The task {name} has {len(single)} labels with one example, {named}{more}: "
            "what is learned of them is left to chance."
        )
    if missing := [label for label in spec.labels if not counts[label]]:
        yield f"The task {name} has {len(missing)} labels without any example, such as {missing[0]!r}."


class LabelReader:
    """Reads the labels of a task's column, and refuses a column that mixes forms."""

    def __init__(self, config: LabelledConfig) -> None:
        self.config, self.column = config, config.label_column
        self._forms: dict[float, tuple[str, str]] = {}  # number -> its first form, and the row that has it
        self._kinds: dict[str, tuple[str, str]] = {}  # number, word -> the first of the kind, and the row that has it

    def target(self, value: Any, texts: Sequence[str], where: str) -> Target:
        """What is predicted for a row of texts; DataError if the value does not fit the task's type or the texts."""
        kind = self.config.type
        if kind == "regression":
            if (number := _finite(value)) is None:
                shown = "nothing" if value is None or value == "" else repr(value)
                raise DataError(f"{where} has {shown} in the column {self.column!r}, but a finite number is expected.")
            return number
        if kind == "classification":
            return self._label(value, where)
        if kind == "span":
            return answer_span(value, texts[1], self.column, where)
        if kind == "multi-label":
            return tuple(dict.fromkeys(self._label(label, where) for label in self._split(value, where)))
        tags = tuple(self._label(tag, where) for tag in _split_blanks(value, self.column, where))
        if len(tags) != len(texts) or not texts:
            raise DataError(
                f"{where} has {len(texts)} words and {len(tags)} tags, but as many of both, and at least one, are "
                "expected: correct the row."
            )
        return tags

    def _split(self, value: Any, where: str) -> list[Any]:
        """The labels of a list, or of a text with separators; there may be none."""
        separator = self.config.separator
        if isinstance(value, str):
            return [part for part in value.split(separator) if part.strip()]
        if not isinstance(value, list):
            raise DataError(
                f"{where} has {type_name(value)} in the column {self.column!r}, but a list of labels, or a text with "
                f"{separator!r} between them, is expected: correct the row."
            )
        return value

    def _label(self, value: Any, where: str) -> str:
        """The text of a label: the digits of a number, true or false of a boolean."""
        text = self._text(value, where)
        number = _finite(text)
        first, other = (text, where) if number is None else self._forms.setdefault(number, (text, where))
        if first != text:
            raise DataError(
                f"{where} has the label {text} in the column {self.column!r}, and {other} has {first}, which is the "
                "same number in another form: write both alike."
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or number is None:
            self._kinds.setdefault("number" if is_number else "word", (text, where))
        if len(self._kinds) == 2:
            label = f"the number {text}" if is_number else f"the word {text!r}"
            (digits, digits_at), (word, word_at) = self._kinds["number"], self._kinds["word"]
            raise DataError(
                f"{where} has {label} in the column {self.column!r}, which is sometimes a number ({digits} at "
                f"{digits_at}) and sometimes a word ({word!r} at {word_at}): write all labels as text."
            )
        return text

    def _text(self, value: Any, where: str) -> str:
        if isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, int | float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, str) and value.strip():
            return value.strip()
        shown = "nothing" if value == "" else repr(value) if isinstance(value, float | str) else type_name(value)
        raise DataError(f"{where} has {shown} in the column {self.column!r}, but a label is expected: correct the row.")


def _finite(value: Any) -> float | None:
    """`value` as a finite number, or None."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def read_conll(
    path: Path, columns: Mapping[str, str], header: Sequence[str] = ()
) -> Iterator[tuple[tuple[list[str], list[str]], str]]:
    """The words and tags, and the location of each sentence of a CoNLL file: a word a line, empty lines between.

    Columns are separated by tabs in a file that has any, else by blanks. Comments begin with `#` and have no column of
    tags; `-DOCSTART-` lines are skipped.

    Args:
        columns: the columns of words and of tags, by the key that sets each; used with a `header`.
        header: names of all columns. Without it the first column has the words and the last the tags; in an `.iob2`
            file, as Universal NER has it, the second and the third.

    Raises DataError if the file can't be read, or a line has no tag, or too few or too many columns.
    """
    if header:
        check_columns(header, columns, str(path), "task")
    word, tag = (1, 2) if ".iob2" in path.suffixes else (0, -1)
    word, tag = map(list(header).index, columns.values()) if header else (word, tag)
    expected = len(header) or max(2, word + 1, tag + 1)
    lines = read_text(path).split("\n")
    tabs = any("\t" in line for line in lines)
    words: list[str] = []
    tags: list[str] = []
    first_line = 0
    for number, line in enumerate([*lines, ""], start=1):
        if not line.strip():
            if words:
                yield (words, tags), f"{path}: line {first_line}"
            words, tags = [], []
            continue
        cells = line.rstrip().split("\t") if tabs else line.split()
        is_comment = cells[0].startswith("#") and (len(cells) == 1 if tabs else "=" in cells[1:])
        if is_comment or cells[0] == "-DOCSTART-":
            continue
        if len(cells) < expected or (header and len(cells) != expected):
            raise DataError(
                f"{path}: line {number} has {len(cells)} columns, but {expected}{'' if header else ' or more'} are "
                "expected, a word and its tag among them: correct the line, or name the task's columns."
            )
        if not (cells[word].strip() and cells[tag].strip()):
            raise DataError(f"{path}: line {number} has an empty word or tag: correct the line.")
        first_line = first_line if words else number
        words.append(cells[word])
        tags.append(cells[tag])
