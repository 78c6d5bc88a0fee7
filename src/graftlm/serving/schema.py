"""What requests may say: OpenAI's keys, each with its range, and one of ours, `graftlm`.

Keys that OpenAI has and this server has not may stand there with the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from graftlm.config import Config
from graftlm.serving.errors import NotHere

MOST_CHOICES = 16


def _only(*neutral: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is None or any(value == one and type(value) in _LIKE.get(type(one), (type(one),)) for one in neutral):
            return value
        allowed = f", or set it to {neutral[0]!r}" if neutral else ""
        raise NotHere(f"this server does not implement it: leave it out{allowed}")

    return check


_LIKE: dict[type, tuple[type, ...]] = {int: (int, float)}

Nothing = Annotated[Any, AfterValidator(_only()), WithJsonSchema({"type": "null"})]
Zero = Annotated[Any, AfterValidator(_only(0)), WithJsonSchema({"enum": [None, 0]})]
One = Annotated[Any, AfterValidator(_only(1)), WithJsonSchema({"enum": [None, 1]})]
No = Annotated[Any, AfterValidator(_only(False)), WithJsonSchema({"enum": [None, False]})]
NoList = Annotated[Any, AfterValidator(_only([])), WithJsonSchema({"enum": [None, []]})]
NoMapping = Annotated[Any, AfterValidator(_only({})), WithJsonSchema({"enum": [None, {}]})]
NoText = Annotated[Any, AfterValidator(_only("")), WithJsonSchema({"enum": [None, ""]})]
NoChoice = Annotated[Any, AfterValidator(_only("none", "auto")), WithJsonSchema({"enum": [None, "none", "auto"]})]
PlainText = Annotated[Any, AfterValidator(_only({"type": "text"})), WithJsonSchema({"enum": [None, {"type": "text"}]})]
TextOnly = Annotated[Any, AfterValidator(_only(["text"])), WithJsonSchema({"enum": [None, ["text"]]})]
Ignored = Annotated[Any, WithJsonSchema({"description": "Read over: it changes nothing here."})]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Several texts, or several lists of token ids, out of one or several."""
    several = [value] if isinstance(value, str) or (_is_ids(value) and value) else value
    if isinstance(several, list) and several:
        if all(isinstance(one, str) for one in several):
            if any("\ud800" <= letter <= "\udfff" for one in several for letter in one):
                raise ValueError("half of a surrogate pair stands alone, and Unicode text is expected")
            return several
        if all(_is_ids(one) for one in several):
            return several
    raise ValueError("a text, a list of texts, a list of token ids or a list of such lists is expected")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)


_TEXT, _IDS = {"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_STOP = {"type": "string", "minLength": 1, "maxLength": 256}
Stops = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=256)]],
    Field(max_length=4),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 4}]}),
]
Prompt = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _IDS | {"minItems": 1},
                *({"type": "array", "items": one, "minItems": 1} for one in (_TEXT, _IDS)),
            ]
        }
    ),
]


class _Strict(Config):
    """Types are as JSON has them: "5" is no number."""

    model_config = ConfigDict(strict=True)


class StreamOptions(_Strict):
    """Of a streamed answer."""

    include_usage: bool = Field(False, description="A last chunk tells how many tokens there were.")
    include_obfuscation: Ignored = None


class Extras(_Strict):
    """What GraftLM adds to the protocol."""

    trace: bool = Field(False, description="Tell of each token what the grafts did.")


class Asked(_Strict):
    """What both kinds of request say."""

    model: str = Field(min_length=1, max_length=512, description="The backbone, a graft, or grafts joined by +.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, ge=0, le=1)
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops | None = None
    max_tokens: int | None = Field(None, ge=1)
    graftlm: Extras | None = None

    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: NoMapping = None
    user: Ignored = None


class CompletionRequest(Asked):
    """Of /v1/completions: text, or token ids, to be continued."""

    prompt: Prompt = Field(description="What to continue.")
    logprobs: int | None = Field(None, ge=0, le=5)

    best_of: One = None
    echo: No = None
    suffix: NoText = None


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            raise NotHere(f"this server reads text alone, and a part of the type {kind[:50]!r} was found: leave it out")
        return values


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(_parts, json_schema_input_type=str | list[TextPart]),
    ]
    name: Ignored = None

    annotations: NoList = None
    audio: Nothing = None
    function_call: Nothing = None
    refusal: Nothing = None
    tool_calls: NoList = None

    @property
    def text(self) -> str:
        """Its parts as one text."""
        return "".join(part.text for part in self.content)


class ChatRequest(Asked):
    """Of /v1/chat/completions: a conversation to be continued by the assistant."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    audio: Nothing = None
    function_call: NoChoice = None
    functions: NoList = None
    modalities: TextOnly = None
    moderation: Nothing = None
    parallel_tool_calls: Ignored = None
    prediction: Nothing = None
    reasoning_effort: Nothing = None
    response_format: PlainText = None
    tool_choice: NoChoice = None
    tools: NoList = None
    verbosity: Nothing = None
    web_search_options: Nothing = None

    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: No = None
