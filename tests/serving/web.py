"""An engine that writes what a test tells it, and a server around it in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from graftlm.backbone import Backbone
from graftlm.serving.keys import Keys
from graftlm.serving.metrics import Metrics
from graftlm.serving.prompts import Prompts
from graftlm.serving.protocol import Ask, BusyError, ClosingError, End, Limits, Piece, Stats
from graftlm.serving.server import Server
from graftlm.serving.service import Service
from graftlm.serving.settings import Settings
from graftlm.serving.shelf import Shelf
from tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
HELLO = ("He", "llo", " wor", "ld", "!")


def said(*texts: str, reason: Any = "stop", held: str = "", trace: dict[str, float] | None = None) -> list[Any]:
    """Pieces of these texts, each its own first token, and their end."""
    pieces: list[Piece | End] = []
    for place, text in enumerate(texts):
        token = TOKENIZER(text)["input_ids"][0] if text else 5
        top = ((token, -0.5 - place), (7, -2.5))
        pieces.append(Piece(token, text, -0.5 - place, top, dict(trace or {})))
    return [*pieces, End(reason, 3, len(pieces), held)]


@dataclass
class Script:
    """What an engine writes for one request; a `gate` holds it back until it is set.

    Attributes:
        items: pieces, an end, or an error.
        gate: awaited before the last item.
        cancelled: set when nobody waits any more.
    """

    items: list[Piece | End | Exception]
    gate: threading.Event | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def __aiter__(self) -> AsyncIterator[Piece | End]:
        for place, item in enumerate(self.items):
            while self.gate is not None and place == len(self.items) - 1 and not self.gate.is_set():
                await asyncio.sleep(0.005)
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedEngine:
    """Answers each request with the next script, or says hello."""

    def __init__(self, names: tuple[str, ...] = ("tiny", "danish", "french")) -> None:
        self.names = names
        self.asks: list[Ask] = []
        self.scripts: list[Script] = []
        self.given: list[Script] = []
        self.refusal: Exception | None = None
        self.room = 1000
        self.closed = False

    def submit(self, ask: Ask) -> Script:
        if self.closed:
            raise ClosingError("The server is shutting down: ask again in a moment.")
        if self.refusal is not None:
            raise self.refusal
        if len(self.asks) >= self.room:
            raise BusyError("9 requests are waiting already: ask again in a moment.")
        self.asks.append(ask)
        self.given.append(self.scripts.pop(0) if self.scripts else Script(list(said(*HELLO))))
        return self.given[-1]

    def replace(self, name: str, graft: object | None) -> None:
        self.names = tuple(one for one in self.names if one != name) + ((name,) if graft is not None else ())

    def stats(self) -> Stats:
        return Stats(1, 2, 3, {"stop": 4})

    def close(self, grace: float) -> bool:
        self.closed = True
        return True


def web_service(engine: ScriptedEngine, **changes: Any) -> Service:
    """A service around it; `settings` and any part of the service may be changed."""
    backbone = changes.pop("backbone", None) or Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    settings = Settings(port=0, reload_seconds=0).model_copy(update=changes.pop("settings", {}))
    service = Service(
        backbone=backbone,
        name="tiny",
        engine=engine,
        limits=Limits(batch_size=4, queue=4, max_tokens=100),
        shelf=Shelf(backbone),
        settings=settings,
        prompts=Prompts(backbone, settings.chat_template),
        metrics=Metrics(engine),
        keys=Keys(),
        started=1,
    )
    return replace(service, **changes)


@contextlib.contextmanager
def running(service: Service) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    address: list[str] = []
    ready = threading.Event()

    def on_ready(found: str) -> None:
        address.append(found)
        ready.set()

    server = Server(service, on_ready)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(20), "the server did not start"
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


def until(true: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether something becomes true in time."""
    wait = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if true():
            return True
        wait.wait(0.01)
    return False
