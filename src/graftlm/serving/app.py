"""The web application: OpenAI's routes, health and metrics, and the files of the page."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import mimetypes
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from graftlm.errors import GraftError
from graftlm.serving import extensions, requests, responses, responses_api
from graftlm.serving.errors import ErrorResponse, on_error
from graftlm.serving.middleware import Guard, RequestMetrics, user_of
from graftlm.serving.protocol import Finish, RequestStream, ServingError, TokenOutput
from graftlm.serving.service import Service
from graftlm.version import __version__

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "A value of the request does not fit.",
        401: "The API key is missing or wrong.",
        404: "The model does not exist.",
        408: "The request did not arrive in time.",
        413: "The request is too large.",
        415: "The body is not JSON.",
        421: "The Host is not a name of this server.",
        429: "The queue is full.",
        500: "The server failed.",
        503: "The server is shutting down, or had no time for the request.",
    }.items()
}
_MISSING_EXTRA = {"model": ErrorResponse, "description": "The server lacks a package that this route needs."}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {}}}}}
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


def create_app(service: Service) -> FastAPI:
    """The application of a server. While it runs it checks the grafts' files; at its end it closes the engine."""
    app = FastAPI(
        title="GraftLM",
        version=__version__,
        summary="An OpenAI-compatible server for a frozen backbone and its grafts.",
        docs_url=None,  # both load their pages from another site
        redoc_url=None,
        lifespan=functools.partial(_lifespan, service),
    )
    app.include_router(_openai_router(service))
    app.include_router(extensions.router(service), responses=_ERRORS | {501: _MISSING_EXTRA})
    _add_operations(app, service)
    _add_page(app)
    for kind in (GraftError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(responses.ClientDisconnectedError, _on_disconnect)
    app.add_middleware(Guard, settings=service.settings, keys=service.keys, closing=service.closing)
    if service.settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.settings.origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestMetrics, metrics=service.metrics)
    return app


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
    """Check the grafts' files at intervals."""
    while service.settings.reload_seconds:
        await asyncio.sleep(service.settings.reload_seconds)
        await asyncio.to_thread(service.reload)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the metrics; no client receives it


