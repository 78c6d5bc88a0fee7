"""The application: OpenAI's routes, health and metrics."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from graftlm.serving import extensions
from graftlm.serving.answers import Chat, Completion, ErrorAnswer, Health, ModelCard, ModelList
from graftlm.serving.asks import Order, chat_order, completion_order
from graftlm.serving.errors import handle_errors
from graftlm.serving.guards import Guard
from graftlm.serving.metrics import CONTENT_TYPE, Measure, kind_of
from graftlm.serving.pages import page_router
from graftlm.serving.protocol import End, Piece
from graftlm.serving.schema import ChatRequest, CompletionRequest
from graftlm.serving.service import Service, Tickets, user_of
from graftlm.serving.streams import ClientLeftError, EventStream, unless_gone
from graftlm.serving.writing import ChatWriting, CompletionWriting, Writing
from graftlm.version import __version__

_SAID = {
    400: "Something in the request does not fit.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The body is not JSON.",
    421: "The server does not go by this name.",
    429: "The queue is full.",
    500: "Something broke.",
    503: "The server is shutting down, or had no time for the request.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": why} for status, why in _SAID.items()
}
_EXTRAS: dict[int | str, dict[str, Any]] = {
    501: {"model": ErrorAnswer, "description": "The server lacks a package that this needs."}
}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def create_app(service: Service) -> FastAPI:
    """The application of a server; it watches the grafts' files while it runs, and stops the engine at its end."""
    app = FastAPI(
        title="GraftLM",
        version=__version__,
        summary="An OpenAI-compatible server for a frozen backbone and its grafts.",
        docs_url=None,  # both would fetch their pages from elsewhere
        redoc_url=None,
        lifespan=functools.partial(_lifespan, service),
    )
    app.include_router(_openai(service))
    app.include_router(extensions.router(service), responses=ERRORS | _EXTRAS)
    app.include_router(_operation(service))
    app.include_router(page_router())
    handle_errors(app)
    app.add_exception_handler(ClientLeftError, _on_left)
    app.add_middleware(Guard, settings=service.settings, keys=service.keys, phase=service.phase)
    if service.settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.settings.origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Measure, metrics=service.metrics)
    return app


@asynccontextmanager
async def _lifespan(service: Service, app: FastAPI) -> AsyncIterator[None]:
    watching = asyncio.create_task(_watch(service))
    try:
        yield
    finally:
        watching.cancel()
        service.phase.close()
        await asyncio.to_thread(service.engine.close, service.settings.grace)


async def _watch(service: Service) -> None:
    """Look at the grafts' files again and again."""
    while service.settings.reload_seconds:
        await asyncio.sleep(service.settings.reload_seconds)
        await asyncio.to_thread(service.reload)


async def _on_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log: nobody reads it


def _openai(service: Service) -> APIRouter:
    """OpenAI's own routes."""
    router = APIRouter(prefix="/v1", responses=ERRORS)

    @router.get("/models", response_model=ModelList, summary="All names that `model` may have")
    async def models() -> Response:
        cards = [_card(service, name) for name in service.engine.names]
        return _json(ModelList(object="list", data=cards).json_line())

    @router.get("/models/{model:path}", response_model=ModelCard, summary="One of them, or a mixture")
    async def model(model: str) -> Response:
        service.check_model(model)
        return _json(_card(service, model).json_line())

    @router.post("/completions", response_model=Completion, responses=_STREAM, summary="Continue a text")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        order = await asyncio.to_thread(completion_order, service, body, user_of(request))
        return await _answer(service, request, order, CompletionWriting(order, service.prompts, service.fingerprint))

    @router.post("/chat/completions", response_model=Chat, responses=_STREAM, summary="Continue a conversation")
    async def chat(body: ChatRequest, request: Request) -> Response:
        order = await asyncio.to_thread(chat_order, service, body, user_of(request))
        return await _answer(service, request, order, ChatWriting(order, service.prompts, service.fingerprint))

    return router


def _operation(service: Service) -> APIRouter:
    """For those who run the server."""
    router = APIRouter()

    @router.get("/health", response_model=Health, responses={503: {"model": Health}}, summary="Ready for requests?")
    async def health() -> Response:
        stats, closing = service.engine.stats(), service.phase.closing
        said = Health(
            status="closing" if closing else "ready",
            running=stats.running,
            waiting=stats.waiting,
            models=len(service.engine.names),
            broken=sorted(service.shelf.problems()),
        )
        return _json(said.json_line(), 503 if closing else 200)

    @router.get("/metrics", response_class=Response, summary="Figures for Prometheus")
    async def metrics() -> Response:
        return Response(service.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    return router


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


def _card(service: Service, name: str) -> ModelCard:
    """What is told of a model."""
    entries = {entry.name: entry for entry in service.shelf.entries()}
    entry = entries.get(name)
    kind = entry.manifest.kind if entry else "backbone" if name == service.name else "mixture"
    return ModelCard(
        id=name,
        object="model",
        created=entry.changed if entry else service.started,
        owned_by="graftlm",
        graftlm={"kind": kind, "chat": "plain" if service.prompts.plain else "template"},
    )


async def _answer(service: Service, request: Request, order: Order, writing: Writing) -> Response:
    """Whole, or as a stream; either way nothing more is written when the client leaves."""
    tickets = Tickets(service.engine, order.asks)
    pieces = _counted(service, order, tickets)
    if order.stream:
        return EventStream(_events(order, writing, pieces), service.settings.send_seconds, tickets.cancel)
    try:
        return _json(await unless_gone(request, _whole(writing, pieces)))
    finally:
        tickets.cancel()


async def _counted(service: Service, order: Order, tickets: Tickets) -> AsyncGenerator[tuple[int, Piece | End], None]:
    """The pieces, with figures taken of them."""
    started, waiting = time.perf_counter(), True
    async for number, item in tickets:
        if waiting and isinstance(item, Piece):
            service.metrics.first.labels(kind_of(order.model)).observe(time.perf_counter() - started)
            waiting = False
        if isinstance(item, End):
            read = 0 if number % order.each else item.prompt_tokens
            service.metrics.used(order.model, read, item.completion_tokens)
        yield number, item


async def _whole(writing: Writing, pieces: AsyncGenerator[tuple[int, Piece | End], None]) -> str:
    async for number, item in pieces:
        writing.take(number, item)
    return writing.whole()


async def _events(
    order: Order, writing: Writing, pieces: AsyncGenerator[tuple[int, Piece | End], None]
) -> AsyncGenerator[str, None]:
    """The chunks of a stream as JSON."""
    begun = set[int]()
    async for number, item in pieces:
        if number not in begun and (first := writing.first(number)):
            yield first
        begun.add(number)
        text, told = writing.take(number, item)
        if text or told:
            yield writing.chunk(number, text, told, None)
        if isinstance(item, End):
            yield writing.chunk(number, "", [], writing.shown[number].finish)
    if order.usage:
        yield writing.last()
