"""Text of three languages: sentences of two treebanks, verses of a Bible, and translated news for the tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

DANISH = "ner/uner_da/da_ddt-ud-train.iob2"
SLOVAK = "ner/uner_sk/sk_snk-ud-train.iob2"
CZECH = "parallel/bible/CzeBKR.txt"
NEWS = {
    "da": "parallel/ntrex/newstest2019-ref.dan.txt",
    "sk": "parallel/ntrex/newstest2019-ref.slk.txt",
    "cs": "parallel/ntrex/newstest2019-ref.ces.txt",
}
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


def write_continuations(sentences: Sequence[str], file: Path) -> Path:
    """Write conversations that ask for the sentence after another, as JSON lines, in the order of the sentences.

    Args:
        sentences: consecutive sentences. Each one is either a question or an answer. Long pairs are left out, so that a
            conversation fits a row.
        file: the file to write.

    Returns:
        The file.
    """
    kept = [sentence for sentence in sentences if sentence.strip()]
    lines = []
    for question, answer in zip(kept[::2], kept[1::2], strict=False):
        if len(question) + len(answer) > _PAIR_CHARACTERS:
            continue
        messages = [
            {"role": "user", "content": f"Fortsæt teksten: {question}"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
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
