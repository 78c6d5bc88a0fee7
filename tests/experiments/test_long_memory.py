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
from experiments.long_memory.run import (
    CLOSE_ID,
    DIGIT_ID,
    FULL,
    OPERATIONS,
    PADDING_ID,
    QUICK,
    SHORT,
    MemoryTask,
    accuracy,
    expressions,
    informed_guesses,
    make_examples,
    memory_run,
    rows_of,
    token_blocks,
)
from experiments.sequence_rows import CONTROLS, LABELS, PEERS, ROWS, model_config, parameter_count
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

    trained, tested = pairs("train-64"), pairs("test")
    assert not trained & tested
    assert (len(trained), len(tested)) == (16 * 14, 16 * 2)
    assert pairs("validation") == tested


def test_no_neighbours_of_a_tested_copy_are_in_training() -> None:
    task = MemoryTask(name="copy", length=64, window=8, pairs=4, values=16)

    def neighbours(split: str) -> set[tuple[int, int]]:
        ids, answers = make_examples(task, 800, 0, split)
        copied = ids[answers].reshape(len(ids), task.pairs).tolist()
        return {pair for values in copied for pair in itertools.pairwise(values)}

    trained, tested = neighbours("train-64"), neighbours("test")
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
def test_listops_results_are_those_of_python(seed: int) -> None:
    stream = expressions(np.random.default_rng(seed), 10, 120)
    functions = {"[MAX": max, "[MIN": min, "[MED": lambda v: int(np.median(v)), "[SM": lambda v: sum(v) % 10}
    for _ in range(3):
        ids, result = next(stream)
        assert 10 <= len(ids) <= 120
        stack: list[list] = [[]]
        for token in ids:
            if token < CLOSE_ID:
                stack.append([tuple(OPERATIONS)[token - 1]])
            elif token == CLOSE_ID:
                name, *values = stack.pop()
                stack[-1].append(functions[name](values))
            else:
                stack[-1].append(token - DIGIT_ID)
        assert stack == [[result]]


def test_guesses_use_the_outermost_operation() -> None:
    task = MemoryTask(name="listops", length=40, window=8, shortest=4)
    guesses = informed_guesses(task, 200, 0)
    assert 10 < guesses["the commonest result"] < guesses["that of the outermost operation"] < 60


def test_splits_have_different_examples() -> None:
    task = MemoryTask(name="recall")
    splits = {split: make_examples(task, 20, 0, split).ids for split in ("train", "validation", "test")}
    assert not np.array_equal(splits["train"], splits["test"])
    assert not np.array_equal(splits["validation"], splits["test"])
    assert np.array_equal(make_examples(task, 20, 0, "test").ids, splits["test"])


def test_only_answers_are_labels() -> None:
    examples = make_examples(MemoryTask(name="listops", length=64, window=8, shortest=10), 6, 0, "train")
    batch = Mixture({NEW: token_blocks(examples)}, {NEW: 1.0}, 6, 0).batch(0)
    assert ((batch.labels != -100).sum(dim=1) == 1).all()
    assert batch.attention_mask is not None
    assert torch.equal(batch.attention_mask.bool(), batch.input_ids != PADDING_ID)
    assert sorted(batch.labels[batch.labels != -100].tolist()) == sorted(examples.ids[examples.answers].tolist())


class Oracle(torch.nn.Module):
    """A model that predicts every example correctly but the first `wrong` of a batch."""

    device = torch.device("cpu")

    def __init__(self, ids: np.ndarray, wrong: int) -> None:
        super().__init__()
        self.ids, self.wrong = torch.from_numpy(ids), wrong

    def forward(self, input_ids: torch.Tensor, **_: object) -> object:
        rows = torch.stack([self.ids[(self.ids == row).all(dim=1)][0] for row in input_ids])
        logits = torch.nn.functional.one_hot(rows.roll(-1, dims=1), 64).float()
        logits[: self.wrong] = 0
        return type("Output", (), {"logits": logits})


def test_accuracy_counts_answers() -> None:
    examples = make_examples(MemoryTask(name="recall"), 8, 0, "test")
    assert accuracy(Oracle(examples.ids, 0), examples, 4) == 100.0
    assert accuracy(Oracle(examples.ids, 1), examples, 4) == 75.0  # one row of each batch


@pytest.mark.parametrize("task", FULL.tasks)
def test_rows_have_equal_size_and_one_difference(task: str) -> None:
    runs = [memory_run(FULL, row, task, 0) for row in rows_of(task)]
    sizes = [parameter_count(run.model) for run in runs]
    assert max(sizes) < 1.02 * min(sizes)
    assert abs(sizes[0] / FULL.parameters - 1) < 0.02
    runs = [run for row, run in zip(rows_of(task), runs, strict=True) if row not in PEERS]
    difference = {"intermediate_size", *(key for row in ROWS.values() for key in row)}
    assert len({str({k: v for k, v in run.model.items() if k not in difference}) for run in runs}) == 1
    assert len({str(run.model_dump(exclude={"id", "label", "model"})) for run in runs}) == 1


def test_a_row_with_too_many_parameters_is_refused() -> None:
    shape = QUICK.shape | {"vocab_size": 30, "window": 8}
    with pytest.raises(RecipeError, match=r"The row slide has [\d,]+ parameters with the narrowest FFN, but 100 are"):
        model_config("slide", shape, 100)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "recall", "pairs": 9, "keys": 9}, "9 pairs take 18 tokens, but a window has 16"),
        ({"name": "recall", "pairs": 4, "keys": 3}, "4 pairs need as many different keys, but there are 3"),
    ],
)
def test_impossible_tasks_are_refused(values: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        MemoryTask.parse({"window": 16} | values)


@pytest.mark.exhaustive
def test_a_quick_run_has_every_row_and_is_cached(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1)
    results = reproduce("long-memory", options)
    assert [row.id for row in results.rows] == ROWS_OF_RESULTS
    assert all({"recall64", "copy"} <= set(row.metrics) for row in results.rows if row.id in PEERS)
    for row in (row for row in results.rows if row.id not in PEERS):
        assert "recall" in row.metrics
        assert ("copy" in row.metrics) == (row.id in ("random", *SHORT))
        assert ("listops" in row.metrics) == (row.id not in CONTROLS)
        assert all(0 <= value_of(row.metrics[task]) <= 100 for task in QUICK.tasks if task in row.metrics)
    assert [aim.metric for aim in results.aims] == ["recall64", "recall64"]
    assert (tmp_path / "out" / "accuracy.png").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs" / "measurements").iterdir()}
    assert before
    assert reproduce("long-memory", options).rows == results.rows
    assert {path: path.stat().st_mtime_ns for path in before} == before, "finished runs are read from the cache"


@pytest.mark.exhaustive
def test_a_single_task_can_be_run(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1, tables=("copy",))
    assert all("recall" not in row.metrics for row in reproduce("long-memory", options).rows)
    with pytest.raises(RecipeError, match=r"There is no table 'recal' in this experiment \(did you mean recall\?\)"):
        reproduce("long-memory", options.model_copy(update={"tables": ("recal",)}))


def test_the_committed_results_have_every_row() -> None:
    folder = Path(long_memory.__file__).parent
    results = Results.read(folder)
    assert [row.id for row in results.rows] == ROWS_OF_RESULTS
