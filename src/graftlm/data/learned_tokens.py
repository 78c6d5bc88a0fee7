"""Tokens that are learned from text: the merges with which a byte pair encoding would continue.

The text is encoded by the old tokenizer, and the most frequent pair of neighbouring tokens of a word is joined, again
and again. Words are those of the tokenizer, so that no token crosses their borders.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from graftlm.backbone.added_tokens import AddedTokens, bpe_values
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_Pair = tuple[str, str]

_SPACE = "▁"  # begins a word in SentencePiece models, which may have no borders of words
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LEAST = 2
_BATCH = 256  # texts that are encoded at once


def learn_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], count: int, *, name: str = "The backbone"
) -> AddedTokens:
    """Learn tokens from text, without changing the encoding of texts in which they don't occur.

    Args:
        tokenizer: the tokenizer that the tokens will be added to; its model is a byte pair encoding.
        texts: the texts.
        count: number of tokens; the texts may have fewer pairs that occur twice.
        name: name of the backbone in messages.

    Returns:
        The tokens with their merges, the most frequent first.

    Raises:
        BackboneError: the tokenizer is no byte pair encoding of the library tokenizers.
        DataError: no pair of tokens occurs twice inside words.
    """
    values = bpe_values(tokenizer, name)
    special = {token["content"] for token in values["added_tokens"]}
    words = _words(tokenizer, texts, special)
    merges, tokens = _Merger(words, set(values["model"]["vocab"]) | special).run(count)
    if not tokens:
        raise DataError(
            "No pair of tokens occurs twice inside the words of the new text, so no token can be learned from it: add "
            "text, or list tokens in add_tokens."
        )
    return AddedTokens(texts=tuple(tokens), merges=tuple(merges))


def _words(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], special: set[str]) -> Counter[tuple[str, ...]]:
    """Count the words of texts, each as its tokens, without words of a single token."""
    backend = cast("PreTrainedTokenizerFast", tokenizer).backend_tokenizer
    words: Counter[tuple[str, ...]] = Counter()
    for batch in _batches(texts):
        for encoding in backend.encode_batch(batch, add_special_tokens=False):
            words.update(_words_of(encoding.tokens, encoding.word_ids, special))
    return words


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _words_of(tokens: Sequence[str], word_ids: Sequence[int | None], special: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the words of an encoded text. Special tokens and single bytes end a word."""
    word: list[str] = []
    previous: int | None = None
    for token, number in zip(tokens, word_ids, strict=True):
        is_part = token not in special and not _BYTE.fullmatch(token)
        if number != previous or token.startswith(_SPACE) or not is_part:
            if len(word) > 1:
                yield tuple(word)
            word = []
        if is_part:
            word.append(token)
        previous = number
    if len(word) > 1:
        yield tuple(word)


class _Merger:
    """Joins the most frequent pair of neighbouring tokens, again and again.

    Args:
        words: the number of occurrences of each word.
        old: the old tokens. A pair that spells one is never joined, since that would change the encoding of old text.
            A pair that spells a new token in another way is not joined either, so that each token has one spelling.
    """

    def __init__(self, words: Counter[tuple[str, ...]], old: set[str]) -> None:
        self._words = [list(word) for word in words]
        self._counts = list(words.values())
        self._old = old
        self._pairs: Counter[_Pair] = Counter()
        self._places: dict[_Pair, set[int]] = defaultdict(set)
        for number in range(len(self._words)):
            self._count(number, 1)
        self._queue = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._queue)

    def run(self, count: int) -> tuple[list[_Pair], list[str]]:
        """Return the merges that make `count` new tokens, or fewer, and the tokens."""
        merges: list[_Pair] = []
        tokens: dict[str, None] = {}  # in order
        while len(tokens) < count:
            pair = self._most_frequent()
            if pair is None:
                break
            joined = "".join(pair)
            if joined in self._old or joined in tokens:
                continue
            merges.append(pair)
            tokens[joined] = None
            self._join(pair, joined)
        return merges, list(tokens)

    def _most_frequent(self) -> _Pair | None:
        """Remove the most frequent pair from the queue and return it; None if no pair occurs twice."""
        while self._queue:
            count, pair = heapq.heappop(self._queue)
            if -count == self._pairs[pair] >= _LEAST:  # otherwise its number of occurrences has changed
                return pair
        return None

    def _join(self, pair: _Pair, joined: str) -> None:
        """Join a pair in all words."""
        changed: set[_Pair] = set()
        for number in sorted(self._places[pair]):
            word = self._words[number]
            changed.update(pairwise(word))
            self._count(number, -1)
            self._words[number] = _joined(word, pair, joined)
            self._count(number, 1)
            changed.update(pairwise(self._words[number]))
        for other in changed - {pair}:
            if self._pairs[other] >= _LEAST:
                heapq.heappush(self._queue, (-self._pairs[other], other))

    def _count(self, number: int, sign: int) -> None:
        """Count the pairs of a word, or subtract them."""
        for pair in pairwise(self._words[number]):
            self._pairs[pair] += sign * self._counts[number]
            if sign > 0:
                self._places[pair].add(number)
            else:
                self._places[pair].discard(number)


def _joined(word: Sequence[str], pair: _Pair, joined: str) -> list[str]:
    """Return a word in which a pair of tokens is joined, from left to right."""
    result: list[str] = []
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            result.append(joined)
            position += 2
        else:
            result.append(word[position])
            position += 1
    return result
