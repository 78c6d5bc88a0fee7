"""The conversion of request bodies to `GenerationRequest`s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llguidance import LLMatcher

from graftlm.backbone import Stops
from graftlm.backbone.chat_templates import HERMES, CallText, Message, Tool
from graftlm.data.conversations import read_messages, read_tools
from graftlm.errors import DataError
from graftlm.serving.protocol import (
    ContextLengthError,
    GenerationRequest,
    ServingError,
    check_model,
    check_prompt,
    check_tokens,
)
from graftlm.serving.request_schema import (
    ApiRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    NamedTool,
    StructuredOutputs,
)
from graftlm.serving.service import Service
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.serving.tools import ToolSchema, tool_grammar

_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass(frozen=True)
class ParsedRequest:
    """A request for generation, converted for the engine.

    Attributes:
        requests: the continuations: all of the first prompt, then all of the second.
        model: name of the model.
        n: number of continuations of each prompt.
        logprobs: whether the response reports log-probabilities.
        trace: whether the response reports the activity of the grafts.
        weights: the weight of each graft of a sum; empty if the model is no sum.
        stream: whether the response is streamed.
        include_usage: whether a stream ends with the numbers of tokens.
        tools: names of the tools that the answer may call.
        call_text: how the answer has calls of tools.
        base64: whether embeddings are encoded in base64.
    """

    requests: tuple[GenerationRequest, ...]
    model: str
    n: int = 1
    logprobs: bool = False
    trace: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    tools: tuple[str, ...] = ()
    call_text: CallText = HERMES
    base64: bool = False


def parse_completion(service: Service, body: CompletionRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/completions.

    Args:
        service: the service of the model's backbone.
        body: the body.
        user: name of the API key or address of the client.

    Raises:
        ServingError: a value does not fit another one, the model or the limits, a stop string can't match, or a grammar
            can't be compiled.
    """
    _check_continuations(service, body, len(body.prompt))
    _check_stream_options(body)
    prompts = [_token_ids(service, prompt) for prompt in body.prompt]
    for prompt in prompts:
        check_prompt(prompt, service.tokenizer.vocabulary)
    request = _generation_request(
        body,
        max_tokens=body.max_tokens or _COMPLETION_TOKENS,
        stops=service.tokenizer.stops(body.stop or ()),
        logprobs=body.logprobs,
        grammar=_structured_outputs_grammar(service, body.structured_outputs),
        user=user,
    )
    _check_options(request, service.tokenizer.vocabulary, "structured_outputs")
    return _parsed(service, body, request, prompts)


