"""Text and conversations to token ids, and tokens to what is shown of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import Backbone
from graftlm.serving.errors import RefusedError

PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}Assistant:"
)
"""For a tokenizer without a chat template, as those of models that were never taught to chat: names and colons."""
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nAssistant:")


class Prompts:
    """A backbone's tokenizer, as requests need it. All methods may be called from any thread.

    Args:
        backbone: whose tokenizer.
        template: Jinja text of conversations in place of the tokenizer's own.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """

    def __init__(self, backbone: Backbone, template: str | None = None) -> None:
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(backbone.need_tokenizer())
        own = template or self.tokenizer.chat_template
        self.plain = not own
        self._template = PLAIN if self.plain else template
        self.vocabulary = int(getattr(backbone.config, "vocab_size", len(self.tokenizer)))
        self._alphabet = _byte_alphabet() if _is_byte_level(self.tokenizer) else {}
        self._special = set(self.tokenizer.all_special_ids)
        self.bytes_of = lru_cache(maxsize=2**16)(self._bytes_of)

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Strings that end an answer in a conversation without a template of its own."""
        return PLAIN_STOPS if self.plain else ()

    def text(self, prompt: str) -> tuple[int, ...]:
        """The ids of a text, with what the tokenizer puts before every text.

        Raises:
            RefusedError: there are none.
        """
        return self._some(self._encode(prompt, special=True), "prompt")

    def ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Ids that a client gives.

        Raises:
            RefusedError: there are none, or one is of no token.
        """
        if (largest := max(prompt, default=0)) >= self.vocabulary:
            raise RefusedError(
                f"prompt holds the token id {largest}, and the model has {self.vocabulary:,} tokens, from 0 on: "
                "encode it with the model's own tokenizer.",
                "prompt",
            )
        return self._some(list(prompt), "prompt")

    def chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The ids of a conversation, up to where the assistant is to speak.

        Args:
            messages: roles (system, user or assistant) and texts.

        Raises:
            RefusedError: the template refuses them.
        """
        said = [{"role": role, "content": text} for role, text in messages]
        how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, "chat_template": self._template}
        try:
            text = self.tokenizer.apply_chat_template(said, **how)
        except (TemplateError, ValueError, TypeError) as error:
            raise RefusedError(
                f"The model's chat template refuses these messages ({str(error).rstrip('.')}): change them, or use "
                "/v1/completions.",
                "messages",
            ) from None
        return self._some(self._encode(str(text), special=self.plain), "messages")

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _some(self, ids: list[int], param: str) -> tuple[int, ...]:
        if not ids:
            raise RefusedError(f"{param} has no tokens: give at least one word to continue.", param)
        return tuple(ids)

    def shown(self, token: int) -> str:
        """A token's text; a part of a character that several tokens make up is written as its bytes."""
        data = self.bytes_of(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # the model has more places than the tokenizer has tokens
            return b""
        if token in self._special:
            return piece.encode()
        if self._alphabet and all(letter in self._alphabet for letter in piece):
            return bytes(self._alphabet[letter] for letter in piece)
        if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(found[1], 16)])
        return piece.replace("▁", " ").encode()


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is None or "ByteLevel" in repr(backend.decoder)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers' letters: printable Latin-1 stands for itself, the other bytes for letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
