"""The names of the new text, by which texts about the same things are recognized.

A name is a run of words with capital letters inside a sentence, such as France or Velmora Coffee, or a number of at
least three digits. If a sentence has a name that the backbone's tokenizer has no token for, such as Velmora, the known
words of that sentence, such as Paris or CEO, are not names on its account: the sentence is about Velmora.

In detail:

- Of a run of several words, each word that is not common is a name as well: Velmora, but not Coffee. A word is common
  if the new text also has it in lower case, or if the tokenizer has a token for it in lower case: it has one for
  university, and none for france.
- The first word of a sentence is part of a name unless it is common or begins many new questions.
- Words that contain both letters and digits are names.
- Names are compared as they are written, so that the Turkey of a new text does not leave out a turkey.

Languages that capitalize all nouns have more names than needed. In scripts without capital letters only numbers are
recognized. A well-known thing that the new text names only at the beginning of sentences (Apple) is not recognized.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from graftlm.data.sources import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Name = tuple[str, ...]

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"[.!?:;…。！？|\n]\W*$")
_SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+|\n+")
_INSIDE_NAME = re.compile(r"[ \u00a0’'.&-]{1,2}$")  # what may be between two words of a name
# Words in lower case that may be inside a name.
_JOINING = frozenset(["of", "de", "di", "du", "da", "del", "von", "van", "der", "des"])
_LONGEST_NAME = 6
_DIGITS_OF_NUMBER = 3
_LEAST_BEGINNINGS = 4
_FREQUENT_BEGINNING = 0.05


def words_of(text: str) -> list[str]:
    """Return the words of a text, which are runs of letters, digits and underscores, as they are written."""
    return _WORD.findall(text)


def normalized(text: str) -> Name:
    """Return the words of a text after case folding, for comparisons that ignore case and punctuation."""
    return tuple(words_of(text.casefold()))


class NewNames:
    """The names of new documents.

    Args:
        documents: the new documents.
        tokenizer: the backbone's tokenizer. A word for which it has a token in lower case is common.

    Attributes:
        asked: names in the users' turns of conversations and in prompts, each as a tuple of words.
        told: names in all texts, each as a tuple of words.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._token_counts: dict[str, int] = {}
        asked = [text for document in documents for text in questions_of(document)]
        told = [document.text for document in documents]
        self._lower: set[str] = set()
        self._beginnings: Counter[str] = Counter()
        for text in (*asked, *told):
            self._lower.update(word for word in words_of(text) if word[0].islower())
        for text in asked or told:
            self._beginnings.update(_first_words(text))
        self.asked = self._names(asked)
        self.told = self.asked | self._names(told)

    def _names(self, texts: Iterable[str]) -> set[Name]:
        names: set[Name] = set()
        for text in texts:
            for sentence in _SENTENCE_BREAK.split(text):
                names.update(self._names_of_sentence(sentence))
        return names

    def _names_of_sentence(self, sentence: str) -> list[Name]:
        """Return the names in a sentence, without known single words if the sentence has an unknown name."""
        names: list[Name] = []
        for run, at_beginning in _runs(sentence):
            names.extend(self._names_of_run(run, at_beginning=at_beginning))
        if any(self._is_unknown(name) for name in names):
            return [name for name in names if len(name) > 1 or _is_number(" ".join(name)) or self._is_unknown(name)]
        return names

    def _is_unknown(self, name: Name) -> bool:
        """Return whether a word of a name is common neither in lower case nor as it is written."""
        return any(
            not self._is_common(word) and not _is_number(word) and self._count_tokens(word) > 1
            for word in name
            if word not in _JOINING
        )

    def _names_of_run(self, run: list[str], *, at_beginning: bool) -> Iterator[Name]:
        """Yield the names in a run of words: the whole run, and each of its words that is not common."""
        if at_beginning and self._is_usual_beginning(run[0]):
            run = run[1:]
        while run and run[0] in _JOINING:
            run = run[1:]
        if len(run) == 1:
            if not self._is_written_in_lower_case(run[0]):
                yield (run[0],)
            return
        if run:
            yield tuple(run[:_LONGEST_NAME])
        for word in run:
            if word not in _JOINING and not self._is_common(word):
                yield (word,)

    def _is_usual_beginning(self, word: str) -> bool:
        """Return whether a word has its capital letter because a sentence begins."""
        if _is_number(word) or not word[1:].islower():
            return len(word) == 1
        if self._is_common(word):
            return True
        count = self._beginnings[word]
        return count >= max(_LEAST_BEGINNINGS, _FREQUENT_BEGINNING * self._beginnings.total())

    def _is_common(self, word: str) -> bool:
        if _is_number(word):
            return False
        return len(word) == 1 or self._is_written_in_lower_case(word) or self.tokens_of(word) == 1

    def _is_written_in_lower_case(self, word: str) -> bool:
        return len(word) == 1 or word.lower() in self._lower

    def tokens_of(self, word: str) -> int:
        """Return the number of tokens that a word has in lower case after a blank."""
        return self._count_tokens(word.lower())

    def _count_tokens(self, word: str) -> int:
        if word not in self._token_counts:
            with_word = self._tokenizer(f"a {word}", add_special_tokens=False)["input_ids"]
            without = self._tokenizer("a", add_special_tokens=False)["input_ids"]
            self._token_counts[word] = len(with_word) - len(without)
        return self._token_counts[word]

    def first_position(self, text: str) -> int:
        """Return the index of the character at which the first name begins; the length of the text if it has none."""
        matches = list(_WORD.finditer(text))
        words = [match.group() for match in matches]
        for number, match in enumerate(matches):
            if _name_at(words, number, self.told):
                return match.start()
        return len(text)

    def names_in(self, text: str) -> set[Name]:
        """Return the names of the new text that a text has; of a name of several words, only the longest form."""
        words = words_of(text)
        found: set[Name] = set()
        position = 0
        while position < len(words):
            name = _longest_name_at(words, position, self.told)
            if name:
                found.add(name)
            position += max(1, len(name))
        return found

    def leave_out(self, question: str, answer: str = "") -> bool:
        """Return whether a text is about a thing that the new text names.

        This is so if the question has any name of the new text, or if the answer has a name of a new question. An
        answer may have names that only new answers have: an answer about Paris is kept if a new answer is Paris.

        Args:
            question: the question, or a text without questions.
            answer: the answer.
        """
        return _has_name(words_of(question), self.told) or _has_name(words_of(answer), self.asked)


