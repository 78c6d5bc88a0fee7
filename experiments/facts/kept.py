"""Questions that have nothing to do with the taught facts: NQ-open, ARC-Easy as open questions, and IFEval.

Also the words of WikiText, which no invented name may be.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from experiments.facts.generator import Question
from experiments.facts.instructions import is_checkable

NATURAL_QUESTIONS = "eval/nq_open/dev.jsonl"
ARC_EASY = "routing/science/arc_easy/test.json"
IFEVAL = "eval/ifeval/input_data.jsonl"
WIKITEXT = "lm_text/wikitext2_valid_test/test.txt"
FILES = (NATURAL_QUESTIONS, ARC_EASY, IFEVAL, WIKITEXT)

_CHOICE = re.compile(r"Answer(\d): (.*?)(?= Answer\d: |\n)", re.DOTALL)
_REFERS_TO_CHOICES = re.compile(r"\b((which|what) of (these|the following|those)|best|most likely)\b", re.IGNORECASE)
_MAX_ANSWER_WORDS = 2
_MAX_QUESTION_WORDS = 25
_MAX_PROMPT_WORDS = 50
_SEED = 53


def known_words(data: Path) -> frozenset[str]:
    """Return the words of WikiText in lower case."""
    text = (data / WIKITEXT).read_text(encoding="utf-8").lower()
    return frozenset(re.findall(r"[a-z]+", text))


def far_questions(data: Path, count: int) -> list[Question]:
    """Return `count` questions, a third of them of NQ-open and the others of ARC-Easy, in a fixed random order.

    ARC-Easy's questions are asked without their choices. Those that refer to choices, and those whose answer is longer
    than two words, are left out.
    """
    natural = _chosen(_natural_questions(data / NATURAL_QUESTIONS), count // 3)
    science = _chosen(_science_questions(data / ARC_EASY), count - count // 3)
    return [*natural, *science]


def _chosen(questions: list[Question], count: int) -> list[Question]:
    return random.Random(_SEED).sample(questions, min(count, len(questions)))


def _natural_questions(path: Path) -> list[Question]:
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        text = f"{row['question'][0].upper()}{row['question'][1:]}?"
        question = Question(id=f"nq-{number}", ring="far", text=text, accepted=tuple(row["answer"]))
        questions.append(question)
    return questions


def _science_questions(path: Path) -> list[Question]:
    questions = []
    for number, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        text, choices, _ = row["instruction"].split("\n\n")
        text = text.removeprefix("Please choose the correct answer to the question: ")
        by_number = dict(_CHOICE.findall(f"{choices}\n"))
        answer = by_number[row["answer"].removeprefix("answer")].strip(" .")
        is_short = len(answer.split()) <= _MAX_ANSWER_WORDS and len(text.split()) <= _MAX_QUESTION_WORDS
        if not is_short or _REFERS_TO_CHOICES.search(text) or not text.endswith("?"):
            continue
        questions.append(Question(id=f"arc-{number}", ring="far", text=text, accepted=(answer,)))
    return questions


def instruction_prompts(data: Path, count: int) -> list[Question]:
    """Return `count` prompts of IFEval whose instructions can be checked here, in a fixed random order."""
    prompts = []
    for line in (data / IFEVAL).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kinds = row["instruction_id_list"]
        if is_checkable(kinds) and len(row["prompt"].split()) <= _MAX_PROMPT_WORDS:
            prompts.append(_prompt(row))
    return _chosen(prompts, count)


def _prompt(row: dict[str, Any]) -> Question:
    instructions = zip(row["instruction_id_list"], row["kwargs"], strict=True)
    return Question(
        id=f"ifeval-{row['key']}",
        ring="instructions",
        text=row["prompt"],
        instructions=tuple(instructions),
    )
