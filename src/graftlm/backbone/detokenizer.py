"""Text of generated tokens, token by token: whole characters, and nothing that may belong to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_CONTEXT_TOKENS = 6  # prompt tokens that are decoded with the first new token, which may need a space before it
_INCOMPLETE = "\ufffd"  # decoders return it for a character whose bytes are incomplete


def continuation_text(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of a continuation as it reads after its prompt, without special tokens.

    Args:
        tokenizer: the model's tokenizer.
        prompt: token ids before the continuation.
        ids: token ids of the continuation.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, ())
    pieces = [detokenizer.add(token)[0] for token in ids]
    return "".join(pieces) + detokenizer.rest()


def longest_beginning(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that is a beginning, but not the whole, of one of the strings.

    It is the number of characters that may become one of the strings with further text; 0 if there are none.
    """
    longest = 0
    for string in strings:
        for length in range(1, len(string)):
            if text.endswith(string[:length]):
                longest = max(longest, length)
    return longest


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a token's bytes don't depend on the tokens before it.

    This holds for tokenizers with a byte-level decoder, and is assumed for slow tokenizers, which have no backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is None or "ByteLevel" in repr(backend.decoder)


def _skipped_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that `decode` leaves out with `skip_special_tokens`."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


class IncrementalDetokenizer:
    """The text of one continuation, in whole characters and without a possible beginning of a stop string.

    `tokenizers.DecodeStream` decodes the byte-level tokens of fast tokenizers, unless the prompt ends within a
    character. Otherwise, tokens are decoded together with some tokens before them, because their text may depend on
    these.

    Args:
        tokenizer: the model's tokenizer.
        prompt: token ids before the continuation.
        stops: stop strings; the text ends before the first one that it would contain.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._skipped = _skipped_ids(tokenizer)
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

    def add(self, token: int) -> tuple[str, bool]:
        """Add a token.

        Args:
            token: token id.

        Returns:
            The text that is final after this token, and whether a stop string ended the continuation.
        """
        return self._before_stops(self._new_text(token))

    def rest(self) -> str:
        """Return the text that is held back; call it after the last token. The state is not changed."""
        if self._stream is not None:
            return self._held + self._decode(self._pending)
        text = self._decode(self._ids[self._start :])
        return self._held + self._new_part(text, text)

    def _new_text(self, token: int) -> str:
        if token in self._skipped:  # without text, tokens are kept, and decoded again with each further one
            return ""
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
