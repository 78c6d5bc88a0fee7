"""The server process: uvicorn with signals that stop the server and reload grafts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator

import uvicorn

from graftlm.serving.app import create_app
from graftlm.serving.service import Service

LOG = logging.getLogger("graftlm.serving")
_LAST_SECONDS = 5  # time for responses to reach their clients after the engine has finished


def log_to_stderr(quiet: bool) -> None:
    """Log changes of grafts, the shutdown, and errors of the server to stderr.

    Args:
        quiet: log warnings and errors only.
    """
    handler = logging.StreamHandler()
    handler.set_name(LOG.name)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.setLevel(logging.WARNING if quiet else logging.INFO)
    for logger in (LOG, logging.getLogger("uvicorn.error")):
        # The handler of an earlier server in this process is replaced.
        others = [known for known in logger.handlers if known.name != handler.name]
        logger.handlers = [*others, handler]


def address_of(server: uvicorn.Server) -> str:
    """Return the address of a server that listens, such as http://127.0.0.1:8000."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


class GraftServer(uvicorn.Server):
    """A uvicorn server whose engine finishes its requests after the first signal; a second signal ends it at once.

    Args:
        service: the parts of the server.
        on_ready: called with the address once the server accepts requests.
    """

    def __init__(self, service: Service, on_ready: Callable[[str], None] | None = None) -> None:
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
        self.service = service
        self.on_ready = on_ready
        self._tasks: set[asyncio.Task[object]] = set()  # asyncio itself keeps weak references only

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, install the signal handlers in the main thread, and call `on_ready`.

        Raises:
            GraftError: the address is in use or not available.
            SystemExit: uvicorn could not start for another reason, which it has logged.
        """
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn has logged the reason
            self.service.settings.check_address()
            raise
        if threading.current_thread() is threading.main_thread():
            self._handle_signals()
        if self.on_ready is not None:
            self.on_ready(address_of(self))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's own signal handlers by those of `startup`."""
        yield

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop)
        loop.add_signal_handler(signal.SIGINT, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)

    def _start(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_reload(self) -> None:
        self._start(asyncio.to_thread(self.service.reload, now=True))

    def _on_stop(self) -> None:
        if self.service.closing.is_set():
            self.should_exit = True
            self.force_exit = True
            self._start(asyncio.to_thread(self.service.engine.close, 0))
        else:
            self.service.closing.set()
            self._start(self._stop())

    async def _stop(self) -> None:
        """Let the engine finish, then exit."""
        grace = self.service.settings.grace
        stats = self.service.engine.stats()
        LOG.info("stopping; continuations to finish: %s running, %s waiting", stats.running, stats.waiting)
        finished = await asyncio.to_thread(self.service.engine.close, grace)
        if not finished:
            LOG.warning("cancelled the requests that were unfinished after the grace period of %g s", grace)
        self.should_exit = True


def serve(service: Service, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP loads changed grafts.

    Args:
        service: the parts of the server, whose engine is closed at the end.
        on_ready: called with the address, such as http://127.0.0.1:8000, once the server accepts requests.

    Raises:
        GraftError: the address is in use or not available.
    """
    GraftServer(service, on_ready).run()
