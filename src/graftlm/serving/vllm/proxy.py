"""The HTTP server in front of vLLM: names of models, API keys, and the choice of an adapter by the prompt.

Everything else in a request and its answer is vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from graftlm.config import explain
from graftlm.errors import GraftError
from graftlm.serving.errors import on_error
from graftlm.serving.middleware import (
    AllowedHostMiddleware,
    ApiKeyMiddleware,
    InternalErrorMiddleware,
    JsonContentMiddleware,
    OpenRequestsMiddleware,
    RefusalMiddleware,
    RequestBodyMiddleware,
    ShutdownMiddleware,
)
from graftlm.serving.protocol import ServingError, check_prompt
from graftlm.serving.request_parsing import chat_prompt
from graftlm.serving.request_schema import ChatRequest
from graftlm.serving.settings import ApiKeys, ServerSettings
from graftlm.serving.streaming import ClientDisconnectedError, run_until_disconnect
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.serving.vllm.adapters import ONLY_CHOICE, ServedGraft
from graftlm.serving.vllm.models import ServedModels
from graftlm.serving.vllm.process import VllmProcess
from graftlm.version import __version__

_KEYS_OF_CHAT_PROMPTS = ("messages", "tools", "tool_choice", "chat_template_kwargs")
_CHAT = "/v1/chat/completions"
_ROUTED = (_CHAT, "/v1/completions")
_WITHOUT_WEIGHTS = ("/tokenize", "/detokenize")
_OTHER_PROMPT = {
    "truncate_prompt_tokens",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "documents",
}
"""Keys of vLLM that change the tokens of a prompt."""
FORWARDED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize")
"""The paths whose requests vLLM answers. Its routes that load adapters are not among them."""
JsonObject = dict[str, object]
_MAX_OPEN = 4096
_BODY_FACTOR = 8  # a refused body is received up to this multiple of the limit


@dataclass
class Proxy:
    """The parts of the proxy.

    Attributes:
        models: the models by name.
        process: vLLM.
        tokenizer: the backbone's tokenizer, for grafts that read the prompt.
        settings: settings of the HTTP server.
        keys: API keys; without keys every client is accepted.
        vllm_version: vLLM's version.
        problems: returns the errors of grafts that can't be served, by name.
        closing: set once the server refuses new requests.
        started: start time in seconds since 1970.
    """

    models: ServedModels
    process: VllmProcess
    tokenizer: ServingTokenizer
    settings: ServerSettings
    keys: ApiKeys
    vllm_version: str
    problems: Callable[[], Mapping[str, str]] = dict
    closing: threading.Event = field(default_factory=threading.Event)
    started: int = field(default_factory=lambda: int(time.time()))

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [Route(path, self._forward, methods=["POST"]) for path in FORWARDED]
        routes += [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._describe_model),
            Route("/v1/graftlm/{path:path}", self._refuse_extension, methods=["GET", "POST"]),
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
        ]
        app = Starlette(routes=routes)
        app.add_exception_handler(GraftError, on_error)
        app.add_exception_handler(HTTPException, on_error)
        app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
        self._add_middleware(app)
        return app

    def _add_middleware(self, app: Starlette) -> None:
        """Add the middleware from the innermost to the outermost."""
        settings = self.settings
        app.add_middleware(InternalErrorMiddleware)
        app.add_middleware(RequestBodyMiddleware, max_bytes=settings.body_bytes, seconds=settings.body_seconds)
        app.add_middleware(JsonContentMiddleware)
        app.add_middleware(OpenRequestsMiddleware, limit=_MAX_OPEN)
        app.add_middleware(ShutdownMiddleware, closing=self.closing)
        app.add_middleware(ApiKeyMiddleware, keys=self.keys)
        app.add_middleware(AllowedHostMiddleware, hosts=settings.allowed_hosts())
        app.add_middleware(RefusalMiddleware, max_bytes=_BODY_FACTOR * settings.body_bytes)
        if settings.origins:
            app.add_middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])

    # The requests that vLLM answers

    async def _forward(self, request: Request) -> Response:
        body = _read_body(await request.body())
        name = body.get("model") or self.models.backbone
        if not isinstance(name, str):
            raise ServingError("model is not a text: name a model of /v1/models.", "model")
        if "graftlm" in body:
            raise ServingError(
                "The key graftlm asks for traces, which vLLM can't record: use GraftLM's own engine (graft serve "
                "without --engine).",
                "graftlm",
            )
        adapter = await self._current_adapter(name, request.url.path, body)
        async with AsyncExitStack() as stack:
            stack.enter_context(self.models.use(adapter))
            own_name = self.models.name_in_vllm(adapter)
            answer = await self._send(request, {**body, "model": own_name})
            stack.push_async_callback(answer.aclose)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return _Stream(_renamed_lines(answer, own_name, name), stack.pop_all())
            content = await _read(request, answer)
            return _renamed_response(answer, content, name)

    async def _send(self, request: Request, body: JsonObject) -> httpx.Response:
        """Send a request to vLLM; when the client disconnects, vLLM ends it, too."""
        upstream = self.process.client.build_request(
            "POST",
            request.url.path,
            content=json.dumps(body).encode(),  # ASCII, also for texts that are not valid Unicode
            headers={"Content-Type": "application/json"},
        )
        try:
            return await run_until_disconnect(request, self.process.client.send(upstream, stream=True))
        except httpx.HTTPError as error:
            raise _no_answer(error) from error

    async def _current_adapter(self, name: str, path: str, body: JsonObject) -> str | None:
        """Return the adapter for a request, of the version of its graft that is in service now; None for none."""
        while True:
            graft = self.models.of(name)
            if graft is None:
                return None
            adapter = await asyncio.to_thread(self._adapter, graft, path, body)
            if self.models.of(name) is graft:
                return adapter

    def _adapter(self, graft: ServedGraft, path: str, body: JsonObject) -> str | None:
        """Return the adapter of a graft for a request; None for the bare backbone."""
        if graft.chooser is None:
            return graft.adapters[ONLY_CHOICE]
        if path in _WITHOUT_WEIGHTS:
            return None
        if path not in _ROUTED or not _OTHER_PROMPT.isdisjoint(body):
            raise ServingError(
                f"{graft.name} chooses its expert by the prompt, but the prompt of this request is known to vLLM only: "
                "use /v1/chat/completions or /v1/completions, without keys that change the prompt or its template.",
                "model",
            )
        adapters = {graft.adapter_for(prompt) for prompt in self._prompts(path, body)}
        if len(adapters) > 1:
            raise ServingError(
                f"The prompts need different experts of {graft.name}: send a request for each prompt.", "prompt"
            )
        return adapters.pop()

    def _prompts(self, path: str, body: JsonObject) -> list[Sequence[int]]:
        """Return the token ids of each prompt of a request."""
        if path == _CHAT:
            return [self._chat_prompt(body)]
        prompt = body.get("prompt")
        is_single = isinstance(prompt, str) or (isinstance(prompt, list) and _are_ids(prompt))
        prompts = [prompt] if is_single else _list(prompt, "prompt")
        if not prompts:
            raise _bad_prompt()
        return [self._ids(each) for each in prompts]

    def _chat_prompt(self, body: JsonObject) -> Sequence[int]:
        """Return the token ids of a conversation, as GraftLM's own engine reads it."""
        read = {key: body[key] for key in _KEYS_OF_CHAT_PROMPTS if key in body}
        try:
            request = ChatRequest.model_validate({"model": "any", **read})
        except ValidationError as error:
            raise ServingError(explain(error, ChatRequest, "The request"), "messages") from None
        return chat_prompt(self.tokenizer, request, with_tools=request.tool_choice != "none")

    def _ids(self, prompt: object) -> Sequence[int]:
        """Return the token ids of a prompt, a text or a list of ids, of which there must be one."""
        if isinstance(prompt, str):
            prompt = list(self.tokenizer.encode(prompt))
        if not isinstance(prompt, list) or not _are_ids(prompt):
            raise _bad_prompt()
        vocabulary = self.tokenizer.vocabulary
        check_prompt(prompt, vocabulary)
        return prompt

    # The requests that the proxy answers

    async def _list_models(self, request: Request) -> Response:
        context = await self._context()
        data = [self._described(name, context) for name in self.models.names]
        return JSONResponse({"object": "list", "data": data})

    async def _describe_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.models.of(name)
        return JSONResponse(self._described(name, await self._context()))

    def _described(self, name: str, context: int | None) -> JsonObject:
        parent = None if name == self.models.backbone else self.models.backbone
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "graftlm",
            "max_model_len": context,
            "parent": parent,
        }

    async def _context(self) -> int | None:
        """Return the context length that vLLM reports."""
        try:
            answer = await self.process.client.get("/v1/models")
            listed = answer.json()["data"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None
        lengths = [model.get("max_model_len") for model in listed if model.get("id") == self.models.backbone]
        return lengths[0] if lengths else None

    async def _refuse_extension(self, request: Request) -> Response:
        raise ServingError(
            f"The path {request.url.path[:200]} belongs to GraftLM's own engine: start graft serve without --engine.",
            status=501,
        )

    async def _health(self, request: Request) -> Response:
        status = "ready" if await self.process.is_healthy() else "vLLM does not answer"
        if self.closing.is_set():
            status = "closing"
        values = {"status": status, "models": len(self.models.names), "broken": sorted(self.problems())}
        return JSONResponse(values, status_code=200 if status == "ready" else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__, "vllm": self.vllm_version})

    async def _metrics(self, request: Request) -> Response:
        try:
            answer = await self.process.client.get("/metrics")
        except httpx.HTTPError as error:
            raise _no_answer(error) from error
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


