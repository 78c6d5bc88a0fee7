"""The engine as a model that pipelines write with: they run in threads of their own, the engine on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from graftlm.pipelines.clarify import Cost, Reply
from graftlm.pipelines.summarize import LanguageModelWriter, PromptLayout, SummaryDecoding
from graftlm.serving.errors import TimedOutError
from graftlm.serving.prompts import Prompts
from graftlm.serving.protocol import Ask, ClosingError, End, Engine, EngineError, ServingError

_PATIENCE = 1.0  # seconds between two looks at whether the event loop is still there


class LeftError(ServingError):
    """Nobody waits for the answer any more, so nobody sees this."""

    status, kind, code = 499, "server_error", "client_left"


@dataclass(frozen=True)
class Heard:
    """What the engine wrote.

    Attributes:
        cut: it stopped at its limit of tokens.
        prompt_tokens, new_tokens: how many there were.
    """

    text: str
    cut: bool
    prompt_tokens: int
    new_tokens: int


class Errand:
    """One client's questions to the engine, asked from a thread while the event loop runs; made on the loop.

    Args:
        engine: answers.
        model: a name that the engine knows.
        user: who asks.
    """

    def __init__(self, engine: Engine, model: str, user: str = "") -> None:
        self.model = model
        self._engine, self._user = engine, user
        self._loop = asyncio.get_running_loop()
        self._lock, self._left = threading.Lock(), False
        self._asked: Future[Heard] | None = None

    def ask(self, prompt: Sequence[int], max_tokens: int, **how: Any) -> Heard:
        """What the model writes; waits for it.

        Args:
            how: further attributes of `Ask`.

        Raises:
            ServingError: the engine does not take it, fails, closes or has no time left; or the client left.
        """
        asked = Ask(prompt=tuple(prompt), model=self.model, max_tokens=max_tokens, user=self._user, **how)
        with self._lock:
            if self._left:
                raise LeftError("The client left.")
            self._asked = future = asyncio.run_coroutine_threadsafe(heard(self._engine, asked), self._loop)
        try:
            return self._wait(future)
        except CancelledError:
            raise LeftError("The client left.") from None

    def leave(self) -> None:
        """Nobody waits any more: what is asked ends, and nothing more is asked."""
        with self._lock:
            self._left = True
            if self._asked is not None:
                self._asked.cancel()

    def _wait(self, future: Future[Heard]) -> Heard:
        while True:
            try:
                return future.result(_PATIENCE)
            except TimeoutError:
                if not self._loop.is_running():
                    raise ClosingError("The server has stopped: ask again in a moment.") from None


async def heard(engine: Engine, ask: Ask) -> Heard:
    """Everything that an engine writes for one request.

    Raises:
        ServingError: it does not take it, fails, closes, or has no time left.
    """
    ticket, parts = engine.submit(ask), []
    try:
        async for piece in ticket:
            if isinstance(piece, End):
                return _whole("".join(parts) + piece.text, piece)
            parts.append(piece.text)
    finally:
        ticket.cancel()
    raise EngineError("The engine stopped before its answer had an end: ask again.")


def _whole(text: str, end: End) -> Heard:
    if end.reason == "cancelled":
        raise ClosingError("The server is shutting down: ask again in a moment.")
    if end.reason == "time":
        raise TimedOutError("The time of a request was over before the model had finished: ask for less, or try later.")
    return Heard(text, end.reason == "length", end.prompt_tokens, end.completion_tokens)


class ClarifyWriter:
    """The writer of clarifying conversations (`pipelines.clarify`).

    Args:
        errand: asks the engine.
        prompts: the backbone's tokenizer; with a chat template prompts are chats, else one text to go on with.
        max_tokens: of a reply.
    """

    def __init__(self, errand: Errand, prompts: Prompts, max_tokens: int) -> None:
        self.name = errand.model
        self._errand, self._prompts, self._max_tokens = errand, prompts, max_tokens

    def write(
        self,
        prompt: Any,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Reply to a prompt.

        Raises:
            ServingError: the engine can't.
        """
        said = [(one["role"], one["content"]) for one in prompt.messages()]
        ids = self._prompts.text(prompt.text()) if self._prompts.plain else self._prompts.chat(said)
        found = self._errand.ask(ids, self._max_tokens, temperature=temperature, seed=seed, stop=(prompt.end,))
        if on_text is not None:
            on_text(found.text)
        cost = Cost(calls=1, prompt_tokens=found.prompt_tokens, new_tokens=found.new_tokens)
        return Reply(found.text, cost, found.cut)


class SummaryWriter(LanguageModelWriter):
    """The writer of summaries (`pipelines.summarize`); always the likeliest tokens.

    Args:
        errand: asks the engine.
        prompts: the backbone's tokenizer.
        context: tokens of prompt and summary.
        max_tokens: of the summary.
        layout: as the graft was trained.
    """

    def __init__(
        self, errand: Errand, prompts: Prompts, context: int, max_tokens: int, layout: PromptLayout | None = None
    ) -> None:
        decoding = SummaryDecoding(max_new_tokens=max_tokens)
        super().__init__(None, prompts.tokenizer, errand.model, layout, decoding)
        self._errand, self._context = errand, context

    @property
    def window(self) -> int:
        return min(self.layout.window or self._context, self._context)

    def complete(self, prompt: list[int]) -> tuple[str, bool]:
        found = self._errand.ask(prompt, self.decoding.max_new_tokens)
        return found.text, found.cut
