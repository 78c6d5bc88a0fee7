"""Tables as other programs write them: each cell is read as it was meant, or refused."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.data.conll import read_conll
from graftlm.data.label_reader import AnswerSpan, split_blanks
from graftlm.data.labelled import LabelledConfig, read_held_out_rows, read_training_rows
from graftlm.data.list_cells import looks_like_list, read_list
from graftlm.data.table_files import read_rows
from graftlm.errors import DataError


def write_csv(path: Path, *rows: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def texts(path: Path, column: str = "text") -> list[str]:
    return [row[0] for row, _ in read_rows(path, {"text_column": column})]


def task(path: Path, kind: str, **more: Any) -> LabelledConfig:
    return LabelledConfig.parse({"type": kind, "train": str(path), "test": str(path)} | more)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_field_may_be_longer_than_the_limit_of_the_csv_module(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    long = "tea " * 40_000
    limit = csv.field_size_limit(131_072)
    try:
        path.write_text(f"text\n{long}\nshort\n")
        assert texts(path) == [long, "short"]
        assert csv.field_size_limit() >= 131_072
    finally:
        csv.field_size_limit(limit)


def test_csv_keeps_line_ends_and_marks_in_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbf\xef\xbb\xbf"text",label\r\n"one\r\ntwo ""x""\n",a\r\n\xef\xbb\xbfthree,b\r\n')
    assert texts(path) == ['one\r\ntwo "x"\n', "three"]


@pytest.mark.parametrize(
    ("content", "place"),
    [('[{"text": "a"},\n {"text": }]', "line 2, column 11"), ('{"text": "a"}\n{"text": }\n', "line 2 .*at column 10")],
)
def test_the_place_of_invalid_json_is_named(tmp_path: Path, content: str, place: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=place):
        texts(path)


def test_the_header_of_an_appended_file_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbftext,label\r\nyes,a\r\n" * 2)
    with pytest.raises(DataError) as error:
        texts(path)
    assert "row 2" in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        'id, text\n1,"tea"\n2, "green ""tea"""\n',
        'id, text\n1, "tea"\n',
        'id, text\n1,\t"tea" \n',
        'id, "text"\n1,tea\n',
    ],
)
def test_a_quoted_cell_after_a_blank_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    column = content.partition("\n")[0].removeprefix("id,")
    with pytest.raises(DataError):
        texts(path, column)


def test_blanks_and_marks_of_a_text_in_a_csv_file_are_text(tmp_path: Path) -> None:
    written = [' "Tea"', '\t"one\ntwo" ', " tea", ' "a" and "b"', ' "']
    assert texts(write_csv(tmp_path / "a.csv", ["text"], *([text] for text in written))) == written
    (tmp_path / "b.csv").write_text('text,label\n "a" and "b",x\n 6" pipe,x\n')
    assert texts(tmp_path / "b.csv") == [' "a" and "b"', ' 6" pipe']


@pytest.mark.parametrize("names", ["text,text", "text,label,text"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, names: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{names}\n{names.replace('t', 'x')}\n")
    with pytest.raises(DataError, match="'text'"):
        texts(path)
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": {"k": 1, "k": 2}}\n')
    with pytest.raises(DataError, match="'k'"):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "content",
    [
        'text\tlabel\n"He said ""tea"""\ta\n',  # as pandas and Excel write it
        '"text"\t"label"\n"tea"\t"a"\n',
    ],
)
def test_a_quoted_tsv_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(content)
    with pytest.raises(DataError):
        texts(path)


def test_marks_of_a_text_in_a_tsv_file_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabel\n"Tea"\ta\n"a" and "b"\tb\n6" pipe\tc\n')
    assert texts(path) == ['"Tea"', '"a" and "b"', '6" pipe']


ELEMENTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=4)


@given(ELEMENTS)
def test_lists_of_python_and_json_come_back(elements: list[str]) -> None:
    for written in (repr(elements), json.dumps(elements), json.dumps(elements, ensure_ascii=False)):
        assert looks_like_list(written)
        assert read_list(written, "c", "w") == elements


@pytest.mark.parametrize("values", [["it's", 'a "b"', "c"], [0, 3, 12], ["a"], [-1, 2]])
def test_lists_of_numpy_have_no_commas(values: list[Any]) -> None:
    written = str(np.array(values, dtype=object if isinstance(values[0], str) else None))
    assert looks_like_list(written)
    assert read_list(written, "c", "w") == values


