"""Key-value arithmetic at its smallest: what its data promise, what a quick run gives, and its errors."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import Options, kv_arithmetic, reproduce
from experiments.kv_arithmetic.data import Operands, World, compute, make_pairs, make_tokenizer, tasks
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

ROWS = ["m_a", "m_b", "composition", "lora", "random_m_a", "encoder_m_a"]
SEEDS = st.integers(0, 2**32 - 1)
WORLDS = st.builds(
    World,
    keys=st.integers(40, 60),
    letters=st.sampled_from([(2, 2), (4, 4), (2, 4)]),
    ones_first=st.booleans(),
    operands=st.sampled_from([(2, 2), (2, 3)]),
    operations=st.sampled_from(["+-*", "+-"]),
    held_in=st.sampled_from([0.2, 0.5]),
)


def study(seed: int = 0, **changes: object) -> KvArithmeticStudy:
    size = QUICK.model_copy(update=changes)
    return KvArithmeticStudy(Options(data=Path(), out=Path(), seeds=(seed,), quick=True), size)


def number(world: World, text: str) -> int:
    assert len(text) == world.digits
    return int(text[::-1] if world.ones_first else text)


@given(WORLDS, SEEDS)
def test_values_are_unique_and_keys_are_held_in_or_out(world: World, seed: int) -> None:
    pairs = make_pairs(world, seed)
    assert sorted(pairs.values.values()) == list(range(1, world.keys + 1))
    fewest, most = world.letters
    assert all(fewest <= len(key) <= most for key in pairs.values)
    assert sorted((*pairs.held_in, *pairs.held_out)) == sorted(pairs.values)
    assert len(pairs.held_in) == round(world.held_in * world.keys)
    assert make_pairs(world, seed) == pairs


@given(WORLDS, SEEDS)
def test_results_are_those_of_python(world: World, seed: int) -> None:
    pairs = make_pairs(world, seed)
    for task in islice(tasks(world, pairs, tuple(pairs.values), random.Random(seed)), 20):
        values = [pairs.values[key] for key in task.keys.operands]
        python = str(values[0]) + "".join(o + str(v) for o, v in zip(task.keys.operations, values[1:], strict=True))
        assert number(world, task.result) == eval(python)
        assert [number(world, one) for one in task.numbers.operands] == values
        assert task.keys.operations == task.numbers.operations
        assert result(task.completion("scratchpad")) == task.result == task.completion("direct")
        assert substituted(task.completion("scratchpad")) == task.completion("substitution") == str(task.numbers)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.data())
def test_products_come_first_and_every_number_on_the_way_is_given(values: list[int], data: st.DataObject) -> None:
    operations = "".join(data.draw(st.sampled_from("+-*")) for _ in values[1:])
    python = str(values[0]) + "".join(o + str(v) for o, v in zip(operations, values[1:], strict=True))
    found = compute(values, operations)
    assert len(found) == len(operations)
    assert (found or values)[-1] == eval(python)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.sampled_from(["*", "+", "-", "**", "*+", "-*", "+-", "+-*", "***"]),
    SEEDS,
)
def test_operands_are_as_likely_as_by_drawing_and_trying_again(values: list[int], operations: str, seed: int) -> None:
    largest = 12
    allowed = [
        places
        for places in product(range(len(values)), repeat=len(operations) + 1)
        if all(1 <= n <= largest for n in compute([values[place] for place in places], operations))
    ]
    operands = Operands(values, largest, seed)
    if not allowed:
        assert operands.draw(operations) is None
        return
    expected = 30
    drawn = Counter(tuple(operands.draw(operations) or ()) for _ in range(expected * len(allowed)))
    assert drawn.keys() <= set(allowed)
    squares = sum((drawn[places] - expected) ** 2 / expected for places in allowed)
    freedom = len(allowed) - 1
    # Chi-square; eight deviations and eight more do not come up by chance.
    assert squares <= freedom + 8 * (2 * freedom) ** 0.5 + 8


def test_products_of_25000_keys_come_up_and_stay_in_range() -> None:
    world = World(keys=25_000, letters=(2, 6), operands=(3, 6))
    pairs = make_pairs(world, 0)
    for keys in (pairs.held_in, pairs.held_out):
        drawn = list(islice(tasks(world, pairs, keys, random.Random(0)), 2000))
        for task in drawn:
            found = compute([pairs.values[key] for key in task.keys.operands], task.keys.operations)
            assert all(1 <= number <= world.keys for number in found)
        assert {len(task.keys.operands) for task in drawn} == {3, 4, 5, 6}
        counts = Counter("".join(task.keys.operations for task in drawn))
        assert all(0.3 < counts[operation] / counts.total() < 0.37 for operation in "+-*")


@given(SEEDS, st.sampled_from(["arithmetic", "substitution", "mixture"]), st.sampled_from(["scratchpad", "direct"]))
def test_joint_data_name_no_key_held_out_and_no_expression_that_is_tested(seed: int, task: str, form: str) -> None:
    joint = JointData.model_validate({"task": task, "form": form})
    run = study(seed).row_run("composition", seed, joint=joint)
    pairs, questions = run.questions()
    tested = {str(expression) for expression in questions.expressions()}
    for document in islice(joint_documents(run), 40):
        assert not any(key in document.full_text for key in pairs.held_out)
        assert document.prompt[:-1] not in tested
        assert substituted(document.text).strip() not in tested


@given(SEEDS)
def test_parents_know_nothing_of_each_other(seed: int) -> None:
    memory, arithmetic = (study(seed).parent(role, seed) for role in ("memory", "arithmetic"))
    pairs = make_pairs(memory.world, seed)
    tested = {str(one) for one in make_exam(memory.world, pairs, memory.exam, seed).expressions()}
    for document in islice(documents(memory), 40):
        assert "=" not in document.full_text
        assert document.prompt[:-1] not in tested
    for document in islice(documents(arithmetic), 40):
        words = set(re.findall("[a-z]+", document.full_text))
        assert not words & pairs.values.keys()


@given(WORLDS, SEEDS)
def test_questions_are_all_different(world: World, seed: int) -> None:
    pairs = make_pairs(world, seed)
    asked = make_exam(world, pairs, Exam(expressions=4, validation=3), seed)
    assert [len(asked.held_in), len(asked.held_out), len(asked.validation)] == [4, 4, 3]
    assert len({task.keys for task in (*asked.held_in, *asked.held_out, *asked.validation)}) == 11
    assert {key for task in asked.held_in for key in task.keys.operands} <= set(pairs.held_in)
    outside = {key for task in (*asked.held_out, *asked.validation) for key in task.keys.operands}
    assert outside <= set(pairs.held_out)


def test_too_few_expressions_are_an_error() -> None:
    world = World(keys=10, operations="+")
    pairs = make_pairs(world, 0)
    key = next(key for key, value in pairs.values.items() if value == 10)
    with pytest.raises(DataError, match="1 keys allow too few expressions: use more keys, or fewer tasks"):
        next(tasks(world, pairs, [key], random.Random(0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"letters": (4, 2)}, "letters are 4 to 2: give the fewest, at least 1, before the most"),
        ({"operands": (1, 2)}, "operands are 1 to 2: give the fewest, at least 2, before the most"),
        ({"letters": (1, 2)}, "500 keys take 1000 names, and there are 702: allow more letters"),
    ],
)
def test_worlds_that_cannot_be(changes: dict[str, tuple[int, int]], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        World.parse(changes)


def test_a_character_is_a_token_and_every_example_stays_whole() -> None:
    tokenizer = make_tokenizer()
    parent = study().parent("arithmetic", 0)
    read = list(islice(documents(parent), 30))
    for document in read:
        ids = tokenizer(document.full_text)["input_ids"]
        assert len(ids) == len(document.full_text)
        assert tokenizer.pad_token_id not in ids
        assert tokenizer.decode(ids) == document.full_text
    batch = make_batches(read, tokenizer, 4, 0).batch(0)
    assert batch.prompt is not None
    assert (batch.labels[batch.prompt] == -100).all()


@pytest.mark.exhaustive
def test_every_row_in_the_one_form(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1)
    results = reproduce("kv-arithmetic", options)
    assert [row.id for row in results.rows][:6] == ROWS
    assert {"norm-none", "init-paper", "positions-none"} <= {row.id for row in results.rows}
    for row in results.rows:
        assert list(row.metrics) == list(METRICS)
        assert all(0 <= value_of(value) <= 100 for value in row.metrics.values())
    details: dict[str, Any] = dict(results.details)
    costs = [details["costs"][row]["trainable_parameters"] for row in ROWS[2:]]
    assert max(costs) < 1.1 * min(costs)
    assert [aim.aim for aim in results.aims] == [84.3, 5.0, 5.0, 10.0, 10.0]
    assert {row.id for row in results.paper} == {"m_a", "m_b", "composition"}
    assert (tmp_path / "out" / "accuracy.png").exists()
    assert "scratchpad" in (tmp_path / "out" / "report.md").read_text()

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("m*.json")}
    again = reproduce("kv-arithmetic", options)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what is finished is read back"
    assert again.rows == results.rows


def test_the_committed_results_are_of_this_form() -> None:
    results = Results.read(Path(kv_arithmetic.__file__).parent)
    assert [row.id for row in results.rows][:6] == ROWS
    assert results.seeds == [0, 1, 2]
    assert all(list(row.metrics) == list(METRICS) for row in results.rows[:6])


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"There is no table 'larg' in this experiment \(did you mean large\?\)"):
        reproduce("kv-arithmetic", Options(data=tmp_path, out=tmp_path / "out", tables=("larg",)))
