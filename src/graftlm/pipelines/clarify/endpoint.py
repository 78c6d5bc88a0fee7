"""Models behind any server of OpenAI's protocol, through the `openai` client: time-outs and retries are its work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from graftlm.config import Config
from graftlm.errors import EndpointError, MissingExtraError
from graftlm.pipelines.clarify.prompts import Prompt, visible
from graftlm.pipelines.clarify.roles import Reply
from graftlm.pipelines.clarify.turns import Cost

if TYPE_CHECKING:
    import openai

_THINK = "<think>"
_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)  # what reasoning models write before their reply


class EndpointConfig(Config):
    """Where a model is, and how patient one is with it.

    Args:
        url: of the server, with its version, such as http://localhost:8000/v1.
        model: as the server names it.
        key_variable: the environment variable that holds the key; servers of one's own need none.
        timeout: seconds without a word from the server.
        retries: after a time-out, a lost connection, a full server (429) or its failure (5xx), with growing pauses.
        max_new_tokens: of a reply.
    """

    url: str
    model: str = Field(min_length=1)
    key_variable: str = "OPENAI_API_KEY"
    timeout: float = Field(60.0, gt=0)
    retries: int = Field(3, ge=0)
    max_new_tokens: int = Field(256, ge=1)

    @field_validator("url")
    @classmethod
    def _of_the_web(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("the URL of a server should begin with http:// or https://")
        return url


class Endpoint:
    """A model behind a server.

    Raises:
        MissingExtraError: the client is not installed.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self._client = _client(config)
        # Servers differ in which of these they take; what one turns down is left out, or named otherwise, from then on.
        self._refused: set[str] = set()
        self._streams: bool | None = None  # always, never, or as one asks

    @property
    def name(self) -> str:
        return self.config.model

    def write(
        self,
        prompt: Prompt,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Reply to a prompt.

        Raises:
            EndpointError: the server can't be reached, is too slow, turns the request down, or sends something else.
        """
        with self._errors():
            if self._streams is False or (on_text is None and self._streams is None):
                answer = self._asked(prompt, temperature, seed, stream=False)
                if not _is_stream(answer):
                    reply = self._whole(answer)
                    if on_text is not None:
                        on_text(reply.text)
                    return reply
                self._streams = True  # some servers do so whether or not one asks
            streamed = self._streamed(self._asked(prompt, temperature, seed, stream=True), on_text)
            if streamed is None and self._streams is None:
                self._streams = False  # and some never do
                return self.write(prompt, temperature=temperature, seed=seed, on_text=on_text)
            if streamed is None:
                raise self._garbage("a stream of nothing")
            return streamed

    def _asked(self, prompt: Prompt, temperature: float, seed: int | None, *, stream: bool) -> Any:
        import openai

        while True:
            arguments = self._arguments(temperature, seed, stream=stream)
            try:
                return self._client.chat.completions.create(
                    model=self.config.model,
                    messages=prompt.messages(),  # type: ignore[arg-type]  # these are such messages, as plain mappings
                    **arguments,
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                named = [key for key in arguments if key != "stream" and _names(error, key)]
                if not named:
                    raise
                self._refused.update(named)

    def _arguments(self, temperature: float, seed: int | None, *, stream: bool) -> dict[str, Any]:
        length = "max_completion_tokens" if "max_tokens" in self._refused else "max_tokens"
        wished: dict[str, Any] = {"temperature": temperature, "seed": seed, length: self.config.max_new_tokens}
        if stream:
            wished |= {"stream": True, "stream_options": {"include_usage": True}}
        return {key: value for key, value in wished.items() if value is not None and key not in self._refused}

    def _whole(self, answer: Any) -> Reply:
        choices = getattr(answer, "choices", None)
        text = choices[0].message.content if choices and getattr(choices[0], "message", None) else None
        if not isinstance(text, str):
            raise self._garbage(answer if isinstance(answer, str) else "no reply in its JSON")
        return self._reply(text, getattr(answer, "usage", None), choices[0].finish_reason if choices else None)

    def _streamed(self, answer: Any, on_text: Callable[[str], None] | None) -> Reply | None:
        """The reply whose pieces come one by one; None where none came."""
        pieces, usage, finish, aloud = [], None, None, _Aloud(on_text)
        for chunk in answer:
            usage = getattr(chunk, "usage", None) or usage
            for choice in getattr(chunk, "choices", None) or ():
                finish = choice.finish_reason or finish
                if piece := getattr(choice.delta, "content", None):
                    pieces.append(piece)
                    aloud(piece)
        aloud.end()
        if finish is None and not pieces:
            return None
        if finish is None:
            raise self._garbage("a stream that breaks off")
        return self._reply("".join(pieces), usage, finish)

    def _reply(self, text: str, usage: Any, finish: str | None) -> Reply:
        text = _THOUGHT.sub("", text)
        prompt, new = (getattr(usage, key, None) or 0 for key in ("prompt_tokens", "completion_tokens"))
        return Reply(text, Cost(calls=1, prompt_tokens=prompt, new_tokens=new), finish == "length")

    def _garbage(self, found: str) -> EndpointError:
        shown = visible(" ".join(found.split()))[:60]
        return EndpointError(
            f"{self._where} sent what is no reply of OpenAI's protocol ({shown}): check the URL, which "
            "often ends in /v1."
        )

    @property
    def _where(self) -> str:
        return f"The server {self.config.url}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what the client raises into one sentence."""
        import httpx
        import openai

        tries = f"after {self.config.retries + 1} tries" if self.config.retries else "at the first try"
        try:
            yield
        except (openai.APITimeoutError, httpx.TimeoutException):
            raise EndpointError(
                f"{self._where} said nothing for {self.config.timeout:g} seconds, {tries}: wait longer "
                "(--timeout), or see what it does."
            ) from None
        except (openai.APIConnectionError, httpx.TransportError) as error:
            raise EndpointError(f"{self._where} can't be reached, {tries} ({_reason(error)}): is it running?") from None
        except openai.RateLimitError as error:
            raise EndpointError(
                f"{self._where} is asked too often (429), {tries} ({_reason(error)}): go on later, or retry longer "
                "(--retries)."
            ) from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise EndpointError(
                f"{self._where} wants another key ({error.status_code}): put it into {self.config.key_variable}."
            ) from None
        except openai.NotFoundError as error:
            raise EndpointError(
                f"{self._where} has no model {self.config.model!r}, or nothing at that path ({_reason(error)}): "
                "check both."
            ) from None
        except openai.APIStatusError as error:
            what = f"failed, {tries}" if error.status_code >= 500 else "turned the request down"
            raise EndpointError(f"{self._where} {what} ({error.status_code}, {_reason(error)}).") from None
        except (openai.APIError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise self._garbage(_reason(error)) from None


class _Aloud:
    """Hands the pieces of a reply on, but for the thoughts before it."""

    def __init__(self, on_text: Callable[[str], None] | None) -> None:
        self._on_text, self._held, self._thinks = on_text or (lambda piece: None), "", True

    def __call__(self, piece: str) -> None:
        self._held += piece
        spoken, start = _THOUGHT.sub("", self._held), self._held.lstrip()
        if not self._thinks or spoken != self._held or not _may_be_thought(start):
            self._thinks = False
            self._on_text(spoken)
            self._held = ""

    def end(self) -> None:
        """What began like a thought and was none."""
        if self._held:
            self._on_text(self._held)


def _may_be_thought(start: str) -> bool:
    return start.startswith(_THINK) or _THINK.startswith(start)


def _client(config: EndpointConfig) -> openai.OpenAI:
    try:
        import openai
    except ImportError:
        raise MissingExtraError("openai", "clarify", "Asking a model behind a server") from None
    key = os.environ.get(config.key_variable) or "none"  # the client wants one, whether or not the server does
    return openai.OpenAI(base_url=config.url, api_key=key, timeout=config.timeout, max_retries=config.retries)


def _is_stream(answer: Any) -> bool:
    """Whether the client was given events where it expected a document."""
    return isinstance(answer, str) and answer.lstrip().startswith("data:")


def _names(error: Any, key: str) -> bool:
    return key == error.param or f"'{key}'" in str(error) or f"`{key}`" in str(error)


def _reason(error: Exception) -> str:
    """What an error says, in a few words."""
    body = getattr(error, "body", None)
    found = body.get("message") if isinstance(body, dict) else None
    text = str(found or getattr(error, "__cause__", None) or error) or type(error).__name__
    return visible(" ".join(text.split()))[:100]
