"""How often the rule-based checkers are right on translations whose formality or gender is known.

Nothing is trained and nothing is random: one run gives the same figures every time, in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from experiments import Options
from experiments.ambiguity_checkers import known
from graftlm.errors import DataError
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.evaluation.report import write_report
from graftlm.pipelines.clarify.ambiguity_sets import mt_geneval_contexts, read_cocoa_mt, read_mt_geneval
from graftlm.pipelines.clarify.checkers import CheckerKind, checker, languages
from graftlm.pipelines.clarify.examples import Example

NAME = "ambiguity-checkers"
PARTS = ("test", "train", "pronouns")  # of MT-GenEval, which has no training part, train means dev
AIMS: dict[CheckerKind, float] = {"formality": 95.0, "gender": 90.0}
OTHER_GENDER = {"feminine": "masculine", "masculine": "feminine"}
UNDECIDED = "undecided"
UNMARKED = "unmarked"
QUICK = 100  # examples of a set in a quick run


class Judged(NamedTuple):
    """One example: where it is from, what is known, and what the checker says."""

    id: str
    part: str
    known: str
    said: str


def run(options: Options) -> Results:
    """Measure every checker for which `options.data` has labelled text; writes `results.json` and `report.md`.

    Raises:
        RecipeError: there is no such table.
        DataError: the data folder lacks CoCoA-MT and MT-GenEval.
    """
    judged: dict[tuple[CheckerKind, str, str], list[Judged]] = {}
    for part in options.chosen(PARTS, ("test", "pronouns")):
        for kind, read in READERS.items():
            for language in languages(kind):
                examples = read(options.data, language, part)
                examples = examples[:QUICK] if options.quick else examples
                if examples:
                    judged[kind, language, part] = [_judge(kind, language, example) for example in examples]
    if not judged:
        raise DataError(
            f"{options.data} holds neither ambig/cocoa_mt, ambig/mt_geneval nor parallel: name the folder of data sets."
        )
    rows = [_row(kind, language, part, found) for (kind, language, part), found in judged.items()]
    details = {_row_id(*key): _details(found) for key, found in judged.items()}
    results = Results.here(NAME, rows, aims=_aims(rows), details=details)
    write_report(results, options.out)
    return results


def _formality(data: Path, language: str, part: str) -> list[Example]:
    """CoCoA-MT; of languages that it lacks, what was read or is told by another language."""
    folder = data / "ambig" / "cocoa_mt"
    if list(folder.glob(f"formality-control.{part}*.en-{language}.en")):
        return read_cocoa_mt(folder, language, part)
    if part != "test":
        return []
    return [*known.read_by_hand(data / "parallel", language), *known.told_by_danish(data / "parallel", language)]


def _gender(data: Path, language: str, part: str) -> list[Example]:
    """MT-GenEval; of languages that it lacks, and as the part `pronouns`, what English pronouns tell."""
    folder, part = data / "ambig" / "mt_geneval", "dev" if part == "train" else part
    there = (folder / f"geneval-sentences-feminine-test.en_{language}.en").exists()
    if part == "pronouns" or (part == "test" and not there):
        return list(known.told_by_pronouns(data / "parallel", language)) if there == (part == "pronouns") else []
    return _mt_geneval(folder, language, part) if there else []


def _mt_geneval(folder: Path, language: str, part: str) -> list[Example]:
    """Both parts of it; the second with each of its two translations, where the context tells the gender."""
    contexts = [one for one in mt_geneval_contexts(folder, language, part) if one.label]
    flipped = [
        replace(one, id=f"{one.id}:flipped", reference=one.contrast or "", label=OTHER_GENDER[one.label or ""])
        for one in contexts
    ]
    return [*read_mt_geneval(folder, language, part), *contexts, *flipped]


READERS: Mapping[CheckerKind, Callable[[Path, str, str], list[Example]]] = {"formality": _formality, "gender": _gender}


def _judge(kind: CheckerKind, language: str, example: Example) -> Judged:
    """Formality reads the source too, as every use of it does; gender must not, since the source may tell it."""
    source = example.source if kind == "formality" else None
    said = checker(kind, language).check(example.reference, source).label or UNDECIDED
    right = UNMARKED if kind == "formality" and not example.marks else str(example.label)
    return Judged(example.id, example.id.split(":")[0], right, said)


def _row_id(kind: str, language: str, part: str) -> str:
    return f"{kind}_{language}" + ("" if part == "test" else f"_{part}")


def _row(kind: CheckerKind, language: str, part: str, judged: Sequence[Judged]) -> Row:
    marked = [one for one in judged if one.known != UNMARKED]
    decided = [one for one in marked if one.said != UNDECIDED]
    right = sum(one.said == one.known for one in decided)
    metrics = {
        "accuracy": _share(right, len(decided)),
        "coverage": _share(len(decided), len(marked)),
        "right_of_all": _share(right, len(marked)),
        "sentences": len(marked),
    }
    label = f"{kind}, {language}" + ("" if part == "test" else f" ({part} part)")
    return Row(id=_row_id(kind, language, part), label=label, metrics=metrics)


def _details(judged: Iterable[Judged]) -> dict[str, dict[str, dict[str, int]]]:
    """Confusion tables by part: what is known, then what was said."""
    tables: dict[str, dict[str, Counter[str]]] = {}
    for one in judged:
        tables.setdefault(one.part, {}).setdefault(one.known, Counter())[one.said] += 1
    return {
        part: {known: dict(sorted(said.items())) for known, said in table.items()} for part, table in tables.items()
    }


def _share(count: int, total: int) -> Interval:
    """A share in percent with Wilson's 95% interval."""
    if total == 0:
        return Interval(mean=0, low=0, high=100)
    z, share = 1.959964, count / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(mean=100 * share, low=100 * min(low, share), high=100 * max(high, share))


def _aims(rows: Sequence[Row]) -> list[Aim]:
    aims: list[Aim] = []
    for row in rows:
        kind = row.id.partition("_")[0]
        if row.id.endswith("_pronouns"):
            continue  # labels that others' pronouns blur: rows to compare with
        aim = AIMS["formality" if kind == "formality" else "gender"]
        for metric, text in (
            ("accuracy", "of the sentences it decides"),
            ("right_of_all", "of all sentences with a marker"),
        ):
            share = row.metrics[metric]
            assert isinstance(share, Interval), "shares have intervals"
            said = f"{row.label}: right on at least {aim:g}% {text}"
            aims.append(Aim(text=said, metric=metric, aim=aim, measured=share.mean, met=share.mean >= aim))
    return aims
