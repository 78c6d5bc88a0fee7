"""Labelled sequences: which tokens texts, pairs, expressions and images become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from graftlm.data.sequence_batches import SequenceBatches, collate_sequences, sequences_by_length
from graftlm.data.sequence_config import SequenceConfig
from graftlm.data.sequences import Sequences, SequenceTask, read_task, read_test
from graftlm.errors import DataError, RecipeError
from graftlm.runs.recipe import parse_recipe

TSV = "Source\tTarget\n( ( [MAX 2 ) 9 ) ]\t9\n[MIN 3 4 ]\t3\n"
ROWS = [{"text": "good", "label": "yes"}, {"text": "schön", "label": "no"}, {"text": "x" * 30, "label": "no"}]
PAIRS = [{"a": "abcdefgh", "b": "xy", "label": "1"}, {"a": "ab", "b": "uvwxyz", "label": "0"}]


def config(**values: Any) -> SequenceConfig:
    adapter: TypeAdapter[SequenceConfig] = TypeAdapter(SequenceConfig)
    return adapter.validate_python(values)


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / name)


def bytes_task(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> SequenceTask:
    path = write(folder, rows)
    return read_task(config(task="bytes", train=path, test=path, **changes))


def listops_task(folder: Path, text: str = TSV, **changes: Any) -> SequenceTask:
    path = folder / "lists.tsv"
    path.write_text(text, encoding="utf-8")
    return read_task(config(task="listops", train=str(path), test=str(path), **changes))


def test_each_byte_is_a_token(tmp_path: Path) -> None:
    task = bytes_task(tmp_path, ROWS, length=20)
    assert task.classes == ("no", "yes")
    assert task.train.labels.tolist() == [1, 0, 0]
    assert [bytes((ids - 1).tolist()).decode() for ids in task.train.ids] == ["good", "schön", "x" * 20]
    assert max(int(ids.max()) for ids in task.train.ids) < task.vocab_size
    cut = [note for note in task.notes if "were cut" in note]
    assert len(cut) == 2, "of training and test rows"
    assert any("3 test rows, 3" in note for note in task.notes), "test rows that are training rows"


def test_of_a_pair_the_longer_text_is_cut_first(tmp_path: Path) -> None:
    task = bytes_task(tmp_path, PAIRS, text=["a", "b"], length=8)
    separator = task.vocab_size - 1
    parts = []
    for ids in task.train.ids:
        assert len(ids) == 8
        (place,) = np.flatnonzero(ids == separator)
        parts.append(tuple(bytes((part - 1).tolist()) for part in (ids[:place], ids[place + 1 :])))
    assert parts == [(b"abcde", b"xy"), (b"ab", b"uvwxy")]
    both = bytes_task(tmp_path, [{"a": "a" * 9, "b": "b" * 9, "label": n} for n in "12"], text=["a", "b"], length=8)
    assert [int(count) for count in np.bincount(both.train.ids[0])[[98, 99]]] == [4, 3]


def test_pixels_are_read_row_by_row() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    task = read_task(config(task="pixels", test_rows=100))
    assert (len(task.test), len(task.train)) == (100, 1697)
    images = {image.astype(int).tobytes(): label for image, label in zip(digits.images, digits.target, strict=True)}
    for ids, label in zip(task.test.ids, task.test.labels.tolist(), strict=True):
        assert images[(ids.astype(int) - 1).reshape(8, 8).tobytes()] == label
    found = {ids.tobytes() for ids in [*task.train.ids, *task.test.ids]}
    assert len(found) == len(images)


def test_generated_lists_have_disjoint_test_rows() -> None:
    values: dict[str, Any] = {"task": "listops", "shortest": 4, "length": 20, "test_rows": 15}
    small, large = (read_task(config(**values, rows=rows)) for rows in (20, 60))
    texts = [{ids.tobytes() for ids in sequences.ids} for sequences in (small.test, large.train, large.test)]
    assert texts[0] == texts[2], "more training rows leave the test rows as they are"
    assert not texts[1] & texts[2]
    assert large.train.longest <= 20


def test_published_files_of_lists(tmp_path: Path) -> None:
    task = listops_task(tmp_path)
    assert task.train.labels.tolist() == [9, 3]
    assert [len(ids) for ids in task.train.ids] == [4, 4]


def test_other_files_are_read_by_the_classes_of_training(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    of_bytes = config(task="bytes", train=path, test=path)
    sequences, _ = read_test(of_bytes, ["yes", "no"], path)
    assert sequences.labels.tolist() == [0, 1, 1]
    with pytest.raises(DataError) as error:
        read_test(of_bytes, ["yes", "never"], path)
    assert "'no'" in str(error.value)
    with pytest.raises(DataError) as error:
        read_test(config(task="pixels"), ["0"], path)
    assert "--rows" in str(error.value)


def test_each_epoch_has_every_row_once_and_batches_depend_on_the_step_alone() -> None:
    rows = Sequences([np.arange(1, 2 + n, dtype=np.int32) for n in range(7)], np.arange(7))
    batches = SequenceBatches(rows, 3, seed=5)
    epochs = torch.cat([batches.batch(step).labels for step in range(7)]).tolist()
    assert sorted(epochs) == sorted([*range(7)] * 3)
    again = SequenceBatches(rows, 3, seed=5)
    for step in (4, 0, 6):
        assert torch.equal(again.batch(step).input_ids, batches.batch(step).input_ids)
    assert again.fingerprint() == batches.fingerprint() != SequenceBatches(rows, 3, seed=6).fingerprint()


def test_batches_are_padded_at_the_end_and_parts_of_them_less() -> None:
    rows = Sequences([np.full(n, n, dtype=np.int32) for n in (2, 5, 3, 1)], np.array([0, 1, 2, 3]))
    batch = collate_sequences(rows, [0, 1, 2, 3])
    assert batch.labels.tolist() == [1, 2, 0, 3]
    assert batch.totals().tolist() == [4.0, 11.0]
    assert torch.equal(batch.attention_mask, (batch.input_ids != 0).long())
    part = batch.rows(slice(2, 4))
    assert part.input_ids.tolist() == [[2, 2], [1, 0]]
    order = [row for numbers, _ in sequences_by_length(rows, 3) for row in numbers]
    assert order == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("rows", "changes", "key"),
    [
        ([{"text": "", "label": "a"}, *ROWS], {}, "text"),
        ([{"text": 3, "label": "a"}, *ROWS], {}, "'text'"),
        ([{"text": "x"}, *ROWS], {}, "'label'"),
        ([{"text": "x", "label": None}, *ROWS], {}, "label"),
        (ROWS[1:], {}, "'no'"),  # one class
        ([], {}, "no rows"),
        (ROWS, {"labels": ["yes", "maybe"]}, "'no'"),
        (ROWS, {"length": 20, "truncation": False}, "data.truncation"),
        (ROWS, {"text": "body"}, "'body'"),
        (ROWS, {"limit": 1}, "data.limit"),
    ],
)
def test_bad_rows_of_bytes_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(DataError) as error:
        bytes_task(tmp_path, rows, **changes)
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = Path(write(tmp_path, ROWS))
    path.write_bytes(path.read_bytes()[:-9])
    for name in (str(path), str(tmp_path / "none.jsonl"), str(tmp_path)):
        with pytest.raises(DataError) as error:
            read_task(config(task="bytes", train=name, test=name))
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("text", "changes", "key"),
    [
        (TSV[:-6], {}, "row 2"),  # cut within an expression
        (TSV.replace("\t3", "\t4"), {}, "Target"),
        (TSV.replace("\t3", "\tthree"), {}, "Target"),
        (TSV.replace("Source", "Text"), {}, "'Source'"),
        ("Source\tTarget\n", {}, "rows"),
        (TSV, {"length": 4, "shortest": 4}, ""),
        (TSV.replace("[MIN 3 4 ]", "[MIN 3 4 5 ]"), {"length": 4, "shortest": 4}, "data.length"),
        ("Source\tTarget\n[MIN 3 4 ]\t3\n[MAX 3 1 ]\t3\n", {}, "'3'"),
    ],
)
def test_bad_files_of_lists_are_refused(tmp_path: Path, text: str, changes: dict[str, Any], key: str) -> None:
    if not key:
        assert len(listops_task(tmp_path, text, **changes).train) == 2
        return
    with pytest.raises(DataError) as error:
        listops_task(tmp_path, text, **changes)
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"task": "words"}, "task"),
        ({}, "task"),
        ({"task": "listops", "train": "a.tsv"}, "test"),
        ({"task": "listops", "shortest": 50, "length": 20}, "shortest"),
        ({"task": "listops", "shortest": 500, "depth": 1}, "depth"),
        ({"task": "listops", "rows": "many"}, "rows"),
        ({"task": "bytes", "train": "a.csv"}, "test"),
        ({"task": "bytes", "train": [], "test": "a.csv"}, "train"),
        ({"task": "bytes", "train": "a.csv", "test": "a.csv", "text": ["a", "b", "c"]}, "text"),
        ({"task": "bytes", "train": "a.csv", "test": "a.csv", "text": "label"}, "label"),
        ({"task": "pixels", "images": "cats"}, "images"),
        ({"task": "pixels", "test_rows": 1797}, "test_rows"),
    ],
)
def test_mistakes_in_the_data_section_name_their_key(values: dict[str, Any], key: str) -> None:
    from graftlm.runs.classifier_run import ClassifierRecipe

    with pytest.raises(RecipeError) as error:
        ClassifierRecipe.parse({"kind": "classifier", "model": {"model_type": "block-state"}, "data": values} | STEPS)
    assert key in str(error.value)


STEPS = {"training": {"steps": 1}}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"task": "nope"}, ("data", "listops, bytes or pixels")),
        ({"task": "pixels", "length": 10}, ("data.length", "another kind")),
    ],
)
def test_keys_of_other_tasks_are_named(data: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(
            {"kind": "classifier", "model": {"model_type": "block-state"}, "data": data} | STEPS, "recipe.yaml"
        )
    assert all(text in str(error.value) for text in named)
    assert "mapping" not in str(error.value)
