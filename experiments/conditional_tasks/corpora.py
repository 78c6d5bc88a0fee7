"""Eleven English tasks, read from the data folder and written as files for a recipe of tasks.

Test and validation rows are the same for every seed, and training rows are drawn with the seed. If a data set has no
test or validation split, the rows are taken from its training split. Within a task, the splits share no text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study import shuffled
from graftlm.data.conll import read_conll
from graftlm.data.table_files import read_values
from graftlm.files.writing import write_atomically

Record = dict[str, Any]
Splits = dict[str, list[Record]]
SPLITS = ("train", "validation", "test")
MIN_CLASS_ROWS = 2  # training rows of every class
FILES = (
    "cls/clinc150/data_full.json",
    "cls/banking77/train.csv",
    "cls/snips/train_AddToPlaylist_full.json",
    "cls/qnli/dev.tsv",
    "cls/query_wellformedness/train.tsv",
    "cls/sst2/train.txt",
    "cls/trec/train.txt",
    "cls/subj/all.txt",
    "cls/sick/SICK_train.txt",
    "ner/wnut17/wnut17train.conll",
)


class TaskSource(NamedTuple):
    """A task and its data set.

    Args:
        label: name in tables.
        read: reads all rows by split from the data folder.
        columns: the columns of text and label, in the form of a recipe.
        type: type of the task.
        metric: the score of the task.
    """

    label: str
    read: Callable[[Path], Splits]
    columns: dict[str, Any]
    type: str = "classification"
    metric: str = "accuracy"


class SplitSizes(NamedTuple):
    """The number of rows of each split.

    For training it may also be a share of all rows, such as 1%, which gives at least `least` rows.
    """

    train: int | str
    validation: int
    test: int
    least: int = 0


def _clinc150(folder: Path) -> Splits:
    content = json.loads((folder / "cls/clinc150/data_full.json").read_text(encoding="utf-8"))
    splits: Splits = {}
    for split, name in {"train": "train", "validation": "val", "test": "test"}.items():
        splits[split] = [_labelled(*pair) for pair in content[name]]
    return splits


def _snips(folder: Path) -> Splits:
    """Read a file for each intent, in UTF-8 or Latin-1."""
    return {
        "train": _snips_files(folder, "train_*_full.json"),
        "test": _snips_files(folder, "validate_*.json"),
    }


def _snips_files(folder: Path, pattern: str) -> list[Record]:
    rows = []
    for file in sorted((folder / "cls/snips").glob(pattern)):
        content = file.read_bytes()
        try:
            queries = json.loads(content)
        except UnicodeDecodeError:
            queries = json.loads(content.decode("latin-1"))
        for intent, examples in queries.items():
            for query in examples:
                text = "".join(span["text"] for span in query["data"])
                rows.append(_labelled(text, intent))
    return rows


def _decoded(file: Path) -> str:
    """Return the text of a file in UTF-8 or Latin-1."""
    content = file.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _wnut17(folder: Path) -> Splits:
    names = {
        "train": "wnut17train.conll",
        "validation": "emerging.dev.conll",
        "test": "emerging.test.annotated",
    }
    splits: Splits = {}
    for split, name in names.items():
        splits[split] = []
        for (words, tags), _ in read_conll(folder / "ner/wnut17" / name, {}):
            named_words = [word.strip() or "_" for word in words]
            splits[split].append({"words": named_words, "tags": tags})
    return splits


def _lines(files: Mapping[str, str]) -> Callable[[Path], Splits]:
    """Return a reader of files with lines of the form "label text", in UTF-8 or Latin-1."""

    def read(file: Path) -> list[Record]:
        rows = []
        for line in _decoded(file).split("\n"):
            if line.strip():
                label, _, words = line.partition(" ")
                rows.append(_labelled(words, f"class {label}"))
        return rows

    return _split_reader("cls", files, read)


def _sick(column: str, change: Callable[[str], Any]) -> Callable[[Path], Splits]:
    """Return a reader of pairs of sentences with one of their two judgements.

    Args:
        column: the judgement.
        change: converts the judgement to a label.
    """
    files = {
        "train": "SICK_train.txt",
        "validation": "SICK_trial.txt",
        "test": "SICK_test_annotated.txt",
    }

    def read(file: Path) -> list[Record]:
        header, *lines = file.read_text(encoding="utf-8").splitlines()
        columns = header.split("\t")
        rows = []
        for line in lines:
            if not line.strip():
                continue
            cells = dict(zip(columns, line.split("\t"), strict=True))
            row = {
                "first": cells["sentence_A"],
                "second": cells["sentence_B"],
                "label": change(cells[column]),
            }
            rows.append(row)
        return rows

    return _split_reader("cls/sick", files, read)


def _split_reader(
    subfolder: str,
    files: Mapping[str, str],
    read: Callable[[Path], list[Record]],
) -> Callable[[Path], Splits]:
    """Return a function that reads a file for each split."""

    def read_splits(folder: Path) -> Splits:
        return {split: read(folder / subfolder / name) for split, name in files.items()}

    return read_splits


def _labelled(text: str, label: str) -> Record:
    return {"text": " ".join(text.split()), "label": label}


def _scored(text: str, score: str) -> Record:
    return {"text": text, "score": float(score)}


def _tables(
    files: Mapping[str, str],
    columns: Mapping[str, str],
    change: Callable[..., Record] = _labelled,
    header: Sequence[str] = (),
) -> Callable[[Path], Splits]:
    """Return a reader of a CSV, TSV or JSON file for each split.

    Args:
        files: the file of each split.
        columns: the columns by the names of `change`'s arguments.
        change: makes a record from the values of a row.
        header: the names of the columns, if the files have no header.
    """

    def read(file: Path) -> list[Record]:
        records = []
        for values, _ in read_values(file, columns, header=header):
            arguments = dict(zip(columns, values, strict=True))
            records.append(change(**arguments))
        return records

    return _split_reader("cls", files, read)


_TEXT = {"text": "text", "label": "label"}
_PAIR = {"text": ["first", "second"], "label": "label"}
_QNLI = _tables(
    {"train": "qnli/dev.tsv"},
    columns={"question": "question", "sentence": "sentence", "label": "label"},
    change=dict,
)
_WELLFORMED = _tables(
    {
        "train": "query_wellformedness/train.tsv",
        "validation": "query_wellformedness/dev.tsv",
        "test": "query_wellformedness/test.tsv",
    },
    columns={"text": "text", "score": "score"},
    change=_scored,
    header=("text", "score"),
)
_BANKING77 = _tables(
    {"train": "banking77/train.csv", "test": "banking77/test.csv"},
    columns={"text": "text", "label": "category"},
)
_SST2 = _lines(
    {
        "train": "sst2/train.txt",
        "validation": "sst2/dev.txt",
        "test": "sst2/test.txt",
    }
)
_TREC = _lines({"train": "trec/train.txt", "test": "trec/test.txt"})
TASKS: dict[str, TaskSource] = {
    "clinc150": TaskSource("CLINC150", _clinc150, _TEXT),
    "qnli": TaskSource("QNLI", _QNLI, {"text": ["question", "sentence"], "label": "label"}),
    "wellformed": TaskSource(
        "query well-formedness", _WELLFORMED, {"text": "text", "label": "score"}, "regression", "pearson"
    ),
    "banking77": TaskSource("Banking77", _BANKING77, _TEXT),
    "snips": TaskSource("SNIPS", _snips, _TEXT),
    "wnut17": TaskSource("WNUT17", _wnut17, {}, "tagging", "entity_f1"),
    "sst2": TaskSource("SST-2", _SST2, _TEXT),
    "trec": TaskSource("TREC", _TREC, _TEXT),
    "subj": TaskSource("SUBJ", _lines({"train": "subj/all.txt"}), _TEXT),
    "sick": TaskSource("SICK entailment", _sick("entailment_judgment", str), _PAIR),
    "sick_relatedness": TaskSource(
        "SICK relatedness", _sick("relatedness_score", float), _PAIR, "regression", "pearson"
    ),
}


def write_splits(splits: Splits, out: Path, task: str) -> dict[str, Path]:
    """Write the splits of a task as JSON Lines, or as CoNLL for tagging, and return the files by split."""
    suffix = "conll" if TASKS[task].type == "tagging" else "jsonl"
    files = {split: out / f"{task}-{split}.{suffix}" for split in splits}
    for split, rows in splits.items():
        # SNIPS has unpaired surrogates, which can't be encoded.
        write_atomically(files[split], _format(rows).encode(errors="replace"))
    return files


def draw_splits(
    splits: Mapping[str, list[Record]],
    sizes: SplitSizes,
    seed: int,
    key: Callable[[Record], str] | None = None,
) -> Splits:
    """Draw the rows of training, validation and test.

    Only the training rows depend on the seed. Training has at least `MIN_CLASS_ROWS` rows of every class, as far as the
    data set has them.

    Args:
        splits: all rows by split.
        sizes: the numbers of rows.
        seed: the seed of the training rows.
        key: returns what no two splits may share; by default `text_of`.
    """
    key = key or text_of
    splits = {split: shuffled(rows, "parts") for split, rows in splits.items()}
    test, splits = _held_out(splits, "test", sizes.test, key)
    validation, splits = _held_out(splits, "validation", sizes.validation, key)
    train = _with_every_class(shuffled(splits["train"], f"train {seed}"), sizes.train, sizes.least)
    return {"train": train, "validation": validation, "test": test}


def _held_out(
    splits: Mapping[str, list[Record]], split: str, count: int, key: Callable[[Record], str]
) -> tuple[list[Record], Splits]:
    """Return the first rows of a split, and all splits without the rows that share a key with those."""
    held_out = splits.get(split, splits["train"])[:count]
    keys = {key(row) for row in held_out}
    others: Splits = {}
    for name, rows in splits.items():
        others[name] = [row for row in rows if key(row) not in keys]
    return held_out, others


def _with_every_class(rows: Sequence[Record], size: int | str, least: int) -> list[Record]:
    """Return the first `size` rows, which include the first `MIN_CLASS_ROWS` rows of every class."""
    if isinstance(size, int):
        count = size
    else:
        share = float(size.rstrip("%"))
        count = max(least, round(len(rows) * share / 100))
    seen: Counter[str] = Counter()
    first = []
    others = []
    for row in rows:
        classes = _classes_of(row)
        is_rare = any(seen[label] < MIN_CLASS_ROWS for label in classes)
        seen.update(classes)
        if is_rare:
            first.append(row)
        else:
            others.append(row)
    return [*first, *others][: max(len(first), count)]


def _classes_of(row: Record) -> set[str]:
    """Return the tags of a row, or its label unless that is a number."""
    if "tags" in row:
        return set(row["tags"])
    label = row.get("label")
    return {label} if isinstance(label, str) else set()


def text_of(row: Mapping[str, Any]) -> str:
    """Return a lower-case key that two forms of an example share: for QNLI the sentence, for SICK the pair."""
    if row.get("words"):
        text = " ".join(row["words"])
    else:
        parts = [row[name] for name in ("sentence", "text", "first", "second") if name in row]
        text = " ".join(sorted(parts))
    return " ".join(text.lower().split())


def question_of(row: Mapping[str, Any]) -> str:
    """Return a lower-case key of a row: for QNLI the question, for other tasks the key of `text_of`."""
    return " ".join(row["question"].lower().split()) if "question" in row else text_of(row)


def _format(rows: Iterable[Record]) -> str:
    """Return a line of JSON per row; for tagging a line per word, and an empty line after each sentence."""
    lines = []
    for row in rows:
        if "words" not in row:
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            continue
        for word, tag in zip(row["words"], row["tags"], strict=True):
            lines.append(f"{word}\t{tag}\n")
        lines.append("\n")
    return "".join(lines)
