"""What a row learned and lost on each page, and its worst answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from experiments.facts.generator import Question
from experiments.facts.metrics import OPEN_RINGS, Answers, Items, is_right, is_unchanged
from experiments.facts.page_facts import PageFacts
from graftlm.evaluation import Metric, Row

SHOWN = ("generalization", "unchanged_colliding", "spill_colliding", "unchanged_shared", "spill_shared")


def rows_of_pages(facts: PageFacts, questions: Sequence[Question], items: Items, opening: Collection[str]) -> list[Row]:
    """Return a row for each page.

    Args:
        facts: the taught facts.
        questions: the questions that were asked.
        items: the judged answers.
        opening: ids of the questions on which the router opens.
    """
    rows = []
    for name, page in facts.pages.items():
        metrics: dict[str, Metric] = {}
        of_page = [question for question in questions if f"/{name}/" in question.id]
        unseen = [question.id in opening for question in of_page if question.ring == "unseen"]
        if unseen:
            metrics["opened"] = float(np.mean(unseen))
        for metric in SHOWN:
            of_metric = items.get(metric, {})
            values = [of_metric[question.id] for question in of_page if question.id in of_metric]
            if values:
                metrics[metric] = float(np.mean(values))
        rows.append(Row(id=f"page-{name}", label=str(page["title"]), metrics=metrics))
    return rows


def opened_shares(questions: Sequence[Question], opening: Collection[str]) -> dict[str, float]:
    """Return the share of questions on which the router opens, by ring."""
    by_ring: dict[str, list[bool]] = {}
    for question in questions:
        by_ring.setdefault(question.ring, []).append(question.id in opening)
    return {ring: float(np.mean(values)) for ring, values in by_ring.items()}


def worst_answers(questions: Sequence[Question], answers: Answers, bare: Answers) -> list[Mapping[str, str]]:
    """Return wrong answers about facts, and changed answers to questions that have a taught word."""
    worst = []
    for question in questions:
        answer = answers[question.id]
        if question.ring == "unseen":
            is_bad = not is_right(answer, question.accepted, question.rivals)
        elif question.ring in OPEN_RINGS:
            is_bad = not is_unchanged(answer, bare[question.id])
        else:
            is_bad = False
        if is_bad:
            worst.append(
                {
                    "id": question.id,
                    "question": question.text,
                    "bare": bare[question.id],
                    "answer": answer,
                }
            )
    return worst
