"""Whether a text is in the language that a template begins from: a guard against mistakes, not a detector.

Single words and names pass. A sentence is stopped where its letters are of another script, or where at least two more
of its small words belong to another language than to the expected one.
"""

from __future__ import annotations

import re
import unicodedata

from graftlm.errors import DataError

_NAMES = {"en": "English", "fr": "French", "es": "Spanish", "de": "German", "it": "Italian", "pt": "Portuguese"}
_SMALL_WORDS = {
    "en": "the of and to in is that it was for you with on are this be at not have from i my me your he she we they do "
    "did a an what where when who how will would can if but there has had his her our as by or so up no die war",
    "fr": "le la les des du et est une un dans que qui pour pas vous nous je il elle ils sont avec sur ce cette au aux "
    "mon ma mes votre tu êtes suis où très mais ne",
    "es": "el los las de y en que es una un por para con se lo su está son del al usted mi yo como más qué muy pero "
    "ella nosotros estás tú",
    "de": "der die das und ist nicht ein eine ich du sie wir mit zu auf den dem für von haben hast sind war es wie "
    "aber er sehr wo bin",
    "it": "il lo gli e è una un di che non per con sono della del nel mi ti ci ma come dove molto questo sei tu",
    "pt": "o os as e é uma um de que não para com são da do no na você eu ele ela muito mas como onde está",
}
_WORDS = {code: frozenset(words.split()) for code, words in _SMALL_WORDS.items()}


def check_language(text: str, source: str) -> None:
    """Stop a text that is clearly in another language; source languages that are not known here pass.

    Raises:
        DataError: it is.
    """
    if source not in _WORDS:
        return
    found = _other_script(text) or _other_language(text, source)
    if found is not None:
        raise DataError(
            f"The text looks as if it were {found}, but {_NAMES[source]} is expected: begin with that, or use a "
            "template of your own with another source."
        )


def _other_script(text: str) -> str | None:
    letters = [one for one in text if one.isalpha()]
    latin = sum(unicodedata.name(one, "").startswith("LATIN") for one in letters)
    return "in other letters" if letters and latin < len(letters) / 2 else None


def _other_language(text: str, source: str) -> str | None:
    words = set(re.findall(r"[^\W\d_]+", text.casefold()))
    known = {code: len(words & small) for code, small in _WORDS.items()}
    best = max(known, key=lambda code: known[code])
    return _NAMES[best] if known[best] >= known[source] + 2 else None
