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
from graftlm.data.row_encoder import EncodedRow
from graftlm.errors import EvaluationError
from graftlm.evaluation.entities import entities
from graftlm.evaluation.label_metrics import task_metrics
from graftlm.evaluation.label_predictions import Prediction, decode_prediction
from graftlm.evaluation.label_scores import TaskScore, summary_metrics
from graftlm.grafts.heads import TaskSpec

CLASSES = TaskSpec(type="classification", labels=["x", "y", "z"])
SEVERAL = TaskSpec(type="multi-label", labels=["x", "y"])
TAGS = TaskSpec(type="tagging", labels=["O", "B-P", "I-P", "B-Q", "I-Q"])
SPAN = TaskSpec(type="span")


def scores(spec: TaskSpec, truth: list[Any], predicted: list[Any]) -> dict[str, float]:
    rows = [LabelledRow(("text",), target, f"row {n}") for n, target in enumerate(truth)]
    return task_metrics(spec, rows, [Prediction(value) for value in predicted])


def decode(spec: TaskSpec, prediction: Any, *, texts: tuple[str, ...] = ("text",), positions: Any = None) -> Prediction:
    result = torch.as_tensor(prediction, dtype=torch.float32)
    tokens = len(result) if spec.of_tokens else 4
    encoded = EncodedRow(np.zeros(tokens, np.int32), None, None, None if positions is None else np.asarray(positions))
    return decode_prediction(spec, LabelledRow(texts, None, "rows.csv:3"), encoded, result)


@pytest.mark.parametrize(
    ("tags", "result"),
    [
        ("O B-P I-P O B-Q", [(1, 3, "P"), (4, 5, "Q")]),
        ("B-P B-P I-P", [(0, 1, "P"), (1, 3, "P")]),
        ("I-P I-P I-Q O I-Q", [(0, 2, "P"), (2, 3, "Q"), (4, 5, "Q")]),  # an I that follows nothing of its type
        ("B-P I-Q I-P", [(0, 1, "P"), (1, 2, "Q"), (2, 3, "P")]),
        ("S-P B-Q I-Q E-Q U-P B-P L-P", [(0, 1, "P"), (1, 4, "Q"), (4, 5, "P"), (5, 7, "P")]),
        (
            "S-P I-P B-P E-P I-P L-P U-P E-P",
            [(0, 1, "P"), (1, 2, "P"), (2, 4, "P"), (4, 6, "P"), (6, 7, "P"), (7, 8, "P")],
        ),
        ("B-P O I-P", [(0, 1, "P"), (2, 3, "P")]),
        ("O O", []),
    ],
)
def test_entities(tags: str, result: list[tuple[int, int, str]]) -> None:
    assert entities(tags.split()) == result


@given(st.lists(st.sampled_from(TAGS.labels), max_size=12))
def test_entities_cover_the_tagged_words_once(tags: list[str]) -> None:
    result = entities(tags)
    covered = [index for start, end, _ in result for index in range(start, end)]
    assert covered == [index for index, tag in enumerate(tags) if tag != "O"]
    assert all(tags[index][2:] == kind for start, end, kind in result for index in range(start, end))
    assert all(
        left[1] < right[0] or left[2] != right[2] or tags[right[0]][0] == "B" for left, right in pairwise(result)
    )


