"""An embedder of texts by their rare words, such as names, product codes and numbers, and by names of common words.

A graft that learns facts about named things should act where one of them is named, and nowhere else. A word is rare if
it is a number of three or more digits, or if the backbone's tokenizer encodes it as several tokens in lower case, with
a capital letter and in capitals, as it does names that the backbone hardly knows. A final s is ignored, as in plurals,
and so are the words of the chat template itself. In scripts without spaces no word is rare, since none is delimited.

An example without rare words stands for its names of several words, such as Dice Theme Park (`names.py`), and one that
has none of these either stands for all of its words in their order.

Each of these features f has a fixed random direction u(f) of length 1, so two different ones have a cosine near 0
(above 0.5 with a probability below 1e-13). With F, the rare words of a text, its sequences of two to four words and the
sequence of all its words, and C_j, the directions of the features for which the examples of expert j stand, the score
of expert j is

    s_j(text) = max over f in F and c in C_j of u(f) . c

which is 1 if the text has such a feature, however long it is, and near 0 otherwise.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import Backbone, Call, common_length
from graftlm.backbone.chat_templates import common_ending, render_messages
from graftlm.errors import first_of, shorten
from graftlm.grafts.token_routing.names import LONGEST_NAME, SENTENCE_BREAK, names_in
from graftlm.grafts.token_routing.routing_state import RouteSpans, RunningSum, prefix_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WIDTH = 256
_DIGITS_OF_NUMBER = 3
_LETTERS_OF_PLURAL = 5
_SHOWN_WORDS = 12
# Scripts without spaces: Thai, Lao, Burmese, Khmer, Japanese and Chinese.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_SPACELESS}]+|[^\W{_SPACELESS}]+")
_IS_SPACELESS = re.compile(rf"[{_SPACELESS}]")
_SEPARATOR = re.compile(r"(?<=\d)[,.](?=\d{3}(?!\d))")


class WordEmbedder:
    """Embeds a text by its rare words, or by its names of common words.

    Args:
        backbone: the backbone, whose tokenizer decides which words are rare.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._tokenizer = backbone.need_tokenizer()
        self._device = backbone.device
        self._rare_by_word: dict[str, bool] = {}
        self._template_words = set(_words(_text_around_question(self._tokenizer)))

    def rare_words(self, text: str) -> list[str]:
        """Return the different rare words of a text in lower case and without the ending of a plural, sorted."""
        words = set(_words(text)) - self._template_words
        return sorted({_singular(word) for word in words if self._is_rare(word)})

    def taught_features(self, text: str) -> list[str]:
        """Return the features for which an example stands: its rare words, its names, or all of its words."""
        return self.rare_words(text) or sorted(_names(text)) or [_whole(text)]

    def features(self, text: str) -> set[str]:
        """Return the features of a text that examples may stand for."""
        return {*self.rare_words(text), *_sequences(text), _whole(text)}

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Embed texts, each as the sum of the n directions of what it stands for over sqrt(n), of a length of about 1.

        Args:
            texts: the texts, at least one.

        Returns:
            (texts, d) float32 embeddings.
        """
        vectors = []
        for text in texts:
            directions = _directions(self.taught_features(text))
            vectors.append(directions.sum(0) / len(directions) ** 0.5)
        return torch.stack(vectors).to(self._device)

    def examples(self, texts: Sequence[str]) -> Tensor:
        """Embed examples: the direction of each different feature for which they stand.

        Args:
            texts: the examples, at least one.

        Returns:
            (vectors, d) float32 embeddings.
        """
        features: set[str] = set()
        for text in texts:
            features.update(self.taught_features(text))
        return _directions(sorted(features)).to(self._device)

    def scores(
        self,
        call: Call,
        spans: RouteSpans,
        running_sum: RunningSum | None,
        score: Callable[[Tensor], Tensor],
    ) -> Tensor:
        # Between two turns, some templates have nothing but special tokens.
        texts = prefix_texts(spans, self._tokenizer, skip_special_tokens=False)
        found = [self.features(text) for text in texts]
        # Texts of one pass are mostly prefixes of each other, so each feature is scored once.
        unique = sorted(set().union(*found))
        number_of = {feature: number for number, feature in enumerate(unique)}
        # In a step without a new route, a zero vector shows the number of experts.
        directions = _directions(unique) if unique else torch.zeros(1, WIDTH)
        scores_FE = score(directions.to(spans.ids.device))
        scores_BTE = scores_FE.new_zeros(*spans.updates.shape, scores_FE.shape[-1])
        if texts:
            own = [scores_FE[[number_of[feature] for feature in each]].amax(0) for each in found]
            scores_BTE[spans.updates] = torch.stack(own)
        return scores_BTE

    def notes_on(self, texts: Sequence[str]) -> list[str]:
        """Return sentences about examples on which the expert does not act, and about what everyday texts may have too.

        That is names of common words, and all rare words that are not plainly names (`_unlike_names`).
        """
        notes = []
        names: dict[str, str] = {}
        for text in texts:
            if not self.rare_words(text):
                names.update(_names(text))
        without = [text for text in texts if not self.rare_words(text) and names.keys().isdisjoint(_sequences(text))]
        if without:
            notes.append(
                "The number of examples with neither a rare word, such as an unfamiliar name or a number of three "
                f"digits, nor a name of several words is {len(without):,} of {len(texts):,}, and the expert does not "
                f"act on them. The first is {shorten(without[0])!r}: use such a name in it, or train without routing."
            )
        if names:
            shown = ", ".join(sorted(names.values())[:_SHOWN_WORDS])
            notes.append(
                f"Examples without a rare word open the expert by their names, of which there are {len(names):,}: "
                f"{shown}."
            )
        notes += self._note_on_everyday_words(texts)
        return notes

    def _note_on_everyday_words(self, texts: Sequence[str]) -> list[str]:
        """Return a sentence about the rare words that everyday texts may have too, words before numbers, if any."""
        rare = self.rare_words(" ".join(texts))
        written: dict[str, str] = {}
        for word in _unlike_names(texts):
            written.setdefault(_singular(word.casefold()), word)
        everyday = sorted((written[word] for word in rare if word in written), key=_by_digits)
        if not everyday:
            return []
        shown = first_of(everyday, _SHOWN_WORDS)
        return [
            f"Rare words that open the expert: {len(rare):,}. Everyday questions may have those that the examples do "
            f"not capitalize inside a sentence, as they do names ({len(everyday):,}): {shown}."
        ]

    def _is_rare(self, word: str) -> bool:
        if word not in self._rare_by_word:
            if _IS_SPACELESS.match(word):
                self._rare_by_word[word] = False
            elif word.isdigit():
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


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case and composed letters. Digits grouped by three are one number."""
    composed = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall(_SEPARATOR.sub("", composed))


