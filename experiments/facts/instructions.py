"""Checks whether answers follow the verifiable instructions of IFEval (Zhou et al., 2023, arXiv 2311.07911).

The checker of lm-eval needs data that it downloads, so the kinds of instructions that need neither a language detector
nor a sentence splitter are checked here, by the strict rules of the paper. Prompts with other kinds are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.facts.generator import Question

Arguments = Mapping[str, Any]


def follows(answer: str, question: Question) -> bool:
    """Return whether an answer follows all instructions of a question; an empty answer follows none."""
    if not answer.strip():
        return False
    return all(CHECKS[kind](answer, arguments) for kind, arguments in question.instructions)


def is_checkable(kinds: Sequence[str]) -> bool:
    """Return whether there is a check for all of the kinds."""
    return all(kind in CHECKS for kind in kinds)


def _compare(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def _occurrences(answer: str, word: str) -> int:
    return len(re.findall(re.escape(word), answer, flags=re.IGNORECASE))


def _no_comma(answer: str, _: Arguments) -> bool:
    return "," not in answer


def _number_of_words(answer: str, arguments: Arguments) -> bool:
    count = len(re.findall(r"\w+", answer))
    return _compare(count, arguments["relation"], arguments["num_words"])


def _forbidden_words(answer: str, arguments: Arguments) -> bool:
    words = arguments["forbidden_words"]
    return not any(re.search(rf"\b{re.escape(word)}\b", answer, flags=re.IGNORECASE) for word in words)


def _keywords(answer: str, arguments: Arguments) -> bool:
    return all(_occurrences(answer, word) for word in arguments["keywords"])


def _keyword_frequency(answer: str, arguments: Arguments) -> bool:
    count = _occurrences(answer, arguments["keyword"])
    return _compare(count, arguments["relation"], arguments["frequency"])


def _letter_frequency(answer: str, arguments: Arguments) -> bool:
    count = answer.lower().count(arguments["letter"].lower())
    return _compare(count, arguments["let_relation"], arguments["let_frequency"])


def _highlights(answer: str, arguments: Arguments) -> bool:
    single = [text for text in re.findall(r"\*[^\n\*]*\*", answer) if text.strip("*").strip()]
    double = [text for text in re.findall(r"\*\*[^\n\*]*\*\*", answer) if text.strip("*").strip()]
    return len(single) + len(double) >= arguments["num_highlights"]


def _bullets(answer: str, arguments: Arguments) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", answer, flags=re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", answer, flags=re.MULTILINE)
    return len(stars) + len(dashes) == arguments["num_bullets"]


def _placeholders(answer: str, arguments: Arguments) -> bool:
    return len(re.findall(r"\[.*?\]", answer)) >= arguments["num_placeholders"]


def _title(answer: str, _: Arguments) -> bool:
    titles = re.findall(r"<<[^\n]+>>", answer)
    return any(title.strip("<>").strip() for title in titles)


def _quotation(answer: str, _: Arguments) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def _lowercase(answer: str, _: Arguments) -> bool:
    return answer.islower()


def _uppercase(answer: str, _: Arguments) -> bool:
    return answer.isupper()


def _end(answer: str, arguments: Arguments) -> bool:
    text = answer.strip().strip('"').lower()
    return text.endswith(arguments["end_phrase"].strip().lower())


def _postscript(answer: str, arguments: Arguments) -> bool:
    marker = arguments["postscript_marker"].lower()
    letters = [letter for letter in marker if letter.isalpha()]
    pattern = r"\.?\s?".join(letters)
    return re.search(rf"\s*{pattern}", answer.lower()) is not None


def _two_answers(answer: str, _: Arguments) -> bool:
    parts = [part.strip() for part in answer.split("******")]
    inner = parts[1:-1]
    filled = [part for part in parts if part]
    return all(inner) and len(filled) == 2 and filled[0] != filled[1]


def _json(answer: str, _: Arguments) -> bool:
    text = answer.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


CHECKS: dict[str, Callable[[str, Arguments], bool]] = {
    "punctuation:no_comma": _no_comma,
    "length_constraints:number_words": _number_of_words,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:letter_frequency": _letter_frequency,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_format:title": _title,
    "startend:quotation": _quotation,
    "change_case:english_lowercase": _lowercase,
    "change_case:english_capital": _uppercase,
    "startend:end_checker": _end,
    "detectable_content:postscript": _postscript,
    "combination:two_responses": _two_answers,
    "detectable_format:json_format": _json,
}
