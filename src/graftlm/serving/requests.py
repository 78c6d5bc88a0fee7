"""The bodies of OpenAI's requests, and their conversion to `GenerationRequest`s.

The schema has OpenAI's keys with their ranges, and one key of ours, `graftlm`. Keys of OpenAI that this server does not
implement accept only the value that changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from llguidance import LLMatcher
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from graftlm.config import Config, read_yaml
from graftlm.serving.errors import UnsupportedValueError
from graftlm.serving.protocol import ContextLengthError, GenerationRequest, ServingError, check_model, check_prompt
from graftlm.serving.router import EngineRouter
from graftlm.serving.service import Service
from graftlm.serving.tokenization import TEMPLATE_ARGUMENTS
from graftlm.serving.tools import tool_grammar

MAX_CHOICES = 16
_Body = TypeVar("_Body", bound=BaseModel)
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_TEMPLATE_CHARACTERS = 10_000  # of values, which a template may write in many ways
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


Ignored = Annotated[Any, WithJsonSchema({"description": "Accepted and ignored."})]
_NEUTRAL_KEYS: Any = read_yaml(Path(__file__).with_name("neutral_keys.yaml"))


def accepts_neutral_keys(body: type[_Body]) -> type[_Body]:
    """Adds the keys of neutral_keys.yaml to a body, which does nothing with them."""
    fields: Any = {}
    for entry in _NEUTRAL_KEYS[body.__name__]:
        kind = Annotated[Any, NeutralValue(*entry["values"])] if "values" in entry else Ignored
        fields |= dict.fromkeys(entry["keys"].split(), (kind, None))
    about = {"__doc__": body.__doc__, "__module__": body.__module__}
    return create_model(body.__name__, __base__=body, **about, **fields)


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


def _check_tokens(value: Any) -> Any:
    for key in value if isinstance(value, dict) else ():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError(f"token ids are expected as keys, and {str(key)[:50]!r} is none")
    return value


def _check_names(values: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(values.keys() & TEMPLATE_ARGUMENTS):
        raise ValueError(f"{taken[0]} is set by the server: leave it out")
    try:
        size = len(json.dumps(values, allow_nan=False))
    except RecursionError:
        size = _TEMPLATE_CHARACTERS + 1
    if size > _TEMPLATE_CHARACTERS:
        raise ValueError(f"JSON of {_TEMPLATE_CHARACTERS:,} characters at most is expected")
    return values


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
NonEmpty = Annotated[str, Field(min_length=1)]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
    BeforeValidator(_check_tokens),
]
TemplateValues = Annotated[dict[str, Any], AfterValidator(_check_names)]
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

    @model_validator(mode="wrap")
    @classmethod
    def _raise_first_problem(cls, values: Any, validate: Any) -> Any:
        body = validate(values)  # strict types take no truth value for a number
        for problem in getattr(body, "_problems", tuple)():
            raise ValueError(problem)
        return body


class RequestBody(StrictBody):
    """A body as a whole, in which all text is Unicode."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_unicode(cls, values: Any, handler: Any) -> Any:
        body = handler(values)
        try:
            json.dumps(values, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair stands alone, and Unicode text is expected") from None
        return body


@accepts_neutral_keys
class StreamOptions(StrictBody):
    """Options of a streamed response."""

    include_usage: bool = Field(False, description="A last chunk has the numbers of tokens.")


class RequestExtras(StrictBody):
    """What GraftLM adds to the protocol."""

    trace: bool = Field(False, description="Report for each token what the grafts did.")


@accepts_neutral_keys
class JsonSchema(StrictBody):
    """A named schema; answers always follow it."""

    name: str = Field(min_length=1, max_length=64)
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(StrictBody):
    """The form of the answer: any text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def _problems(self) -> Iterator[str]:
        if (self.type == "json_schema") != (self.json_schema is not None):
            yield "json_schema is expected where type is 'json_schema', and nowhere else"


class StructuredOutputs(StrictBody):
    """vLLM's key for the form of the answer; exactly one of these."""

    json_schema: dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, min_length=1, max_length=10_000, description="In Rust's syntax.")
    choice: list[NonEmpty] | None = Field(None, min_length=1, max_length=1000, description="One of these texts.")
    grammar: str | None = Field(None, min_length=1, max_length=100_000, description="Lark, with a rule `start`.")

    def _problems(self) -> Iterator[str]:
        if len(self.model_fields_set) != 1 or None in (getattr(self, name) for name in self.model_fields_set):
            yield "one of json, regex, choice and grammar is expected"


