"""Reports of the grafts in service: what they are, what they learned and forgot, and the results of their run."""

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
from graftlm.serving.middleware import DOCUMENT_FACTOR
from graftlm.serving.service import Service
from graftlm.serving.store import StoredGraft
from graftlm.store.manifest import Manifest

_GRAFT_FOLDER = "graft"  # name of a graft's folder inside of a run's folder
_MAX_REPORT_BYTES = 32 * 2**20
_SETTINGS = ("batch_size", "learning_rate", "schedule", "precision", "seed")
_METRICS = TypeAdapter(dict[str, OnErrorOmit[StrictInt | StrictFloat | Interval]])


class ServedBackbone(BaseModel):
    """A backbone of grafts; an encoder writes no text."""

    name: str
    kind: str
    chat: bool
    context: int | None


class TradeOff(BaseModel):
    """Learning and forgetting in nats per token; None where they were not measured."""

    learned: Interval | None
    forgotten: Interval | None


class GraftSummary(TradeOff):
    """A graft in short; `audit` says whether it has the page of an audit."""

    name: str
    backbone: str
    kind: str
    label: str
    parameters: int
    steps: int | None
    tokens: int | None
    audit: bool


class ServedModels(BaseModel):
    """The response of /v1/graftlm/grafts; `limits` are the largest values that requests may have."""

    object: Literal["list"] = "list"
    backbones: list[ServedBackbone]
    limits: dict[str, int]
    data: list[GraftSummary]


class TradeOffPoint(TradeOff):
    """A method's learning and forgetting; `own` marks the graft itself."""

    id: str
    label: str
    own: bool


class GraftReport(BaseModel):
    """The response of /v1/graftlm/grafts/NAME/report.

    Attributes:
        points: the graft, and the methods of the same run.
        measured: all metrics of the graft.
        training: settings of the run.
        results: the run's results.json, if it is in a folder of the graft's run.
        audit: the HTML page of the graft's audit, if it has one.
    """

    name: str
    points: list[TradeOffPoint]
    measured: dict[str, Metric]
    training: dict[str, JsonValue]
    results: dict[str, JsonValue] | None
    audit: str | None


def served_models(service: Service, limits: dict[str, int]) -> ServedModels:
    """The backbones and the grafts of a service, with its limits and those of its routes."""
    each = list(service.members.values()) or [service]
    sizes = {"max_tokens": max(min(own.limits.max_tokens, own.context - 1) for own in each)}
    sizes["document_bytes"] = DOCUMENT_FACTOR * service.settings.body_bytes
    backbones = [_served_backbone(own) for own in each]
    grafts = [graft_summary(entry) for entry in service.store.entries().values()]
    return ServedModels(backbones=backbones, limits=sizes | limits, data=grafts)


def _served_backbone(own: Service) -> ServedBackbone:
    kind, context = getattr(own.engine, "kind", "causal-lm"), own.context if own.context < UNLIMITED else None
    return ServedBackbone(name=own.name, kind=kind, chat=not own.tokenizer.plain, context=context)


def graft_summary(entry: StoredGraft) -> GraftSummary:
    """A graft in short, from its graft.json."""
    manifest = entry.manifest
    steps, tokens = map(manifest.training.get, ("steps", "tokens"))
    return GraftSummary(
        name=entry.name,
        backbone=entry.backbone,
        kind=manifest.kind,
        label=_label(manifest),
        parameters=manifest.parameters,
        steps=steps if type(steps) is int else None,
        tokens=tokens if type(tokens) is int else None,
        audit=_audit_path(entry) is not None,
        **_trade_off(_measured(manifest)),
    )


def graft_report(entry: StoredGraft) -> GraftReport:
    """The measurements of a graft, from its graft.json and from the results.json of its run if there is one."""
    manifest, measured = entry.manifest, _measured(entry.manifest)
    results, row_id = _find_results(entry)
    rows = results.rows if results is not None else [Row(id=row_id, label=_label(manifest), metrics=measured)]
    document = results.model_dump(mode="json") | {"command": _without_paths(results.command)} if results else None
    settings = _mapping(manifest.training.get("training"))
    return GraftReport(
        name=entry.name,
        points=[
            TradeOffPoint(id=row.id, label=row.label, own=row.id == row_id, **_trade_off(row.metrics))
            for row in rows
            if {"learned", "forgotten"} & row.metrics.keys()
        ],
        measured=measured,
        training={key: settings[key] for key in _SETTINGS if settings.get(key) is not None},
        results=document,
        audit=page.read_text(encoding="utf-8") if (page := _audit_path(entry)) else None,
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
            with suppress(GraftError):
                results = Results.read(path)
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


def _audit_path(entry: StoredGraft) -> Path | None:
    """audit.html in the graft's folder or its run's, or in a folder `audit` there."""
    folders = [folder for folder, _ in _result_folders(entry)][:2]
    paths = [folder / name for folder in folders for name in ("audit.html", "audit/audit.html")]
    return next((path for path in paths if path.is_file()), None)


def _measured(manifest: Manifest) -> dict[str, Metric]:
    """The metrics in graft.json; values that are no metrics are left out."""
    return _METRICS.validate_python(_mapping(manifest.training.get("measured")))


def _trade_off(metrics: Mapping[str, Metric]) -> dict[str, Interval | None]:
    """Both metrics as intervals."""
    both = {name: metrics.get(name) for name in ("learned", "forgotten")}
    return {
        name: Interval(mean=value, low=value, high=value) if isinstance(value, int | float) else value
        for name, value in both.items()
    }


def _label(manifest: Manifest) -> str:
    with suppress(GraftError):
        return manifest.graft_config().label
    return manifest.kind


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