@pytest.mark.parametrize(
    "text",
    ["['a', 'b", '["a", "b"', "[a, b]", "['a', b c]", "['a' 'b', 'c']", "['a' ... 'b']", "['a'; 'b']"],
)
def test_a_broken_list_is_refused(tmp_path: Path, text: str) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea", text], ["water", "x"])
    with pytest.raises(DataError) as error:
        read_training_rows("t", task(path, "multi-label"))
    assert "row 1" in str(error.value)
    assert str(error.value).count(". ") <= 1


@pytest.mark.parametrize("text", ["[CLS] a b [SEP]", "[note]", "[1] is a note", "a [b, c]", "(see below)", "[1, 2 are"])
def test_other_brackets_are_text(text: str) -> None:
    assert not looks_like_list(text)
    assert split_blanks(text, "c", "w") == text.split(" ")


@pytest.mark.parametrize("written", ["['joy', 'awe']", '["joy", "awe"]', "['joy' 'awe']", "joy,awe"])
def test_several_labels_of_a_cell(tmp_path: Path, written: str) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea", written], ["water", "[]"])
    found = read_training_rows("t", task(path, "multi-label"))
    assert [row.target for row in found.rows] == [("joy", "awe"), ()]


@pytest.mark.parametrize(
    "written",
    [
        "{'joy', 'awe'}",
        '{"joy","awe"}',
        "frozenset({'joy', 'awe'})",
        "set(['joy', 'awe'])",
        "array(['joy', 'awe'], dtype=object)",
        "np.array(['joy', 'awe'],\n      dtype='<U3')",
        repr([np.str_("joy"), np.str_("awe")]),
        repr({np.str_("joy"): 0, np.str_("awe"): 0}.keys()).removeprefix("dict_keys(").removesuffix(")"),
    ],
)
def test_labels_that_python_or_numpy_wrote_with_their_type(tmp_path: Path, written: str) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea", written], ["water", "set()"], ["ice", "[True]"])
    found = read_training_rows("t", task(path, "multi-label"))
    assert [row.target for row in found.rows] == [("joy", "awe"), (), ("true",)]


@pytest.mark.parametrize(
    "written",
    [
        "[joy]",
        "{joy, awe}",
        "{joy}",
        "{}",
        "{'joy': 1}",
        "{'joy', 'aw",
        "{'jo",
        "{'joy' 'awe'}",
        "['joy''s', 'awe']",
        "[None]",
        "[nan]",
        "[np.nan]",
        "array([['joy'], ['awe']], dtype=object)",
        "Index(['joy', 'awe'], dtype='object')",
    ],
)
def test_labels_of_another_form_are_refused(tmp_path: Path, written: str) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea", written], ["water", "awe"])
    with pytest.raises(DataError, match="row 1"):
        read_training_rows("t", task(path, "multi-label"))


@pytest.mark.parametrize("written", ["[1] joy;[2] awe", "joy [x];awe (y)"])
def test_brackets_in_labels_are_text(tmp_path: Path, written: str) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea", written], ["water", "cup()"])
    found = read_training_rows("t", task(path, "multi-label", separator=";"))
    assert [row.target for row in found.rows] == [tuple(written.split(";")), ("cup()",)]


@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_a_set_is_no_class_and_has_no_order(tmp_path: Path, kind: str) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea cup", "{'B', 'O'}"], ["water glass", "B O"])
    with pytest.raises(DataError, match="row 1"):
        read_training_rows("t", task(path, kind))


