"""From a recipe to text, in the steps of a user: the first one in a separate process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.tools import Graft

TEXTS = ("--text", "old=old/test.txt", "--text", "new=new/test.txt", "--text", "recipe=recipe.yaml")


def metrics_by_row(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row["metrics"] for row in document["rows"]}


@pytest.mark.slow
def test_a_graft_is_trained_measured_used_and_inspected(home: Path, graft: Graft, fresh_graft: Graft) -> None:
    trained = fresh_graft("train", "recipe.yaml", "training.steps=4", "out=runs/main")
    assert trained.code == 0, trained.err
    assert "neutral residues" in trained.out
    assert "forgotten" in trained.out
    for name in ("graft", "report.md", "results.json", "learn-against-forget.png"):
        assert f" runs/main/{name}\n" in trained.out
        assert (home / "runs/main" / name).exists()
    lines = trained.err.splitlines()
    assert len(lines) == 5, trained.err  # libraries log nothing
    assert "66,288 parameters" in lines[0]
    assert "300 tokens" in lines[1]
    assert lines[2].split()[0] == "sampling"  # a progress bar
    assert "4 steps" in lines[3]
    assert lines[4].split()[0] == "training"  # a progress bar

    evaluated = graft("eval", "runs/main/graft", *TEXTS, "--limit-tokens", "300", "--length", "32", "--json")
    assert (evaluated.code, evaluated.err) == (0, "")
    measured = metrics_by_row(json.loads(evaluated.out))
    written = metrics_by_row(json.loads((home / "runs/main/results.json").read_text()))
    for row, metrics in measured.items():
        assert metrics["recipe_bpb"]["mean"] > 0
        for name in metrics.keys() & written[row].keys():
            assert metrics[name] == pytest.approx(written[row][name], rel=1e-5), (row, name)
    common = measured["neutral-residues"].keys() & written["neutral-residues"].keys()
    assert {"old", "new_bpb", "learned", "forgotten"} <= common

    text = graft("generate", "runs/main/graft", "-", "--max-new-tokens", "8", stdin=b"le renard brun\n")
    assert (text.code, text.err) == (0, "")
    assert text.out.startswith("le renard brun")
    assert len(text.out) > len("le renard brun\n")

    inspected = graft("inspect", "runs/main/graft", "--text", "new/test.txt")
    assert (inspected.code, inspected.err) == (0, "")
    for expected in ("neutral-residues", "llama", "fingerprint", "steps 4", "blocks.*.w_i.weight", "open share, test"):
        assert expected in inspected.out
