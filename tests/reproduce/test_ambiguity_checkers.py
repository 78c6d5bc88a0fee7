"""The measurement of checkers: its figures from small files of ours, and what is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Interval, Results
from graftlm.reproduce import EXPERIMENTS, Options, reproduce

FOLDER = Path(__file__).parents[2] / "src" / "graftlm" / "reproduce" / "ambiguity_checkers"


def _cocoa(data: Path) -> None:
    folder = data / "ambig" / "cocoa_mt"
    folder.mkdir(parents=True)
    rows = [  # English, formal, informal; what is marked in both
        ("Do you go?", "Gehen [F]Sie[/F]?", "Gehst [F]du[/F]?"),
        ("Your dog.", "Der Hund von [F]dir[/F].", "Der [F]Hund[/F]."),
        ("A dog.", "Ein Hund.", "Ein Hund."),
    ]
    stem = folder / "formality-control.test.en-de"
    Path(f"{stem}.en").write_text("".join(f"{english}\n" for english, _, _ in rows))
    for place, label in ((1, "formal"), (2, "informal")):
        marked = "".join(f"{row[place]}\n" for row in rows)
        Path(f"{stem}.{label}.annotated.de").write_text(marked)
        Path(f"{stem}.{label}.de").write_text(marked.replace("[F]", "").replace("[/F]", ""))


def test_accuracy_is_of_the_decided_and_coverage_of_the_marked(tmp_path: Path) -> None:
    _cocoa(tmp_path)
    results = reproduce("ambiguity-checkers", Options(data=tmp_path, out=tmp_path / "out"))
    (row,) = results.rows
    assert row.id == "formality_de"
    means = {name: value.mean for name, value in row.metrics.items() if isinstance(value, Interval)}
    # Of four marked sentences three are decided; one of these wrongly, since it says dir.
    assert means == pytest.approx({"accuracy": 200 / 3, "coverage": 75, "right_of_all": 50})
    assert results.details["formality_de"] == {
        "test.en-de": {
            "formal": {"formal": 1, "informal": 1},
            "informal": {"informal": 1, "undecided": 1},
            "unmarked": {"undecided": 2},
        }
    }
    assert [aim.met for aim in results.aims] == [False, False]
    assert Results.read(tmp_path / "out").row("formality_de") == row


def test_without_data_or_with_an_unknown_table_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither ambig/cocoa_mt nor ambig/mt_geneval"):
        reproduce("ambiguity-checkers", Options(data=tmp_path, out=tmp_path))
    with pytest.raises(RecipeError, match="no table 'tets'"):
        reproduce("ambiguity-checkers", Options(data=tmp_path, out=tmp_path, tables=("tets",)))


def test_the_committed_results_are_whole() -> None:
    results = Results.read(FOLDER)
    assert results.name in EXPERIMENTS
    assert [row.id for row in results.rows] == ["formality_de", "formality_it", "gender_de", "gender_fr"]
    assert all({"accuracy", "coverage"} <= set(row.metrics) for row in results.rows)
