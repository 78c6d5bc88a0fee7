"""An embedder of texts by their rare words, such as names, product codes and numbers.

A graft that learns facts about named things should act where one of them is named, and nowhere else. A word is rare if
it is a number of three or more digits, or if the backbone's tokenizer encodes it as several tokens in lower case, with
a capital letter and in capitals, as it does names that the backbone hardly knows. A final s is ignored, as in plurals,
and so are the words of the chat template itself.

Each rare word w has a fixed random direction u(w) of length 1, so two different words have a cosine near 0 (above 0.5
with a probability below 1e-13). With R, the rare words of a text, and C_j, the directions of the rare words in the
examples of expert j, the score of expert j is

    s_j(text) = max over w in R and c in C_j of u(w) . c

which is 1 if the text has a rare word of the examples, however many other words it has, and near 0 otherwise. A text
without rare words has one direction as a whole, so it is similar only to an example with the same words.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from graftlm.backbone import Backbone, Call
from graftlm.errors import shorten
from graftlm.grafts.token_routing.routing_state import RouteSpans, RunningSum, prefix_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WIDTH = 256
_DIGITS_OF_NUMBER = 3
_LETTERS_OF_PLURAL = 5
_SHOWN_WORDS = 12
_WORD = re.compile(r"\w+")
_SEPARATOR = re.compile(r"(?<=\d)[,.](?=\d{3}(?!\d))")


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
        self._template_words = _words(_empty_prompt(self._tokenizer))

    def rare_words(self, text: str) -> list[str]:
        """Return the different rare words of a text in lower case and without the ending of a plural, sorted."""
        words = _words(text) - self._template_words
        return sorted({_singular(word) for word in words if self._is_rare(word)})

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Embed texts, each as the sum of its n directions over sqrt(n), which has a length of about 1.

        Args:
            texts: the texts, at least one.

        Returns:
            (texts, d) float32 embeddings.
        """
        vectors = []
        for text in texts:
            directions = self._directions(text)
            vectors.append(directions.sum(0) / len(directions) ** 0.5)
        return torch.stack(vectors).to(self._device)

    def examples(self, texts: Sequence[str]) -> Tensor:
        """Embed examples: the direction of each different rare word, and of each text that has none.

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

    def scores(
        self,
        call: Call,
        spans: RouteSpans,
        running_sum: RunningSum | None,
        score: Callable[[Tensor], Tensor],
    ) -> Tensor:
        # Between two turns, some templates have nothing but special tokens.
        texts = prefix_texts(spans, self._tokenizer, skip_special_tokens=False)
        # In a step without a new route, a zero vector shows the number of experts.
        directions = [self._directions(text) for text in texts] or [torch.zeros(1, WIDTH)]
        directions_UWd = pad_sequence(directions, batch_first=True).to(spans.ids.device)
        is_padding_UW = (directions_UWd == 0).all(-1)
        scores_UWE = score(directions_UWd).masked_fill(is_padding_UW[..., None], -torch.inf)
        scores_UE = scores_UWE.amax(1)
        scores_BTE = scores_UE.new_zeros(*spans.updates.shape, scores_UE.shape[-1])
        scores_BTE[spans.updates] = scores_UE[: len(texts)]
        return scores_BTE

    def notes_on(self, texts: Sequence[str]) -> list[str]:
        """Return sentences about examples without a rare word, and about rare words that everyday texts may have too.

        A rare word is taken for an everyday one if the examples have it in lower case and it has no digit.
        """
        notes = []
        without = [text for text in texts if not self.rare_words(text)]
        if without:
            notes.append(
                "The number of examples without a rare word, such as a name or a number of three digits, is "
                f"{len(without):,} of {len(texts):,}, and the expert does not act on them. The first is "
                f"{shorten(without[0])!r}: use an unfamiliar name in it, or train without routing."
            )
        written = {word for text in texts for word in _WORD.findall(text)}
        rare = self.rare_words(" ".join(texts))
        everyday = [word for word in rare if word.isalpha() and (word in written or f"{word}s" in written)]
        if everyday:
            notes.append(
                f"The number of words that open the expert is {len(rare):,}, and {len(everyday):,} of them are written "
                f"in lower case, so that everyday questions may have them: {', '.join(everyday[:_SHOWN_WORDS])}."
            )
        return notes

    def _directions(self, text: str) -> Tensor:
        """Return the directions of a text, (words, d)."""
        return torch.stack([_direction(feature) for feature in self._features(text)])

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
                forms = {word, _singular(word)}
                self._rare_by_word[word] = all(self._count_tokens(form) > 1 for form in forms)
        return self._rare_by_word[word]

    def _count_tokens(self, word: str) -> int:
        """Return the number of tokens of a word inside a text, in the form that has the fewest."""
        counts = []
        for form in (word, word.capitalize(), word.upper()):
            without, with_word = self._tokenizer(["a", f"a {form}"], add_special_tokens=False)["input_ids"]
            counts.append(len(with_word) - len(without))
        return min(counts)


def _words(text: str) -> set[str]:
    """Return the words of a text in lower case and composed letters. Digits grouped by three are one number."""
    composed = unicodedata.normalize("NFKC", text).casefold()
    return set(_WORD.findall(_SEPARATOR.sub("", composed)))


def _empty_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text around an empty message, such as its system message; empty without one."""
    if not tokenizer.chat_template:
        return ""
    messages = [{"role": "user", "content": ""}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # A template may raise anything; then no prompt is rendered with it either.
        return ""


def _singular(word: str) -> str:
    """Return a word without a final s, which may be the ending of a plural."""
    if len(word) >= _LETTERS_OF_PLURAL and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def _direction(feature: str) -> Tensor:
    """Return the direction of a feature, (d,), of length 1: each bit of its hash is the sign of a component."""
    digest = hashlib.shake_256(feature.encode()).digest(WIDTH // 8)
    bits = np.unpackbits(np.frombuffer(digest, dtype=np.uint8))
    signs = 2.0 * bits.astype(np.float32) - 1.0
    return torch.from_numpy(signs / WIDTH**0.5)
