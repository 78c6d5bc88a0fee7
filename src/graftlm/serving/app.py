"""The web application: its routes, its middleware, and the files of the page."""

from __future__ import annotations

import asyncio
import functools
import mimetypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from graftlm.errors import GraftError
from graftlm.serving import extensions, openai_routes, operations
from graftlm.serving.errors import LOG, on_error
from graftlm.serving.middleware import (
    AllowedHostMiddleware,
    ApiKeyMiddleware,
    InternalErrorMiddleware,
    JsonContentMiddleware,
    OpenRequestsMiddleware,
    RefusalMiddleware,
    RequestBodyMiddleware,
    RequestMetricsMiddleware,
    ShutdownMiddleware,
)
from graftlm.serving.service import Service
from graftlm.serving.streaming import ClientDisconnectedError
from graftlm.version import __version__

PAGE_FOLDER = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_DISCARDED_FACTOR = 8  # a refused body is received up to this multiple of the limit


def create_app(service: Service) -> FastAPI:
    """Create the ASGI application of a server.

    While it runs, it checks the grafts' files at intervals. When it ends, it sets `service.closing` and closes the
    engine.

    Args:
        service: the parts of the server, whose engine is running.
    """
    app = FastAPI(
        title="GraftLM",
        version=__version__,
        summary="An OpenAI-compatible server for a frozen backbone and its grafts.",
        docs_url=None,  # the documentation pages load scripts from another site
        redoc_url=None,
        lifespan=functools.partial(_lifespan, service),
    )
    app.include_router(openai_routes.router(service))
    app.include_router(extensions.router(service))
    app.include_router(operations.router(service))
    _add_page(app)
    app.add_exception_handler(GraftError, on_error)
    app.add_exception_handler(RequestValidationError, on_error)
    app.add_exception_handler(HTTPException, on_error)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
    _add_middleware(app, service)
    return app


def _add_middleware(app: FastAPI, service: Service) -> None:
    """Add the middleware from the innermost to the outermost."""
    settings = service.settings
    app.add_middleware(InternalErrorMiddleware)
    app.add_middleware(
        RequestBodyMiddleware,
        max_bytes=settings.body_bytes,
        seconds=settings.body_seconds,
        max_bytes_of_paths={extensions.SUMMARIZE_PATH: settings.document_bytes},
    )
    app.add_middleware(JsonContentMiddleware)
    app.add_middleware(OpenRequestsMiddleware, limit=settings.requests)
    app.add_middleware(ShutdownMiddleware, closing=service.closing)
    app.add_middleware(ApiKeyMiddleware, keys=service.keys)
    app.add_middleware(AllowedHostMiddleware, hosts=settings.allowed_hosts())
    app.add_middleware(RefusalMiddleware, max_bytes=_DISCARDED_FACTOR * settings.body_bytes)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(RequestMetricsMiddleware, metrics=service.metrics)


@asynccontextmanager
async def _lifespan(service: Service, app: FastAPI) -> AsyncIterator[None]:
    watching = asyncio.create_task(_watch(service))
    try:
        yield
    finally:
        watching.cancel()
        service.closing.set()
        await asyncio.to_thread(service.engine.close, service.settings.grace)


async def _watch(service: Service) -> None:
    """Check the grafts' files at intervals. A check that fails is logged and does not end the loop."""
    while service.settings.reload_seconds:
        await asyncio.sleep(service.settings.reload_seconds)
        try:
            await asyncio.to_thread(service.reload)
        except Exception:  # for example, a folder that can't be listed for some time
            LOG.exception("the grafts' files could not be checked; the next check tries again")


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # only seen by the metrics, since no client receives it


def _add_page(app: FastAPI) -> None:
    """Add a route for each file of the page, with index.html at the root. All files are read now."""
    for file in PAGE_FOLDER.iterdir():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        media_type = mimetypes.guess_type(file.name)[0]
        page = Response(file.read_bytes(), headers=_PAGE_HEADERS, media_type=media_type)
        app.add_route(path, page, methods=["GET"], include_in_schema=False)  # type: ignore[arg-type]  # an ASGI app
