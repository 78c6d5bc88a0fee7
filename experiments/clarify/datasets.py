"""Read ambiguous sentences and parallel text from folders of the user; no data set is part of the project.

| set | content |
|---|---|
| AmbigMT | five kinds of ambiguity, English to German, Spanish and French, with context |
| CoCoA-MT | a formal and an informal translation of each sentence, with the words that differ marked |
| MT-GenEval | a feminine and a masculine translation of each sentence; part of them with context |
| WinoMT | English sentences in which a pronoun shows the gender of an occupation |
| discourse-mt-test-sets | English-French pairs of sentences: the first has the antecedent of the second's "it" |
| TSV files | parallel sentences in the order of their documents |

All readers raise DataError if a file is missing, can't be read, is not aligned with the others, or has another format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from graftlm.errors import DataError
from graftlm.pipelines.clarify.ambiguity import AmbiguityKind, english_gender

GENDERED = re.compile(r"\b(?:she|her|hers|herself|he|him|his|himself)\b", re.IGNORECASE)
_IT = re.compile(r"\bit\b", re.IGNORECASE)
_MARKED = re.compile(r"\[F\](.*?)\[/F\]")
# The columns of the files. The header of the formality files names only four of the five.
_AMBIGMT: dict[str, tuple[AmbiguityKind, tuple[str, ...]]] = {
    "formality": ("formality", ("label", "", "context", "source", "reference")),
    "it_resolution": ("it", ("source", "reference", "context", "label")),
    "gender_neutral_names": ("name", ("source", "reference", "context")),
    "neutral_professions": ("profession", ("context", "source", "reference")),
    "polysemy": ("polysemy", ("source", "reference", "context")),
}
_AMBIGMT_NAME = re.compile(rf"({'|'.join(_AMBIGMT)})_en_([a-z]{{2}})")


@dataclass(frozen=True)
class AmbiguousExample:
    """An ambiguous English text with its translation.

    Args:
        id: identifier, unique in its set.
        kind: the kind of ambiguity.
        language: language code of the translation, two letters; empty without a translation.
        source: the English text.
        context: English sentences that resolve the ambiguity; the user knows them.
        reference: the right translation.
        label: the label of the reference: formal, informal or neutral; feminine, masculine, neuter or neutral; the
            translation of a polysemous word; None if unknown.
        contrast: a translation with the opposite label.
        word: the ambiguous word.
        marks: the parts of the reference that show the label, if the set marks them.
        reference_context: translations of the sentences of the context.
    """

    id: str
    kind: AmbiguityKind
    language: str
    source: str
    context: tuple[str, ...] = ()
    reference: str = ""
    label: str | None = None
    contrast: str | None = None
    word: str | None = None
    marks: tuple[str, ...] = ()
    reference_context: tuple[str, ...] = ()


@dataclass(frozen=True)
class SentencePair:
    """An English sentence and its translation.

    Args:
        id: corpus and position.
        source: the English sentence.
        target: the translation.
    """

    id: str
    source: str
    target: str


@dataclass(frozen=True)
class ParallelDocument:
    """A document of a parallel corpus.

    Args:
        id: identifier of the document.
        pairs: its sentence pairs in order.
        gender: feminine or masculine if the corpus states the gender of the person whom the document is about.
    """

    id: str
    pairs: tuple[SentencePair, ...]
    gender: str | None = None


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file.

    Lines are split only at line feeds, not at U+2028 and other separators. Invalid UTF-8 becomes U+FFFD.

    Args:
        path: the file.

    Raises:
        DataError: the file can't be read.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): check the folder of data sets.") from None
    lines = text.removeprefix("\ufeff").split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_aligned(*paths: Path) -> list[tuple[str, ...]]:
    """Read the lines of several files side by side.

    Args:
        paths: the files.

    Returns:
        A tuple per line, with an entry per file.

    Raises:
        DataError: a file can't be read, or the files have different numbers of lines.
    """
    columns = [read_lines(path) for path in paths]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        counts = ", ".join(f"{path.name} has {length}" for path, length in zip(paths, lengths, strict=True))
        raise DataError(f"Files that belong together have different numbers of lines ({counts}): download them again.")
    return list(zip(*columns, strict=True))


def read_ambigmt(folder: str | Path) -> tuple[list[AmbiguousExample], list[str]]:
    """Read all AmbigMT files below a folder.

    Fields are split at tabs, without quoting. A blank label becomes None. The word TRUE, an artefact of a spreadsheet,
    becomes "true".

    Args:
        folder: the folder.

    Returns:
        The examples, and the unusable lines as `file:line: reason`.
    """
    files = sorted(path for path in Path(folder).rglob("*.tsv") if _AMBIGMT_NAME.fullmatch(path.stem))
    if not files:
        raise DataError(f"{folder} has no file of AmbigMT such as formality_en_de.tsv: name the folder that has one.")
    examples: list[AmbiguousExample] = []
    unusable: list[str] = []
    for path in files:
        for number, line in enumerate(read_lines(path)[1:], start=2):
            example = _ambigmt_example(path.stem, number, line.split("\t"))
            if isinstance(example, str):
                unusable.append(f"{path.name}:{number}: {example}")
            else:
                examples.append(example)
    return examples, unusable


def _ambigmt_example(stem: str, number: int, fields: list[str]) -> AmbiguousExample | str:
    """Return the example of a line, or the reason why there is none."""
    name, _, language = stem.rpartition("_en_")
    kind, columns = _AMBIGMT[name]
    if len(fields) != len(columns):
        return f"{len(fields)} fields, but {len(columns)} are expected"
    values = {column: field.strip() for column, field in zip(columns, fields, strict=True)}
    source = values["source"]
    reference = values["reference"]
    if not source or not reference:
        return "the source or its translation is empty"
    label = values.get("label") or None
    word = None
    if kind == "polysemy":
        word = "true" if source == "TRUE" else source
        source = word
        label = reference
    sentences = re.split(r" - |^- ", values["context"])
    return AmbiguousExample(
        id=f"{stem}:{number}",
        kind=kind,
        language=language,
        source=source,
        context=tuple(sentence.strip() for sentence in sentences if sentence.strip(" -")),
        reference=reference,
        label=label,
        word=word,
    )


def read_cocoa_mt(folder: str | Path, language: str, part: str = "test") -> list[AmbiguousExample]:
    """Read CoCoA-MT: a formal and an informal example of every English sentence, with the other one as the contrast.

    Args:
        folder: folder with the files formality-control.*.
        language: language code of the translations; public files with references exist for German and Italian.
        part: test, or train, which has several domains.
    """
    folder = Path(folder)
    pattern = f"formality-control.{part}*.en-{language}.en"
    stems = sorted(path.name.removesuffix(".en") for path in folder.glob(pattern))
    if not stems:
        raise DataError(f"{folder} has no CoCoA-MT file {pattern}: name its folder and one of its languages.")
    examples: list[AmbiguousExample] = []
    for stem in stems:
        rows = read_aligned(
            folder / f"{stem}.en",
            folder / f"{stem}.formal.{language}",
            folder / f"{stem}.informal.{language}",
            folder / f"{stem}.formal.annotated.{language}",
            folder / f"{stem}.informal.annotated.{language}",
        )
        name = stem.removeprefix("formality-control.")
        for number, (source, formal, informal, marked_formal, marked_informal) in enumerate(rows, start=1):
            formal_example = AmbiguousExample(
                id=f"{name}:{number}:formal",
                kind="formality",
                language=language,
                source=source,
                reference=formal,
                label="formal",
                contrast=informal,
                marks=tuple(_MARKED.findall(marked_formal)),
            )
            informal_example = replace(
                formal_example,
                id=f"{name}:{number}:informal",
                reference=informal,
                label="informal",
                contrast=formal,
                marks=tuple(_MARKED.findall(marked_informal)),
            )
            examples.append(formal_example)
            examples.append(informal_example)
    return examples


def read_mt_geneval(folder: str | Path, language: str, part: str = "test") -> list[AmbiguousExample]:
    """Read the single sentences of MT-GenEval: feminine and masculine versions, with the other one as the contrast.

    The English sentence shows the gender, so there is nothing to ask.

    Args:
        folder: folder of MT-GenEval.
        language: language code of the translations.
        part: test or dev.
    """
    stem = Path(folder) / "geneval-sentences"
    rows = read_aligned(
        Path(f"{stem}-feminine-{part}.en_{language}.en"),
        Path(f"{stem}-feminine-{part}.en_{language}.{language}"),
        Path(f"{stem}-masculine-{part}.en_{language}.en"),
        Path(f"{stem}-masculine-{part}.en_{language}.{language}"),
    )
    examples: list[AmbiguousExample] = []
    for number, (feminine_source, feminine, masculine_source, masculine) in enumerate(rows, start=1):
        name = f"sentences:{part}:{language}:{number}"
        feminine_example = AmbiguousExample(
            id=f"{name}:feminine",
            kind="profession",
            language=language,
            source=feminine_source,
            reference=feminine,
            label="feminine",
            contrast=masculine,
        )
        masculine_example = replace(
            feminine_example,
            id=f"{name}:masculine",
            source=masculine_source,
            reference=masculine,
            label="masculine",
            contrast=feminine,
        )
        examples.append(feminine_example)
        examples.append(masculine_example)
    return examples


def mt_geneval_contexts(folder: str | Path, language: str, part: str = "test") -> list[AmbiguousExample]:
    """Read the sentences of MT-GenEval whose gender only the preceding sentence shows.

    With `context` there is nothing to ask; without it the gender is open. The label comes from the pronouns of the
    context, and is None if the context has no gendered pronoun, or pronouns of both genders.

    Args:
        folder: folder of MT-GenEval.
        language: language code of the translations.
        part: test or dev.
    """
    stem = Path(folder) / "geneval-context-wikiprofessions"
    rows = read_aligned(
        Path(f"{stem}-2to1-{part}.en_{language}.en"),
        Path(f"{stem}-original-{part}.en_{language}.{language}"),
        Path(f"{stem}-flipped-{part}.en_{language}.{language}"),
    )
    examples: list[AmbiguousExample] = []
    for number, (pair, original, flipped) in enumerate(rows, start=1):
        before, _, source = pair.partition("<sep>")
        context = before.strip()
        example = AmbiguousExample(
            id=f"context:{part}:{language}:{number}",
            kind="profession",
            language=language,
            source=source.strip(),
            context=(context,),
            reference=original,
            label=english_gender(context),
            contrast=flipped,
        )
        examples.append(example)
    return examples


def read_winomt(path: str | Path) -> list[AmbiguousExample]:
    """Read the English sentences of WinoMT, with the occupation as `word` and its gender as label.

    There are no translations.

    Args:
        path: a file of WinoMT, such as en.txt.
    """
    labels = {"female": "feminine", "male": "masculine", "neutral": "neutral"}
    examples: list[AmbiguousExample] = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        fields = line.split("\t")
        if len(fields) != 4 or fields[0] not in labels:
            raise DataError(
                f"{path}:{number} has {len(fields)} fields, but the gender (female, male or neutral), place, sentence "
                "and occupation of WinoMT are expected: name a file of WinoMT."
            )
        gender, _, sentence, word = fields
        example = AmbiguousExample(
            id=f"{Path(path).stem}:{number}",
            kind="profession",
            language="",
            source=sentence,
            label=labels[gender],
            word=word,
        )
        examples.append(example)
    return examples


def read_discevalmt(folder: str | Path) -> list[AmbiguousExample]:
    """Read the English-French contrastive pairs of "it", whose antecedent is in the sentence before.

    Only correct translations are references; those that follow a wrong antecedent are omitted. So are the sentences
    about "they", which is another ambiguity than "it".

    Args:
        folder: folder of discourse-mt-test-sets.
    """
    try:
        anaphora = json.loads("\n".join(read_lines(Path(folder) / "anaphora.json")))
        examples: list[AmbiguousExample] = []
        for key, item in anaphora.items():
            examples.extend(_anaphora_examples(key, item))
        return examples
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(
            f"The files in {folder} are not those of discourse-mt-test-sets: download them again."
        ) from None


def _anaphora_examples(key: str, item: Mapping[str, Any]) -> Iterator[AmbiguousExample]:
    """Yield an example per correct translation of a pair of sentences."""
    genders = {"f": "feminine", "m": "masculine"}
    context = item["src"][0]
    source = item["src"][1]
    if not _IT.search(source):
        return
    for number, target in enumerate(item["trg"], start=1):
        if "correct" not in target or not target["type"].endswith("sg"):
            continue
        correct = target["correct"]
        yield AmbiguousExample(
            id=f"anaphora:{key}:{number}",
            kind="it",
            language="fr",
            source=source,
            context=(context,),
            reference=correct[1],
            label=genders.get(target["type"][:1]),
            contrast=target["incorrect"][1],
            reference_context=(correct[0],),
        )


def read_tsv(path: str | Path) -> list[ParallelDocument]:
    """Read a file of three columns, separated by tabs: document, English sentence, translation.

    Args:
        path: the file.
    """
    rows = [tuple(line.split("\t")) for line in read_lines(Path(path))]
    for number, fields in enumerate(rows, start=1):
        if len(fields) != 3:
            raise DataError(
                f"{path}:{number} has {len(fields)} columns, but document, source and translation are expected: name a "
                "file with these columns."
            )
    return parallel_documents(Path(path).stem, rows)


def parallel_documents(name: str, rows: Sequence[tuple[str, ...]]) -> list[ParallelDocument]:
    """Group consecutive rows by document.

    Args:
        name: name of the corpus.
        rows: document, English sentence and translation. Pairs are numbered from 1 over the whole corpus.
    """
    documents: list[ParallelDocument] = []
    numbered = enumerate(rows, start=1)
    for document, group in groupby(numbered, key=lambda entry: entry[1][0]):
        pairs = [SentencePair(id=f"{name}:{number}", source=row[1], target=row[2]) for number, row in group]
        documents.append(ParallelDocument(id=document, pairs=tuple(pairs)))
    return documents
