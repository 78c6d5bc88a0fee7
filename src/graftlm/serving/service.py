"""A server's parts, and continuations under way that belong to one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from graftlm.backbone import UNLIMITED, Backbone, max_sequence_length
from graftlm.serving.keys import Keys
from graftlm.serving.metrics import Metrics
from graftlm.serving.prompts import Prompts
from graftlm.serving.protocol import Ask, End, Engine, EngineError, Limits, Piece, Ticket, UnknownModelError
from graftlm.serving.settings import Settings
from graftlm.serving.shelf import Shelf
from graftlm.serving.state import Phase


@dataclass(frozen=True)
class Service:
    """What routes work with.

    Attributes:
        backbone: the frozen model; `name` is what requests call it.
        engine: what writes.
        limits: of the engine.
        shelf: the grafts in service.
        settings: of the web side.
        keys: who may ask.
        started: when, in seconds since 1970.
    """

    backbone: Backbone
    name: str
    engine: Engine
    limits: Limits
    shelf: Shelf
    settings: Settings
    prompts: Prompts
    metrics: Metrics
    keys: Keys
    started: int
    phase: Phase = field(default_factory=Phase)

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its continuation have together."""
        return min(max_sequence_length(self.backbone), self.limits.context or UNLIMITED)

    @property
    def fingerprint(self) -> str:
        """Of the backbone, as answers tell it."""
        return f"fp_{self.backbone.fingerprint.id}"

    def reload(self, *, now: bool = False) -> None:
        """Take changed grafts into service."""
        self.shelf.refresh(self.engine.replace, self.metrics.loaded, now=now)

    def check_model(self, model: str) -> None:
        """Raise `UnknownModelError`, which tells the known names, unless this is one of them, or several by +."""
        names = self.engine.names
        if unknown := [part for part in model.split("+") if part not in names]:
            raise UnknownModelError(
                f"There is no model {unknown[0][:100]!r} here: use one of {', '.join(names)}, or grafts joined by +."
            )


def user_of(request: Request) -> str:
    """Who asks: the name of the API key, or the client's address."""
    return getattr(request.state, "user", "")


class Tickets:
    """Continuations that one request asks for; an iterator of their pieces, each with the number of its continuation.

    Args:
        engine: what takes them on, all or none.
        asks: one each.

    Raises:
        ServingError: the engine refuses one of them.
    """

    def __init__(self, engine: Engine, asks: Sequence[Ask]) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._pumps: list[asyncio.Task[None]] = []
        try:
            for number, ask in enumerate(asks):
                self._tickets[number] = engine.submit(ask)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Nobody waits any more for those that have not ended."""
        for ticket in self._tickets.values():
            ticket.cancel()
        for pump in self._pumps:
            pump.cancel()
        self._tickets, self._pumps = {}, []

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece | End]]:
        """Whatever comes first, of any of them, until all have ended.

        Raises:
            ServingError: one of them failed.
        """
        queue: asyncio.Queue[tuple[int, Piece | End | Exception]] = asyncio.Queue()
        self._pumps = [asyncio.create_task(_pump(ticket, n, queue)) for n, ticket in self._tickets.items()]
        while self._tickets:
            number, item = await queue.get()
            if isinstance(item, End | Exception):
                del self._tickets[number]
            if isinstance(item, Exception):
                raise item
            yield number, item


async def _pump(ticket: Ticket, number: int, queue: asyncio.Queue[tuple[int, Piece | End | Exception]]) -> None:
    try:
        async for item in ticket:
            queue.put_nowait((number, item))
            if isinstance(item, End):
                return
        raise EngineError("The continuation broke off: ask again.")
    except Exception as error:  # handed to who iterates
        queue.put_nowait((number, error))
