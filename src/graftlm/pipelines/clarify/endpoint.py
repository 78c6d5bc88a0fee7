"""Models on servers with OpenAI's protocol, through the `openai` client, which handles time-outs and retries."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field, field_validator

from graftlm.config import Config
from graftlm.errors import EndpointError, MissingExtraError
from graftlm.pipelines.clarify.costs import Cost
from graftlm.pipelines.clarify.models import Reply, StreamPrinter
from graftlm.pipelines.clarify.prompts import Prompt, printable

_THINK = "<think>"
_FIRST_PAUSE = 0.5  # seconds before the first retry after a damaged reply; each further pause is twice as long
_LONGEST_PAUSE = 8.0
_REASONING = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)  # reasoning before a reply


class EndpointConfig(Config):
    """Address of a model on a server, and limits of its requests.

    Args:
        url: URL of the server with its version, such as http://localhost:8000/v1.
        model: the name of the model on the server.
        key_variable: the environment variable with the API key; local servers often need none.
        timeout: time to wait for the server, in seconds.
        retries: number of retries after a time-out, a lost connection, or status 429 or 5xx, with exponential back-off;
            and of retries after a reply that is cut off or damaged.
        max_new_tokens: maximum number of tokens of a reply.
    """

    url: str
    model: str = Field(min_length=1)
    key_variable: str = "OPENAI_API_KEY"
    timeout: float = Field(60.0, gt=0)
    retries: int = Field(3, ge=0)
    max_new_tokens: int = Field(256, ge=1)

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("the URL of a server should begin with http:// or https://")
        return url


class _DamagedReplyError(EndpointError):
    """A reply is not in OpenAI's protocol, for example since it is cut off."""


