"""The interface between the HTTP server and an engine: requests, streams of outputs, limits and errors.

The server converts an HTTP request into `GenerationRequest`s, one for each continuation, and submits them together.
The engine returns a `RequestStream`, which yields a `TokenOutput` for each token and a `Finish` for each continuation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from pydantic import Field

from graftlm.backbone import UNLIMITED, Backbone, max_sequence_length
from graftlm.config import Config
from graftlm.errors import GraftError
from graftlm.grafts.sums import read_sum, split_term

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from graftlm.data.labelled import LabelledRow
    from graftlm.data.row_encoder import EncodedRow

EngineFinishReason = Literal["stop", "length", "time", "cancelled"]


class ServingError(GraftError):
    """A request that can't be served.

    Args:
        message: one sentence.
        param: the key of the request that caused the error; None if no single key did.
        status: HTTP status; None uses that of the class.
        code: OpenAI's error code; None uses that of the class.
    """

    status = 400
    code: str | None = None

    def __init__(
        self,
        message: str = "",
        param: str | None = None,
        *,
        status: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status or self.status
        self.code = code or self.code

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status >= 500:
            return "server_error"
        return "invalid_request_error"


class UnknownModelError(ServingError):
    """No backbone, graft or mixture has this name."""

    status = 404
    code = "model_not_found"


class ContextLengthError(ServingError):
    """The prompt and its continuation exceed the model's context or the server's limit."""

    code = "context_length_exceeded"


class QueueFullError(ServingError):
    """The maximum number of open or waiting requests is reached."""

    status = 429
    code = "queue_full"


class ShuttingDownError(ServingError):
    """The server is shutting down and accepts no new requests."""

    status = 503
    code = "shutting_down"

    def __init__(self, message: str = "The server is shutting down: try again in a moment.") -> None:
        super().__init__(message)


class EngineError(ServingError):
    """The engine failed during generation."""

    status = 500
    code = "engine_failed"


class EngineLimits(Config):
    """The limits of an engine.

    Args:
        batch_size: maximum number of continuations that are generated at the same time.
        queue: maximum number of further continuations that wait.
        context: maximum number of tokens of a prompt and its continuation; None uses the backbone's context length.
        max_tokens: maximum number of tokens of a continuation.
        seconds: maximum duration of a request, including the time in the queue.
        prefix_tokens: maximum number of tokens whose keys and values are kept for prompts with the same beginning.
        pack: prepack bfloat16 weights for faster CPU inference, which needs memory for a second copy.
        compile: compile the decode steps of batches in which all rows have the same grafts; None does so on
            accelerators, where that is possible.
    """

    batch_size: int = Field(16, ge=1)
    queue: int = Field(64, ge=0)
    context: int | None = Field(None, ge=1)
    max_tokens: int = Field(1024, ge=1)
    seconds: float = Field(300.0, gt=0)
    prefix_tokens: int = Field(8192, ge=0)
    pack: bool = True
    compile: bool | None = None


class HeadInput(NamedTuple):
    """The input of a graft's head.

    Attributes:
        task: name of the task.
        row: the texts of the row.
        encoded: the tokens of the row.
    """

    task: str
    row: LabelledRow
    encoded: EncodedRow


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation of one prompt.

    Attributes:
        prompt: token ids, at least one.
        model: name of the backbone or of a graft, or names of grafts joined by `+`, which then act together.
        max_tokens: maximum number of new tokens.
        stop_tokens: further end tokens.
        turn_ends: tokens that end an answer in a conversation, beside the model's own end tokens.
        ignore_eos: continue after the model's own end tokens and after `turn_ends`.
        temperature: 0 selects the most likely token at each step; 1 samples from the unmodified distribution.
        top_p: sample among the most likely tokens with this total probability.
        top_k: sample among this number of most likely tokens; 0 samples among all.
        repetition_penalty: divides positive logits, and multiplies negative logits, of tokens that occurred before.
        presence_penalty: subtracted once from the logits of tokens that occurred in the continuation.
        frequency_penalty: subtracted from the logits of those tokens for each occurrence.
        logit_bias: pairs of a token id and the value that is added to its logit.
        grammar: constrains the continuation; None allows any text.
        seed: seed of the sampling; None draws a random seed.
        stop: stop strings; the continuation ends before the first one that it would contain.
        logprobs: number of most likely tokens to report at each step; None reports no log-probabilities.
        trace: report the activity of the grafts at each token.
        embed: return the mean of the prompt's last hidden states and generate no tokens.
        row: the input of a graft's head, for a prediction instead of a continuation.
        user: name of the API key or address of the client; users take turns in the queue.
    """

    prompt: tuple[int, ...]
    model: str
    max_tokens: int = 16
    stop_tokens: tuple[int, ...] = ()
    turn_ends: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: LLMatcher | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    trace: bool = False
    embed: bool = False
    row: HeadInput | None = None
    user: str = ""


@dataclass(frozen=True)
class TokenOutput:
    """One generated token.

    Attributes:
        token: token id.
        text: the text that is final after this token. It consists of whole characters and excludes a possible
            beginning of a stop string, so that it is often empty.
        logprob: log p in nats, before any option of the request changes the distribution; None if not requested.
        top: the most likely tokens with their log p.
        trace: activity of the grafts at this token by label, such as an expert's weight or a gate's mean opening.
        index: index of the continuation in its stream.
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
        reason: `stop` for an end token or a stop string, `length` for the maximum number of tokens, `time` for the
            time limit, `cancelled` for a cancelled request.
        prompt_tokens: number of tokens of the prompt.
        completion_tokens: number of generated tokens.
        text: the remaining text, which was held back as a possible beginning of a stop string.
        index: index of the continuation in its stream.
        cached_tokens: number of prompt tokens whose keys and values were taken from the prefix cache.
        embedding: the mean of the last hidden states, if requested.
        prediction: the prediction of a head, as JSON values.
    """

    reason: EngineFinishReason
    prompt_tokens: int
    completion_tokens: int
    text: str = ""
    index: int = 0
    cached_tokens: int = 0
    embedding: tuple[float, ...] = ()
    prediction: dict[str, object] | None = None


