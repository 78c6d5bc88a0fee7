"""What is told of the grafts in service: what they are, what they learned and forgot, and the report of their run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
from graftlm.serving.shelf import Entry

_GRAFT = "graft"  # the folder in a run's folder that holds its graft
_LARGEST = 32 * 2**20  # bytes of a report that is read
_SETTINGS = ("batch_size", "learning_rate", "schedule", "precision", "seed")


class Base(BaseModel):
    """The model that all grafts sit on."""

    name: str
    chat: bool
    context: int | None


class GraftCard(BaseModel):
    """A graft in short; metrics in nats per token, None where they were not measured."""

    name: str
    kind: str
    label: str
    parameters: int
    steps: int | None
    tokens: int | None
    learned: Interval | None
    forgotten: Interval | None


class Overview(BaseModel):
    """The answer of /v1/graftlm/grafts."""

    object: Literal["list"] = "list"
    backbone: Base
    data: list[GraftCard]


class Point(BaseModel):
    """A method in the plane of learning and forgetting, in nats per token; `own` is the graft itself."""

    id: str
    label: str
    learned: Interval | None
    forgotten: Interval | None
    own: bool


class Report(BaseModel):
    """The answer of /v1/graftlm/grafts/NAME/report.

    Attributes:
        points: of the graft and of what it was compared with, where that is known.
        paths: [forgotten, learned] of other settings, by the point's id, in order.
        measured: all metrics of the graft.
        training: the run's settings.
        results: the run's results.json, where it lies beside the graft.
    """

    name: str
    card: GraftCard
    points: list[Point]
    paths: dict[str, JsonValue]
    measured: dict[str, Metric]
    training: dict[str, JsonValue]
    results: dict[str, JsonValue] | None


def overview(service: Service) -> Overview:
    """All that is served."""
    context = service.context if service.context < UNLIMITED else None
    base = Base(name=service.name, chat=not service.prompts.plain, context=context)
    return Overview(backbone=base, data=[card_of(entry) for entry in service.shelf.entries()])


def card_of(entry: Entry) -> GraftCard:
    """A graft in short, by its graft.json alone."""
    manifest, measured = entry.manifest, _measured(entry.manifest)
    return GraftCard(
        name=entry.name,
        kind=manifest.kind,
        label=_label(manifest),
        parameters=manifest.parameters,
        steps=_count(manifest.training.get("steps")),
        tokens=_count(manifest.training.get("tokens")),
        learned=_interval(measured.get("learned")),
        forgotten=_interval(measured.get("forgotten")),
    )


def report_of(entry: Entry) -> Report:
    """What was measured of a graft: by its graft.json, and by the results.json of its run where that can be found."""
    found = _results(entry)
    results, own = found if found is not None else (None, entry.manifest.kind)
    card = card_of(entry)
    settings = entry.manifest.training.get("training")
    known = settings if isinstance(settings, dict) else {}
    paths = results.details.get("paths") if results is not None else None
    return Report(
        name=entry.name,
        card=card,
        points=_points(results, own, card),
        paths=paths if isinstance(paths, dict) else {},
        measured=_measured(entry.manifest),
        training={key: known[key] for key in _SETTINGS if known.get(key) is not None},
        results=None if results is None else results.model_dump(mode="json") | {"command": _elsewhere(results.command)},
    )


def _elsewhere(command: str) -> str:
    """A command without this machine's places, which older reports may still tell."""
    return re.sub(r"(?<![^\s='\"])/[^\s'\"]+", "DIR", command)


def _results(entry: Entry) -> tuple[Results, str] | None:
    """The results of the run that made a graft, and the id of its row there.

    They lie in the graft's folder, or, where that is the folder `graft` of a run, in the run's or the one above.
    """
    for folder, row_id in _places(entry):
        path = folder / FILE_NAME
        if path.is_file() and path.stat().st_size <= _LARGEST:
            try:
                results = Results.read(path)
            except GraftError:  # a damaged report is as good as none: the graft's own figures stand in graft.json
                continue
            if row_id in [row.id for row in results.rows]:
                return results, row_id
    return None


def _places(entry: Entry) -> Iterator[tuple[Path, str]]:
    kind, folder = entry.manifest.kind, entry.folder.absolute()
    yield folder, kind
    if folder.name == _GRAFT:
        yield folder.parent, kind
        yield folder.parent.parent, folder.parent.name


def _points(results: Results | None, own: str, card: GraftCard) -> list[Point]:
    if results is None:
        mine = Point(id=own, label=card.label, learned=card.learned, forgotten=card.forgotten, own=True)
        return [mine] if card.learned or card.forgotten else []
    rows = [row for row in results.rows if {"learned", "forgotten"} & row.metrics.keys()]
    return [
        Point(
            id=row.id,
            label=row.label,
            learned=_interval(row.metrics.get("learned")),
            forgotten=_interval(row.metrics.get("forgotten")),
            own=row.id == own,
        )
        for row in rows
    ]


def _measured(manifest: Manifest) -> dict[str, Metric]:
    found = manifest.training.get("measured")
    known: Mapping[str, Any] = found if isinstance(found, dict) else {}
    each = {name: _metric(value) for name, value in known.items()}
    return {name: value for name, value in each.items() if value is not None}


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