class Endpoint:
    """A model on a server. Several threads may use it.

    Args:
        config: address and limits.

    Raises:
        MissingExtraError: the `openai` client is not installed.
    """

    def __init__(self, config: EndpointConfig) -> None:
        try:
            import openai
        except ImportError:
            raise MissingExtraError("openai", "clarify", "Calling a model on a server") from None
        self.config = config
        # The client requires a key even if the server does not.
        key = os.environ.get(config.key_variable) or "none"
        self._client = openai.OpenAI(
            base_url=config.url,
            api_key=key,
            timeout=config.timeout,
            max_retries=config.retries,
        )
        self._rejected: set[str] = set()  # parameters that this server rejects; later requests omit or rename them
        self._streams: bool | None = None  # True: always, False: never, None: if requested

    @property
    def name(self) -> str:
        """The name of the model on the server."""
        return self.config.model

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Reply to a prompt, greedily, without a reasoning block.

        Args:
            prompt: the prompt.
            on_text: called with each new piece of the reply; with the whole reply if the server does not stream.

        Raises:
            EndpointError: the server is unreachable, too slow, rejects the request, or violates the protocol.
        """
        pause = _FIRST_PAUSE
        for _ in range(self.config.retries):
            try:
                return self._generate(prompt, on_text)
            except _DamagedReplyError:
                if on_text is not None:  # a part of the reply may be shown already
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self._generate(prompt, on_text)

    def _generate(self, prompt: Prompt, on_text: Callable[[str], None] | None) -> Reply:
        """Reply to a prompt without retries after a damaged reply."""
        with self._errors():
            is_streamed = self._streams or (on_text is not None and self._streams is None)
            if not is_streamed:
                response = self._request(prompt, stream=False)
                if not _is_event_stream(response):
                    reply = self._read_completion(response)
                    if on_text is not None:
                        on_text(reply.text)
                    return reply
                self._streams = True  # this server streams although no stream was requested
            reply = self._read_stream(self._request(prompt, stream=True), on_text)
            if reply is not None:
                return reply
            if self._streams is None:
                self._streams = False  # this server never streams
                return self._generate(prompt, on_text)
            raise self._protocol_error("an empty stream")

    def _request(self, prompt: Prompt, *, stream: bool) -> Any:
        """Send a request; if the server rejects one of its parameters, send it again without that parameter."""
        import openai

        messages: Any = prompt.messages()
        while True:
            options = self._options(stream=stream)
            try:
                return self._client.chat.completions.create(model=self.config.model, messages=messages, **options)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                message = f"'{error.param}' {error}".replace("`", "'")
                rejected = [key for key in options if key != "stream" and f"'{key}'" in message]
                if not rejected:
                    raise
                self._rejected.update(rejected)

    def _options(self, *, stream: bool) -> dict[str, Any]:
        """Return the parameters of a request, without those that the server has rejected."""
        length = "max_completion_tokens" if "max_tokens" in self._rejected else "max_tokens"
        options: dict[str, Any] = {"temperature": 0.0, length: self.config.max_new_tokens}
        if stream:
            options["stream"] = True
            options["stream_options"] = {"include_usage": True}
        return {key: value for key, value in options.items() if key not in self._rejected}

    def _read_completion(self, response: object) -> Reply:
        choices = getattr(response, "choices", None)
        text = None
        if choices and getattr(choices[0], "message", None):
            text = choices[0].message.content
        if not choices or not isinstance(text, str):
            content = response if isinstance(response, str) else "JSON without a reply"
            raise self._protocol_error(content)
        return _reply(text, getattr(response, "usage", None), choices[0].finish_reason)

    def _read_stream(self, response: Iterable[object], on_text: Callable[[str], None] | None) -> Reply | None:
        """Return the streamed reply, or None if the stream contains no reply."""
        text = ""
        usage = None
        finish = None
        printer = StreamPrinter(_without_reasoning, on_text or _ignore)
        for chunk in response:
            usage = getattr(chunk, "usage", None) or usage
            for choice in getattr(chunk, "choices", None) or ():
                finish = choice.finish_reason or finish
                delta = getattr(choice.delta, "content", None)
                if delta:
                    text += delta
                    printer(delta)
        if finish is None and text:
            raise self._protocol_error("an incomplete stream")
        if finish is None:
            return None
        reply = _reply(text, usage, finish)
        printer.end(reply.text)
        return reply

    def _protocol_error(self, content: str) -> _DamagedReplyError:
        shown = printable(" ".join(content.split()))[:60]
        return _DamagedReplyError(
            f"The server {self.config.url} did not reply in OpenAI's protocol ({shown}): check the URL, which often "
            "ends in /v1."
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate the client's exceptions into an `EndpointError` with one sentence."""
        import httpx
        import openai

        config = self.config
        tries = f"after {config.retries + 1} tries" if config.retries else "at the first try"
        try:
            yield
        except (openai.APITimeoutError, httpx.TimeoutException):
            problem = (
                f"sent nothing for {config.timeout:g} seconds, {tries}: wait longer (--timeout), or check the server."
            )
        except (openai.APIConnectionError, httpx.TransportError) as error:
            problem = f"can't be reached, {tries} ({_reason(error)}): check that it is running."
        except openai.RateLimitError as error:
            problem = (
                f"rejected the request because of its rate limit (429), {tries} ({_reason(error)}): continue later, or "
                "retry more often (--retries)."
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            problem = f"rejected the API key ({error.status_code}): put a valid key into {config.key_variable}."
        except openai.NotFoundError as error:
            problem = (
                f"has no model {config.model!r}, or nothing at that path ({_reason(error)}): check the name of the "
                "model and the URL."
            )
        except openai.APIStatusError as error:
            cause = f"({error.status_code}, {_reason(error)})"
            if error.status_code >= 500:
                problem = f"failed, {tries} {cause}: try again later, or check the server."
            else:
                problem = f"rejected the request {cause}: change what the server names."
        except (openai.APIError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise self._protocol_error(_reason(error)) from None
        else:
            return
        raise EndpointError(f"The server {config.url} {problem}")


def _ignore(text: str) -> None:
    """Discard a piece of text."""


def _is_event_stream(response: object) -> bool:
    return isinstance(response, str) and response.lstrip().startswith("data:")


def _reply(text: str, usage: object, finish: str | None) -> Reply:
    """Return a reply without its reasoning."""
    return Reply(
        text=_REASONING.sub("", text),
        cost=_cost(usage),
        truncated=finish == "length",
    )


def _cost(usage: object) -> Cost:
    """Return the cost that a server reports; without both counts of tokens, they are unknown rather than 0."""
    read = getattr(usage, "prompt_tokens", None)
    written = getattr(usage, "completion_tokens", None)
    if not isinstance(read, int) or not isinstance(written, int):
        return Cost(calls=1, unknown=1)
    return Cost(calls=1, prompt_tokens=read, new_tokens=written)


def _without_reasoning(text: str) -> str:
    """Return a reply without its <think> block; empty while such a block may still be open."""
    reply = _REASONING.sub("", text)
    start = text.lstrip()
    may_be_open = start.startswith(_THINK) or _THINK.startswith(start)
    if reply == text and may_be_open:
        return ""
    return reply


def _reason(error: Exception) -> str:
    """Return the message of an error, or of its cause, as one line of at most 100 characters."""
    message: object = error.__cause__ or error
    body = getattr(error, "body", None)
    if isinstance(body, dict) and body.get("message"):
        message = body["message"]
    text = str(message) or type(error).__name__
    one_line = " ".join(text.split())
    return printable(one_line)[:100]