class RequestStream:
    """The outputs of submitted requests, put by the engine's thread and iterated once, by one event loop.

    The iteration ends when all continuations have finished.

    Args:
        count: number of continuations.

    Attributes:
        cancelled: whether `cancel` was called.
    """

    def __init__(self, count: int = 1) -> None:
        self.cancelled = False
        self._items: deque[TokenOutput | Finish | Exception] = deque()
        self._unfinished = count
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def cancel(self) -> None:
        """Ask the engine to cancel the unfinished continuations; it does so at its next step."""
        self.cancelled = True

    def put(self, item: TokenOutput | Finish | Exception) -> None:
        """Add an output, or an exception that the iteration raises. The reader is not woken before `wake_readers`."""
        self._items.append(item)

    async def __aiter__(self) -> AsyncIterator[TokenOutput | Finish]:
        """Yield the outputs in the order of generation, and raise an exception that was put."""
        available = asyncio.Event()
        # The reader is registered before the first look at the items, so that no output is missed.
        self._reader = (asyncio.get_running_loop(), available)
        while self._unfinished:
            available.clear()
            while self._items:
                item = self._items.popleft()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Finish):
                    self._unfinished -= 1
                yield item
            if self._unfinished:
                await available.wait()

    @staticmethod
    def wake_readers(streams: Iterable[RequestStream]) -> None:
        """Deliver the outputs that were put into these streams, with one wake-up per event loop."""
        events: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Event]] = defaultdict(list)
        for stream in streams:
            if stream._reader is not None:
                loop, available = stream._reader
                events[loop].append(available)
        for loop, events_of_loop in events.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so its streams have no readers
                loop.call_soon_threadsafe(_set_all, events_of_loop)


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine.

    Attributes:
        running: number of continuations that are being generated.
        waiting: number of continuations in the queue.
        tokens: number of tokens generated since the start.
        finished: number of continuations by finish reason; `error` counts those that failed.
    """

    running: int
    waiting: int
    tokens: int
    finished: dict[str, int]


class Engine(Protocol):
    """The interface of engines, which generate for backbones and their grafts.

    All methods are thread-safe, and all but `close` return quickly.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The backbone's name, followed by the grafts' names."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        """Queue all requests, or none if one of them is refused.

        Args:
            requests: the continuations; the index of an output is the position of its request.

        Raises:
            ServingError: a request does not fit the models or the limits, the queue is full, or the engine is closing.
        """
        ...

    def replace(self, name: str, graft: object | None) -> None:
        """Use a graft for new requests, or remove its name if `graft` is None. Running requests keep their graft.

        Raises:
            GraftError: the name or the graft can't be used.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the present numbers of running and waiting continuations, and the totals since the start."""
        ...

    def close(self, grace: float) -> bool:
        """Refuse new requests, wait at most `grace` seconds for the others, and cancel those that remain.

        Returns:
            True if all requests finished in time.
        """
        ...


def check_model(names: Sequence[str], model: str) -> dict[str, float]:
    """Return the weights of a model that is a known name or a sum of known names; see `grafts.sums`.

    Args:
        names: the backbones' names, followed by the grafts' names.
        model: the key `model` of a request.

    Returns:
        The weight of each name, which is 1 where the model states none.

    Raises:
        UnknownModelError: a name is unknown; the message lists the known ones.
        ServingError: a name is repeated, a weight is wrong, or there are too many names; see `read_sum`.
    """
    if model in names:
        return {model: 1.0}
    is_sum = "+" in model or ":" in model
    named = [split_term(part)[0] for part in model.split("+")] if is_sum else [model]
    unknown = [name for name in named if name not in names]
    if unknown:
        mixtures = ", or grafts joined by +" if len(names) > 2 else ""
        raise UnknownModelError(f"There is no model {unknown[0][:100]!r}: use one of {', '.join(names)}{mixtures}.")
    try:
        return read_sum(model)
    except GraftError as error:
        raise ServingError(str(error), "model") from None


def check_prompt(prompt: Sequence[int], vocabulary: int, param: str = "prompt") -> None:
    """Check that a prompt has tokens, and that all of them are in the vocabulary.

    Args:
        prompt: token ids.
        vocabulary: number of token ids of the model.
        param: the request's key for the prompt, which errors name.

    Raises:
        ServingError: the prompt is empty, or a token id is negative or too large.
    """
    if not prompt:
        raise ServingError(f"{param} has no tokens, but at least one is expected: add a word.", param)
    check_tokens(prompt, vocabulary, param)


def check_tokens(tokens: Sequence[int], vocabulary: int, param: str) -> None:
    """Check that token ids are in the vocabulary.

    Args:
        tokens: token ids.
        vocabulary: number of token ids of the model.
        param: the request's key for the tokens, which errors name.

    Raises:
        ServingError: a token id is negative or too large.
    """
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ServingError(
                f"{param} has the token id {token}, but the model's ids go from 0 to {vocabulary - 1}: use the model's "
                "own tokenizer.",
                param,
            )


def context_limit(backbone: Backbone, limits: EngineLimits) -> int:
    """Return the maximum number of tokens of a prompt and its continuation; `UNLIMITED` if there is no limit."""
    return min(max_sequence_length(backbone), limits.context or UNLIMITED)
