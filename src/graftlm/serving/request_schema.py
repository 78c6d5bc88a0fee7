"""The bodies of OpenAI's requests.

The schema has OpenAI's keys with their ranges, some keys of vLLM, and the key `graftlm`. Types are strict: the text "5"
is not a number. Any other key is refused, except keys of OpenAI that have no effect on an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from graftlm.config import Config
from graftlm.data.conversations import read_arguments
from graftlm.errors import DataError
from graftlm.serving.tokenization import TEMPLATE_ARGUMENTS
from graftlm.serving.tools import ToolSchema

MAX_CHOICES = 16
_TEMPLATE_CHARACTERS = 10_000  # maximum size of values for a chat template, which may repeat them
_NO_UNICODE = "the text has half of a surrogate pair, but Unicode is expected"


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _check_prompts(value: object) -> list[str] | list[list[int]]:
    """Return one or several prompts as a list of texts or of lists of token ids."""
    is_one_prompt = isinstance(value, str) or (_is_token_ids(value) and value != [])
    prompts: Any = [value] if is_one_prompt else value
    if isinstance(prompts, list) and prompts:
        if all(isinstance(prompt, str) for prompt in prompts):
            if any(_has_surrogate(prompt) for prompt in prompts):
                raise ValueError(_NO_UNICODE)
            return prompts
        if all(_is_token_ids(prompt) for prompt in prompts):
            return prompts
    raise ValueError("a text, a list of texts, a list of token ids or a list of such lists is expected")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _check_bias_keys(value: object) -> object:
    if isinstance(value, dict):
        for key in value:
            is_id = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10
            if not is_id:
                raise ValueError(
                    f"the key {str(key)[:50]!r} is not a token id, but ids of up to 9 digits are expected: send the id "
                    "of a token"
                )
    return value


def _check_template_values(values: dict[str, object]) -> dict[str, object]:
    taken = sorted(values.keys() & TEMPLATE_ARGUMENTS)
    if taken:
        raise ValueError(f"{taken[0]} is set by the server: leave it out")
    try:
        size = len(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError("the values are nested too deeply: use fewer levels") from None
    if size > _TEMPLATE_CHARACTERS:
        raise ValueError(
            f"the values have {size:,} characters as JSON, but at most {_TEMPLATE_CHARACTERS:,} are accepted: shorten "
            "them"
        )
    return values


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Ignored = Annotated[object, WithJsonSchema({"description": "Accepted and ignored."})]
NotEmpty = Field(min_length=1)
NonEmptyText = Annotated[str, NotEmpty]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[Stop],
    Field(max_length=4),
    BeforeValidator(_as_list, json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=4)]),
]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
    BeforeValidator(_check_bias_keys),
]
TemplateValues = Annotated[dict[str, Any], AfterValidator(_check_template_values)]
_PromptInput = (
    str | Annotated[TokenIds, NotEmpty] | Annotated[list[str], NotEmpty] | Annotated[list[TokenIds], NotEmpty]
)
Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_check_prompts, json_schema_input_type=_PromptInput),
]


class StrictBody(Config):
    """A part of a body, validated without type conversions."""

    model_config = ConfigDict(strict=True)


class RequestBody(StrictBody):
    """A whole body, in which all text is Unicode."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_unicode(cls, values: object, handler: ModelWrapValidatorHandler[RequestBody]) -> RequestBody:
        body = handler(values)
        try:
            json.dumps(values, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError(_NO_UNICODE) from None
        return body


class OpenAIRequest(RequestBody):
    """A body of OpenAI's API, with the keys that have no effect on an answer."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


class StreamOptions(StrictBody):
    """Options of a streamed response."""

    include_usage: bool = Field(False, description="Add a last chunk with the numbers of tokens.")
    include_obfuscation: Ignored = None


class RequestExtras(StrictBody):
    """GraftLM's additions to the protocol."""

    trace: bool = Field(False, description="Report the activity of the grafts at each token.")


class JsonSchema(StrictBody):
    """A named schema, which answers always follow."""

    name: str = Field(min_length=1, max_length=64)
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(StrictBody):
    """The format of the answer: any text, a JSON object, or JSON with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def _problems(self) -> Iterator[str]:
        if self.type == "json_schema" and self.json_schema is None:
            yield "the type is 'json_schema', but json_schema is missing: add it"
        if self.type != "json_schema" and self.json_schema is not None:
            yield f"json_schema is set, but the type is {self.type!r}: set the type to 'json_schema'"


class StructuredOutputs(StrictBody):
    """vLLM's key for the format of the answer; exactly one of the keys is set."""

    json_schema: dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, min_length=1, max_length=10_000, description="In Rust's syntax.")
    choice: list[NonEmptyText] | None = Field(None, min_length=1, max_length=1000, description="One of these texts.")
    grammar: str | None = Field(None, min_length=1, max_length=100_000, description="Lark, with a rule `start`.")

    def _problems(self) -> Iterator[str]:
        given = [getattr(self, name) for name in self.model_fields_set]
        if len(given) != 1 or None in given:
            yield (
                f"the number of keys with a value is {len(given) - given.count(None)}, but exactly one of json, regex, "
                "choice and grammar is expected, without null for others"
            )


