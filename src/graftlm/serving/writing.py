"""From what engines write to answers, whole or in chunks."""

from __future__ import annotations

import codecs
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from graftlm.serving.answers import (
    AssistantMessage,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChoiceExtras,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    DeltaChoice,
    Finish,
    TokenLogprob,
    TopLogprob,
    TracedPiece,
    Usage,
)
from graftlm.serving.asks import Order
from graftlm.serving.errors import TimedOutError
from graftlm.serving.prompts import Prompts
from graftlm.serving.protocol import ClosingError, End, Piece


@dataclass
class Shown:
    """One continuation so far. Tokens are told of together with the text that they belong to.

    Attributes:
        text: what can be shown.
        pieces: its tokens.
        end: how it ended, once it has.
    """

    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    end: End | None = None
    _held: list[Piece] = field(default_factory=list)

    def take(self, item: Piece | End, prompts: Prompts) -> tuple[str, list[Piece]]:
        """What the next piece adds to text and tokens.

        Raises:
            ServingError: it ended without an answer.
        """
        new: list[Piece] = []
        if isinstance(item, End):
            self.end = item
            _refuse_nothing(item)
            new = _within(self._held, item, prompts)
        else:
            self._held.append(item)
            if item.text:
                new, self._held = self._held, []
        self.text += item.text
        self.pieces += new
        return item.text, new

    @property
    def finish(self) -> Finish | None:
        """Why it ended, in OpenAI's words."""
        if self.end is None:
            return None
        return "stop" if self.end.reason == "stop" else "length"


def _refuse_nothing(end: End) -> None:
    """Raise unless an end is one that an answer can have."""
    if end.reason == "cancelled":
        raise ClosingError("The server shut down before the answer was whole: ask again in a moment.")
    if end.reason == "time" and end.completion_tokens == 0:
        raise TimedOutError("The time limit of requests passed before a word was written: try again later.")


def _within(held: list[Piece], end: End, prompts: Prompts) -> list[Piece]:
    """Of tokens that were held back, those that the text shows after all: not those of an end or a stop string."""
    if end.reason != "stop":
        return held
    size, place, shown = len(end.text.encode()), 0, []
    for piece in held:
        if place < size:
            shown.append(piece)
        place += len(prompts.bytes_of(piece.token))
    return shown


class Writing:
    """The answer to one request; a kind of answer says how its choices look.

    Args:
        order: what was asked for.
        prompts: the tokenizer.
        fingerprint: of the backbone.
    """

    prefix = ""

    def __init__(self, order: Order, prompts: Prompts, fingerprint: str) -> None:
        self.order, self.prompts = order, prompts
        self.shown = [Shown() for _ in order.asks]
        self._places = [_Place() for _ in order.asks]
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": order.model,
            "system_fingerprint": fingerprint,
        }

    def take(self, number: int, item: Piece | End) -> tuple[str, list[Piece]]:
        """Take a continuation's next piece; gives what it adds."""
        return self.shown[number].take(item, self.prompts)

    @property
    def usage(self) -> Usage:
        """Tokens that were read and written."""
        ends = [shown.end for shown in self.shown]
        read = sum(end.prompt_tokens for end in ends[:: self.order.each] if end is not None)
        written = sum(end.completion_tokens for end in ends if end is not None)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def _choice(self, number: int, pieces: list[Piece], finish: Finish | None) -> dict[str, Any]:
        """What choices of all kinds have; our own key only where there is something to tell."""
        extras: dict[str, Any] = {}
        if self.order.trace and pieces:
            extras["trace"] = [TracedPiece(token=self.prompts.shown(one.token), values=one.trace) for one in pieces]
        end = self.shown[number].end
        if finish is not None and end is not None and end.reason == "time":
            extras["ended"] = "time"
        told = {"graftlm": ChoiceExtras(**extras)} if extras else {}
        return {"index": number, "finish_reason": finish, **told}

    def _chunk_head(self) -> dict[str, Any]:
        """Of each chunk; with `include_usage` all but the last one say that they don't tell it."""
        return self.head | ({"usage": None} if self.order.usage else {})

    def whole(self) -> str:
        """The answer as JSON."""
        raise NotImplementedError

    def first(self, number: int) -> str | None:
        """A chunk that comes before the text, as JSON."""
        return None

    def chunk(self, number: int, text: str, pieces: list[Piece], finish: Finish | None) -> str:
        """A chunk of a stream, as JSON."""
        raise NotImplementedError

    def last(self) -> str:
        """The chunk that tells the usage, as JSON."""
        raise NotImplementedError


