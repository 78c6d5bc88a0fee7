"""The parts of a running server, and their construction from backbones and folders of grafts."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from graftlm.backbone import Backbone, BackboneKind, default_device, end_ids, load_backbone
from graftlm.backbone.formats import quantize_weights
from graftlm.backbone.load import inspect_model, served_kind
from graftlm.backbone.memory import check_memory
from graftlm.errors import GraftError
from graftlm.files.hub import fetch_folder
from graftlm.serving.engine import BatchingEngine, ThreadedEngine
from graftlm.serving.grammars import GrammarCompiler
from graftlm.serving.middleware import ServerMetrics
from graftlm.serving.predicting import PredictionEngine
from graftlm.serving.protocol import Engine, EngineLimits, context_limit
from graftlm.serving.router import EngineRouter
from graftlm.serving.settings import ApiKeys, ServerSettings
from graftlm.serving.store import NAME, GraftStore
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.store.manifest import read_manifest


class Service:
    """What the routes work with, for one backbone; or for all of them, and then the tokenizer is the first one's.

    Attributes:
        engine: of the backbone, or of all.
        name: name of the backbone in requests.
        settings, limits, keys: of the web side; of the engine; API keys.
        fingerprint, encodes: of the backbone, as responses report it; whether it is an encoder.
        grammars: for answers of a given form.
        context: maximum tokens of a prompt and its continuation.
        metrics: for Prometheus.
        members: the services of several backbones by name; empty where there is one.
        started: start time in seconds since 1970.
        closing: set once the server accepts nothing new.

    Raises BackboneError if the backbone has no tokenizer.
    """

    def __init__(
        self,
        backbone: Backbone,
        engine: Engine,
        store: GraftStore,
        name: str,
        *,
        settings: ServerSettings | None = None,
        limits: EngineLimits | None = None,
        keys: ApiKeys | None = None,
    ) -> None:
        self.engine, self.store, self.name = engine, store, name
        self.settings, self.limits = settings or ServerSettings(), limits or EngineLimits()
        self.keys = keys or ApiKeys()
        self.fingerprint, self.encodes = f"fp_{backbone.fingerprint.id}", backbone.kind == "encoder"
        self.context = context_limit(backbone, self.limits)
        self.tokenizer = ServingTokenizer(backbone, self.settings.chat_template)
        vocabulary, ends = self.tokenizer.vocabulary, end_ids(backbone.model, self.tokenizer.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer.tokenizer, vocabulary, ends)
        self.metrics = ServerMetrics(engine)
        self.members: dict[str, Service] = {}
        self.started, self.closing = int(time.time()), threading.Event()

    @classmethod
    def joined(cls, members: dict[str, Service]) -> Service:
        """The service of all backbones, from those of each."""
        whole = copy.copy(next(iter(members.values())))
        router = EngineRouter([cast("ThreadedEngine", member.engine) for member in members.values()])
        whole.engine, whole.members, whole.metrics = router, members, ServerMetrics(router)
        for member in members.values():
            member.metrics = whole.metrics
        return whole

    def reload(self, *, now: bool = False) -> None:
        """Take changed grafts into service."""
        self.store.refresh(
            self.engine.replace, lambda graft, outcome: self.metrics.loads.labels(graft, outcome).inc(), now=now
        )


def load_backbones(
    models: Mapping[str, str],
    given: Mapping[str, str | Path],
    folder: Path | None = None,
    *,
    device: str | None = None,
    quantize: str | None = None,
    **options: Any,
) -> dict[str, Backbone]:
    """Load models, each as an encoder where it is one, or where the grafts of its architecture were trained on one.

    Grafts given by name outrank those of the folder; where these differ, or there are none, a decoder writes.

    Args:
        models: each model's name on the hub or path, by its name in requests.
        given, folder: of grafts, as of `open_service`.
        device: for all; None takes the fastest.
        quantize: int8 or int4.
        options: dtype and trust_remote_code, as of `load_backbone`.

    Raises BackboneError if a model can't be loaded, or the weights do not fit into the memory together.
    """
    on = device or default_device()
    named = [read_manifest(path).backbone for path in given.values()]
    in_folder = []
    for path in folder.iterdir() if folder is not None and folder.is_dir() else ():
        if not path.name.startswith("."):
            with suppress(GraftError):  # which the store reports
                in_folder.append(read_manifest(path).backbone)
    kinds: dict[str, BackboneKind] = {}
    sizes: dict[str, int] = {}
    for name, model in models.items():
        size, architecture = inspect_model(model, "causal-lm", **options) if len(models) > 1 else (0, None)
        kinds[name] = own = served_kind(model, **options)
        if own != "encoder":
            kinds[name] = _kind(architecture, named) or _kind(architecture, in_folder) or own
        counted_otherwise = kinds[name] == "encoder" and len(models) > 1
        sizes[name] = inspect_model(model, "encoder", **options)[0] if counted_otherwise else size
    check_memory(sizes, on, quantized=quantize is not None)
    backbones = {}
    for name, model in models.items():
        backbones[name] = load_backbone(model, kind=kinds[name], device=on, **options)
        if quantize is not None:
            quantize_weights(backbones[name].bare_model, quantize, model)
    return backbones


def _kind(architecture: str | None, records: Iterable[Any]) -> BackboneKind | None:
    """The kind that all of these grafts' backbones of an architecture are, or all if it is None; else None."""
    kinds = {record.kind for record in records if architecture in (None, record.fingerprint.get("architecture"))}
    return kinds.pop() if len(kinds) == 1 else None


