"""The experiment on arithmetic over keys between two pretrained models."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from experiments import Options, reproduce
from experiments.keys_smollm2.keys import (
    KeySet,
    Question,
    Sum,
    World,
    all_sums,
    arithmetic_documents,
    joint_documents,
    memory_documents,
)
from experiments.keys_smollm2.rows import DECLARED, LABELS, MAJORITY, MIXTURE, SEARCH_SEED, SEEDS, TRAINED
from experiments.keys_smollm2.runs import is_right
from graftlm.evaluation import value_of

WORLD = World(keys=400)


@pytest.mark.parametrize(
    ("numbers", "operations", "text", "result"),
    [((7, 3, 5), ("+", "-"), "7+3-5", 5), ((9, 9, 9), ("+", "+"), "9+9+9", 27), ((3, 5, 4), ("-", "+"), "3-5+4", 2)],
)
def test_sums_are_computed_from_left_to_right(
    numbers: tuple[int, ...], operations: tuple[str, ...], text: str, result: int
) -> None:
    found = Sum(numbers, operations)
    assert found.over(found.numbers) == text
    assert found.result == result


def test_every_sum_is_in_one_part() -> None:
    parts = all_sums()
    sums = list(itertools.chain.from_iterable(parts.values()))
    expected = 0
    for a, b, c in itertools.product(range(1, 10), repeat=3):
        expected += sum(result >= 0 for result in (a + b + c, a + b - c, a - b + c, a - b - c))
    assert len(sums) == len(set(sums)) == expected
    assert min(each.result for each in sums) == 0


def test_keys_differ_and_values_are_equally_frequent() -> None:
    keys = KeySet(WORLD, 3)
    assert len(keys.values) == 400
    assert {len(key) for key in keys.values} == {2, 3, 4, 5, 6}
    counts = Counter(keys.values.values())
    assert set(counts) == set(range(1, 10))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_each_key_serves_one_purpose() -> None:
    keys = KeySet(WORLD, 3)
    searched = KeySet(WORLD, SEARCH_SEED, is_search=True)
    sets = [keys.held_in, keys.tested, keys.unseen, searched.held_in, searched.tested]
    together = list(itertools.chain.from_iterable(sets))
    assert len(together) == len(set(together)) == 400
    assert not searched.unseen
    assert {keys.values[key] for key in keys.unseen} == set(WORLD.unseen)
    for others in (*sets[:2], *sets[3:]):
        assert not {keys.values[key] for key in others} & set(WORLD.unseen)


def test_seeds_hold_in_other_keys_of_the_same_ones() -> None:
    first = KeySet(WORLD, 3)
    second = KeySet(WORLD, 4)
    assert first.values == second.values
    assert set(first.held_in) != set(second.held_in)
    assert {*first.held_in, *first.tested} == {*second.held_in, *second.tested}


def operands_of(expression: str) -> list[str]:
    return expression.replace("-", "+").split("+")


def test_the_joint_data_has_no_tested_key_and_no_tested_sum() -> None:
    keys = KeySet(WORLD, 3)
    sums = all_sums()
    searched = KeySet(WORLD, SEARCH_SEED, is_search=True)
    questions = itertools.chain(*keys.exam(sums, 100).values(), *searched.exam(sums, 100).values())
    tested = {question.sum for question in questions}
    documents = list(joint_documents(keys, sums["train"], 400))
    over_keys = 0
    for document in documents:
        prompt = document.prompt or ""
        operands = operands_of(prompt.rstrip("=>"))
        if operands[0].isdigit():
            numbers = tuple(int(operand) for operand in operands)
        else:
            over_keys += 1
            assert set(operands) <= set(keys.held_in)
            numbers = tuple(keys.values[operand] for operand in operands)
        found = Sum(numbers, tuple(character for character in prompt if character in "+-"))
        assert found not in tested
        assert document.text.rstrip("\n").split("=")[-1] == str(found.result)
    assert over_keys == 300


def test_m_b_reads_no_tested_sum() -> None:
    parts = all_sums()
    read = {document.full_text for document in arithmetic_documents(parts["train"], 2)}
    assert len(read) == len(parts["train"])
    tested = {Question("", (), each).document("numeric").full_text for each in (*parts["test"], *parts["validation"])}
    assert not read & tested


def test_questions_hold_out_keys_or_values() -> None:
    keys = KeySet(WORLD, 3)
    exam = keys.exam(all_sums(), 100)
    for question in exam["keys"]:
        assert set(question.keys) <= set(keys.tested)
    for question in exam["values"]:
        assert set(question.keys) <= {*keys.tested, *keys.unseen}
        assert set(question.keys) & set(keys.unseen)
    for question in itertools.chain.from_iterable(exam.values()):
        assert question.sum.numbers == tuple(keys.values[key] for key in question.keys)


def test_every_pass_teaches_every_key_alone_and_in_a_substitution() -> None:
    keys = KeySet(World(keys=300), 3)
    alone: Counter[str] = Counter()
    together: Counter[str] = Counter()
    for document in memory_documents(keys, 2):
        prompt = document.prompt or ""
        operands = operands_of(prompt.rstrip(">"))
        values = operands_of(document.text.rstrip("\n"))
        assert [str(keys.values[operand]) for operand in operands] == values
        (together if prompt.endswith(">") else alone).update(operands)
    assert alone == dict.fromkeys(keys.values, 2)
    assert together == dict.fromkeys(keys.values, 2)


@pytest.mark.parametrize(
    ("form", "answer", "right"),
    [
        ("direct", "5", 1.0),
        ("direct", "15", 0.0),
        ("direct", "", 0.0),
        ("numeric", " 5", 1.0),
        ("scratchpad", "7+3-5=5", 1.0),
        ("scratchpad", "7+3-4=5", 1.0),
        ("scratchpad", "7+3-5=6", 0.0),
        ("substitution", "7+3-5", 1.0),
        ("substitution", "7+3-4", 0.0),
    ],
)
def test_an_answer_is_right_if_its_result_is(form: Any, answer: str, right: float) -> None:
    question = Question("keys-0", ("kavo", "be", "ruti"), Sum((7, 3, 5), ("+", "-")))
    assert is_right(question, form, answer) == right


def test_comparisons_are_of_rows_that_are_measured() -> None:
    for comparison in DECLARED:
        assert {comparison.row, comparison.rival} <= LABELS.keys()
    assert SEARCH_SEED not in SEEDS


@pytest.mark.slow
def test_every_row_is_measured(tmp_path: Path, tiny_chat_model: Path) -> None:
    out = tmp_path / "out"
    options = Options(data=tmp_path, out=out, quick=True, jobs=1, backbone=str(tiny_chat_model))
    results = reproduce("keys-smollm2", options)
    assert {row.id for row in results.rows} == set(LABELS)
    assert results.seeds == [SEEDS[0]]
    for name in (*TRAINED, MIXTURE):
        assert {"direct_keys", "direct_values", "scratchpad_keys", "sums"} <= results.row(name).metrics.keys()
    assert 0 <= value_of(results.row(MAJORITY).metrics["direct_keys"]) <= 100
    comparisons: Any = results.details["comparisons"]
    assert [each["name"] for each in comparisons] == [comparison.name for comparison in DECLARED]
    assert not any(each["decided"] for each in comparisons)
    assert json.loads((out / "results.json").read_text(encoding="utf-8"))["name"] == "keys-smollm2"
