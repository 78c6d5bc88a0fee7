"""Results of ratings: mean ratings with intervals, and the agreement of the raters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.rate_summaries.page import CRITERIA, KEY_FORMAT, RATINGS_FORMAT
from graftlm.errors import DataError
from graftlm.evaluation import PaperRow, Results, Row, bootstrap
from graftlm.evaluation.results import Metric
from graftlm.files.reading import read_errors

PAPER = {  # ratings by criterion
    "human": (3.73, 3.98, 3.19, 3.59),
    "tlm_ie_gm": (3.78, 3.75, 3.09, 3.59),
    "tlm_i": (3.77, 3.90, 3.11, 3.50),
    "sent_ptr": (3.67, 3.66, 3.24, 3.78),
    "sent_clf": (3.62, 3.79, 3.47, 3.89),
}
_PAPER_SOURCE = "Table 2.7: news articles, other systems of these kinds"


@dataclass(frozen=True)
class Ratings:
    """Ratings of one page.

    Attributes:
        key: key of the page.
        by_rater: rater -> summary id -> criterion -> rating, without missing ratings.
    """

    key: dict[str, Any]
    by_rater: dict[str, dict[str, dict[str, int]]]

    @classmethod
    def load(cls, key: Path, files: Sequence[Path]) -> Ratings:
        """Load the key of a page and the files that its raters downloaded.

        Raises:
            DataError: a file has another form, belongs to another page, or is the second file of a rater.
        """
        page_key = _read_json(key, KEY_FORMAT, "the key of a page that examples.rate_summaries wrote")
        by_rater, file_of = {}, {}
        for path in files:
            values = _read_json(path, RATINGS_FORMAT, "the ratings that such a page saves")
            if values.get("page") != page_key.get("page"):
                raise DataError(f"{path} has ratings of another page than {key}: name the key of its own page.")
            rater = str(values.get("rater"))
            if rater in by_rater:
                raise DataError(f"{file_of[rater]} and {path} are both of {rater}: give one file for each rater.")
            file_of[rater] = path
            by_rater[rater] = _check_ratings(path, values.get("ratings"), page_key)
        return cls(page_key, by_rater)

    def by_summary(self, criterion: str) -> dict[str, list[int]]:
        """Return the ratings of each summary."""
        return {
            summary: [rows[summary][criterion] for rows in self.by_rater.values() if criterion in rows.get(summary, {})]
            for summary in self.key["summaries"]
        }

    def results(self) -> Results:
        """Return a row of mean ratings for each system, and one with the agreement of the raters.

        A summary counts with the mean of its ratings. Intervals are bootstrap intervals over documents. Agreement is
        Krippendorff's alpha for ordinal values.
        """
        systems = sorted({system for row in self.key["summaries"].values() for system in row["systems"]})
        rows = [Row(id=system, label=system, metrics=self._mean_ratings(system)) for system in systems]
        alphas = {name: ordinal_alpha(self.by_summary(name).values()) for name in CRITERIA}
        agreement: dict[str, Metric] = {name: alpha for name, alpha in alphas.items() if alpha is not None}
        if agreement:
            rows.append(Row(id="agreement", label="agreement (Krippendorff's α, ordinal)", metrics=agreement))
        paper = [
            PaperRow(id=name, metrics=dict(zip(CRITERIA, values, strict=True)), where=_PAPER_SOURCE)
            for name, values in PAPER.items()
            if name in systems
        ]
        return Results.here("ratings", rows, seeds=[int(self.key["seed"])], paper=paper, details=self._details())

    def _mean_ratings(self, system: str) -> dict[str, Metric]:
        summaries = [summary for summary, row in self.key["summaries"].items() if system in row["systems"]]
        metrics: dict[str, Metric] = {}
        for name in CRITERIA:
            ratings = self.by_summary(name)
            means = [sum(ratings[summary]) / len(ratings[summary]) for summary in summaries if ratings[summary]]
            if means:
                metrics[name] = bootstrap(means)
        return metrics

    def _details(self) -> dict[str, Any]:
        summaries = self.key["summaries"]
        count = sum(len(row) for rows in self.by_rater.values() for row in rows.values())
        return {
            "raters": sorted(self.by_rater),
            "documents": len({row["document"] for row in summaries.values()}),
            "summaries": len(summaries),
            "ratings": count,
            "missing": len(summaries) * len(CRITERIA) * len(self.by_rater) - count,
            "scale": self.key["scale"],
        }


def ordinal_alpha(units: Iterable[Sequence[float]]) -> float | None:
    """Return Krippendorff's alpha for ordinal ratings: 1 is full agreement, 0 is chance, below 0 is less than chance.

    It is None if no unit has two ratings or all ratings are equal. Units with fewer than two ratings are ignored.

    *Computing Krippendorff's Alpha-Reliability* (Krippendorff, 2011), for L distinct values in order:

        α = 1 − (n − 1) · Σ_ck o_ck δ²_ck / Σ_ck n_c n_k δ²_ck
        o_ck = Σ_u (pairs of values c and k in unit u) / (m_u − 1),   n_c = Σ_k o_ck,   n = Σ_c n_c
        δ_ck = Σ_{g=c..k} n_g − (n_c + n_k) / 2, the distance of their middle ranks

    The maintained packages with this measure are under the GPL, so it is written here.
    """
    paired = [unit for unit in units if len(unit) > 1]
    values = sorted({value for unit in paired for value in unit})
    o_LL = np.zeros((len(values), len(values)))
    for unit in paired:
        count_L = np.array([list(unit).count(value) for value in values], dtype=float)
        o_LL += (np.outer(count_L, count_L) - np.diag(count_L)) / (len(unit) - 1)
    n_L = o_LL.sum(axis=1)
    rank_L = n_L.cumsum() - n_L / 2
    distance_LL = np.square(rank_L[:, None] - rank_L)
    expected = float((np.outer(n_L, n_L) * distance_LL).sum())
    return 1 - float((n_L.sum() - 1) * (o_LL * distance_LL).sum() / expected) if expected else None


def _read_json(path: Path, file_format: str, expected: str) -> dict[str, Any]:
    try:
        with read_errors(path):
            values: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if (
        not isinstance(values, dict)
        or values.get("format") != file_format
        or (file_format == KEY_FORMAT and "summaries" not in values)
    ):
        raise DataError(f"{path} is no such file: {expected} is expected.")
    return values


def _check_ratings(path: Path, ratings: Any, key: Mapping[str, Any]) -> dict[str, dict[str, int]]:
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
