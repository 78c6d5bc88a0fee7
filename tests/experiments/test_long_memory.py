"""The long-memory experiment: its tasks, a quick run, and its errors."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import Options, long_memory, reproduce
from experiments.long_memory import run as long_memory_run
from experiments.long_memory.run import (
    CLOSE_ID,
    DIGIT_ID,
    FULL,
    OPERATIONS,
    PADDING_ID,
    QUICK,
    SHORT,
    MemoryTask,
    TaskExamples,
    accuracy,
    expressions,
    informed_guesses,
    make_examples,
    memory_run,
    rows_of,
    token_blocks,
)
from experiments.sequence_rows import CONTROLS, LABELS, LISTS, PEERS, ROWS, model_config, new_model, parameter_count
from graftlm.data import NEW, Mixture
from graftlm.errors import RecipeError
from graftlm.evaluation import Results, value_of

SEEDS = st.integers(0, 2**32 - 1)
ROWS_OF_RESULTS = ["random", *LABELS, *CONTROLS, *PEERS]


@given(SEEDS, st.sampled_from([(2, 4), (4, 4), (3, 8)]))
def test_recall_asks_for_every_pair_of_the_first_window_in_the_last(seed: int, sizes: tuple[int, int]) -> None:
    pairs, keys = sizes
    task = MemoryTask(name="recall", length=64, window=8, pairs=pairs, keys=keys)
    ids, answers = make_examples(task, 5, seed, "test")
    for row, is_answer in zip(ids, answers, strict=True):
        key_positions = [position for position in range(0, task.window, 2) if row[position] <= keys]
        value_of_key = {row[position]: row[position + 1] for position in key_positions}
        assert len(value_of_key) == pairs
        positions = np.flatnonzero(is_answer)
        assert positions.min() >= task.length - task.window
        assert {row[position - 1]: row[position] for position in positions} == value_of_key
        middle = row[task.window : task.length - 2 * pairs]
        assert (middle > keys + task.values).all(), "only noise is between question and answer"


def test_no_pair_of_a_test_is_in_training() -> None:
    """Every pair of a key and a value, in any text, and as many different ones as there may be."""
    task = MemoryTask(name="recall", length=64, window=16, pairs=8, keys=16, values=16)

    def pairs(split: str) -> set[tuple[int, int]]:
        ids, answers = make_examples(task, 800, 0, split)
        positions = np.argwhere(answers)
        return {(int(ids[row, at - 1]), int(ids[row, at])) for row, at in positions}

    trained = pairs("train-64")
    tested = pairs("test")
    assert not trained & tested
    assert (len(trained), len(tested)) == (16 * 14, 16 * 2)
    assert pairs("validation") == tested


def test_no_neighbours_of_a_tested_copy_are_in_training() -> None:
    task = MemoryTask(name="copy", length=64, window=8, pairs=4, values=16)

    def neighbours(split: str) -> set[tuple[int, int]]:
        ids, answers = make_examples(task, 800, 0, split)
        copied = ids[answers].reshape(len(ids), task.pairs).tolist()
        return {pair for values in copied for pair in itertools.pairwise(values)}

    trained = neighbours("train-64")
    tested = neighbours("test")
    assert not trained & tested
    assert (len(trained), len(tested)) == (16 * 14, 16 * 2)
    assert neighbours("validation") == tested


@given(SEEDS)
def test_copies_are_in_order(seed: int) -> None:
    task = MemoryTask(name="copy", length=64, window=8, pairs=3)
    ids, answers = make_examples(task, 5, seed, "test")
    for row, is_answer in zip(ids, answers, strict=True):
        before = row[: task.length // 2]
        values = before[(before > task.keys) & (before <= task.keys + task.values)]
        assert values.tolist() == row[is_answer].tolist()
        assert row[~is_answer][-1] == task.vocab_size - 1


@given(SEEDS)
def test_the_value_at_each_closing_bracket_is_that_of_python(seed: int) -> None:
    stream = expressions(np.random.default_rng(seed), 10, 120)
    functions = {
        "[MAX": max,
        "[MIN": min,
        "[MED": lambda values: int(np.median(values)),
        "[SM": lambda values: sum(values) % 10,
    }
    for _ in range(3):
        ids = next(stream)
        assert 10 <= len(ids) <= 120
        stack: list[list] = [[]]
        for token in ids:
            if token < DIGIT_ID:
                stack.append([tuple(OPERATIONS)[token - 1]])
            elif token < CLOSE_ID:
                stack[-1].append(token - DIGIT_ID)
            else:
                name, *values = stack.pop()
                stack[-1].append(functions[name](values))
                assert token - CLOSE_ID == stack[-1][-1]
        assert len(stack) == len(stack[0]) == 1, "the brackets match, and the whole is one list"


def test_guesses_use_the_outermost_operation() -> None:
    task = MemoryTask(name="listops", length=40, window=8, shortest=4)
    guesses = informed_guesses(task, 200, 0)
    assert 10 < guesses["the commonest result"] < guesses["that of the outermost operation"] < 60
    assert guesses["that of the outermost operation"] < guesses["that of its own digits"] < 95


def test_a_guess_of_its_own_digits_reads_no_nested_list() -> None:
    """[MAX 3 [MIN 9 9 ] 5 ] without the nested list is 5; one without digits of its own has no value."""
    names = list(OPERATIONS)
    maximum, minimum = 1 + names.index("[MAX"), 1 + names.index("[MIN")
    inner = [minimum, DIGIT_ID + 9, DIGIT_ID + 9, CLOSE_ID + 9]
    row = [maximum, DIGIT_ID + 3, *inner, DIGIT_ID + 5, CLOSE_ID + 9, PADDING_ID]
    assert long_memory_run._of_own_digits(np.array(row)) == (maximum, 5)
    assert long_memory_run._of_own_digits(np.array([maximum, *inner, CLOSE_ID + 9])) == (maximum, -1)


def test_splits_have_different_examples() -> None:
    task = MemoryTask(name="recall")
    splits = {split: make_examples(task, 20, 0, split).ids for split in ("train", "validation", "test")}
    assert not np.array_equal(splits["train"], splits["test"])
    assert not np.array_equal(splits["validation"], splits["test"])
    assert np.array_equal(make_examples(task, 20, 0, "test").ids, splits["test"])


@pytest.mark.slow
def test_no_expression_of_a_test_is_in_training() -> None:
    """Some of the last stages, which alone have texts of 500 tokens and more; only so many are drawn."""
    task = FULL.tasks["listops"]
    shorter_task = task.model_copy(update={"length": 512, "shortest": 128})
    shorter = make_examples(shorter_task, 160, 0, "train-512").ids
    longer = make_examples(task, 64, 0, "test").ids
    assert not {tuple(row[row > 0]) for row in shorter} & {tuple(row[row > 0]) for row in longer}
    trained = make_examples(task, 24, 0, f"train-{task.length}").ids.tolist()
    validated = make_examples(task, 24, 0, "validation").ids.tolist()
    tested = make_examples(task, 24, 0, "test").ids.tolist()
    assert len({tuple(row) for row in [*trained, *validated, *tested]}) == 3 * 24
    assert all(500 <= np.count_nonzero(row) < 2000 for row in [*validated, *tested])


@pytest.mark.parametrize(("name", "split"), [("listops", "train"), ("listops", "test"), ("listops_last", "train")])
def test_labels_stand_at_closing_brackets_alone(name: str, split: str) -> None:
    task = MemoryTask.parse({"name": name, "length": 64, "window": 8, "shortest": 10})
    examples = make_examples(task, 6, 0, split)
    batch = Mixture({NEW: token_blocks(examples)}, {NEW: 1.0}, 6, 0).batch(0)
    labels = batch.labels != -100
    closes = batch.input_ids >= CLOSE_ID
    closes_to_come = closes.flip(1).cumsum(1).flip(1)
    last = closes & (closes_to_come == 1)
    assert bool((closes.sum(1) > 1).any())
    assert torch.equal(labels, closes if (name, split) == ("listops", "train") else last)
    assert torch.equal(batch.labels[labels], batch.input_ids[labels])
    assert batch.attention_mask is not None
    assert torch.equal(batch.attention_mask.bool(), batch.input_ids != PADDING_ID)


def test_a_model_does_not_see_the_values_that_it_is_asked_for() -> None:
    """The value of a bracket changes no output, and the bracket itself does: it is read where it is answered."""
    run = memory_run(QUICK, "listops_bst_s4_causal", "listops", 0, 1e-3)
    examples = make_examples(run.task, 4, 0, "train")
    torch.manual_seed(0)
    model = new_model(run.model).eval()
    ids = torch.from_numpy(examples.ids)
    mask = (ids != PADDING_ID).long()

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask).logits

    expected = logits(ids)
    other_values = torch.where(ids >= CLOSE_ID, CLOSE_ID + 9 - (ids - CLOSE_ID), ids)
    assert torch.equal(logits(other_values), expected)
    changed = ids.clone()
    changed[:, 5] = torch.where(ids[:, 5] == DIGIT_ID, DIGIT_ID + 1, DIGIT_ID)
    different = (logits(changed) != expected)[..., CLOSE_ID:].any(-1)
    assert different[:, 4].all(), "logits of a bracket at position 5 stand at 4"
    assert not different[:, :4].any()


def test_accuracy_on_listops_is_of_the_last_bracket() -> None:
    """A model of the true values, shifted like `ListValues`, is right; one of another value is wrong."""
    ids, answers = make_examples(MemoryTask(name="listops", length=64, window=8, shortest=10), 8, 0, "test")
    assert accuracy(Oracle(ids, 0), TaskExamples(ids, answers), 4) == 100.0
    assert accuracy(Oracle(ids, 1), TaskExamples(ids, answers), 4) == 75.0
    assert answers.sum() == 8


class Oracle(torch.nn.Module):
    """A model that predicts every example correctly but the first `wrong` of a batch."""

    device = torch.device("cpu")

    def __init__(self, ids: np.ndarray, wrong: int) -> None:
        super().__init__()
        self.ids = torch.from_numpy(ids)
        self.wrong = wrong

    def forward(self, input_ids: torch.Tensor, **_: object) -> object:
        rows = torch.stack([self.ids[(self.ids == row).all(dim=1)][0] for row in input_ids])
        logits = torch.nn.functional.one_hot(rows.roll(-1, dims=1), 64).float()
        logits[: self.wrong] = 0
        return type("Output", (), {"logits": logits})


def test_accuracy_counts_answers() -> None:
    examples = make_examples(MemoryTask(name="recall"), 8, 0, "test")
    assert accuracy(Oracle(examples.ids, 0), examples, 4) == 100.0
    assert accuracy(Oracle(examples.ids, 1), examples, 4) == 75.0  # one row of each batch


@pytest.mark.slow
@pytest.mark.parametrize("task", FULL.tasks)
def test_rows_have_equal_size_and_one_difference(task: str) -> None:
    runs = [memory_run(FULL, row, task, 0, 1e-3) for row in rows_of(task)]
    expected = FULL.parameters_of.get(task, FULL.parameters)
    tolerance = 0.002 if task == "listops" else 0.02
    for run in runs:
        assert abs(parameter_count(run.model) / expected - 1) < tolerance
    runs = [run for row, run in zip(rows_of(task), runs, strict=True) if row not in PEERS]
    difference = {"intermediate_size", *(key for row in ROWS.values() for key in row)}
    shared_models = set()
    shared_fields = set()
    for run in runs:
        shared_models.add(str({key: value for key, value in run.model.items() if key not in difference}))
        same_name = run.task.model_copy(update={"name": FULL.tasks[task].name})
        renamed = run.model_copy(update={"task": same_name})
        shared_fields.add(str(renamed.model_dump(exclude={"id", "label", "model"})))
    assert len(shared_models) == 1
    assert len(shared_fields) == 1
    last = [run.id for run in runs if run.task.name == "listops_last"]
    assert last == (["listops-listops_bst_s4_last_lr0.001_s0"] if task == "listops" else [])


def test_the_thesis_model_has_four_block_state_layers_and_two_of_s4_on_top() -> None:
    run = memory_run(FULL, "listops_bst_s4", "listops", 0, 1e-3)
    layers = new_model(run.model).model.layers
    assert [type(layer.mixer).__name__ for layer in layers] == 4 * ["BlockStateMixer"] + 2 * ["GatedStateSpaceMixer"]
    assert all(layer.mixer.context.backward_ssm is not None for layer in layers[:4])
    assert all(layer.mixer.backward_ssm is not None for layer in layers[4:])


def test_a_row_with_too_many_parameters_is_refused() -> None:
    shape = QUICK.shape | {"vocab_size": 30, "window": 8}
    with pytest.raises(RecipeError) as error:
        model_config("slide", shape, 100)
    assert "slide" in str(error.value)


@pytest.mark.slow
def test_a_quick_run_has_every_row_and_is_cached(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1)
    results = reproduce("long-memory", options)
    assert [row.id for row in results.rows] == [*ROWS_OF_RESULTS, *LISTS]
    assert all({"recall64", "copy"} <= set(row.metrics) for row in results.rows if row.id in PEERS)
    for row in (row for row in results.rows if row.id not in PEERS):
        assert ("recall" in row.metrics) == (row.id not in LISTS)
        assert ("copy" in row.metrics) == (row.id in ("random", *SHORT))
        assert ("listops" in row.metrics) == (row.id in ("random", *LISTS))
        assert all(0 <= value_of(row.metrics[task]) <= 100 for task in QUICK.tasks if task in row.metrics)
    assert [aim.metric for aim in results.aims] == ["recall64", "recall64"]
    assert (tmp_path / "out" / "accuracy.png").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs" / "measurements").iterdir()}
    assert before
    assert reproduce("long-memory", options).rows == results.rows
    assert {path: path.stat().st_mtime_ns for path in before} == before, "finished runs are read from the cache"


@pytest.mark.slow
def test_a_single_task_can_be_run(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1, tables=("copy",))
    assert all("recall" not in row.metrics for row in reproduce("long-memory", options).rows)
    with pytest.raises(RecipeError) as error:
        reproduce("long-memory", options.model_copy(update={"tables": ("recal",)}))
    assert "'recal'" in str(error.value)


def test_the_committed_results_have_every_row() -> None:
    folder = Path(long_memory.__file__).parent
    results = Results.read(folder)
    measured = [row for row in (*ROWS_OF_RESULTS, *LISTS) if row != "listops_bst_s4_causal"]
    assert [row.id for row in results.rows] == measured, "one is not measured yet"
