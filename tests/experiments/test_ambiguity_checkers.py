"""The measurement of checkers on small files, and the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import EXPERIMENTS, Options, reproduce
from experiments.ambiguity_checkers.run import labelled_by_danish, labelled_by_pronouns, read_by_hand
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Interval, Results

FOLDER = Path(__file__).parents[2] / "experiments" / "ambiguity_checkers"


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


def test_missing_data_and_unknown_tables_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither ambig/cocoa_mt, ambig/mt_geneval nor parallel"):
        reproduce("ambiguity-checkers", Options(data=tmp_path, out=tmp_path))
    with pytest.raises(RecipeError, match="no table 'tets'"):
        reproduce("ambiguity-checkers", Options(data=tmp_path, out=tmp_path, tables=("tets",)))


def _bible(folder: Path, name: str, *verses: str) -> None:
    """One book, and a psalm that says the opposite of it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"[1:{n}] {verse}" for n, verse in enumerate(verses, start=1)]
    (folder / name).write_text("\n".join(["### Mark", *lines, "### Psalms", *reversed(lines)]) + "\n", encoding="utf-8")


def test_french_is_labelled_by_danish(tmp_path: Path) -> None:
    danish = ("Hvad vil du?", "Gaa I, og bed eder fri.", "Han gik.", "Du og I.", "Nu ville I gaa.")
    french = ("Que veux-tu ?", "Tu pries.", "Il alla.", "Toi et vous.", "Vous irez.")
    _bible(tmp_path / "parallel" / "bible", "DaOT1871NT1907.txt", *danish)
    _bible(tmp_path / "parallel" / "bible", "FreSynodale1921.txt", *french)
    found = list(labelled_by_danish(tmp_path / "parallel", "fr"))
    assert [(one.reference, one.label) for one in found] == [
        ("Que veux-tu ?", "informal"),
        ("Tu pries.", "formal"),
        ("Vous irez.", "formal"),
    ]
    results = reproduce("ambiguity-checkers", Options(data=tmp_path, out=tmp_path / "out"))
    assert results.details["formality_fr"] == {
        "bible": {"formal": {"formal": 1, "informal": 1}, "informal": {"informal": 1}}
    }
    assert list(labelled_by_danish(tmp_path / "parallel", "es")) == []


def _ntrex(data: Path, *pairs: tuple[str, str], first: int = 1) -> None:
    folder = data / "parallel" / "ntrex"
    folder.mkdir(parents=True)
    rows = [("", "")] * (first - 1) + list(pairs)
    (folder / "DOCUMENT_IDS.tsv").write_text("d\n" * len(rows))
    for name, place in (("src.eng", 0), ("ref.spa", 1), ("ref.fra", 1), ("ref.deu", 1)):
        (folder / f"newstest2019-{name}.txt").write_text("".join(f"{row[place]}\n" for row in rows), encoding="utf-8")


def test_labels_by_hand_and_by_pronouns(tmp_path: Path) -> None:
    _ntrex(tmp_path, ("She was a doctor.", "Ella era médica."), ("Do you? I do.", "¿Crees?"), first=243)
    (only,) = read_by_hand(tmp_path / "parallel", "es")
    assert (only.id, only.label, only.reference) == ("ntrex:244", "informal", "¿Crees?")
    assert list(read_by_hand(tmp_path / "parallel", "de")) == []
    (told,) = labelled_by_pronouns(tmp_path / "parallel", "es")
    assert (told.label, told.id) == ("feminine", "ntrex:243")
    results = reproduce("ambiguity-checkers", Options(data=tmp_path, out=tmp_path / "out"))
    assert {"formality_es", "gender_es"} <= {row.id for row in results.rows}


def test_the_committed_results_are_complete() -> None:
    results = Results.read(FOLDER)
    assert results.name in EXPERIMENTS
    measured = ["formality_de", "formality_es", "formality_fr", "formality_it", "gender_de", "gender_es", "gender_fr"]
    pronouns = [f"gender_{language}_pronouns" for language in ("de", "es", "fr")]
    assert [row.id for row in results.rows] == [*measured, *pronouns]
    assert all({"accuracy", "coverage"} <= set(row.metrics) for row in results.rows)