class _Stream(StreamingResponse):
    """A stream of server-sent events, after which a stack of resources is closed."""

    def __init__(self, lines: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


async def _read(request: Request, answer: httpx.Response) -> bytes:
    """Return the content of vLLM's answer."""
    try:
        return await run_until_disconnect(request, answer.aread())
    except httpx.HTTPError as error:
        raise _no_answer(error) from error


def _no_answer(error: Exception) -> ServingError:
    return ServingError(f"vLLM does not answer ({type(error).__name__}): try again in a moment.", status=503)


async def _renamed_lines(answer: httpx.Response, own_name: str, name: str) -> AsyncIterator[bytes]:
    """Yield the lines of an event stream with the model's name in requests in place of that in vLLM."""
    # Inside of JSON strings quotation marks are escaped, so that the pattern finds keys only.
    pattern = re.compile(rf'"model":\s*{re.escape(json.dumps(own_name))}'.encode())
    replacement = f'"model":{json.dumps(name)}'.encode()
    rest = b""
    async for chunk in answer.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")  # texts may have other separators of lines
        for line in lines:
            yield pattern.sub(lambda _: replacement, line, count=1) + b"\n"
    yield rest


def _renamed_response(answer: httpx.Response, content: bytes, name: str) -> Response:
    """Return vLLM's response with the model's name in requests."""
    media_type = answer.headers.get("content-type")
    try:
        values = json.loads(content)
    except ValueError:
        return Response(content, answer.status_code, media_type=media_type)
    if isinstance(values, dict) and "model" in values:
        values["model"] = name
    return JSONResponse(values, answer.status_code)


def _read_body(content: bytes) -> JsonObject:
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ServingError("The body is not JSON: send a JSON object.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ServingError("The request has no JSON object in its body: send one.", code="invalid_json")
    return body


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _list(value: object, key: str) -> list[object]:
    if not isinstance(value, list):
        raise ServingError(f"{key} is not a list, but one is expected: send one.", key)
    return value


def _are_ids(values: Sequence[object]) -> bool:
    """Return whether there are values, and all of them are token ids."""
    return bool(values) and all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _bad_prompt() -> ServingError:
    return ServingError("prompt is not a text, a list of token ids, or a list of these: send one.", "prompt")


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # no client receives it