class ApiRequest(OpenAIRequest):
    """The common keys of completions and chats."""

    model: str = Field(
        min_length=1, max_length=512, description="The backbone, a graft, or a sum such as danish:0.7+legal:0.3."
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, ge=0, le=1)
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops | None = None
    max_tokens: int | None = Field(None, ge=1)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: Biases | None = Field(None, description="By token id; added to the logit.")
    top_k: int | None = Field(None, ge=-1, description="As in vLLM; 0 and -1 allow all tokens.")
    repetition_penalty: float | None = Field(1.0, gt=0, le=100, description="As in vLLM.")
    structured_outputs: StructuredOutputs | None = Field(None, description="As in vLLM.")
    ignore_eos: bool | None = Field(False, description="As in vLLM: the model's end tokens don't end the answer.")
    graftlm: RequestExtras | None = None


class CompletionRequest(ApiRequest):
    """The body of /v1/completions: prompts as text or as token ids."""

    prompt: Prompts = Field(description="The text to continue.")
    logprobs: int | None = Field(None, ge=0, le=5)


class TextPart(StrictBody):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


TextParts = Annotated[
    list[TextPart],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
]


class FunctionCall(StrictBody):
    """A tool's name, and its arguments as JSON."""

    name: NonEmptyText
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str) -> str:
        try:
            read_arguments(value, "the call")
        except DataError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return value


class MessageToolCall(StrictBody):
    """A call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(StrictBody):
    """One message of a conversation. A message with the role `tool` contains the result of a call.

    Attributes:
        annotations: ignored; OpenAI's answers have this key and the following ones, and clients send them back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextParts | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="As in vLLM, for chat templates that read it.")
    annotations: Ignored = Field(None, exclude=True)
    refusal: None = None
    audio: None = None
    function_call: None = None

    def _problems(self) -> Iterator[str]:
        if self.content is None and not self.tool_calls:
            yield f"a message with the role {self.role} has no content, but text is expected"
        if self.tool_calls and self.role != "assistant":
            yield f"a message with the role {self.role} has tool_calls, which only the assistant's messages may have"


class ToolFunction(StrictBody):
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments; None for a function without arguments.
        strict: ignored, because answers always follow the schema.
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: Ignored = None


class Tool(StrictBody):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: ToolFunction


class NamedTool(StrictBody):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: Annotated[dict[Literal["name"], NonEmptyText], NotEmpty]

    @property
    def name(self) -> str:
        """The name of the tool, which may not be one of the request's tools."""
        return self.function["name"]


class EmbeddingRequest(OpenAIRequest):
    """The body of /v1/embeddings: texts, as text or as token ids."""

    model: str = Field(min_length=1)
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"


class ChatRequest(ApiRequest):
    """The body of /v1/chat/completions: a conversation that the assistant continues."""

    messages: list[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: TemplateValues | None = Field(None, description="As in vLLM: values for the chat template.")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
