"""What a trained graft's heads say of rows: `graft predict`, and `graft eval --rows`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from graftlm.artifact import Manifest, backbone_of, load_graft, read_manifest
from graftlm.backbone import Backbone
from graftlm.data.encoding import RowEncoder
from graftlm.data.files import check_text, is_table, read_lines, read_values
from graftlm.data.labelled import LabelledConfig, LabelledRow, TaskRows, read_held_out_rows
from graftlm.errors import ArtifactError, DataError, RecipeError, did_you_mean
from graftlm.evaluation import Results, Row
from graftlm.evaluation.labelled import measure_labelled, predict_labelled, predictor, summary_metrics
from graftlm.grafts import Graft, GraftedModel, HasHeads
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.graft_run import graft_label
from graftlm.runs.task_run import row_encoder, task_tests

_CHUNK = 1024  # rows that are read, answered and printed at a time


@dataclass(frozen=True)
class TaskGraft:
    """A trained graft with heads, ready to be attached.

    Attributes:
        configs: how the training rows of each task were read, without their files.
        length: tokens of a row, at most, as in training.
    """

    backbone: Backbone
    graft: Graft
    configs: Mapping[str, LabelledConfig]
    length: int

    @property
    def tasks(self) -> dict[str, TaskSpec]:
        """What each head says, by the task's name."""
        return self.graft.tasks() if isinstance(self.graft, HasHeads) else {}

    @property
    def encoder(self) -> RowEncoder:
        """Turns rows into tokens as training did."""
        return row_encoder(self.backbone, self.length)

    def task(self, name: str) -> TaskSpec:
        """One task.

        Raises:
            DataError: there is none of that name.
        """
        if name not in self.tasks:
            raise DataError(f"The graft has no task {name!r}{did_you_mean(name, self.tasks)}.")
        return self.tasks[name]

    def config(self, name: str) -> LabelledConfig:
        """How a task's rows are read."""
        return self.configs.get(name) or LabelledConfig(type=self.task(name).type, train=[])


def load_task_graft(
    folder: str | Path,
    *,
    backbone: str | Path | None = None,
    changes: Sequence[str] = (),
    device: str | None = None,
    trust_remote_code: bool = False,
) -> TaskGraft:
    """A graft with heads, its backbone, and what its training remembered of the rows.

    Raises:
        ArtifactError: the folder is not a whole graft, or the graft has no heads.
        BackboneError: the backbone can't be loaded.
    """
    manifest = read_manifest(folder)
    if not manifest.graft_config().needs_tasks:
        raise ArtifactError(
            f"The graft {folder} is of the kind {manifest.kind}, which has no heads to predict with: name one that was "
            "trained on tasks."
        )
    live = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    graft = load_graft(folder, live, changes)
    length = manifest.training.get("length")
    return TaskGraft(live, graft, _configs(manifest), length if isinstance(length, int) else 128)


def _configs(manifest: Manifest) -> dict[str, LabelledConfig]:
    remembered = manifest.training.get("tasks")
    values = remembered if isinstance(remembered, dict) else {}
    try:
        return {
            name: LabelledConfig.parse({**dict(task), "train": []}, where=name)  # type: ignore[arg-type]  # checked there
            for name, task in values.items()
        }
    except (RecipeError, TypeError, ValueError):
        return {}


def evaluate_rows(found: TaskGraft, files: Mapping[str, str], *, batch_size: int = 64) -> Results:
    """Measure a graft on labelled rows of its tasks.

    Args:
        found: the graft.
        files: of each task; columns are those of its training rows.
        batch_size: rows of a pass.

    Raises:
        DataError: there is no such task, or a row can't be read.
    """
    rows = {}
    for name, path in files.items():
        spec = found.task(name)
        rows[name] = read_held_out_rows(name, found.config(name).model_copy(update={"test": path}), spec)
    tests = task_tests(found.tasks, {name: found.config(name) for name in rows}, rows)
    with GraftedModel(found.backbone, {"graft": found.graft}) as model:
        scores = measure_labelled(predictor(model), found.encoder, tests, batch_size=batch_size)
    kind = found.graft.config.kind
    row = Row(id=kind, label=graft_label(found.graft.config), metrics=dict(summary_metrics(scores)))
    details: dict[str, Any] = {"tasks": {kind: {"test": {name: one.to_json() for name, one in scores.items()}}}}
    return Results.here("eval", [row], details=details)


