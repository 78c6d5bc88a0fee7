"""Block-state transformers beside their baselines: one size, the same tokens, bits per byte by corpus and length.

Table 1 has every row, about half an hour of a core, with the first seed. `longer` has some of them for every seed after
five times the tokens, with one layer of context states in the middle: half an hour for each seed. `placement`, `number`
and `state` are the ablations of Tables 5.2 to 5.4 at the size of Table 1, with the first seed and single-head S4D.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from pydantic import Field

from experiments import Options
from experiments.block_state import paper
from experiments.block_state.cell import Cell, measure
from experiments.block_state.corpora import CORPORA, Corpus, make_corpora, make_tokenizer
from experiments.jobs import run_jobs
from experiments.sequence_rows import BLOCK_STATE, LABELS, model_of
from graftlm.config import Config
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.plots import by_length
from graftlm.evaluation.report import write_report

NAME = "block-state"
BY_DEFAULT = ("1",)
FASTER = 1.5
LONGER = ("slide", "block_recurrent", "bst_sh_s4d", "bst_mf_unstructured")
ONCE = ("bst_mf_unstructured",)  # of these, with the first seed alone


class Setting(Config):
    """Sizes of everything.

    Args:
        shape: what the configs of all rows share.
        parameters: of every row's model, but for rounding.
        length: tokens of a row of training.
        lengths: that are measured.
        longer: how many times the steps `longer` takes.
    """

    corpus: Corpus = Field(default_factory=Corpus)
    shape: dict[str, Any]
    parameters: int
    length: int = 1024
    lengths: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    rate: float = 3e-3
    steps: int
    batch_size: int
    longer: int = 5


FULL = Setting(
    corpus=Corpus(pieces=512),
    shape={
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "window": 128,
        "mixer_layers": [0, 1],
        "filters": 32,
        "initializer_range": 0.1,  # one over the root of the width: small models begin too evenly with 0.02
    },
    parameters=460_000,
    steps=260,
    batch_size=4,
)
QUICK = Setting(
    corpus=Corpus(pieces=300, characters=20_000, tested=2_000),
    shape={
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "window": 16,
        "mixer_layers": [0],
        "filters": 4,
    },
    parameters=18_000,
    length=64,
    lengths=(32, 64, 128),
    steps=2,
    batch_size=2,
    longer=2,
)


class Plan:
    """Which cells there are."""

    def __init__(self, options: Options, setting: Setting | None = None) -> None:
        self.options = options
        self.setting = setting or (QUICK if options.quick else FULL)
        self.seeds = options.seeds[:1] if options.quick else options.seeds
        self.corpora = make_corpora(options, options.out / "corpora", self.setting.corpus)
        self.vocabulary = len(make_tokenizer(self.corpora, self.setting.corpus.pieces))

    def cell(self, row: str, seed: int, name: str = "", **changes: Any) -> Cell:
        """One row for one seed; `changes` are to the shape."""
        return self._cell(row, seed, name or row, self.setting.steps, changes)

    def longer(self, row: str, seed: int) -> Cell:
        """One row for one seed after more steps, its mixer in the middle layer alone."""
        middle = {"mixer_layers": [self.setting.shape["num_hidden_layers"] // 2]}
        return self._cell(row, seed, f"longer-{row}", self.setting.longer * self.setting.steps, middle)

    def _cell(self, row: str, seed: int, name: str, steps: int, changes: Mapping[str, Any]) -> Cell:
        s = self.setting
        shape = s.shape | {"kernel_length": s.length, "vocab_size": self.vocabulary} | dict(changes)
        return Cell(
            id=f"{name}_s{seed}",
            model=model_of(row, shape, s.parameters),
            corpora=str(self.corpora),
            pieces=s.corpus.pieces,
            length=s.length,
            lengths=s.lengths,
            rate=s.rate,
            steps=steps,
            batch_size=s.batch_size,
            seed=seed,
        )


class Line(NamedTuple):
    """A row of a table: the mean over its cells."""

    id: str
    label: str
    cells: list[Cell]


def run(options: Options) -> Results:
    """Run the asked tables, by default the first, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table.
        DataError: the data folder lacks a file.
    """
    tables = options.chosen(tuple(TABLES), BY_DEFAULT)
    plan = Plan(options)
    lines = [line for table in tables for line in TABLES[table](plan)]
    started = time.perf_counter()
    measured = _measured([cell for line in lines for cell in line.cells], options)
    rows = [_row(line, measured) for line in lines]
    ids = {line.id for line in lines}
    drawn = ids & LABELS.keys() or ids  # ablations stand in the report; the figures are of the main table where it is
    details = {
        "wall_s": round(time.perf_counter() - started, 1),
        "setting": plan.setting.model_dump(mode="json"),
        "tokens": {line.id: line.cells[0].tokens for line in lines},
        "losses": {line.id: measured[line.cells[0].id]["losses"] for line in lines if line.id in drawn},
    }
    published = paper.rows({row.id for row in rows})
    results = Results.here(NAME, rows, seeds=plan.seeds, aims=aims(rows), paper=published, details=details)
    write_report(results, options.out, plots=_plots(plan, [row for row in rows if row.id in drawn]))
    return results


def _measured(cells: Sequence[Cell], options: Options) -> dict[str, dict[str, Any]]:
    """What cells measured, by id; of several with the same settings, as tables share some, the first alone is run."""
    first: dict[str, Cell] = {}
    same = {cell.id: first.setdefault(cell.key(), cell).id for cell in cells}
    found = run_jobs(list(first.values()), measure, options.out / "cells", processes=options.jobs, title=NAME)
    return {cell: found[own] for cell, own in same.items()}


def main_table(plan: Plan) -> list[Line]:
    """Every row, with the first seed."""
    return [Line(row, label, [plan.cell(row, plan.seeds[0])]) for row, label in LABELS.items()]


def longer(plan: Plan) -> list[Line]:
    """Some rows after more tokens, most of them for every seed."""
    label = f"{{}}, {plan.setting.longer} times the tokens, one layer"
    cells = {row: [plan.longer(row, seed) for seed in plan.seeds[: 1 if row in ONCE else None]] for row in LONGER}
    return [Line(f"longer-{row}", label.format(LABELS[row]), cells[row]) for row in LONGER]


def placement(plan: Plan) -> list[Line]:
    """One block-state layer at each index (Table 5.2)."""
    return [_ablation(plan, f"placement-{i}", f"one BST layer, index {i}", mixer_layers=[i]) for i in _layers(plan)]


def number(plan: Plan) -> list[Line]:
    """So many block-state layers (Table 5.3), from the middle on outwards."""
    middle = len(_layers(plan)) // 2
    order = sorted(_layers(plan), key=lambda i: (abs(i - middle), i))
    return [
        _ablation(plan, f"number-{n}", f"BST layers: {n}", mixer_layers=sorted(order[:n]))
        for n in range(1, len(order) + 1)
    ]


def state(plan: Plan) -> list[Line]:
    """States of so many numbers a channel (Table 5.4)."""
    return [_ablation(plan, f"state-{n}", f"state size {n}", state_size=n) for n in (8, 16, 32, 64)]


def _layers(plan: Plan) -> range:
    return range(plan.setting.shape["num_hidden_layers"])


def _ablation(plan: Plan, name: str, label: str, **changes: Any) -> Line:
    return Line(name, label, [plan.cell("bst_sh_s4d", plan.seeds[0], name, **changes)])


TABLES: dict[str, Callable[[Plan], list[Line]]] = {
    "1": main_table,
    "longer": longer,
    "placement": placement,
    "number": number,
    "state": state,
}


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The best block-state row is below the sliding window on every corpus, as good as block-recurrent, and faster."""
    by_id = {row.id: row for row in rows}
    tables = {"": tuple(LABELS), "longer-": LONGER}
    return [
        aim
        for prefix, of_table in tables.items()
        if {prefix + row for row in of_table} <= by_id.keys()
        for aim in _aims_of({row: by_id[prefix + row] for row in of_table})
    ]


