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
from graftlm.evaluation import Aim, Results, Row, value_of

_READ = Path(__file__).with_name("read.yaml")
_DANISH_SINGULAR = re.compile(r"\b(?:du|dig|din|dit|dine)\b", re.IGNORECASE)
# I is the plural you except at the start of a sentence, where it may be the preposition.
_DANISH_PLURAL = re.compile(r"(?<=\w )I\b|(?<=, )I\b|\b(?:[Ee]der|[Ee]ders|[Jj]er|[Jj]eres)\b")
_VERSE = re.compile(r"\[(\d+:\d+)\] ?(.*)")
_NTREX = {"de": "deu", "fr": "fra", "es": "spa", "ja": "jpn", "it": "ita", "pt": "por"}
GENDER_LANGUAGES = ("de", "es", "fr")


def read_by_hand(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """NTREX's sentences whose form of address a person read, in the languages of `read.yaml`."""
    labels = read_yaml(_READ).get(language, {})
    known = {f"ntrex:{line}": label for label, lines in labels.items() for line in lines}
    for pair in _ntrex(parallel, language) if known else ():
        if pair.id in known:
            yield _example("formality", language, pair, known[pair.id])


def labelled_by_danish(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """Verses of the French Bible, where tu is one person and vous several, like du and I in the Danish one.

    Only verses whose Danish has one of the two count, and no psalms, whose verses the two Bibles number differently.
    The checker gets no English source, since English hides the difference.
    """
    danish, french = (parallel / "bible" / name for name in ("DaOT1871NT1907.txt", "FreSynodale1921.txt"))
    if language != "fr" or not danish.exists():
        return
    for document in read_bible(danish, french):
        for pair in document.pairs if document.id != "Psalms" else ():
            singular, plural = _DANISH_SINGULAR.search(pair.source), _DANISH_PLURAL.search(pair.source)
            if bool(singular) != bool(plural):
                label = "informal" if singular else "formal"
                yield _example("formality", language, replace(pair, source=""), label)


def labelled_by_pronouns(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """NTREX's sentences whose English pronouns have one gender. The sentence may be about other persons as well."""
    for pair in _ntrex(parallel, language) if language in GENDER_LANGUAGES else ():
        if gender := english_gender(pair.source):
            yield _example("profession", language, pair, gender)


def _ntrex(parallel: Path, language: str) -> Iterator[SentencePair]:
    """The sentences of NTREX, or none without its folder."""
    for document in read_ntrex(parallel / "ntrex", language) if (parallel / "ntrex").is_dir() else ():
        yield from document.pairs


def _example(kind: AmbiguityKind, language: str, pair: SentencePair, label: str) -> AmbiguousExample:
    """An example whose whole reference counts as marked."""
    return AmbiguousExample(pair.id, kind, language, pair.source, (), pair.target, label, marks=(pair.target,))


def read_ntrex(folder: str | Path, language: str) -> list[ParallelDocument]:
    """NTREX-128: news in English and another language, with document ids."""
    if language not in _NTREX:
        raise DataError(f"There is no code of NTREX for the language {language!r}{did_you_mean(language, _NTREX)}.")
    names = ("DOCUMENT_IDS.tsv", "newstest2019-src.eng.txt", f"newstest2019-ref.{_NTREX[language]}.txt")
    return parallel_documents("ntrex", read_aligned(*(Path(folder) / name for name in names)))


def read_bible(source: str | Path, target: str | Path) -> list[ParallelDocument]:
    """Two Bibles with one verse per line, `[chapter:verse] text` below `### Book`; a book is a document.

    Verses that one Bible lacks are omitted. Some verses hold several sentences.
    """
    english, other = verses(Path(source)), verses(Path(target))
    rows = [(key[0], text, other[key]) for key, text in english.items() if other.get(key)]
    if not rows:
        raise DataError(
            f"{source} and {target} share no verse: name two Bibles with lines such as [1:1] under ### Genesis."
        )
    return parallel_documents("bible", [row for row in rows if row[1]])


def verses(path: Path) -> dict[tuple[str, str], str]:
    """The verses of a Bible by book and number."""
    book, texts = "", {}
    for line in read_lines(path):
        if line.startswith("### "):
            book = line[4:].strip()
        elif match := _VERSE.fullmatch(line):
            texts[book, match[1]] = match[2].strip()
    return texts


NAME = "ambiguity-checkers"
PARTS = ("test", "train", "pronouns")  # for MT-GenEval, which has no training part, train means dev
AIMS: dict[CheckerKind, float] = {"formality": 95.0, "gender": 90.0}
OTHER_GENDER = {"feminine": "masculine", "masculine": "feminine"}
UNDECIDED, UNMARKED = "undecided", "unmarked"
QUICK = 100  # examples of a set in a quick run


class CheckedExample(NamedTuple):
    """One example: its set, its known label and the checker's label."""

    part: str
    known: str
    checked: str


def run(options: Options) -> Results:
    """Measure every checker with labelled text in `options.data`."""
    checked: dict[tuple[CheckerKind, str, str], list[CheckedExample]] = {}
    for part in options.chosen(PARTS, ("test", "pronouns")):
        for kind, read in READERS.items():
            for language in languages(kind):
                examples = read(options.data, language, part)[: QUICK if options.quick else None]
                if examples:
                    checked[kind, language, part] = [_check(kind, language, example) for example in examples]
    if not checked:
        raise DataError(
            f"{options.data} holds neither ambig/cocoa_mt, ambig/mt_geneval nor parallel: name the folder of data sets."
        )
    rows = [_row(kind, language, part, examples) for (kind, language, part), examples in checked.items()]
    details = {row.id: _confusion(examples) for row, examples in zip(rows, checked.values(), strict=True)}
    return Study(options).write(NAME, rows, seeds=(0,), aims=_aims(rows), details=details)


def _formality(data: Path, language: str, part: str) -> list[AmbiguousExample]:
    """CoCoA-MT; for other languages what a person read, or another language shows."""
    folder = data / "ambig" / "cocoa_mt"
    if list(folder.glob(f"formality-control.{part}*.en-{language}.en")):
        return read_cocoa_mt(folder, language, part)
    if part != "test":
        return []
    return [*read_by_hand(data / "parallel", language), *labelled_by_danish(data / "parallel", language)]


def _gender(data: Path, language: str, part: str) -> list[AmbiguousExample]:
    """MT-GenEval; as the part `pronouns`, and for languages that it lacks, NTREX labelled by English pronouns."""
    folder, part = data / "ambig" / "mt_geneval", "dev" if part == "train" else part
    exists = (folder / f"geneval-sentences-feminine-test.en_{language}.en").exists()
    if part == "pronouns" or (part == "test" and not exists):
        return list(labelled_by_pronouns(data / "parallel", language)) if exists == (part == "pronouns") else []
    if not exists:
        return []
    contexts = [example for example in mt_geneval_contexts(folder, language, part) if example.label]
    flipped = [
        replace(ex, id=f"{ex.id}:flipped", reference=ex.contrast or "", label=OTHER_GENDER[ex.label or ""])
        for ex in contexts
    ]
    return [*read_mt_geneval(folder, language, part), *contexts, *flipped]


READERS: Mapping[CheckerKind, Callable[[Path, str, str], list[AmbiguousExample]]]
READERS = {"formality": _formality, "gender": _gender}


def _check(kind: CheckerKind, language: str, example: AmbiguousExample) -> CheckedExample:
    """Formality reads the source too, as elsewhere in the project. Gender must not: the source may show it."""
    source = example.source if kind == "formality" else None
    label = checker(kind, language).check(example.reference, source).label or UNDECIDED
    right = UNMARKED if kind == "formality" and not example.marks else str(example.label)
    return CheckedExample(example.id.split(":")[0], right, label)


def _row(kind: CheckerKind, language: str, part: str, examples: Sequence[CheckedExample]) -> Row:
    marked = [example for example in examples if example.known != UNMARKED]
    decided = [example for example in marked if example.checked != UNDECIDED]
    right = sum(example.checked == example.known for example in decided)
    metrics = {
        "accuracy": share(right, len(decided)),
        "coverage": share(len(decided), len(marked)),
        "right_of_all": share(right, len(marked)),
        "sentences": len(marked),
    }
    name, note = ("", "") if part == "test" else (f"_{part}", f" ({part} part)")
    return Row(id=f"{kind}_{language}{name}", label=f"{kind}, {language}{note}", metrics=metrics)


def _confusion(examples: Sequence[CheckedExample]) -> dict[str, dict[str, dict[str, int]]]:
    """Confusion tables by set: the known label, then the checker's."""
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
            continue  # for comparison only: other people's pronouns blur these labels
        bound = AIMS["formality" if row.id.startswith("formality") else "gender"]
        scopes = {"accuracy": "of the sentences it decides", "right_of_all": "of all sentences with a marker"}
        for metric, scope in scopes.items():
            text = f"{row.label}: right on at least {bound:g}% {scope}"
            aims.append(aim(text, metric, bound, value_of(row.metrics[metric]), operator.ge))
    return aims
