"""Choices, marked places, and small files in the forms of GLUE, SuperGLUE, MRQA, SNLI and SciTail."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graftlm.data.label_reader import AnswerSpan
from graftlm.data.labelled import LabelledConfig, LabelledRow, TaskRows, read_held_out_rows, read_training_rows
from graftlm.data.labelled_batches import LabelledMixture
from graftlm.data.published_forms import read_form
from graftlm.data.row_encoder import RowEncoder
from graftlm.data.samplers import SamplerConfig
from graftlm.errors import DataError, RecipeError
from graftlm.generation.predict import read_questions
from graftlm.grafts.heads import TaskSpec
from graftlm.runs.task_run import TaskRecipe
from published import COPA, HEADER, MRQA, MULTIRC, RECORD, SNLI, WIC, WSC, write_lines
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EXAMPLE = Path(__file__).parents[2] / "examples/24-tasks.yaml"


def read(path: Path, **config: Any) -> TaskRows:
    return read_training_rows("t", LabelledConfig.parse({"train": str(path), **config}))


def changed(row: dict[str, Any], path: list[Any], value: object) -> dict[str, Any]:
    """Return a deep copy of a row with another value at a path of keys; ... removes the key."""
    copy = json.loads(json.dumps(row))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


def test_copa(tmp_path: Path) -> None:
    other = {**COPA, "question": "effect", "label": 1}
    found = read(write_lines(tmp_path / "train.jsonl", [COPA, other]), type="choice", form="copa")
    assert found.spec == TaskSpec(type="choice")
    assert [row.choices for row in found.rows] == [("It fell.", "It shone.")] * 2
    assert [row.target for row in found.rows] == [0, 1]
    assert found.rows[0].texts != found.rows[1].texts
    assert all(row.texts[0].startswith("The lamp broke. ") for row in found.rows)


def test_wic_and_wsc_mark_their_words(tmp_path: Path) -> None:
    for row, form, words in ((WIC, "wic", ["bank", "bank"]), (WSC, "wsc", ["Mary Ann", "she"])):
        path = write_lines(tmp_path / f"{form}.jsonl", [row, {**row, "label": not row["label"]}])
        found = read(path, type="marked", form=form)
        assert found.spec.labels == ["false", "true"]
        for one in found.rows:
            assert [one.texts[mark.text][mark.start : mark.end] for mark in one.marks] == words
        (encoded, _) = RowEncoder(TOKENIZER, 60).encode(found).rows
        assert encoded.marks is not None
        for place, word in enumerate(words):
            tokens = encoded.ids[(encoded.marks >> place) & 1 == 1].tolist()
            assert TOKENIZER.decode(tokens).strip(" ,") == word


def test_multirc_and_record_make_a_row_of_each_answer_or_query(tmp_path: Path) -> None:
    found = read(write_lines(tmp_path / "m.jsonl", [MULTIRC]), type="classification", form="multirc")
    assert [(row.texts, row.target) for row in found.rows] == [
        (("The boat left at noon.", "When did it leave? Noon"), "1"),
        (("The boat left at noon.", "When did it leave? Night"), "0"),
    ]
    unknown = changed(RECORD, ["qas", 0, "answers", 0, "text"], "Oslo")
    found = read(write_lines(tmp_path / "r.jsonl", [RECORD, unknown]), type="choice", form="record")
    (row,) = found.rows
    assert row.choices == ("The loser was Rome.", "The loser was Paris.")
    assert row.target == 1
    assert any("queries" in note and "1 in all" in note for note in found.notes)


def test_of_several_right_entities_the_choices_have_one(tmp_path: Path) -> None:
    both = changed(RECORD, ["qas", 0, "answers"], [{"text": "Paris"}, {"text": "Rome"}])
    found = read(write_lines(tmp_path / "r.jsonl", [RECORD, both]), type="choice", form="record")
    assert len(found.rows) == 1, "no wrong choice is left"
    text = "Rome beat Paris. Rome won. Oslo"
    third = changed(both, ["passage", "text"], text)
    third["passage"]["entities"].append({"start": len(text) - 4, "end": len(text) - 1})
    (row,) = read(write_lines(tmp_path / "s.jsonl", [third]), type="choice", form="record").rows
    assert row.choices == ("The loser was Rome.", "The loser was Oslo.")
    assert row.target == 0


@pytest.mark.parametrize(
    ("form", "kind", "rows"),
    [("copa", "choice", [COPA]), ("wic", "marked", [WIC]), ("wsc", "marked", [WSC]), ("record", "choice", [RECORD])],
)
def test_rows_without_labels_have_the_same_inputs(form: str, kind: str, rows: list[Any], tmp_path: Path) -> None:
    bare = json.loads(json.dumps(rows))
    for row in bare:
        row.pop("label", None)
        for question in row.get("qas", []):
            del question["answers"]
    path = write_lines(tmp_path / "test.jsonl", bare)
    skipped: Counter[str] = Counter()
    labelled = list(read_form(write_lines(tmp_path / "train.jsonl", rows), form, skipped))  # type: ignore[arg-type]
    found = list(read_form(path, form, skipped))  # type: ignore[arg-type]
    assert [values[:-1] for values, _ in found] == [values[:-1] for values, _ in labelled]
    assert [values[-1] for values, _ in found] == [None]
    with pytest.raises(DataError) as error:
        read(path, type=kind, form=form)
    assert "label" in str(error.value)


def test_mrqa_gives_every_place_of_the_answer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "SQuAD.jsonl.gz", [HEADER, MRQA])
    (row,) = read(path, type="span", form="mrqa", stride=4).rows
    assert row.texts == ("What is round?", MRQA["context"])
    assert row.target == AnswerSpan(4, 8, ("moon", "Moon", "the moon"), ((23, 27),))
    assert read(path, type="span", form="mrqa", stride=4).stride == 4


def test_snli_and_scitail_leave_out_rows_without_a_gold_label(tmp_path: Path) -> None:
    rows = [SNLI, {**SNLI, "gold_label": "-"}, {**SNLI, "gold_label": "entailment"}]
    found = read(write_lines(tmp_path / "train.jsonl", rows), type="classification", form="snli")
    assert [row.target for row in found.rows] == ["neutral", "entailment"]
    assert any("gold label" in note and "1 in all" in note for note in found.notes)
    lines = "A cell divides.\tCells divide.\tentails\nIt rains.\tIt snows.\tneutral\n"
    (tmp_path / "scitail.tsv").write_text(lines)
    columns = {"columns": ["premise", "hypothesis", "gold"], "text": ["premise", "hypothesis"], "label": "gold"}
    assert len(read(tmp_path / "scitail.tsv", type="classification", **columns)) == 2


def test_glue_has_no_quoting_and_its_broken_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(
        'id\tqid1\tquestion1\tquestion2\tis_duplicate\n1\t2\t"a ""b"" c"\tWhy "x?\t1\n3\t4\tbroken\n5\t6\tq\tr\t0\n'
    )
    task = {"type": "classification", "text": ["question1", "question2"], "label": "is_duplicate"}
    found = read(path, **task, form="glue")
    assert [row.texts for row in found.rows] == [('"a ""b"" c"', 'Why "x?'), ("q", "r")]
    assert any("number of cells" in note and "1 in all" in note for note in found.notes)
    with pytest.raises(DataError):
        read(path, **task)
    (tmp_path / "cola.tsv").write_text("gj04\t1\t\tThey sing.\ngj04\t0\t*\tThey sings.\n")
    columns = ["source", "label", "star", "sentence"]
    found = read(tmp_path / "cola.tsv", type="classification", form="glue", text="sentence", columns=columns)
    assert [row.target for row in found.rows] == ["1", "0"]
    with pytest.raises(DataError, match="'sentence'"):
        read(path, type="classification", form="glue", text="sentence")


BAD: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "a choice that is not there": ("copa", "choice", {**COPA, "label": 2}, "'label'"),
    "a word as a choice": ("copa", "choice", {**COPA, "label": "first"}, "'label'"),
    "a boolean as a choice": ("copa", "choice", {**COPA, "label": True}, "'label'"),
    "no gap": ("record", "choice", changed(RECORD, ["qas", 0, "query"], "Who lost?"), "@placeholder"),
    "another label": ("wic", "marked", changed(WIC, ["label"], 7), "7"),
    "another language of labels": ("snli", "classification", {**SNLI, "gold_label": "ja"}, "'ja'"),
    "another place": ("mrqa", "span", changed(MRQA, ["qas", 0, "detected_answers", 0, "text"], "sun"), "'detected_"),
    "no label": ("copa", "choice", changed(COPA, ["label"], ...), "label"),
    "another question": ("copa", "choice", {**COPA, "question": "why"}, "'question'"),
    "an empty choice": ("copa", "choice", {**COPA, "choice2": " "}, "'choices'"),
    "a number as a choice": ("copa", "choice", {**COPA, "choice1": 3}, "'choice1'"),
    "a mark after the text": ("wic", "marked", {**WIC, "end2": 99}, "'mark2'"),
    "a mark before the text": ("wic", "marked", {**WIC, "start1": -2}, "'mark1'"),
    "an empty mark": ("wic", "marked", {**WIC, "end1": 2}, "'mark1'"),
    "a mark as text": ("wic", "marked", {**WIC, "start1": "2"}, "'start1'"),
    "a word after the text": ("wsc", "marked", changed(WSC, ["target", "span1_index"], 40), "'span1_index'"),
    "a target that is no object": ("wsc", "marked", {**WSC, "target": []}, "'target'"),
    "a passage that is text": ("multirc", "classification", {**MULTIRC, "passage": "text"}, "'passage'"),
    "an entity outside": ("record", "choice", changed(RECORD, ["passage", "entities", 1, "end"], 900), "'entities'"),
    "an answer outside": (
        "mrqa",
        "span",
        changed(MRQA, ["qas", 0, "detected_answers", 0, "char_spans"], [[30, 99]]),
        "'char_spans'",
    ),
    "an answer of one number": (
        "mrqa",
        "span",
        changed(MRQA, ["qas", 0, "detected_answers", 0, "char_spans"], [[4]]),
        "'char_spans'",
    ),
    "no place of the answer": ("mrqa", "span", changed(MRQA, ["qas", 0, "detected_answers"], []), "'detected_answers'"),
    "no context": ("mrqa", "span", changed(MRQA, ["context"], ...), "'context'"),
    "a gold label that is a number": ("snli", "classification", {**SNLI, "gold_label": 1}, "'gold_label'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_does_not_fit_its_form_is_named(tmp_path: Path, case: str) -> None:
    form, kind, row, key = BAD[case]
    path = write_lines(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError) as error:
        read(path, type=kind, form=form)
    assert "a.jsonl: line 1" in str(error.value)
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_not_whole_or_not_json_lines(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "whole.jsonl.gz", [HEADER, MRQA]).read_bytes()
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[:-20])
    (tmp_path / "a.csv").write_text("question,context\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    for name in ("cut.jsonl.gz", "a.csv", "list.jsonl"):
        with pytest.raises(DataError) as error:
            read(tmp_path / name, type="span", form="mrqa")
        assert name in str(error.value)


def test_choices_of_columns_and_lists(tmp_path: Path) -> None:
    rows = [{"text": "a", "one": "x", "two": "y", "label": 1}]
    found = read(write_lines(tmp_path / "a.jsonl", rows), type="choice", choices=["one", "two"])
    assert found.rows[0].choices == ("x", "y")
    (tmp_path / "a.csv").write_text('text,choices,label\na,"[""x"", ""y"", ""z""]",2\nb,"[""x"", ""y""]",0\n')
    found = read(tmp_path / "a.csv", type="choice")
    assert [len(row.choices) for row in found.rows] == [3, 2], "rows may have different numbers of choices"
    assert [row.target for row in found.rows] == [2, 0]
    for bad, key in (({"choices": ["x"], "label": 0}, "'choices'"), ({"choices": "x", "label": 0}, "'choices'")):
        with pytest.raises(DataError) as error:
            read(write_lines(tmp_path / "b.jsonl", [{"text": "a", **bad}]), type="choice")
        assert key in str(error.value)


def test_marks_by_characters_or_by_their_text(tmp_path: Path) -> None:
    row = {"text": "a dog, a fox", "mark1": [2, 5], "mark2": "fox", "label": "x"}
    path = write_lines(tmp_path / "a.jsonl", [row, {**row, "label": "y"}])
    (found, _) = read(path, type="marked").rows
    assert [found.texts[0][mark.start : mark.end] for mark in found.marks] == ["dog", "fox"]
    (again, _) = read_questions(LabelledConfig.parse({"type": "marked", "train": []}), str(path))
    assert again.marks == found.marks
    for value, key in (("cat", "'mark2'"), ("a", "'mark2'"), ([2], "'mark2'"), ([True, 5], "'mark2'"), (7, "'mark2'")):
        with pytest.raises(DataError) as error:
            read(write_lines(tmp_path / "b.jsonl", [{**row, "mark2": value}]), type="marked")
        assert key in str(error.value)


def test_a_row_whose_marked_place_is_cut_is_measured_and_not_learned(tmp_path: Path) -> None:
    spec = TaskSpec(type="marked", labels=["x", "y"])
    row = {"text": "brown fox " * 20 + "moon", "mark1": [0, 5], "mark2": "moon", "label": "x"}
    short = {"text": "brown moon", "mark1": [0, 5], "mark2": "moon", "label": "y"}
    path = write_lines(tmp_path / "a.jsonl", [row, short])
    task = LabelledConfig.parse({"type": "marked", "train": [], "test": str(path)})
    rows = read_held_out_rows("t", task, spec)
    encoder = RowEncoder(TOKENIZER, 12)
    assert [one.truncated for one in encoder.encode(rows).rows] == [True, False]
    mixture = LabelledMixture({"t": rows}, encoder, SamplerConfig(), 1)
    assert len(mixture.tasks["t"]) == 1
    assert "marked place: 1." in mixture.notes[0]
    with pytest.raises(DataError, match="line 1"):
        encoder.encode(TaskRows(spec, rows.rows[:1]), training=True)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"choices": "options"}, "choices"),
        ({"marks": ["a", "b"]}, "marks"),
        ({"type": "marked", "marks": ["a"]}, "marks"),
        ({"type": "choice", "choices": []}, "choices"),
        ({"type": "choice", "labels": ["a", "b"]}, "labels"),
        ({"stride": 8}, "stride"),
        ({"form": "mrqa"}, "mrqa"),
        ({"type": "span", "form": "glue"}, "glue"),
        ({"form": "snli", "text": ["a", "b"]}, "text"),
        ({"type": "choice", "form": "copa", "label": "answer"}, "label"),
        ({"type": "marked", "marks": ["text", "b"]}, "text"),
    ],
)
def test_configs_that_do_not_fit(values: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as error:
        LabelledConfig.parse({"type": "classification", "train": "a.jsonl"} | values)
    assert key in str(error.value)


def test_keys_that_are_not_set_leave_the_keys_of_old_runs_alone() -> None:
    values = LabelledConfig.parse({"type": "classification", "train": "a.jsonl"}).model_dump(mode="json")
    assert not {"choices", "marks", "stride", "form"} & values.keys()
    values = LabelledConfig.parse({"type": "span", "train": "a.jsonl", "stride": 8}).model_dump(mode="json")
    assert values["stride"] == 8


def test_the_example_of_24_tasks_is_a_recipe() -> None:
    recipe = TaskRecipe.from_yaml(EXAMPLE)
    assert len(recipe.tasks) == 24
    assert {task.type for task in recipe.tasks.values()} >= {"choice", "marked", "span", "tagging", "regression"}
    spans = [task for task in recipe.tasks.values() if task.type == "span"]
    assert len(spans) == 6
    assert all(task.form == "mrqa" and task.stride for task in spans)


def test_a_question_of_a_published_file_is_read_without_its_label(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [COPA])
    config = LabelledConfig.parse({"type": "choice", "train": [], "form": "copa"})
    (row,) = read_questions(config, str(path))
    assert isinstance(row, LabelledRow)
    assert row.target is None
    assert row.choices == ("It fell.", "It shone.")
    path = write_lines(tmp_path / "b.jsonl", [SNLI, {**SNLI, "gold_label": "-"}])
    config = LabelledConfig.parse({"type": "classification", "train": [], "form": "snli"})
    with pytest.raises(DataError, match="gold label"):
        list(read_questions(config, str(path)))
