"""Readers of the corpora from which the thesis built AmbigMT (appendix C.1.6), and of word alignments.

| corpus | form |
|---|---|
| OpenSubtitles | Moses form of OPUS: a file of lines for each language, and one of ids, which name the films |
| Translated Wikipedia Biographies | CSV with a header; a row is a sentence, with the gender of its person |
| alignments | Pharaoh, as eflomal writes it: `0-0 1-2` for each sentence pair, positions of tokens from 0 |

None of them is part of the project. All readers raise DataError if a file is missing or has another form.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.clarify.datasets import ParallelDocument, SentencePair, parallel_documents, read_aligned, read_lines
from graftlm.errors import DataError

Alignment = tuple[tuple[int, int], ...]  # (position in the English sentence, position in the translation)

_BIOGRAPHY_COLUMNS = (
    "sourceLanguage",
    "targetLanguage",
    "documentID",
    "sourceText",
    "translatedText",
    "perceivedGender",
)
_GENDERS = {"female": "feminine", "male": "masculine"}
_LINK = re.compile(r"(\d+)-(\d+)")


def read_opensubtitles(folder: str | Path, language: str) -> list[ParallelDocument]:
    """Read OpenSubtitles in the Moses form of OPUS; a document is a film.

    Args:
        folder: folder with the files OpenSubtitles.en-fr.en, .fr and .ids, or of another language.
        language: language code of the translations.
    """
    pair = "-".join(sorted(("en", language)))
    stem = Path(folder) / f"OpenSubtitles.{pair}"
    rows = read_aligned(Path(f"{stem}.en"), Path(f"{stem}.{language}"), Path(f"{stem}.ids"))
    lines: list[tuple[str, ...]] = []
    for number, (source, target, ids) in enumerate(rows, start=1):
        fields = ids.split("\t")
        if len(fields) != 4:
            raise DataError(
                f"{stem}.ids:{number} has {len(fields)} columns, but two films and two positions are expected: "
                "download the file again."
            )
        lines.append((f"{fields[0]} {fields[1]}", source.strip(), target.strip()))
    return parallel_documents(f"opensubtitles.{language}", lines)


def read_wikipedia_biographies(path: str | Path, language: str) -> list[ParallelDocument]:
    """Read a file of Translated Wikipedia Biographies; a document is a biography, with the gender of its person.

    Args:
        path: the CSV file.
        language: language code of the translations; rows of other languages are left out.

    Raises:
        DataError: the file has no row of the language, lacks a column, or has rows of another length.
    """
    path = Path(path)
    table = csv.DictReader(read_lines(path))
    missing = [name for name in _BIOGRAPHY_COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]}, which Translated Wikipedia Biographies has: name one of its CSV files."
        )
    rows: list[tuple[str, ...]] = []
    genders: dict[str, str | None] = {}
    for row in table:
        if None in row or None in row.values():
            raise DataError(f"{path}:{table.line_num} has another number of columns than the header: correct the line.")
        if (row["sourceLanguage"].lower(), row["targetLanguage"].lower()) != ("en", language):
            continue
        rows.append((row["documentID"], row["sourceText"].strip(), row["translatedText"].strip()))
        genders[row["documentID"]] = _GENDERS.get(row["perceivedGender"].strip().lower())
    if not rows:
        raise DataError(f"{path} has no row from English to {language!r}: name the file of that language.")
    documents = parallel_documents(path.stem, rows)
    return [replace(document, gender=genders[document.id]) for document in documents]


def read_alignments(path: str | Path, pairs: Sequence[SentencePair]) -> list[Alignment]:
    """Read the alignments of sentence pairs, whose tokens are their words between white space.

    Args:
        path: a file in Pharaoh's form, with a line per pair.
        pairs: the pairs, in the order of the lines.

    Raises:
        DataError: the numbers of lines and pairs differ, or a line has another form or names a token that the pair
            lacks.
    """
    lines = read_lines(Path(path))
    if len(lines) != len(pairs):
        raise DataError(
            f"{path} has {len(lines)} lines for {len(pairs)} sentence pairs, but one each is expected: align the same "
            "sentences again."
        )
    alignments: list[Alignment] = []
    for number, (line, pair) in enumerate(zip(lines, pairs, strict=True), start=1):
        source_length = len(pair.source.split())
        target_length = len(pair.target.split())
        links: list[tuple[int, int]] = []
        for entry in line.split():
            match = _LINK.fullmatch(entry)
            if match is None or int(match[1]) >= source_length or int(match[2]) >= target_length:
                raise DataError(
                    f"{path}:{number} has {entry[:20]!r}, but positions of the pair's tokens such as 0-0 are expected: "
                    "align the same sentences again."
                )
            links.append((int(match[1]), int(match[2])))
        alignments.append(tuple(links))
    return alignments
