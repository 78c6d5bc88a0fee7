"""The interface between the web side and an engine: requests, streams of outputs, errors, and the models by name.

The web side turns an HTTP request into `GenerationRequest`s, one for each continuation, and submits them together. The
engine returns a `RequestStream`, which yields a `TokenOutput` for each token and a `Finish` for each continuation.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field

from graftlm.backbone import UNLIMITED, Backbone, max_sequence_length
from graftlm.backbone.taps import check_conflicts
from graftlm.config import Config
from graftlm.errors import BackboneError, GraftError, TapConflictError
from graftlm.grafted.graft_set import supports_row_groups
from graftlm.grafts import Graft

EngineFinishReason = Literal["stop", "length", "time", "cancelled"]


class ServingError(GraftError):
    """A request that can not be served.

    Args:
        message: one sentence.
        param: the key of the request that does not fit.
        status: HTTP status.
        code: OpenAI's error code.
    """

    status = 400
    code: str | None = None

    def __init__(
        self, message: str = "", param: str | None = None, *, status: int | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status or self.status, code or self.code

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class UnknownModelError(ServingError):
    """No backbone, graft or mixture has this name."""

    status, code = 404, "model_not_found"


class ContextLengthError(ServingError):
    """The prompt and its continuation exceed the model's context or the server's limit."""

    code = "context_length_exceeded"


class QueueFullError(ServingError):
    """Too many requests are waiting."""

    status, code = 429, "queue_full"


class ShuttingDownError(ServingError):
    """The server is shutting down and accepts nothing new."""

    status, code = 503, "shutting_down"


class EngineError(ServingError):
    """The engine failed while it generated."""

    status, code = 500, "engine_failed"


class EngineLimits(Config):
    """The limits of an engine.

    Args:
        batch_size: continuations that are generated at the same time.
        queue: further continuations that may wait.
        context: maximum tokens of a prompt and its continuation; None uses the backbone's context length.
        max_tokens: maximum tokens of a continuation.
        seconds: maximum time of a request, waiting included.
        prefix_tokens: maximum tokens of texts whose keys and values are kept for prompts that begin alike.
        pack: keep a second copy of bfloat16 weights, which a CPU reads faster.
    """

    batch_size: int = Field(16, ge=1)
    queue: int = Field(64, ge=0)
    context: int | None = Field(None, ge=1)
    max_tokens: int = Field(1024, ge=1)
    seconds: float = Field(300.0, gt=0)
    prefix_tokens: int = Field(8192, ge=0)
    pack: bool = True


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation of one prompt.

    Attributes:
        prompt: token ids, at least one.
        model: name of the backbone or of a graft, or names of grafts joined by `+`, which then act together.
        max_tokens: maximum number of new tokens.
        min_tokens: number of new tokens before which nothing ends the continuation, also no string of `stop`.
        stop_tokens: further end tokens.
        ignore_eos: whether the model's own end tokens do not end the continuation.
        temperature: 0 selects the most likely token at each step.
        top_p: sample among the most likely tokens of this total probability.
        top_k: sample among so many of the most likely tokens; 0 takes all.
        min_p: sample among tokens of at least this share of the highest probability.
        repetition_penalty: divides the positive logits of tokens of the prompt and the answer, multiplies the others.
        presence_penalty, frequency_penalty: taken from the logits of tokens of the answer, once and for each time.
        logit_bias: token ids and what is added to their logits.
        grammar: an `LLMatcher`, what the answer may be; None lets it be any text.
        seed: of the sampling; None draws a seed.
        stop: the continuation ends before the first of these strings.
        logprobs: number of most likely tokens to report at each step; None reports no log-probabilities.
        trace: True reports what the grafts did at each token.
        embed: True asks for the mean of the last hidden states of the prompt, and for no new token.
        row: for heads, in place of a continuation: the task, the row and its encoding.
        user: name of the API key or address of the client; waiting requests are admitted from users in turn.
    """

    prompt: tuple[int, ...]
    model: str
    max_tokens: int = 16
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Any = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    trace: bool = False
    embed: bool = False
    row: Any = None
    user: str = ""


@dataclass(frozen=True)
class TokenOutput:
    """One generated token.

    Attributes:
        token: token id.
        text: the text that is final after this token. It has whole characters only, and nothing that may begin a stop
            string, so that it is often empty.
        logprob: log p in nats before all that changes the sampling; None if it was not requested.
        top: the most likely tokens with their log p.
        trace: what the grafts did at this token, by label, such as an expert's weight or a gate's mean opening.
        index: number of the continuation in its stream.
    """

    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    trace: dict[str, float] = field(default_factory=dict)
    index: int = 0


