"""The characters that a tokenizer's tokens stand for, one token after the other.

What a token adds to the text depends on no later token; the bytes of a character count once the last is there.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

Speller = Callable[[int], str]
"""Takes the next token of a text, gives the characters that are whole with it."""


def spellers(tokenizer: PreTrainedTokenizerBase) -> Callable[[], Speller]:
    """Makes a speller for each text; what a token adds depends on no later token."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}  # type: ignore[attr-defined]  # fast
    if decoder.get("type") == "ByteLevel":
        return _byte_spellers(tokenizer)
    return lambda: _decoding_speller(tokenizer)


def _byte_spellers(tokenizer: PreTrainedTokenizerBase) -> Callable[[], Speller]:
    """For byte-level tokenizers, whose tokens stand for the same bytes wherever they are."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    added = {token: str(one).encode() for token, one in tokenizer.added_tokens_decoder.items()}
    names: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))  # type: ignore[assignment]  # None for ids without a token
    table = [
        added.get(i, bytes(byte_of[c] for c in name if c in byte_of)) if name is not None else b""
        for i, name in enumerate(names)
    ]

    def new() -> Speller:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: decoder.decode(table[token]) if token < len(table) else ""

    return new


def _decoding_speller(tokenizer: PreTrainedTokenizerBase) -> Speller:
    """For any tokenizer: what the text gains by a token, decoded behind the token before it."""
    before: list[int] = []
    pending: list[int] = []

    def spell(token: int) -> str:
        nonlocal before
        pending.append(token)
        known = str(tokenizer.decode(before, clean_up_tokenization_spaces=False))
        whole = str(tokenizer.decode(before + pending, clean_up_tokenization_spaces=False))
        if whole.endswith("\ufffd") and len(pending) < 8:  # a character whose last bytes are still to come
            return ""
        before = pending.copy()
        pending.clear()
        return whole[len(known) :]

    return spell
