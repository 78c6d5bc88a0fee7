"""The parts of a running server, and their construction from backbones and folders of grafts."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from graftlm.backbone import Backbone, end_ids
from graftlm.files.hub import fetch_folder
from graftlm.grafts import Graft
from graftlm.serving.backbones import checked_name, served_name
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.engine import ThreadedEngine
from graftlm.serving.grammars import GrammarCompiler
from graftlm.serving.metrics import ServerMetrics
from graftlm.serving.prediction import PredictionEngine
from graftlm.serving.protocol import Engine, EngineLimits, check_model, context_limit
from graftlm.serving.router import EngineRouter
from graftlm.serving.settings import ApiKeys, ServerSettings
from graftlm.serving.store import GraftStore
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.store.stages import chosen_graft


class Service:
    """The parts of a server for one backbone. `joined` combines those of several backbones.

    Args:
        backbone: a backbone with a tokenizer.
        engine: the engine of the backbone.
        store: the grafts.
        name: name of the backbone in requests.
        settings: settings of the HTTP server.
        limits: limits of the engine.
        keys: API keys; without keys every client is accepted.

    Attributes:
        fingerprint: fingerprint of the backbone in responses.
        encodes: whether the backbone is an encoder.
        context: maximum number of tokens of a prompt and its continuation.
        tokenizer: tokenizer of the backbone.
        grammars: compiler of the grammars that constrain answers.
        metrics: metrics for Prometheus.
        members: the services of several backbones by name; empty for one backbone.
        started: start time in seconds since 1970.
        closing: set once the server refuses new requests.

    Raises:
        BackboneError: the backbone has no tokenizer.
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
        self.engine = engine
        self.store = store
        self.name = name
        self.settings = settings or ServerSettings()
        self.limits = limits or EngineLimits()
        self.keys = keys or ApiKeys()
        self.fingerprint = f"fp_{backbone.fingerprint.id}"
        self.encodes = backbone.kind == "encoder"
        self.context = context_limit(backbone, self.limits)
        self.tokenizer = ServingTokenizer(backbone, self.settings.chat_template)
        self.grammars = GrammarCompiler(
            tokenizer=self.tokenizer.tokenizer,
            vocabulary=self.tokenizer.vocabulary,
            end_ids={*self.tokenizer.turn_ends, *end_ids(backbone.model, self.tokenizer.tokenizer)},
        )
        self.metrics = ServerMetrics(engine)
        self.members: dict[str, Service] = {}
        self.started = int(time.time())
        self.closing = threading.Event()

    @classmethod
    def joined(cls, members: dict[str, Service], engines: dict[str, ThreadedEngine]) -> Service:
        """Combine the services of several backbones, which share the metrics of the result.

        Attributes that belong to one backbone, such as the tokenizer, are those of the first service.

        Args:
            members: services by the name of their backbone, at least one.
            engines: their engines by the same names.
        """
        router = EngineRouter(list(engines.values()))
        whole = copy.copy(next(iter(members.values())))
        whole.engine = router
        whole.members = members
        whole.metrics = ServerMetrics(router)
        for member in members.values():
            member.metrics = whole.metrics
        return whole

    def of(self, model: str) -> Service:
        """Return the service of a model's backbone.

        Raises:
            UnknownModelError: a name is unknown.
            ServingError: a mixture has grafts of several backbones.
        """
        if isinstance(self.engine, EngineRouter):
            return self.members[self.engine.of(model).name]
        check_model(self.engine.names, model)
        return self

    def reload(self, *, now: bool = False) -> None:
        """Check the grafts' files, and put changed grafts into service.

        Args:
            now: load changed files at once. Otherwise they are loaded at the next check, if they have not changed again
                until then.
        """
        self.store.refresh(self.engine.replace, self._count_load, now=now)

    def _count_load(self, graft: str, outcome: str) -> None:
        self.metrics.loads.labels(graft, outcome).inc()


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
        name: name of a single backbone in requests; None uses its name on the hub, or the name of its folder.
        limits: limits of each engine; None uses the defaults.
        settings: settings of the HTTP server; None uses the defaults.
        keys: API keys; without keys every client is accepted.

    Raises:
        ArtifactError: a graft in `given` can't be loaded, or `folder` does not exist.
        BackboneError: a backbone has no tokenizer, or can neither generate text nor encode.
        GraftError: a name can't be used, or a graft can't share a batch.
    """
    if isinstance(backbone, Backbone):
        backbones: Mapping[str, Backbone] = {name or served_name(backbone.name): backbone}
    else:
        backbones = backbone
    folders = {graft: chosen_graft(fetch_folder(path, "graft.json")) for graft, path in (given or {}).items()}
    for backbone_name, model in backbones.items():
        checked_name(backbone_name)
        model.need_tokenizer()
    store = GraftStore(backbones, folders, None if folder is None else Path(folder))
    outcomes: list[tuple[str, str]] = []
    grafts = store.open(lambda graft, outcome: outcomes.append((graft, outcome)))
    members: dict[str, Service] = {}
    engines: dict[str, ThreadedEngine] = {}
    for backbone_name, model in backbones.items():
        engine = _engine(model, backbone_name, grafts, limits)
        engines[backbone_name] = engine
        members[backbone_name] = Service(
            model,
            engine,
            store,
            backbone_name,
            settings=settings,
            limits=limits,
            keys=keys,
        )
    if len(members) > 1:
        service = Service.joined(members, engines)
    else:
        service = next(iter(members.values()))
    for graft, outcome in outcomes:
        service.metrics.loads.labels(graft, outcome).inc()
    return service


def _engine(
    backbone: Backbone,
    name: str,
    grafts: Mapping[str, Graft],
    limits: EngineLimits | None,
) -> ThreadedEngine:
    """Start the engine of a backbone with its own grafts."""
    fingerprint = backbone.fingerprint
    grafts_of_backbone = {graft: loaded for graft, loaded in grafts.items() if loaded._fingerprint == fingerprint}
    engine_class = PredictionEngine if backbone.kind == "encoder" else BatchingEngine
    return engine_class(backbone, grafts_of_backbone, name, limits)
