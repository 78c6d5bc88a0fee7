"""The likeness of questions and texts by their words, for retrieval and for routing.

A text is a vector of its words, each weighted by log((1 + n) / (1 + n_word)) + 1 for n texts of which n_word have the
word. The likeness of two texts is the cosine of their vectors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.casefold())


class Lexicon:
    """Texts that questions are compared with.

    Args:
        texts: the texts.
        background: texts that are only counted, so that words which are common in them weigh less.
    """

    def __init__(self, texts: Sequence[str], background: Sequence[str] = ()) -> None:
        counts: Counter[str] = Counter()
        for text in (*texts, *background):
            counts.update(set(words(text)))
        self._total = len(texts) + len(background)
        self._counts = counts
        self._vectors = [self._vector(text) for text in texts]

    def likeness(self, question: str) -> np.ndarray:
        """Return the cosine of a question and each text, (texts,)."""
        vector = self._vector(question)
        return np.array([_dot(vector, other) for other in self._vectors])

    def nearest(self, question: str, count: int) -> list[int]:
        """Return the numbers of the texts that are most like a question, the most alike first."""
        order = np.argsort(-self.likeness(question), kind="stable")
        return order[:count].tolist()

    def _vector(self, text: str) -> dict[str, float]:
        weights = {}
        for word, count in Counter(words(text)).items():
            rarity = math.log((1 + self._total) / (1 + self._counts[word])) + 1
            weights[word] = count * rarity
        norm = math.sqrt(sum(weight * weight for weight in weights.values())) or 1.0
        return {word: weight / norm for word, weight in weights.items()}


def _dot(left: dict[str, float], right: dict[str, float]) -> float:
    return sum(weight * right[word] for word, weight in left.items() if word in right)
