"""Prompts and completions from files: their columns, recipes of them, and what is wrong with a file in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftlm.data import DataConfig, SourceConfig, build_documents, build_mixture, chunks, streams
from graftlm.errors import DataError, RecipeError
from tiny import tiny_tokenizer

PLAIN = tiny_tokenizer()


def write(path: Path, rows: list[dict]) -> Path:
    import csv

    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    return path


ROWS = [{"question": "Où?\nQuand? ", "id": "7", "answer": 'Ici, "là"'}, {"question": "", "id": "8", "answer": "b\n"}]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_columns_of_prompts_and_texts(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows.{suffix}", ROWS)
    source = SourceConfig(path=str(path), text_column="answer", prompt_column="question")
    found = build_documents([source])
    assert [(document.prompt, document.text) for document in found] == [(r["question"], r["answer"]) for r in ROWS]
    assert found[1].where == f"{path}: {'line' if suffix == 'jsonl' else 'row'} 2"
    alone = build_documents([SourceConfig(path=str(path), text_column="answer")])
    assert [(document.prompt, document.text) for document in alone] == [("", r["answer"]) for r in ROWS]


def test_a_tsv_file_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("question\tanswer\nWhere?\tHere\nWhen?\tNow\n")
    source = SourceConfig(path=str(path), text_column="answer", prompt_column="question")
    assert [(found.prompt, found.text) for found in build_documents([source])] == [("Where?", "Here"), ("When?", "Now")]
    with pytest.raises(DataError, match="'text'.*text_column"):
        build_documents([SourceConfig(path=str(path))])


def test_columns_of_a_dataset(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    source = SourceConfig(dataset=str(tmp_path / "set"), text_column="answer", prompt_column="question")
    assert [document.full_text for document in build_documents([source])] == [r["question"] + r["answer"] for r in ROWS]


def test_a_recipe_of_examples(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"text": f"answer {i}", "prompt": f"ask {i}:"} for i in range(9)])
    source = {"path": str(path), "prompt_column": "prompt"}
    values = {"new": [source], "replay_fraction": 0, "length": 40, "boundaries": "whole"}
    batch = build_mixture(DataConfig.parse(values), PLAIN, 2).batch(0)
    assert batch.prompt is not None
    streamed = values | {"new": [source | {"streaming": True}]}
    assert build_mixture(DataConfig.parse(streamed), PLAIN, 2).batch(0).prompt is not None


def message(path: Path, **values: object) -> str:
    with pytest.raises(DataError) as caught:
        build_documents([SourceConfig.parse({"path": str(path), "prompt_column": "prompt"} | values)])
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "x"}, ["'prompt'", "prompt_column"]),
        ({"prompt": "x"}, ["'text'", "text_column"]),
        ({"text": "x", "prompt": 5}, ["int", "'prompt'"]),
        ({"text": None, "prompt": "x"}, ["nothing", "'text'"]),
        ({"text": " \n", "prompt": "x"}, ["empty completion", "'text'"]),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_bad_rows(tmp_path: Path, suffix: str, row: dict, expected: list[str]) -> None:
    path = write(tmp_path / f"rows.{suffix}", [row])
    where = f"{path}: line 1 "
    if suffix == "parquet":
        where = f"{path} " if len(row) == 1 else f"{path}: row 1 "
    found = message(path)
    assert found.startswith(where)
    assert all(part in found for part in expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", " has no column 'text'"),
        ("text,prompt\na,b\nc\n", ": row 2: the number of cells is 1"),
        ('text,prompt\na,"b\n', " is not valid CSV"),
        ("text,prompt\n,b\n", ": row 1 has a prompt and an empty completion"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    assert message(path).startswith(f"{path}{expected}")


def test_plain_text_has_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("x")
    found = message(path)
    assert found.startswith(f"{path} ")
    assert "prompt_column" in found


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("group", [1, 10**6])
def test_a_document_longer_than_a_row_is_named(
    tmp_path: Path, streaming: bool, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlm.data.streams.STREAM_GROUP_CHARACTERS", group)
    monkeypatch.setattr(streams, "GROUP_CHARACTERS", group)
    monkeypatch.setattr(chunks, "CHUNK_CHARACTERS", 6)
    path = write(tmp_path / "rows.jsonl", [{"text": "abc", "prompt": "d"}, {"text": "a b\n" * 9, "prompt": "zz"}])
    source = {"path": str(path), "prompt_column": "prompt", "streaming": streaming}
    config = DataConfig.parse({"new": [source], "replay_fraction": 0, "length": 16, "boundaries": "whole"})
    with pytest.raises(DataError) as caught:
        build_mixture(config, PLAIN, 4).batch(0)
    assert str(caught.value).startswith(f"{path}: line 2 ")
    assert " 16:" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"limit_characters": 9}, "limit_characters"),
        ({"skip_characters": 9}, "skip_characters"),
        ({"prompt_column": "text"}, "text_column"),
    ],
)
def test_bad_configs(values: dict, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        SourceConfig.parse({"path": "x", "prompt_column": "prompt"} | values)
    assert expected in str(caught.value)