def test_entity_f1_is_over_all_rows_and_wants_both_ends_and_the_type() -> None:
    truth = [["B-P", "I-P", "O", "B-Q"], ["B-P", "O"], ["O", "O"]]
    predicted = [["B-P", "I-P", "O", "B-P"], ["B-P", "I-P"], ["O", "B-Q"]]  # right; another type; too long; none there
    result = scores(TAGS, truth, predicted)
    precision, recall = 1 / 4, 1 / 3
    assert result["entity_f1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))
    assert result["accuracy"] == pytest.approx(100 * 5 / 8)
    assert scores(TAGS, [["O"]], [["O"]])["entity_f1"] == 100  # no entity, and none predicted
    assert scores(TAGS, [["O"]], [["B-P"]])["entity_f1"] == 0


def test_classes() -> None:
    result = scores(CLASSES, list("xxyyz"), list("xyyyy"))
    assert result["accuracy"] == pytest.approx(60)
    f1 = {"x": 2 * 1 / (1 + 2), "y": 2 * 2 / (4 + 2), "z": 0.0}  # 2 true positives / (predicted + true)
    assert result["macro_f1"] == pytest.approx(100 * sum(f1.values()) / 3)
    # Two classes: phi of the table (tp 3, fn 1, fp 1, tn 2).
    phi = (3 * 2 - 1 * 1) / math.sqrt(4 * 4 * 3 * 3)
    assert scores(CLASSES, list("xxxxyyy"), list("xxxyxyy"))["matthews"] == pytest.approx(100 * phi)
    assert scores(CLASSES, list("xxy"), list("xxx"))["matthews"] == 0


def test_numbers() -> None:
    spec = TaskSpec(type="regression")
    result = scores(spec, [1.0, 2.0, 3.0, 10.0], [1.0, 4.0, 9.0, 100.0])
    assert result["spearman"] == pytest.approx(100)
    assert result["pearson"] == pytest.approx(100 * np.corrcoef([1, 2, 3, 10], [1, 4, 9, 100])[0, 1])
    assert scores(spec, [1.0, 2.0], [3.0, 3.0]) == {"pearson": 0, "spearman": 0}


def test_several_labels() -> None:
    result = scores(SEVERAL, [("x",), ("x", "y"), ()], [("x", "y"), ("x",), ()])
    assert result["micro_f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))
    assert result["macro_f1"] == pytest.approx(100 * (1 + 0) / 2)
    assert scores(SEVERAL, [()], [()])["micro_f1"] == 100


def test_answers_are_compared_as_squad_has_them() -> None:
    truth = [
        AnswerSpan(0, 1, ("the Eiffel Tower", "Tower in Paris")),
        AnswerSpan(0, 1, ("42",)),
        AnswerSpan(0, 1, ("",)),
    ]
    predicted = [AnswerSpan(0, 1, (answer,)) for answer in ("Eiffel tower!", "forty-two", "the")]
    result = scores(SPAN, truth, predicted)
    assert result["exact_match"] == pytest.approx(100 * 2 / 3)
    assert result["token_f1"] == pytest.approx(100 * 2 / 3)
    (partly,) = [scores(SPAN, truth[:1], [AnswerSpan(0, 1, ("Tower of Paris",))])]
    assert partly["token_f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))  # the nearer answer: tower in paris
    assert partly["exact_match"] == 0


def test_what_each_prediction_says() -> None:
    answer = decode(CLASSES, [0.0, math.log(6), 0.0])
    assert (answer.value, answer.probability) == ("y", pytest.approx(0.75))
    assert decode(TaskSpec(type="regression"), 2.5).value == 2.5
    several = decode(SEVERAL, [0.0, -0.1])
    assert several.value == ("x",)
    assert several.probabilities == pytest.approx({"x": 0.5, "y": 1 / (1 + math.exp(0.1))})
    logits = torch.eye(5)[[0, 1, 2, 0]]  # O B-P I-P O
    tags = decode(TAGS, logits, texts=("a", "b", "c"), positions=[1, -1, 2])
    assert tags.value == ("B-P", "O", "I-P")  # a word without a token of its own is outside


@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_the_likeliest_span_is_the_best_of_all_pairs(seed: int, size: int, before: int) -> None:
    logits = torch.randn(before + size + 1, 2, generator=torch.Generator().manual_seed(seed)) * 3
    context = "".join(chr(ord("a") + index % 26) for index in range(size))
    positions = [[-1, -1]] * before + [[index, index + 1] for index in range(size)] + [[-1, -1]]
    result = decode(SPAN, logits, texts=("which", context), positions=positions)
    start, end = logits[before : before + size].double().log_softmax(0).T.tolist()
    pairs = [(first, last) for first in range(size) for last in range(first, min(size, first + 30))]
    best = max(pairs, key=lambda pair: start[pair[0]] + end[pair[1]])
    assert (result.value.start, result.value.end) == (best[0], best[1] + 1)
    assert result.value.answers == (context[best[0] : best[1] + 1],)
    assert result.probability == pytest.approx(math.exp(start[best[0]] + end[best[1]]), rel=1e-4)


def test_a_span_of_nothing() -> None:
    assert decode(SPAN, torch.zeros(2, 2), texts=("which", ""), positions=[[-1, -1]] * 2).value == AnswerSpan(
        0, 0, ("",)
    )


def test_predictions_that_are_no_numbers() -> None:
    with pytest.raises(EvaluationError) as caught:
        decode(CLASSES, [0.0, math.nan, 0.0])
    assert "rows.csv:3" in str(caught.value)
    padded = torch.cat([torch.zeros(2, 5), torch.full((2, 5), math.inf)])  # behind the row's end
    encoded = EncodedRow(np.zeros(2, np.int32), None, None, np.asarray([0]))
    assert decode_prediction(TAGS, LabelledRow(("a",), None, "row"), encoded, padded).value == ("O",)


def test_the_summary_is_over_these_tasks() -> None:
    first = TaskScore("accuracy", {"accuracy": 40.0, "matthews": 0.0}, 5)
    other = TaskScore("pearson", {"pearson": 60.0}, 5)
    wanted = {"a": 40.0, "b": 60.0, "average": 50.0, "task_sigma": 10.0}
    assert summary_metrics({"a": first, "b": other}) == wanted
    assert summary_metrics({}) == {}


def test_entities_as_predict_prints_them() -> None:
    row = LabelledRow(("in", "New", "York"), None, "row")
    result = Prediction(("O", "B-P", "I-P")).to_json(TAGS, row)
    assert result["entities"] == [{"type": "P", "text": "New York", "start": 1, "end": 3}]