def test_tags_that_numpy_wrote_with_their_type(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea cup", "array(['B', 'O'], dtype=object)"])
    assert read_training_rows("t", task(path, "tagging")).rows[0].target == ("B", "O")


def test_a_class_is_no_list(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["tea", "['joy']"], ["water", "awe"])
    with pytest.raises(DataError, match="row 1"):
        read_training_rows("t", task(path, "classification"))


def test_words_and_tags_of_a_cell(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "a.csv", ["text", "label"], ["['12\u00a0500', 'cups']", "[1 0]"], ["12\u00a0500 cups", "1 0"]
    )
    rows = read_training_rows("t", task(path, "tagging")).rows
    assert [(row.texts, row.target) for row in rows] == 2 * [(("12\u00a0500", "cups"), ("1", "0"))]


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        ("{'text': ['green tea'], 'answer_start': [10]}", "green tea"),
        ('{"text": ["green tea"], "answer_start": [10]}', "green tea"),
        ("['green tea', 'tea']", "green tea"),
        ("[1]", "[1]"),  # a text of the context
    ],
)
def test_answers_of_a_cell(tmp_path: Path, cell: str, answer: str) -> None:
    context = "They like green tea [1]."
    path = write_csv(tmp_path / "a.csv", ["question", "context", "answers"], ["What?", context, cell])
    (row,) = read_training_rows("t", task(path, "span")).rows
    assert isinstance(row.target, AnswerSpan)
    assert context[row.target.start : row.target.end] == row.target.answers[0] == answer


def test_a_broken_mapping_is_refused(tmp_path: Path) -> None:
    cell = "{'text': array(['tea'], dtype=object), 'answer_start': array([0])}"
    path = write_csv(tmp_path / "a.csv", ["question", "context", "answers"], ["What?", "tea", cell])
    with pytest.raises(DataError, match="row 1"):
        read_training_rows("t", task(path, "span"))


BLANKS = ["\u00a0", "\u202f", "\u2009", "\u3000", "\u0085", "\u2028", "\x0b"]


@pytest.mark.parametrize("separator", [" ", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_blanks_of_unicode_are_in_words(tmp_path: Path, separator: str, end: str) -> None:
    words = [f"12{blank}500" for blank in BLANKS]
    lines = [f"{word}{separator}B-N" for word in words]
    path = tmp_path / "a.conll"
    path.write_bytes(("\ufeff" + end.join([*lines, f"tea{separator}O "]) + 2 * end).encode())
    ((found, tags), _), *rest = read_conll(path, {})
    assert found == [*words, "tea"]
    assert tags == [*(len(words) * ["B-N"]), "O"]
    assert not rest


def test_a_word_of_blanks_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    for line in ("\u00a0\tO", "\u00a0"):
        path.write_text(f"tea\tO\n{line}\n", encoding="utf-8")
        with pytest.raises(DataError, match="line 2"):
            list(read_conll(path, {}))


def test_a_tab_in_a_file_with_spaces_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("In O\nOslo B-PLACE\n\nRome\tB-PLACE\n", encoding="utf-8")
    with pytest.raises(DataError) as error:
        list(read_conll(path, {}))
    assert "line 1 " in str(error.value)
    assert "line 4" in str(error.value)


CONLLU = """# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\t_\t_\t5\tcase\t_\t_
4\tel\tel\tDET\t_\t_\t5\tdet\t_\t_
5\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_
5.1\tir\tir\tVERB\t_\t_\t_\t_\t_\t_
"""
UD_COLUMNS = ["id", "text", "lemma", "label", "x", "feats", "head", "rel", "deps", "misc"]


@pytest.mark.parametrize(("name", "columns"), [("a.conllu", []), ("a.tsv.conll", UD_COLUMNS)])
def test_multiword_tokens_are_their_words_and_counted(tmp_path: Path, name: str, columns: list[str]) -> None:
    path = tmp_path / name
    path.write_text(CONLLU, encoding="utf-8")
    config = task(path, "tagging", columns=columns)
    found = read_training_rows("t", config)
    (row,) = found.rows
    assert row.texts == ("vamos", "nos", "a", "el", "mar")
    assert row.target == ("VERB", "PRON", "ADP", "DET", "NOUN")
    test = read_held_out_rows("t", config, found.spec)
    for notes in (found.notes, test.notes):
        assert any("multiword tokens (2 " in note for note in notes)
        assert any("empty nodes (1 " in note for note in notes)


def test_conllu_without_its_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("1\ttea\tNOUN\n2\tflows\tVERB\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1"):
        list(read_conll(path, {}))


def test_skipped_lines_are_counted_for_every_caller(tmp_path: Path) -> None:
    path = tmp_path / "a.iob2"
    path.write_text("1-2\tdu\t_\t-\n1\tde\tO\t-\n2\tle\tO\t-\n", encoding="utf-8")
    skipped = Counter[str]()
    ((words, _), _), *rest = read_conll(path, {}, skipped=skipped)
    assert (words, rest, skipped) == (["de", "le"], [], {"multiword tokens": 1})
