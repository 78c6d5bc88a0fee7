"""Text processing: language detection, sentence boundaries, words and n-grams."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graftlm.config import read_yaml
from graftlm.errors import DataError, RecipeError
from graftlm.files import extras

MAX_SENTENCE = 1000
"""Maximum length of a sentence in characters; longer ones are divided."""

WORDS = read_yaml(Path(__file__).with_name("words.yaml"))
"""Word lists of `words.yaml`: languages of scripts, common English words, and section titles."""

_SCRIPT_SAMPLE = 20_000  # characters read to detect the script
_MIN_ENGLISH_SAMPLE = 40  # words below which a text counts as English
_ENGLISH_SHARE = 0.06  # share of common words above which a text counts as English
_LINE_BREAK = re.compile(r"[\r\n]")
# Every Chinese or Japanese character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+(?:['’][^\W_]+)*")
_LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(?:-\w{2,8})*", re.IGNORECASE)
# A mark that ends a sentence only before white space, as it also divides names such as `os.Path`.
_MARK_OF_SPACED_SCRIPT = re.compile(r"[.!?][\"'”’»)\]]*$")
# Closing brackets and superscript numbers of notes belong to the sentence before them.
_CLOSING_MARKS = re.compile(r"[)\]}»”’]*(?:[⁰¹²³⁴-⁹][⁰¹²³⁴-⁹,⁻–]*)?(?=\s)")
_ABBREVIATION = re.compile(r"\b(?:Eqs?|Figs?|Secs?|Refs?|Tabs?)\.$")


def import_extra(module: str, purpose: str) -> Any:
    """Import a module of a library that the extra `summarize` installs.

    Args:
        module: dotted name of the module.
        purpose: use of the module, as the subject of a sentence in the error message.

    Raises:
        MissingExtraError: the library is not installed.
    """
    return extras.import_extra("summarize", module, purpose)


def detect_language(texts: Iterable[str], name: str = "The text") -> str:
    """Return the language code whose rules split the sentences.

    The most frequent script decides. Latin script counts as English.

    Args:
        texts: pieces of the text; the first 20,000 characters are read.
        name: name of the text in error messages.

    Raises:
        DataError: the script has no punctuation that ends sentences.
    """
    sample = itertools.islice(itertools.chain.from_iterable(texts), _SCRIPT_SAMPLE)
    letters = (character for character in sample if character.isalpha())
    scripts = Counter(_script(letter) for letter in letters)
    if not scripts:
        return "en"
    kana = scripts["HIRAGANA"] + scripts["KATAKANA"]
    if kana > 0.1 * scripts.total():
        return "ja"  # Most letters of Japanese text are Chinese characters.
    script = scripts.most_common(1)[0][0]
    if script in WORDS["unsplit"]["scripts"]:
        raise DataError(
            f"{name} is in {script.capitalize()} script, which has no punctuation between sentences: "
            "give a text in another script."
        )
    return WORDS["languages"].get(script, "en")


def _script(letter: str) -> str:
    """Return the script of a letter: the first word of its Unicode name."""
    return unicodedata.name(letter, "").split(" ")[0]


def looks_english(text: str) -> bool:
    """Return whether common English words are as frequent in a text as in English.

    Texts of fewer than 40 words count as English. The first 20,000 characters are read.
    """
    words = split_words(text[:_SCRIPT_SAMPLE])
    if len(words) < _MIN_ENGLISH_SAMPLE:
        return True
    common = sum(word in WORDS["english"] for word in words)
    return common > _ENGLISH_SHARE * len(words)


def check_language(code: str) -> str:
    """Return a language code in lower case, after checking it.

    Args:
        code: a language code with optional subtags, such as `de` or `pt-BR`.

    Raises:
        RecipeError: the code is malformed, no language has it, or the language has no punctuation that ends sentences.
    """
    if not _LANGUAGE_CODE.fullmatch(code):
        raise RecipeError(f"{code!r} is not a language code: give a code such as en, de or zh.")
    code = code.lower()
    base = code.split("-")[0]
    if len(base) == 2 and base not in WORDS["codes"].split():
        raise RecipeError(f"{code!r} is the code of no language: give a code of ISO 639, such as en, de or zh.")
    if base in WORDS["unsplit"]["languages"]:
        raise RecipeError(
            f"The language {code!r} has no punctuation between sentences: give a text in another language."
        )
    return code


def split_sentences(text: str, language: str = "en") -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence of a paragraph, without surrounding white space.

    A boundary after `!` or `?` and before a lower-case letter, as in "await! is", is ignored. So is one after an
    abbreviation such as "Eq." or "Fig.", one before a combining mark, and, unless it follows a mark such as `。`, one
    before another character than white space, as in "pythonX.Y". A sentence longer than `MAX_SENTENCE` is divided
    after a semicolon, comma or space.

    Args:
        text: the paragraph.
        language: code of the language whose rules apply.

    Raises:
        MissingExtraError: sentencex is not installed.
    """
    for first, end in whole_sentences(text, language):
        yield from short_parts(text, first, end)


def whole_sentences(text: str, language: str = "en") -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence of a paragraph as `split_sentences` finds them, but undivided.

    White space belongs to the sentence before it. The arguments and errors are those of `split_sentences`.
    """
    sentencex = import_extra("sentencex", "Splitting sentences")
    single_line = _LINE_BREAK.sub(" ", text)  # this replacement keeps the length
    first = 0
    for boundary in sentencex.get_sentence_boundaries(language, single_line):
        end = boundary["end_index"]
        marks = _CLOSING_MARKS.match(single_line, end)
        if marks:
            end = marks.end()
        if end > first and not _continues_sentence(single_line, end):
            yield first, end
            first = end
    yield first, len(text)


def _continues_sentence(text: str, boundary: int) -> bool:
    """Return whether the sentence before a boundary goes on after it."""
    before = text[max(boundary - 8, 0) : boundary]
    after = text[boundary : boundary + 8]
    ending = before.rstrip()
    following = after.lstrip()
    if _ABBREVIATION.search(ending):
        return True
    if following and unicodedata.combining(following[0]):
        return True  # an accent on the last character before the boundary
    if ending[-1:] in ("!", "?") and following[:1].islower():
        return True
    is_divided = before != ending or after != following
    return not is_divided and bool(after) and _MARK_OF_SPACED_SCRIPT.search(before) is not None


def short_parts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the range of a sentence without surrounding white space, divided where it is too long."""
    while start < end:
        cut = _cut_position(text, start, end)
        part = text[start:cut]
        stripped = part.strip()
        if stripped:
            first = start + len(part) - len(part.lstrip())
            yield first, first + len(stripped)
        start = cut


def _cut_position(text: str, start: int, end: int) -> int:
    """Return the end of the first part of a range: in its second half, after a semicolon, comma or space."""
    if end - start <= MAX_SENTENCE:
        return end
    limit = start + MAX_SENTENCE
    for mark in (";", ",", " "):
        cut = text.rfind(mark, start, limit) + 1
        if cut > start + MAX_SENTENCE // 2:
            return cut
    return limit


def split_words(text: str) -> list[str]:
    """Return the words of any script in lower case; each Chinese or Japanese character is a word."""
    return [word.casefold() for word in _WORD.findall(text)]


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return all runs of `n` consecutive words, in order; an empty list if there are fewer words."""
    count = len(words) - n + 1
    return [tuple(words[first : first + n]) for first in range(count)]
