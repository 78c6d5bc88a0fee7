"""The parts of a running server, and their construction from a backbone and folders of grafts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from graftlm.backbone import Backbone, end_ids
from graftlm.errors import GraftError
from graftlm.io import fetch_folder
from graftlm.serving.engine import BatchingEngine
from graftlm.serving.grammars import GrammarCompiler
from graftlm.serving.middleware import ServerMetrics
from graftlm.serving.predicting import PredictionEngine
from graftlm.serving.protocol import Engine, EngineLimits, context_limit
from graftlm.serving.settings import ApiKeys, ServerSettings
from graftlm.serving.store import NAME, GraftStore
from graftlm.serving.tokenization import ServingTokenizer


class Service:
    """What the routes work with.

    Attributes:
        name: name of the backbone in requests.
        settings, limits, keys: of the web side; of the engine; API keys.
        fingerprint: of the backbone, as responses report it.
        grammars: for answers of a given form.
        context: maximum tokens of a prompt and its continuation.
        metrics: for Prometheus.
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
        self.fingerprint = f"fp_{backbone.fingerprint.id}"
        self.context = context_limit(backbone, self.limits)
        self.tokenizer = ServingTokenizer(backbone, self.settings.chat_template)
        vocabulary, ends = self.tokenizer.vocabulary, end_ids(backbone.model, self.tokenizer.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer.tokenizer, vocabulary, ends)
        self.metrics = ServerMetrics(engine)
        self.started, self.closing = int(time.time()), threading.Event()

    def reload(self, *, now: bool = False) -> None:
        """Take changed grafts into service."""
        self.store.refresh(
            self.engine.replace, lambda graft, outcome: self.metrics.loads.labels(graft, outcome).inc(), now=now
        )


def open_service(
    backbone: Backbone,
    given: Mapping[str, str | Path] | None = None,
    folder: str | Path | None = None,
    *,
    name: str | None = None,
    limits: EngineLimits | None = None,
    settings: ServerSettings | None = None,
    keys: ApiKeys | None = None,
) -> Service:
    """Load grafts, start the engine, and return the service.

    Args:
        backbone: a causal language model with its tokenizer, or an encoder for grafts with heads.
        given: folders of grafts by name.
        folder: a folder with further grafts' folders.
        name: name of the backbone in requests; by default its name on the hub, or its folder's name.
        limits, settings, keys: as of `Service`.

    Raises GraftError if a part can not be loaded or used.
    """
    name = checked_name(name or served_name(backbone.name))
    backbone.need_tokenizer()
    folders = {graft: fetch_folder(path, "graft.json") for graft, path in (given or {}).items()}
    store = GraftStore(backbone, folders, None if folder is None else Path(folder), frozenset({name}))
    engine = (PredictionEngine if backbone.kind == "encoder" else BatchingEngine)(backbone, store.open(), name, limits)
    return Service(backbone, engine, store, name, settings=settings, limits=limits, keys=keys)


def served_name(name: str) -> str:
    """The default name of a backbone in requests: its name on the hub, or the last part of its folder's path."""
    return Path(name).absolute().name if Path(name).is_dir() else name


def checked_name(name: str) -> str:
    """The name of a backbone in requests. Raises GraftError if requests can not use the name."""
    if not all(NAME.fullmatch(part) for part in name.split("/")):
        raise GraftError(
            f"Requests can't call the backbone {name!r}: give it another (--name), of letters, digits, dots, dashes."
        )
    return name
