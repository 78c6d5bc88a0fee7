"""Judges answers: which are right, which name a taught thing unasked, and what a row kept of the bare model's answers.

The names of the metrics are those of the literature on knowledge editing (Meng et al., 2022, arXiv 2202.05262; Cohen et
al., 2023, arXiv 2307.12976).

    efficacy        right answers in trained phrasings
    generalization  right answers in phrasings that were held out
    portability     right answers to questions of two steps
    locality_near   of the bare model's right answers about real things, the share that stay right
    locality_far    the same, of questions that have nothing in common with the taught ones
    unchanged       answers of both sets that are word for word those of the bare model
    spill           answers of both sets that have an invented name which the question and the bare answer don't have
    ifeval          prompts of which every instruction is followed

Of questions that have a taught word and ask for something that is not taught, on their own:

    unchanged_colliding, spill_colliding, locality_colliding    about what was taught
    unchanged_shared, spill_shared, locality_shared             about something else
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from experiments.facts.generator import Question
from experiments.facts.instructions import follows

KEPT_RINGS = ("near", "far")
OPEN_RINGS = ("colliding", "shared")
METRIC_OF_RING = {
    "trained": "efficacy",
    "unseen": "generalization",
    "two-steps": "portability",
}
Answers = Mapping[str, str]
"""Answers by the id of their question."""

Items = dict[str, dict[str, float]]
"""For each metric, 1 or 0 for each item, by the id of its question."""


RULES = 2
"""Number of the rules by which answers are judged and questions are chosen; a change of either raises it."""

_FILLERS = r"(?:\s+(?:a|an|the|in|by|at|from|born|called|named))*"
_DENIED_BEFORE = re.compile(rf"(?<!\w)(?:not|\w+n't|never|no longer|neither|nor){_FILLERS}\s+$")
_DENIED_AFTER = re.compile(r"\s+(?:is|was|are|were)(?:n't|\s+(?:not|never|no longer))(?!\w)(?!\s+(?:only|just)\b)")
_OR_BEFORE = re.compile(r"^(.*\w)\s+or(?:\s+the)?\s+$")
_OR_AFTER = re.compile(r"^\s+or(?:\s+the)?\s+(\w.*)$")
_ENDING = r"(?:'s|es|s'?|')?"


def contains(text: str, phrase: str) -> bool:
    """Return whether a text contains a phrase as whole words, regardless of case.

    Thousands separators are ignored, so that 8848 is found in 8,848.
    """
    return any(True for _ in _occurrences(text, phrase))


def _occurrences(text: str, phrase: str) -> Iterator[tuple[str, str]]:
    """Yield what is before and after each occurrence of a phrase in a text, in the form of `_plain`."""
    plain = _plain(text)
    for match in re.finditer(rf"(?<!\w){re.escape(_plain(phrase))}(?!\w)", plain):
        yield plain[: match.start()], plain[match.end() :]


def _plain(text: str) -> str:
    without_separators = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return " ".join(without_separators.replace("’", "'").casefold().split())


def is_right(answer: str, accepted: Collection[str], rivals: Collection[str] = ()) -> bool:
    """Return whether an answer gives an accepted answer and contains no rival.

    An accepted answer does not count where it is denied ("It is not Paris.", "Paris is not the capital.") and, if it is
    a name or a number, where it is one of two sides of an "or" ("Paris or Rome"). Only the words directly beside it are
    read. `graftlm.evaluation.kept_answers` tells whether whole answers are negated, not what they deny.

    Args:
        answer: the answer.
        accepted: answers of which one must occur.
        rivals: taught values that must not occur.
    """
    if any(contains(answer, rival) for rival in rivals):
        return False
    for phrase in accepted:
        for before, after in _occurrences(answer, phrase):
            is_denied = _DENIED_BEFORE.search(before) or _DENIED_AFTER.match(after)
            if not is_denied and not (_is_single(phrase) and _is_hedged(before, after, accepted)):
                return True
    return False


def _is_single(phrase: str) -> bool:
    """Return whether a phrase is a name or a number, of which a question has one; many things have two colors."""
    return any(letter.isupper() or letter.isdigit() for letter in phrase)


def _is_hedged(before: str, after: str, accepted: Collection[str]) -> bool:
    """Return whether an "or" is beside an answer, with something on its other side that is not accepted."""
    plain = tuple(_plain(phrase) for phrase in accepted)
    left = _OR_BEFORE.match(before)
    right = _OR_AFTER.match(after)
    is_other_left = left is not None and not left.group(1).endswith(plain)
    is_other_right = right is not None and not right.group(1).startswith(plain)
    return is_other_left or is_other_right


def spills(answer: str, question: str, bare: str, names: Collection[str]) -> bool:
    """Return whether an answer has an invented name that neither the question nor the bare model's answer has.

    A name may have the ending of a plural or a possessive.

    Args:
        answer: the answer.
        question: the question.
        bare: the bare model's answer.
        names: the invented names.
    """
    spilt = [name for name in names if _names(answer, name)]
    return any(not _names(question, name) and not _names(bare, name) for name in spilt)


def _names(text: str, name: str) -> bool:
    pattern = rf"(?<!\w){re.escape(_plain(name))}{_ENDING}(?!\w)"
    return re.search(pattern, _plain(text)) is not None


def is_unchanged(answer: str, bare: str) -> bool:
    """Return whether two answers have the same words."""
    return answer.split() == bare.split()


def judge(questions: Sequence[Question], answers: Answers, bare: Answers, names: Collection[str]) -> Items:
    """Judge the answers of a row.

    Args:
        questions: the questions; those without an answer are left out.
        answers: the row's answers.
        bare: the bare model's answers.
        names: the invented names.
    """
    items: Items = {}
    for question in questions:
        if question.id not in answers:
            continue
        answer = answers[question.id]
        if question.ring == "instructions":
            judgements = {"ifeval": follows(answer, question)}
        elif question.ring in KEPT_RINGS:
            judgements = _judge_kept(question, answer, bare[question.id], names)
        elif question.ring in OPEN_RINGS:
            judgements = _judge_kept(question, answer, bare[question.id], names, suffix=f"_{question.ring}")
        else:
            metric = METRIC_OF_RING[question.ring]
            judgements = {metric: is_right(answer, question.accepted, question.rivals)}
        for metric, value in judgements.items():
            of_metric = items.setdefault(metric, {})
            of_metric[question.id] = float(value)
    return items


def _judge_kept(
    question: Question, answer: str, bare: str, names: Collection[str], suffix: str = ""
) -> dict[str, bool]:
    """Judge the answer to a question that does not ask for a taught fact."""
    judgements = {
        f"unchanged{suffix}": is_unchanged(answer, bare),
        f"spill{suffix}": spills(answer, question.text, bare, names),
    }
    if is_right(bare, question.accepted, question.rivals):
        judgements[f"locality_{question.ring}"] = is_right(answer, question.accepted, question.rivals)
    return judgements


def shares(items: Items) -> dict[str, float]:
    """Return the mean of each metric."""
    means = {}
    for metric, values in items.items():
        means[metric] = float(np.mean(list(values.values())))
    return means
