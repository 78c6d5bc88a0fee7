"""Long documents, and texts whose end asks for pairs of words from their beginning."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.keep_smollm2.run import ENGLISH
from experiments.parents import cut_texts, read_texts, spaced
from experiments.study import shuffled, write_lines
from graftlm.files.writing import fill_once

SOURCES = {
    "peps": "longdocs/peps.jsonl",
    "keps": "longdocs/keps.jsonl",
    "novels": ENGLISH,
    "rfcs": "longdocs/rust_rfcs.jsonl",
    "eips": "longdocs/eips.jsonl",
}
CODE = "python"  # modules of the standard library
PARTS = ("train", "validation", "test")
VALIDATION = ("rfcs", "eips")
TESTED = ("peps", "keps", "novels", CODE)


class Sizes(NamedTuple):
    """Sizes of texts.

    Attributes:
        row: tokens of a training row.
        document: tokens of a document of validation and test.
        pairs: pairs of words of a text of recall.
        tested: test documents of each source.
        validated: validation documents of each source.
        recall: texts of recall of validation and test.
        trained: training rows of documents. There are as many rows of recall: half of them contain one text each, and
            half of them texts of 1,008 tokens or of half the row.
    """

    row: int = 4096
    document: int = 8192
    pairs: int = 48
    tested: int = 6
    validated: int = 4
    recall: int = 4
    trained: int = 260


class RecallText(NamedTuple):
    """A text of recall.

    Attributes:
        ids: its token ids.
        answers: start and stop of each answer.
        asked_from: number of tokens before its questions.
    """

    ids: list[int]
    answers: list[tuple[int, int]]
    asked_from: int


def write_texts(data: Path, folder: Path, tokenizer: Any, sizes: Sizes, window: int) -> Path:
    """Write `train.jsonl`, and the documents and texts of recall of validation and test, unless they exist.

    No document and no word of a pair is in two parts.

    Args:
        data: the data folder.
        folder: folder to write to.
        tokenizer: tokenizer of the model.
        sizes: sizes of texts.
        window: tokens of the window; all pairs are farther from their questions.
    """
    settings = {
        "sizes": sizes._asdict(),
        "window": window,
        "python": sys.version,
        "data": str(data),
    }

    def fill(folder: Path) -> None:
        documents = {name: read_texts(data / file) for name, file in SOURCES.items()}
        documents[CODE] = modules()
        parts = split(documents, sizes)
        makers = _recall_makers(parts, tokenizer, sizes)
        rows = _training_rows(parts["train"], tokenizer, sizes)
        recalls = _training_recalls(makers["train"], tokenizer, sizes, window)
        write_lines(folder / "train.jsonl", shuffled([*rows, *recalls], "memory"))
        for part in ("validation", "test"):
            write_lines(folder / f"{part}.jsonl", _documents(parts[part], tokenizer, sizes))
            texts = [makers[part].make(sizes.document, window) for _ in range(sizes.recall)]
            write_lines(folder / f"{part}-recall.jsonl", [text._asdict() for text in texts])

    return fill_once(folder, settings, fill)


def _training_rows(texts: Mapping[str, Sequence[str]], tokenizer: Any, sizes: Sizes) -> list[dict[str, str]]:
    """Return the training rows of documents, evenly from all sources."""
    rows_of_source = math.ceil(sizes.trained / len(texts))
    rows = []
    for documents in texts.values():
        starts = [text[: 20 * sizes.row] for text in spaced(documents, 60)]
        rows += spaced(cut_texts(starts, tokenizer, sizes.row), rows_of_source)
    return [{"prompt": "", "text": row} for row in rows]


def _recall_makers(
    parts: Mapping[str, Mapping[str, Sequence[str]]],
    tokenizer: Any,
    sizes: Sizes,
) -> dict[str, RecallMaker]:
    makers = {}
    for part in PARTS:
        source = VALIDATION[0] if part == "validation" else "novels"
        filler = " ".join(parts[part][source])
        makers[part] = RecallMaker(part, tokenizer, filler, sizes.pairs)
    return makers


def _training_recalls(maker: RecallMaker, tokenizer: Any, sizes: Sizes, window: int) -> list[dict[str, str]]:
    """Return the training rows of recall: long texts, then short ones of which several share a row."""
    count = sizes.trained // 2
    short = min(1024, sizes.row // 2)
    texts_in_row = sizes.row // short
    lengths = [sizes.row] * count + [short] * (count * texts_in_row)
    rows = []
    for length in lengths:
        ids, _, start = maker.make(length - 16, window)
        prompt = tokenizer.decode(ids[:start])
        rows.append({"prompt": prompt, "text": tokenizer.decode(ids[start:])})
    return rows


def _documents(texts: Mapping[str, Sequence[str]], tokenizer: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Return source and token ids of the documents of a part."""
    lines = []
    for name, documents in texts.items():
        ids_of_documents = tokenizer(list(documents), verbose=False)["input_ids"]
        lines += [{"source": name, "ids": ids[: sizes.document]} for ids in ids_of_documents]
    return lines


