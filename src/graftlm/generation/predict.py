"""Predictions of a trained graft's heads: `graft predict` and `graft eval --rows`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from graftlm.backbone import Backbone
from graftlm.data.labelled import LabelledConfig, LabelledRow, TaskRows, check_not_empty, read_held_out_rows
from graftlm.data.row_encoder import RowEncoder
from graftlm.data.table_files import check_text, is_table, read_values
from graftlm.errors import ArtifactError, DataError, RecipeError, did_you_mean
from graftlm.evaluation import Results, Row
from graftlm.evaluation.label_metrics import measure_labelled, predict_labelled, predictor, summary_metrics
from graftlm.files.reading import decode_utf8, read_text
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.task_run import row_encoder, task_tests, tasks_of
from graftlm.store.artifact import backbone_of, load_graft
from graftlm.store.manifest import Manifest, read_manifest

_CHUNK_ROWS = 1024  # rows in memory at a time


@dataclass(frozen=True)
class TaskGraft:
    """A trained graft with heads, not yet attached.

    `configs` are the tasks' from training, without files; `length` is the maximum of tokens per row, as in training.
    """

    backbone: Backbone
    graft: Graft
    configs: Mapping[str, LabelledConfig]
    length: int

    @classmethod
    def of(cls, manifest: Manifest, graft: Graft, backbone: Backbone) -> TaskGraft:
        """A loaded graft with what its manifest says of its tasks."""
        length = manifest.training.get("length")
        return cls(backbone, graft, _task_configs(manifest), length if isinstance(length, int) else 128)

    @property
    def tasks(self) -> dict[str, TaskSpec]:
        """The specification of each head by the task's name."""
        return tasks_of(self.graft)

    @property
    def encoder(self) -> RowEncoder:
        """Tokenises rows as in training."""
        return row_encoder(self.backbone, self.length)

    def task(self, name: str) -> TaskSpec:
        """The specification of one task. Raises DataError if the graft has no such task."""
        if name not in self.tasks:
            raise DataError(f"The graft has no task {name!r}{did_you_mean(name, self.tasks)}.")
        return self.tasks[name]

    def config(self, name: str) -> LabelledConfig:
        """How a task's rows are read. Raises DataError if the graft has no such task."""
        return self.configs.get(name) or LabelledConfig(type=self.task(name).type, train=[])


def load_task_graft(
    folder: str | Path,
    *,
    backbone: str | Path | None = None,
    changes: Sequence[str] = (),
    device: str | None = None,
    trust_remote_code: bool = False,
) -> TaskGraft:
    """Load a graft with heads, its backbone, and the configs of its tasks.

    Raises ArtifactError if the folder is not a complete graft, or the graft has no heads, and BackboneError if the
    backbone can't be loaded.
    """
    manifest = read_manifest(folder)
    if not manifest.graft_config().needs_tasks:
        raise ArtifactError(
            f"The graft {folder} is of the kind {manifest.kind}, which has no heads to predict with: name one that was "
            "trained on tasks."
        )
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    return TaskGraft.of(manifest, load_graft(folder, loaded, changes), loaded)


def _task_configs(manifest: Manifest) -> dict[str, LabelledConfig]:
    tasks: Any = manifest.training.get("tasks")
    try:
        return {name: LabelledConfig.parse({**task, "train": []}, where=name) for name, task in tasks.items()}
    except (RecipeError, TypeError, AttributeError):
        return {}


def evaluate_rows(task_graft: TaskGraft, files: Mapping[str, str], *, batch_size: int = 64) -> Results:
    """Measure a graft on labelled rows of its tasks: a file for each, with the columns of the training rows.

    Raises DataError if the graft has no such task, or a row can't be read.
    """
    configs = {name: task_graft.config(name) for name in files}
    rows = {
        name: read_held_out_rows(name, configs[name].model_copy(update={"test": path}), task_graft.task(name))
        for name, path in files.items()
    }
    tests = task_tests(task_graft.tasks, configs, rows)
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model:
        scores = measure_labelled(predictor(model), task_graft.encoder, tests, batch_size=batch_size)
    kind = task_graft.graft.config.kind
    row = Row(id=kind, label=task_graft.graft.config.label, metrics=dict(summary_metrics(scores)))
    details: dict[str, Any] = {"tasks": {kind: {"test": {name: score.to_json() for name, score in scores.items()}}}}
    return Results.here("eval", [row], details=details)


