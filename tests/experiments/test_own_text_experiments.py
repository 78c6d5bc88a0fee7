"""The experiments with old text that a model samples itself, at their smallest, on text that the test makes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmark_files import write_nq_open
from experiments import Options, reproduce
from experiments.chat_smollm2.run import ROWS as CHAT_ROWS
from experiments.chat_smollm2.run import conversations as conversations_of
from experiments.keep_smollm2.behaviour import write_choices
from experiments.keep_smollm2.run import ROWS, SAMPLINGS
from experiments.languages.rivals import RIVALS
from experiments.languages.rivals import ROWS as RIVAL_ROWS
from experiments.languages.texts import split_documents
from graftlm.evaluation import Results, value_of

WORDS = ["the", "a", "river", "house", "that", "walked", "under", "morning", "old", "said", "her", "garden", "letter"]

pytestmark = pytest.mark.slow


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


def results_of(name: str, folder: Path, backbone: Path, **more: Any):
    options = Options(data=folder, out=folder / "out", quick=True, jobs=1, backbone=str(backbone), **more)
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


def test_three_languages_have_their_shares(folder: Path, tiny_backbone) -> None:
    sentences = ["the old house", "her morning letter said", "a river that walked under the garden"] * 60
    treebank = "".join(f"# text = {sentence}\n1\tx\tO\n\n" for sentence in sentences)
    texts = {
        "ner/uner_da/da_ddt-ud-train.iob2": treebank,
        "ner/uner_sk/sk_snk-ud-train.iob2": treebank,
        "parallel/bible/CzeBKR.txt": "".join(f"[1:{n}] {sentence}\n" for n, sentence in enumerate(sentences)),
        **{f"parallel/ntrex/newstest2019-ref.{code}.txt": "\n".join(sentences) for code in ("dan", "slk", "ces")},
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    write_nq_open(folder / "eval", 4)
    results = results_of("languages", folder, tiny_backbone("llama"), tables=("smollm2", "gemma"))
    bare, trained = results.rows
    assert trained.id == "smollm2"
    assert {"learned_da", "learned_sk", "learned_cs", "forgotten", "nq_open_change"} <= trained.metrics.keys()
    assert "nq_open" in bare.metrics
    assert sum(results.details["token_shares"]["smollm2"].values()) == pytest.approx(1)
    of_gemma = Results.read(folder / "out" / "gemma")
    assert [row.id for row in of_gemma.rows] == ["gemma_bare", "gemma"]


def test_self_replay_gives_each_row_a_search(folder: Path, tiny_backbone) -> None:
    results = results_of("self-replay", folder, tiny_backbone("llama"))
    assert {"lora-self", "open", "open-self", "ungated-self", "adapter-self"} <= {row.id for row in results.rows}
    assert {"lora-self", "lora-self-distil", "ungated-self"} <= results.details["minus"].keys()
    assert {len(tried) for tried in results.details["searched"].values()} == {1}
    assert [aim.aim for aim in results.aims] == [1.0, 0.15, 0.3, 0.3]


def test_audits_measure_every_row(folder: Path, tiny_backbone) -> None:
    results = results_of("audit-smollm2", folder, tiny_backbone("llama"))
    assert [row.id for row in results.rows] == ["self", "int8", "lora", "finetune", "neutral_self"]
    for row in results.rows:
        assert {"own_kl", "changed_tokens", "novel_lost", "seconds"} <= row.metrics.keys()
        assert (value_of(row.metrics["own_kl"]) > 0) == (row.id != "self")


@pytest.fixture
def conversations(folder: Path) -> Path:
    """Questions in the forms of four data sets; the first tests are training rows too."""
    maths = [
        {"question": f"How many are {i} and {i}?", "answer": f"<<{i}+{i}>>Twice.\n#### {2 * i}"} for i in range(30)
    ]
    code = [{"text": f"Write the function number {i}.", "code": f"def f():\r\n  return {i}"} for i in range(620)]
    reading = [
        {
            "paragraph_text": f"The house {i} is old.",
            "question_text": "what is old",
            "original_nq_answers": [[{"string": "it"}]],
        }
        for i in range(920)
    ]
    svamp = [{"Body": f"There are {i} houses.", "Question": "How many?", "Answer": float(i)} for i in range(9)]
    lines = {
        "routing/math/gsm8k/train.jsonl": maths,
        "routing/math/gsm8k/test.jsonl": [maths[0], *({**row, "question": f"So, {row['question']}"} for row in maths)],
        "routing/code/mbpp/mbpp.jsonl": code,
        "routing/reading/qed/qed-dev.jsonlines": reading,
    }
    files = {name: "".join(f"{json.dumps(row)}\n" for row in rows) for name, rows in lines.items()}
    for name, text in {**files, "routing/math/svamp/SVAMP.json": json.dumps(svamp)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_no_conversation_of_the_tests_is_trained_on(conversations: Path) -> None:
    sets = conversations_of(conversations)
    train = {question for question, _ in sets["train"]}
    for name, pairs in sets.items():
        assert pairs
        assert name == "train" or not train & {question for question, _ in pairs}
    assert len(sets["test_maths"]) == 30, "the row that is in both was left out"
    assert sets["train"][0][1] == "Twice.\nThe answer is 0"


def test_a_chat_model_learns_answers(conversations: Path, tiny_chat_model, tmp_path: Path) -> None:
    results = results_of("chat-smollm2", conversations, tiny_chat_model)
    assert [row.id for row in results.rows] == ["backbone", *CHAT_ROWS]
    assert all({"learned", "forgotten", "own_kl"} <= row.metrics.keys() for row in results.rows[1:])
    assert {len(tried) for tried in results.details["searched"].values()} == {1}


def test_rivals_have_one_size_and_one_search(folder: Path, tiny_chat_model: Path) -> None:
    documents = [[f"{word} the old house {number}" for word in WORDS[:6]] for number in range(100)]
    lines = [sentence for document in documents for sentence in document]
    ids = [f"document.{number}" for number, document in enumerate(documents) for _ in document]
    texts = {
        "parallel/ntrex/newstest2019-ref.dan.txt": "\n".join(lines),
        "parallel/ntrex/newstest2019-src.eng.txt": "\n".join(lines),
        "parallel/ntrex/DOCUMENT_IDS.tsv": "\n".join(f"{name}\tn" for name in ids),
        "routing/math/gsm8k/train.jsonl": json.dumps({"question": "How many?", "answer": "Four."}) + "\n",
        "lm_text/wikitext2_valid_test/valid.txt": "\n".join([" ".join(WORDS * 8)] * 20),
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    write_nq_open(folder / "eval", 4)
    results = results_of("languages", folder, tiny_chat_model, tables=(RIVALS,))
    assert [row.id for row in results.rows] == ["backbone", *RIVAL_ROWS]
    details: Any = results.details
    search = details["search"]
    assert search.keys() == set(RIVAL_ROWS)
    assert {len(found["scores"]) for found in search.values()} == {1}
    sizes = {row.id: value_of(row.metrics["trainable_parameters"]) for row in results.rows[1:]}
    of_lora = {name: size for name, size in sizes.items() if name not in ("neutral", "oft")}
    assert len(set(of_lora.values())) == 1
    assert details["sent_to_the_adapter"].keys() == {"danish"}
    assert details["rewriting"]["texts"] > 0


def test_documents_are_in_one_part_each() -> None:
    documents = [[f"{number} {sentence}" for sentence in range(3)] for number in range(9)]
    parts = split_documents(documents, {"new": 4, "valid": 2}, "test")
    assert {part: len(of_part) for part, of_part in parts.items()} == {"new": 4, "valid": 2, "test": 3}
    assert [document for of_part in parts.values() for document in of_part] == documents
