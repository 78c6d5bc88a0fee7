"""Text processing: sentence boundaries, words and n-grams, and the libraries of the extra `summarize`."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from graftlm.config import read_yaml
from graftlm.errors import DataError, RecipeError
from graftlm.files import extras

import_extra = partial(extras.import_extra, "summarize")
_LINE_BREAK = re.compile(r"[\r\n]")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_]+(?:['’][^\W_]+)*")  # a CJK character is a word
MAX_SENTENCE = 1000  # characters
_SCRIPT_SAMPLE = 20_000  # characters read to detect the script
WORDS = read_yaml(Path(__file__).with_name("words.yaml"))
_LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(?:-\w{2,8})*", re.IGNORECASE)
_ABBREVIATION = re.compile(r"\b(?:Eqs?|Figs?|Secs?|Refs?|Tabs?)\.$")


@cache
def element_roles(markup: str) -> dict[str, Any]:
    """The role of each element of a markup language of `readers/elements.yaml`."""
    listed = read_yaml(Path(__file__).with_name("readers") / "elements.yaml")[markup].items()
    return {name: role for role, names in listed for name in (names.split() if isinstance(names, str) else names)}


def detect_language(texts: Iterable[str], name: str = "The text") -> str:
    """Return the language code to split sentences by. The script decides; Latin script counts as English.

    Raises DataError if the script has no punctuation that ends sentences.
    """
    sample = itertools.islice(itertools.chain.from_iterable(texts), _SCRIPT_SAMPLE)
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in sample if letter.isalpha())
    if not scripts:
        return "en"
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "ja"  # most letters of Japanese text are Chinese characters
    script = scripts.most_common(1)[0][0]
    if script in WORDS["unsplit"]["scripts"]:
        raise DataError(
            f"{name} is in {script.capitalize()} script, whose sentences can't be told apart: give a text in another "
            "script."
        )
    return WORDS["languages"].get(script, "en")


def looks_english(text: str) -> bool:
    """Whether a text has as many of the commonest English words as English has; short texts do."""
    words = split_words(text[:_SCRIPT_SAMPLE])
    return len(words) < 40 or sum(word in WORDS["english"] for word in words) > 0.06 * len(words)


def check_language(code: str) -> str:
    """Return a language code in lower case; RecipeError if it is none, or no mark ends the language's sentences."""
    if not _LANGUAGE_CODE.fullmatch(code):
        raise RecipeError(f"{code!r} is no language that sentences can be split by: give a code such as en, de or zh.")
    if code.lower().split("-")[0] in WORDS["unsplit"]["languages"]:
        raise RecipeError(f"Sentences of the language {code!r} can't be told apart: give a text in another language.")
    return code.lower()


def split_sentences(text: str, language: str = "en") -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence of a paragraph, without surrounding white space.

    `!` or `?` before a small letter, as in "await! is", ends no sentence, and "Eq." or "Fig." doesn't either. A
    sentence of more than `MAX_SENTENCE` characters is divided after a comma or space.
    """
    sentencex: Any = import_extra("sentencex", "Splitting sentences")
    pending = None
    for boundary in sentencex.get_sentence_boundaries(language, _LINE_BREAK.sub(" ", text)):  # keeps the length
        start, end = boundary["start_index"], boundary["end_index"]
        before, after = text[max(start - 8, 0) : start].rstrip(), text[start:end].lstrip()
        is_inside = (before[-1:] in ("!", "?") and after[:1].islower()) or _ABBREVIATION.search(before)
        if pending is not None and not is_inside:
            yield from _short_parts(text, pending, start)
            pending = None
        pending = start if pending is None else pending
    if pending is not None:
        yield from _short_parts(text, pending, len(text))


def _short_parts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the stripped range, divided where it is too long."""
    while start < end:
        cut = end
        if end - start > MAX_SENTENCE:
            cuts = (text.rfind(mark, start, start + MAX_SENTENCE) + 1 for mark in (";", ",", " "))
            cut = next((cut for cut in cuts if cut > start + MAX_SENTENCE // 2), start + MAX_SENTENCE)
        part = text[start:cut]
        if stripped := part.strip():
            first = start + len(part) - len(part.lstrip())
            yield first, first + len(stripped)
        start = cut


def split_words(text: str) -> list[str]:
    """Return the words of any script in lower case; each Chinese or Japanese character is a word."""
    return [word.casefold() for word in _WORD.findall(text)]


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return all runs of `n` words."""
    return list(zip(*(words[first:] for first in range(n)), strict=False))
