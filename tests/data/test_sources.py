"""Sources: what is read, in which order, and what each kind of bad input says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from graftlm.data import DataConfig, Document, SourceConfig, build_documents, read_documents
from graftlm.errors import DataError, RecipeError


def texts(**values: object) -> list[str]:
    return [document.text for document in read_documents(SourceConfig.parse(values))]


def message(**values: object) -> str:
    with pytest.raises(DataError) as caught:
        build_documents([SourceConfig.parse(values)])
    return str(caught.value)


def write_parquet(path: Path, column: str, values: list) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({column: values, "id": list(range(len(values)))}), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents d0 to d6 in the order of their files' names, and some that are not to be read."""
    (tmp_path / "a").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a" / "one.txt").write_text("d0")
    (tmp_path / "b.jsonl").write_text('{"text": "d1"}\n\n{"text": "d2", "n": 1}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "d3"}\n')
    (tmp_path / "d.json").write_text('[{"text": "d4"}, {"text": "d5"}]')
    write_parquet(tmp_path / "e.parquet", "text", ["d6"])
    for ignored in (".secret.txt", ".hidden/x.txt", "f.bin"):
        (tmp_path / ignored).write_text("never")
    (tmp_path / "g.txt").write_text(" \n")
    return tmp_path


def test_a_folder_gives_all_its_documents_in_order(folder: Path) -> None:
    assert texts(path=str(folder)) == [f"d{i}" for i in range(7)]


def test_documents_have_their_location(folder: Path) -> None:
    found = list(read_documents(SourceConfig(path=str(folder))))
    assert found[0] == Document("d0", str(folder / "a" / "one.txt"))
    assert found[2].where == f"{folder / 'b.jsonl'}: line 3"
    assert found[5].where == f"{folder / 'd.json'}: row 2"


def test_a_pattern_picks_files(folder: Path) -> None:
    assert texts(path=str(folder), pattern="*.bin") == ["never"]
    assert texts(path=str(folder), pattern="a/*") == ["d0"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("0:2", [0, 1]), ("-2:", [5, 6]), (":3", [0, 1, 2]), ("1:-4", [1, 2]), (":", list(range(7))), ("5:99", [5, 6])],
)
def test_documents_slice(folder: Path, chosen: str, expected: list[int]) -> None:
    assert texts(path=str(folder), documents=chosen) == [f"d{i}" for i in expected]


def test_limits(folder: Path) -> None:
    assert texts(path=str(folder), limit_documents=2) == ["d0", "d1"]
    assert texts(path=str(folder), limit_characters=3) == ["d0", "d"]
    assert texts(path=str(folder), limit_characters=4) == ["d0", "d1"]


def test_documents_without_text_after_the_skipped_characters_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "b.txt").write_text("a longer text")
    assert texts(path=str(tmp_path), skip_characters=9) == ["text"]
    with pytest.raises(DataError):
        texts(path=str(tmp_path), skip_characters=99)


def test_text_keeps_characters_but_not_marks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfd\xc3\xa9j\xc3\xa0\r\nvu\n")
    assert texts(path=str(tmp_path)) == ["déjà\nvu\n"]


def test_a_single_file_may_have_any_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text("x")
    assert texts(path=str(tmp_path / "notes.log")) == ["x"]


