"""Predictions of a trained graft's heads: `graft predict` and `graft eval --rows`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from graftlm.backbone import Backbone
from graftlm.data.conll import ends_in_tag, is_conll, read_conll
from graftlm.data.labelled import (
    LabelledConfig,
    LabelledRow,
    TaskRows,
    input_columns,
    read_held_out_rows,
    read_inputs,
)
from graftlm.data.list_cells import looks_like_list
from graftlm.data.published_forms import read_form, read_glue
from graftlm.data.row_encoder import RowEncoder
from graftlm.data.table_files import check_text, is_table, read_values
from graftlm.errors import ArtifactError, DataError, RecipeError, did_you_mean
from graftlm.evaluation import Results, Row
from graftlm.evaluation.label_predictions import predict_labelled, predictor
from graftlm.evaluation.label_scores import measure_labelled, summary_metrics
from graftlm.files.reading import BYTE_ORDER_MARK, decode_utf8, read_text
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.task_run import row_encoder, task_tests, tasks_of
from graftlm.store.artifact import backbone_of, load_graft
from graftlm.store.manifest import Manifest, read_manifest

_CHUNK_ROWS = 1024  # rows in memory at a time
_FIRST_LINES = 8  # of a file, by which lines with tags are recognized
_DEFAULT_LENGTH = 128  # used if the manifest contains no length


@dataclass(frozen=True)
class TaskGraft:
    """A trained graft with heads that is not attached to its backbone yet.

    Args:
        backbone: the backbone, to which `graft` belongs.
        graft: the graft.
        configs: the configs with which the tasks were trained, without their files, by task; it may lack tasks.
        length: maximum number of tokens per labelled row, as in training.
    """

    backbone: Backbone
    graft: Graft
    configs: Mapping[str, LabelledConfig]
    length: int

    @classmethod
    def of(cls, manifest: Manifest, graft: Graft, backbone: Backbone) -> TaskGraft:
        """Combine a loaded graft with the configs of its tasks in the manifest.

        If the manifest has no readable configs, `config` returns default ones. If it has no length, 128 is used.
        """
        length = manifest.training.get("length")
        if not isinstance(length, int):
            length = _DEFAULT_LENGTH
        return cls(backbone=backbone, graft=graft, configs=_task_configs(manifest), length=length)

    @property
    def tasks(self) -> dict[str, TaskSpec]:
        """The specification of each head by the name of its task."""
        return tasks_of(self.graft)

    @property
    def encoder(self) -> RowEncoder:
        """The encoder that tokenizes rows as in training."""
        return row_encoder(self.backbone, self.length)

    def task(self, name: str) -> TaskSpec:
        """Return the specification of a task.

        Raises:
            DataError: the graft has no such task.
        """
        if name not in self.tasks:
            raise DataError(f"The graft has no task {name!r}{did_you_mean(name, self.tasks)}.")
        return self.tasks[name]

    def config(self, name: str) -> LabelledConfig:
        """Return the config that describes how the rows of a task are read, with default columns if none is recorded.

        Raises:
            DataError: the graft has no such task.
        """
        config = self.configs.get(name)
        if config is not None:
            return config
        return LabelledConfig(type=self.task(name).type, train=[])


def load_task_graft(
    folder: str | Path,
    *,
    backbone: str | Path | None = None,
    changes: Sequence[str] = (),
    device: str | None = None,
    trust_remote_code: bool = False,
) -> TaskGraft:
    """Load a graft with heads, its backbone, and the configs of its tasks.

    Args:
        folder: folder of the graft.
        backbone: name or folder of the backbone; None uses the recorded one.
        changes: overrides of the graft's config, as `KEY=VALUE`.
        device: torch device; None selects the fastest available one.
        trust_remote_code: allow the backbone's repository to run its own code.

    Raises:
        ArtifactError: the folder is not a complete graft, the graft has no heads, or it belongs to another backbone.
        RecipeError: a change does not fit the graft's config.
        BackboneError: the backbone can't be loaded.
    """
    manifest = read_manifest(folder)
    if not manifest.graft_config().needs_tasks:
        raise ArtifactError(
            f"The graft {folder} is of the kind {manifest.kind}, which has no heads to predict with: name a graft that "
            "was trained on tasks."
        )
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    return TaskGraft.of(manifest, load_graft(folder, loaded, changes), loaded)


def _task_configs(manifest: Manifest) -> dict[str, LabelledConfig]:
    """Return the configs of the tasks; none if the manifest has no readable ones."""
    tasks: Any = manifest.training.get("tasks")
    try:
        return {name: LabelledConfig.parse({**task, "train": []}, where=name) for name, task in tasks.items()}
    except (RecipeError, TypeError, AttributeError):
        return {}


def evaluate_rows(task_graft: TaskGraft, files: Mapping[str, str], *, batch_size: int = 64) -> Results:
    """Measure a graft on labelled rows of its tasks.

    Args:
        task_graft: the graft.
        files: a file of rows by task, with the columns of the training rows.
        batch_size: number of rows per forward pass.

    Returns:
        Results with one row of metrics; the details have the scores of each task.

    Raises:
        DataError: the graft has no such task, or a row can't be read.
    """
    configs = {name: task_graft.config(name) for name in files}
    rows = {}
    for name, path in files.items():
        config = configs[name].model_copy(update={"test": path})
        rows[name] = read_held_out_rows(name, config, task_graft.task(name))
    tests = task_tests(task_graft.tasks, configs, rows)
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model:
        scores = measure_labelled(predictor(model), task_graft.encoder, tests, batch_size=batch_size)
    kind = task_graft.graft.config.kind
    row = Row(id=kind, label=task_graft.graft.config.label, metrics=dict(summary_metrics(scores)))
    by_task = {name: score.to_json() for name, score in scores.items()}
    details: dict[str, object] = {"tasks": {kind: {"test": by_task}}}
    notes = [note for task in rows.values() for note in task.notes]
    if notes:
        details["notes"] = notes
    return Results.here("eval", [row], details=details)


def predict_rows(
    task_graft: TaskGraft, name: str, rows: Iterable[LabelledRow], *, batch_size: int = 64
) -> Iterator[dict[str, object]]:
    """Yield the predictions of a task's head as JSON values, in the order of the rows.

    Args:
        task_graft: the graft.
        name: the task.
        rows: rows to predict; labels are optional. They are read 1024 at a time.
        batch_size: number of rows per forward pass.

    Raises:
        DataError: the graft has no such task, or a row is not a `LabelledRow`. Both are raised during the iteration.
    """
    spec = task_graft.task(name)
    encoder = task_graft.encoder
    stride = task_graft.config(name).stride
    number = list(task_graft.tasks).index(name)
    iterator = iter(rows)
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model:
        predict = predictor(model)
        while chunk := list(islice(iterator, _CHUNK_ROWS)):
            _check_rows(chunk)
            task = TaskRows(spec, chunk, stride=stride)
            predictions = predict_labelled(predict, encoder, task, number, batch_size=batch_size)
            for prediction, row in zip(predictions, chunk, strict=True):
                yield prediction.to_json(spec, row)


def _check_rows(rows: Sequence[object]) -> None:
    for row in rows:
        if not isinstance(row, LabelledRow):
            raise DataError(
                f"A row is of type {type(row).__name__}, but LabelledRow is expected: pass LabelledRow(texts=(...))."
            )


def read_questions(config: LabelledConfig, source: str, columns: Sequence[str] = ()) -> Iterator[LabelledRow]:
    """Read rows without labels from a table, from the lines of a text file, or from stdin.

    A line is a text, or two texts separated by a tab, followed by a tab and each choice, or by a tab and each marked
    text. Words to tag are separated by white space, or read from a CoNLL file, whose tags are ignored.

    Args:
        config: the config of the task.
        source: a table, a text file, or `-` for stdin.
        columns: the columns of the texts; lines are then JSON objects with these keys, and with those of choices or
            marked places. If empty, tables have the columns or the published form of the training rows, and lines are
            plain texts.

    Raises:
        DataError: the number of columns is wrong, the source can't be read, or a row lacks a text, as an empty line
            before others does.
    """
    texts = list(columns) or config.texts
    if len(texts) != len(config.texts):
        raise DataError(
            f"The number of text columns is {len(texts)}, but the task expects {len(config.texts)} "
            f"({', '.join(config.texts)}): name one column per text (--text-column)."
        )
    names = [*texts, *config.part_columns]
    if source != "-" and is_table(Path(source)) and Path(source).is_file():
        for values, where in _read_table(Path(source), config, texts, published=not columns):
            yield read_question(config, values, names, where)
        return
    if config.type == "tagging" and source != "-" and is_conll(Path(source)):
        keys = {"text": config.texts[0], "label": config.label_column}
        for (words, _), where in read_conll(Path(source), keys, config.columns):
            yield read_question(config, [words], names, where)
        return
    origin = "stdin" if source == "-" else source
    lines = _lines_of(source)
    if config.type == "tagging":
        lines = _untagged(lines, origin)
    last = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _check_no_gap(last, number, origin)
            last = number
            where = f"{origin}: line {number}"
            yield read_question(config, _parse_line(line, config, names if columns else (), where), names, where)


def _check_no_gap(last: int, number: int, origin: str) -> None:
    """Raise `DataError` if lines between two that have text have none, so that answers would not match lines."""
    if number > last + 1:
        raise DataError(
            f"{origin}: line {last + 1} is empty, but each line is a text to predict: fill it in, or remove it."
        )


def _untagged(lines: Iterator[str], origin: str) -> Iterator[str]:
    """Yield lines of words; raise `DataError` if they end in tags, as in a CoNLL file.

    The first line decides if tabs separate its columns. Otherwise all of the first lines of a file must end in a tag,
    since a sentence may end in such a word.
    """
    first = list(islice(lines, 1 if origin == "stdin" else _FIRST_LINES))
    filled = [line for line in first if line.strip()]
    has_tags = len(filled) > 1 and all(ends_in_tag(line) for line in filled)
    if has_tags or any(ends_in_tag(line, "\t") for line in first[:1]):
        raise DataError(
            f"{origin}: line 1 ends in a tag, but a line is a sentence without tags: remove the tags, or end the name "
            "of a CoNLL file in .conll."
        )
    yield from first
    yield from lines


def _read_table(
    path: Path,
    config: LabelledConfig,
    texts: Sequence[str],
    *,
    published: bool,
) -> Iterator[tuple[Sequence[object], str]]:
    """Yield the values of the texts, choices and marked places of a table, and the location of each row.

    Args:
        path: the table.
        config: the config of the task.
        texts: the columns of the texts.
        published: whether the table has the task's published form, if it has one.
    """
    columns = input_columns(texts, config.part_columns, config.type)
    if not published or config.form is None:
        yield from read_values(path, columns, "task", config.columns)
        return
    skipped = Counter[str]()
    if config.form == "glue":
        rows = read_glue(path, columns, config.columns, skipped)
    else:
        rows = read_form(path, config.form, skipped)
    for values, where in rows:
        if skipped:
            break
        yield values[: len(columns)], where
    if skipped:
        raise DataError(f"{path} has {next(iter(skipped))}, which can't be predicted in this form: remove them.")


def _lines_of(source: str) -> Iterator[str]:
    """Yield the lines of a text file or of stdin (`-`), which is read as it arrives."""
    path = Path(source)
    if source == "-":
        for number, line in enumerate(sys.stdin.buffer, start=1):
            text = decode_utf8(line, f"stdin: line {number}")
            if number > 1 and line.startswith(BYTE_ORDER_MARK):
                text = f"\ufeff{text}"  # Only the first one of a stream is a byte order mark.
            yield text.rstrip("\r\n")
    elif path.is_dir():
        raise DataError(f"{source} is a folder, but a file is expected: name a file in it, or - for stdin.")
    elif path.exists():
        yield from read_text(path).split("\n")
    else:
        raise DataError(f"There is no file {source}: name an existing file, or - for stdin.")


def _parse_line(line: str, config: LabelledConfig, columns: Sequence[str], where: str) -> Sequence[object]:
    """Return the texts of a line, and its choices or marked places."""
    if columns:
        try:
            values = json.loads(line)
            return [values[name] for name in columns]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                f"{where} is not a JSON object with {' and '.join(columns)}: write one such object per line, or leave "
                "out --text-column to read plain lines."
            ) from None
    if len(config.texts) > 1 or config.part_columns:
        return line.split("\t")
    return [line]


def _with_list(config: LabelledConfig, values: Sequence[object]) -> Sequence[object]:
    """Return values in which choices of the only column of choices are a list, even if each was given by itself."""
    count = len(config.texts)
    if len(config.part_columns) != 1 or len(values) < count or isinstance(values[-1], list):
        return values
    if len(values) == count + 1 and looks_like_list(str(values[-1])):
        return values
    return [*values[:count], list(values[count:])]


def read_question(config: LabelledConfig, values: Sequence[object], names: Sequence[str], where: str) -> LabelledRow:
    """Return the row of a task without a label.

    Args:
        config: the config of the task.
        values: the texts, one per name, followed by the choices or the marked places; for tagging, a text, whose words
            are separated by white space, or a list of words.
        names: the columns of the values, for error messages.
        where: file and line of the row, for error messages.

    Raises:
        DataError: the number of values differs from that of the names, or a value can't be read.
    """
    values = _with_list(config, values)
    if len(values) != len(names):
        raise DataError(
            f"{where}: the number of texts is {len(values)}, but {len(names)} is expected: give one for each of "
            f"{', '.join(names)}."
        )
    if config.type == "tagging":
        words = values[0].split() if isinstance(values[0], str) else values[0]
        if not isinstance(words, list) or not words:
            raise DataError(f"{where} has no words in the column {names[0]!r}: give a text, or a list of words.")
        return LabelledRow(tuple(check_text(word, names[0], where) for word in words), None, where)
    return read_inputs(config, values, names, where)