def _aims_of(rows: Mapping[str, Row]) -> list[Aim]:
    """Those of one table, its rows by what their models are."""
    found = []
    for corpus in CORPORA:
        metric = f"bpb_{corpus}"
        values = {name: value_of(row.metrics[metric]) for name, row in rows.items()}
        best = min((name for name in rows if name in BLOCK_STATE), key=values.__getitem__)
        for other, words in (
            ("slide", "below the sliding window"),
            ("block_recurrent", "no worse than block-recurrent"),
        ):
            met = values[best] < values[other] if other == "slide" else values[best] <= values[other]
            text = f"{corpus}: the best BST ({rows[best].label}) is {words}"
            found.append(Aim(text=text, metric=metric, aim=values[other], measured=values[best], met=met))
    speed = value_of(rows["bst_sh_s4d"].metrics["train_tokens_per_s"])
    ratio = speed / value_of(rows["block_recurrent"].metrics["train_tokens_per_s"])
    text = f"{rows['bst_sh_s4d'].label} trains at least {FASTER:g} times as fast as block-recurrent"
    return [*found, Aim(text=text, metric="train_tokens_per_s", aim=FASTER, measured=ratio, met=ratio >= FASTER)]


def _row(line: Line, measured: Mapping[str, Mapping[str, Any]]) -> Row:
    of_seeds = [{name: _metric(one) for name, one in measured[cell.id]["metrics"].items()} for cell in line.cells]
    metrics: dict[str, Metric] = {name: combine_seeds([one[name] for one in of_seeds]) for name in of_seeds[0]}
    return Row(id=line.id, label=line.label, metrics=metrics | {"parameters": of_seeds[0]["parameters"]})


def _metric(value: Any) -> Metric:
    return Interval.parse(value) if isinstance(value, dict) else value


def _plots(plan: Plan, rows: Sequence[Row]) -> dict[str, Figure]:
    """Bits per byte by length, a figure for each corpus."""
    return {
        f"length-{corpus}": by_length(
            {row.label: _points(row, corpus, plan.setting.lengths) for row in rows},
            trained=plan.setting.length,
            title=corpus,
        )
        for corpus in CORPORA
    }


def _points(row: Row, corpus: str, lengths: Sequence[int]) -> list[tuple[int, Metric]]:
    """What a row measured at each length."""
    named = {length: f"bpb_{corpus}_at_{length}" for length in lengths}
    return [(length, row.metrics[name]) for length, name in named.items() if name in row.metrics]
