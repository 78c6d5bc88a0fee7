"""Pieces of an experiment: what is finished is read back, unless it or what it began with is another."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduce.squares import Square, square

from experiments.jobs import MEASURED, digest, run_jobs


def run(out: Path, *jobs: Square, processes: int = 1) -> list[tuple[int, int]]:
    """What each job found, and how often its work was done so far."""
    found = run_jobs(jobs, square, out, processes=processes, title="squares")
    return [(found[job.id]["found"], len((out / job.id / "ran").read_text())) for job in jobs]


def test_what_is_finished_is_read_back(tmp_path: Path) -> None:
    two, three = Square(id="two", number=2), Square(id="three", number=3)
    assert run(tmp_path, two) == [(4, 1)]
    assert run(tmp_path, two, three) == [(4, 1), (9, 1)]
    assert run(tmp_path, two.model_copy(update={"number": 5})) == [(25, 2)], "other settings"
    (tmp_path / "three" / MEASURED).write_text("{")
    assert run(tmp_path, three) == [(9, 2)], "a file that was cut short"


def test_what_began_with_something_else_is_done_again(tmp_path: Path) -> None:
    before, after = (Square(id="two", number=2, after=digest(found, {"a": [1]})) for found in (1, 2))
    assert run(tmp_path, before) == run(tmp_path, before) == [(4, 1)]
    assert run(tmp_path, after) == [(4, 2)]
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1}, {"b": 2})


@pytest.mark.slow
def test_processes_find_the_same(tmp_path: Path) -> None:
    jobs = [Square(id=str(number), number=number) for number in range(3)]
    assert run(tmp_path, *jobs, processes=2) == [(0, 1), (1, 1), (4, 1)]