def predict_rows(
    found: TaskGraft, name: str, rows: Iterable[LabelledRow], *, batch_size: int = 64
) -> Iterator[dict[str, Any]]:
    """What a task's head says to each row, in order: plain values for JSON.

    Raises:
        DataError: there is no such task, or a row can't be read.
    """
    spec, encoder = found.task(name), found.encoder
    number = list(found.tasks).index(name)
    remaining = iter(rows)
    with GraftedModel(found.backbone, {"graft": found.graft}) as model:
        predict = predictor(model)
        while chunk := list(islice(remaining, _CHUNK)):
            answers = predict_labelled(predict, encoder, TaskRows(spec, chunk), number, batch_size=batch_size)
            yield from (answer.to_json(spec, row) for answer, row in zip(answers, chunk, strict=True))


def read_questions(config: LabelledConfig, source: str, columns: Sequence[str] = ()) -> Iterator[LabelledRow]:
    """Rows without labels: of a table, or of the lines of a text file or, for `-`, of stdin.

    Of lines each is a text, or the two of a pair with a tab between them; words to be tagged stand between blanks. With
    `columns`, lines are JSON objects.

    Raises:
        DataError: the file can't be read, or a row lacks a text.
    """
    texts = list(columns) or config.texts
    if len(texts) != len(config.texts):
        raise DataError(
            f"{len(texts)} columns of text are named, but the task has {len(config.texts)}, "
            f"{' and '.join(config.texts)}: name as many."
        )
    if source != "-" and not Path(source).is_file():
        raise DataError(f"There is no file {source}: name one, or - for stdin.")
    if source != "-" and is_table(Path(source)):
        named = {f"text.{place}": name for place, name in enumerate(texts)}
        for values, where in read_values(Path(source), named, "task", config.columns):
            yield _question(config, values, texts, where)
        return
    lines = (line.rstrip("\r\n") for line in _stdin()) if source == "-" else read_lines(Path(source))
    place = "stdin" if source == "-" else source
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{place}: line {number}"
            yield _question(config, _of_line(line, config, columns, where), texts, where)


def _stdin() -> Iterator[str]:
    try:
        yield from (line.decode("utf-8") for line in sys.stdin.buffer)
    except UnicodeDecodeError as error:
        raise DataError(
            f"stdin is not UTF-8 text (byte 0x{error.object[error.start]:02x}): convert it first."
        ) from None


def _of_line(line: str, config: LabelledConfig, columns: Sequence[str], where: str) -> list[Any]:
    if columns:
        try:
            values = json.loads(line)
            return [values[name] for name in columns]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                f"{where} is no JSON object with {' and '.join(columns)}: mend it, or leave --text-column out to give "
                "plain lines."
            ) from None
    parts = line.split("\t") if len(config.texts) > 1 else [line]
    if len(parts) != len(config.texts):
        raise DataError(
            f"{where} has {len(parts)} texts, but {len(config.texts)} with a tab between them are expected "
            f"({', '.join(config.texts)})."
        )
    return parts


def _question(config: LabelledConfig, values: Sequence[Any], names: Sequence[str], where: str) -> LabelledRow:
    if config.type == "tagging":
        words = values[0].split() if isinstance(values[0], str) else values[0]
        if not isinstance(words, list) or not words:
            raise DataError(f"{where} has no words in the column {names[0]!r}: give a text, or a list of words.")
        return LabelledRow(tuple(check_text(word, names[0], where) for word in words), None, where)
    texts = [check_text(value, name, where) for value, name in zip(values, names, strict=True)]
    for text, name in zip(texts, names, strict=True):
        if not text.strip():
            raise DataError(f"{where} has an empty text in the column {name!r}: fill it in, or leave the row out.")
    return LabelledRow(tuple(texts), None, where)


__all__ = ["TaskGraft", "evaluate_rows", "load_task_graft", "predict_rows", "read_questions"]
