"""Conversion of texts and conversations to token ids, and of generated tokens to text."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from graftlm.backbone import Backbone
from graftlm.serving.protocol import ServingError
from graftlm.serving.text_matching import longest_beginning
from graftlm.serving.tools import OPEN, TemplateMessage, TemplateTool, without_tools

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}Assistant:"
)
"""The chat template for tokenizers without one, such as those of base models: role names and colons."""
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nAssistant:")
_CONTEXT_TOKENS = 6  # prompt tokens that are decoded with the first new token, which may need a space before it
_INCOMPLETE = "\ufffd"  # decoders return it for a character whose bytes are incomplete


def _template_arguments() -> set[str]:
    renderers: list[Callable[..., object]] = [PreTrainedTokenizerBase.apply_chat_template, render_jinja_template]
    names = {"messages"}
    for renderer in renderers:
        names.update(signature(renderer).parameters)
    return names


TEMPLATE_ARGUMENTS = _template_arguments()
"""Names that `chat_template_kwargs` must not have."""


class ServingTokenizer:
    """A copy of a backbone's tokenizer with the conversions that requests need. All methods are thread-safe.

    Args:
        backbone: a backbone with a tokenizer.
        template: Jinja chat template that replaces the tokenizer's own; None keeps it, and uses `PLAIN_TEMPLATE` if the
            tokenizer has none.

    Attributes:
        tokenizer: the copy.
        plain: whether conversations are rendered with `PLAIN_TEMPLATE`.
        vocabulary: number of token ids of the model.
        bytes_of: returns the bytes of a token's text; they are empty for an id that the tokenizer does not have.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """

    def __init__(self, backbone: Backbone, template: str | None = None) -> None:
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(backbone.need_tokenizer())
        self.plain = not (template or self.tokenizer.chat_template)
        self._template = PLAIN_TEMPLATE if self.plain else template
        chat_template = str(self._template or self.tokenizer.chat_template)
        self._template_has_tools = "tools" in chat_template and OPEN in chat_template
        self.vocabulary = int(getattr(backbone.config, "vocab_size", len(self.tokenizer)))
        self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self._is_byte_level = is_byte_level(self.tokenizer)
        self._special = set(self.tokenizer.all_special_ids)
        self.bytes_of = lru_cache(maxsize=2**16)(self._bytes_of)

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings that end an assistant's message under `PLAIN_TEMPLATE`; none for other templates."""
        return PLAIN_STOPS if self.plain else ()

    def encode(self, prompt: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, by default with the special tokens that the tokenizer adds."""
        encoding = self.tokenizer(prompt, add_special_tokens=special, verbose=False)
        return tuple(encoding["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[TemplateTool] = (),
        param: str = "messages",
        values: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to the start of the assistant's next message.

        Args:
            messages: messages in the form of chat templates, with `tool_calls` and the role `tool` for called tools.
            tools: the tools that the assistant may call, in the form of chat templates.
            param: the request's key for the messages, which errors name.
            values: further values for the template, such as `enable_thinking`.

        Raises:
            ServingError: the chat template rejects the messages or the values.
        """
        if not self._template_has_tools:
            messages = without_tools(messages, tools)
            tools = ()
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **(values or {}),
            )
        except Exception as error:
            # Values of a request may raise any exception in a template; other exceptions are bugs.
            if not values and not isinstance(error, TemplateError | ValueError | TypeError):
                raise
            given = param
            if values:
                given = f"{param} or chat_template_kwargs"
                param = "chat_template_kwargs"
            reason = str(error).rstrip(".") or type(error).__name__
            raise ServingError(
                f"The model's chat template rejects {given} ({reason}): change them, or use /v1/completions.", param
            ) from None
        return self.encode(str(text), special=self.plain)

    def text_of(self, token: int) -> str:
        """Return a token's text.

        A token that is not whole characters is written as `bytes:` and the escaped bytes in hexadecimal, as by OpenAI.
        """
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
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return text.replace("▁", " ").encode()


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a token's bytes don't depend on the tokens before it.

    This holds for tokenizers with a byte-level decoder, and is assumed for slow tokenizers, which have no backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is None or "ByteLevel" in repr(backend.decoder)


class IncrementalDetokenizer:
    """The text of one continuation, in whole characters and without a possible beginning of a stop string.

    `tokenizers.DecodeStream` decodes byte-level tokens. Other tokens are decoded together with some tokens before them,
    because their text depends on these.

    Args:
        tokenizer: the model's tokenizer.
        prompt: token ids before the continuation.
        stops: stop strings, before the first of which the text ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # text that may begin a stop string
        self._ids = self._end_of(prompt)
        self._start = 0  # the first of the ids that are decoded together
        self._read = len(self._ids)  # the number of ids whose text was returned as a whole
        self._before = self._decode(self._ids)
        self._shown = len(self._before)  # the number of characters, decoded from `_start`, that were returned
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._stream: DecodeStream | None = None
        if self._backend is not None and is_byte_level(tokenizer) and not self._before.endswith(_INCOMPLETE):
            self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []  # tokens of an incomplete character in the stream

    def add(self, token: int, *, ignore_stops: bool = False) -> tuple[str, bool]:
        """Add a token.

        Args:
            token: token id.
            ignore_stops: return all text, even if it contains or begins a stop string.

        Returns:
            The text that is final after this token, and whether a stop string ended the continuation.
        """
        text = self._new_text(token)
        if ignore_stops:
            return text, False
        return self._before_stops(text)

    def rest(self) -> str:
        """Return the text that is held back; call it after the last token. The state is not changed."""
        if self._stream is not None:
            return self._held + self._decode(self._pending)
        text = self._decode(self._ids[self._start :])
        return self._held + self._new_part(text, text)

    def _new_text(self, token: int) -> str:
        if self._stream is None:
            return self._decode_in_context(token)
        assert self._backend is not None
        self._pending.append(token)
        text = self._stream.step(self._backend, token) or ""
        if text:
            self._pending.clear()
        return text

    def _decode_in_context(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        complete = text.rstrip(_INCOMPLETE)
        new = self._new_part(complete, text)
        if new:
            self._shown = len(complete)
            self._before = ""
            if complete == text:
                self._start = self._read
                self._read = len(self._ids)
                self._shown = len(self._decode(self._ids[self._start :]))
        return new

    def _new_part(self, complete: str, text: str) -> str:
        """Return the new characters of the complete part of a text that was decoded from `_start`."""
        if not self._before.endswith(_INCOMPLETE):
            return complete[self._shown :]
        # The prompt ends within a character, which may be complete now.
        common = 0
        for before, now in zip(self._before, text, strict=False):
            if before != now:
                break
            common += 1
        return complete[common:]

    def _before_stops(self, new: str) -> tuple[str, bool]:
        """Return the text before the first stop string, and whether there is one. Hold back a possible beginning."""
        text = self._held + new
        self._held = ""
        starts = [text.find(stop) for stop in self._stops if stop in text]
        if starts:
            return text[: min(starts)], True
        final = len(text) - longest_beginning(text, self._stops)
        self._held = text[final:]
        return text[:final], False

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt, from the start of a character, with enough that are not special."""
        special = set(self._tokenizer.all_special_ids)
        count = _CONTEXT_TOKENS
        while count < len(prompt):
            end = list(prompt[-count:])
            ordinary = [token for token in end if token not in special]
            if len(ordinary) >= _CONTEXT_TOKENS // 2 and not self._decode(end).startswith(_INCOMPLETE):
                return end
            count *= 2
        return list(prompt)
