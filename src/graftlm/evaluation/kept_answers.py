"""Which answers of a chat model stayed the same, and which name things of the new text unasked.

Word for word, a tuned model repeats few answers of its base. Two answers are the same here if they give the same
information in their first 40 words. Their terms are their words without function words and without words of the
question. Two answers are the same if

- they have the same words, or
- they share at least half of the terms of the one that has fewer, neither numbers nor names contradict each other,
  they don't choose different sides of an "or" in the question, and of short answers either both or neither are negated.

Numbers or names of short answers contradict each other if each answer has one that the other lacks, those of long
answers if none is in both. The rule reads words only: it takes "hot" and "warm" for different answers, an answer with
an addition ("glass", "glass kites") for the same, and two long answers about the same things for the same.
`tests/evaluation/answer_pairs.jsonl` has pairs labelled by hand, by which the rule was made, and
`held_out_answer_pairs.jsonl` pairs that were labelled afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from graftlm.evaluation.intervals import share_interval
from graftlm.evaluation.results import Interval, Results

if TYPE_CHECKING:
    from graftlm.data.new_names import NewNames

WORST = 10
"""Number of answers that reports show."""

_READ_WORDS = 40
_SHORT_WORDS = 15
_SHARED_TERMS = 0.5
_WORD = re.compile(r"\w+(?:'\w+)?")
_SENTENCE_END = re.compile(r"[.!?:]\W*$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_NEGATIONS = frozenset(["no", "not", "never", "none", "nothing", "neither", "cannot", "without"])
FUNCTION_WORDS = frozenset(
    _WORD.findall(
        """
        a an the this that these those it its he she they them his her their there here i you we my your our me us
        is are was were be been being am do does did has have had having will would can could may might must shall
        should of to in on at by for with from as into about than then and or but so if because which who whom whose
        what when where how why also very just only such some any each all both more most other one called known
        named s re ve ll d m sure certainly answer yes
        """
    )
)


@dataclass(frozen=True)
class AnswerPair:
    """The answers of two models to one question.

    Attributes:
        question: the question.
        before: the base's answer.
        after: the tuned model's answer.
        kept: whether they are the same by the rule of this module.
        overlap: share of common terms, from 0 to 1.
        spilled: names and numbers of the new text in `after` that neither the question nor `before` has.
        asks_new: whether the question has a name of the new text, so that a changed answer may be right.
    """

    question: str
    before: str
    after: str
    kept: bool
    overlap: float
    spilled: tuple[str, ...] = ()
    asks_new: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the pair as plain JSON values."""
        return {**asdict(self), "spilled": list(self.spilled)}


def same_answer(question: str, before: str, after: str) -> bool:
    """Return whether two answers to a question give the same information, by the rule of this module."""
    if _words(before) == _words(after):
        return True
    if term_overlap(question, before, after) < _SHARED_TERMS:
        return False
    is_short = min(len(_words(before)), len(_words(after))) <= _SHORT_WORDS
    for kind in (_numbers, _names):
        if _contradict(kind, question, before, after, is_short=is_short):
            return False
    if _choose_differently(question, before, after):
        return False
    return not is_short or is_negated(before) == is_negated(after)


def term_overlap(question: str, before: str, after: str) -> float:
    """Return the share of the terms of the answer with fewer terms that the other one has too, from 0 to 1.

    Negations, which are compared separately, are not terms. Words of the question count if an answer has no others.
    """
    asked = _terms(question)
    before_terms = _terms(before) - asked
    after_terms = _terms(after) - asked
    if not before_terms or not after_terms:
        before_terms = _terms(before)
        after_terms = _terms(after)
    fewer = min(len(before_terms), len(after_terms))
    if fewer == 0:
        # Answers such as "Yes." and "It is." have no terms.
        have_none = not before_terms and not after_terms and bool(_words(before)) and bool(_words(after))
        return float(have_none)
    return len(before_terms & after_terms) / fewer


def compare_answers(
    questions: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    names: NewNames | None = None,
) -> list[AnswerPair]:
    """Compare the answers of two models to the same questions.

    Args:
        questions: the texts of the questions.
        before: the base's answer to each question.
        after: the tuned model's answer to each question.
        names: finds the names of the new text; None if that is not known, and no names count as spilled.

    Returns:
        One pair for each question, in order.
    """
    pairs = []
    for question, base_answer, tuned_answer in zip(questions, before, after, strict=True):
        spilled: tuple[str, ...] = ()
        asked = set() if names is None else names.names_in(question)
        if names is not None:
            known = asked | names.names_in(base_answer)
            spilled = tuple(sorted(" ".join(name) for name in names.names_in(tuned_answer) - known))
        pair = AnswerPair(
            question=question,
            before=base_answer,
            after=tuned_answer,
            kept=same_answer(question, base_answer, tuned_answer),
            overlap=term_overlap(question, base_answer, tuned_answer),
            spilled=spilled,
            asks_new=bool(asked),
        )
        pairs.append(pair)
    return pairs


