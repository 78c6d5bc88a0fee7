"""Eight tasks, read from the data folder and written as the files that a recipe of tasks names.

Rows of tests and of validation are the same for every seed; rows of training are drawn anew by each. Where a set has no
test of its own, whole groups of equal texts are dealt out, so that nothing of a test is read in training.
"""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from graftlm.errors import DataError
from graftlm.io import write_atomically

Record = dict[str, Any]
Parts = dict[str, list[Record]]
PARTS = ("train", "validation", "test")
# A class with fewer examples than this can't be learned from the rows that are drawn.
FEWEST = 2
SNIPS = (
    "AddToPlaylist",
    "BookRestaurant",
    "GetWeather",
    "PlayMusic",
    "RateBook",
    "SearchCreativeWork",
    "SearchScreeningEvent",
)
FILES = (
    "cls/clinc150/data_full.json",
    "cls/banking77/train.csv",
    "cls/snips/train_AddToPlaylist_full.json",
    "cls/qnli/dev.tsv",
    "cls/query_wellformedness/train.tsv",
    "cls/hucola/cola_train.json",
    "cls/husst/sst_train.json",
    "ner/wnut17/wnut17train.conll",
)


class Source(NamedTuple):
    """One task.

    Args:
        label: its name for readers.
        read: all its rows by part, from the data folder; what is not there is dealt out of training.
        columns: of the recipe: where texts and labels stand.
        type: of the task.
        metric: which says how well it is done.
    """

    label: str
    read: Callable[[Path], Parts]
    columns: dict[str, Any]
    type: str = "classification"
    metric: str = "accuracy"


class Sizes(NamedTuple):
    """Rows of each part; None is all there are."""

    train: int | None
    validation: int
    test: int


def _clinc150(folder: Path) -> Parts:
    found = _json(folder / "cls/clinc150/data_full.json")
    names = {"train": "train", "validation": "val", "test": "test"}
    return {part: [_labelled(*pair) for pair in found[name]] for part, name in names.items()}


def _banking77(folder: Path) -> Parts:
    def read(name: str) -> list[Record]:
        with (folder / "cls/banking77" / name).open(encoding="utf-8", newline="") as file:
            return [_labelled(row["text"], row["category"]) for row in csv.DictReader(file)]

    return {"train": read("train.csv"), "test": read("test.csv")}


def _snips(folder: Path) -> Parts:
    def read(pattern: str) -> list[Record]:
        return [
            _labelled("".join(piece["text"] for piece in one["data"]), intent)
            for intent in SNIPS
            for one in _json(folder / "cls/snips" / pattern.format(intent))[intent]
        ]

    return {"train": read("train_{}_full.json"), "test": read("validate_{}.json")}


def _qnli(folder: Path) -> Parts:
    _, *rows = _lines(folder / "cls/qnli/dev.tsv")
    columns = ("index", "question", "sentence", "label")
    return {"train": [dict(list(zip(columns, row, strict=True))[1:]) for row in rows]}


def _wellformed(folder: Path) -> Parts:
    names = {"train": "train", "validation": "dev", "test": "test"}
    return {
        part: [
            {"text": text, "score": float(score)}
            for text, score in _lines(folder / f"cls/query_wellformedness/{name}.tsv")
        ]
        for part, name in names.items()
    }


def _hucola(folder: Path) -> Parts:
    read = {
        part: _json(folder / f"cls/hucola/cola_{name}.json") for part, name in (("train", "train"), ("test", "dev"))
    }
    names = {"0": "unacceptable", "1": "acceptable"}
    return {part: [_labelled(row["Sent"], names[row["label"]]) for row in rows] for part, rows in read.items()}


def _husst(folder: Path) -> Parts:
    """Of its training file alone: 3% of the development rows are positive, and 40% of the training rows."""
    return {"train": [_labelled(row["Sent"], row["label"]) for row in _json(folder / "cls/husst/sst_train.json")]}


def _wnut17(folder: Path) -> Parts:
    names = {"train": "wnut17train.conll", "validation": "emerging.dev.conll", "test": "emerging.test.annotated"}
    return {part: _sentences(folder / "ner/wnut17" / name) for part, name in names.items()}


TASKS: dict[str, Source] = {
    "clinc150": Source("CLINC150", _clinc150, {"text": "text", "label": "label"}),
    "qnli": Source("QNLI", _qnli, {"text": ["question", "sentence"], "label": "label"}),
    "wellformed": Source(
        "query well-formedness", _wellformed, {"text": "text", "label": "score"}, "regression", "pearson"
    ),
    "hucola": Source("HuCOLA", _hucola, {"text": "text", "label": "label"}, metric="matthews"),
    "banking77": Source("Banking77", _banking77, {"text": "text", "label": "label"}),
    "snips": Source("SNIPS", _snips, {"text": "text", "label": "label"}),
    "husst": Source("HuSST", _husst, {"text": "text", "label": "label"}),
    "wnut17": Source("WNUT17", _wnut17, {}, "tagging", "entity_f1"),
}


