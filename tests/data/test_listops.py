"""Expressions of ListOps: their values, how they are read and drawn, and what is refused."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from graftlm.data.listops import IDS, TOKENS, generate_expressions, longest_expression, read_expression
from graftlm.errors import DataError


def text_of(ids: np.ndarray) -> str:
    return " ".join(TOKENS[number - 1] for number in ids)


def reference(words: list[str]) -> int:
    """The value of an expression by recursive descent, which removes its tokens from `words`."""
    word = words.pop(0)
    if not word.startswith("["):
        return int(word)
    values: list[int] = []
    while words[0] != "]":
        values.append(reference(words))
    words.pop(0)
    return {
        "[MAX": lambda: max(values),
        "[MIN": lambda: min(values),
        "[MED": lambda: int(statistics.median(values)),
        "[SM": lambda: sum(values) % 10,
    }[word]()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 4 3 [MIN 2 3 ] 1 0 ]", 4),
        ("[MED 1 4 2 3 ]", 2),
        ("[SM 9 9 9 [SM 5 5 ] ]", 7),
        ("( ( ( [MIN 8 ) 6 ) ] )", 6),
    ],
)
def test_values_of_expressions(text: str, value: int) -> None:
    ids, found = read_expression(text, "here")
    assert found == value
    assert text_of(ids).split() == [word for word in text.split() if word not in "()"]


def test_drawn_expressions_have_their_value_and_keep_all_bounds() -> None:
    drawn = generate_expressions(200, shortest=6, longest=30, depth=3, arguments=4, seed=1)
    for ids, value in drawn:
        text = text_of(ids)
        words = text.split()
        assert value == reference(words)
        assert not words
        assert read_expression(text, "here")[1] == value
        assert 6 <= len(ids) <= 30
        depths = np.cumsum([word.startswith("[") - (word == "]") for word in text.split()])
        assert depths.max() <= 3
    assert {value for _, value in drawn} == set(range(10))
    assert len({ids.tobytes() for ids, _ in drawn}) == len(drawn)
    longest = max(len(ids) for ids, _ in drawn)
    assert longest > 20, "lists nest"


def test_more_expressions_begin_with_the_same_ones() -> None:
    few, many = (generate_expressions(n, shortest=4, longest=20, seed=3) for n in (5, 20))
    assert [text_of(ids) for ids, _ in few] == [text_of(ids) for ids, _ in many[:5]]
    other = generate_expressions(5, shortest=4, longest=20, seed=4)
    assert [text_of(ids) for ids, _ in few] != [text_of(ids) for ids, _ in other]


def test_the_longest_expression_of_a_depth() -> None:
    assert longest_expression(1, 10) == 12
    assert longest_expression(2, 3) == 2 + 3 * 5
    flat = [ids for ids, _ in generate_expressions(40, shortest=5, longest=5, depth=1, arguments=3)]
    assert all(len(ids) == longest_expression(1, 3) and IDS["]"] == ids[-1] for ids in flat)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[MAX 1 [MIN 2 3 ]", "1"),  # cut
        ("", "complete"),
        ("[MAX 1 2 ] ]", "']'"),
        ("[MAX 1 2 ] 3", "'3'"),
        ("]", "no arguments"),
        ("[SM ]", "no arguments"),
        ("[AVG 1 2 ]", "'[AVG'"),
        ("[MAX 1 12 ]", "'12'"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_expression_is_refused(text: object, key: str) -> None:
    with pytest.raises(DataError) as error:
        read_expression(text, "lists.tsv: row 4")
    assert "lists.tsv: row 4" in str(error.value)
    assert key in str(error.value)


def test_too_few_different_expressions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.data.listops._MOST_REJECTED", 2_000)
    with pytest.raises(DataError) as error:
        generate_expressions(500, shortest=4, longest=4, depth=1, arguments=2)
    assert "400" in str(error.value), "four operations on two digits"
    assert "shortest" in str(error.value)
