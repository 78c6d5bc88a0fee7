"""Where sentences begin and end, by sentencex, which knows the abbreviations and marks of some 300 languages."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from graftlm.errors import DataError
from graftlm.pipelines.summarize.extra import need

_BREAK = re.compile(r"[\r\n]")
_SAMPLE = 20_000  # characters that tell a script
_LANGUAGES = {
    "LATIN": "en",
    "CJK": "zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "ARABIC": "ar",
    "HEBREW": "he",
    "DEVANAGARI": "hi",
    "BENGALI": "bn",
    "CYRILLIC": "ru",
    "GREEK": "el",
    "ARMENIAN": "hy",
    "ETHIOPIC": "am",
    "MYANMAR": "my",
    "KHMER": "km",
}
_UNMARKED = ("THAI", "LAO", "TIBETAN")  # sentencex knows no mark that ends their sentences


def language_of(texts: Iterable[str], where: str = "The text") -> str:
    """The language that sentences are split by, told by the script; Latin script counts as English.

    Raises:
        DataError: the script is one without marks at the end of sentences.
    """
    sample = itertools.islice(itertools.chain.from_iterable(texts), _SAMPLE)
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in sample if letter.isalpha())
    if not scripts:
        return "en"
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "ja"  # mostly Chinese characters otherwise
    script = scripts.most_common(1)[0][0]
    if script in _UNMARKED:
        raise DataError(
            f"{where} is in {script.capitalize()} script, where no mark ends a sentence, and can't be split: "
            "give a text in another script."
        )
    return _LANGUAGES.get(script, "en")


def split_sentences(text: str, language: str = "en") -> Iterator[tuple[int, int]]:
    """Start and end of each sentence of a paragraph, white space around it left out."""
    sentencex: Any = need("sentencex", "Splitting sentences")
    for found in sentencex.get_sentence_boundaries(language, _BREAK.sub(" ", text)):  # of the same length
        start, end = found["start_index"], found["end_index"]
        inside = text[start:end]
        stripped = inside.strip()
        if stripped:
            start += len(inside) - len(inside.lstrip())
            yield start, start + len(stripped)
