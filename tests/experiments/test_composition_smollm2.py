"""SmolLM2's compositions at their smallest, on text that the test makes: rows, aims, documents that are apart."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from experiments import Options, reproduce
from experiments.composed import SHARES
from experiments.composition_smollm2.run import DOCUMENTS, FILES, LABELS, SOURCES, SPECIALISTS, TEXTS
from graftlm.errors import DataError


@pytest.mark.exhaustive
@pytest.mark.slow
def test_three_specialists_in_the_one_form(tmp_path: Path, tiny_backbone) -> None:
    for number, name in enumerate(FILES):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"Line {n} of text {number}, which nobody reads." for n in range(40)]
        path.write_text("".join(f"{line if name.endswith('txt') else json.dumps({'text': line})}\n" for line in lines))
    options = Options(
        data=tmp_path / "data", out=tmp_path / "out", quick=True, jobs=1, backbone=str(tiny_backbone("llama"))
    )
    results = reproduce("composition-smollm2", options)
    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == set(LABELS) - {"m_a", "random_m_a"}
    for metrics in rows.values():
        assert {*TEXTS, "ntrex_german_english_bpb", "ntrex_english_french_bpb"} <= metrics.keys()
    assert len(results.aims) == len(TEXTS)
    assert len(results.details["search"]["fixed_mixture"]) == len(SHARES)
    gates = [f"{name}_gate" for name in SPECIALISTS]
    assert set(gates) <= results.details["statistics"]["both"].keys()


def test_documents_of_a_test_are_in_no_training() -> None:
    assert DOCUMENTS.keys() == SOURCES.keys()
    for parts in DOCUMENTS.values():
        for first, second in combinations([set(range(*map(int, part.split(":")))) for part in parts], 2):
            assert not first & second


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks lm_text/eltec_deu.jsonl: pass --data"):
        reproduce("composition-smollm2", Options(data=tmp_path, out=tmp_path / "out"))
