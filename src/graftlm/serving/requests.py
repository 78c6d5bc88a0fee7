"""The bodies of OpenAI's requests, and their conversion to `GenerationRequest`s.

The schema has OpenAI's keys with their ranges, and one key of ours, `graftlm`. Keys of OpenAI that this server does not
implement accept only the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from graftlm.config import Config
from graftlm.serving.errors import UnsupportedValueError
from graftlm.serving.protocol import GenerationRequest, ServingError, check_model, check_prompt
from graftlm.serving.service import Service

MAX_CHOICES = 16
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_TEMPLATE_ROLES = {"developer": "system"}


class NeutralValue:
    """The annotation of a key that is not implemented: it accepts None or one of the values that change nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.values]}

    def _check(self, value: Any) -> Any:
        neutral = (known for known in self.values if isinstance(known, bool) == isinstance(value, bool))
        if value is None or value in neutral:
            return value
        allowed = f", or set it to {self.values[0]!r}" if self.values else ""
        raise UnsupportedValueError(f"this server does not implement it: leave it out{allowed}")


OnlyNull = Annotated[Any, NeutralValue()]
OnlyZero = Annotated[Any, NeutralValue(0)]
OnlyFalse = Annotated[Any, NeutralValue(False)]
OnlyEmptyList = Annotated[Any, NeutralValue([])]
OnlyNoTool = Annotated[Any, NeutralValue("none", "auto")]
Ignored = Annotated[Any, WithJsonSchema({"description": "Accepted and ignored."})]


def _check_prompts(value: Any) -> list[str] | list[list[int]]:
    """A list of texts or of lists of token ids, from one prompt or several."""
    prompts = [value] if isinstance(value, str) or (_is_ids(value) and value) else value
    if isinstance(prompts, list) and prompts:
        if all(isinstance(prompt, str) for prompt in prompts):
            if any("\ud800" <= letter <= "\udfff" for prompt in prompts for letter in prompt):
                raise ValueError("half of a surrogate pair stands alone, and Unicode text is expected")
            return prompts
        if all(_is_ids(prompt) for prompt in prompts):
            return prompts
    raise ValueError("a text, a list of texts, a list of token ids or a list of such lists is expected")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[Stop],
    Field(max_length=4),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=4)],
    ),
]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
NotEmpty = Field(min_length=1)
Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(
        _check_prompts,
        json_schema_input_type=str
        | Annotated[TokenIds, NotEmpty]
        | Annotated[list[str], NotEmpty]
        | Annotated[list[TokenIds], NotEmpty],
    ),
]


class StrictBody(Config):
    """A body whose types are those of JSON: "5" is not a number."""

    model_config = ConfigDict(strict=True)


class StreamOptions(StrictBody):
    """Options of a streamed response."""

    include_usage: bool = Field(False, description="A last chunk has the numbers of tokens.")
    include_obfuscation: Ignored = None


class RequestExtras(StrictBody):
    """What GraftLM adds to the protocol."""

    trace: bool = Field(False, description="Report for each token what the grafts did.")