def parse_chat(service: Service, body: ChatRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/chat/completions.

    Without a maximum number of tokens, the answer may fill the context, up to the server's limit.

    Args:
        service: the service of the model's backbone.
        body: the body.
        user: name of the API key or address of the client.

    Raises:
        ServingError: a value does not fit another one, the model or the limits, the chat template rejects the messages,
            a stop string can't match, or a grammar can't be compiled.
    """
    _check_continuations(service, body, 1)
    _check_stream_options(body)
    _check_chat_options(body)
    tools = _callable_tools(body)
    prompt = chat_prompt(service.tokenizer, body, with_tools=bool(tools))
    check_prompt(prompt, service.tokenizer.vocabulary, "messages")
    remaining_tokens = max(1, min(service.limits.max_tokens, service.context - len(prompt)))
    request = _generation_request(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens or remaining_tokens,
        stops=service.tokenizer.stops(body.stop or ()),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_chat_grammar(service, body, tools),
        user=user,
    )
    request = replace(
        request,
        stop=(*request.stop, *service.tokenizer.chat_stops),
        turn_ends=service.tokenizer.turn_ends,
    )
    _check_options(request, service.tokenizer.vocabulary, _grammar_key(body, tools))
    parsed = _parsed(service, body, request, [prompt])
    return replace(parsed, tools=tuple(tools), call_text=service.tokenizer.call_text)


def parse_embedding(service: Service, body: EmbeddingRequest, user: str) -> ParsedRequest:
    """Convert the body of /v1/embeddings.

    Args:
        service: the service of the model's backbone.
        body: the body.
        user: name of the API key or address of the client.

    Raises:
        ServingError: a text is empty, has a token that the model does not have, or exceeds the context.
    """
    requests = []
    for number, text in enumerate(body.input):
        param = f"input.{number}" if len(body.input) > 1 else "input"
        prompt = _token_ids(service, text)
        check_prompt(prompt, service.tokenizer.vocabulary, param)
        if len(prompt) > service.context:
            raise ContextLengthError(
                f"{param} has {len(prompt)} tokens, but the limit is {service.context}: shorten the text, or split it.",
                param,
            )
        request = GenerationRequest(
            prompt=prompt,
            model=body.model,
            max_tokens=0,
            embed=True,
            user=user,
        )
        requests.append(request)
    return ParsedRequest(
        requests=tuple(requests),
        model=body.model,
        base64=body.encoding_format == "base64",
    )


def _token_ids(service: Service, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return service.tokenizer.encode(prompt)
    return tuple(prompt)


def chat_prompt(tokenizer: ServingTokenizer, body: ChatRequest, *, with_tools: bool) -> tuple[int, ...]:
    """Return the token ids of the conversation in the body of /v1/chat/completions.

    Args:
        tokenizer: the tokenizer of the model.
        body: the body.
        with_tools: whether the prompt has the tools of the body.

    Raises:
        ServingError: the chat template rejects the messages or the tools.
    """
    tools: tuple[Tool, ...] = ()
    if with_tools:
        tools = read_tools([tool.model_dump(exclude_unset=True) for tool in body.tools or ()], "The request")
    return tokenizer.encode_chat(
        _messages(body.messages),
        tools=tools,
        values=body.chat_template_kwargs,
    )


def _messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages of a request in the form of chat templates."""
    try:
        return read_messages([message.model_dump(exclude_none=True) for message in messages], "The request")
    except DataError as error:
        raise ServingError(str(error), "messages") from None


def _callable_tools(body: ChatRequest) -> dict[str, ToolSchema | None]:
    """Return the schema of the arguments of each tool that the answer may call, by name."""
    given = body.tools or []
    tools = {tool.function.name: tool.function.parameters for tool in given}
    choice = body.tool_choice or "auto"
    if len(tools) < len(given):
        counts = Counter(tool.function.name for tool in given)
        (repeated, _), *_ = counts.most_common(1)
        raise ServingError(f"Two tools have the name {repeated!r}: rename one.", "tools")
    if choice == "none":
        return {}
    if isinstance(choice, NamedTool):
        if choice.name not in tools:
            raise ServingError(
                f"tool_choice names {choice.name!r}, which is not one of the tools: name a tool of the request.",
                "tool_choice",
            )
        return {choice.name: tools[choice.name]}
    if choice == "required" and not tools:
        raise ServingError("tool_choice is 'required', but there are no tools: add one.", "tool_choice")
    return tools


def _chat_grammar(service: Service, body: ChatRequest, tools: dict[str, ToolSchema | None]) -> LLMatcher | None:
    """Return the grammar of the answer."""
    has_format = body.response_format is not None and body.response_format.type != "text"
    constraints = {
        "tools": bool(tools),
        "response_format": has_format,
        "structured_outputs": body.structured_outputs is not None,
    }
    given = [key for key, is_given in constraints.items() if is_given]
    if len(given) > 1:
        raise ServingError(
            f"{' and '.join(given)} are set, but only one of them can constrain the answer: keep one of them.",
            given[1],
        )
    if tools:
        has_named_tool = isinstance(body.tool_choice, NamedTool)
        return tool_grammar(
            service.grammars,
            tools,
            required=body.tool_choice not in (None, "auto"),
            parallel=body.parallel_tool_calls is not False and not has_named_tool,
            call_text=service.tokenizer.call_text,
        )
    if body.response_format is not None and has_format:
        named_schema = body.response_format.json_schema
        schema = {"type": "object"} if named_schema is None else named_schema.json_schema
        return service.grammars.json(schema, "response_format")
    return _structured_outputs_grammar(service, body.structured_outputs)


def _structured_outputs_grammar(service: Service, outputs: StructuredOutputs | None) -> LLMatcher | None:
    if outputs is None:
        return None
    if outputs.json_schema is not None:
        return service.grammars.json(outputs.json_schema, "structured_outputs.json")
    if outputs.regex is not None:
        return service.grammars.regex(outputs.regex, "structured_outputs.regex")
    if outputs.choice is not None:
        return service.grammars.choice(outputs.choice, "structured_outputs.choice")
    assert outputs.grammar is not None, "the body was validated"
    return service.grammars.lark(outputs.grammar, "structured_outputs.grammar")


def _grammar_key(body: ChatRequest, tools: dict[str, ToolSchema | None]) -> str:
    """Return the key of the request that constrains the answer."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    return "tools" if tools else "response_format"


def _check_continuations(service: Service, body: ApiRequest, prompts: int) -> None:
    count = prompts * (body.n or 1)
    capacity = service.limits.batch_size + service.limits.queue
    if count > capacity:
        raise ServingError(
            f"The request asks for {count} continuations, but this server accepts at most {capacity} at once: send "
            "several requests.",
            "n",
        )


def _check_stream_options(body: ApiRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ServingError(
            "stream_options is set, but stream is not: set stream to true, or leave out stream_options.",
            "stream_options",
        )


def _check_chat_options(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ServingError("top_logprobs is set, but logprobs is not: set logprobs to true.", "top_logprobs")
    if body.max_tokens and body.max_completion_tokens:
        raise ServingError("max_tokens and max_completion_tokens have the same meaning: set one of them.", "max_tokens")


def _generation_request(
    body: ApiRequest,
    *,
    max_tokens: int,
    stops: Stops,
    logprobs: int | None,
    grammar: LLMatcher | None,
    user: str,
) -> GenerationRequest:
    """Return the request of all continuations, without prompt and seed."""
    temperature = 1.0 if body.temperature is None else body.temperature
    if body.top_p == 0:  # keeps only the most likely token, like a temperature of 0
        temperature = 0.0
    return GenerationRequest(
        prompt=(),
        model=body.model,
        max_tokens=max_tokens,
        stop_tokens=tuple(stops.ids),
        ignore_eos=bool(body.ignore_eos),
        temperature=temperature,
        top_p=body.top_p or 1.0,
        top_k=max(0, body.top_k or 0),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        grammar=grammar,
        stop=stops.strings,
        logprobs=logprobs,
        trace=body.graftlm is not None and body.graftlm.trace,
        user=user,
    )


def _check_options(request: GenerationRequest, vocabulary: int, grammar_key: str) -> None:
    """Check options against each other and against the model."""
    if request.grammar is not None and request.ignore_eos:
        raise ServingError(
            f"{grammar_key} and ignore_eos are set, but both determine the end of the answer: leave one out.",
            "ignore_eos",
        )
    check_tokens([token for token, _ in request.logit_bias], vocabulary, "logit_bias")


def _parsed(
    service: Service,
    body: ApiRequest,
    request: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
) -> ParsedRequest:
    """Return the continuations of all prompts, each with another seed."""
    n = body.n or 1
    requests = []
    for prompt in prompts:
        for number in range(n):
            seed = None if body.seed is None else (body.seed + number) % 2**63
            requests.append(replace(request, prompt=prompt, seed=seed))
    return ParsedRequest(
        requests=tuple(requests),
        model=body.model,
        n=n,
        logprobs=request.logprobs is not None,
        trace=request.trace,
        weights={} if body.model in service.engine.names else check_model(service.engine.names, body.model),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )
