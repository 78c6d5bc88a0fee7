"""Parts of texts, and texts that no model has read, for compositions to be trained and measured on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from experiments.parents import ENGLISH, FRENCH, read_texts
from graftlm.demo.corpus import split_source, write_documents

T = TypeVar("T")


def part(texts: Iterable[str], share: float) -> list[str]:
    """The first characters of every text."""
    return [text[: int(share * len(text))] for text in texts]


def old_part(english: Sequence[str], characters: int) -> list[str]:
    """Some of every document that the anchor read: about as much of its novels as of its documentation."""
    longest = max(map(len, english))
    return [text[: characters if len(text) > longest // 4 else characters // 12] for text in english]


def held_out(data: Path, corpus: Path, folder: Path, tested: int) -> None:
    """Write texts of novels and modules that no model has read: English (old), French (new) and Python.

    Args:
        tested: characters of each set of test texts; validation takes a third.
    """
    english, french = read_texts(data / ENGLISH), read_texts(data / FRENCH)
    sets = {
        "old": [english[-1][len(english[-1]) // 3 :], *_docstrings(corpus / "python-test.jsonl")],
        "new": french[-3:],
        "python": [text[len(text) // 4 :] for text in read_texts(corpus / "python-test.jsonl")],
        "validation_old": [english[-2], *_docstrings(corpus / "python-validation.jsonl")],
        "validation_new": french[-4:-3],
        "validation_python": read_texts(corpus / "python-validation.jsonl"),
    }
    for name, texts in sets.items():
        size = tested // (3 if name.startswith("validation") else 1)
        write_documents(folder / f"{name}.jsonl", spread(texts, size))


def spread(texts: Sequence[str], characters: int) -> list[str]:
    """About so many characters: as many of the first text as of all others together, which share alike."""
    first, others = texts[0], texts[1:]
    half = characters // 2 if others else characters
    each = max(200, half // max(1, min(len(others), 12)))
    return [first[:half], *(text[:each] for text in others[: half // each])]


def _docstrings(file: Path) -> list[str]:
    splits = (split_source(text.encode()) for text in read_texts(file))
    return [split[0] for split in splits if split and split[0]]


def spaced(values: Sequence[T], count: int) -> list[T]:
    """At most `count` of the values, evenly spaced."""
    step = max(1, len(values) // count)
    return list(values[::step])[:count]


def fitting(pairs: Iterable[tuple[str, str]], tokenizer: Any, length: int) -> list[tuple[str, str]]:
    """The pairs of a prompt and an answer that fit into a row of `length` tokens with their end-of-text token."""
    return [
        pair for pair in pairs if sum(len(ids) for ids in tokenizer(list(pair), verbose=False)["input_ids"]) < length
    ]


def cut_texts(texts: Iterable[str], tokenizer: Any, length: int) -> list[str]:
    """Texts cut into pieces that fit into a row of `length` tokens, whole ones nearly fill it."""
    size = length - max(2, length // 32)  # a piece alone may take a few tokens more than it does in its text
    parts: list[str] = []
    for text in texts:
        starts = [start for start, _ in tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]]
        cuts = [*starts[::size], len(text)]
        parts += [text[start:stop] for start, stop in pairwise(cuts)]
    return [text for text in parts if text.strip()]


def write_examples(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """One JSON object with a `prompt` and a `text` a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt": prompt, "text": answer}) + "\n" for prompt, answer in pairs)
    path.write_text("".join(lines), encoding="utf-8")
