"""Reports of the grafts in service: what they are, what they learned and forgot, and the results of their run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, JsonValue

from graftlm.artifact import Manifest
from graftlm.backbone import UNLIMITED
from graftlm.errors import GraftError
from graftlm.evaluation import Interval, Results
from graftlm.evaluation.results import FILE_NAME, Metric
from graftlm.runs.graft_run import graft_label
from graftlm.serving.service import Service
from graftlm.serving.store import StoredGraft

_GRAFT_FOLDER = "graft"  # name of a graft's folder inside of a run's folder
_MAX_REPORT_BYTES = 32 * 2**20
_SETTINGS = ("batch_size", "learning_rate", "schedule", "precision", "seed")


class ServedBackbone(BaseModel):
    """The backbone of all grafts."""

    name: str
    chat: bool
    context: int | None


class GraftSummary(BaseModel):
    """A graft in short. Metrics are in nats per token, None if they were not measured."""

    name: str
    kind: str
    label: str
    parameters: int
    steps: int | None
    tokens: int | None
    learned: Interval | None
    forgotten: Interval | None


class ServedModels(BaseModel):
    """The response of /v1/graftlm/grafts."""

    object: Literal["list"] = "list"
    backbone: ServedBackbone
    data: list[GraftSummary]


class TradeOffPoint(BaseModel):
    """A method's learning and forgetting in nats per token; `own` marks the graft itself."""

    id: str
    label: str
    learned: Interval | None
    forgotten: Interval | None
    own: bool


class GraftReport(BaseModel):
    """The response of /v1/graftlm/grafts/NAME/report.

    Attributes:
        points: the graft, and the methods of the same run.
        paths: [forgotten, learned] of other settings in order, by the point's id.
        measured: all metrics of the graft.
        training: settings of the run.
        results: the run's results.json, if it is in a folder of the graft's run.
    """

    name: str
    card: GraftSummary
    points: list[TradeOffPoint]
    paths: dict[str, JsonValue]
    measured: dict[str, Metric]
    training: dict[str, JsonValue]
    results: dict[str, JsonValue] | None


def served_models(service: Service) -> ServedModels:
    """The backbone and the grafts of a service."""
    context = service.context if service.context < UNLIMITED else None
    backbone = ServedBackbone(name=service.name, chat=not service.tokenizer.plain, context=context)
    return ServedModels(backbone=backbone, data=[graft_summary(entry) for entry in service.store.entries()])


def graft_summary(entry: StoredGraft) -> GraftSummary:
    """A graft in short, from its graft.json."""
    manifest, measured = entry.manifest, _measured(entry.manifest)
    return GraftSummary(
        name=entry.name,
        kind=manifest.kind,
        label=_label(manifest),
        parameters=manifest.parameters,
        steps=_count(manifest.training.get("steps")),
        tokens=_count(manifest.training.get("tokens")),
        learned=_interval(measured.get("learned")),
        forgotten=_interval(measured.get("forgotten")),
    )


def graft_report(entry: StoredGraft) -> GraftReport:
    """The measurements of a graft, from its graft.json and from the results.json of its run if there is one."""
    results, row_id = _find_results(entry)
    summary = graft_summary(entry)
    training = entry.manifest.training.get("training")
    settings = training if isinstance(training, dict) else {}
    paths = results.details.get("paths") if results is not None else None
    return GraftReport(
        name=entry.name,
        card=summary,
        points=_points(results, row_id, summary),
        paths=paths if isinstance(paths, dict) else {},
        measured=_measured(entry.manifest),
        training={key: settings[key] for key in _SETTINGS if settings.get(key) is not None},
        results=None
        if results is None
        else results.model_dump(mode="json") | {"command": _without_paths(results.command)},
    )


def _without_paths(command: str) -> str:
    """A command without absolute paths of this machine, which older reports may have."""
    return re.sub(r"(?<![^\s='\"])/[^\s'\"]+", "DIR", command)


def _find_results(entry: StoredGraft) -> tuple[Results | None, str]:
    """The results of the run that trained a graft, and the id of its row in them.

    A damaged file counts as missing, because graft.json has the graft's own metrics.
    """
    for folder, row_id in _result_folders(entry):
        path = folder / FILE_NAME
        if path.is_file() and path.stat().st_size <= _MAX_REPORT_BYTES:
            try:
                results = Results.read(path)
            except GraftError:
                continue
            if row_id in [row.id for row in results.rows]:
                return results, row_id
    return None, entry.manifest.kind


def _result_folders(entry: StoredGraft) -> Iterator[tuple[Path, str]]:
    """The folders that may hold results.json, each with the graft's row id: its own, its run's, and the parent's."""
    kind, folder = entry.manifest.kind, entry.folder.absolute()
    yield folder, kind
    if folder.name == _GRAFT_FOLDER:
        yield folder.parent, kind
        yield folder.parent.parent, folder.parent.name


def _points(results: Results | None, row_id: str, summary: GraftSummary) -> list[TradeOffPoint]:
    if results is None:
        own = TradeOffPoint(
            id=row_id, label=summary.label, learned=summary.learned, forgotten=summary.forgotten, own=True
        )
        return [own] if summary.learned or summary.forgotten else []
    return [
        TradeOffPoint(
            id=row.id,
            label=row.label,
            learned=_interval(row.metrics.get("learned")),
            forgotten=_interval(row.metrics.get("forgotten")),
            own=row.id == row_id,
        )
        for row in results.rows
        if {"learned", "forgotten"} & row.metrics.keys()
    ]


def _measured(manifest: Manifest) -> dict[str, Metric]:
    """The metrics in graft.json; values that are no metrics are left out."""
    values = manifest.training.get("measured")
    metrics = {name: _metric(value) for name, value in values.items()} if isinstance(values, dict) else {}
    return {name: metric for name, metric in metrics.items() if metric is not None}


def _metric(value: Any) -> Metric | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return Interval.parse(value)
    except GraftError:
        return None


def _interval(metric: Metric | None) -> Interval | None:
    if metric is None or isinstance(metric, Interval):
        return metric
    return Interval(mean=metric, low=metric, high=metric)


def _label(manifest: Manifest) -> str:
    try:
        return graft_label(manifest.graft_config())
    except GraftError:
        return manifest.kind


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