@dataclass(frozen=True)
class Finish:
    """The end of one continuation.

    Attributes:
        reason: an end token or a stop string; the maximum number of tokens; the time limit; a cancelled request.
        prompt_tokens, completion_tokens: numbers of tokens.
        text: text that was held back and turned out not to begin a stop string.
        index: number of the continuation in its stream.
        cached_tokens: prompt tokens that were not read again.
        embedding: the mean of the last hidden states, if it was requested.
        prediction: of a row, as plain JSON values.
    """

    reason: EngineFinishReason
    prompt_tokens: int
    completion_tokens: int
    text: str = ""
    index: int = 0
    cached_tokens: int = 0
    embedding: tuple[float, ...] = ()
    prediction: dict[str, Any] | None = None


class RequestStream:
    """The outputs of submitted requests: the engine thread puts them, one event loop iterates them.

    The iteration ends when each of `count` continuations has finished.
    """

    def __init__(self, count: int = 1) -> None:
        self.cancelled = False
        self._items: deque[TokenOutput | Finish | Exception] = deque()
        self._unfinished = count
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def cancel(self) -> None:
        """Let the engine drop what has not finished."""
        self.cancelled = True

    def put(self, item: TokenOutput | Finish | Exception) -> None:
        """Add an output; the reader sees it after `wake_readers`."""
        self._items.append(item)

    async def __aiter__(self) -> AsyncIterator[TokenOutput | Finish]:
        """The outputs in the order of generation; an exception that was put is raised."""
        available = asyncio.Event()
        self._reader = (asyncio.get_running_loop(), available)  # before the first look, so that no output is missed
        while self._unfinished:
            available.clear()
            while self._items:
                item = self._items.popleft()
                if isinstance(item, Exception):
                    raise item
                self._unfinished -= isinstance(item, Finish)
                yield item
            if self._unfinished:
                await available.wait()

    @staticmethod
    def wake_readers(streams: Iterable[RequestStream]) -> None:
        """Wake each event loop once for all of its streams."""
        events: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Event]] = defaultdict(list)
        for loop, available in (stream._reader for stream in streams if stream._reader is not None):
            events[loop].append(available)
        for loop, of_loop in events.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its readers are gone
                loop.call_soon_threadsafe(lambda events=of_loop: [event.set() for event in events])


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine.

    Attributes:
        running, waiting: numbers of continuations.
        tokens: tokens generated since the start.
        finished: continuations by the reason of their end; `error` for those that failed.
    """

    running: int
    waiting: int
    tokens: int
    finished: dict[str, int]


class Engine(Protocol):
    """Generates for one backbone and its grafts. All methods are thread-safe, and none blocks for long but `close`.

    - `names`: the backbone's name first, then the grafts' names.
    - `submit` accepts all of these requests, or none with a `ServingError`; the stream's indices are their positions.
    - `replace` uses a graft for new requests, or removes the name; running requests keep their graft.
    - `close` accepts nothing new, finishes within `grace` seconds, cancels the rest; True if all requests finished.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream: ...
    def replace(self, name: str, graft: object | None) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self, grace: float) -> bool: ...


def check_model(names: Sequence[str], model: str) -> None:
    """Check that a model is a known name, or several joined by +. Raises UnknownModelError, which lists the names."""
    if unknown := [part for part in model.split("+") if part not in names]:
        joined = ", or grafts joined by +" if len(names) > 2 else ""
        raise UnknownModelError(f"There is no model {unknown[0][:100]!r} here: use one of {', '.join(names)}{joined}.")


def check_prompt(prompt: Sequence[int], vocabulary: int, param: str = "prompt") -> None:
    """Check that a prompt has tokens, all of the vocabulary; ServingError otherwise."""
    if not prompt:
        raise ServingError(f"{param} has no tokens: give at least one word.", param)
    if unknown := [token for token in prompt if not 0 <= token < vocabulary]:
        why = f"{param} holds the token id {unknown[0]}, and the model has {vocabulary:,} tokens, from 0 on"
        raise ServingError(f"{why}: encode it with the model's own tokenizer.", param)


def context_limit(backbone: Backbone, limits: EngineLimits) -> int:
    """Maximum tokens of a prompt and its continuation; `UNLIMITED` if neither the model nor the limits set one."""
    return min(max_sequence_length(backbone), limits.context or UNLIMITED)


