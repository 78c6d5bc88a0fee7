"""Eleven English tasks, read from the data folder and written as the files that a recipe of tasks names.

Test and validation rows are the same for every seed. Training rows are drawn by the seed. A set without a test or
validation split takes it from its training rows. Within a task, no text of the test is in validation, and none of both
in training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study import shuffled
from graftlm.data.labelled import read_conll
from graftlm.data.table_files import read_values
from graftlm.files.writing import write_atomically

Record = dict[str, Any]
Splits = dict[str, list[Record]]
SPLITS = ("train", "validation", "test")
MIN_CLASS_ROWS = 2  # a class with fewer training rows can't be learned
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
        label: name for readers.
        read: reads all rows by split from the data folder.
        columns: the columns of text and label, as a recipe names them.
        type: type of the task.
        metric: the task's score.
    """

    label: str
    read: Callable[[Path], Splits]
    columns: dict[str, Any]
    type: str = "classification"
    metric: str = "accuracy"


class SplitSizes(NamedTuple):
    """Number of rows of each split; for training a share such as 1% of all rows as well, but not fewer than `least`."""

    train: int | str
    validation: int
    test: int
    least: int = 0


def _clinc150(folder: Path) -> Splits:
    content = json.loads((folder / "cls/clinc150/data_full.json").read_text(encoding="utf-8"))
    names = {"train": "train", "validation": "val", "test": "test"}
    return {split: [_labelled(*pair) for pair in content[name]] for split, name in names.items()}


def _snips(folder: Path) -> Splits:
    """A file for each intent, in UTF-8 or Latin-1."""

    def read(pattern: str) -> list[Record]:
        rows = []
        for file in sorted((folder / "cls/snips").glob(pattern)):
            content = file.read_bytes()
            try:
                queries = json.loads(content)
            except UnicodeDecodeError:
                queries = json.loads(content.decode("latin-1"))
            for intent, examples in queries.items():
                rows += [_labelled("".join(span["text"] for span in query["data"]), intent) for query in examples]
        return rows

    return {"train": read("train_*_full.json"), "test": read("validate_*.json")}


def _wnut17(folder: Path) -> Splits:
    names = {"train": "wnut17train.conll", "validation": "emerging.dev.conll", "test": "emerging.test.annotated"}
    sentences = {split: read_conll(folder / "ner/wnut17" / name, {}) for split, name in names.items()}
    return {
        split: [{"words": [word.strip() or "_" for word in words], "tags": tags} for (words, tags), _ in of_split]
        for split, of_split in sentences.items()
    }


def _lines(files: Mapping[str, str]) -> Callable[[Path], Splits]:
    """Reads files of "label text" lines, in UTF-8 or Latin-1."""

    def read(file: Path) -> list[Record]:
        content = file.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            text = content.decode("latin-1")
        pairs = (line.partition(" ") for line in text.split("\n") if line.strip())
        return [_labelled(words, f"class {label}") for label, _, words in pairs]

    return lambda folder: {split: read(folder / "cls" / name) for split, name in files.items()}


def _sick(column: str, change: Callable[[str], Any]) -> Callable[[Path], Splits]:
    """Pairs of sentences and one of their two judgements."""
    files = {"train": "SICK_train.txt", "validation": "SICK_trial.txt", "test": "SICK_test_annotated.txt"}

    def read(file: Path) -> list[Record]:
        header, *lines = file.read_text(encoding="utf-8").splitlines()
        cells = (dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines if line.strip())
        return [{"first": c["sentence_A"], "second": c["sentence_B"], "label": change(c[column])} for c in cells]

    return lambda folder: {split: read(folder / "cls/sick" / name) for split, name in files.items()}


def _labelled(text: str, label: str) -> Record:
    return {"text": " ".join(text.split()), "label": label}


