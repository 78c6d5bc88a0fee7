"""Progress of long work in a terminal and in a pipe."""

from __future__ import annotations

from typing import Any

import pytest
import rich
from rich.console import Console

import graftlm.progress
from graftlm.progress import progress_bar


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console of stdout, where other tests have directed rich's console to stderr."""
    monkeypatch.setattr(rich, "_console", Console())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still until the test moves it."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(graftlm.progress, "time", clock)
    return clock


def test_a_pipe_gets_a_line_now_and_then_with_the_time_left(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("training", 100, "loss {task.fields[loss]}", "tokens", show=True, loss="–") as update:
        for step in range(1, 101):
            clock.now += 1.0
            update(completed=step, loss=f"{step}.0")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "training 30/100, loss 30.0, 1:10 left",
        "training 60/100, loss 60.0, 0:40 left",
        "training 90/100, loss 90.0, 0:10 left",
        "training 100/100, loss 100.0, 1:40 in all",
    ]


def test_resumed_work_is_timed_from_where_it_began(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("sampling", 100, show=True, completed=40) as update:
        clock.now = 30.0
        update(advance=30)
    assert capsys.readouterr().out.splitlines()[0] == "sampling 70/100, 0:30 left"


def test_templates_may_show_the_percentage(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("scoring", 40, "{task.percentage:>3.0f}%", show=True) as update:
        clock.now = 30.0
        update(completed=10)
    assert capsys.readouterr().out.splitlines()[0] == "scoring 10/40,  25%, 1:30 left"


def test_a_pipe_gets_no_line_of_short_work(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("training", 3, show=True) as update:
        for _ in range(3):
            clock.now += 9.0
            update(advance=1)
    assert capsys.readouterr().out == ""


def test_nothing_is_shown_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("training", 3, show=False) as update:
        update(advance=3)
    assert capsys.readouterr().out == ""