class _Place:
    """How many characters some tokens make."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def move(self, data: bytes) -> int:
        """Where a token of these bytes begins; the next one begins behind it."""
        begins = self._characters
        self._characters += len(self._decoder.decode(data))
        return begins


class CompletionWriting(Writing):
    """Of /v1/completions."""

    prefix = "cmpl"

    def whole(self) -> str:
        choices = [self._text(n, one.text, one.pieces, one.finish) for n, one in enumerate(self.shown)]
        return Completion(object="text_completion", choices=choices, usage=self.usage, **self.head).json_line()

    def chunk(self, number: int, text: str, pieces: list[Piece], finish: Finish | None) -> str:
        choices = [self._text(number, text, pieces, finish)]
        return Completion(object="text_completion", choices=choices, **self._chunk_head()).json_line()

    def last(self) -> str:
        return Completion(object="text_completion", choices=[], usage=self.usage, **self.head).json_line()

    def _text(self, number: int, text: str, pieces: list[Piece], finish: Finish | None) -> CompletionChoice:
        logprobs = self._logprobs(number, pieces) if self.order.logprobs else None
        return CompletionChoice(text=text, logprobs=logprobs, **self._choice(number, pieces, finish))

    def _logprobs(self, number: int, pieces: list[Piece]) -> CompletionLogprobs:
        offsets = [self._places[number].move(self.prompts.bytes_of(piece.token)) for piece in pieces]
        return CompletionLogprobs(
            tokens=[self.prompts.shown(piece.token) for piece in pieces],
            token_logprobs=[piece.logprob or 0.0 for piece in pieces],
            top_logprobs=[self._top(piece) for piece in pieces],
            text_offset=offsets,
        )

    def _top(self, piece: Piece) -> dict[str, float]:
        """The likeliest tokens, and the one that stands there."""
        return {self.prompts.shown(token): value for token, value in (*piece.top, (piece.token, piece.logprob or 0.0))}


class ChatWriting(Writing):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self) -> str:
        choices = [self._message(n, one) for n, one in enumerate(self.shown)]
        return Chat(object="chat.completion", choices=choices, usage=self.usage, **self.head).json_line()

    def _message(self, number: int, shown: Shown) -> ChatChoice:
        said = AssistantMessage(role="assistant", content=shown.text, refusal=None)
        return ChatChoice(
            message=said,
            logprobs=self._logprobs(shown.pieces),
            **self._choice(number, shown.pieces, shown.finish),
        )

    def first(self, number: int) -> str | None:
        return self._delta(number, Delta(role="assistant", content=""), [], None)

    def chunk(self, number: int, text: str, pieces: list[Piece], finish: Finish | None) -> str:
        return self._delta(number, Delta(content=text) if text or finish is None else Delta(), pieces, finish)

    def last(self) -> str:
        return ChatChunk(object="chat.completion.chunk", choices=[], usage=self.usage, **self.head).json_line()

    def _delta(self, number: int, delta: Delta, pieces: list[Piece], finish: Finish | None) -> str:
        logprobs = self._logprobs(pieces) if pieces else None
        choice = DeltaChoice(delta=delta, logprobs=logprobs, **self._choice(number, pieces, finish))
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._chunk_head()).json_line()

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        if not self.order.logprobs:
            return None
        return ChatLogprobs(content=[self._token(piece) for piece in pieces], refusal=None)

    def _token(self, piece: Piece) -> TokenLogprob:
        top = [TopLogprob(**self._named(token, value)) for token, value in piece.top]
        return TokenLogprob(top_logprobs=top, **self._named(piece.token, piece.logprob or 0.0))

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.prompts.shown(token),
            "logprob": logprob,
            "bytes": list(self.prompts.bytes_of(token)),
        }