def predict_rows(
    task_graft: TaskGraft, name: str, rows: Iterable[LabelledRow], *, batch_size: int = 64
) -> Iterator[dict[str, Any]]:
    """Predictions of a task's head as plain JSON values; DataError if there is no such task, or a row can't be read."""
    spec, encoder = task_graft.task(name), task_graft.encoder
    number = list(task_graft.tasks).index(name)
    rows = iter(rows)
    with GraftedModel(task_graft.backbone, {"graft": task_graft.graft}) as model:
        predict = predictor(model)
        while chunk := list(islice(rows, _CHUNK_ROWS)):
            if other := [row for row in chunk if not isinstance(row, LabelledRow)]:
                raise DataError(f"A row is of type {type(other[0]).__name__}: give LabelledRow(texts=(...)).")
            predictions = predict_labelled(predict, encoder, TaskRows(spec, chunk), number, batch_size=batch_size)
            yield from (prediction.to_json(spec, row) for prediction, row in zip(predictions, chunk, strict=True))


def read_questions(config: LabelledConfig, source: str, columns: Sequence[str] = ()) -> Iterator[LabelledRow]:
    """Read rows without labels from a table, from the lines of a text file, or from stdin (`-`).

    A line is a text, or a pair of texts separated by a tab. Words to tag are separated by blanks. With `columns`, lines
    are JSON objects.

    Raises DataError if the source can't be read, or a row lacks a text.
    """
    texts = list(columns) or config.texts
    if len(texts) != len(config.texts):
        raise DataError(
            f"{len(texts)} columns of text are named, but the task has {len(config.texts)}, "
            f"{' and '.join(config.texts)}: name as many."
        )
    origin, path = source, Path(source)
    if source == "-":
        origin, lines = "stdin", (decode_utf8(line, "stdin").rstrip("\r\n") for line in sys.stdin.buffer)
    elif not path.is_file():
        raise DataError(f"There is no file {source}: name one, or - for stdin.")
    elif is_table(path):
        keys = {f"text.{i}": name for i, name in enumerate(texts)}
        for values, where in read_values(path, keys, "task", config.columns):
            yield read_question(config, values, texts, where)
        return
    else:
        lines = iter(read_text(path).split("\n"))
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{origin}: line {number}"
            yield read_question(config, _parse_line(line, config, columns, where), texts, where)


def _parse_line(line: str, config: LabelledConfig, columns: Sequence[str], where: str) -> list[Any]:
    if columns:
        try:
            values = json.loads(line)
            return [values[name] for name in columns]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                f"{where} is no JSON object with {' and '.join(columns)}: correct it, or leave out --text-column "
                "to read plain lines."
            ) from None
    return line.split("\t") if len(config.texts) > 1 else [line]


def read_question(config: LabelledConfig, values: Sequence[Any], names: Sequence[str], where: str) -> LabelledRow:
    """A row without a label, of as many values as there are names; DataError otherwise, or if one can't be read."""
    if len(values) != len(names):
        expected = f"{len(names)} ({', '.join(names)})"
        why = f"{where}: the number of texts is {len(values)}, but {expected} is expected: give one for each."
        raise DataError(why)
    if config.type == "tagging":
        words = values[0].split() if isinstance(values[0], str) else values[0]
        if not isinstance(words, list) or not words:
            raise DataError(f"{where} has no words in the column {names[0]!r}: give a text, or a list of words.")
        return LabelledRow(tuple(check_text(word, names[0], where) for word in words), None, where)
    texts = (check_not_empty(value, name, where) for value, name in zip(values, names, strict=True))
    return LabelledRow(tuple(texts), None, where)
