"""Texts of this machine: files of the standard library as English and code."""

from __future__ import annotations

import pytest

from experiments.python_texts import deal, split_source

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


def test_every_document_is_dealt_once() -> None:
    documents = [str(number) for number in range(25)]
    hands = deal(documents, {"a": 8, "b": 1, "c": 1})
    dealt = [document for hand in hands.values() for document in hand]
    assert sorted(dealt, key=int) == documents
    assert {name: len(hand) for name, hand in hands.items()} == {"a": 21, "b": 2, "c": 2}
