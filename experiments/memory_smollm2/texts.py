"""Long documents, and texts that ask at their end for pairs of words of their beginning."""

from __future__ import annotations

import json
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
VALIDATION, TESTED = ("rfcs", "eips"), ("peps", "keps", "novels", CODE)


class Sizes(NamedTuple):
    """Tokens of training rows and of tested documents, pairs of a text, documents of a source, texts of recall, rows.

    `tested` documents are of each source of the test, `validated` of each of validation. `trained` is the number of
    training rows of documents; there are as many of recall, half of them of one text each, half of texts of 1,008
    tokens, or of half the row.
    """

    row: int = 4096
    document: int = 8192
    pairs: int = 48
    tested: int = 6
    validated: int = 4
    recall: int = 4
    trained: int = 260


class RecallText(NamedTuple):
    """Token ids of a text, where its answers lie, and how many tokens stand before its questions."""

    ids: list[int]
    answers: list[tuple[int, int]]
    asked_from: int


def write_texts(data: Path, folder: Path, tokenizer: Any, sizes: Sizes, window: int) -> Path:
    """Write `train.jsonl`, and of validation and test the documents and the texts of recall, unless they are there.

    No document and no word of a pair is in two parts.
    """
    settings = {"sizes": sizes._asdict(), "window": window, "python": sys.version, "data": str(data)}

    def fill(folder: Path) -> None:
        documents = {name: read_texts(data / file) for name, file in SOURCES.items()} | {CODE: modules()}
        parts = split(documents, sizes)
        rows = []
        for texts in parts["train"].values():
            some = [text[: 20 * sizes.row] for text in spaced(texts, 60)]
            rows += spaced(cut_texts(some, tokenizer, sizes.row), -(-sizes.trained // len(documents)))
        fillers = {part: " ".join(parts[part]["novels" if part != "validation" else VALIDATION[0]]) for part in PARTS}
        makers = {part: RecallMaker(part, tokenizer, fillers[part], sizes.pairs) for part in PARTS}
        short = min(1024, sizes.row // 2)
        lengths = [sizes.row] * (sizes.trained // 2) + [short] * (sizes.trained // 2 * (sizes.row // short))
        recalls = [makers["train"].make(length - 16, window) for length in lengths]
        lines = [{"prompt": "", "text": row} for row in rows]
        for ids, _, start in recalls:
            lines.append({"prompt": tokenizer.decode(ids[:start]), "text": tokenizer.decode(ids[start:])})
        write_lines(folder / "train.jsonl", shuffled(lines, "memory"))
        for part in ("validation", "test"):
            tested = [(name, text) for name, texts in parts[part].items() for text in texts]
            ids = tokenizer([text for _, text in tested], verbose=False)["input_ids"]
            lines = [{"source": name, "ids": row[: sizes.document]} for (name, _), row in zip(tested, ids, strict=True)]
            write_lines(folder / f"{part}.jsonl", lines)
            texts = [makers[part].make(sizes.document, window) for _ in range(sizes.recall)]
            write_lines(folder / f"{part}-recall.jsonl", (text._asdict() for text in texts))

    return fill_once(folder, settings, fill)


def split(documents: Mapping[str, Sequence[str]], sizes: Sizes) -> dict[str, dict[str, list[str]]]:
    """By part and source, whole documents. Those of validation and test are the last that have `sizes.document` tokens.

    Training has the documents before them, so that no author of novels is in two parts.
    """
    parts: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    for name, texts in documents.items():
        long = [index for index, text in enumerate(texts) if len(text) > 5 * sizes.document]
        long = long[-(sizes.tested if name in TESTED else sizes.validated) :]
        parts["test" if name in TESTED else "validation"][name] = [texts[index] for index in long]
        parts["train"][name] = list(texts[: long[0]])
    return parts


def modules() -> list[str]:
    """The modules of Python's standard library, by name."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]


class RecallMaker:
    """Makes texts of one part: pairs of words, another text, and the pairs once more in another order.

    Args:
        part: its words are in no other part.
        tokenizer: of the model.
        filler: the other text; each text has another piece of it.
        pairs: of a text.
    """

    def __init__(self, part: str, tokenizer: Any, filler: str, pairs: int) -> None:
        self._words = words(tokenizer)[PARTS.index(part) :: len(PARTS)]
        self._tokenizer, self._pairs = tokenizer, pairs
        self._filler = self._ids(filler[:4_000_000])
        self._random = random.Random(part)

    def make(self, length: int, window: int) -> RecallText:
        """A text of `length` tokens; all pairs are more than `window` tokens before they are asked for."""
        drawn = self._random.sample(self._words, 2 * min(self._pairs, len(self._words) // 2))
        pairs = dict(zip(drawn[::2], drawn[1::2], strict=True))
        notes = [self._ids(f"- {key} means {value}.\n") for key, value in pairs.items()]
        order = shuffled(list(pairs), str(pairs))
        questions = [(self._ids(f" {key} means"), self._ids(f" {pairs[key]}"), self._ids(",")) for key in order]
        head, opening = [token for note in notes for token in note], self._ids("\nOnce more:")
        size = sum(len(tokens) for parts in questions for tokens in parts)
        between = max(window, length - len(head) - len(opening) - size)
        start = self._random.randrange(max(1, len(self._filler) - between))
        ids, answers = [*head, *self._filler[start : start + between], *opening], []
        asked_from = len(ids)
        for key, value, comma in questions:
            answers.append((len(ids) + len(key), len(ids) + len(key) + len(value)))
            ids += [*key, *value, *comma]
        return RecallText(ids, answers, asked_from)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def words(tokenizer: Any) -> list[str]:
    """The 3,000 commonest words of at least two letters that are one token with the space before them."""
    texts = tokenizer.batch_decode([[index] for index in range(len(tokenizer))])
    return list(dict.fromkeys(text.strip() for text in texts if re.fullmatch(" [a-z]{2,}", text)))[:3000]


def read_ids(path: Path) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """(1, T) ids of every line, and what else it holds."""
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        yield torch.tensor([values.pop("ids")]), values
