"""What the web side and the engine say to each other.

The web side turns a request into an `Ask` and hands it to an engine, which gives a `Ticket`; the ticket yields one
`Piece` a token and at last one `End`. Everything that can be wrong with an `Ask` is a `ServingError`, raised when it is
handed over or, if it happens later, out of the ticket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from pydantic import Field

from graftlm.config import Config
from graftlm.errors import GraftError


class ServingError(GraftError):
    """A request that can't be served, with the status that HTTP has for it."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None


class UnknownModelError(ServingError):
    """No backbone, graft or mixture has this name."""

    status, code = 404, "model_not_found"


class TooLongError(ServingError):
    """The prompt, with what is to be written, exceeds the model's context or the server's limit."""

    code = "context_length_exceeded"


class BusyError(ServingError):
    """The queue is full."""

    status, kind, code = 429, "rate_limit_error", "queue_full"


class ClosingError(ServingError):
    """The server is shutting down and takes nothing new."""

    status, kind, code = 503, "server_error", "shutting_down"


class EngineError(ServingError):
    """Something broke while a request was being answered."""

    status, kind, code = 500, "server_error", "engine_failed"


class Limits(Config):
    """What an engine takes on.

    Args:
        batch_size: requests that are answered at a time.
        queue: further ones that wait.
        context: tokens of a prompt and its continuation; None is the backbone's own limit.
        max_tokens: of a continuation.
        seconds: that one request may take, waiting included.
    """

    batch_size: int = Field(16, ge=1)
    queue: int = Field(64, ge=0)
    context: int | None = Field(None, ge=1)
    max_tokens: int = Field(1024, ge=1)
    seconds: float = Field(300.0, gt=0)


@dataclass(frozen=True)
class Ask:
    """One continuation that is asked for.

    Attributes:
        prompt: token ids, one at least.
        model: the backbone's name, a graft's, or several grafts' joined by `+`, which then act together.
        max_tokens: the most to write.
        temperature: 0 takes the likeliest token always.
        top_p: choose among the likeliest tokens of this probability.
        seed: of the random choices; None draws one.
        stop: strings before which the continuation ends; none of them is ever shown.
        logprobs: how many of the likeliest tokens to tell at each place, None for no log-probabilities at all.
        trace: whether to tell what grafts did at each token.
        user: who asks, such as an API key's name: waiting requests are taken from users in turn.
    """

    prompt: tuple[int, ...]
    model: str
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    trace: bool = False
    user: str = ""


@dataclass(frozen=True)
class Piece:
    """One generated token.

    Attributes:
        token: its id.
        text: what can be shown by now: whole characters, held back while they may begin a stop string; often empty.
        logprob: log p in nats of this token before temperature and top_p, None where it was not asked for.
        top: the likeliest tokens with theirs.
        trace: what grafts did where it was written, by label, such as an expert's weight or a gate's mean opening.
    """

    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    trace: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """How a continuation ended.

    Attributes:
        reason: an end token or stop string; the most tokens; the time limit; the client left.
        prompt_tokens, completion_tokens: how many there were.
        text: what was held back and is no stop string after all.
    """

    reason: Literal["stop", "length", "time", "cancelled"]
    prompt_tokens: int
    completion_tokens: int
    text: str = ""


class Ticket(Protocol):
    """A request under way."""

    def __aiter__(self) -> AsyncIterator[Piece | End]:
        """Its pieces as they are written, then its end.

        Raises:
            ServingError: it failed; the others go on.
        """
        ...

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        ...


@dataclass(frozen=True)
class Stats:
    """What an engine is doing.

    Attributes:
        running, waiting: requests.
        tokens: written since it began.
        finished: requests by the reason of their end; `error` for those that failed.
    """

    running: int
    waiting: int
    tokens: int
    finished: dict[str, int]


class Engine(Protocol):
    """Answers requests to one backbone and its grafts. All methods may be called from any thread; none waits long."""

    @property
    def names(self) -> tuple[str, ...]:
        """The backbone's name first, then the grafts'."""
        ...

    def submit(self, ask: Ask) -> Ticket:
        """Take a request on.

        Raises:
            UnknownModelError, TooLongError, BusyError, ClosingError: it is not.
        """
        ...

    def replace(self, name: str, graft: object | None) -> None:
        """Answer new requests with this graft, or under this name no longer; running ones keep theirs to the end."""
        ...

    def stats(self) -> Stats:
        """What it is doing now."""
        ...

    def close(self, grace: float) -> bool:
        """Take nothing new, finish what runs within `grace` seconds, cancel the rest; whether all was finished."""
        ...
