"""Labelled rows: every format, every type of task, and one sentence with file and row for each that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.data.label_reader import answer_span
from graftlm.data.labelled import (
    AnswerSpan,
    LabelledConfig,
    LabelledRow,
    TaskRows,
    labels_of,
    read_held_out_rows,
    read_training_rows,
    score_metric,
)
from graftlm.data.row_encoder import RowEncoder, first_tokens
from graftlm.errors import DataError, RecipeError
from graftlm.grafts.heads import TaskSpec
from tiny import tiny_tokenizer
from training.tasks import tasks_of, write_rows

TOKENIZER = tiny_tokenizer()
FORMATS = ("csv", "tsv", "jsonl", "json", "parquet")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [mark.join(rows[0]), *(mark.join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    return path


def config(path: Path, kind: str = "classification", **more: Any) -> LabelledConfig:
    return LabelledConfig.parse({"type": kind, "train": str(path), "test": str(path)} | more)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows.{suffix}", [{"text": f'say "{i}"', "label": i % 2} for i in range(4)])
    if suffix == "csv":
        path.write_text(path.read_text().replace('say "', 'say ""').replace('",', '""",').replace("say", '"say'))
    found = read_training_rows("t", config(path))
    assert found.spec == TaskSpec(type="classification", labels=["0", "1"])
    assert [(row.texts, row.target) for row in found.rows] == [((f'say "{i}"',), str(i % 2)) for i in range(4)]
    assert found.rows[2].where == f"{path}: {'line' if suffix == 'jsonl' else 'row'} 3"


def test_every_type_of_task(tmp_path: Path) -> None:
    write_rows(tmp_path)
    rows = {name: read_training_rows(name, LabelledConfig.parse(task)) for name, task in tasks_of(tmp_path).items()}
    assert rows["topic"].spec.labels == ["dog", "fox", "moon"]
    assert (rows["alike"].spec.labels, len(rows["alike"].rows[0].texts)) == (["0", "1"], 2)
    assert rows["length"].rows[0].target == 0.75
    assert rows["marks"].spec.labels == ["dog", "fox"]
    assert rows["animals"].spec.labels == ["B-ANIMAL", "O"]
    span = rows["where"].rows[0].target
    assert isinstance(span, AnswerSpan)
    assert rows["where"].rows[0].texts[1][span.start : span.end] == span.answers[0]


def test_files_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('what " is\t0.5\nwho\t1\n')
    found = read_training_rows("t", config(tmp_path / "a.tsv", "regression", columns=["text", "label"]))
    assert [(row.texts[0], row.target) for row in found.rows] == [('what " is', 0.5), ("who", 1.0)]


@pytest.mark.parametrize(
    ("content", "columns", "problem"),
    [
        ("text,label,label\na,x,y\n", [], "'label'"),
        ("text,label\na,x\n", ["text", "label"], "row 1"),
    ],
)
def test_headers_that_mislead(tmp_path: Path, content: str, columns: list[str], problem: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError) as error:
        read_training_rows("t", config(tmp_path / "a.csv", columns=columns))
    assert "a.csv" in str(error.value)
    assert problem in str(error.value)


def test_the_label_is_no_text() -> None:
    for columns in ({"text": "label"}, {"text": ["a", "a"]}, {"label": "text"}):
        with pytest.raises(RecipeError) as error:
            LabelledConfig.parse({"type": "classification", "train": "a.csv", **columns})
        assert "text and label" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("a.conll", "# a tag\n-DOCSTART- O\n\nIn O\n#1 O\nRome B-PLACE\n", []),
        ("a.conll", "In\tO\n#1\tO\nRome\tB-PLACE\n\n\n", []),
        ("a.annotated", "In\tO\n#1\tO\nRome\tB-PLACE\n", []),
        ("a.iob2", "# text = In #1 Rome\n1\tIn\tO\t-\n2\t#1\tO\t-\n3\tRome\tB-PLACE\t-\n", []),
        ("a.txt", "O x In\nO x #1\nB-PLACE x Rome\n", ["label", "pos", "text"]),
    ],
)
def test_words_with_tags(tmp_path: Path, name: str, text: str, columns: list[str]) -> None:
    (tmp_path / name).write_text(text.replace("# a tag\n", ""))
    (row,) = read_training_rows("t", config(tmp_path / name, "tagging", columns=columns)).rows
    assert (row.texts, row.target) == (("In", "#1", "Rome"), ("O", "O", "B-PLACE"))


