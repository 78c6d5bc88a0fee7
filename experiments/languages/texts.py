"""Text of three languages: sentences of two treebanks, verses of a Bible, and translated news for the tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from experiments.facts.generator import conversation
from experiments.study import write_lines

DANISH = "ner/uner_da/da_ddt-ud-train.iob2"
SLOVAK = "ner/uner_sk/sk_snk-ud-train.iob2"
CZECH = "parallel/bible/CzeBKR.txt"
NEWS = {
    "da": "parallel/ntrex/newstest2019-ref.dan.txt",
    "sk": "parallel/ntrex/newstest2019-ref.slk.txt",
    "cs": "parallel/ntrex/newstest2019-ref.ces.txt",
}
ENGLISH_NEWS = "parallel/ntrex/newstest2019-src.eng.txt"
DOCUMENTS = "parallel/ntrex/DOCUMENT_IDS.tsv"
"""The document of each line of the news in all languages."""
FILES = (DANISH, SLOVAK, CZECH, *NEWS.values())

_SENTENCES = 20  # of a document
_PAIR_CHARACTERS = 350
_SENTENCE = "# text = "
_VERSE = re.compile(r"\[\d+:\d+\]\s*(.+)")


def write_texts(data: Path, folder: Path) -> dict[str, Path]:
    """Write the texts as JSON lines, each a document of twenty sentences or verses in the order of their file.

    Args:
        data: the data folder.
        folder: the folder for the files.

    Returns:
        The files of training by language, and those of tests by language and `_test`.
    """
    trained = {
        "da": treebank_sentences(data / DANISH),
        "sk": treebank_sentences(data / SLOVAK),
        "cs": verses(data / CZECH),
    }
    files = {}
    folder.mkdir(parents=True, exist_ok=True)
    for language, sentences in trained.items():
        news = (data / NEWS[language]).read_text(encoding="utf-8").splitlines()
        files[language] = _write(sentences, folder / f"{language}.jsonl")
        files[f"{language}_test"] = _write(news, folder / f"{language}-test.jsonl")
    return files


def news_documents(data: Path, name: str) -> list[list[str]]:
    """Return the sentences of each news document.

    Args:
        data: the data folder.
        name: a file with a sentence per line, in the order of `DOCUMENTS`.
    """
    sentences = (data / name).read_text(encoding="utf-8").splitlines()
    ids = [line.split("\t")[0] for line in (data / DOCUMENTS).read_text(encoding="utf-8").splitlines()]
    pairs = zip(ids, sentences, strict=True)
    return [[sentence for _, sentence in document] for _, document in groupby(pairs, key=itemgetter(0))]


def split_documents(
    documents: Sequence[list[str]], parts: Mapping[str, int], others: str
) -> dict[str, list[list[str]]]:
    """Divide documents, in their order, into parts with a number of documents each, and one with all others."""
    split = {}
    start = 0
    for part, count in parts.items():
        split[part] = list(documents[start : start + count])
        start += count
    split[others] = list(documents[start:])
    return split


def write_continuations(documents: Sequence[Sequence[str]], request: str, file: Path, limit: int | None = None) -> Path:
    """Write conversations that ask for the sentence after another, as JSON lines.

    Args:
        documents: the sentences of each document. Each sentence is either a question or an answer. Long pairs are left
            out, so that a conversation fits a row.
        request: what stands before the first sentence.
        file: the file to write.
        limit: largest number of conversations; None for all.

    Returns:
        The file.
    """
    rows = []
    for document in documents:
        for question, answer in zip(document[::2], document[1::2], strict=False):
            if len(question) + len(answer) <= _PAIR_CHARACTERS:
                rows.append(conversation(f"{request} {question}", answer))
    write_lines(file, rows[:limit])
    return file


def treebank_sentences(file: Path) -> Iterator[str]:
    """Yield the sentences of a file in the form of Universal NER."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(_SENTENCE):
            yield line.removeprefix(_SENTENCE).strip()


def verses(file: Path) -> Iterator[str]:
    """Yield the verses of a Bible without their numbers."""
    for line in file.read_text(encoding="utf-8").splitlines():
        match = _VERSE.match(line)
        if match is not None:
            yield match[1].strip()


def _write(sentences: Iterable[str], file: Path) -> Path:
    kept = [sentence for sentence in sentences if sentence.strip()]
    documents = [kept[start : start + _SENTENCES] for start in range(0, len(kept), _SENTENCES)]
    file.write_text("".join(_line(document) for document in documents), encoding="utf-8")
    return file


def _line(sentences: Sequence[str]) -> str:
    return json.dumps({"text": " ".join(sentences)}, ensure_ascii=False) + "\n"