def _unlike_names(texts: Sequence[str]) -> Iterator[str]:
    """Yield words that may not be names, as texts have them.

    That is each word with a digit, in lower case or in capitals, or of letters without case. A word that has a capital
    letter because it begins a sentence is among them unless a text has it with a capital inside a sentence too.
    """
    beginnings: dict[str, str] = {}
    names: set[str] = set()
    for text in texts:
        for sentence in SENTENCE_BREAK.split(_SEPARATOR.sub("", unicodedata.normalize("NFKC", text))):
            for number, word in enumerate(_WORD.findall(sentence)):
                if word == word.lower() or word.isupper() or any(letter.isdigit() for letter in word):
                    yield word
                elif number == 0 and word[1:] == word[1:].lower():
                    beginnings.setdefault(_singular(word.casefold()), word)
                else:
                    names.add(_singular(word.casefold()))
    yield from (word for key, word in beginnings.items() if key not in names)


def _by_digits(word: str) -> tuple[bool, str]:
    """Return a key by which words with digits follow all others."""
    return any(letter.isdigit() for letter in word), word.casefold()


def _names(text: str) -> dict[str, str]:
    """Return the names of several words in a text by their features."""
    names = names_in(unicodedata.normalize("NFKC", text))
    return {" ".join(_singular(word) for word in _words(name)): name for name in names}


def _sequences(text: str) -> set[str]:
    """Return the features of all sequences of words in a text that may be names."""
    words = [_singular(word) for word in _words(text)]
    sequences = set()
    for length in range(2, LONGEST_NAME + 1):
        for start in range(len(words) - length + 1):
            sequences.add(" ".join(words[start : start + length]))
    return sequences


def _whole(text: str) -> str:
    """Return the feature of all words of a text in their order, which begins with a space unlike all others."""
    return " " + " ".join(_WORD.findall(text.casefold()))


def _text_around_question(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text around a question, such as its system message; empty without one."""
    if not tokenizer.chat_template:
        return ""
    questions = ("one", "two")  # with different first and last letters
    try:
        first, second = (
            render_messages(tokenizer, [{"role": "user", "content": content}], header=True) for content in questions
        )
    except Exception:  # A template may raise anything; then no prompt is rendered with it either.
        return ""
    before = first[: common_length(first, second)]
    return f"{before} {common_ending(first, second)}"


def _singular(word: str) -> str:
    """Return a word without a final s, which may be the ending of a plural."""
    if len(word) >= _LETTERS_OF_PLURAL and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def _directions(features: Sequence[str]) -> Tensor:
    """Return the directions of features, (features, d): each bit of a feature's hash is the sign of a component."""
    digests = b"".join(hashlib.shake_256(feature.encode()).digest(WIDTH // 8) for feature in features)
    bits = np.unpackbits(np.frombuffer(digests, dtype=np.uint8))
    signs = 2.0 * bits.astype(np.float32) - 1.0
    return torch.from_numpy(signs / WIDTH**0.5).reshape(len(features), WIDTH)
