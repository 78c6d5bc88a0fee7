"""What raters said: means with intervals, and how far they agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.errors import DataError
from graftlm.evaluation import PaperRow, Results, Row
from graftlm.evaluation.results import Metric
from graftlm.pipelines.summarize.metrics import bootstrap
from graftlm.pipelines.summarize.rating.agreement import ordinal_alpha
from graftlm.pipelines.summarize.rating.page import CRITERIA, KEY_FORM, RATINGS_FORM

_WHERE = "Table 2.7: news articles, other systems of these kinds"
PAPER = [
    PaperRow(id=name, metrics=dict(zip(CRITERIA, figures, strict=True)), where=_WHERE)
    for name, figures in {
        "human": (3.73, 3.98, 3.19, 3.59),
        "tlm_ie_gm": (3.78, 3.75, 3.09, 3.59),
        "tlm_i": (3.77, 3.90, 3.11, 3.50),
        "sent_ptr": (3.67, 3.66, 3.24, 3.78),
        "sent_clf": (3.62, 3.79, 3.47, 3.89),
    }.items()
]


@dataclass(frozen=True)
class Ratings:
    """Ratings of one page.

    Attributes:
        key: of the page.
        by_rater: rater -> summary's id -> criterion -> rating; what was not rated is not there.
    """

    key: dict[str, Any]
    by_rater: dict[str, dict[str, dict[str, int]]]

    @classmethod
    def read(cls, key: Path, ratings: Sequence[Path]) -> Ratings:
        """Read the key of a page, and the files that its raters downloaded.

        Raises:
            DataError: a file is none of these, of another page, or of a rater who has another file.
        """
        known = _read(key, KEY_FORM, "the key of a page that graft rate wrote")
        found: dict[str, dict[str, dict[str, int]]] = {}
        files: dict[str, Path] = {}
        for path in ratings:
            one = _read(path, RATINGS_FORM, "the ratings that such a page saves")
            if one.get("page") != known.get("page"):
                raise DataError(f"{path} has ratings of another page than {key}: name the key of its own page.")
            rater = str(one.get("rater"))
            if rater in found:
                raise DataError(f"{files[rater]} and {path} are both of {rater}: give one file for each rater.")
            files[rater] = path
            found[rater] = _checked(path, one.get("ratings"), known)
        return cls(known, found)

    def of(self, criterion: str) -> dict[str, list[int]]:
        """For each summary the ratings that it got."""
        return {
            summary: [
                given[summary][criterion] for given in self.by_rater.values() if criterion in given.get(summary, {})
            ]
            for summary in self.key["summaries"]
        }

    def results(self) -> Results:
        """A row for each system, with intervals over documents drawn again, and one with the raters' agreement.

        A summary counts by the mean of its ratings. Agreement is Krippendorff's alpha for ordered values.
        """
        rows = [Row(id=system, label=system, metrics=self._means(system)) for system in self._systems()]
        alphas = {name: ordinal_alpha(self.of(name).values()) for name in CRITERIA}
        told: dict[str, Metric] = {name: alpha for name, alpha in alphas.items() if alpha is not None}
        if told:
            rows.append(Row(id="agreement", label="agreement (Krippendorff's α, ordinal)", metrics=told))
        named = {row.id for row in rows}
        paper = [row for row in PAPER if row.id in named]
        return Results.here("ratings", rows, seeds=[int(self.key["seed"])], paper=paper, details=self._details())

    def _systems(self) -> list[str]:
        return sorted({system for one in self.key["summaries"].values() for system in one["systems"]})

    def _means(self, system: str) -> dict[str, Metric]:
        own = [summary for summary, one in self.key["summaries"].items() if system in one["systems"]]
        metrics: dict[str, Metric] = {}
        for name in CRITERIA:
            given = self.of(name)
            means = [sum(given[summary]) / len(given[summary]) for summary in own if given[summary]]
            if means:
                metrics[name] = bootstrap(means)
        return metrics

    def _details(self) -> dict[str, Any]:
        summaries = self.key["summaries"]
        made = sum(len(row) for given in self.by_rater.values() for row in given.values())
        return {
            "raters": sorted(self.by_rater),
            "documents": len({one["document"] for one in summaries.values()}),
            "summaries": len(summaries),
            "ratings": made,
            "missing": len(summaries) * len(CRITERIA) * len(self.by_rater) - made,
            "scale": self.key["scale"],
        }


def _read(path: Path, form: str, expected: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): check the file.") from None
    except ValueError:
        values = None
    of_form = isinstance(values, dict) and values.get("form") == form
    if not isinstance(values, dict) or not of_form or (form == KEY_FORM and "summaries" not in values):
        raise DataError(f"{path} is no such file: {expected} is expected.")
    return values


def _checked(path: Path, ratings: Any, key: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    if not isinstance(ratings, dict) or not all(isinstance(row, dict) for row in ratings.values()):
        raise DataError(f"{path} has no ratings of summaries: save them from the page again.")
    for summary, row in ratings.items():
        if summary not in key["summaries"]:
            raise DataError(f"{path} rates {summary}, which is no summary of its page: save it from the page again.")
        for name, value in row.items():
            if name not in CRITERIA or type(value) is not int or not 1 <= value <= key["scale"]:
                raise DataError(
                    f"{path} gives {summary} a {name} of {value!r}, but {', '.join(CRITERIA)} go from 1 to "
                    f"{key['scale']}: save it from the page again."
                )
    return ratings
