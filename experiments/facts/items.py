"""Judged answers in a file, so that seeds that were measured at different times or on different machines are pooled.

The file is JSON. `ids` has the ids of each metric's questions, once. For each row, seed and metric, a string has a
character per id: 1 for yes, 0 for no, - where the row has no value. With them are the seeds' precisions, the rows'
further metrics, such as nats per token and the learning rate, and the scores of their searches.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.facts.metrics import RULES, Items
from experiments.facts.rows import SEARCH_SEED
from experiments.precision import Precision
from experiments.protocol import RateSearch
from graftlm.config import Config
from graftlm.errors import EvaluationError
from graftlm.files.writing import write_atomically

ITEMS_FILE = "items.json"
RATE = "learning_rate"
"""The metric that all seeds of a row must share."""

_CHARACTERS = {0.0: "0", 1.0: "1"}
_MISSING = "-"


@dataclass
class JudgedRows:
    """The judged answers of rows, by row and seed.

    Attributes:
        items: for each row and seed, the values of the items by metric.
        metrics: for each row and seed, further metrics of the row's run.
        precisions: the precision of training of each seed, and of the seed of the searches.
        searches: the search of each row that was searched.
    """

    items: dict[str, dict[int, Items]] = field(default_factory=dict)
    metrics: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    precisions: dict[int, Precision] = field(default_factory=dict)
    searches: dict[str, RateSearch] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """The seeds of all rows, in order."""
        return sorted({seed for by_seed in self.items.values() for seed in by_seed})

    def has(self, row: str, seed: int) -> bool:
        """Return whether a row was judged for a seed."""
        return seed in self.items.get(row, {})

    def add(self, row: str, seed: int, items: Items, metrics: Mapping[str, float], precision: Precision) -> None:
        """Add a row of a seed.

        Args:
            row: id of the row.
            seed: the seed.
            items: for each metric, 1 or 0 for each item, by the id of its question.
            metrics: further metrics.
            precision: precision of the training of this seed's rows.

        Raises:
            EvaluationError: other rows of the seed have another precision, or other seeds of the row another rate.
        """
        self.check_precision(seed, precision)
        for other, of_seed in self.metrics.get(row, {}).items():
            if of_seed.get(RATE) != metrics.get(RATE):
                raise EvaluationError(
                    f"{row} has the {RATE} {of_seed.get(RATE)} for seed {other}, but {metrics.get(RATE)} for seed "
                    f"{seed}: train all seeds at the rate of one search."
                )
        self.precisions[seed] = precision
        self.items.setdefault(row, {})[seed] = items
        self.metrics.setdefault(row, {})[seed] = dict(metrics)

    def add_search(self, row: str, search: RateSearch, precision: Precision) -> None:
        """Add the search of a row's rate.

        Args:
            row: id of the row.
            search: the search.
            precision: precision of the training of all searches.

        Raises:
            EvaluationError: other searches have another precision.
        """
        self.check_precision(SEARCH_SEED, precision)
        self.precisions[SEARCH_SEED] = precision
        self.searches[row] = search

    def check_precision(self, seed: int, precision: Precision) -> None:
        """Check that rows of a precision may be added to a seed.

        Raises:
            EvaluationError: other rows of the seed have another precision.
        """
        before = self.precisions.get(seed, precision)
        if before != precision:
            raise EvaluationError(
                f"Seed {seed} has rows that were trained in {before}, but others are to have {precision}: measure all "
                "rows of a seed on one kind of hardware."
            )

    def pool(self, others: JudgedRows, seeds: Collection[int]) -> None:
        """Add the rows of others for some seeds, and their searches.

        Args:
            others: rows that were measured elsewhere.
            seeds: the seeds to add.

        Raises:
            EvaluationError: rows don't fit together, as in `add`.
        """
        for row, by_seed in others.items.items():
            for seed in sorted(by_seed.keys() & set(seeds)):
                self.add(row, seed, by_seed[seed], others.metrics[row][seed], others.precisions[seed])
        for row, search in others.searches.items():
            self.add_search(row, search, others.precisions[SEARCH_SEED])


class _RowOfSeed(Config):
    """A row of a seed in the file: a string of 0, 1 and - for each metric, and further metrics."""

    values: dict[str, str]
    metrics: dict[str, float]


class _ItemsFile(Config):
    """The content of the file; see the module."""

    rules: int
    precisions: dict[int, Precision]
    searches: dict[str, dict[float, float]]
    ids: dict[str, list[str]]
    rows: dict[str, dict[int, _RowOfSeed]]

    def _problems(self) -> Iterator[str]:
        if self.rules != RULES:
            yield f"rules is {self.rules}, but this code judges by rules {RULES}: judge the answers again"
        for metric, ids in self.ids.items():
            if len(set(ids)) < len(ids):
                yield f"ids.{metric} has an id twice, but each question has one: measure the rows again"
        if self.searches and SEARCH_SEED not in self.precisions:
            yield f"precisions lacks seed {SEARCH_SEED}, which the searches have: search the rates again"
        for row, by_seed in self.rows.items():
            for seed, of_seed in by_seed.items():
                if seed not in self.precisions:
                    yield f"precisions lacks seed {seed}, which {row} has: measure the rows again"
                for metric, text in of_seed.values.items():
                    yield from self._problems_of(f"rows.{row}.{seed}.values.{metric}", metric, text)

    def _problems_of(self, key: str, metric: str, text: str) -> Iterator[str]:
        count = len(self.ids.get(metric, []))
        if len(text) != count:
            yield f"{key} has {len(text)} values, but there are {count} ids: measure the rows again"
        if not set(text) <= {*_CHARACTERS.values(), _MISSING}:
            yield f"{key} has other characters than 0, 1 and -: measure the rows again"


def write_items(rows: JudgedRows, folder: Path) -> Path:
    """Write rows to `items.json` in a folder, atomically, and return its path.

    Raises:
        EvaluationError: a value is neither 0 nor 1, or the folder can't be written to.
    """
    ids = _ids(rows)
    by_row = {}
    for name, by_seed in rows.items.items():
        by_row[name] = {}
        for seed, items in sorted(by_seed.items()):
            values = {metric: _as_text(ids[metric], of_metric) for metric, of_metric in items.items()}
            by_row[name][seed] = {"values": values, "metrics": rows.metrics[name][seed]}
    content = {
        "rules": RULES,
        "precisions": rows.precisions,
        "searches": {name: search.scores for name, search in rows.searches.items()},
        "ids": ids,
        "rows": by_row,
    }
    return write_atomically(folder / ITEMS_FILE, json.dumps(content, indent=1).encode() + b"\n")


def _ids(rows: JudgedRows) -> dict[str, list[str]]:
    """Return the ids of each metric's questions, in the order in which they occur first."""
    ids: dict[str, dict[str, None]] = {}
    for by_seed in rows.items.values():
        for items in by_seed.values():
            for metric, of_metric in items.items():
                ids.setdefault(metric, {}).update(dict.fromkeys(of_metric))
    return {metric: list(of_metric) for metric, of_metric in ids.items()}


