"""Token ids of a text that continues another one.

Tokenizers treat the beginning of a text in different ways: SentencePiece models put a blank before it, WordPiece takes
it for the beginning of a word. The ids of a continuation are therefore not those of the continuation as a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters that a continuation is tokenized behind if it merges with the one that precedes it. Nothing merges with a
# line break in most vocabularies; the others are for those that lack it, or for a continuation that begins with it.
_ANCHORS = ("\n", ".", "a", "(")
_TAIL = 256


@dataclass(frozen=True, slots=True)
class TextParts:
    """A text and its continuation as tokens.

    Attributes:
        before: ids of the text.
        ids: ids of the continuation.
        ends: the character of the continuation at which each of `ids` ends; None if the tokenizer has no positions.
    """

    before: list[int]
    ids: list[int]
    ends: list[int] | None


def encode_parts(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> TextParts:
    """Tokenize a text and its continuation, such as a prompt and its answer, without special tokens at their ends.

    The ids of both parts decode to what the ids of the joined text decode to. As far as possible, `before` has the ids
    that it has alone, since a model that continues a prompt reads those:

    1. If the joined text begins with these ids, the rest of its ids are those of the continuation.
    2. Otherwise, as where the last space of a prompt would merge with the next word, the continuation has the ids that
       it gets when it is tokenized after another character.
    3. Otherwise, the joined text is tokenized and split where its ids first differ from those that `before` has alone.
       A token across the boundary then belongs to the continuation.

    Args:
        tokenizer: any tokenizer of transformers.
        before: the text before the continuation; it may be empty.
        text: the continuation.
    """
    known = _encode(tokenizer, before).ids
    whole = _encode(tokenizer, before + text)
    if whole.ids[: len(known)] == known:
        return TextParts(known, *whole.behind(len(known), len(before)))
    decoded = _decode(tokenizer, whole.ids)
    for rest in _behind_anchors(tokenizer, before[-1:], text):
        if _decode(tokenizer, known + rest[0]) == decoded:
            return TextParts(known, *rest)
    size = common_length(known, whole.ids)
    return TextParts(whole.ids[:size], *whole.behind(size, len(before)))


def continuation_ids(
    tokenizer: PreTrainedTokenizerBase, before: str, text: str, *, split_special_tokens: bool = False
) -> list[int]:
    """Return the ids of a text behind another one, whose own ids can't be changed any more.

    Args:
        tokenizer: any tokenizer of transformers.
        before: the text before the continuation, of which only the end is read; empty at the beginning of a text.
        text: the continuation.
        split_special_tokens: read special tokens in the text as plain text.

    Returns:
        The ids of the continuation behind the end of `before`, or behind another character if the two merge.
    """
    tail = before[-_TAIL:]
    for ids, _ in _behind_anchors(tokenizer, tail, text, split_special_tokens=split_special_tokens):
        return ids
    return _encode(tokenizer, text, split_special_tokens=split_special_tokens).ids


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common beginning of two sequences."""
    length = 0
    for item, other in zip(first, second, strict=False):
        if item != other:
            break
        length += 1
    return length


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Ids of a text, and the character at which each of them ends."""

    ids: list[int]
    ends: list[int] | None

    def behind(self, tokens: int, characters: int) -> tuple[list[int], list[int] | None]:
        """Return the ids behind the first ones, and their ends behind the first characters."""
        ends = self.ends
        if ends is not None:
            ends = [max(0, end - characters) for end in ends[tokens:]]
        return self.ids[tokens:], ends


def _behind_anchors(
    tokenizer: PreTrainedTokenizerBase, before: str, text: str, *, split_special_tokens: bool = False
) -> Iterator[tuple[list[int], list[int] | None]]:
    """Yield ids and ends of a text behind each text that does not merge with it: first `before`, then the anchors."""
    if not before:
        return
    for anchor in (before, before[-1:], *_ANCHORS):
        alone = _encode(tokenizer, anchor, split_special_tokens=split_special_tokens).ids
        both = _encode(tokenizer, anchor + text, split_special_tokens=split_special_tokens)
        if both.ids[: len(alone)] == alone:
            yield both.behind(len(alone), len(anchor))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, split_special_tokens: bool = False) -> _Encoded:
    has_positions = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=has_positions,
        split_special_tokens=split_special_tokens,
        verbose=False,
    )
    ends = [end for _, end in encoded["offset_mapping"]] if has_positions else None
    return _Encoded(list(encoded["input_ids"]), ends)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
