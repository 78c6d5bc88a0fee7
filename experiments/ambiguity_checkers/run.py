"""Accuracy of the rule-based checkers on translations whose formality or gender is known.

Nothing is trained or random: every run gives the same figures, in seconds.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from experiments import Options
from experiments.clarify.checkers import CheckerKind, checker, languages
from experiments.clarify.datasets import (
    AmbiguityKind,
    AmbiguousExample,
    ParallelDocument,
    SentencePair,
    english_gender,
    mt_geneval_contexts,
    parallel_documents,
    read_aligned,
    read_cocoa_mt,
    read_lines,
    read_mt_geneval,
)
from experiments.clarify.metrics import share
from experiments.study import Study, aim
from graftlm.config import read_yaml
from graftlm.errors import DataError, did_you_mean
from graftlm.evaluation import Aim, Metric, Results, Row, value_of

NAME = "ambiguity-checkers"
PARTS = ("test", "train", "pronouns")  # MT-GenEval has no training part, so train means its dev part
AIMS: dict[CheckerKind, float] = {"formality": 95.0, "gender": 90.0}
OTHER_GENDER = {"feminine": "masculine", "masculine": "feminine"}
UNDECIDED = "undecided"
UNMARKED = "unmarked"
QUICK = 100  # examples of a set in a quick run
_READ = Path(__file__).with_name("read.yaml")
_DANISH_SINGULAR = re.compile(r"\b(?:du|dig|din|dit|dine)\b", re.IGNORECASE)
# "I" is the plural "you" except at the start of a sentence, where it may be the preposition.
_DANISH_PLURAL = re.compile(r"(?<=\w )I\b|(?<=, )I\b|\b(?:[Ee]der|[Ee]ders|[Jj]er|[Jj]eres)\b")
_VERSE = re.compile(r"\[(\d+:\d+)\] ?(.*)")
_NTREX = {"de": "deu", "fr": "fra", "es": "spa", "ja": "jpn", "it": "ita", "pt": "por"}
GENDER_LANGUAGES = ("de", "es", "fr")
_SCOPES = {"accuracy": "of the sentences it decides", "right_of_all": "of all sentences with a marker"}


def read_by_hand(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """Yield the sentences of NTREX whose form of address was labelled by hand in `read.yaml`.

    Args:
        parallel: folder of the parallel corpora.
        language: target language.
    """
    known: dict[str, str] = {}
    for label, lines in read_yaml(_READ).get(language, {}).items():
        for line in lines:
            known[f"ntrex:{line}"] = label
    if not known:
        return
    for pair in _ntrex(parallel, language):
        if pair.id in known:
            yield _example("formality", language, pair, known[pair.id])


def labelled_by_danish(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """Yield verses of the French Bible, labelled by the Danish one.

    In these Bibles, French *tu* and Danish *du* address one person, *vous* and *I* several. Only verses whose Danish
    text has one of the two are used. Psalms are left out, since the two Bibles number their verses differently. The
    checker gets no English source, since English hides the difference.

    Args:
        parallel: folder of the parallel corpora.
        language: target language; only French has such labels.
    """
    danish = parallel / "bible" / "DaOT1871NT1907.txt"
    french = parallel / "bible" / "FreSynodale1921.txt"
    if language != "fr" or not danish.exists():
        return
    for document in read_bible(danish, french):
        if document.id == "Psalms":
            continue
        for pair in document.pairs:
            singular = _DANISH_SINGULAR.search(pair.source)
            plural = _DANISH_PLURAL.search(pair.source)
            if bool(singular) != bool(plural):
                label = "informal" if singular else "formal"
                yield _example("formality", language, replace(pair, source=""), label)


def labelled_by_pronouns(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """Yield the sentences of NTREX whose English pronouns have one gender; they may also be about other persons.

    Args:
        parallel: folder of the parallel corpora.
        language: target language.
    """
    if language not in GENDER_LANGUAGES:
        return
    for pair in _ntrex(parallel, language):
        gender = english_gender(pair.source)
        if gender is not None:
            yield _example("profession", language, pair, gender)


def _ntrex(parallel: Path, language: str) -> Iterator[SentencePair]:
    """Yield the sentences of NTREX; none without its folder."""
    folder = parallel / "ntrex"
    if folder.is_dir():
        for document in read_ntrex(folder, language):
            yield from document.pairs


def _example(kind: AmbiguityKind, language: str, pair: SentencePair, label: str) -> AmbiguousExample:
    """Return an example whose whole reference counts as marked."""
    return AmbiguousExample(
        id=pair.id,
        kind=kind,
        language=language,
        source=pair.source,
        reference=pair.target,
        label=label,
        marks=(pair.target,),
    )


def read_ntrex(folder: str | Path, language: str) -> list[ParallelDocument]:
    """Read NTREX-128: news in English and another language, with document ids.

    Args:
        folder: folder of NTREX-128.
        language: target language.

    Raises:
        DataError: NTREX-128 lacks the language here, or a file can't be read.
    """
    if language not in _NTREX:
        raise DataError(f"There is no code of NTREX for the language {language!r}{did_you_mean(language, _NTREX)}.")
    names = ("DOCUMENT_IDS.tsv", "newstest2019-src.eng.txt", f"newstest2019-ref.{_NTREX[language]}.txt")
    return parallel_documents("ntrex", read_aligned(*(Path(folder) / name for name in names)))


def read_bible(source: str | Path, target: str | Path) -> list[ParallelDocument]:
    """Read two Bibles with one verse per line, `[chapter:verse] text` below `### Book`; a book is a document.

    Verses that one Bible lacks are omitted. Some verses consist of several sentences.

    Args:
        source: file of the source language.
        target: file of the target language.

    Raises:
        DataError: a file can't be read, or the Bibles have no verse in common.
    """
    source_verses = verses(Path(source))
    target_verses = verses(Path(target))
    rows = []
    for key, text in source_verses.items():
        book, _ = key
        translation = target_verses.get(key)
        if translation:
            rows.append((book, text, translation))
    if not rows:
        raise DataError(
            f"{source} and {target} have no verse in common: name two Bibles with lines such as [1:1] under "
            "### Genesis."
        )
    complete = [row for row in rows if row[1]]
    return parallel_documents("bible", complete)


def verses(path: Path) -> dict[tuple[str, str], str]:
    """Return the verses of a Bible by book and number."""
    book = ""
    texts = {}
    for line in read_lines(path):
        if line.startswith("### "):
            book = line[4:].strip()
            continue
        match = _VERSE.fullmatch(line)
        if match is not None:
            texts[book, match[1]] = match[2].strip()
    return texts


class CheckedExample(NamedTuple):
    """An example whose label was checked.

    Args:
        part: the set that it belongs to.
        known: its known label.
        checked: the checker's label.
    """

    part: str
    known: str
    checked: str


Checked = dict[tuple[CheckerKind, str, str], list[CheckedExample]]  # by kind, language and part


def run(options: Options) -> Results:
    """Measure every checker with labelled text in `options.data`."""
    checked = _check_all(options)
    if not checked:
        raise DataError(
            f"{options.data} contains neither ambig/cocoa_mt, ambig/mt_geneval nor parallel: name the folder of data "
            "sets."
        )
    rows = []
    details = {}
    for (kind, language, part), examples in checked.items():
        row = _row(kind, language, part, examples)
        rows.append(row)
        details[row.id] = _confusion(examples)
    return Study(options).write(NAME, rows, seeds=(0,), aims=_aims(rows), details=details)


def _check_all(options: Options) -> Checked:
    """Check the examples of the chosen parts; sets without examples are left out."""
    limit = QUICK if options.quick else None
    checked: Checked = {}
    for part in options.chosen(PARTS, ("test", "pronouns")):
        for kind, read in READERS.items():
            for language in languages(kind):
                examples = read(options.data, language, part)[:limit]
                if examples:
                    checked[kind, language, part] = [_check(kind, language, example) for example in examples]
    return checked


def _formality(data: Path, language: str, part: str) -> list[AmbiguousExample]:
    """Return the examples of CoCoA-MT; for other languages those labelled by hand or by another language."""
    folder = data / "ambig" / "cocoa_mt"
    if list(folder.glob(f"formality-control.{part}*.en-{language}.en")):
        return read_cocoa_mt(folder, language, part)
    if part != "test":
        return []
    parallel = data / "parallel"
    return [*read_by_hand(parallel, language), *labelled_by_danish(parallel, language)]


def _gender(data: Path, language: str, part: str) -> list[AmbiguousExample]:
    """Return the examples of MT-GenEval, or those of NTREX labelled by English pronouns.

    The latter are the part `pronouns`, and the part `test` of languages that MT-GenEval lacks.
    """
    folder = data / "ambig" / "mt_geneval"
    exists = (folder / f"geneval-sentences-feminine-test.en_{language}.en").exists()
    pronouns_part = "pronouns" if exists else "test"
    if part == pronouns_part:
        return list(labelled_by_pronouns(data / "parallel", language))
    if part == "pronouns" or not exists:
        return []
    public_part = "dev" if part == "train" else part
    contexts = [example for example in mt_geneval_contexts(folder, language, public_part) if example.label]
    flipped = [_flip(example) for example in contexts]
    return [*read_mt_geneval(folder, language, public_part), *contexts, *flipped]


def _flip(example: AmbiguousExample) -> AmbiguousExample:
    """Return an example with its contrast as the reference."""
    return replace(
        example,
        id=f"{example.id}:flipped",
        reference=example.contrast or "",
        label=OTHER_GENDER[example.label or ""],
    )


READERS: Mapping[CheckerKind, Callable[[Path, str, str], list[AmbiguousExample]]] = {
    "formality": _formality,
    "gender": _gender,
}


def _check(kind: CheckerKind, language: str, example: AmbiguousExample) -> CheckedExample:
    """Check an example.

    The checker of formality also reads the source, as elsewhere in the project. The checker of gender must not, since
    the source may show the gender.
    """
    source = example.source if kind == "formality" else None
    label = checker(kind, language).check(example.reference, source).label
    known = str(example.label)
    if kind == "formality" and not example.marks:
        known = UNMARKED
    return CheckedExample(
        part=example.id.split(":")[0],
        known=known,
        checked=label or UNDECIDED,
    )


def _row(kind: CheckerKind, language: str, part: str, examples: Sequence[CheckedExample]) -> Row:
    marked = [example for example in examples if example.known != UNMARKED]
    decided = [example for example in marked if example.checked != UNDECIDED]
    right = [example for example in decided if example.checked == example.known]
    row_id = f"{kind}_{language}"
    label = f"{kind}, {language}"
    if part != "test":
        row_id += f"_{part}"
        label += f" ({part} part)"
    metrics: dict[str, Metric] = {
        "accuracy": share(len(right), len(decided)),
        "coverage": share(len(decided), len(marked)),
        "right_of_all": share(len(right), len(marked)),
        "sentences": len(marked),
    }
    return Row(id=row_id, label=label, metrics=metrics)


def _confusion(examples: Sequence[CheckedExample]) -> dict[str, dict[str, dict[str, int]]]:
    """Return confusion tables by set: counts by the known label, then by the checker's."""
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for part, known, _ in examples:
        tables.setdefault(part, {}).setdefault(known, {})
    for (part, known, checked), count in sorted(Counter(examples).items()):
        tables[part][known][checked] = count
    return tables


def _aims(rows: Sequence[Row]) -> list[Aim]:
    aims: list[Aim] = []
    for row in rows:
        if row.id.endswith("_pronouns"):
            continue  # for comparison only: pronouns of other persons make these labels unreliable
        bound = AIMS["formality"] if row.id.startswith("formality") else AIMS["gender"]
        for metric, scope in _SCOPES.items():
            text = f"{row.label}: right on at least {bound:g}% {scope}"
            measured = value_of(row.metrics[metric])
            aims.append(aim(text, metric, bound, measured, operator.ge))
    return aims
