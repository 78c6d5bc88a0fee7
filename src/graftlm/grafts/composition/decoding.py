"""Incremental decoding: the characters that each token adds to a text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

IncrementalDecoder = Callable[[int], str]
"""Takes the id of the next token of a text, and returns the characters that it completes."""

_MAX_PENDING = 8  # tokens of an incomplete character, after which its text is used nevertheless


def incremental_decoders(tokenizer: PreTrainedTokenizerBase) -> Callable[[], IncrementalDecoder]:
    """Return a factory of decoders, which makes a new decoder for each text.

    A character whose bytes span several tokens is returned with the last of them.

    Args:
        tokenizer: a fast tokenizer, which the decoders keep.

    Returns:
        A function without arguments that returns a new `IncrementalDecoder`.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # defined by fast tokenizers
    decoder = state.get("decoder") or {}
    if decoder.get("type") == "ByteLevel":
        return _byte_level_decoders(tokenizer)

    def new() -> IncrementalDecoder:
        return _prefix_decoder(tokenizer)

    return new


def _byte_level_decoders(tokenizer: PreTrainedTokenizerBase) -> Callable[[], IncrementalDecoder]:
    """Return a factory for byte-level tokenizers, whose tokens mean the same bytes everywhere."""
    table = _bytes_of_tokens(tokenizer)

    def new() -> IncrementalDecoder:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(token: int) -> str:
            if token >= len(table):
                return ""
            return decoder.decode(table[token])

        return decode

    return new


def _bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes of each token of a byte-level tokenizer, by id; ids without a token have none."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    added = {token: str(entry).encode() for token, entry in tokenizer.added_tokens_decoder.items()}
    ids = list(range(len(tokenizer)))
    names: list[str | None] = tokenizer.convert_ids_to_tokens(ids)  # type: ignore[assignment]  # None for ids without a token
    table = []
    for token, name in enumerate(names):
        if name is None:
            table.append(b"")
        elif token in added:
            table.append(added[token])
        else:
            table.append(bytes(byte_of[character] for character in name if character in byte_of))
    return table


def _prefix_decoder(tokenizer: PreTrainedTokenizerBase) -> IncrementalDecoder:
    """Return a decoder for any tokenizer, which compares the text with and without the new tokens."""
    previous: list[int] = []
    pending: list[int] = []

    def decode(token: int) -> str:
        nonlocal previous
        pending.append(token)
        prefix = str(tokenizer.decode(previous, clean_up_tokenization_spaces=False))
        text = str(tokenizer.decode(previous + pending, clean_up_tokenization_spaces=False))
        is_incomplete = text.endswith("\ufffd")
        if is_incomplete and len(pending) < _MAX_PENDING:
            return ""
        previous = pending.copy()
        pending.clear()
        return text[len(prefix) :]

    return decode
