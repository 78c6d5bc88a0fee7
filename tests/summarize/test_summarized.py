"""Tables of documents with human summaries: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftlm.errors import DataError
from graftlm.pipelines.summarize.summarized import hold_out, read_summarized
from summarize.tools import TEA, write_rows

pytest.importorskip("sentencex")
TEXT = "Tea is good for all of us. Water is wet and cold. It has no taste."


def test_documents_are_read_from_text_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "tea.md").write_text(TEA, encoding="utf-8")
    path = write_rows(
        tmp_path / "a.jsonl",
        {"text": TEXT, "summary": "Tea is good. Water is wet.", "id": 3},
        {"file": "papers/tea.md", "summary": "Tea helps."},
        {"text": TEA, "format": ".md", "summary": "Der Tee hilft.", "language": "de"},
    )
    first, second, third = read_summarized(path)
    assert first.document.text == TEXT
    assert first.summary_sentences == ["Tea is good.", "Water is wet."]
    assert second.document.title == third.document.title == "A study of tea"
    assert second.summary == "Tea helps."
    assert third.document.language == "de"
    assert ": line 1" in first.document.name


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"text": TEXT}, "summary"),
        ({"text": TEXT, "summary": ""}, "summary"),
        ({"text": TEXT, "summary": None}, "summary"),
        ({"text": TEXT, "summary": " ..."}, "summary"),
        ({"text": TEXT, "summary": 7}, "summary"),
        ({"text": TEXT, "summary": ["Tea."]}, "summary"),
        ({"text": TEXT, "summary": f"{TEXT} {TEXT}"}, "summary"),
        ({"summary": "Tea."}, "text"),
        ({"text": TEXT, "file": "a.txt", "summary": "Tea."}, "file"),
        ({"text": ["Tea."], "summary": "Tea."}, "text"),
        ({"text": "", "summary": "Tea."}, "line 2"),
        ({"text": "... 7 8", "summary": "7"}, "line 2"),
        ({"text": TEXT, "format": ".docx", "summary": "Tea."}, ".docx"),
        ({"text": TEXT, "format": ".pdf", "summary": "Tea."}, ".pdf"),
        ({"text": TEXT, "language": "english", "summary": "Tea."}, "english"),
        ({"file": "nowhere.txt", "summary": "Tea."}, "nowhere.txt"),
        ([TEXT, "Tea."], "line 2"),
        ("Tea.", "line 2"),
    ],
)
def test_a_row_that_is_refused_is_named(tmp_path: Path, row: object, key: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"text": TEXT, "summary": "Tea is good."}, row)
    with pytest.raises(DataError) as error:
        read_summarized(path)
    message = str(error.value)
    assert key in message
    assert "line 2" in message or key == "nowhere.txt"
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("", "no rows"),
        ("\n\n", "no rows"),
        ('{"text": "Tea is good", "summ', "line 1"),
        ('{"text": "Tea is good.", "summary": "Tea."}\n{"text": "Tea', "line 2"),
        ('{"text": "Tea is good.", "text": "Tea is bad.", "summary": "Tea."}', "text"),
    ],
)
def test_a_file_that_is_refused_is_named(tmp_path: Path, content: str, key: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_summarized(path)
    assert str(path) in str(error.value)
    assert key in str(error.value)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "a.docx", "a.jsonl.gz"])
def test_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    if name != "nowhere.jsonl":
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(DataError) as error:
        read_summarized(tmp_path / name)
    assert name in str(error.value)


def test_documents_are_held_out_once_each(tmp_path: Path) -> None:
    rows = [{"text": f"{TEXT} Cup {number}.", "summary": f"Cup {number}."} for number in range(20)]
    documents = read_summarized(write_rows(tmp_path / "a.jsonl", *rows))
    learned, held_out = hold_out(documents, 0.25)
    assert (len(learned), len(held_out)) == (15, 5)
    assert sorted(document.summary for document in learned + held_out) == sorted(row["summary"] for row in rows)
    assert hold_out(documents, 0.25) == (learned, held_out)
    assert hold_out(documents, 0.25, seed=1) != (learned, held_out)
    assert [len(part) for part in hold_out(documents[:2], 0.01)] == [1, 1]
    assert [len(part) for part in hold_out(documents[:2], 0.99)] == [1, 1]
    for few in (documents[:1], []):
        with pytest.raises(DataError) as error:
            hold_out(few, 0.1)
        assert f": {len(few)}" in str(error.value)


def test_equal_documents_stay_together(tmp_path: Path) -> None:
    rows = [{"text": f"{TEXT} Cup {number % 3}.", "summary": f"Cup {number}."} for number in range(12)]
    documents = read_summarized(write_rows(tmp_path / "a.jsonl", *rows))
    for seed in range(5):
        learned, held_out = hold_out(documents, 0.3, seed)
        assert (len(learned), len(held_out)) == (8, 4)
        assert {one.document.text for one in learned}.isdisjoint(one.document.text for one in held_out)
    with pytest.raises(DataError):
        hold_out(documents[::3], 0.3)
