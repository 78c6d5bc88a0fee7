"""Text and conversations to token ids, and generated tokens back to text."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from graftlm.backbone import Backbone
from graftlm.serving.protocol import ServingError
from graftlm.serving.tools import OPEN, without_tools

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}Assistant:"
)
"""The chat template of tokenizers without one, such as those of base models: role names and colons."""
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nAssistant:")
_CONTEXT_TOKENS = 6  # prompt tokens that are decoded with the first new token, which may need a space before it
_RENDERERS: Any = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
TEMPLATE_ARGUMENTS = {"messages"}.union(*(signature(function).parameters for function in _RENDERERS))
"""Names that values of a template may not have."""
_INCOMPLETE = "\ufffd"  # decoders return it for a character whose bytes are incomplete


class ServingTokenizer:
    """A copy of the backbone's tokenizer with the conversions that requests need. All methods are thread-safe.

    A Jinja `template` takes the place of the tokenizer's own.
    """

    def __init__(self, backbone: Backbone, template: str | None = None) -> None:
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(backbone.need_tokenizer())
        self.plain = not (template or self.tokenizer.chat_template)
        self._template = PLAIN_TEMPLATE if self.plain else template
        chat_template = str(self._template or self.tokenizer.chat_template)
        self._knows_tools = "tools" in chat_template and OPEN in chat_template
        self.vocabulary = int(getattr(backbone.config, "vocab_size", len(self.tokenizer)))
        self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self._is_byte_level = is_byte_level(self.tokenizer)
        self._special = set(self.tokenizer.all_special_ids)
        self.bytes_of = lru_cache(maxsize=2**16)(self._bytes_of)

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Strings that end an assistant's message under the plain template."""
        return PLAIN_STOPS if self.plain else ()

    def encode(self, prompt: str, *, special: bool = True) -> tuple[int, ...]:
        """The ids of a text, with the special tokens that the tokenizer adds to every text."""
        return tuple(self.tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        param: str = "messages",
        values: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The ids of a conversation, up to the start of the assistant's next message.

        Args:
            messages: as chat templates expect them, with `tool_calls` and the role `tool` where tools were called.
            tools: what the assistant may call.
            param: the request's key for the messages.
            values: further values of the template, such as `enable_thinking`.

        Raises ServingError if the chat template rejects the messages.
        """
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, "chat_template": self._template}
        options |= values or {}
        if not self._knows_tools:
            messages, tools = without_tools(messages, tools), ()
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tools=[*tools] or None, **options)
        except Exception as error:
            if not values and not isinstance(error, TemplateError | ValueError | TypeError):
                raise
            param, why = "chat_template_kwargs" if values else param, str(error).rstrip(".") or type(error).__name__
            problem = f"The model's chat template refuses {param} ({why}): change it, or use /v1/completions."
            raise ServingError(problem, param) from None
        return self.encode(str(text), special=self.plain)

    def text_of(self, token: int) -> str:
        """A token's text; a token that is part of a character is written as its bytes."""
        data = self.bytes_of(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token: int) -> bytes:
        text = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(text, str):  # the model's vocabulary is larger than the tokenizer's
            return b""
        if token in self._special:
            return text.encode()
        if self._is_byte_level and all(letter in self._byte_of for letter in text):
            return bytes(self._byte_of[letter] for letter in text)
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text):
            return bytes([int(byte[1], 16)])
        return text.replace("▁", " ").encode()


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each token stands for its own bytes, whatever precedes it; slow tokenizers count as byte-level."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is None or "ByteLevel" in repr(backend.decoder)


class IncrementalDetokenizer:
    """The text of one continuation: whole characters only, and nothing that may begin a stop string.

    `tokenizers.DecodeStream` decodes byte-level tokens. Other tokens are decoded with some tokens before them, because
    their text depends on the preceding tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._ids = self._end_of(prompt)
        self._start, self._read = 0, len(self._ids)
        self._before = self._decode(self._ids)
        self._shown = len(self._before)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        independent = self._backend is not None and is_byte_level(tokenizer) and not self._before.endswith(_INCOMPLETE)
        self._stream = DecodeStream(skip_special_tokens=True) if independent else None
        self._pending: list[int] = []

    def add(self, token: int, *, goes_on: bool = False) -> tuple[str, bool]:
        """The text that is final after this token, and whether a stop string ended it, as none does if it `goes_on`."""
        text = self._new_text(token)
        return (text, False) if goes_on else self._before_stops(text)

    def _new_text(self, token: int) -> str:
        if self._stream is None:
            return self._next_text(token)
        self._pending.append(token)
        text = self._stream.step(self._backend, token) or ""
        if text:
            self._pending.clear()
        return text

    def rest(self) -> str:
        """The text that was held back; call it once no token follows."""
        if self._stream is not None:
            return self._held + self._decode(self._pending)
        text = self._decode(self._ids[self._start :])
        return self._held + self._new_part(text, text)

    def _next_text(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        complete = text.rstrip(_INCOMPLETE)
        new = self._new_part(complete, text)
        if new:
            self._shown, self._before = len(complete), ""
            if complete == text:
                self._start, self._read = self._read, len(self._ids)
                self._shown = len(self._decode(self._ids[self._start :]))
        return new

    def _new_part(self, complete: str, text: str) -> str:
        if self._before.endswith(_INCOMPLETE):  # the prompt ends within a character, which may be complete now
            pairs = zip(self._before, text, strict=False)
            return complete[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
        return complete[self._shown :]

    def _before_stops(self, new: str) -> tuple[str, bool]:
        text, self._held = self._held + new, ""
        if starts := [start for stop in self._stops if (start := text.find(stop)) >= 0]:
            return text[: min(starts)], True
        begun = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        final = len(text) - max(begun, default=0)
        self._held = text[final:]
        return text[:final], False

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt: some that are not special, if there are any, from the start of a character."""
        special, count = set(self._tokenizer.all_special_ids), _CONTEXT_TOKENS
        while count < len(prompt):
            end = list(prompt[-count:])
            plain = sum(token not in special for token in end)
            if plain >= _CONTEXT_TOKENS // 2 and not self._decode(end).startswith(_INCOMPLETE):
                return end
            count *= 2
        return list(prompt)