def answer_metrics(pairs: Sequence[AnswerPair], *, with_spill: bool) -> dict[str, Interval]:
    """Return `kept_answers` and, where the new text is known, `spill`: shares of answers with Wilson's 95% interval.

    Questions that have a name of the new text do not count.

    Args:
        pairs: the answers.
        with_spill: whether the names of the new text were known.

    Returns:
        The shares; nothing if no question counts.
    """
    other = [pair for pair in pairs if not pair.asks_new]
    if not other:
        return {}
    metrics = {"kept_answers": share_interval(sum(pair.kept for pair in other), len(other))}
    if with_spill:
        metrics["spill"] = share_interval(sum(bool(pair.spilled) for pair in other), len(other))
    return metrics


def questions_about_new(pairs: Sequence[AnswerPair]) -> list[str]:
    """Return the questions that have a name of the new text, which do not count in `answer_metrics`."""
    return [pair.question for pair in pairs if pair.asks_new]


def worst_answers(pairs: Sequence[AnswerPair], count: int = WORST) -> list[AnswerPair]:
    """Return the answers that changed most: first those that spill, then those with the least overlap.

    Answers to questions that have a name of the new text are left out.

    Args:
        pairs: the compared answers.
        count: maximum number of answers.
    """
    changed = [pair for pair in pairs if not pair.asks_new and (pair.spilled or not pair.kept)]
    changed.sort(key=lambda pair: (not pair.spilled, pair.kept, pair.overlap))
    return changed[:count]


def reported_answers(results: Results, row_id: str) -> list[AnswerPair]:
    """Return the answers that the results of a run report for a row; none if it was not asked questions."""
    by_row = cast("Mapping[str, list[dict[str, Any]]]", results.details.get("answers") or {})
    return [AnswerPair(**pair) for pair in by_row.get(row_id, [])]


def _tokens(text: str) -> list[tuple[str, bool]]:
    """Return the first words of a text, and whether each may be capitalized because it begins a sentence."""
    text = _THOUSANDS.sub("", text).replace("’", "'")
    tokens = []
    stop = 0
    for match in _WORD.finditer(text):
        between = text[stop : match.start()]
        begins = stop == 0 or "\n" in between or _SENTENCE_END.search(between) is not None
        tokens.append((match.group(), begins))
        stop = match.end()
        if len(tokens) == _READ_WORDS:
            break
    return tokens


def _words(text: str) -> list[str]:
    return [word.casefold() for word, _ in _tokens(text)]


def _terms(text: str) -> set[str]:
    terms = set()
    for word in _words(text):
        word = word.removesuffix("'s")
        if word not in FUNCTION_WORDS and not _is_negation(word):
            terms.add(_singular(word))
    return terms


def _singular(word: str) -> str:
    """Return a word without the ending of a plural, if it may have one."""
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def _numbers(text: str) -> set[str]:
    return {word for word in _words(text) if any(character.isdigit() for character in word)}


def _names(text: str) -> set[str]:
    """Return the capitalized words inside sentences, in lower case."""
    names = set()
    for word, begins in _tokens(text):
        if not begins and word[0].isupper() and len(word) > 1:
            names.add(word.casefold().removesuffix("'s"))
    return names


def _contradict(kind: Callable[[str], set[str]], question: str, before: str, after: str, *, is_short: bool) -> bool:
    """Return whether the numbers or names of two answers that the question does not have contradict each other."""
    asked = set(_words(question))
    before_kind = kind(before) - asked
    after_kind = kind(after) - asked
    if is_short:
        only_before = before_kind.difference(_words(after))
        only_after = after_kind.difference(_words(before))
        return bool(only_before) and bool(only_after)
    return bool(before_kind) and bool(after_kind) and not before_kind & after_kind


def _choose_differently(question: str, before: str, after: str) -> bool:
    """Return whether a question has an "or", and each answer has only one of the words next to it, but not the same."""
    words = [word for word in _words(question) if word == "or" or word not in FUNCTION_WORDS]
    before_words = set(_words(before))
    after_words = set(_words(after))
    for left, middle, right in zip(words, words[1:], words[2:], strict=False):
        chosen_before = {left, right} & before_words
        chosen_after = {left, right} & after_words
        if middle == "or" and len(chosen_before) == len(chosen_after) == 1 and chosen_before != chosen_after:
            return True
    return False


def is_negated(text: str) -> bool:
    """Return whether one of the first words of a text is a negation."""
    return any(_is_negation(word) for word in _words(text))


def _is_negation(word: str) -> bool:
    return word in _NEGATIONS or word.endswith("n't")
