"""From requests to what engines are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.serving.errors import RefusedError
from graftlm.serving.protocol import Ask
from graftlm.serving.schema import Asked, ChatRequest, CompletionRequest
from graftlm.serving.service import Service

_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass(frozen=True)
class Order:
    """Everything that one request wants.

    Attributes:
        asks: its continuations: all of the first prompt, then all of the second.
        each: how many there are of each prompt.
        logprobs, trace: whether answers tell them.
        stream: whether they come piece by piece.
        usage: whether a stream ends with the number of tokens.
    """

    asks: tuple[Ask, ...]
    each: int
    logprobs: bool
    trace: bool
    stream: bool
    usage: bool

    @property
    def model(self) -> str:
        return self.asks[0].model


def completion_order(service: Service, body: CompletionRequest, user: str) -> Order:
    """What /v1/completions is asked.

    Raises:
        ServingError: it does not fit the model.
    """
    service.check_model(body.model)
    _check_count(service, len(body.prompt) * (body.n or 1))
    prompts = [service.prompts.text(one) if isinstance(one, str) else service.prompts.ids(one) for one in body.prompt]
    wanted: dict[str, Any] = {"stop": tuple(body.stop or ()), "logprobs": body.logprobs}
    return _order(body, prompts, wanted | {"max_tokens": body.max_tokens or _COMPLETION_TOKENS, "user": user})


def chat_order(service: Service, body: ChatRequest, user: str) -> Order:
    """What /v1/chat/completions is asked; without a limit of its own the answer has what room there is.

    Raises:
        ServingError: it does not fit the model, or its chat template.
    """
    service.check_model(body.model)
    _check_count(service, body.n or 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise RefusedError("top_logprobs is set, and logprobs is not: set logprobs to true as well.", "top_logprobs")
    if body.max_tokens and body.max_completion_tokens:
        raise RefusedError("max_tokens and max_completion_tokens are the same: give one of them.", "max_tokens")
    prompt = service.prompts.chat([(_ROLES.get(one.role, one.role), one.text) for one in body.messages])
    room = max(1, min(service.limits.max_tokens, service.context - len(prompt)))
    wanted: dict[str, Any] = {"stop": (*(body.stop or ()), *service.prompts.chat_stops), "user": user}
    wanted |= {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    return _order(body, [prompt], wanted | {"max_tokens": body.max_completion_tokens or body.max_tokens or room})


_ROLES = {"developer": "system"}


def _order(body: Asked, prompts: Sequence[tuple[int, ...]], wanted: dict[str, Any]) -> Order:
    if body.stream_options is not None and not body.stream:
        raise RefusedError(
            "stream_options is set, and stream is not: set stream to true, or leave it out.", "stream_options"
        )
    n, trace = body.n or 1, body.graftlm is not None and body.graftlm.trace
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    said = {
        "model": body.model,
        "temperature": temperature if top_p > 0 else 0.0,
        "top_p": top_p or 1.0,
        "trace": trace,
    }
    asks = [
        Ask(prompt=prompt, seed=_seed(body.seed, number), **said, **wanted) for prompt in prompts for number in range(n)
    ]
    usage = body.stream_options is not None and body.stream_options.include_usage
    return Order(tuple(asks), n, wanted["logprobs"] is not None, trace, bool(body.stream), usage)


def _seed(seed: int | None, number: int) -> int | None:
    """Of one of several continuations: each draws its own."""
    return None if seed is None else (seed + number) % 2**63


def _check_count(service: Service, count: int) -> None:
    most = service.limits.batch_size + service.limits.queue
    if count > most:
        raise RefusedError(
            f"The request asks for {count} continuations at once, and this server takes {most} at most: send several "
            "requests.",
            "n",
        )
