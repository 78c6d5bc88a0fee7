"""Readers of ambiguous sentences and of parallel text, from folders of the user; no data set is part of the project.

| set | content |
|---|---|
| AmbigMT | five kinds of ambiguity, English to German, Spanish and French, with context |
| CoCoA-MT | a formal and an informal translation of each sentence, with the words that differ marked |
| MT-GenEval | a feminine and a masculine translation of each sentence; part of them with context |
| WinoMT | English sentences in which a pronoun shows the gender of an occupation |
| discourse-mt-test-sets | English-French pairs of sentences: the first has the antecedent of the second's "it" |
| TSV files | parallel sentences in the order of their documents |

All readers raise DataError if a file is missing, can't be read, is not aligned with the others, or has another form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from graftlm.errors import DataError
from graftlm.pipelines.clarify.ambiguity import AmbiguityKind, english_gender

GENDERED = re.compile(r"\b(?:she|her|hers|herself|he|him|his|himself)\b", re.IGNORECASE)
_IT = re.compile(r"\bit\b", re.IGNORECASE)
_MARKED = re.compile(r"\[F\](.*?)\[/F\]")
# The columns as they are. The header of the formality files names four of the five.
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
        id: unique in its set.
        language: of the translation, two letters; empty where there is none.
        source: the English text.
        context: English sentences that resolve the ambiguity; the user knows them.
        reference: the right translation.
        label: the reference's label: formal, informal or neutral; feminine, masculine, neuter or neutral; the
            translation of a polysemous word; None if unknown.
        contrast: a translation with the opposite label.
        word: the ambiguous word.
        marks: the parts of the reference that show the label, if the set marks them.
        reference_context: translations of the context's sentences.
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
    """An English sentence and its translation; `id` is its position in the corpus."""

    id: str
    source: str
    target: str


@dataclass(frozen=True)
class ParallelDocument:
    """The sentence pairs of one document, in order."""

    id: str
    pairs: tuple[SentencePair, ...]


def read_lines(path: Path) -> list[str]:
    """The lines of a file, split at line feeds alone; U+2028 and other separators stay. Invalid UTF-8 becomes U+FFFD.

    Raises:
        DataError: the file can't be read.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): check the folder of data sets.") from None
    lines = text.removeprefix("\ufeff").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def read_aligned(*paths: Path) -> list[tuple[str, ...]]:
    """The lines of several files, side by side.

    Raises:
        DataError: a file can't be read, or the files have different numbers of lines.
    """
    columns = [read_lines(path) for path in paths]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{path.name} has {len(column)}" for path, column in zip(paths, columns, strict=True))
        raise DataError(f"Files that belong together have different numbers of lines ({counts}): fetch them again.")
    return list(zip(*columns, strict=True))


def read_ambigmt(folder: str | Path) -> tuple[list[AmbiguousExample], list[str]]:
    """The examples of all AmbigMT files below a folder, and the unusable lines as `file:line: reason`.

    Fields are split at tabs, without quoting. A blank label becomes None. The word TRUE, an artefact of a spreadsheet,
    becomes "true".
    """
    files = sorted(path for path in Path(folder).rglob("*.tsv") if _AMBIGMT_NAME.fullmatch(path.stem))
    if not files:
        raise DataError(f"{folder} holds no file of AmbigMT such as formality_en_de.tsv: name the folder that does.")
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
    """The example of a line, or the reason why there is none."""
    name, _, language = stem.rpartition("_en_")
    kind, columns = _AMBIGMT[name]
    if len(fields) != len(columns):
        return f"{len(fields)} fields, where {len(columns)} are expected"
    values = {column: field.strip() for column, field in zip(columns, fields, strict=True)}
    source, reference = values["source"], values["reference"]
    if not source or not reference:
        return "the source or its translation is empty"
    word, label = None, values.get("label") or None
    if kind == "polysemy":
        source = word = "true" if source == "TRUE" else source
        label = reference
    context = tuple(part.strip() for part in re.split(r" - |^- ", values["context"]) if part.strip(" -"))
    return AmbiguousExample(f"{stem}:{number}", kind, language, source, context, reference, label, word=word)


def read_cocoa_mt(folder: str | Path, language: str, part: str = "test") -> list[AmbiguousExample]:
    """CoCoA-MT: a formal and an informal example of every English sentence, each with the other as its contrast.

    Args:
        folder: holds the files formality-control.*.
        language: of the translations; public files with references exist for German and Italian.
        part: test, or train, which has several domains.
    """
    folder = Path(folder)
    stems = sorted(path.name.removesuffix(".en") for path in folder.glob(f"formality-control.{part}*.en-{language}.en"))
    if not stems:
        raise DataError(
            f"{folder} holds no CoCoA-MT file formality-control.{part}*.en-{language}.en: name its folder and one "
            "of its languages."
        )
    examples: list[AmbiguousExample] = []
    for stem in stems:
        endings = ("formal", "informal", "formal.annotated", "informal.annotated")
        rows = read_aligned(folder / f"{stem}.en", *(folder / f"{stem}.{ending}.{language}" for ending in endings))
        for number, (source, *texts, formal, informal) in enumerate(rows, start=1):
            name = f"{stem.removeprefix('formality-control.')}:{number}"
            for label, pair, marked in (("formal", texts, formal), ("informal", texts[::-1], informal)):
                key, marks = f"{name}:{label}", tuple(_MARKED.findall(marked))
                examples.append(
                    AmbiguousExample(key, "formality", language, source, (), pair[0], label, pair[1], marks=marks)
                )
    return examples


