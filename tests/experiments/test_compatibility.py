"""The table of families: the page is that of the committed results, which have every cell and none that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.compatibility.cells import CELLS
from experiments.compatibility.run import QUICK
from graftlm.evaluation import Results
from graftlm.grafts import kinds
from mutations.table import MUTATIONS
from tiny import FAMILIES, MORE_FAMILY_CONFIGS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "compatibility"


def test_every_family_and_kind_has_its_cells_and_none_is_wrong() -> None:
    results = Results.read(FOLDER)
    cells = json.loads(json.dumps(results.details["cells"]))
    assert cells.keys() == {*FAMILIES, *MORE_FAMILY_CONFIGS}
    for family, row in cells.items():
        assert {kind: list(uses) for kind, uses in row.items()} == {kind: list(CELLS) for kind in kinds()}, family
        assert [use for uses in row.values() for use, (verdict, _) in uses.items() if verdict == "wrong"] == []
    by_id = {row.id: row.metrics for row in results.rows}
    assert by_id["mutations"] == {"caught": len(MUTATIONS), "missed": 0}


@pytest.mark.slow
def test_some_families_have_the_committed_cells_again(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["compatibility", "--quick", "--out", str(tmp_path), "--jobs", "1"])
    assert outcome.exit_code == 0, outcome.output
    again, committed = (json.loads(json.dumps(Results.read(path).details["cells"])) for path in (tmp_path, FOLDER))
    for family in QUICK:
        assert _verdicts(again[family]) == _verdicts(committed[family]), family


def _verdicts(row: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, str]]:
    return {kind: {use: verdict for use, (verdict, _) in uses.items()} for kind, uses in row.items()}