class ModelRegistry:
    """The backbone and the grafts by name, and the check of requests. All methods are thread-safe.

    Args:
        backbone: of the engine's `kind`, a causal language model unless a subclass says otherwise.
        grafts: grafts for this backbone, by name.
        name: name of the backbone in requests; by default its own name.
        limits: of the engine.

    Raises BackboneError if the backbone is of another kind, and GraftError if a name is not usable.
    """

    kind = "causal-lm"
    shares_batches = False  # True accepts only grafts that can act on some rows of a batch

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        if backbone.kind != self.kind or (self.kind == "causal-lm" and not backbone.sites.family.causal):
            raise BackboneError(
                f"The backbone {backbone.name} ({backbone.sites.model_type}) writes no text: serve a causal language "
                "model, or a graft that was trained on tasks."
            )
        self.name, self.limits = name or backbone.name, limits or EngineLimits()
        self._backbone, self._context = backbone, context_limit(backbone, self.limits)
        self._vocabulary = int(backbone.config.vocab_size)
        self._grafts: dict[str, Graft] = {}  # replaced as a whole, so that readers need no lock
        self._lock = threading.Lock()
        for graft_name, graft in (grafts or {}).items():
            self.replace(graft_name, graft)

    @property
    def names(self) -> tuple[str, ...]:
        """The backbone's name first, then the grafts' names."""
        return (self.name, *self._grafts)

    def replace(self, name: str, graft: object | None) -> None:
        """Register a graft under a name, or remove it; GraftError if the name can't be used, or it is no graft."""
        if name == self.name or not name or "+" in name:
            reasons = {self.name: "is the backbone's", "": "is empty"}
            why = reasons.get(name, "holds a +, which joins names")
            raise GraftError(f"The name {name!r} {why}: give the graft another.")
        if graft is not None and not isinstance(graft, Graft):
            raise GraftError(
                f"{type(graft).__name__} is no graft, which is expected under {name!r}: build or load one."
            )
        if self.shares_batches and graft is not None and not supports_row_groups(graft):
            raise GraftError(
                f"The graft {name} brings modules of its own into the model, which would act on the requests of others "
                "too: use it with graft generate, which answers one at a time."
            )
        with self._lock:
            grafts = self._grafts | {name: graft}
            self._grafts = {known: other for known, other in grafts.items() if other is not None}

    def fits(self, graft: object | None) -> bool:
        """Whether a graft was built for this backbone."""
        return isinstance(graft, Graft) and graft._fingerprint == self._backbone.fingerprint

    def holds(self, grafts: Iterable[tuple[str, Graft]]) -> bool:
        """Whether all of these grafts are still registered under their names."""
        known = self._grafts
        return all(known.get(name) is graft for name, graft in grafts)

    def check(self, request: GenerationRequest) -> dict[str, Graft]:
        """A request's grafts, none for the backbone; ServingError if it does not fit the models or the limits."""
        grafts = {} if request.model == self.name else self._mixture(request.model, self._grafts)
        if request.max_tokens < (not request.embed):
            raise ServingError(f"max_tokens is {request.max_tokens}, but 1 at least is expected.")
        check_prompt(request.prompt, self._vocabulary)
        if request.max_tokens > self.limits.max_tokens:
            raise ContextLengthError(
                f"{request.max_tokens} new tokens are too many, as this server writes {self.limits.max_tokens} at "
                "most: ask for fewer."
            )
        length = len(request.prompt)
        if length + request.max_tokens > self._context:
            raise ContextLengthError(
                f"The prompt has {length} tokens, which with {request.max_tokens} new ones makes "
                f"{length + request.max_tokens}, but {self._context} is the most here: shorten the prompt, or ask for "
                "fewer."
            )
        return grafts

    def _mixture(self, model: str, known: dict[str, Graft]) -> dict[str, Graft]:
        check_model((self.name, *known), model)
        names = model.split("+")
        if self.name in names:
            raise ServingError(f"The backbone {self.name} is in every mixture already: leave it out of {model!r}.")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ServingError(f"The mixture {model!r} names {twice[0]} twice: leave one out.")
        grafts = {name: known[name] for name in names}
        if len(grafts) == 1:
            return grafts
        if alone := [name for name, graft in grafts.items() if not supports_row_groups(graft)]:
            raise ServingError(
                f"The graft {alone[0]} brings modules of its own into the model, so that it acts alone: leave out the "
                "others, or this one."
            )
        try:
            check_conflicts(self._backbone.sites, {name: graft.taps() for name, graft in grafts.items()})
        except TapConflictError as error:
            raise ServingError(str(error)) from error
        return grafts
