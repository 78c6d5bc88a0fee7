"""Conversion of texts and conversations to token ids, and of tokens to bytes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import cached_property, lru_cache
from inspect import signature
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from graftlm.backbone import Backbone, Stops, read_stops, turn_end_ids
from graftlm.backbone.chat_templates import (
    HERMES,
    CallText,
    Message,
    Tool,
    as_plain_text,
    render_messages,
    template_form,
)
from graftlm.backbone.detokenizer import is_byte_level
from graftlm.errors import DataError
from graftlm.serving.protocol import ServingError

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}Assistant:"
)
"""The chat template for tokenizers without one, such as those of base models: role names and colons."""
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nAssistant:")


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
        call_text: how answers have calls of tools.
        describes_tools: whether tools are described in a system message although the chat template has a place for
            them, since its calls can't be found in the text of answers.
        bytes_of: returns the bytes of a token's text; they are empty for an id that the tokenizer does not have.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """

    def __init__(self, backbone: Backbone, template: str | None = None) -> None:
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(backbone.need_tokenizer())
        self.plain = not (template or self.tokenizer.chat_template)
        self._template = PLAIN_TEMPLATE if self.plain else template
        form = template_form(self.tokenizer.get_chat_template(self._template, tools=[{}]))
        own_call = self._found_in_answers(form.call_text) if form.tools else None
        self.call_text = own_call or HERMES
        self.describes_tools = form.tools and own_call is None
        self.vocabulary = int(getattr(backbone.config, "vocab_size", len(self.tokenizer)))
        self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self._is_byte_level = is_byte_level(self.tokenizer)
        self._special = set(self.tokenizer.all_special_ids)
        self.bytes_of = lru_cache(maxsize=2**16)(self._bytes_of)

    def _found_in_answers(self, call: CallText | None) -> CallText | None:
        """Return how calls are written, or None if they can't be found in the text of answers."""
        if call is None:
            return None
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        if not call.before or any(token in "".join(astuple(call)) for token in special):
            return None  # The texts of answers have no special tokens.
        return HERMES if call.is_object else call

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings that end an assistant's message under `PLAIN_TEMPLATE`; none for other templates."""
        return PLAIN_STOPS if self.plain else ()

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """Token ids that end an assistant's message in the chat template; see `turn_end_ids`."""
        return turn_end_ids(self.tokenizer, chat_template=self._template)

    def stops(self, strings: Iterable[str]) -> Stops:
        """Sort the stop strings of a request into strings and token ids.

        Raises:
            ServingError: a stop string can't match.
        """
        try:
            return read_stops(self.tokenizer, strings)
        except DataError as error:
            raise ServingError(str(error), "stop") from None

    def encode(self, prompt: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, by default with the special tokens that the tokenizer adds."""
        encoding = self.tokenizer(prompt, add_special_tokens=special, verbose=False)
        return tuple(encoding["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
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
        if tools and self.describes_tools:
            messages = as_plain_text(messages, tools)
            tools = ()
        try:
            text = render_messages(
                self.tokenizer,
                messages,
                tools,
                header=True,
                template=self._template,
                values=values,
            )
        except Exception as error:
            # Values of a request may raise any exception in a template; other exceptions are bugs.
            if not values and not isinstance(error, DataError | TemplateError | ValueError | TypeError):
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
