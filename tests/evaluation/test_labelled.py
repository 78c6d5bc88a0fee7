"""What a model's predictions say, and the metrics of labelled rows, against their definitions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlm.data.labelled import AnswerSpan, LabelledRow
from graftlm.data.labelled_batches import EncodedRow
from graftlm.errors import EvaluationError
from graftlm.evaluation.labelled import (
    Prediction,
    TaskScore,
    decode_prediction,
    entities,
    summary_metrics,
    task_metrics,
)
from graftlm.grafts.heads import TaskSpec

CLASSES = TaskSpec(type="classification", labels=["x", "y", "z"])
SEVERAL = TaskSpec(type="multi-label", labels=["x", "y"])
TAGS = TaskSpec(type="tagging", labels=["O", "B-P", "I-P", "B-Q", "I-Q"])
SPAN = TaskSpec(type="span")


def scores(spec: TaskSpec, truth: list[Any], said: list[Any]) -> dict[str, float]:
    rows = [LabelledRow(("text",), target, f"row {n}") for n, target in enumerate(truth)]
    return task_metrics(spec, rows, [Prediction(value) for value in said])


def says(spec: TaskSpec, prediction: Any, *, texts: tuple[str, ...] = ("text",), places: Any = None) -> Prediction:
    found = torch.as_tensor(prediction, dtype=torch.float32)
    tokens = len(found) if spec.of_tokens else 4
    encoded = EncodedRow(np.zeros(tokens, np.int32), None, None, None if places is None else np.asarray(places))
    return decode_prediction(spec, LabelledRow(texts, None, "rows.csv:3"), encoded, found)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-P I-P O B-Q", [(1, 3, "P"), (4, 5, "Q")]),
        ("B-P B-P I-P", [(0, 1, "P"), (1, 3, "P")]),
        ("I-P I-P I-Q O I-Q", [(0, 2, "P"), (2, 3, "Q"), (4, 5, "Q")]),  # an I that follows nothing of its type
        ("B-P I-Q I-P", [(0, 1, "P"), (1, 2, "Q"), (2, 3, "P")]),
        ("S-P B-Q I-Q E-Q U-P B-P L-P", [(0, 1, "P"), (1, 4, "Q"), (4, 5, "P"), (5, 7, "P")]),
        ("B-P O I-P", [(0, 1, "P"), (2, 3, "P")]),
        ("O O", []),
    ],
)
def test_entities(tags: str, found: list[tuple[int, int, str]]) -> None:
    assert entities(tags.split()) == found


@given(st.lists(st.sampled_from(TAGS.labels), max_size=12))
def test_entities_cover_the_tagged_words_once(tags: list[str]) -> None:
    found = entities(tags)
    covered = [place for start, end, _ in found for place in range(start, end)]
    assert covered == [place for place, tag in enumerate(tags) if tag != "O"]
    assert all(tags[place][2:] == kind for start, end, kind in found for place in range(start, end))
    assert all(one[1] < two[0] or one[2] != two[2] or tags[two[0]][0] == "B" for one, two in pairwise(found))


def test_entity_f1_is_over_all_rows_and_wants_both_ends_and_the_type() -> None:
    truth = [["B-P", "I-P", "O", "B-Q"], ["B-P", "O"], ["O", "O"]]
    said = [["B-P", "I-P", "O", "B-P"], ["B-P", "I-P"], ["O", "B-Q"]]  # right; another type; too long; none there
    found = scores(TAGS, truth, said)
    precision, recall = 1 / 4, 1 / 3
    assert found["entity_f1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))
    assert found["accuracy"] == pytest.approx(100 * 5 / 8)
    assert scores(TAGS, [["O"]], [["O"]])["entity_f1"] == 100  # there is none, and none was said
    assert scores(TAGS, [["O"]], [["B-P"]])["entity_f1"] == 0


def test_classes() -> None:
    found = scores(CLASSES, list("xxyyz"), list("xyyyy"))
    assert found["accuracy"] == pytest.approx(60)
    f1 = {"x": 2 * 1 / (1 + 2), "y": 2 * 2 / (4 + 2), "z": 0.0}  # 2 true positives / (said + true)
    assert found["macro_f1"] == pytest.approx(100 * sum(f1.values()) / 3)
    # Two classes: phi of the table (tp 3, fn 1, fp 1, tn 2).
    phi = (3 * 2 - 1 * 1) / math.sqrt(4 * 4 * 3 * 3)
    assert scores(CLASSES, list("xxxxyyy"), list("xxxyxyy"))["matthews"] == pytest.approx(100 * phi)
    assert scores(CLASSES, list("xxy"), list("xxx"))["matthews"] == 0


def test_numbers() -> None:
    spec = TaskSpec(type="regression")
    found = scores(spec, [1.0, 2.0, 3.0, 10.0], [1.0, 4.0, 9.0, 100.0])
    assert found["spearman"] == pytest.approx(100)
    assert found["pearson"] == pytest.approx(100 * np.corrcoef([1, 2, 3, 10], [1, 4, 9, 100])[0, 1])
    assert scores(spec, [1.0, 2.0], [3.0, 3.0]) == {"pearson": 0, "spearman": 0}


def test_several_labels() -> None:
    found = scores(SEVERAL, [("x",), ("x", "y"), ()], [("x", "y"), ("x",), ()])
    assert found["micro_f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))
    assert found["macro_f1"] == pytest.approx(100 * (1 + 0) / 2)
    assert scores(SEVERAL, [()], [()])["micro_f1"] == 100


def test_answers_are_compared_as_squad_has_them() -> None:
    truth = [
        AnswerSpan(0, 1, ("the Eiffel Tower", "Tower in Paris")),
        AnswerSpan(0, 1, ("42",)),
        AnswerSpan(0, 1, ("",)),
    ]
    said = [AnswerSpan(0, 1, (answer,)) for answer in ("Eiffel tower!", "forty-two", "the")]
    found = scores(SPAN, truth, said)
    assert found["exact_match"] == pytest.approx(100 * 2 / 3)
    assert found["token_f1"] == pytest.approx(100 * 2 / 3)
    (partly,) = [scores(SPAN, truth[:1], [AnswerSpan(0, 1, ("Tower of Paris",))])]
    assert partly["token_f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))  # the nearer answer: tower in paris
    assert partly["exact_match"] == 0


def test_what_each_prediction_says() -> None:
    answer = says(CLASSES, [0.0, math.log(6), 0.0])
    assert (answer.value, answer.probability) == ("y", pytest.approx(0.75))
    assert says(TaskSpec(type="regression"), 2.5).value == 2.5
    several = says(SEVERAL, [0.0, -0.1])
    assert several.value == ("x",)
    assert several.probabilities == pytest.approx({"x": 0.5, "y": 1 / (1 + math.exp(0.1))})
    logits = torch.eye(5)[[0, 1, 2, 0]]  # O B-P I-P O
    tags = says(TAGS, logits, texts=("a", "b", "c"), places=[1, -1, 2])
    assert tags.value == ("B-P", "O", "I-P")  # a word without a token of its own is outside


@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_the_likeliest_span_is_the_best_of_all_pairs(seed: int, size: int, before: int) -> None:
    logits = torch.randn(before + size + 1, 2, generator=torch.Generator().manual_seed(seed)) * 3
    context = "".join(chr(ord("a") + place % 26) for place in range(size))
    places = [[-1, -1]] * before + [[place, place + 1] for place in range(size)] + [[-1, -1]]
    found = says(SPAN, logits, texts=("which", context), places=places)
    start, end = logits[before : before + size].double().log_softmax(0).T.tolist()
    pairs = [(first, last) for first in range(size) for last in range(first, min(size, first + 30))]
    best = max(pairs, key=lambda pair: start[pair[0]] + end[pair[1]])
    assert (found.value.start, found.value.end) == (best[0], best[1] + 1)
    assert found.value.answers == (context[best[0] : best[1] + 1],)
    assert found.probability == pytest.approx(math.exp(start[best[0]] + end[best[1]]), rel=1e-4)


def test_a_span_of_nothing() -> None:
    assert says(SPAN, torch.zeros(2, 2), texts=("which", ""), places=[[-1, -1]] * 2).value == AnswerSpan(0, 0, ("",))


def test_predictions_that_are_no_numbers() -> None:
    with pytest.raises(EvaluationError, match=r"The model's prediction for rows.csv:3 is not a number: .* lower"):
        says(CLASSES, [0.0, math.nan, 0.0])
    padded = torch.cat([torch.zeros(2, 5), torch.full((2, 5), math.inf)])  # behind the row's end
    encoded = EncodedRow(np.zeros(2, np.int32), None, None, np.asarray([0]))
    assert decode_prediction(TAGS, LabelledRow(("a",), None, "row"), encoded, padded).value == ("O",)


def test_the_summary_is_over_these_tasks() -> None:
    one = TaskScore("accuracy", {"accuracy": 40.0, "matthews": 0.0}, 5)
    other = TaskScore("pearson", {"pearson": 60.0}, 5)
    wanted = {"a": 40.0, "b": 60.0, "average": 50.0, "task_sigma": 10.0}
    assert summary_metrics({"a": one, "b": other}) == wanted
    assert summary_metrics({}) == {}


def test_entities_as_predict_prints_them() -> None:
    row = LabelledRow(("in", "New", "York"), None, "row")
    found = Prediction(("O", "B-P", "I-P")).to_json(TAGS, row)
    assert found["entities"] == [{"type": "P", "text": "New York", "start": 1, "end": 3}]
