"""An engine that writes what a test tells it, and a server around it in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from graftlm.backbone import Backbone
from graftlm.serving.protocol import (
    Engine,
    EngineLimits,
    EngineStats,
    Finish,
    GenerationRequest,
    RequestStream,
    ShuttingDownError,
    TokenOutput,
)
from graftlm.serving.server import GraftServer
from graftlm.serving.service import Service
from graftlm.serving.settings import ServerSettings
from graftlm.serving.store import GraftStore
from tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
HELLO = ("He", "llo", " wor", "ld", "!")


def outputs(
    *texts: str, reason: Any = "stop", held: str = "", trace: dict[str, float] | None = None
) -> list[TokenOutput | Finish | Exception]:
    """Outputs with these texts, each with the first token of its text, and their finish."""
    tokens: list[TokenOutput | Finish | Exception] = []
    for position, text in enumerate(texts):
        token = TOKENIZER(text)["input_ids"][0] if text else 5
        top = ((token, -0.5 - position), (7, -2.5))
        tokens.append(TokenOutput(token, text, -0.5 - position, top, dict(trace or {})))
    return [*tokens, Finish(reason, 3, len(tokens), held)]


@dataclass
class Script:
    """The outputs of one continuation; a `gate` holds the last one back until it is set.

    Attributes:
        items: outputs, a finish, or an error.
        gate: awaited before the last item.
        cancelled: set when the stream is cancelled.
    """

    items: list[TokenOutput | Finish | Exception]
    gate: threading.Event | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def outputs(self, index: int) -> AsyncIterator[TokenOutput | Finish]:
        for position, item in enumerate(self.items):
            while self.gate is not None and position == len(self.items) - 1 and not self.gate.is_set():
                await asyncio.sleep(0.005)
            if isinstance(item, Exception):
                raise item
            yield replace(item, index=index)


class ScriptedStream(RequestStream):
    """The outputs of scripts, one script after another."""

    def __init__(self, scripts: list[Script]) -> None:
        super().__init__(len(scripts))
        self.scripts = scripts

    async def __aiter__(self) -> AsyncIterator[TokenOutput | Finish]:
        for index, script in enumerate(self.scripts):
            async for item in script.outputs(index):
                yield item

    def cancel(self) -> None:
        for script in self.scripts:
            script.cancelled.set()


class ScriptedEngine:
    """Answers each request with the next script, or with a greeting."""

    def __init__(self, names: tuple[str, ...] = ("tiny", "danish", "french")) -> None:
        self.names = names
        self.requests: list[GenerationRequest] = []
        self.scripts: list[Script] = []
        self.refusal: Exception | None = None
        self.closed = False

    def submit(self, requests: Sequence[GenerationRequest]) -> ScriptedStream:
        if self.closed:
            raise ShuttingDownError("The server is shutting down: ask again in a moment.")
        if self.refusal is not None:
            raise self.refusal
        self.requests.extend(requests)
        return ScriptedStream([self.scripts.pop(0) if self.scripts else Script(outputs(*HELLO)) for _ in requests])

    def replace(self, name: str, graft: object | None) -> None:
        self.names = tuple(known for known in self.names if known != name) + ((name,) if graft is not None else ())

    def stats(self) -> EngineStats:
        return EngineStats(1, 2, 3, {"stop": 4})

    def close(self, grace: float) -> bool:
        self.closed = True
        return True


def web_service(engine: Engine, **changes: Any) -> Service:
    """A service around a scripted engine; `settings` and any part of the service may be changed."""
    backbone = changes.pop("backbone", None) or Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    settings = ServerSettings(port=0, reload_seconds=0).model_copy(update=changes.pop("settings", {}))
    limits = EngineLimits(batch_size=4, queue=4, max_tokens=100)
    service = Service(backbone, engine, GraftStore({"tiny": backbone}), "tiny", settings=settings, limits=limits)
    return changed(service, **changes)


def changed(service: Service, **changes: Any) -> Service:
    """A copy of a service with other parts."""
    other = copy.copy(service)
    vars(other).update(changes)
    return other


@contextlib.contextmanager
def running(service: Service) -> Iterator[str]:
    """The address of a server in a thread of this process, on a free port."""
    vars(service)["settings"] = service.settings.model_copy(update={"port": 0})
    address: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        address.append(url)
        ready.set()

    server = GraftServer(service, on_ready)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    try:
        yield address[0]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


def post(address: str, path: str, body: Any, **more: Any) -> httpx.Response:
    """An answer to JSON."""
    return httpx.post(f"{address}{path}", json=body, timeout=20, **more)


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "the fox"} | changes


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "danish", "messages": [{"role": "user", "content": "the fox"}]} | changes


def until(true: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether something becomes true in time."""
    wait = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if true():
            return True
        wait.wait(0.01)
    return False