@accepts_neutral_keys
class ApiRequest(RequestBody):
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
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: Biases | None = Field(None, description="By token id; added to the logit.")
    top_k: int | None = Field(None, ge=-1, description="Of vLLM; 0 and -1 take all tokens.")
    min_p: float | None = Field(0.0, ge=0, le=1, description="Of vLLM.")
    repetition_penalty: float | None = Field(1.0, gt=0, le=100, description="Of vLLM.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Of vLLM.")
    min_tokens: int | None = Field(0, ge=0, description="Of vLLM: before them nothing ends the answer.")
    stop_token_ids: TokenIds | None = Field(None, max_length=64, description="Of vLLM.")
    ignore_eos: bool | None = Field(False, description="Of vLLM: the model's end tokens do not end the answer.")
    graftlm: RequestExtras | None = None


@accepts_neutral_keys
class CompletionRequest(ApiRequest):
    """The body of /v1/completions: prompts as text or as token ids."""

    prompt: Prompts = Field(description="What to continue.")
    logprobs: int | None = Field(None, ge=0, le=5)


@accepts_neutral_keys
class TextPart(StrictBody):
    """A part of a message; the other names are those of /v1/responses."""

    type: Literal["text", "input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else "text"
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            why = f"this server reads text alone, and a part of the type {kind[:50]!r} was found: leave it out"
            raise UnsupportedValueError(why)
        return values


Texts = Annotated[
    list[TextPart],
    BeforeValidator(
        lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value,
        json_schema_input_type=str | list[TextPart],
    ),
]


class FunctionCall(StrictBody):
    """A tool's name, and its arguments as JSON."""

    name: NonEmpty
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check(cls, value: str) -> str:
        if not isinstance(json.loads(value or "{}"), dict):  # a JSONDecodeError is a ValueError
            raise ValueError("a JSON object is expected")
        return value or "{}"

    def parsed(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        return {"name": self.name, "arguments": json.loads(self.arguments)}


class MessageToolCall(StrictBody):
    """A call that the assistant has made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


@accepts_neutral_keys
class ChatMessage(StrictBody):
    """One message of a conversation; `tool` has the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Texts | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    def _problems(self) -> Iterator[str]:
        if self.content is None and not self.tool_calls:
            yield "content is expected"
        if self.tool_calls and self.role != "assistant":
            yield "tool_calls are expected in messages of the assistant alone"

    @property
    def text(self) -> str:
        """The parts as one text."""
        return "".join(part.text for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        message: dict[str, Any] = {"role": _TEMPLATE_ROLES.get(self.role, self.role), "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.parsed()} for call in self.tool_calls
            ]
        return message


class ToolFunction(StrictBody):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None


class Tool(StrictBody):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: ToolFunction


class NamedTool(StrictBody):
    """The tool that must be called."""

    type: Literal["function"]
    function: Annotated[dict[Literal["name"], NonEmpty], Field(min_length=1)]


@accepts_neutral_keys
class EmbeddingRequest(RequestBody):
    """The body of /v1/embeddings."""

    model: str = Field(min_length=1)
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"


@accepts_neutral_keys
class ChatRequest(ApiRequest):
    """The body of /v1/chat/completions: a conversation that the assistant continues."""

    prompt_key: ClassVar[str] = "messages"  # as errors name it
    form_key: ClassVar[str] = "response_format"
    messages: list[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: TemplateValues | None = Field(None, description="Of vLLM: values for the chat template.")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True


class TokenizeRequest(RequestBody):
    """The body of /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = True

    def _problems(self) -> Iterator[str]:
        if (self.prompt is None) == (self.messages is None):
            yield "either prompt or messages is expected"


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


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
        tools: names of the tools that the answer may call.
        base64: whether embeddings are written in base64.
        repeated: keys of the request that the response has too.
    """

    requests: tuple[GenerationRequest, ...]
    model: str
    n: int
    logprobs: bool
    trace: bool
    stream: bool
    include_usage: bool
    tools: tuple[str, ...] = ()
    base64: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)


def service_of(service: Service, model: str) -> Service:
    """The service of a model's backbone. Raises UnknownModelError, or ServingError if a mixture has two."""
    if isinstance(service.engine, EngineRouter):
        return service.members[service.engine.of(model).name]
    check_model(service.engine.names, model)
    return service


def parse_completion(service: Service, body: CompletionRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/completions; a body that does not fit the model is a `ServingError`."""
    _check(service, body, len(body.prompt))
    encode = service.tokenizer.encode
    prompts = [encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompt]
    for prompt in prompts:
        check_prompt(prompt, service.tokenizer.vocabulary)
    stop, max_tokens = tuple(body.stop or ()), body.max_tokens or _COMPLETION_TOKENS
    options: dict[str, Any] = {"grammar": _structured(service, body), "user": user, "stop": stop}
    return _parse(service, body, prompts, logprobs=body.logprobs, max_tokens=max_tokens, **options)


def parse_embedding(service: Service, body: EmbeddingRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/embeddings; a body that does not fit the model is a `ServingError`."""
    texts = [service.tokenizer.encode(text) if isinstance(text, str) else tuple(text) for text in body.input]
    for number, text in enumerate(texts):
        param = f"input.{number}" if len(texts) > 1 else "input"
        check_prompt(text, service.tokenizer.vocabulary, param)
        if len(text) > service.context:
            why = f"{param} has {len(text)} tokens, but {service.context} is the most here"
            raise ContextLengthError(f"{why}: shorten the text, or give its parts.", param)
    requests = tuple(GenerationRequest(text, body.model, 0, embed=True, user=user) for text in texts)
    base64 = body.encoding_format == "base64"
    return ParsedRequest(requests, body.model, 1, False, False, False, include_usage=False, base64=base64)


def tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    """The token ids of the body of /tokenize."""
    if body.messages is not None:
        if service.encodes:
            raise ServingError(f"The encoder {service.name} has no chat: give prompt.", "messages")
        return [*service.tokenizer.encode_chat([message.for_template() for message in body.messages])]
    return [*service.tokenizer.encode(body.prompt or "", special=body.add_special_tokens is not False)]


def detokenize(service: Service, body: DetokenizeRequest) -> str:
    """The text of the body of /detokenize, special tokens included, as of vLLM."""
    if body.tokens:
        check_prompt(body.tokens, service.tokenizer.vocabulary, "tokens")
    return str(service.tokenizer.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))


def parse_chat(service: Service, body: ChatRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/chat/completions; max_tokens defaults to what the context leaves."""
    _check(service, body, 1)
    if body.top_logprobs and not body.logprobs:
        raise ServingError("top_logprobs is set, and logprobs is not: set logprobs to true as well.", "top_logprobs")
    if body.max_tokens and body.max_completion_tokens:
        raise ServingError("max_tokens and max_completion_tokens are the same: give one of them.", "max_tokens")
    callable_tools = _callable_tools(body)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if callable_tools else []
    messages = [message.for_template() for message in body.messages]
    prompt = service.tokenizer.encode_chat(messages, tools, body.prompt_key, body.chat_template_kwargs)
    check_prompt(prompt, service.tokenizer.vocabulary, body.prompt_key)
    remaining = max(1, min(service.limits.max_tokens, service.context - len(prompt)))
    return _parse(
        service,
        body,
        [prompt],
        stop=(*(body.stop or ()), *service.tokenizer.chat_stops),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_completion_tokens or body.max_tokens or remaining,
        grammar=_chat_grammar(service, body, callable_tools),
        tools=tuple(callable_tools),
        user=user,
    )


def _callable_tools(body: ChatRequest) -> dict[str, Any]:
    """The schema of the arguments of each tool that the answer may call, by name."""
    tools = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
    choice = body.tool_choice or "auto"
    if len(tools) < len(body.tools or ()):
        raise ServingError("Two tools have the same name: rename one.", "tools")
    if choice == "none":
        return {}
    if isinstance(choice, NamedTool):
        name = choice.function["name"]
        if name not in tools:
            raise ServingError(f"tool_choice names {name!r}, which is none of tools.", "tool_choice")
        return {name: tools[name]}
    if choice == "required" and not tools:
        raise ServingError("tool_choice is 'required', and tools has none: give one.", "tool_choice")
    return tools


def _chat_grammar(service: Service, body: ChatRequest, tools: dict[str, Any]) -> LLMatcher | None:
    """The grammar of the answer; at most one of tools, response_format and structured_outputs may set it."""
    form = body.response_format if body.response_format and body.response_format.type != "text" else None
    given = {"tools": bool(tools), body.form_key: form, "structured_outputs": body.structured_outputs}
    set_ = [name for name, value in given.items() if value]
    if len(set_) > 1:
        raise ServingError(f"{set_[0]} and {set_[1]} both say what the answer may be: leave one out.", set_[1])
    if tools:
        required, several = body.tool_choice not in (None, "auto"), body.parallel_tool_calls is not False
        parallel = several and not isinstance(body.tool_choice, NamedTool)
        return tool_grammar(service.grammars, tools, required=required, parallel=parallel)
    if form is not None:
        schema = form.json_schema.json_schema if form.json_schema else {"type": "object"}
        return service.grammars.json(schema, body.form_key)
    return _structured(service, body)


def _structured(service: Service, body: ApiRequest) -> LLMatcher | None:
    if body.structured_outputs is None:
        return None
    ((name, value),) = body.structured_outputs.model_dump(by_alias=True, exclude_unset=True).items()
    compile_ = service.grammars.lark if name == "grammar" else getattr(service.grammars, name)
    return compile_(value, f"structured_outputs.{name}")


def _check(service: Service, body: ApiRequest, prompts: int) -> None:
    count, capacity = prompts * (body.n or 1), service.limits.batch_size + service.limits.queue
    if count > capacity:
        why = f"The request asks for {count} continuations at once, and this server takes {capacity} at most"
        raise ServingError(f"{why}: send several requests.", "n")
    if body.stream_options is not None and not body.stream:
        problem = "stream_options is set without stream: set stream to true, or leave it out."
        raise ServingError(problem, "stream_options")


def _parse(
    service: Service,
    body: ApiRequest,
    prompts: Sequence[tuple[int, ...]],
    *,
    logprobs: int | None,
    tools: tuple[str, ...] = (),
    **options: Any,
) -> ParsedRequest:
    vocabulary = service.tokenizer.vocabulary
    n, trace = body.n or 1, body.graftlm is not None and body.graftlm.trace
    top_p = 1.0 if body.top_p is None else body.top_p
    temperature = (1.0 if body.temperature is None else body.temperature) if top_p > 0 else 0.0
    options |= {"model": body.model, "temperature": temperature, "top_p": top_p or 1.0, "trace": trace}
    options |= {"top_k": max(0, body.top_k or 0), "min_p": body.min_p or 0.0}
    options |= {"presence_penalty": body.presence_penalty or 0.0, "frequency_penalty": body.frequency_penalty or 0.0}
    options |= {"repetition_penalty": 1.0 if body.repetition_penalty is None else body.repetition_penalty}
    options |= {"min_tokens": body.min_tokens or 0, "ignore_eos": bool(body.ignore_eos)}
    options["stop_tokens"] = tuple(body.stop_token_ids or ())
    if options["min_tokens"] > (most := options["max_tokens"]):
        problem = f"min_tokens is {body.min_tokens}, and the answer has at most {most} tokens: ask for fewer."
        raise ServingError(problem, "min_tokens")
    for key in ("min_tokens", "ignore_eos"):
        if options[key] and options["grammar"] is not None:
            form = "tools" if tools else getattr(body, "form_key", "structured_outputs")
            form = "structured_outputs" if body.structured_outputs else form
            raise ServingError(f"{form} says where the answer ends, and {key} says so too: leave one out.", key)
    options["logit_bias"] = tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())
    seeds = [None if body.seed is None else (body.seed + number) % 2**63 for number in range(n)]
    ids = {"logit_bias": [token for token, _ in options["logit_bias"]], "stop_token_ids": options["stop_tokens"]}
    for key, given in ids.items():
        if unknown := [token for token in given if token >= vocabulary]:
            check_prompt(unknown, vocabulary, key)
    requests = tuple(
        GenerationRequest(prompt=prompt, seed=seed, logprobs=logprobs, **options)
        for prompt in prompts
        for seed in seeds
    )
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    with_logprobs, stream = logprobs is not None, bool(body.stream)
    return ParsedRequest(requests, body.model, n, with_logprobs, trace, stream, include_usage, tools)
