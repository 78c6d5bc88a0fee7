"""Accuracy of the rule-based checkers on translations whose formality or gender is known.

Nothing is trained or random: every run gives the same figures, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from experiments import Options
from experiments.ambiguity_checkers import known
from experiments.clarify.metrics import share
from graftlm.errors import DataError
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.report import write_report
from graftlm.pipelines.clarify.checkers import CheckerKind, checker, languages
from graftlm.pipelines.clarify.datasets import AmbiguousExample, mt_geneval_contexts, read_cocoa_mt, read_mt_geneval

NAME = "ambiguity-checkers"
PARTS = ("test", "train", "pronouns")  # for MT-GenEval, which has no training part, train means dev
AIMS: dict[CheckerKind, float] = {"formality": 95.0, "gender": 90.0}
OTHER_GENDER = {"feminine": "masculine", "masculine": "feminine"}
UNDECIDED = "undecided"
UNMARKED = "unmarked"
QUICK = 100  # examples of a set in a quick run


class CheckedExample(NamedTuple):
    """One example: its set, its known label and the checker's label."""

    id: str
    part: str
    known: str
    checked: str


def run(options: Options) -> Results:
    """Measure every checker with labelled text in `options.data`; writes `results.json` and `report.md`.

    Raises:
        RecipeError: a table is unknown.
        DataError: the data folder lacks CoCoA-MT and MT-GenEval.
    """
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
    results = Results.here(NAME, rows, aims=_aims(rows), details=details)
    write_report(results, options.out)
    return results


def _formality(data: Path, language: str, part: str) -> list[AmbiguousExample]:
    """CoCoA-MT; for other languages what a person read, or another language shows."""
    folder = data / "ambig" / "cocoa_mt"
    if list(folder.glob(f"formality-control.{part}*.en-{language}.en")):
        return read_cocoa_mt(folder, language, part)
    if part != "test":
        return []
    return [*known.read_by_hand(data / "parallel", language), *known.labelled_by_danish(data / "parallel", language)]


def _gender(data: Path, language: str, part: str) -> list[AmbiguousExample]:
    """MT-GenEval; as the part `pronouns`, and for languages that it lacks, NTREX labelled by English pronouns."""
    folder, part = data / "ambig" / "mt_geneval", "dev" if part == "train" else part
    exists = (folder / f"geneval-sentences-feminine-test.en_{language}.en").exists()
    if part == "pronouns" or (part == "test" and not exists):
        return list(known.labelled_by_pronouns(data / "parallel", language)) if exists == (part == "pronouns") else []
    if not exists:
        return []
    contexts = [example for example in mt_geneval_contexts(folder, language, part) if example.label]
    flipped = [
        replace(ex, id=f"{ex.id}:flipped", reference=ex.contrast or "", label=OTHER_GENDER[ex.label or ""])
        for ex in contexts
    ]
    return [*read_mt_geneval(folder, language, part), *contexts, *flipped]


READERS: Mapping[CheckerKind, Callable[[Path, str, str], list[AmbiguousExample]]] = {
    "formality": _formality,
    "gender": _gender,
}


def _check(kind: CheckerKind, language: str, example: AmbiguousExample) -> CheckedExample:
    """Formality reads the source too, as elsewhere in the project. Gender must not: the source may show it."""
    source = example.source if kind == "formality" else None
    label = checker(kind, language).check(example.reference, source).label or UNDECIDED
    right = UNMARKED if kind == "formality" and not example.marks else str(example.label)
    return CheckedExample(example.id, example.id.split(":")[0], right, label)


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
    name, label = f"{kind}_{language}", f"{kind}, {language}"
    if part != "test":
        name, label = f"{name}_{part}", f"{label} ({part} part)"
    return Row(id=name, label=label, metrics=metrics)


def _confusion(examples: Iterable[CheckedExample]) -> dict[str, dict[str, dict[str, int]]]:
    """Confusion tables by set: the known label, then the checker's."""
    tables: dict[str, dict[str, Counter[str]]] = {}
    for example in examples:
        tables.setdefault(example.part, {}).setdefault(example.known, Counter())[example.checked] += 1
    return {
        part: {label: dict(sorted(counts.items())) for label, counts in table.items()} for part, table in tables.items()
    }


def _aims(rows: Sequence[Row]) -> list[Aim]:
    aims: list[Aim] = []
    for row in rows:
        if row.id.endswith("_pronouns"):
            continue  # for comparison only: other people's pronouns blur these labels
        aim = AIMS["formality" if row.id.startswith("formality") else "gender"]
        scopes = {"accuracy": "of the sentences it decides", "right_of_all": "of all sentences with a marker"}
        for metric, scope in scopes.items():
            value, text = value_of(row.metrics[metric]), f"{row.label}: right on at least {aim:g}% {scope}"
            aims.append(Aim(text=text, metric=metric, aim=aim, measured=value, met=value >= aim))
    return aims
