"""The harness runs a task of the user's own on a live model, offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftlm.errors import EvaluationError, MissingExtraError
from graftlm.evaluation import evaluate_tasks, harness
from tiny import tiny_model, tiny_tokenizer

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["cat", "dog"]
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = tmp_path / "questions.jsonl"
    rows = [{"question": f"question {i}:", "answer": i % 2} for i in range(6)]
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "tiny_choice.yaml").write_text(TASK.format(data=data))
    return folder


def test_a_local_task_gives_its_metrics(tasks: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    wrapped = type("Wrapped", (), {"model": model})()
    found = evaluate_tasks(wrapped, tokenizer, ["tiny_choice"], include_path=tasks, limit=4, batch_size=2)
    assert 0 <= found["tiny_choice"]["acc"] <= 1
    assert "acc_stderr" in found["tiny_choice"]
    assert found == evaluate_tasks(model, tokenizer, ["tiny_choice"], include_path=tasks, limit=4, batch_size=3)


def test_an_unknown_task_is_named() -> None:
    known = ["arc_challenge", "hellaswag"]  # reading the harness's own index takes seconds
    with pytest.raises(EvaluationError, match="did you mean hellaswag"):
        harness._check_names(["arc_challenge", "helaswag"], known)
    with pytest.raises(EvaluationError, match=r"no task 'xyz': `lm-eval ls tasks`"):
        harness._check_names(["xyz"], known)
    with pytest.raises(EvaluationError, match="No task is named"):
        harness._check_names([], known)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *_: Any) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(harness, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"graftlm\[harness\]"):
        evaluate_tasks(tiny_model("llama"), tiny_tokenizer(), ["hellaswag"])
