"""Names that consist of common words, such as Dice Theme Park, by the capital letters of their words.

A name is a run of words with capital letters inside a sentence that has words in lower case too. At least two of them
have several letters, and numbers and words such as `of` may follow the first. A run that begins a sentence is no name,
since any first word has a capital letter. In scripts without capital letters there are no names.
"""

from __future__ import annotations

import re

LONGEST_NAME = 4
"""Words of the longest names; of longer ones, the first words are the name."""
_WORD = re.compile(r"\w+")
SENTENCE_BREAK = re.compile(r"[.!?:;…]\W*\s|\n")
"""What is between two sentences."""
_PHRASE_BREAK = re.compile(r"[^\w \u00a0’'&.-]")
_JOINING = frozenset(["of", "the", "de", "di", "du", "da", "del", "von", "van", "der", "des", "s"])
# A run of words by their kinds: C and c may be in a name, but only C begins one, and j joins two of them.
_RUN = re.compile("C(?:j*[Cc])*")


def names_in(text: str) -> set[str]:
    """Return the names of several words in a text, each as its words with spaces between them."""
    return {name for sentence in SENTENCE_BREAK.split(text) for name in _names_of_sentence(sentence)}


def _names_of_sentence(sentence: str) -> set[str]:
    phrases = [_WORD.findall(phrase) for phrase in _PHRASE_BREAK.split(sentence)]
    if not any(word.islower() for words in phrases for word in words):
        return set()
    names = set()
    for number, words in enumerate(phrases):
        kinds = "".join(_kind(word) for word in words)
        for run in _RUN.finditer(kinds):
            begins_sentence = number == run.start() == 0
            first, last = run.start(), min(run.end(), run.start() + LONGEST_NAME)
            if not begins_sentence and kinds.count("C", first, last) > 1:
                names.add(" ".join(words[first:last]))
    return names


def _kind(word: str) -> str:
    """Return C for a word of several letters with a capital one, c for a capital letter or a number, j, or a blank."""
    if word[0].isupper():
        return "C" if len(word) > 1 else "c"
    if word[0].isdigit():
        return "c"
    return "j" if word in _JOINING else " "