def test_a_saved_dataset_and_its_splits(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["a", "b"]})
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "both"))
    rows.save_to_disk(str(tmp_path / "one"))
    assert texts(dataset=str(tmp_path / "one"), text_column="body") == ["a", "b"]
    assert texts(path=str(tmp_path / "both"), text_column="body", split="test") == ["b"]
    assert "did you mean test?" in message(dataset=str(tmp_path / "both"), split="tst")
    assert "'text'" in message(dataset=str(tmp_path / "one"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_local_parquet_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_parquet(tmp_path / "set" / "train-00000.parquet", "text", ["a", "b"])
    assert texts(dataset=str(tmp_path / "set"), streaming=streaming) == ["a", "b"]


def test_missing_path() -> None:
    assert "no/such" in message(path="no/such")


def test_empty_folder_names_the_suffixes(tmp_path: Path) -> None:
    found = message(path=str(tmp_path))
    assert str(tmp_path) in found
    assert all(suffix in found for suffix in (".txt", ".jsonl", ".parquet"))
    assert "'*.c'" in message(path=str(tmp_path), pattern="*.c")


def test_binary_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"PNG\0\1")
    found = message(path=str(tmp_path))
    assert str(tmp_path / "a.txt") in found
    assert "byte 3" in found


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_in_another_encoding_is_named(tmp_path: Path, name: str, encoding: str) -> None:
    (tmp_path / name).write_bytes("Tea is good.".encode(encoding))
    found = message(path=str(tmp_path / name))
    assert str(tmp_path / name) in found
    assert f"is {encoding.upper()} text" in found


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_broken_utf8_names_the_byte(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(mark + b"caf\xe9 noir")
    found = message(path=str(tmp_path))
    assert str(tmp_path / "a.txt") in found
    assert f"byte {len(mark) + 3}" in found
    assert "0xe9" in found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"body": "x", "id": 1}', ["'text'", "body, id", "text_column"]),
        (b'{"text": 5}', ["int", "'text'"]),
        (b'{"text": null}', ["nothing", "'text'"]),
        (b'{"text": "x"', ["JSON"]),
        (b'"x"', ["str", "'text'"]),
        (b'{"text": "\xe9"}', ["byte 10", "0xe9"]),
        (b'{"text": "a\\ud800"}', ["surrogate", "character 1", "'text'"]),
        (b"[" * 100_000, ["JSON", "nested"]),
    ],
)
def test_bad_rows(tmp_path: Path, line: bytes, expected: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    found = message(path=str(path))
    assert found.startswith(f"{path}: line 2 ")
    assert all(part in found for part in expected)


def test_a_json_string_without_end_is_located_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x')
    assert " at at " not in message(path=str(path))
    assert " at column 10" in message(path=str(path))


def test_a_json_object_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"text": "x"}, indent=2))
    assert "JSON" in message(path=str(path))


def test_bad_row_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "x"}, {"txt": "y"}]')
    assert message(path=str(path)).startswith(f"{path}: row 2 ")


@pytest.mark.parametrize("keep", [5, 40, -4])
def test_truncated_gzip(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"text": "row %d"}\n' % i for i in range(200)))[:keep])
    found = message(path=str(path))
    assert str(path) in found
    assert "gzip" in found


def test_a_gzip_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_text("plain")
    assert "gzip" in message(path=str(tmp_path))


def test_truncated_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", "text", ["x" * 100])
    path.write_bytes(path.read_bytes()[:-20])
    found = message(path=str(path))
    assert found.startswith(f"{path} ")
    assert "parquet" in found


def test_bad_parquet_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", "text", ["x", None])
    assert message(path=str(path)).startswith(f"{path}: row 2 ")
    found = message(path=str(path), text_column="body")
    assert all(part in found for part in (str(path), "'body'", "text, id"))


def test_no_text_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n")
    (tmp_path / "b.txt").write_text("x")
    assert "a.txt" in message(path=str(tmp_path / "a.txt"))
    assert "documents 5:" in message(path=str(tmp_path), documents="5:")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_dataset(streaming: bool) -> None:
    found = message(dataset="nobody/nothing", streaming=streaming)
    assert all(part in found for part in ("nobody/nothing", "split train"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"path": "x", "documents": "1-5"}, "new.0.documents"),
        ({"path": "x", "documents": "3"}, "new.0.documents"),
        ({"path": "x", "dataset": "y"}, "new.0: "),
        ({}, "new.0: "),
        ({"dataset": "x", "streaming": True, "documents": "-2:"}, "streaming"),
        ({"pth": "x"}, "new.0.pth (did you mean path?)"),
        ({"path": "x", "limit_documents": 0}, "new.0.limit_documents"),
    ],
)
def test_bad_configs(values: dict, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        DataConfig.parse({"new": [values]})
    assert expected in str(caught.value)