def _openai_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=_ERRORS)
    get = functools.partial(router.get, response_model_exclude_unset=True)
    post = functools.partial(router.post, response_model_exclude_unset=True, responses=_STREAM)

    @get("/models", summary="All names that `model` may have")
    async def models() -> responses.ModelList:
        return responses.ModelList(
            object="list", data=[_card(requests.service_of(service, name), name) for name in service.engine.names]
        )

    @get("/models/{model:path}", summary="One of them, or a mixture")
    async def model(model: str) -> responses.ModelCard:
        return _card(requests.service_of(service, model), model)

    @post("/completions", response_model=responses.TextCompletion, summary="Continue a text")
    async def completions(body: requests.CompletionRequest, request: Request) -> Any:
        return await _answer(service, requests.parse_completion, responses.CompletionBuilder, body, request)

    @post("/chat/completions", response_model=responses.Chat, summary="Continue a conversation")
    async def chat(body: requests.ChatRequest, request: Request) -> Any:
        return await _answer(service, requests.parse_chat, responses.ChatBuilder, body, request)

    @post("/responses", response_model=responses_api.Response, summary="Answer a text, or continue a conversation")
    async def response(body: responses_api.ResponsesRequest, request: Request) -> Any:
        return await _answer(service, responses_api.parse_responses, responses_api.ResponsesBuilder, body, request)

    @router.post("/embeddings", response_model=responses.Embeddings, summary="The mean of a text's last hidden states")
    async def embeddings(body: requests.EmbeddingRequest, request: Request) -> Any:
        own, whole = requests.service_of(service, body.model), cast("Any", None)
        parsed = await asyncio.to_thread(requests.parse_embedding, own, body, user_of(request))
        for first in range(0, len(parsed.requests), size := own.limits.batch_size):  # more would fill the queue
            part = dataclasses.replace(parsed, requests=parsed.requests[first : first + size])
            answer: Any = await _respond(own, request, responses.EmbeddingBuilder, part)
            whole = answer if whole is None else whole.joined(answer)
        return whole

    return router


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {"model": responses.Health}}, summary="Ready for requests?")
    async def health(response: Response) -> responses.Health:
        stats, closing = service.engine.stats(), service.closing.is_set()
        response.status_code = 503 if closing else 200
        status, broken = "closing" if closing else "ready", sorted(service.store.problems())
        counts = {"running": stats.running, "waiting": stats.waiting, "models": len(service.engine.names)}
        return responses.Health(status=status, broken=broken, **counts)

    def tokens_of(model: str | None) -> Service:
        if model is None and service.members:
            problem = "The key model is missing: several backbones are served, with tokens of their own."
            raise ServingError(problem, "model")
        return requests.service_of(service, service.name if model is None else model)

    @app.post("/tokenize", responses=_ERRORS, summary="The tokens of a text or a chat, as of vLLM")
    async def tokens(body: requests.TokenizeRequest) -> dict[str, int | list[int]]:
        own = tokens_of(body.model)
        ids = await asyncio.to_thread(requests.tokenize, own, body)
        return {"count": len(ids), "max_model_len": own.context, "tokens": ids}

    @app.post("/detokenize", responses=_ERRORS, summary="The text of tokens, as of vLLM")
    async def text(body: requests.DetokenizeRequest) -> dict[str, str]:
        return {"prompt": await asyncio.to_thread(requests.detokenize, tokens_of(body.model), body)}

    @app.get("/version", summary="The server's version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response, summary="Figures for Prometheus")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_page(app: FastAPI) -> None:
    """A route for each file of the page, with index.html at the root. All files are read now."""
    for file in PAGE_FOLDER.iterdir():
        page = Response(file.read_bytes(), headers=_PAGE_HEADERS, media_type=mimetypes.guess_type(file.name)[0])
        path = "/" if file.name == "index.html" else f"/{file.name}"
        app.add_route(path, page, methods=["GET"], include_in_schema=False)  # type: ignore[arg-type]  # an ASGI app


def _card(service: Service, name: str) -> responses.ModelCard:
    entry = service.store.entries().get(name)
    kind = entry.manifest.kind if entry else "backbone" if name == service.name else "mixture"
    chat = "none" if service.encodes else "plain" if service.tokenizer.plain else "template"
    return responses.ModelCard(
        id=name,
        object="model",
        created=entry.changed if entry else service.started,
        owned_by="graftlm",
        graftlm={"kind": kind, "chat": chat},
        max_model_len=service.context,
    )


async def _answer(service: Service, parse: Any, kind: Any, body: Any, request: Request) -> BaseModel | Response:
    """The response to a body; bodies whose form is compiled wait for each other, and for nobody else."""
    service = requests.service_of(service, body.model)
    with_form = any(getattr(body, key, None) for key in ("structured_outputs", "response_format", "tools", "text"))
    pool = service.grammars.pool if with_form else None
    parsed = await asyncio.get_running_loop().run_in_executor(pool, parse, service, body, user_of(request))
    return await _respond(service, request, kind, parsed)


async def _respond(
    service: Service, request: Request, kind: type[responses.ResponseBuilder], parsed: requests.ParsedRequest
) -> BaseModel | Response:
    """Generate a whole response or a stream; generation ends when the client disconnects."""
    stream, builder = service.engine.submit(parsed.requests), kind(parsed, service.tokenizer, service.fingerprint)
    outputs = _measured(service, parsed, stream)
    if parsed.stream:
        return responses.EventStream(builder.events(outputs), service.settings.send_seconds, stream.cancel, builder)
    try:
        return await responses.run_until_disconnect(request, builder.complete(outputs))
    finally:
        stream.cancel()


async def _measured(
    service: Service, parsed: requests.ParsedRequest, stream: RequestStream
) -> AsyncGenerator[TokenOutput | Finish, None]:
    """The outputs of a stream; its tokens and its time to the first token enter the metrics."""
    metrics, submitted, waiting = service.metrics, time.perf_counter(), True
    model = "mixture" if "+" in parsed.model else parsed.model  # one label, so that clients can not create labels
    async for item in stream:
        if waiting and isinstance(item, TokenOutput):
            metrics.first_token_seconds.labels(model).observe(time.perf_counter() - submitted)
            waiting = False
        if isinstance(item, Finish):
            metrics.prompt_tokens.labels(model).inc(0 if item.index % parsed.n else item.prompt_tokens)
            metrics.completion_tokens.labels(model).inc(item.completion_tokens)
        yield item
