"""The experiments with old text that a model samples itself, at their smallest, on text that the test makes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from experiments import Options, reproduce
from experiments.keep_smollm2.behaviour import write_choices
from experiments.keep_smollm2.run import ROWS, SAMPLINGS
from graftlm.evaluation import value_of

WORDS = ["the", "a", "river", "house", "that", "walked", "under", "morning", "old", "said", "her", "garden", "letter"]

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]


def novels(count: int, words: int = 400) -> str:
    random_ = random.Random(0)
    texts = [" ".join(random_.choices(WORDS, k=words)) for _ in range(count)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def question(right: int) -> dict[str, str]:
    instruction = (
        "Please choose the correct answer to the question: Where?\n\nAnswer1: a house Answer2: a river\n\nNow:"
    )
    return {"instruction": instruction, "answer": f"answer{right}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    texts = {
        **{f"lm_text/eltec_{language}.jsonl": novels(31) for language in ("deu", "eng", "fra")},
        "routing/code/thealgorithms_py.jsonl": novels(1100, 20),
        **{
            name: " ".join(WORDS * 50)
            for name in (
                "lm_text/wikitext2_valid_test/test.txt",
                "lm_text/wikitext2_valid_test/valid.txt",
                "lm_text/tinyshakespeare/input.txt",
                "parallel/bible/BSB.txt",
            )
        },
        **{
            f"routing/science/{name}/test.json": json.dumps([question(1), question(2)] * 3)
            for name in ("arc_easy", "openbookqa")
        },
    }
    for name, text in texts.items():
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return data


def results_of(name: str, folder: Path, backbone: Path):
    options = Options(data=folder, out=folder / "out", quick=True, jobs=1, backbone=str(backbone))
    return reproduce(name, options)


def test_keep_has_every_row_at_equal_learning(folder: Path, tiny_backbone) -> None:
    results = results_of("keep-smollm2", folder, tiny_backbone("llama"))
    samplings = [f"sampling_{name}" for name in SAMPLINGS]
    assert [row.id for row in results.rows] == ["backbone", *ROWS, "wise_ft", *samplings]
    for name in ROWS:
        metrics = results.row(name).metrics
        assert {"learned", "forgotten", "own_kl", "new_kl", "arc_easy", "own_kl_at_equal"} <= metrics.keys()
        bare = value_of(results.row("backbone").metrics["code"])
        assert value_of(metrics["forgotten_code"]) == pytest.approx(value_of(metrics["code"]) - bare, abs=1e-6)
    assert all(len(of_row) == 1 for of_row in results.details["searched"].values())
    assert len(results.aims) == 5


def test_a_choice_is_read_with_its_answer(folder: Path, tmp_path: Path) -> None:
    files = write_choices(folder, {"arc_easy": "routing/science/arc_easy/test.json"}, tmp_path, 2)
    lines = [json.loads(line) for line in Path(files["arc_easy"]).read_text(encoding="utf-8").splitlines()]
    assert lines[1] == {"question": "Where?", "choices": ["a house", "a river"], "right": 1}


def test_growth_measures_what_later_stages_lose(folder: Path, tiny_backbone) -> None:
    results = results_of("grow-smollm2", folder, tiny_backbone("llama"))
    together, alone = (results.row(name).metrics for name in ("together", "alone_de"))
    lost = value_of(together["de"]) - value_of(alone["de"])
    assert value_of(together["lost_de"]) == pytest.approx(lost, abs=1e-6)
    assert value_of(together["over_alone_de"]) == pytest.approx(lost / value_of(alone["de"]), abs=1e-6)
    assert "lost_fr" in results.row("lora_sequential").metrics
    assert len(results.aims) == 5


def test_self_replay_gives_each_row_a_search(folder: Path, tiny_backbone) -> None:
    results = results_of("self-replay", folder, tiny_backbone("llama"))
    assert {"lora-self", "open", "open-self", "open-self-distil"} <= {row.id for row in results.rows}
    assert {len(tried) for tried in results.details["searched"].values()} == {1}
    assert [aim.aim for aim in results.aims] == [1.0, 0.15, 0.3, 0.3]


def test_audits_measure_every_row(folder: Path, tiny_backbone) -> None:
    results = results_of("audit-smollm2", folder, tiny_backbone("llama"))
    assert [row.id for row in results.rows] == ["self", "int8", "lora", "finetune", "neutral_self"]
    for row in results.rows:
        assert {"own_kl", "changed_tokens", "novel_lost", "seconds"} <= row.metrics.keys()
        assert (value_of(row.metrics["own_kl"]) > 0) == (row.id != "self")