def open_service(
    backbone: Backbone | Mapping[str, Backbone],
    given: Mapping[str, str | Path] | None = None,
    folder: str | Path | None = None,
    *,
    name: str | None = None,
    limits: EngineLimits | None = None,
    settings: ServerSettings | None = None,
    keys: ApiKeys | None = None,
) -> Service:
    """Load grafts, start the engines, and return the service.

    Args:
        backbone: a causal language model with its tokenizer, or an encoder for grafts with heads; or several by name.
        given: folders of grafts by name.
        folder: a folder with further grafts' folders.
        name: name of a single backbone in requests; by default its name on the hub, or its folder's name.
        limits, settings, keys: as of `Service`.

    Raises GraftError if a part can not be loaded or used.
    """
    if isinstance(backbone, Backbone):
        backbone = {name or served_name(backbone.name): backbone}
    folders = {graft: fetch_folder(path, "graft.json") for graft, path in (given or {}).items()}
    for known, model in backbone.items():
        checked_name(known)
        model.need_tokenizer()
    store = GraftStore(backbone, folders, None if folder is None else Path(folder))
    outcomes: list[tuple[str, str]] = []
    grafts, members = store.open(lambda *outcome: outcomes.append(outcome)), {}
    for known, model in backbone.items():
        own = {graft: loaded for graft, loaded in grafts.items() if loaded._fingerprint == model.fingerprint}
        engine = (PredictionEngine if model.kind == "encoder" else BatchingEngine)(model, own, known, limits)
        members[known] = Service(model, engine, store, known, settings=settings, limits=limits, keys=keys)
    service = Service.joined(members) if len(members) > 1 else next(iter(members.values()))
    for outcome in outcomes:
        service.metrics.loads.labels(*outcome).inc()
    return service


def name_models(pairs: Iterable[tuple[str | None, str]]) -> dict[str, str]:
    """Models by their names in requests; GraftError if two have the same name, or requests can not use it."""
    models: dict[str, str] = {}
    for name, model in pairs:
        name = checked_name(name or served_name(model))
        if name in models:
            raise GraftError(f"Two backbones have the name {name}: give each its own by --backbone NAME=MODEL.")
        models[name] = model
    return models


def served_name(name: str) -> str:
    """The default name of a backbone in requests: its name on the hub, or the last part of its folder's path."""
    return Path(name).absolute().name if Path(name).is_dir() else name


def checked_name(name: str) -> str:
    """The name of a backbone in requests. Raises GraftError if requests can not use the name."""
    if not all(NAME.fullmatch(part) for part in name.split("/")):
        raise GraftError(
            f"Requests can't call the backbone {name!r}: give it another (--name, or --backbone "
            "NAME=MODEL), of letters, digits, dots, dashes."
        )
    return name
