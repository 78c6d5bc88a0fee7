"""Twenty experts whose labels are fields of the data: operations, sources, and ten topics of one form."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from experiments.python_texts import deal
from experiments.routing_smollm2.texts import Parts, normalised, question_of, read_skills, svamp, xquad
from experiments.study import shuffled
from experiments.token_routing.texts import RoutingQuestion

CLINC = ("cls/clinc150/domains.json", "cls/clinc150/data_full.json")
CLINC_PARTS = {"train": "train", "validation": "val", "test": "test"}
OPERATIONS = {"Addition": "addition", "Subtraction": "subtraction", "Multiplication": "multiplication"}
DIVISION = "division"  # the name of all other operations
TOPICS = (
    "banking",
    "credit_cards",
    "kitchen_and_dining",
    "home",
    "auto_and_commute",
    "travel",
    "utility",
    "work",
    "small_talk",
    "meta",
)


def read_fields(data: Path) -> dict[str, Parts]:
    """Read every question by expert and part.

    No first line, which is a question or a passage, is in two parts of an expert.
    """
    skills = read_skills(data)
    fields: dict[str, Parts] = {}
    for operation, questions in _by_operation(data).items():
        fields[f"math_{operation}"] = _cut(questions)
    science = skills["science"]
    fields["science_arc"] = _cut(science["train"] + science["test"])
    fields["science_openbook"] = _cut(science["validation"])
    code = skills["code"]
    fields["code_mbpp"] = _cut(code["train"] + code["test"])
    fields["code_algorithms"] = _cut(code["validation"])
    fields["reading_xquad"] = _by_article(data)
    fields["reading_qed"] = _cut(skills["reading"]["validation"])
    for topic, parts in _topics(data).items():
        fields[f"topic_{topic}"] = parts
    return fields


def _by_operation(data: Path) -> dict[str, list[RoutingQuestion]]:
    """Return the questions of SVAMP by operation."""
    pools: dict[str, list[RoutingQuestion]] = {name: [] for name in (*OPERATIONS.values(), DIVISION)}
    for operation, question in svamp(data):
        pools[OPERATIONS.get(operation, DIVISION)].append(question)
    return pools


def _by_article(data: Path) -> Parts:
    """Return the questions of XQuAD, with every article in one part."""
    articles = xquad(data)
    dealt = deal(list(articles), {"train": 3, "validation": 1, "test": 3})
    parts: Parts = {}
    for part, titles in dealt.items():
        parts[part] = [question for title in titles for question in articles[title]]
    return parts


def _cut(pool: Sequence[RoutingQuestion]) -> Parts:
    """Split questions: half for training, a tenth for validation, the rest for tests."""
    distinct = {}
    for question in pool:
        first_line = question.prompt.partition("\n")[0]
        distinct[normalised(first_line)] = question
    items = shuffled(list(distinct.values()), "fields")
    train_end = len(items) // 2
    validation_end = len(items) * 6 // 10
    return {
        "train": items[:train_end],
        "validation": items[train_end:validation_end],
        "test": items[validation_end:],
    }


def _topics(data: Path) -> dict[str, Parts]:
    """Return questions for the intent of a user's message, by topic; the choices are intents of the same topic."""
    intents_name, messages_name = CLINC
    intents = json.loads((data / intents_name).read_text(encoding="utf-8"))
    messages = json.loads((data / messages_name).read_text(encoding="utf-8"))
    topics: dict[str, Parts] = {}
    for topic in TOPICS:
        topics[topic] = {}
        for part, clinc_part in CLINC_PARTS.items():
            topics[topic][part] = [
                _intent(text, intent, intents[topic])
                for text, intent in messages[clinc_part]
                if intent in intents[topic]
            ]
    return topics


def _intent(text: str, intent: str, intents: Sequence[str]) -> RoutingQuestion:
    others = [other for other in intents if other != intent]
    wrong = random.Random(text).sample(others, 3)
    choices = tuple(f" {name.replace('_', ' ')}\n" for name in (intent, *wrong))
    return question_of(text, choices[0])._replace(choices=choices)
