"""Twenty experts whose labels are fields of the data: operations, sources, and ten topics of one form."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from experiments.routing_smollm2.texts import Parts, normalised, question_of, read_skills, svamp, xquad
from experiments.study import shuffled
from experiments.token_routing.texts import RoutingQuestion
from graftlm.demo.corpus import deal

CLINC = ("cls/clinc150/domains.json", "cls/clinc150/data_full.json")
CLINC_PARTS = {"train": "train", "validation": "val", "test": "test"}
OPERATIONS = {"Addition": "addition", "Subtraction": "subtraction", "Multiplication": "multiplication"}
TOPICS = ("banking", "credit_cards", "kitchen_and_dining", "home", "auto_and_commute")
TOPICS += ("travel", "utility", "work", "small_talk", "meta")


def read_fields(data: Path) -> dict[str, Parts]:
    """Every question by expert and part. No first line, a question or a passage, is in two parts of an expert."""
    skills, articles = read_skills(data), xquad(data)
    science, code = skills["science"], skills["code"]
    pools: dict[str, list[RoutingQuestion]] = {f"math_{name}": [] for name in (*OPERATIONS.values(), "division")}
    for operation, each in svamp(data):
        pools[f"math_{OPERATIONS.get(operation, 'division')}"].append(each)
    pools |= {"science_arc": science["train"] + science["test"], "science_openbook": science["validation"]}
    pools |= {"code_mbpp": code["train"] + code["test"], "code_algorithms": code["validation"]}
    dealt = deal(list(articles), {"train": 3, "validation": 1, "test": 3})
    by_article = {part: [each for title in titles for each in articles[title]] for part, titles in dealt.items()}
    by_expert = {name: _cut(pool) for name, pool in pools.items()} | {"reading_xquad": by_article}
    return by_expert | {"reading_qed": _cut(skills["reading"]["validation"])} | _topics(data)


def _cut(pool: Sequence[RoutingQuestion]) -> Parts:
    """Half for training, a tenth for validation."""
    distinct = {normalised(each.prompt.partition("\n")[0]): each for each in pool}
    items = shuffled(list(distinct.values()), "fields")
    half, more = len(items) // 2, len(items) * 6 // 10
    return {"train": items[:half], "validation": items[half:more], "test": items[more:]}


def _topics(data: Path) -> dict[str, Parts]:
    """The intent of what a user says, among four of its domain."""
    intents, parts = (json.loads((data / name).read_text(encoding="utf-8")) for name in CLINC)
    return {
        f"topic_{topic}": {
            part: [_intent(text, intent, intents[topic]) for text, intent in parts[of] if intent in intents[topic]]
            for part, of in CLINC_PARTS.items()
        }
        for topic in TOPICS
    }


def _intent(text: str, intent: str, intents: Sequence[str]) -> RoutingQuestion:
    others = random.Random(text).sample([other for other in intents if other != intent], 3)
    choices = tuple(f" {name.replace('_', ' ')}\n" for name in (intent, *others))
    return question_of(text, choices[0])._replace(choices=choices)