def questions_of(document: Document) -> list[str]:
    """Return the users' turns of a conversation, or the prompt of another document; an empty list for free text."""
    if document.chat is not None:
        return [message["content"] for message in document.chat.messages if message["role"] == "user"]
    return [document.prompt] if document.prompt.strip() else []


def _is_number(word: str) -> bool:
    """Return whether a word is a number of three or more digits, or contains letters and digits."""
    digits = sum(character.isdigit() for character in word)
    if digits == len(word):
        return digits >= _DIGITS_OF_NUMBER
    return digits > 0


def _has_capital(word: str) -> bool:
    return any(character.isupper() for character in word)


def _first_words(text: str) -> Iterator[str]:
    """Yield the first word of each sentence."""
    for sentence in _SENTENCE_BREAK.split(text):
        match = _WORD.search(sentence)
        if match is not None:
            yield match.group()


def _begins_sentence(text: str, position: int) -> bool:
    """Return whether a word at `position` is the first of the text or follows the end of a sentence."""
    before = text[max(0, position - 8) : position]
    if position <= len(before) and not _WORD.search(before):
        return True
    return _SENTENCE_END.search(before) is not None


def _runs(text: str) -> Iterator[tuple[list[str], bool]]:
    """Yield each run of words with capital letters or digits, and whether it begins a sentence.

    A run may include a single word such as `of` between two of its words.
    """
    run: list[str] = []
    joining: list[str] = []
    at_beginning = False
    stop = 0
    for match in _WORD.finditer(text):
        word = match.group()
        begins = _begins_sentence(text, match.start())
        if run and (begins or not _INSIDE_NAME.match(text[stop : match.start()])):
            yield run, at_beginning
            run = []
        if not run:
            joining = []
        if _has_capital(word) or _is_number(word):
            if not run:
                at_beginning = begins
            run = [*run, *joining, word]
            joining = []
        elif run and word in _JOINING and not joining:
            joining = [word]
        elif run:
            yield run, at_beginning
            run = []
        stop = match.end()
    if run:
        yield run, at_beginning


def _has_name(words: Sequence[str], names: set[Name]) -> bool:
    return any(_name_at(words, number, names) for number in range(len(words)))


def _name_at(words: Sequence[str], position: int, names: set[Name]) -> bool:
    """Return whether a name begins at a position of a list of words."""
    return bool(_longest_name_at(words, position, names))


def _longest_name_at(words: Sequence[str], position: int, names: set[Name]) -> Name:
    """Return the longest name that begins at a position of a list of words; an empty one if none does."""
    longest = min(_LONGEST_NAME, len(words) - position)
    for size in range(longest, 0, -1):
        name = tuple(words[position : position + size])
        if name in names:
            return name
    return ()
