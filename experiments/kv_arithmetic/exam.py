"""The test expressions of every row, and the grading of answers.

m_A and the joint data are not trained on test expressions. m_B's stream does not exclude them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from pydantic import Field

from experiments.kv_arithmetic.data import COMPUTE, END, ArithmeticTask, Expression, Form, Pairs, World, tasks
from graftlm.config import Config
from graftlm.evaluation.examples import generate_answers

METRICS = (
    "subs_held_in",
    "subs_held_out",
    "num_math",
    "kv_math_held_in",
    "kv_math_held_out",
    "kv_math_direct_held_out",
)


class Exam(Config):
    """Numbers of different expressions.

    Args:
        expressions: of test expressions over keys held in, and over keys held out.
        validation: of expressions over keys held out, used only to choose settings.
    """

    expressions: int = Field(300, ge=1)
    validation: int = Field(200, ge=1)


@dataclass(frozen=True)
class Questions:
    """The test and validation tasks of one seed."""

    held_in: tuple[ArithmeticTask, ...]
    held_out: tuple[ArithmeticTask, ...]
    validation: tuple[ArithmeticTask, ...]

    def expressions(self) -> set[Expression]:
        """All expressions, over keys and over numbers."""
        all_tasks = (*self.held_in, *self.held_out, *self.validation)
        return {task.keys for task in all_tasks} | {task.numbers for task in all_tasks}


def make_exam(world: World, pairs: Pairs, exam: Exam, seed: int) -> Questions:
    """The questions of a seed."""
    source = random.Random(f"exam {seed}")
    held_in = _unique_tasks(world, pairs, pairs.held_in, source, exam.expressions)
    held_out = _unique_tasks(world, pairs, pairs.held_out, source, exam.expressions + exam.validation)
    return Questions(held_in, held_out[: exam.expressions], held_out[exam.expressions :])


def _unique_tasks(
    world: World, pairs: Pairs, keys: Sequence[str], source: random.Random, count: int
) -> tuple[ArithmeticTask, ...]:
    unique: dict[Expression, ArithmeticTask] = {}
    for task in islice(tasks(world, pairs, keys, source, unique), count):
        unique[task.keys] = task
    return tuple(unique.values())


def examine(model: Any, tokenizer: Any, questions: Questions) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Percentages by metric, and those of the arithmetic tests by operation or number of operands."""
    marks: dict[str, list[bool]] = {}
    for name, test_tasks in (("held_in", questions.held_in), ("held_out", questions.held_out)):
        answered = _answered(model, tokenizer, test_tasks, "scratchpad")
        marks[f"subs_{name}"] = [substituted(answer) == task.completion("substitution") for task, answer in answered]
        marks[f"kv_math_{name}"] = [COMPUTE in answer and result(answer) == task.result for task, answer in answered]
    alone: dict[str, Form] = {"num_math": "numeric", "kv_math_direct_held_out": "direct"}
    for name, form in alone.items():
        answered = _answered(model, tokenizer, questions.held_out, form)
        marks[name] = [answer == task.result for task, answer in answered]
    by_kind = {
        name: _by_kind(questions.held_out, marks[name])
        for name in METRICS
        if "math" in name and name != "kv_math_held_in"
    }
    return {name: percent(marks[name]) for name in METRICS}, by_kind


def validate(model: Any, tokenizer: Any, questions: Questions, form: Form = "scratchpad") -> float:
    """Percent of the validation expressions whose result is right."""
    answered = _answered(model, tokenizer, questions.validation, form)
    return percent([result(answer) == task.result for task, answer in answered])


def percent(marks: Sequence[bool]) -> float:
    """The share of True, out of 100."""
    return 100 * float(np.mean(marks))


def substituted(answer: str) -> str:
    """The substitution in an answer: the text before the result."""
    return answer.split(COMPUTE, 1)[0]


def result(answer: str) -> str:
    """The result in an answer: the text after the last equals sign, or the whole answer."""
    return answer.rsplit(COMPUTE, 1)[-1]


def _answered(
    model: Any, tokenizer: Any, test_tasks: Sequence[ArithmeticTask], form: Form
) -> list[tuple[ArithmeticTask, str]]:
    prompts = [task.prompt(form) for task in test_tasks]
    longest = max(len(task.completion(form)) for task in test_tasks) + len(END)
    answers = generate_answers(model, tokenizer, prompts, max_new_tokens=longest, stop=(END,), batch_size=256)
    return list(zip(test_tasks, answers, strict=True))


def _by_kind(test_tasks: Sequence[ArithmeticTask], marks: Sequence[bool]) -> dict[str, float]:
    """Percentages by operation, or by the number of operands where some have more than two."""
    of_two = all(len(task.keys.operands) == 2 for task in test_tasks)
    kinds = [task.keys.operations if of_two else f"{len(task.keys.operands)} operands" for task in test_tasks]
    return {
        kind: percent([mark for own, mark in zip(kinds, marks, strict=True) if own == kind])
        for kind in sorted(set(kinds))
    }
