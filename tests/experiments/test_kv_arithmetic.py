"""Key-value arithmetic at its smallest: what its data promise, what a quick run gives, and its errors."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import Options, kv_arithmetic, reproduce
from experiments.kv_arithmetic.data import ArithmeticTask, Pairs, World, make_pairs, make_tokenizer, tasks
from experiments.kv_arithmetic.run import QUICK, KvArithmeticStudy
from experiments.kv_arithmetic.runs import (
    METRICS,
    Exam,
    JointData,
    documents,
    joint_documents,
    make_batches,
    make_exam,
    result,
    substituted,
)
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results, value_of

ROWS = ["m_a", "m_b", "composition", "lora", "random_m_a"]
SEEDS = st.integers(0, 2**32 - 1)
WORLDS = st.builds(
    World,
    keys=st.integers(60, 90),
    largest=st.integers(40, 60),
    letters=st.sampled_from([2, 4]),
    whole=st.booleans(),
    operations=st.sampled_from(["+-*", "+-"]),
    held_in=st.sampled_from([0.2, 0.5]),
)


def study(seed: int = 0, **changes: object) -> KvArithmeticStudy:
    size = QUICK.model_copy(update=changes)
    return KvArithmeticStudy(Options(data=Path(), out=Path(), seeds=(seed,), quick=True), size)


@given(WORLDS, SEEDS)
def test_values_are_even_and_keys_are_held_in_or_out(world: World, seed: int) -> None:
    pairs = make_pairs(world, seed)
    counts = Counter(pairs.values.values())
    assert counts.keys() == set(range(1, world.largest + 1))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {len(key) for key in pairs.values} == {world.letters}
    assert sorted((*pairs.held_in, *pairs.held_out)) == sorted(pairs.values)
    within = {pairs.values[key] for key in pairs.held_in}
    outside = {pairs.values[key] for key in pairs.held_out}
    assert not within & outside
    assert len(within) == round(world.held_in * world.largest)
    assert make_pairs(world, seed) == pairs


@given(WORLDS, SEEDS)
def test_results_are_those_of_python(world: World, seed: int) -> None:
    pairs = make_pairs(world, seed)
    for task in islice(tasks(world, pairs, tuple(pairs.values), random.Random(seed)), 20):
        a = pairs.values[task.keys.first]
        b = pairs.values[task.keys.second]
        assert int(task.result[::-1]) == eval(f"{a}{task.keys.operation}{b}")
        for text, value in ((task.numbers.first, a), (task.numbers.second, b)):
            digits = text[1:] if world.whole else text[::-1]
            assert int(digits) == value
            assert int(world.spelled(text)[::-1]) == value
        assert task.keys.operation == task.numbers.operation
        scratchpad = task.completion("scratchpad")
        assert result(scratchpad) == task.result == task.completion("direct")
        assert substituted(scratchpad) == task.completion("substitution") == str(task.numbers)


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True), SEEDS)
def test_operands_are_as_likely_as_by_drawing_and_trying_again(values: list[int], seed: int) -> None:
    world = World(keys=60, largest=60, letters=2)
    pairs = Pairs({str(value): value for value in values}, (), ())
    allowed = {}
    for operation in "+-*":
        operands = [(a, b) for a in values for b in values if 1 <= eval(f"{a}{operation}{b}") <= world.largest]
        if operands:
            allowed[operation] = operands
    if not allowed:
        with pytest.raises(DataError):
            next(tasks(world, pairs, tuple(pairs.values), random.Random(seed)))
        return
    expected = 30
    drawn: Counter[tuple[str, tuple[int, int]]] = Counter()
    stream = tasks(world, pairs, tuple(pairs.values), random.Random(seed))
    for task in islice(stream, expected * sum(map(len, allowed.values()))):
        drawn[task.keys.operation, (int(task.keys.first), int(task.keys.second))] += 1
    for operation, operands in allowed.items():
        mean = sum(count for (own, _), count in drawn.items() if own == operation) / len(operands)
        squares = sum((drawn[operation, pair] - mean) ** 2 / mean for pair in operands)
        freedom = len(operands) - 1
        # Chi-square; eight deviations and eight more do not come up by chance.
        assert squares <= freedom + 8 * (2 * freedom) ** 0.5 + 8
    assert all(pair in allowed[operation] for operation, pair in drawn)


def values_in(text: str) -> set[tuple[int, str, int]]:
    """Return every numeric expression of a text, with the smaller operand first if the order does not matter."""
    values = set()
    for first, operation, second in re.findall(r"#(\d+)([-+*])[a-z]*#(\d+)", text):
        a = int(first)
        b = int(second)
        if operation != "-" and b < a:
            values.add((b, operation, a))
        else:
            values.add((a, operation, b))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_numeric_expression_of_a_test_is_trained_on_in_any_order(seed: int) -> None:
    real = KvArithmeticStudy(Options(data=Path(), out=Path(), seeds=(seed,)))
    run = real.row_run("composition", seed)
    questions = run.questions()[1]
    asked = [*questions.held_in, *questions.held_out, *questions.validation]
    tested = [number for task in asked for number in values_in(str(task.numbers))]
    assert len(set(tested)) == len(tested) == 600, "validation and tests share no expression either"
    streams = (
        (documents(real.parent("memory", seed)), 5_000),
        (documents(real.parent("arithmetic", seed)), 20_000),
        (joint_documents(run), 10_000),
    )
    seen: set[tuple[int, str, int]] = set()
    for stream, count in streams:
        for document in islice(stream, count):
            seen.update(values_in(document.full_text))
    assert len(seen) > 10_000
    assert not seen & set(tested)
    assert any(operation == "*" and a > 9 for a, operation, _ in seen)


@given(SEEDS, st.sampled_from(["arithmetic", "substitution", "mixture"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_joint_data_name_no_key_held_out_and_no_expression_that_is_tested(seed: int, task: str, direct: float) -> None:
    joint = JointData.model_validate({"task": task, "direct": direct})
    run = study(seed).row_run("composition", seed, joint=joint)
    pairs, questions = run.questions()
    asked = (*questions.held_in, *questions.held_out, *questions.validation)
    tested = {str(task.keys) for task in asked}
    tested_values = {value for task in asked for value in values_in(str(task.numbers))}
    for document in islice(joint_documents(run), 40):
        assert not any(key in document.full_text for key in pairs.held_out)
        assert document.prompt[:-1] not in tested
        assert not values_in(document.full_text) & tested_values


@given(SEEDS)
def test_parents_know_nothing_of_each_other(seed: int) -> None:
    memory = study(seed).parent("memory", seed)
    arithmetic = study(seed).parent("arithmetic", seed)
    pairs = make_pairs(memory.world, seed)
    for document in islice(documents(memory), 40):
        assert "=" not in document.full_text
    for document in islice(documents(arithmetic), 40):
        words = set(re.findall("[a-z]+", document.full_text))
        assert not words & pairs.values.keys()


@given(WORLDS, SEEDS)
def test_questions_are_all_different(world: World, seed: int) -> None:
    pairs = make_pairs(world, seed)
    asked = make_exam(world, pairs, Exam(expressions=4, held_in=4, validation=3), seed)

    def keys_of(part: Iterable[ArithmeticTask]) -> set[str]:
        return {key for task in part for key in (task.keys.first, task.keys.second)}

    assert not keys_of(asked.held_out) & keys_of(asked.validation)
    assert [len(asked.held_in), len(asked.held_out), len(asked.validation)] == [4, 4, 3]
    assert len({task.keys for task in (*asked.held_in, *asked.held_out, *asked.validation)}) == 11
    assert keys_of(asked.held_in) <= set(pairs.held_in)
    assert keys_of(asked.held_out) <= set(pairs.held_out)
    assert keys_of(asked.validation) <= set(pairs.held_out)


def test_too_few_expressions_are_an_error() -> None:
    world = World(keys=10, largest=10, operations="+")
    pairs = make_pairs(world, 0)
    key = next(key for key, value in pairs.values.items() if value == 10)
    with pytest.raises(DataError):
        next(tasks(world, pairs, [key], random.Random(0)))


def test_worlds_that_cannot_be() -> None:
    with pytest.raises(RecipeError) as error:
        World.parse({"letters": 2})
    assert "676" in str(error.value), "the number of names"


def test_a_character_is_a_token_and_every_example_stays_whole() -> None:
    parent = study().parent("arithmetic", 0)
    tokenizer = make_tokenizer(parent.world, make_pairs(parent.world, 0).values)
    read = list(islice(documents(parent), 30))
    for document in read:
        ids = tokenizer(document.full_text)["input_ids"]
        assert len(ids) == len(re.findall(r"#[0-9]+|[\s\S]", document.full_text))
        assert tokenizer.pad_token_id not in ids
        assert tokenizer.decode(ids) == document.full_text
    batch = make_batches(read, tokenizer, 4, 0).batch(0)
    assert batch.prompt is not None
    assert (batch.labels[batch.prompt] == -100).all()


@pytest.mark.slow
def test_every_row_in_the_one_form(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1)
    results = reproduce("kv-arithmetic", options)
    assert [row.id for row in results.rows] == [*ROWS[:2], "pipeline", "probability_mixture", *ROWS[2:]]
    for row in results.rows:
        assert list(row.metrics) == list(METRICS)
        assert all(0 <= value_of(value) <= 100 for value in row.metrics.values())
    details: dict[str, Any] = dict(results.details)
    costs = [details["costs"][row]["trainable_parameters"] for row in ROWS[2:]]
    assert max(costs) < 1.1 * min(costs)
    assert [aim.aim for aim in results.aims][:1] == [84.3]
    assert len(results.aims) == 10
    assert {row.id for row in results.paper} == {"m_a", "m_b", "composition"}
    assert (tmp_path / "out" / "accuracy.png").exists()
    assert "scratchpad" in (tmp_path / "out" / "report.md").read_text()

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("m*.json")}
    again = reproduce("kv-arithmetic", options)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what is finished is read back"
    assert again.rows == results.rows


def test_the_committed_results_are_of_this_form() -> None:
    results = Results.read(Path(kv_arithmetic.__file__).parent)
    assert [row.id for row in results.rows][:7] == [*ROWS[:2], "pipeline", "probability_mixture", *ROWS[2:]]
    assert results.seeds == [0, 1, 2]
    assert all(list(row.metrics) == list(METRICS) for row in results.rows[:7])


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        reproduce("kv-arithmetic", Options(data=tmp_path, out=tmp_path / "out", tables=("join",)))
    assert "'join'" in str(error.value)
