"""Every kind of graft on a tiny random model of every family: working uses, and refusals with their messages.

Rows are families; `details.cells` has {family: {kind: {use: [verdict, message]}}}. The tiny models and the example of
each kind are those of the tests, so that the experiment runs in a clone with its development dependencies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.study import Study, aim, metric
from graftlm.errors import UnknownFamilyError
from graftlm.evaluation import Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import kinds
from graftlm.runs.run import Run, RunContext

TESTS = Path(__file__).parents[2] / "tests"
VERDICTS = ("right", "refused", "wrong", "not applicable")
QUICK = ("llama", "lfm2", "bert")


class CompatibilityRun(Run):
    """All kinds of grafts on one family.

    Args:
        family: name of the family.
    """

    family: str

    def measure(self, context: RunContext) -> Measurement:
        from experiments.compatibility.cells import CELLS, Cell, compatibility

        examples = _test_module("laws.examples")
        cells: dict[str, dict[str, Cell]] = {}
        for kind in kinds():
            example = next(example for example in examples.examples() if example.kind == kind)
            try:
                cells[kind] = compatibility(
                    examples.backbone(self.family),
                    example.values(),
                    spread=example.spread,
                    learning_rate=example.learning_rate,
                )
            except UnknownFamilyError as error:
                cells[kind] = dict.fromkeys(CELLS, Cell("refused", str(error)))
        verdicts = [cell.verdict for row in cells.values() for cell in row.values()]
        counts: dict[str, Any] = {}
        for verdict in VERDICTS:
            name = verdict.replace(" ", "_")
            counts[f"cells_{name}"] = verdicts.count(verdict)
        return Measurement(Row(id=self.id, label=self.label, metrics=counts), {"cells": cells})


def run(options: Options) -> Results:
    """Measure all cells; `python -m docs.generate` makes the tables of the page on families from the results."""
    study = Study(options)
    tiny = _test_module("tiny")
    families = QUICK if options.quick else (*tiny.FAMILIES, *tiny.MORE_FAMILY_CONFIGS)
    runs = [CompatibilityRun(id=family, label=family, family=family) for family in families]
    measured = study.execute(runs, "families")
    wrong = sum(metric(measured[family], "cells_wrong") for family in families)
    rows = [measured[family].row for family in families]
    rows.append(_mutations())
    # The same types as in results.json, for runs that were not read back.
    cells: Any = json.loads(json.dumps({family: measured[family].details["cells"] for family in families}))
    return study.write(
        "compatibility",
        rows,
        aims=[aim("No cell is wrong.", "cells_wrong", 1, wrong)],
        details={"cells": cells},
        seeds=[0],
    )


def _mutations() -> Row:
    """Return the row of the mutations of the source code that the tests catch and miss."""
    text = (TESTS / "mutations" / "results.json").read_text(encoding="utf-8")
    caught = [mutation["caught"] for mutation in json.loads(text).values()]
    return Row(
        id="mutations",
        label="mutations that the tests see",
        metrics={"caught": caught.count(True), "missed": caught.count(False)},
    )


def _test_module(name: str) -> Any:
    """Return a module of the tests' folder."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return __import__(name, fromlist=["*"])