def _as_text(ids: Collection[str], values: Mapping[str, float]) -> str:
    characters = []
    for name in ids:
        if name not in values:
            characters.append(_MISSING)
        elif values[name] in _CHARACTERS:
            characters.append(_CHARACTERS[values[name]])
        else:
            raise EvaluationError(
                f"The item {name} has the value {values[name]}, but 0 or 1 is expected: judge it by yes or no."
            )
    return "".join(characters)


def read_items(path: Path) -> JudgedRows:
    """Read rows from an `items.json`.

    Raises:
        EvaluationError: the file can't be read, or is not JSON.
        RecipeError: the JSON has other fields, other rules of judging, or values that don't match the ids.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvaluationError(f"{path} can't be read ({error.strerror}): name a readable {ITEMS_FILE}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise EvaluationError(f"{path} is not JSON, but an {ITEMS_FILE} is expected: restore or remove it.") from None
    file = _ItemsFile.parse(content, where=str(path))
    rows = JudgedRows()
    for name, scores in file.searches.items():
        rows.add_search(name, RateSearch(scores), file.precisions[SEARCH_SEED])
    for name, by_seed in file.rows.items():
        for seed, of_seed in by_seed.items():
            items = {metric: _as_items(file.ids[metric], text) for metric, text in of_seed.values.items()}
            rows.add(name, seed, items, of_seed.metrics, file.precisions[seed])
    return rows


def _as_items(ids: Collection[str], text: str) -> dict[str, float]:
    return {name: float(value) for name, value in zip(ids, text, strict=True) if value != _MISSING}