def split(documents: Mapping[str, Sequence[str]], sizes: Sizes) -> dict[str, dict[str, list[str]]]:
    """Divide whole documents into parts.

    Validation and test take the last documents of at least `sizes.document` tokens, and training the documents before
    them, so that no author of novels is in two parts.

    Args:
        documents: documents, by source.
        sizes: sizes of texts.

    Returns:
        Documents, by part and source.
    """
    parts: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    for name, texts in documents.items():
        part = "test" if name in TESTED else "validation"
        count = sizes.tested if name in TESTED else sizes.validated
        long = [index for index, text in enumerate(texts) if len(text) > 5 * sizes.document]
        held_out = long[-count:]
        parts[part][name] = [texts[index] for index in held_out]
        parts["train"][name] = list(texts[: held_out[0]])
    return parts


def modules() -> list[str]:
    """Return the modules of Python's standard library, sorted by name."""
    paths = Path(sysconfig.get_path("stdlib")).glob("*.py")
    return [path.read_text(encoding="utf-8") for path in sorted(paths)]


class RecallMaker:
    """Makes texts of one part: pairs of words, then other text, then the pairs again in another order.

    Args:
        part: name of the part; its words are in no other part.
        tokenizer: tokenizer of the model.
        filler: the other text, of which each text has a random piece.
        pairs: pairs of a text.
    """

    def __init__(self, part: str, tokenizer: Any, filler: str, pairs: int) -> None:
        self._words = words(tokenizer)[PARTS.index(part) :: len(PARTS)]
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._filler = self._ids(filler[:4_000_000])
        self._random = random.Random(part)

    def make(self, length: int, window: int) -> RecallText:
        """Return a text of `length` tokens, in which every pair is more than `window` tokens before its question."""
        count = min(self._pairs, len(self._words) // 2)
        drawn = self._random.sample(self._words, 2 * count)
        pairs = dict(zip(drawn[::2], drawn[1::2], strict=True))
        head = []
        for key, value in pairs.items():
            head += self._ids(f"- {key} means {value}.\n")
        opening = self._ids("\nOnce more:")
        questions = []
        size = len(head) + len(opening)
        for key in shuffled(list(pairs), str(pairs)):
            question = (self._ids(f" {key} means"), self._ids(f" {pairs[key]}"), self._ids(","))
            questions.append(question)
            size += sum(len(tokens) for tokens in question)
        between = max(window, length - size)
        start = self._random.randrange(max(1, len(self._filler) - between))
        ids = [*head, *self._filler[start : start + between], *opening]
        asked_from = len(ids)
        answers = []
        for key, value, comma in questions:
            answer_start = len(ids) + len(key)
            answers.append((answer_start, answer_start + len(value)))
            ids += [*key, *value, *comma]
        return RecallText(ids, answers, asked_from)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def words(tokenizer: Any) -> list[str]:
    """Return the 3,000 commonest words of at least two letters that are one token with the space before them."""
    single_tokens = [[index] for index in range(len(tokenizer))]
    texts = tokenizer.batch_decode(single_tokens)
    found = [text.strip() for text in texts if re.fullmatch(" [a-z]{2,}", text)]
    distinct = list(dict.fromkeys(found))
    return distinct[:3000]


def read_ids(path: Path) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield the (1, T) ids of every line, and its other values."""
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        yield torch.tensor([values.pop("ids")]), values
