"""From a recipe to text, as a user takes the steps: the first one in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.tools import Graft


@pytest.mark.slow
def test_a_graft_is_trained_measured_used_and_looked_into(home: Path, graft: Graft, fresh_graft: Graft) -> None:
    trained = fresh_graft("train", "recipe.yaml", "training.steps=4", "out=runs/main")
    assert trained.code == 0, trained.err
    assert "neutral residues" in trained.out
    assert "forgotten" in trained.out
    for name in ("graft", "report.md", "results.json", "learn-against-forget.png"):
        assert f" runs/main/{name}\n" in trained.out
        assert (home / "runs/main" / name).exists()
    lines = trained.err.splitlines()
    assert lines[:2] == ["Backbone llama: 66,288 parameters, frozen.", "Sampling 4,096 tokens of llama's own text."]
    assert lines[3] == "Training neutral residues for 4 steps."
    assert [line.split()[0] for line in (lines[2], lines[4])] == ["sampling", "training"], "progress bars"
    assert len(lines) == 5, f"libraries have nothing to say: {trained.err}"

    texts = ("--text", "old=old/test.txt", "--text", "new=new/test.txt", "--text", "recipe=recipe.yaml")
    measured = graft("eval", "runs/main/graft", *texts, "--limit-tokens", "300", "--length", "32", "--json")
    assert (measured.code, measured.err) == (0, "")
    rows = {row["id"]: row["metrics"] for row in json.loads(measured.out)["rows"]}
    written = {row["id"]: row["metrics"] for row in json.loads((home / "runs/main/results.json").read_text())["rows"]}
    for row, metrics in rows.items():
        assert metrics["recipe_bpb"]["mean"] > 0
        for name in metrics.keys() & written[row].keys():
            assert metrics[name] == pytest.approx(written[row][name], rel=1e-5), (row, name)
    assert {"old", "new_bpb", "learned", "forgotten"} <= rows["neutral-residues"].keys() & written[
        "neutral-residues"
    ].keys()

    text = graft("generate", "runs/main/graft", "-", "--max-new-tokens", "8", stdin=b"le renard brun\n")
    assert (text.code, text.err) == (0, "")
    assert text.out.startswith("le renard brun")
    assert len(text.out) > len("le renard brun\n")

    inspected = graft("inspect", "runs/main/graft", "--text", "new/test.txt")
    assert (inspected.code, inspected.err) == (0, "")
    for expected in ("neutral-residues", "llama", "fingerprint", "steps 4", "blocks.*.w_i.weight", "open share, test"):
        assert expected in inspected.out