class ApiRequest(StrictBody):
    """The keys that completions and chats have in common."""

    model: str = Field(min_length=1, max_length=512, description="The backbone, a graft, or grafts joined by +.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, ge=0, le=1)
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops | None = None
    max_tokens: int | None = Field(None, ge=1)
    graftlm: RequestExtras | None = None

    frequency_penalty: OnlyZero = None
    presence_penalty: OnlyZero = None
    logit_bias: Annotated[Any, NeutralValue({})] = None
    user: Ignored = None


class CompletionRequest(ApiRequest):
    """The body of /v1/completions: prompts as text or as token ids."""

    prompt: Prompts = Field(description="What to continue.")
    logprobs: int | None = Field(None, ge=0, le=5)

    best_of: Annotated[Any, NeutralValue(1)] = None
    echo: OnlyFalse = None
    suffix: Annotated[Any, NeutralValue("")] = None


class TextPart(StrictBody):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedValueError(
                f"this server reads text alone, and a part of the type {kind[:50]!r} was found: leave it out"
            )
        return values


class ChatMessage(StrictBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(
            lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value,
            json_schema_input_type=str | list[TextPart],
        ),
    ]
    name: Ignored = None

    annotations: OnlyEmptyList = None
    audio: OnlyNull = None
    function_call: OnlyNull = None
    refusal: OnlyNull = None
    tool_calls: OnlyEmptyList = None

    @property
    def text(self) -> str:
        """The parts as one text."""
        return "".join(part.text for part in self.content)


class ChatRequest(ApiRequest):
    """The body of /v1/chat/completions: a conversation that the assistant continues."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    audio: OnlyNull = None
    function_call: OnlyNoTool = None
    functions: OnlyEmptyList = None
    modalities: Annotated[Any, NeutralValue(["text"])] = None
    moderation: OnlyNull = None
    parallel_tool_calls: Ignored = None
    prediction: OnlyNull = None
    reasoning_effort: OnlyNull = None
    response_format: Annotated[Any, NeutralValue({"type": "text"})] = None
    tool_choice: OnlyNoTool = None
    tools: OnlyEmptyList = None
    verbosity: OnlyNull = None
    web_search_options: OnlyNull = None

    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: OnlyFalse = None


@dataclass(frozen=True)
class ParsedRequest:
    """An HTTP request in the engine's terms.

    Attributes:
        requests: the continuations: all of the first prompt, then all of the second.
        model: a model's name.
        n: number of continuations of each prompt.
        logprobs, trace: whether the response reports them.
        stream: whether the response is streamed.
        include_usage: whether a stream ends with the numbers of tokens.
    """

    requests: tuple[GenerationRequest, ...]
    model: str
    n: int
    logprobs: bool
    trace: bool
    stream: bool
    include_usage: bool


def parse_completion(service: Service, body: CompletionRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/completions; a body that does not fit the model is a `ServingError`."""
    _check(service, body, len(body.prompt))
    encode = service.tokenizer.encode
    prompts = [encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompt]
    for prompt in prompts:
        check_prompt(prompt, service.tokenizer.vocabulary)
    stop, max_tokens = tuple(body.stop or ()), body.max_tokens or _COMPLETION_TOKENS
    return _parse(body, prompts, stop=stop, logprobs=body.logprobs, max_tokens=max_tokens, user=user)


def parse_chat(service: Service, body: ChatRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/chat/completions; max_tokens defaults to what the context leaves."""
    _check(service, body, 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ServingError("top_logprobs is set, and logprobs is not: set logprobs to true as well.", "top_logprobs")
    if body.max_tokens and body.max_completion_tokens:
        raise ServingError("max_tokens and max_completion_tokens are the same: give one of them.", "max_tokens")
    messages = [(_TEMPLATE_ROLES.get(message.role, message.role), message.text) for message in body.messages]
    prompt = service.tokenizer.encode_chat(messages)
    check_prompt(prompt, service.tokenizer.vocabulary, "messages")
    remaining = max(1, min(service.limits.max_tokens, service.context - len(prompt)))
    return _parse(
        body,
        [prompt],
        stop=(*(body.stop or ()), *service.tokenizer.chat_stops),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_completion_tokens or body.max_tokens or remaining,
        user=user,
    )


def _check(service: Service, body: ApiRequest, prompts: int) -> None:
    check_model(service.engine.names, body.model)
    count, capacity = prompts * (body.n or 1), service.limits.batch_size + service.limits.queue
    if count > capacity:
        raise ServingError(
            f"The request asks for {count} continuations at once, and this server takes {capacity} at most: send "
            "several requests.",
            "n",
        )
    if body.stream_options is not None and not body.stream:
        raise ServingError(
            "stream_options is set, and stream is not: set stream to true, or leave it out.", "stream_options"
        )


def _parse(
    body: ApiRequest, prompts: Sequence[tuple[int, ...]], *, logprobs: int | None, **options: Any
) -> ParsedRequest:
    n, trace = body.n or 1, body.graftlm is not None and body.graftlm.trace
    top_p = 1.0 if body.top_p is None else body.top_p
    temperature = (1.0 if body.temperature is None else body.temperature) if top_p > 0 else 0.0
    options |= {"model": body.model, "temperature": temperature, "top_p": top_p or 1.0, "trace": trace}
    seeds = [None if body.seed is None else (body.seed + number) % 2**63 for number in range(n)]
    requests = tuple(
        GenerationRequest(prompt=prompt, seed=seed, logprobs=logprobs, **options)
        for prompt in prompts
        for seed in seeds
    )
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return ParsedRequest(requests, body.model, n, logprobs is not None, trace, bool(body.stream), include_usage)
