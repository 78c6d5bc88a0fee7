"""A server as a process: everything loaded, then requests until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import uvicorn

from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import GraftError
from graftlm.serving.app import create_app
from graftlm.serving.engine import BatchingEngine
from graftlm.serving.keys import VARIABLE, Keys
from graftlm.serving.metrics import Metrics
from graftlm.serving.prompts import Prompts
from graftlm.serving.protocol import Limits
from graftlm.serving.service import Service
from graftlm.serving.settings import LOOPBACK, Settings
from graftlm.serving.shelf import NAME, Shelf

LOG = logging.getLogger("graftlm.serving")
_LAST_SECONDS = 5  # that answers have to reach their clients once everything is written


def open_service(
    backbone: Backbone,
    given: Mapping[str, str | Path] | None = None,
    folder: str | Path | None = None,
    *,
    name: str | None = None,
    settings: Settings | None = None,
    limits: Limits | None = None,
    keys: Keys | None = None,
) -> Service:
    """A service with its grafts loaded.

    Args:
        backbone: a causal language model with its tokenizer.
        given: folders of grafts, by the names that requests use.
        folder: a folder of such folders.
        name: what requests call the backbone; by default its name on the hub, or its folder's.
        settings: of the web side.
        limits: of the engine.
        keys: who may ask.

    Raises:
        GraftError: something can't be loaded or used.
    """
    settings, limits, keys = settings or Settings(), limits or Limits(), keys or Keys()
    name = checked_name(name or served_name(backbone.name))
    prompts = Prompts(backbone, settings.chat_template)
    places = {one: Path(where) for one, where in (given or {}).items()}
    shelf = Shelf(backbone, places, None if folder is None else Path(folder), frozenset({name}))
    engine = BatchingEngine(backbone, shelf.open(), name, limits)
    return Service(
        backbone=backbone,
        name=name,
        engine=engine,
        limits=limits,
        shelf=shelf,
        settings=settings,
        prompts=prompts,
        metrics=Metrics(engine),
        keys=keys,
        started=int(time.time()),
    )


def load(name: str, *, device: str | None = None, trust_remote_code: bool = False) -> Backbone:
    """A backbone on a device, by default the fastest there is.

    Raises:
        BackboneError: it can't be loaded.
    """
    backbone = load_backbone(name, trust_remote_code=trust_remote_code)
    backbone.move(device)
    return backbone


def log_to_stderr(quiet: bool) -> None:
    """What happens to grafts and when the server stops, a line each; quiet: warnings alone."""
    handler = logging.StreamHandler()
    handler.set_name(LOG.name)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.setLevel(logging.WARNING if quiet else logging.INFO)
    for logger in (LOG, logging.getLogger("uvicorn.error")):
        for earlier in [one for one in logger.handlers if one.name == handler.name]:  # a server before in this process
            logger.removeHandler(earlier)
        logger.addHandler(handler)


def served_name(name: str) -> str:
    """What requests call a backbone: a name of the hub as it is, of a folder the last part."""
    return Path(name).absolute().name if Path(name).is_dir() else name


def checked_name(short: str) -> str:
    """A backbone's name.

    Raises:
        GraftError: it can't be one.
    """
    if not all(NAME.fullmatch(part) for part in short.split("/")):
        raise GraftError(
            f"Requests can't call the backbone {short!r}: give it another (--name), of letters, digits, dots, dashes."
        )
    return short


class Server(uvicorn.Server):
    """uvicorn's server, whose signals first let the engine finish what it began; a second one ends it at once.

    Args:
        service: what is served.
        ready: called with the address once requests are taken.
    """

    def __init__(self, service: Service, ready: Callable[[str], None] = lambda address: None) -> None:
        config = uvicorn.Config(
            create_app(service),
            host=service.settings.host,
            port=service.settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        super().__init__(config)
        self.service, self.ready = service, ready
        self._stopping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[bool] | None = None
        self._reloading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn has said so in its log
            raise GraftError(
                f"The address {self.config.host}:{self.config.port} can't be listened at: name another (--port 0 "
                "takes a free one)."
            ) from None
        if threading.current_thread() is threading.main_thread():
            self._listen_for_signals()
        self.ready(self._address())

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)

    def _address(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _on_stop(self) -> None:
        if self._stopping is not None:
            self.should_exit = self.force_exit = True
            self._ending = asyncio.get_running_loop().create_task(asyncio.to_thread(self.service.engine.close, 0))
            return
        self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        """Refuse what is new, let the engine finish, then close."""
        self.service.phase.close()
        stats = self.service.engine.stats()
        LOG.info("stopping: %s running and %s waiting are finished first", stats.running, stats.waiting)
        whole = await asyncio.to_thread(self.service.engine.close, self.service.settings.grace)
        if not whole:
            LOG.warning("stopped after %g seconds with requests unfinished", self.service.settings.grace)
        self.should_exit = True

    def _on_reload(self) -> None:
        work = asyncio.to_thread(self.service.reload, now=True)
        self._reloading = asyncio.get_running_loop().create_task(work)


def serve(service: Service, ready: Callable[[str], None] = lambda address: None) -> None:
    """Answer requests until SIGTERM or SIGINT; SIGHUP reads changed grafts at once.

    Raises:
        GraftError: the address can't be listened at.
    """
    Server(service, ready).run()


def is_local(settings: Settings) -> bool:
    """Whether only this machine can reach a server."""
    return settings.host in LOOPBACK


__all__ = ["LOOPBACK", "VARIABLE", "Server", "is_local", "load", "log_to_stderr", "open_service", "serve"]
