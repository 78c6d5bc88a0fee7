"""Judges answers: which are right, which name a taught thing unasked, and what a row kept of the bare model's answers.

The names of the metrics are those of the literature on knowledge editing (Meng et al., 2022, arXiv 2202.05262; Cohen et
al., 2023, arXiv 2307.12976).

    efficacy        right answers in trained phrasings
    generalization  right answers in phrasings that were held out
    portability     right answers to questions of two steps
    locality_near   of the bare model's right answers about real things, the share that stay right
    locality_far    the same, of questions that have nothing in common with the taught ones
    unchanged       answers of both sets that are word for word those of the bare model
    spill           answers of both sets that name a taught thing which the question and the bare answer don't name
    ifeval          prompts of which every instruction is followed

Of questions that have a taught word and ask for something that is not taught, on their own:

    unchanged_colliding, spill_colliding, locality_colliding    about what was taught
    unchanged_shared, spill_shared, locality_shared             about something else
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

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


def contains(text: str, phrase: str) -> bool:
    """Return whether a text contains a phrase as whole words, regardless of case.

    Thousands separators are ignored, so that 8848 is found in 8,848.
    """
    pattern = rf"(?<!\w){re.escape(_plain(phrase))}(?!\w)"
    return re.search(pattern, _plain(text)) is not None


def _plain(text: str) -> str:
    without_separators = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return " ".join(without_separators.casefold().split())


def is_right(answer: str, accepted: Collection[str], rivals: Collection[str] = ()) -> bool:
    """Return whether an answer contains an accepted answer and no rival.

    Args:
        answer: the answer.
        accepted: answers of which one must occur.
        rivals: taught values that must not occur.
    """
    has_accepted = any(contains(answer, phrase) for phrase in accepted)
    has_rival = any(contains(answer, rival) for rival in rivals)
    return has_accepted and not has_rival


def spills(answer: str, question: str, bare: str, names: Collection[str]) -> bool:
    """Return whether an answer names a taught thing that neither the question nor the bare model's answer names."""
    spilt = [name for name in names if contains(answer, name)]
    return any(not contains(question, name) and not contains(bare, name) for name in spilt)


def is_unchanged(answer: str, bare: str) -> bool:
    """Return whether two answers have the same words."""
    return answer.split() == bare.split()


def judge(questions: Sequence[Question], answers: Answers, bare: Answers, names: Collection[str]) -> Items:
    """Judge the answers of a row.

    Args:
        questions: the questions; those without an answer are left out.
        answers: the row's answers.
        bare: the bare model's answers.
        names: names of taught things.
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
