"""The likeness of questions and texts by their words, for retrieval and for routing.

A text is a vector of its words, each weighted by log((1 + n) / (1 + n_word)) + 1 for n texts of which n_word have the
word. The likeness of two texts is the cosine of their vectors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

Vector = dict[str, float]


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.casefold())


class Lexicon:
    """Texts that questions are compared with.

    Args:
        texts: the texts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._total = len(texts)
        self._texts_with: Counter[str] = Counter()
        for text in texts:
            self._texts_with.update(set(words(text)))
        self._vectors = [self._vector(text) for text in texts]

    def likeness(self, question: str) -> np.ndarray:
        """Return the cosine of a question and each text, (texts,)."""
        vector = self._vector(question)
        cosines = [_product(vector, other) for other in self._vectors]
        return np.array(cosines)

    def nearest(self, question: str, count: int) -> list[int]:
        """Return the numbers of the texts that are most like a question, the most alike first."""
        distances = -self.likeness(question)
        order = np.argsort(distances, kind="stable")
        return order[:count].tolist()

    def _vector(self, text: str) -> Vector:
        """Return the weights of a text's words, as a vector of length 1."""
        weights = {}
        for word, count in Counter(words(text)).items():
            weights[word] = count * self._rarity(word)
        length = math.hypot(*weights.values())
        if length == 0:
            return {}
        return {word: weight / length for word, weight in weights.items()}

    def _rarity(self, word: str) -> float:
        ratio = (1 + self._total) / (1 + self._texts_with[word])
        return math.log(ratio) + 1


def _product(left: Mapping[str, float], right: Mapping[str, float]) -> float:
    """Return the scalar product of two vectors."""
    total = 0.0
    for word, weight in left.items():
        total += weight * right.get(word, 0.0)
    return total
