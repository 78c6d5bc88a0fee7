"""Every kind of graft on a tiny random model of every family: what is right, what is refused, and with which sentence.

Rows are families; `details.cells` has {family: {kind: {use: [verdict, sentence]}}}. Tiny models and one example of each
kind are those of the tests, so this runs in a clone with its development dependencies alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.study import Study, aim
from graftlm.errors import UnknownFamilyError
from graftlm.evaluation import Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import kinds
from graftlm.runs.run import Run, RunContext

TESTS = Path(__file__).parents[2] / "tests"
VERDICTS = ("right", "refused", "wrong", "not applicable")
QUICK = ("llama", "lfm2", "bert")


class CompatibilityRun(Run):
    """All kinds on one family."""

    family: str

    def measure(self, context: RunContext) -> Measurement:
        from experiments.compatibility.cells import CELLS, Cell, compatibility

        examples = _test_module("laws.examples")
        cells: dict[str, dict[str, Cell]] = {}
        for kind in kinds():
            example = next(example for example in examples.examples() if example.kind == kind)
            sizes = {"spread": example.spread, "learning_rate": example.learning_rate}
            try:
                cells[kind] = compatibility(examples.backbone(self.family), example.values(), **sizes)
            except UnknownFamilyError as error:
                cells[kind] = dict.fromkeys(CELLS, Cell("refused", str(error)))
        verdicts = [cell.verdict for row in cells.values() for cell in row.values()]
        counts = {f"cells_{verdict.replace(' ', '_')}": verdicts.count(verdict) for verdict in VERDICTS}
        return Measurement(Row(id=self.id, label=self.label, metrics=dict(counts)), {"cells": cells})


def run(options: Options) -> Results:
    """Measure all cells; `python -m docs.generate` makes the tables of the page on families from the results."""
    study, tiny = Study(options), _test_module("tiny")
    families = QUICK if options.quick else (*tiny.FAMILIES, *tiny.MORE_FAMILY_CONFIGS)
    runs = [CompatibilityRun(id=family, label=family, family=family) for family in families]
    measured = study.execute(runs, "families")
    rows = [measured[family].row for family in families]
    wrong = sum(int(row.metrics["cells_wrong"]) for row in rows)  # type: ignore[call-overload]  # a number
    mutations = list(json.loads((TESTS / "mutations" / "results.json").read_text(encoding="utf-8")).values())
    caught = sum(mutation["caught"] for mutation in mutations)
    counts = {"caught": caught, "missed": len(mutations) - caught}
    rows.append(Row(id="mutations", label="mutations that the tests see", metrics=dict(counts)))
    cells: Any = json.loads(json.dumps({family: measured[family].details["cells"] for family in families}))
    aims = [aim("No cell is wrong.", "cells_wrong", 1, wrong)]
    return study.write("compatibility", rows, aims=aims, details={"cells": cells}, seeds=[0])


def _test_module(name: str) -> Any:
    """A module of the tests' folder."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return __import__(name, fromlist=["*"])
