"""Tasks that need a long memory: what their rows promise, what a quick run gives, and its errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import Options, long_memory, reproduce
from experiments.long_memory.cell import accuracy, blocks
from experiments.long_memory.data import FILL, Task, informed_guesses, make_rows
from experiments.long_memory.listops import ANSWER, CLOSE, DIGIT, NAMES, expressions, spelled
from experiments.long_memory.run import FULL, QUICK, Plan
from experiments.sequence_rows import LABELS, ROWS, count, model_of
from graftlm.data import NEW, Mixture
from graftlm.errors import RecipeError
from graftlm.evaluation import Results, value_of

SEEDS = st.integers(0, 2**32 - 1)
ROWS_OF_RESULTS = ["random", *LABELS]


@given(SEEDS, st.sampled_from([(2, 4), (4, 4), (3, 8)]))
def test_recall_asks_for_every_pair_of_the_first_window_in_the_last(seed: int, sizes: tuple[int, int]) -> None:
    pairs, keys = sizes
    task = Task(name="recall", length=64, window=8, pairs=pairs, keys=keys)
    ids, answers = make_rows(task, 5, seed, "test")
    for row, asked in zip(ids, answers, strict=True):
        known = [place for place in range(0, task.window, 2) if row[place] <= keys]
        told = {row[place]: row[place + 1] for place in known}
        assert len(told) == pairs
        places = np.flatnonzero(asked)
        assert places.min() >= task.length - task.window
        assert {row[place - 1]: row[place] for place in places} == told
        middle = row[task.window : task.length - 2 * pairs]
        assert (middle > keys + task.values).all(), "nothing but noise stands between"


@given(SEEDS)
def test_copies_are_in_order(seed: int) -> None:
    task = Task(name="copy", length=64, window=8, pairs=3)
    ids, answers = make_rows(task, 5, seed, "test")
    for row, asked in zip(ids, answers, strict=True):
        before = row[: task.length // 2]
        values = before[(before > task.keys) & (before <= task.keys + task.values)]
        assert values.tolist() == row[asked].tolist()
        assert row[~asked][-1] == task.vocabulary - 1


@given(SEEDS)
def test_listops_results_are_those_of_python(seed: int) -> None:
    found = expressions(np.random.default_rng(seed), 10, 120)
    functions = {"[MAX": max, "[MIN": min, "[MED": lambda v: int(np.median(v)), "[SM": lambda v: sum(v) % 10}
    for _ in range(3):
        ids, result = next(found)
        assert 10 <= len(ids) <= 120
        stack: list[list] = [[]]
        for one in ids:
            if one < CLOSE:
                stack.append([NAMES[one - 1]])
            elif one == CLOSE:
                name, *values = stack.pop()
                stack[-1].append(functions[name](values))
            else:
                stack[-1].append(one - DIGIT)
        assert stack == [[result]]
        assert spelled([*ids, ANSWER + result]).endswith(f"] = {result}")


def test_guesses_know_the_outermost_operation() -> None:
    task = Task(name="listops", length=40, window=8, shortest=4)
    found = informed_guesses(task, 400, 200, 0)
    assert 10 < found["the commonest result"] < found["that of the outermost operation"] < 60


def test_training_and_tests_have_other_examples() -> None:
    task = Task(name="recall")
    parts = {part: make_rows(task, 20, 0, part).ids for part in ("train", "validation", "test")}
    assert not np.array_equal(parts["train"], parts["test"])
    assert not np.array_equal(parts["validation"], parts["test"])
    assert np.array_equal(make_rows(task, 20, 0, "test").ids, parts["test"])


def test_answers_alone_are_learned() -> None:
    rows = make_rows(Task(name="listops", length=64, window=8, shortest=10), 6, 0, "train")
    batch = Mixture({NEW: blocks(rows)}, {NEW: 1.0}, 6, 0).batch(0)
    assert ((batch.labels != -100).sum(dim=1) == 1).all()
    assert batch.attention_mask is not None
    assert torch.equal(batch.attention_mask.bool(), batch.input_ids != FILL)
    assert sorted(batch.labels[batch.labels != -100].tolist()) == sorted(rows.ids[rows.answers].tolist())


class Oracle(torch.nn.Module):
    """Knows every row."""

    def __init__(self, ids: np.ndarray, wrong: int) -> None:
        super().__init__()
        self.ids, self.wrong = torch.from_numpy(ids), wrong

    def forward(self, input_ids: torch.Tensor, **_: object) -> object:
        rows = torch.stack([self.ids[(self.ids == row).all(dim=1)][0] for row in input_ids])
        logits = torch.nn.functional.one_hot(rows.roll(-1, dims=1), 64).float()
        logits[: self.wrong] = 0
        return type("Output", (), {"logits": logits})


def test_accuracy_counts_answers() -> None:
    rows = make_rows(Task(name="recall"), 8, 0, "test")
    assert accuracy(Oracle(rows.ids, 0), rows, 4) == 100.0
    assert accuracy(Oracle(rows.ids, 1), rows, 4) == 75.0  # one row of each batch


@pytest.mark.parametrize("task", FULL.lessons)
def test_rows_differ_in_nothing_but_their_difference(task: str) -> None:
    cells = [Plan(Options(data=Path(), out=Path())).cell(row, task, 1e-3, 0) for row in LABELS]
    sizes = [count(cell.model) for cell in cells]
    assert max(sizes) < 1.02 * min(sizes)
    assert abs(sizes[0] / FULL.parameters - 1) < 0.02
    own = {"intermediate_size", *(key for row in ROWS.values() for key in row)}
    assert len({str({k: v for k, v in cell.model.items() if k not in own}) for cell in cells}) == 1
    lessons = {str(cell.model_dump(exclude={"id", "model"})) for cell in cells}
    assert len(lessons) == 1


def test_a_row_that_is_too_large_says_so() -> None:
    shape = QUICK.shape | {"vocab_size": 30, "window": 8}
    with pytest.raises(RecipeError, match=r"The row slide has [\d,]+ parameters with the narrowest FFN, but 100 are"):
        model_of("slide", shape, 100)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "recall", "pairs": 9, "keys": 9}, "9 pairs take 18 tokens, but a window has 16"),
        ({"name": "recall", "pairs": 4, "keys": 3}, "4 pairs need as many different keys, but there are 3"),
    ],
)
def test_tasks_that_cannot_be(values: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Task.parse({"window": 16} | values)


def test_every_row_in_the_one_form(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1)
    results = reproduce("long-memory", options)
    assert [row.id for row in results.rows] == ROWS_OF_RESULTS
    for row in results.rows:
        assert {"recall", "copy", "listops"} <= set(row.metrics)
        assert all(0 <= value_of(row.metrics[task]) <= 100 for task in QUICK.lessons)
    assert [aim.metric for aim in results.aims] == ["recall", "recall"]
    assert (tmp_path / "out" / "accuracy.png").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("measurement.json")}
    assert before
    assert reproduce("long-memory", options).rows == results.rows
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what is finished is read back"


def test_one_task_alone(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out", quick=True, jobs=1, tables=("copy",))
    assert all("recall" not in row.metrics for row in reproduce("long-memory", options).rows)
    with pytest.raises(RecipeError, match=r"There is no task 'recal' in this experiment \(did you mean recall\?\)"):
        reproduce("long-memory", options.model_copy(update={"tables": ("recal",)}))


def test_the_committed_results_are_of_this_form() -> None:
    folder = Path(long_memory.__file__).parent
    results = Results.read(folder)
    assert [row.id for row in results.rows] == ROWS_OF_RESULTS
