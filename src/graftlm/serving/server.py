"""The server process: uvicorn with signals for stopping and reloading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from graftlm.serving.app import create_app
from graftlm.serving.service import Service

LOG = logging.getLogger("graftlm.serving")
_LAST_SECONDS = 5  # for responses to reach their clients after the engine has finished


def log_to_stderr(quiet: bool) -> None:
    """Log changes of grafts and the end of the server, a line each; with `quiet` warnings only."""
    handler = logging.StreamHandler()
    handler.set_name(LOG.name)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.setLevel(logging.WARNING if quiet else logging.INFO)
    for logger in (LOG, logging.getLogger("uvicorn.error")):
        others = [known for known in logger.handlers if known.name != handler.name]  # not of an earlier server
        logger.handlers = [*others, handler]


class GraftServer(uvicorn.Server):
    """A uvicorn server that lets the engine finish at the first signal; a second signal ends it at once.

    `on_ready` is called with the address once the server accepts requests.
    """

    def __init__(self, service: Service, on_ready: Callable[[str], None] = lambda address: None) -> None:
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
        self.service, self.on_ready = service, on_ready
        self._tasks: set[asyncio.Task[object]] = set()  # asyncio itself keeps weak references only

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn has logged the reason
            self.service.settings.check_address()
            raise
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_stop)
            reload = self.service.reload
            loop.add_signal_handler(signal.SIGHUP, lambda: self._start(asyncio.to_thread(reload, now=True)))
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_stop(self) -> None:
        if self.service.closing.is_set():
            self.should_exit = self.force_exit = True
            self._start(asyncio.to_thread(self.service.engine.close, 0))
        else:
            self.service.closing.set()
            self._start(self._stop())

    async def _stop(self) -> None:
        """Let the engine finish, then exit."""
        stats = self.service.engine.stats()
        LOG.info("stopping: %s running and %s waiting are finished first", stats.running, stats.waiting)
        if not await asyncio.to_thread(self.service.engine.close, self.service.settings.grace):
            LOG.warning("stopped after %g seconds with requests unfinished", self.service.settings.grace)
        self.should_exit = True


def serve(service: Service, on_ready: Callable[[str], None] = lambda address: None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP loads changed grafts. Raises GraftError if the address is not available."""
    GraftServer(service, on_ready).run()