def test_words_with_tags_in_tables(tmp_path: Path) -> None:
    rows = [{"words": ["In", "Rome"], "tags": ["O", "B-PLACE"]}, {"words": "New York", "tags": "B-PLACE I-PLACE"}]
    path = write(tmp_path / "a.jsonl", rows)
    found = read_training_rows("t", config(path, "tagging", text="words", label="tags"))
    assert [row.target for row in found.rows] == [("O", "B-PLACE"), ("B-PLACE", "I-PLACE")]
    assert score_metric(config(path, "tagging"), found.spec) == "entity_f1"


MIXED = [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}, {"text": "c", "label": 3}]
BAD: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = {
    "sometimes a number": (
        MIXED,
        {},
        ["line 3 ", "the number 3", "'yes' at"],
    ),
    "two forms of a number": (
        [{"text": "a", "label": 1}, {"text": "b", "label": "1.0"}],
        {},
        ["line 2 has the label 1.0", "line 1 has 1,"],
    ),
    "no label": ([{"text": "a", "label": None}], {}, ["line 1 has nothing", "'label'"]),
    "an empty text": (
        [{"text": "a", "label": "x"}, {"text": " ", "label": "y"}],
        {},
        ["line 2 ", "'text'"],
    ),
    "not a number": (
        [{"text": "a", "label": 1}, {"text": "b", "label": "much"}],
        {"type": "regression"},
        ["line 2 has 'much'", "'label'"],
    ),
    "NaN": (
        [{"text": "a", "label": float("nan")}],
        {"type": "regression"},
        ["line 1 has nan", "'label'"],
    ),
    "one class": (
        [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}],
        {},
        ["task t", "'x'", "rows: 2"],
    ),
    "one number": (
        [{"text": "a", "label": 2e6}, {"text": "b", "label": 2e6}],
        {"type": "regression"},
        ["task t", "2e+06", "float32"],
    ),
    "no rows": ([], {}, ["task t has no rows under train", "a.jsonl"]),
    "no column": (
        [{"body": "a", "label": "x"}],
        {},
        ["line 1 ", "'text'", "body, label", "task's text"],
    ),
    "more tags than words": (
        [{"text": ["a"], "label": ["O", "B"]}],
        {"type": "tagging"},
        ["line 1", "tags 2"],
    ),
    "no tags": ([{"text": "a", "label": None}], {"type": "tagging"}, ["line 1 has nothing", "'label'"]),
    "an answer that is not there": (
        [{"question": "q", "context": "some text", "answers": ["other"]}],
        {"type": "span"},
        ["line 1 has the answer 'other'"],
    ),
    "an answer at another place": (
        [{"question": "q", "context": "some text", "answers": {"text": ["text"], "answer_start": [4]}}],
        {"type": "span"},
        ["line 1 has the answer 'text'", "character 4"],
    ),
    "no answer": (
        [{"question": "q", "context": "some text", "answers": []}],
        {"type": "span"},
        ["line 1 has no answer", "'answers'"],
    ),
    "a number as an answer": (
        [{"question": "q", "context": "some text", "answers": [7]}],
        {"type": "span"},
        ["line 1 has a value of type int", "'answers'"],
    ),
    "a label that is not the task's": (
        MIXED[:2],
        {"labels": ["yes", "maybe"]},
        ["line 2 has the label 'no'", "task t"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, case: str) -> None:
    rows, more, expected = BAD[case]
    path = write(tmp_path / "a.jsonl", rows)
    task = LabelledConfig.parse({"type": "classification", "train": str(path)} | more)
    with pytest.raises(DataError) as error:
        read_training_rows("t", task)
    assert all(part in str(error.value) for part in expected)
    assert "\n" not in str(error.value)


def test_a_label_not_seen_in_training(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", MIXED[:2])
    test = write(tmp_path / "test.jsonl", [{"text": "a", "label": "yes"}, {"text": "b", "label": "noo"}])
    task = config(train, test=str(test))
    found = read_training_rows("t", task)
    with pytest.raises(DataError) as error:
        read_held_out_rows("t", task, found.spec)
    assert "test.jsonl: line 2 has the label 'noo'" in str(error.value)
    with pytest.raises(DataError) as error:
        read_held_out_rows("t", config(train, test=str(tmp_path / "gone.csv")), found.spec)
    assert "gone.csv" in str(error.value)


def test_classes_with_one_example_are_noted(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}] * 3 + [{"text": "b", "label": "rare"}]
    path = write(tmp_path / "a.jsonl", rows)
    (note,) = read_training_rows("t", config(path)).notes
    assert f"'rare' ({path}: line 4)" in note
    assert "'x'" not in note
    limited = read_training_rows("t", config(path, limit=1, seed=1))
    assert limited.spec.labels == ["rare", "x"], "labels are those of all rows"
    assert len(limited.notes) == 2, "one label has a single example, and the other has none"


def test_a_limit_is_drawn_by_its_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": str(i), "label": i % 2} for i in range(50)])
    drawn = [[row.texts[0] for row in read_training_rows("t", config(path, limit=5, seed=s)).rows] for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 5


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"text": ["a", "b", "c"]}, "text"),
        ({"text": ["a", "a"]}, "text"),
        ({"type": "tagging", "text": ["a", "b"]}, "text"),
        ({"type": "span", "text": "a"}, "text"),
        ({"type": "regression", "labels": ["a"]}, "labels"),
        ({"metric": "pearson"}, "pearson"),
    ],
)
def test_configs_that_do_not_fit(values: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        LabelledConfig.parse({"type": "classification", "train": "a.csv"} | values)


words = st.lists(st.text("abcdæøå1.'-\U0001f600", min_size=1, max_size=9), min_size=1, max_size=8)


@given(words=words)
def test_a_word_is_tagged_at_its_first_token(words: list[str]) -> None:
    text = " ".join(words)
    offsets = TOKENIZER(text, return_offsets_mapping=True)["offset_mapping"]
    places = first_tokens(words, offsets)
    start = 0
    assert len(set(places)) == len(words), "each word has a token of its own"
    for word, place in zip(words, places, strict=True):
        assert offsets[place][0] <= start < offsets[place][1]
        assert place == 0 or offsets[place - 1][1] <= start, "none before it reaches into the word"
        start += len(word) + 1


def test_a_word_whose_tokens_are_truncated_has_no_token() -> None:
    assert first_tokens(["a", "b"], [(0, 1), (1, 3)]).tolist() == [0, 1]
    assert first_tokens(["a", "b"], [(0, 1)]).tolist() == [0, -1]
    assert first_tokens(["a", "b"], [(1, 3)]).tolist() == [-1, 0]  # begins behind the first word, with the blank
    assert first_tokens(["a", "b"], [(0, 3)]).tolist() == [0, -1]  # stands for the first of two


@given(context=st.text("abc d.é", min_size=1, max_size=40), start=st.integers(0, 39), size=st.integers(1, 9))
def test_an_answer_s_tokens_cover_it(context: str, start: int, size: int) -> None:
    answer = context[start : start + size]
    if not answer.strip():
        return
    value = {"text": [answer], "answer_start": [start]}
    row = LabelledRow(("which?", context), answer_span(value, context, "answers", "here"), "here")
    spec = TaskSpec(type="span")
    (found,) = RowEncoder(TOKENIZER, 200).encode(TaskRows(spec, [row])).rows
    assert found.target is not None
    assert found.alignment is not None
    first, last = found.target.tolist()
    assert found.alignment[first, 0] <= start < found.alignment[first, 1]
    assert found.alignment[last, 0] < start + len(answer) <= found.alignment[last, 1]


def test_an_answer_and_its_start_may_be_outside_a_list() -> None:
    value = {"text": "a", "answer_start": 2}
    assert answer_span(value, "a a", "answers", "here").start == 2


def test_labels_of_a_row() -> None:
    assert labels_of(LabelledRow(("a",), "x", "")) == ("x",)
    assert labels_of(LabelledRow(("a",), 0.5, "")) == ()
    assert labels_of(LabelledRow(("a", "b"), AnswerSpan(0, 1, ("b",)), "")) == ()