def _tables(
    files: Mapping[str, str],
    columns: Mapping[str, str],
    change: Callable[..., Record] = _labelled,
    header: Sequence[str] = (),
) -> Callable[[Path], Splits]:
    """Reads a CSV, TSV or JSON file for each split: `change` makes a record of the columns, given by name."""

    def read(file: Path) -> list[Record]:
        rows = read_values(file, columns, header=header)
        return [change(**dict(zip(columns, values, strict=True))) for values, _ in rows]

    return lambda folder: {split: read(folder / "cls" / name) for split, name in files.items()}


_TEXT = {"text": "text", "label": "label"}
_PAIR = {"text": ["first", "second"], "label": "label"}
_QNLI = _tables({"train": "qnli/dev.tsv"}, {name: name for name in ("question", "sentence", "label")}, dict)
_WELLFORMED = _tables(
    {split: f"query_wellformedness/{name}.tsv" for split, name in zip(SPLITS, ("train", "dev", "test"), strict=True)},
    {"text": "text", "score": "score"},
    lambda text, score: {"text": text, "score": float(score)},
    header=("text", "score"),
)
_BANKING77 = _tables(
    {"train": "banking77/train.csv", "test": "banking77/test.csv"}, {"text": "text", "label": "category"}
)
_SST2 = _lines({"train": "sst2/train.txt", "validation": "sst2/dev.txt", "test": "sst2/test.txt"})
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
    """Write the splits of a task as JSON Lines, or CoNLL for tagging; gives the files by split."""
    suffix = "conll" if TASKS[task].type == "tagging" else "jsonl"
    files = {split: out / f"{task}-{split}.{suffix}" for split in splits}
    for split, rows in splits.items():
        write_atomically(files[split], _format(rows).encode(errors="replace"))  # SNIPS has halves of emoji
    return files


def draw_splits(splits: Mapping[str, list[Record]], sizes: SplitSizes, seed: int) -> Splits:
    """Rows of training, validation and test.

    The seed draws training rows only. Training has at least `MIN_CLASS_ROWS` rows of every class, where the set has.
    """
    splits = {split: shuffled(rows, "parts") for split, rows in splits.items()}
    test, splits = _held_out(splits, "test", sizes.test)
    validation, splits = _held_out(splits, "validation", sizes.validation)
    train = _with_every_class(shuffled(splits["train"], f"train {seed}"), sizes.train, sizes.least)
    return {"train": train, "validation": validation, "test": test}


def _held_out(splits: Mapping[str, list[Record]], split: str, count: int) -> tuple[list[Record], Splits]:
    """The first rows of a split, and of all splits the rows that share no text with them."""
    held = splits.get(split, splits["train"])[:count]
    texts = {text_of(row) for row in held}
    return held, {name: [row for row in rows if text_of(row) not in texts] for name, rows in splits.items()}


def _with_every_class(rows: Sequence[Record], size: int | str, least: int) -> list[Record]:
    """The first rows, `size` of them, among them the first `MIN_CLASS_ROWS` of every class."""
    count = size if isinstance(size, int) else max(least, round(len(rows) * float(size.rstrip("%")) / 100))
    seen: Counter[str] = Counter()
    first, others = [], []
    for row in rows:
        classes = set(row.get("tags", [row["label"]] if isinstance(row.get("label"), str) else []))
        is_rare = any(seen[label] < MIN_CLASS_ROWS for label in classes)
        seen.update(classes)
        (first if is_rare else others).append(row)
    return [*first, *others][: max(len(first), count)]


def text_of(row: Mapping[str, Any]) -> str:
    """What two rows share if they are the same example, in any case: of QNLI the sentence, of SICK the pair."""
    parts = row.get("words") or [row[name] for name in ("sentence", "text", "first", "second") if name in row]
    return " ".join(" ".join(parts if "words" in row else sorted(parts)).lower().split())


def _format(rows: Iterable[Record]) -> str:
    """A line of JSON for each row; for tagging a line for each word and an empty line after each sentence."""
    return "".join(
        "".join(f"{word}\t{tag}\n" for word, tag in zip(row["words"], row["tags"], strict=True)) + "\n"
        if "words" in row
        else json.dumps(row, ensure_ascii=False) + "\n"
        for row in rows
    )
