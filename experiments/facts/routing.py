"""Routing by the question: a graft answers only questions that are like the taught ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.facts.retrieval import Lexicon, words

_DIGITS_OF_NUMBER = 3
_PLAIN_LIKENESS = 0.6


class QuestionRouter:
    """Decides whether a question is like the taught conversations.

    It is if it has a rare word of a taught conversation: a number of three or more digits, or a word that the
    backbone's tokenizer encodes as several tokens, as it does names that the backbone hardly knows. Taught questions
    without a rare word are compared as a whole: a question is like them if the cosine of their weighted words is at
    least 0.6. So no text but the taught one is needed.

    Args:
        conversations: the taught conversations, each with `messages`.
        tokenizer: the backbone's tokenizer.
    """

    def __init__(self, conversations: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_rare: dict[str, bool] = {}
        self._rare: set[str] = set()
        plain = []
        for row in conversations:
            for message in row["messages"]:
                rare = self._rare_words(message["content"])
                self._rare |= rare
                if message["role"] == "user" and not rare:
                    plain.append(message["content"])
        self._plain = Lexicon(plain) if plain else None

    def accepts(self, question: str) -> bool:
        """Return whether a question is like the taught ones."""
        if not self._rare.isdisjoint(words(question)):
            return True
        return self._plain is not None and float(self._plain.likeness(question).max()) >= _PLAIN_LIKENESS

    def _rare_words(self, text: str) -> set[str]:
        return {word for word in words(text) if self._check(word)}

    def _check(self, word: str) -> bool:
        if word not in self._is_rare:
            if word.isdigit():
                self._is_rare[word] = len(word) >= _DIGITS_OF_NUMBER
            else:
                self._is_rare[word] = self._tokens_of(word) > 1
        return self._is_rare[word]

    def _tokens_of(self, word: str) -> int:
        """Return the number of tokens of a word inside a text, in the form that has the fewest."""
        counts = []
        for form in (word, word.capitalize()):
            with_word = self._tokenizer(f"a {form}", add_special_tokens=False)["input_ids"]
            without = self._tokenizer("a", add_special_tokens=False)["input_ids"]
            counts.append(len(with_word) - len(without))
        return min(counts)
