"""The reproduction at its smallest, on text that the test makes: every table, the form of its results, its errors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from experiments import Options, reproduce
from experiments.neutral_residues.run import FACTORS, FILES, METHODS
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results, value_of

WORDS = ["the", "a", "river", "house", "that", "walked", "under", "morning", "old", "said", "her", "garden", "letter"]
MOTS = ["le", "une", "maison", "qui", "marchait", "sous", "vieux", "dit", "son", "jardin", "lettre", "avec", "depuis"]


def novels(words: list[str], count: int, characters: int, seed: int) -> str:
    random_ = random.Random(seed)
    texts = [" ".join(random_.choice(words) for _ in range(characters // 5)) for _ in range(count)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def folder(tmp_path: Path, tiny_backbone) -> Path:
    data = tmp_path / "data"
    for name in ("lm_text/tinyshakespeare", "lm_text/wikitext2_valid_test", "parallel/bible", "models"):
        (data / name).mkdir(parents=True)
    english = novels(WORDS, 24, 3_000, 0) + novels(WORDS, 1, 200_000, 1)
    (data / "lm_text" / "eltec_eng.jsonl").write_text(english, encoding="utf-8")
    (data / "lm_text" / "eltec_fra.jsonl").write_text(novels(MOTS, 31, 3_000, 2), encoding="utf-8")
    for name in FILES[2:]:
        (data / name).write_text(" ".join(WORDS * 50), encoding="utf-8")
    return data


@pytest.mark.slow
def test_every_table_in_the_one_form(folder: Path, tmp_path: Path, tiny_backbone) -> None:
    out = tmp_path / "out"
    options = Options(data=folder, out=out, quick=True, jobs=1, backbone=str(tiny_backbone("llama")))
    results = reproduce("neutral-residues", options)

    ids = {row.id for row in results.rows}
    assert {"backbone", *METHODS} <= ids
    assert {"neutral-residues-alpha100", "lora-p0", "none-l1-low-c0.4"} <= ids
    assert {"sigmoid-low", "relu-random-l1-low-table6-alpha0.01", "finetune-rate0.001"} <= ids
    details: Any = results.details
    assert len({len(losses) for losses in details["search"].values()}) == 1, "equal searches"
    assert set(details["factors"]) == set(FACTORS)
    assert {paper.id for paper in results.paper} <= ids
    for row in results.rows:
        if row.id != "backbone":
            learned = value_of(results.row("backbone").metrics["new"]) - value_of(row.metrics["new"])
            assert value_of(row.metrics["learned"]) == pytest.approx(learned, abs=1e-6)
            unlike = [value_of(row.metrics[name]) for name in ("forgotten_shakespeare", "forgotten_bible")]
            assert value_of(row.metrics["forgotten_unlike"]) == pytest.approx(sum(unlike) / 2, abs=1e-6)
    assert (out / "learn-against-forget.png").exists()


def test_a_factor_is_all_that_two_rows_differ_in() -> None:
    for factor, (row, other) in FACTORS.items():
        if "over" not in factor:
            ours, theirs = METHODS[row].graft, METHODS[other].graft
            changed = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
            assert len(changed - ({"gate_init"} if factor.startswith("gate") else set())) == 1, factor
    assert len({len(row.settings) for row in METHODS.values()}) == 1, "every row has as large a search"


def test_the_committed_results_are_of_this_form() -> None:
    from experiments import neutral_residues

    results = Results.read(Path(neutral_residues.__file__).parent)
    assert {"backbone", "finetune", "lora", "adapter", "neutral-residues"} <= {row.id for row in results.rows}
    assert results.seeds == [0, 1, 2, 3, 4]


def test_mistakes(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out")
    with pytest.raises(DataError) as missing:
        reproduce("neutral-residues", options)
    assert "lm_text/eltec_eng.jsonl" in str(missing.value)
    with pytest.raises(RecipeError) as unknown_table:
        reproduce("neutral-residues", options.model_copy(update={"tables": ("3",)}))
    assert "'3'" in str(unknown_table.value)
    with pytest.raises(RecipeError) as unknown_name:
        reproduce("neutral-residue", options)
    assert "neutral-residues" in str(unknown_name.value), "the name that was meant"
