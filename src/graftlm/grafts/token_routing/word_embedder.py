"""An embedder of texts by their rare words, such as names, product codes and numbers.

A graft that learns facts about named things should act where one of them is named, and nowhere else. A word is rare if
it is a number of three or more digits, or if the backbone's tokenizer encodes it as several tokens, as it does names
that the backbone hardly knows. Each rare word has a fixed random direction u(word), and a text with the rare words R
has the embedding

    e(text) = sum over the words in R of u(word) / sqrt(|R|)

Examples are embedded word by word: each of their rare words becomes a vector, so that a text that names one of n rare
words has a cosine of 1 / sqrt(n) with it. A text without rare words has the direction of the text as a whole, so only
the same text is similar to it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import Backbone, Call
from graftlm.grafts.token_routing.routing_state import RouteSpans, RunningSum, prefix_texts

WIDTH = 1024
_ENTRIES = 16  # of a word's direction that are not zero
_DIGITS_OF_NUMBER = 3
_WORD = re.compile(r"\w+")


class WordEmbedder:
    """Embeds a text by its rare words.

    Args:
        backbone: the backbone, whose tokenizer decides which words are rare.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._tokenizer = backbone.need_tokenizer()
        self._device = backbone.device
        self._rare_by_word: dict[str, bool] = {}

    def rare_words(self, text: str) -> list[str]:
        """Return the different rare words of a text in lower case, sorted."""
        words = set(_WORD.findall(text.casefold()))
        return sorted(word for word in words if self._is_rare(word))

    def texts(self, texts: Sequence[str]) -> Tensor:
        vectors = [self._embed(text) for text in texts]
        return torch.stack(vectors).to(self._device)

    def examples(self, texts: Sequence[str]) -> Tensor:
        """Embed examples: a vector of each different rare word, and of each text that has none.

        Args:
            texts: the examples, at least one.

        Returns:
            (vectors, d) float32 embeddings.
        """
        features: set[str] = set()
        for text in texts:
            features.update(self._features(text))
        vectors = [_direction(feature) for feature in sorted(features)]
        return torch.stack(vectors).to(self._device)

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        embeddings = torch.zeros(*spans.updates.shape, WIDTH, device=spans.ids.device)
        texts = prefix_texts(spans, self._tokenizer)
        if texts:
            embeddings[spans.updates] = self.texts(texts).to(embeddings.device)
        return embeddings

    def _embed(self, text: str) -> Tensor:
        directions = [_direction(feature) for feature in self._features(text)]
        total = torch.stack(directions).sum(0)
        return total / len(directions) ** 0.5

    def _features(self, text: str) -> list[str]:
        """Return the rare words of a text, or a single feature of the whole text if it has none."""
        rare = self.rare_words(text)
        if rare:
            return rare
        whole = " ".join(_WORD.findall(text.casefold()))
        return [f" {whole}"]  # The space distinguishes it from a word.

    def _is_rare(self, word: str) -> bool:
        if word not in self._rare_by_word:
            if word.isdigit():
                self._rare_by_word[word] = len(word) >= _DIGITS_OF_NUMBER
            else:
                self._rare_by_word[word] = self._count_tokens(word) > 1
        return self._rare_by_word[word]

    def _count_tokens(self, word: str) -> int:
        """Return the number of tokens of a word inside a text, in the form that has the fewest."""
        counts = []
        for form in (word, word.capitalize()):
            without, with_word = self._tokenizer(["a", f"a {form}"], add_special_tokens=False)["input_ids"]
            counts.append(len(with_word) - len(without))
        return min(counts)


def _direction(feature: str) -> Tensor:
    """Return the direction of a feature, (d,), of length 1. It depends on the feature only."""
    digest = hashlib.sha256(feature.encode()).digest()
    generator = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8])))
    positions = generator.choice(WIDTH, size=_ENTRIES, replace=False)
    signs = generator.choice([-1.0, 1.0], size=_ENTRIES)
    vector = np.zeros(WIDTH, dtype=np.float32)
    vector[positions] = signs / _ENTRIES**0.5
    return torch.from_numpy(vector)
