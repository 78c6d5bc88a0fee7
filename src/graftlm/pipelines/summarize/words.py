"""Words: those of ROUGE, stemmed once each, and those of any script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from graftlm.pipelines.summarize.extra import need

_ROUGE_WORD = re.compile(r"[a-z0-9]+")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+(?:['’][^\W_]+)*")  # one CJK character is a word

_KNOWN_STEMS = 100_000  # of the latest words, however many documents there are


@cache
def _stemmer() -> Callable[[str], str]:
    porter: Any = need("nltk.stem.porter", "ROUGE")
    return lru_cache(_KNOWN_STEMS)(porter.PorterStemmer().stem)


def rouge_words(text: str, stem: bool = True) -> list[str]:
    """The tokens of rouge-score: runs of a–z and 0–9 in lower case, those above three characters stemmed."""
    words = _ROUGE_WORD.findall(text.lower())
    if not stem:
        return words
    stemmed = _stemmer()
    return [stemmed(word) if len(word) > 3 else word for word in words]


def words_of(text: str) -> list[str]:
    """Words of any script in lower case; each Chinese or Japanese character counts as one."""
    return [word.casefold() for word in _WORD.findall(text)]


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of `n` words."""
    return list(zip(*(words[first:] for first in range(n)), strict=False))
