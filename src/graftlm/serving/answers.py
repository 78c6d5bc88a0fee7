"""What answers say, whole or in chunks, as OpenAI has it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length"]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)

    def json_line(self) -> str:
        """As JSON, without keys that were not given."""
        return self.model_dump_json(exclude_unset=True)


class ErrorDetail(_Answer):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """Any answer whose status is not 200."""

    error: ErrorDetail


class Usage(_Answer):
    """Tokens; a prompt that is continued several times counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TracedPiece(_Answer):
    """A token, and what the grafts did where it was written, by label."""

    token: str
    values: dict[str, float]


class ChoiceExtras(_Answer):
    """What GraftLM adds to a choice: a trace that was asked for, and that the time limit ended it."""

    trace: list[TracedPiece] | None = None
    ended: Literal["time"] | None = None


class _Choice(_Answer):
    index: int
    finish_reason: Finish | None
    graftlm: ChoiceExtras | None = None


class CompletionLogprobs(_Answer):
    """Of the tokens of a completion, in nats; `text_offset` in characters from its beginning."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Choice):
    """A continuation, or a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None


class Completion(_Answer):
    """The answer of /v1/completions, or a chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(_Answer):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that stands there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Of the tokens of a message, in nats."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(_Answer):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    """One message."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class Chat(_Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class Delta(_Answer):
    """A piece of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class DeltaChoice(_Choice):
    """A piece of one of the messages."""

    delta: Delta
    logprobs: ChatLogprobs | None


class ChatChunk(_Answer):
    """A chunk of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[DeltaChoice]
    usage: Usage | None = None


class ModelCard(_Answer):
    """A name that requests may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    graftlm: dict[str, str]


class ModelList(_Answer):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(_Answer):
    """Whether requests are taken, how many there are, and grafts whose new files could not be read."""

    status: Literal["ready", "closing"]
    running: int
    waiting: int
    models: int
    broken: list[str]
