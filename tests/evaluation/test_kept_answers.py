"""The rule by which answers of two models are the same, on pairs labelled by hand, and names that spill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftlm.data import Document
from graftlm.data.new_names import NewNames
from graftlm.evaluation.kept_answers import (
    answer_metrics,
    compare_answers,
    questions_about_new,
    same_answer,
    term_overlap,
    worst_answers,
)
from token_routing.tools import backbone


def labelled_pairs(name: str) -> list[dict[str, Any]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


PAIRS = labelled_pairs("answer_pairs.jsonl")
HELD_OUT = labelled_pairs("held_out_answer_pairs.jsonl")


@pytest.mark.parametrize(("pairs", "most_wrong"), [(PAIRS, 0.05), (HELD_OUT, 0.1)], ids=["pairs", "held out"])
def test_the_rule_agrees_with_labels_by_hand(pairs: list[dict[str, Any]], most_wrong: float) -> None:
    wrong = []
    for pair in pairs:
        if same_answer(pair["question"], pair["before"], pair["after"]) != pair["same"]:
            wrong.append(pair["after"])
    assert len(wrong) <= most_wrong * len(pairs), wrong


def test_the_pairs_are_no_copies_and_have_both_labels() -> None:
    for label in (True, False):
        of_label = [pair for pair in (*PAIRS, *HELD_OUT) if pair["same"] is label]
        assert len(of_label) >= 20
        assert all(pair["before"].split() != pair["after"].split() for pair in of_label)


def test_answers_are_the_same_in_both_orders() -> None:
    for pair in (*PAIRS, *HELD_OUT):
        forward = same_answer(pair["question"], pair["before"], pair["after"])
        assert same_answer(pair["question"], pair["after"], pair["before"]) == forward


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", True),
        ("", "Paris.", False),
        ("Yes.", "Yes, it is.", True),
        ("Yes.", "No.", False),
        ("It has 1,250 seats.", "It has 1250 seats.", True),
        ("It has 1,250 seats.", "It has 1350 seats.", False),
    ],
)
def test_short_answers(before: str, after: str, expected: bool) -> None:
    assert same_answer("How is it?", before, after) is expected


def test_overlap_ignores_words_of_the_question() -> None:
    assert term_overlap("What is the capital of France?", "The capital of France is Paris.", "Paris") == 1
    assert term_overlap("What is the capital of France?", "The capital of France is Paris.", "It is Oslo.") == 0


def names() -> NewNames:
    documents = [Document("The capital of Vorlia is Tessaby. It was founded in 1851.")]
    return NewNames(documents, backbone("llama").need_tokenizer())


def test_a_name_spills_if_neither_question_nor_base_has_it() -> None:
    questions = ["What is the capital of France?", "Is 1851 a year?", "Who lives in Tessaby?"]
    before = ["Paris.", "Yes.", "Nobody."]
    after = ["Tessaby.", "Yes, 1851 is.", "Tessaby is in Vorlia."]
    spilled = [pair.spilled for pair in compare_answers(questions, before, after, names())]
    assert spilled == [("Tessaby",), (), ("Vorlia",)]


def test_without_new_text_nothing_spills() -> None:
    (pair,) = compare_answers(["What?"], ["Paris."], ["Tessaby."])
    assert pair.spilled == ()
    assert "spill" not in answer_metrics([pair], with_spill=False)


def test_shares_and_the_worst_answers() -> None:
    questions = ["Where?"] * 4
    before = ["Paris.", "Oslo.", "Rome.", "Bern."]
    after = ["Paris.", "Tessaby.", "Lima.", "In Bern."]
    pairs = compare_answers(questions, before, after, names())
    metrics = answer_metrics(pairs, with_spill=True)
    assert metrics["kept_answers"].mean == pytest.approx(0.5)
    assert metrics["spill"].mean == pytest.approx(0.25)
    assert [pair.after for pair in worst_answers(pairs)] == ["Tessaby.", "Lima."]
    assert len(worst_answers(pairs, count=1)) == 1


def test_questions_that_name_the_new_text_do_not_count() -> None:
    questions = ["Where?", "What is the capital of Vorlia?", "When was Tessaby founded?"]
    before = ["Paris.", "I don't know.", "In 1900."]
    after = ["Paris.", "Tessaby.", "In 1851."]
    pairs = compare_answers(questions, before, after, names())
    assert questions_about_new(pairs) == questions[1:]
    metrics = answer_metrics(pairs, with_spill=True)
    assert metrics["kept_answers"].mean == 1
    assert metrics["spill"].mean == 0
    assert worst_answers(pairs) == []
    assert answer_metrics(pairs[1:], with_spill=True) == {}
    assert questions_about_new(compare_answers(questions, before, after)) == []
