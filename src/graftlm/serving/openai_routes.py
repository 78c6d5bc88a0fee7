"""The routes of OpenAI's API: models, completions, chats and embeddings."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from graftlm.serving.middleware import user_of
from graftlm.serving.openapi import ERRORS, STREAM
from graftlm.serving.protocol import Finish, RequestStream, TokenOutput
from graftlm.serving.request_parsing import ParsedRequest, parse_chat, parse_completion, parse_embedding
from graftlm.serving.request_schema import ApiRequest, ChatRequest, CompletionRequest, EmbeddingRequest
from graftlm.serving.response_builders import ChatBuilder, CompletionBuilder, EmbeddingBuilder
from graftlm.serving.response_schema import Chat, Embeddings, ModelCard, ModelList, TextCompletion
from graftlm.serving.service import Service
from graftlm.serving.streaming import EventStream, run_until_disconnect

_Body = TypeVar("_Body", bound=ApiRequest)


def router(service: Service) -> APIRouter:
    """Return the routes of OpenAI's API under /v1/ for a service."""
    routes = APIRouter(prefix="/v1", responses=ERRORS)

    @routes.get("/models", response_model_exclude_unset=True, summary="All names of models")
    async def models() -> ModelList:
        cards = [_card(service.of(name), name) for name in service.engine.names]
        return ModelList(object="list", data=cards)

    @routes.get("/models/{model:path}", response_model_exclude_unset=True, summary="One model, or a mixture")
    async def model(model: str) -> ModelCard:
        return _card(service.of(model), model)

    @routes.post(
        "/completions",
        response_model=TextCompletion,
        response_model_exclude_unset=True,
        responses=STREAM,
        summary="Continue a text",
    )
    async def completions(body: CompletionRequest, request: Request) -> BaseModel | Response:
        member = service.of(body.model)
        parsed = await _parsed(member, parse_completion, body, request)
        builder = CompletionBuilder(parsed, member.tokenizer, member.fingerprint)
        return await _respond(member, request, parsed, builder)

    @routes.post(
        "/chat/completions",
        response_model=Chat,
        response_model_exclude_unset=True,
        responses=STREAM,
        summary="Continue a conversation",
    )
    async def chat(body: ChatRequest, request: Request) -> BaseModel | Response:
        member = service.of(body.model)
        parsed = await _parsed(member, parse_chat, body, request)
        builder = ChatBuilder(parsed, member.tokenizer, member.fingerprint)
        return await _respond(member, request, parsed, builder)

    @routes.post("/embeddings", response_model=Embeddings, summary="The mean of a text's last hidden states")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Embeddings:
        member = service.of(body.model)
        parsed = await asyncio.to_thread(parse_embedding, member, body, user_of(request))
        return await _embed(member, request, parsed)

    return routes


def _card(service: Service, name: str) -> ModelCard:
    entry = service.store.entries().get(name)
    if entry is not None:
        kind = entry.manifest.kind
    elif name == service.name:
        kind = "backbone"
    else:
        kind = "mixture"
    if service.encodes:
        chat = "none"
    elif service.tokenizer.plain:
        chat = "plain"
    else:
        chat = "template"
    return ModelCard(
        id=name,
        object="model",
        created=service.started if entry is None else entry.changed,
        owned_by="graftlm",
        graftlm={"kind": kind, "chat": chat},
        max_model_len=service.context,
    )


async def _parsed(
    service: Service,
    parse: Callable[[Service, _Body, str], ParsedRequest],
    body: _Body,
    request: Request,
) -> ParsedRequest:
    """Parse a body in a thread. Bodies with a grammar use the compiler's threads, so that others don't wait."""
    pool: Executor | None = service.grammars.pool if _has_grammar(body) else None
    return await asyncio.get_running_loop().run_in_executor(pool, parse, service, body, user_of(request))


def _has_grammar(body: ApiRequest) -> bool:
    if body.structured_outputs is not None:
        return True
    return isinstance(body, ChatRequest) and bool(body.response_format or body.tools)


async def _respond(
    service: Service,
    request: Request,
    parsed: ParsedRequest,
    builder: CompletionBuilder | ChatBuilder,
) -> BaseModel | Response:
    """Generate a whole response or a stream; generation ends when the client disconnects."""
    stream = service.engine.submit(parsed.requests)
    outputs = _measured(service, parsed, stream)
    if parsed.stream:
        return EventStream(builder.events(outputs), service.settings.send_seconds, stream.cancel)
    try:
        return await run_until_disconnect(request, builder.complete(outputs))
    finally:
        stream.cancel()


async def _embed(service: Service, request: Request, parsed: ParsedRequest) -> Embeddings:
    """Embed texts in batches, because all at once may not fit into the queue."""
    batch_size = service.limits.batch_size
    responses = []
    for first in range(0, len(parsed.requests), batch_size):
        batch = dataclasses.replace(parsed, requests=parsed.requests[first : first + batch_size])
        builder = EmbeddingBuilder(batch, service.tokenizer, service.fingerprint)
        stream = service.engine.submit(batch.requests)
        try:
            response = await run_until_disconnect(request, builder.complete(_measured(service, batch, stream)))
        finally:
            stream.cancel()
        responses.append(response)
    return Embeddings.joined(responses)


async def _measured(
    service: Service,
    parsed: ParsedRequest,
    stream: RequestStream,
) -> AsyncGenerator[TokenOutput | Finish, None]:
    """Yield the outputs of a stream, and record its tokens and its time to the first token."""
    metrics = service.metrics
    model = parsed.model if parsed.model in service.engine.names else "mixture"  # clients must not create labels
    submitted = time.perf_counter()
    has_token = False
    async for item in stream:
        if isinstance(item, TokenOutput) and not has_token:
            metrics.first_token_seconds.labels(model).observe(time.perf_counter() - submitted)
            has_token = True
        if isinstance(item, Finish):
            is_first_of_prompt = item.index % parsed.n == 0
            metrics.prompt_tokens.labels(model).inc(item.prompt_tokens if is_first_of_prompt else 0)
            metrics.completion_tokens.labels(model).inc(item.completion_tokens)
        yield item