def read_mt_geneval(folder: str | Path, language: str, part: str = "test") -> list[AmbiguousExample]:
    """MT-GenEval's single sentences: feminine and masculine versions, each with the other as its contrast.

    The English sentence shows the gender, so there is nothing to ask.
    """
    genders = ("feminine", "masculine")
    ends = [f"{gender}-{part}.en_{language}.{side}" for gender in genders for side in ("en", language)]
    rows = read_aligned(*(Path(folder) / f"geneval-sentences-{end}" for end in ends))
    return [
        AmbiguousExample(
            f"sentences:{part}:{language}:{n}:{label}", "profession", language, text, (), own, label, other
        )
        for n, (her, hers, him, his) in enumerate(rows, start=1)
        for label, text, own, other in (("feminine", her, hers, his), ("masculine", him, his, hers))
    ]


def mt_geneval_contexts(folder: str | Path, language: str, part: str = "test") -> list[AmbiguousExample]:
    """MT-GenEval's sentences whose gender only the preceding sentence shows.

    With `context` there is nothing to ask; without it the gender is open. The label comes from the pronouns of the
    context, and is None if these have no gender or both.
    """
    names = [f"2to1-{part}.en_{language}.en"]
    names += [f"{version}-{part}.en_{language}.{language}" for version in ("original", "flipped")]
    rows = read_aligned(*(Path(folder) / f"geneval-context-wikiprofessions-{name}" for name in names))
    examples: list[AmbiguousExample] = []
    for number, (pair, original, flipped) in enumerate(rows, start=1):
        context, _, source = (text.strip() for text in pair.partition("<sep>"))
        name, gender = f"context:{part}:{language}:{number}", english_gender(context)
        examples.append(AmbiguousExample(name, "profession", language, source, (context,), original, gender, flipped))
    return examples


def read_winomt(path: str | Path) -> list[AmbiguousExample]:
    """WinoMT's English sentences, with the occupation as `word` and its gender as label; without translations.

    Args:
        path: one of its files, such as en.txt.
    """
    labels = {"female": "feminine", "male": "masculine", "neutral": "neutral"}
    examples: list[AmbiguousExample] = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        fields = line.split("\t")
        if len(fields) != 4 or fields[0] not in labels:
            raise DataError(
                f"{path}:{number} has {len(fields)} fields, where WinoMT has gender, place, sentence, occupation."
            )
        gender, _, sentence, word = fields
        name = f"{Path(path).stem}:{number}"
        examples.append(AmbiguousExample(name, "profession", "", sentence, label=labels[gender], word=word))
    return examples


def read_discevalmt(folder: str | Path) -> list[AmbiguousExample]:
    """The English-French contrastive pairs of "it", whose antecedent is in the sentence before.

    Only correct translations are references; those that follow a wrong antecedent are omitted. So are the sentences
    about "they", which is another ambiguity than "it".
    """
    try:
        anaphora = json.loads("\n".join(read_lines(Path(folder) / "anaphora.json")))
        return [
            AmbiguousExample(
                id=f"anaphora:{key}:{number}",
                kind="it",
                language="fr",
                source=item["src"][1],
                context=(item["src"][0],),
                reference=target["correct"][1],
                label={"f": "feminine", "m": "masculine"}.get(target["type"][:1]),
                contrast=target["incorrect"][1],
                reference_context=(target["correct"][0],),
            )
            for key, item in anaphora.items()
            if _IT.search(item["src"][1])
            for number, target in enumerate(item["trg"], start=1)
            if "correct" in target and target["type"].endswith("sg")
        ]
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(f"The files in {folder} are not those of discourse-mt-test-sets: fetch them again.") from None


def read_tsv(path: str | Path) -> list[ParallelDocument]:
    """A file of three columns, split at tabs: document, English sentence, translation."""
    rows = [tuple(line.split("\t")) for line in read_lines(Path(path))]
    for number, fields in enumerate(rows, start=1):
        if len(fields) != 3:
            raise DataError(
                f"{path}:{number} has {len(fields)} columns, but document, source and translation are three."
            )
    return parallel_documents(Path(path).stem, rows)


def parallel_documents(name: str, rows: Sequence[tuple[str, ...]]) -> list[ParallelDocument]:
    """Groups consecutive rows by document. Pairs are numbered from 1 over the whole corpus."""
    groups = groupby(enumerate(rows, start=1), key=lambda numbered: numbered[1][0])
    return [
        ParallelDocument(key, tuple(SentencePair(f"{name}:{number}", row[1], row[2]) for number, row in group))
        for key, group in groups
    ]
