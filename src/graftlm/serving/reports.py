"""Reports of the grafts in service: configuration, learning and forgetting, and the results of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, JsonValue, OnErrorOmit, StrictFloat, StrictInt, TypeAdapter

from graftlm.backbone import UNLIMITED
from graftlm.errors import GraftError
from graftlm.evaluation import Interval, Results
from graftlm.evaluation.results import FILE_NAME, Metric, Row
from graftlm.serving.service import Service
from graftlm.serving.store import StoredGraft
from graftlm.store.manifest import Manifest

_GRAFT_FOLDER = "graft"  # name of a graft's folder inside of a run's folder
_MAX_REPORT_BYTES = 32 * 2**20
_SETTINGS = ("batch_size", "learning_rate", "schedule", "precision", "seed")
_METRICS = TypeAdapter(dict[str, OnErrorOmit[StrictInt | StrictFloat | Interval]])


class ServedBackbone(BaseModel):
    """A backbone in service.

    Attributes:
        name: name in requests.
        kind: `causal-lm` or `encoder`, which can't generate text.
        chat: whether conversations are rendered with a chat template, of its tokenizer or of the server.
        context: maximum number of tokens of a prompt and its continuation; None if there is no limit.
    """

    name: str
    kind: str
    chat: bool
    context: int | None


class TradeOff(BaseModel):
    """Learning and forgetting.

    Attributes:
        learned: decrease of the loss on new text by training, in nats per token; None if it was not measured.
        forgotten: increase of the loss on old text by training, in nats per token; None if it was not measured.
    """

    learned: Interval | None
    forgotten: Interval | None


class GraftSummary(TradeOff):
    """Summary of a graft.

    Attributes:
        name: name in requests.
        backbone: name of its backbone.
        kind: its method.
        label: description of its method.
        parameters: number of its parameters.
        steps: number of training steps.
        tokens: number of training tokens.
        audit: whether it has an audit page.
    """

    name: str
    backbone: str
    kind: str
    label: str
    parameters: int
    steps: int | None
    tokens: int | None
    audit: bool


class ServedModels(BaseModel):
    """The response of /v1/graftlm/grafts.

    Attributes:
        backbones: the backbones.
        limits: the largest values that requests may have.
        data: the grafts.
    """

    object: Literal["list"] = "list"
    backbones: list[ServedBackbone]
    limits: dict[str, int]
    data: list[GraftSummary]


class TradeOffPoint(TradeOff):
    """A method's learning and forgetting.

    Attributes:
        id: id of the method's row in the report.
        label: description of the method.
        own: whether it is the graft itself.
    """

    id: str
    label: str
    own: bool


class GraftReport(BaseModel):
    """The response of /v1/graftlm/grafts/NAME/report.

    Attributes:
        name: name of the graft in requests.
        points: the graft, and the other methods of the same run.
        measured: all metrics of the graft.
        training: settings of the run.
        results: the run's results.json, if it is in the folder of the graft or of its run.
        audit: the HTML page of the graft's audit, if there is one.
    """

    name: str
    points: list[TradeOffPoint]
    measured: dict[str, Metric]
    training: dict[str, JsonValue]
    results: dict[str, JsonValue] | None
    audit: str | None


def served_models(service: Service, limits: Mapping[str, int]) -> ServedModels:
    """Return the backbones and grafts of a service, with the limits of requests.

    Args:
        service: the service.
        limits: limits of the routes by name, which are added to those of the service.
    """
    services = list(service.members.values()) or [service]
    max_tokens = max(min(own.limits.max_tokens, own.context - 1) for own in services)
    return ServedModels(
        backbones=[_served_backbone(own) for own in services],
        limits={"max_tokens": max_tokens, "document_bytes": service.settings.document_bytes, **limits},
        data=[graft_summary(entry) for entry in service.store.entries().values()],
    )


def _served_backbone(service: Service) -> ServedBackbone:
    return ServedBackbone(
        name=service.name,
        kind=getattr(service.engine, "kind", "causal-lm"),
        chat=not service.tokenizer.plain,
        context=service.context if service.context < UNLIMITED else None,
    )


def graft_summary(entry: StoredGraft) -> GraftSummary:
    """Summarize a graft from its graft.json, and look for its audit page."""
    manifest = entry.manifest
    return GraftSummary(
        name=entry.name,
        backbone=entry.backbone,
        kind=manifest.kind,
        label=_label(manifest),
        parameters=manifest.parameters,
        steps=_integer(manifest.training.get("steps")),
        tokens=_integer(manifest.training.get("tokens")),
        audit=_audit_path(entry) is not None,
        **_trade_off(_measured(manifest)),
    )


def graft_report(entry: StoredGraft) -> GraftReport:
    """Return the measurements of a graft from its graft.json and, if there is one, from the results.json of its run.

    Raises:
        OSError: the audit page can't be read.
    """
    manifest = entry.manifest
    measured = _measured(manifest)
    results, row_id = _find_results(entry)
    if results is None:
        rows = [Row(id=row_id, label=_label(manifest), metrics=measured)]
    else:
        rows = results.rows
    settings = _mapping(manifest.training.get("training"))
    audit_path = _audit_path(entry)
    return GraftReport(
        name=entry.name,
        points=_points(rows, row_id),
        measured=measured,
        training={key: settings[key] for key in _SETTINGS if settings.get(key) is not None},
        results=None if results is None else _document(results),
        audit=None if audit_path is None else audit_path.read_text(encoding="utf-8"),
    )


def _points(rows: list[Row], own_id: str) -> list[TradeOffPoint]:
    points = []
    for row in rows:
        if "learned" in row.metrics or "forgotten" in row.metrics:
            point = TradeOffPoint(
                id=row.id,
                label=row.label,
                own=row.id == own_id,
                **_trade_off(row.metrics),
            )
            points.append(point)
    return points


def _document(results: Results) -> dict[str, JsonValue]:
    document = results.model_dump(mode="json")
    document["command"] = _without_paths(results.command)
    return document


def _without_paths(command: str) -> str:
    """Replace absolute paths of this machine, which older reports may have."""
    return re.sub(r"(?<![^\s='\"])/[^\s'\"]+", "DIR", command)


def _find_results(entry: StoredGraft) -> tuple[Results | None, str]:
    """Return the results of the run that trained a graft, and the id of the graft's row.

    A damaged file counts as missing, because graft.json has the graft's own metrics.
    """
    for folder, row_id in _result_folders(entry):
        path = folder / FILE_NAME
        if path.is_file() and path.stat().st_size <= _MAX_REPORT_BYTES:
            with suppress(GraftError):
                results = Results.read(path)
                if row_id in [row.id for row in results.rows]:
                    return results, row_id
    return None, entry.manifest.kind


def _result_folders(entry: StoredGraft) -> Iterator[tuple[Path, str]]:
    """Yield folders that may have results.json, with the graft's row id: its own, its run's, and the parent's."""
    kind = entry.manifest.kind
    folder = entry.folder.absolute()
    yield folder, kind
    if folder.name == _GRAFT_FOLDER:
        yield folder.parent, kind
        yield folder.parent.parent, folder.parent.name


def _audit_path(entry: StoredGraft) -> Path | None:
    """Return the path of audit.html in the graft's folder or its run's, or in a folder `audit` there."""
    folders = [folder for folder, _ in _result_folders(entry)][:2]
    for folder in folders:
        for name in ("audit.html", "audit/audit.html"):
            path = folder / name
            if path.is_file():
                return path
    return None


def _measured(manifest: Manifest) -> dict[str, Metric]:
    """Return the metrics in graft.json without invalid ones."""
    return _METRICS.validate_python(_mapping(manifest.training.get("measured")))


def _trade_off(metrics: Mapping[str, Metric]) -> dict[str, Interval | None]:
    """Return learning and forgetting as intervals."""
    return {name: _interval(metrics.get(name)) for name in ("learned", "forgotten")}


def _interval(value: Metric | None) -> Interval | None:
    if isinstance(value, int | float):
        return Interval(mean=value, low=value, high=value)
    return value


def _label(manifest: Manifest) -> str:
    with suppress(GraftError):
        return manifest.graft_config().label
    return manifest.kind


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
