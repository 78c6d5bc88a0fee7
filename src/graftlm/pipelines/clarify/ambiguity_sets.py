"""Readers of public sets of ambiguous sentences, from folders that the user has; none is part of the project.

| set | what it holds |
|---|---|
| AmbigMT | five kinds of ambiguity, English to German, Spanish and French, with context |
| CoCoA-MT | a formal and an informal translation of each sentence, with the words that differ marked |
| MT-GenEval | a feminine and a masculine translation of each sentence; part of them with context |
| WinoMT | English sentences in which a pronoun tells the gender of an occupation |
| discourse-mt-test-sets | English-French pairs of sentences, of which the first decides how to translate the second |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.errors import DataError
from graftlm.pipelines.clarify.examples import AmbiguityKind, Example, english_gender, read_aligned, read_lines

_GENDERS = ("feminine", "masculine")
_MARKED = re.compile(r"\[F\](.*?)\[/F\]")
# Columns as they are, not as headers say: the one of formality names four of its five.
_AMBIGMT: dict[str, tuple[AmbiguityKind, tuple[str, ...]]] = {
    "formality": ("formality", ("label", "", "context", "source", "reference")),
    "it_resolution": ("it", ("source", "reference", "context", "label")),
    "gender_neutral_names": ("name", ("source", "reference", "context")),
    "neutral_professions": ("profession", ("context", "source", "reference")),
    "polysemy": ("polysemy", ("source", "reference", "context")),
}
_AMBIGMT_NAME = re.compile(rf"({'|'.join(_AMBIGMT)})_en_([a-z]{{2}})")


@dataclass(frozen=True)
class AmbigSet:
    """What was read of AmbigMT.

    Args:
        examples: of all files.
        left_out: lines that could not be used: `file:line: why`.
    """

    examples: tuple[Example, ...]
    left_out: tuple[str, ...]


def read_ambigmt(folder: str | Path) -> AmbigSet:
    """All of AmbigMT's files below a folder.

    Fields are split at tabs, without quoting. A blank label is none; the word TRUE, which a spreadsheet has put there,
    is read as "true". Lines with another number of fields are left out, and told.

    Raises:
        DataError: there are no such files.
    """
    files = sorted(path for path in Path(folder).rglob("*.tsv") if _AMBIGMT_NAME.fullmatch(path.stem))
    if not files:
        raise DataError(f"{folder} holds no file of AmbigMT such as formality_en_de.tsv: name the folder that does.")
    examples: list[Example] = []
    left_out: list[str] = []
    for path in files:
        for number, line in enumerate(read_lines(path)[1:], start=2):
            found = _ambigmt_line(path, number, line)
            if isinstance(found, Example):
                examples.append(found)
            else:
                left_out.append(f"{path.name}:{number}: {found}")
    return AmbigSet(tuple(examples), tuple(left_out))


def _ambigmt_line(path: Path, number: int, line: str) -> Example | str:
    """The example on a line, or why there is none."""
    name = _AMBIGMT_NAME.fullmatch(path.stem)
    assert name is not None, "only files whose name fits are read"
    kind, columns = _AMBIGMT[name[1]]
    fields = line.split("\t")
    if len(fields) != len(columns):
        return f"{len(fields)} fields, where {len(columns)} are expected"
    values = {column: field.strip() for column, field in zip(columns, fields, strict=True)}
    if not values["source"] or not values["reference"]:
        return "the source or its translation is empty"
    word, label = None, values.get("label") or None
    if kind == "polysemy":
        word, label = ("true" if values["source"] == "TRUE" else values["source"]), values["reference"]
    return Example(
        id=f"{path.stem}:{number}",
        kind=kind,
        language=name[2],
        source=word or values["source"],
        context=tuple(part.strip() for part in re.split(r" - |^- ", values["context"]) if part.strip(" -")),
        reference=values["reference"],
        label=label,
        word=word,
    )


def read_cocoa_mt(folder: str | Path, language: str, part: str = "test") -> list[Example]:
    """CoCoA-MT: for every English sentence a formal example and an informal one, each the other's contrast.

    Args:
        folder: where the files formality-control.* lie.
        language: of the translations; the public sets have German and Italian, and others without reference here.
        part: test, or train, which has several domains.

    Raises:
        DataError: there are no such files, or they don't fit each other.
    """
    stems = sorted(
        path.name.removesuffix(".en") for path in Path(folder).glob(f"formality-control.{part}*.en-{language}.en")
    )
    if not stems:
        raise DataError(
            f"{folder} holds no CoCoA-MT file formality-control.{part}*.en-{language}.en: name its folder and one "
            "of its languages."
        )
    return [example for stem in stems for example in _cocoa_file(Path(folder), stem, language)]


def _cocoa_file(folder: Path, stem: str, language: str) -> Iterator[Example]:
    endings = ("formal", "informal", "formal.annotated", "informal.annotated")
    rows = read_aligned(folder / f"{stem}.en", *(folder / f"{stem}.{ending}.{language}" for ending in endings))
    for number, (source, formal, informal, *marked) in enumerate(rows, start=1):
        for label, own, other, annotated in zip(
            ("formal", "informal"), (formal, informal), (informal, formal), marked, strict=True
        ):
            yield Example(
                id=f"{stem.removeprefix('formality-control.')}:{number}:{label}",
                kind="formality",
                language=language,
                source=source,
                reference=own,
                label=label,
                contrast=other,
                marks=tuple(_MARKED.findall(annotated)),
            )


def read_mt_geneval(folder: str | Path, language: str, part: str = "test") -> list[Example]:
    """MT-GenEval's single sentences: for each its feminine and its masculine version, each the other's contrast.

    The English sentence tells the gender: there is nothing to ask.

    Raises:
        DataError: there are no such files, or they don't fit each other.
    """
    ends = [f"{gender}-{part}.en_{language}.{side}" for gender in _GENDERS for side in ("en", language)]
    rows = read_aligned(*(Path(folder) / f"geneval-sentences-{end}" for end in ends))
    return [
        Example(
            id=f"sentences:{part}:{language}:{number}:{label}",
            kind="profession",
            language=language,
            source=source,
            reference=own,
            label=label,
            contrast=other,
        )
        for number, (her, hers, him, his) in enumerate(rows, start=1)
        for label, source, own, other in (("feminine", her, hers, his), ("masculine", him, his, hers))
    ]


def mt_geneval_contexts(folder: str | Path, language: str, part: str = "test") -> list[Example]:
    """MT-GenEval's sentences whose gender only the sentence before tells.

    With `context` nothing has to be asked; without it, the gender has to be. The label is what the pronouns of the
    context tell; where they tell none, or both, it is None, and so it is where the sentence itself tells it otherwise.

    Raises:
        DataError: there are no such files, or they don't fit each other.
    """
    names = (f"2to1-{part}.en_{language}.en", f"original-{part}.en_{language}.{language}")
    names = (*names, f"flipped-{part}.en_{language}.{language}")
    rows = read_aligned(*(Path(folder) / f"geneval-context-wikiprofessions-{name}" for name in names))
    found: list[Example] = []
    for number, (pair, original, flipped) in enumerate(rows, start=1):
        context, _, source = (text.strip() for text in pair.partition("<sep>"))
        found.append(
            Example(
                id=f"context:{part}:{language}:{number}",
                kind="profession",
                language=language,
                source=source,
                context=(context,),
                reference=original,
                label=english_gender(context),
                contrast=flipped,
            )
        )
    return found


def read_winomt(path: str | Path) -> list[Example]:
    """WinoMT's English sentences, with the occupation as `word` and its gender as label; there are no translations.

    Args:
        path: one of its files, such as en.txt.

    Raises:
        DataError: the file can't be read, or a line has another number of fields.
    """
    names = {"female": "feminine", "male": "masculine", "neutral": "neutral"}
    found: list[Example] = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        fields = line.split("\t")
        if len(fields) != 4 or fields[0] not in names:
            raise DataError(
                f"{path}:{number} has {len(fields)} fields, where WinoMT has gender, place, sentence, occupation."
            )
        gender, _, sentence, word = fields
        example_id = f"{Path(path).stem}:{number}"
        found.append(Example(example_id, "profession", "", sentence, label=names[gender], word=word))
    return found


def read_discevalmt(folder: str | Path) -> list[Example]:
    """The English-French contrastive pairs: "it" and "they" by their antecedent, words by their neighbour sentence.

    Only right translations are references; those that follow a wrong antecedent are left out.

    Raises:
        DataError: a file can't be read, or is of another form.
    """
    try:
        anaphora, lexical = (_json(Path(folder) / name) for name in ("anaphora.json", "lexical-choice.json"))
        return [*_anaphora(anaphora), *_lexical(lexical)]
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(f"The files in {folder} are not those of discourse-mt-test-sets: fetch them again.") from None


def _json(path: Path) -> Any:
    return json.loads("\n".join(read_lines(path)))


def _anaphora(items: dict[str, Any]) -> Iterator[Example]:
    for key, item in items.items():
        before, source = item["src"]
        for number, target in enumerate(item["trg"], start=1):
            if "correct" in target:
                yield Example(
                    id=f"anaphora:{key}:{number}",
                    kind="it",
                    language="fr",
                    source=source,
                    context=(before,),
                    reference=target["correct"][1],
                    label="feminine" if target["type"].startswith("f") else "masculine",
                    contrast=target["incorrect"][1],
                    reference_context=(target["correct"][0],),
                )


def _lexical(items: dict[str, Any]) -> Iterator[Example]:
    for key, item in items.items():
        for number, example in enumerate(item["examples"], start=1):
            before, source = example["src"]
            right, wrong = example["trg"]["correct"], example["trg"]["incorrect"]
            yield Example(
                id=f"lexical:{key}:{number}",
                kind="polysemy",
                language="fr",
                source=source,
                context=(before,),
                reference=right[1],
                contrast=wrong[1],
                reference_context=(right[0],),
            )