def write_texts(data: Path, out: Path, task: str, sizes: Sizes, seed: int) -> dict[str, Path]:
    """Write the parts of a task in `out`, training rows drawn by `seed`; the files by part.

    Raises:
        DataError: the data folder lacks a file, or a set has too few rows.
    """
    suffix = "conll" if TASKS[task].type == "tagging" else "jsonl"
    files = {part: out / f"{task}-{part}.{suffix}" for part in PARTS}
    if not all(file.exists() for file in files.values()):
        for part, rows in drawn(_read(data, task), sizes, seed).items():
            write_atomically(files[part], _written(rows).encode())
    return files


def rows_of(data: Path, task: str, sizes: Sizes) -> int:
    """How many rows there are to learn a task from, besides those of validation and test."""
    return len(drawn(_read(data, task), sizes._replace(train=None), 0)["train"])


def _read(data: Path, task: str) -> Parts:
    try:
        return TASKS[task].read(data)
    except FileNotFoundError as error:
        raise DataError(
            f"The data folder {data} lacks {error.filename}: pass --data with a folder that holds {', '.join(FILES)}."
        ) from None


def drawn(parts: Mapping[str, list[Record]], sizes: Sizes, seed: int) -> Parts:
    """Rows of training, validation and test: the last two by no seed, the first with `FEWEST` of every class."""
    parts = {part: _shuffled(rows, "parts") for part, rows in parts.items()}
    test, rest = _held_out(parts, "test", sizes.test)
    validation, rest = _held_out(parts | {"train": rest}, "validation", sizes.validation)
    train = _with_every_class(_shuffled(rest, f"train {seed}"), sizes.train)
    return {"train": train, "validation": validation, "test": test}


def _held_out(parts: Mapping[str, list[Record]], part: str, count: int) -> tuple[list[Record], list[Record]]:
    """The first rows of a part, and the training rows that share no text with them."""
    held = parts.get(part, parts["train"])[:count]
    texts = {_text(row) for row in held}
    return held, [row for row in parts["train"] if _text(row) not in texts]


def _with_every_class(rows: Sequence[Record], count: int | None) -> list[Record]:
    """The first `count` rows, among them the first few of every class."""
    seen: Counter[str] = Counter()
    first, others = [], []
    for row in rows:
        classes = set(row.get("tags", [row["label"]] if "label" in row else []))
        early = any(seen[one] < FEWEST for one in classes)
        seen.update(classes)
        (first if early else others).append(row)
    return [*first, *others][: max(len(first), len(rows) if count is None else count)]


def _text(row: Record) -> str:
    """What a row reads: of a pair the second text, which other rows have too."""
    if "words" in row:
        return " ".join(row["words"])
    return row["sentence"] if "sentence" in row else row["text"]


def _shuffled(rows: Sequence[Record], seed: str) -> list[Record]:
    return random.Random(seed).sample(list(rows), len(rows))


def _written(rows: Iterable[Record]) -> str:
    """A line of JSON for each row, or a line for each word and an empty one between sentences."""
    return "".join(
        "".join(f"{word}\t{tag}\n" for word, tag in zip(row["words"], row["tags"], strict=True)) + "\n"
        if "words" in row
        else json.dumps(row, ensure_ascii=False) + "\n"
        for row in rows
    )


def _labelled(text: str, label: str) -> Record:
    return {"text": " ".join(text.split()), "label": label}


def _sentences(file: Path) -> list[Record]:
    sentences: list[Record] = [{"words": [], "tags": []}]
    for line in file.read_text(encoding="utf-8").split("\n"):
        if not line.strip():
            sentences.append({"words": [], "tags": []})
            continue
        word, tag = line.split("\t")
        sentences[-1]["words"].append(word.strip() or "_")
        sentences[-1]["tags"].append(tag.strip())
    return [sentence for sentence in sentences if sentence["words"]]


def _lines(file: Path) -> list[list[str]]:
    """The fields of each line, separated by tabs, whatever quotes there are."""
    return [line.split("\t") for line in file.read_text(encoding="utf-8").split("\n") if line]


def _json(file: Path) -> Any:
    """A JSON file in UTF-8, or in Latin-1 where it is not."""
    content = file.read_bytes()
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        return json.loads(content.decode("latin-1"))
