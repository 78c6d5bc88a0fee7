"""`graft summarize`: what it prints, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.tools import invoke
from graftlm.pipelines.summarize import read_document
from summarize.tools import TEA, write_pdf

pytest.importorskip("sumy")


@pytest.fixture
def tea(tmp_path: Path) -> Path:
    path = tmp_path / "tea.md"
    path.write_text(TEA, encoding="utf-8")
    return path


def test_a_person_sees_sentences_places_and_how_they_were_chosen(tea: Path) -> None:
    done = invoke("summarize", str(tea), "--budget", "2")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line[-3:] for line in lines[:2]] == ["[1]", "[2]"]
    assert "[1] characters " in done.out
    assert done.err == ""
    assert "note" not in invoke("summarize", str(tea), "--budget", "2", "--quiet").err


def test_a_program_gets_spans_that_hold(tea: Path, tmp_path: Path) -> None:
    pdf = write_pdf(tmp_path / "a.pdf", "Tea is good.", "Water is wet. Tea is wet.")
    done = invoke("summarize", str(tea), str(pdf), "--json", "--budget", "200c")
    first, second = json.loads(done.out)
    assert first["extract"]["budget"] == {"amount": 200, "unit": "characters", "used": len(first["summary"])}
    for sentence in first["extract"]["sentences"]:
        assert TEA[sentence["start"] : sentence["end"]] == sentence["source"]
    pages = read_document(pdf).pages
    assert [row["page"] for row in second["extract"]["sentences"]] == [1, 2, 2]
    for row in second["extract"]["sentences"]:
        assert pages[row["page"] - 1][row["start"] : row["end"]] == row["source"]
    assert first["faithfulness"]["words"] == 1


def test_a_writer_is_linked_and_measured(tea: Path, tiny_backbone) -> None:
    done = invoke(
        "summarize",
        str(tea),
        "--writer",
        str(tiny_backbone("llama")),
        "--length",
        "5",
        "--budget",
        "1",
        "--device",
        "cpu",
    )
    assert done.code == 0
    assert "the source has" in done.out or "no words" in done.out
    assert "layout" in done.err


def test_a_batch_goes_on_behind_a_bad_document(tea: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    done = invoke("summarize", str(tmp_path), "--batch", "--budget", "1")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [Path(row["document"]).name for row in rows] == ["empty.txt", "tea.md"]
    assert "has no sentence" in rows[0]["error"]
    assert "summary" in rows[1]
    assert done.code == 2
    assert "1 of 2" in done.err
    assert invoke("summarize", str(tea), "--batch").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "2q"], "2q"),
        (["--budget", "3t"], "tokenizer"),
        (["--budget", "3c"], "3 characters"),
        (["--method", "guess"], "method"),
        (["--writer", "nowhere"], "nowhere"),
    ],
)
def test_what_the_user_can_mend_is_one_line(tea: Path, arguments: list[str], message: str) -> None:
    done = invoke("summarize", str(tea), *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]
