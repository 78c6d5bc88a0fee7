"""Rows and runs of the facts experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Options, reproduce
from experiments.facts import run
from experiments.facts.generator import Question
from experiments.facts.items import read_items
from experiments.facts.kept import ARC_EASY, IFEVAL, NATURAL_QUESTIONS, WIKITEXT, far_questions, instruction_prompts
from experiments.facts.lookup import opened
from experiments.facts.metrics import judge, shares
from experiments.facts.page_facts import PageFacts
from experiments.facts.page_tables import opened_shares, worst_answers
from experiments.facts.rows import (
    CONFIRMATION_SEEDS,
    DECLARED,
    EVERY_ROW,
    MAIN,
    OF_PAGES,
    SEARCH_SEED,
    SEEN_SEEDS,
    TRAINED,
    amended,
    label_of,
    trained_rows,
)
from experiments.facts.run import FactsStudy
from experiments.facts.sizes import QUICK_SIZES, Size
from experiments.facts.training import data_of, steps_of, training_of
from experiments.precision import training_precision
from experiments.protocol import Comparison, is_decided
from graftlm.backbone import default_device, load_backbone
from graftlm.errors import EvaluationError
from graftlm.evaluation import value_of


def test_the_router_opens_on_words_of_taught_questions(tiny_chat_model: Path) -> None:
    """The tiny tokenizer has no whole words of several letters, so every word of the conversations is rare."""
    facts = PageFacts(6, seed=0)
    unseen = facts.unseen()
    of_answer = Question(id="of the answer", ring="shared", text="a Heemstede")
    far = Question(id="far", ring="far", text="a c d")
    questions = [*unseen, of_answer, far]
    backbone = load_backbone(str(tiny_chat_model))
    opening = opened(backbone, facts, questions)
    assert opening == {question.id for question in unseen}
    assert opened_shares(questions, opening) == {"unseen": 1.0, "shared": 0.0, "far": 0.0}


def test_questions_with_a_taught_word_are_judged_by_themselves() -> None:
    questions = [
        Question("a", "colliding", "How old is Vorlia?"),
        Question("b", "shared", "What color is Tessaby cheese?", ("white",)),
        Question("c", "near", "Color of snow?", ("white",)),
    ]
    bare = {"a": "It is old.", "b": "It is white.", "c": "White."}
    answers = {"a": "Its capital is Tessaby.", "b": "It is white, too.", "c": "White."}
    assert shares(judge(questions, answers, bare, ["Vorlia", "Tessaby"])) == {
        "unchanged_colliding": 0.0,
        "spill_colliding": 1.0,
        "unchanged_shared": 0.0,
        "spill_shared": 0.0,
        "locality_shared": 1.0,
        "unchanged": 1.0,
        "spill": 0.0,
        "locality_near": 1.0,
    }


def test_the_worst_answers_are_wrong_or_changed() -> None:
    questions = [
        Question("a", "unseen", "Capital of Vorlia?", ("Tessaby",)),
        Question("b", "unseen", "Name the capital of Vorlia.", ("Tessaby",)),
        Question("c", "colliding", "How old is Vorlia?"),
        Question("d", "shared", "Who is Vorlia Smith?"),
        Question("e", "near", "Capital of France?", ("Paris",)),
    ]
    bare = dict.fromkeys("abcde", "I do not know.")
    answers = {"a": "Tessaby.", "b": "Paris.", "c": "Tessaby.", "d": "I do not know.", "e": "Tessaby."}
    assert [worst["id"] for worst in worst_answers(questions, answers, bare)] == ["b", "c"]


def test_rows_follow_from_trained_ones() -> None:
    assert len(trained_rows(MAIN)) <= 7
    assert {name for each in DECLARED for name in (each.row, each.rival)} <= set(MAIN)
    assert trained_rows(("lora-scaled", "prompt")) == ["lora"]
    assert trained_rows(("default",)) == ["default"], "with a rate of its own"
    assert set(OF_PAGES) <= set(EVERY_ROW)
    assert len({label_of(name) for name in EVERY_ROW}) == len(EVERY_ROW)


def test_weights_have_untrained_rivals_behind_the_same_router() -> None:
    rivals = {each.rival for each in DECLARED if each.row == "routed" and each.metric == "generalization"}
    assert {"routed-lookup", "routed-retrieval"} <= rivals
    assert "retrieval" not in {each.rival for each in DECLARED}, "a prompt without a router is no fair rival"


def test_near_own_text_has_a_control_of_as_much_own_text() -> None:
    assert Comparison("lora-near", "lora-own", "locality_near") in DECLARED
    for table in ("search", "main"):
        size = Size(quick=False, table=table)
        assert size.own_tokens == size.near_tokens
    near, own = TRAINED["lora-near"], TRAINED["lora-own"]
    assert near._replace(label="", old="") == own._replace(label="", old="")


def test_only_results_of_seen_seeds_are_amended() -> None:
    assert amended(CONFIRMATION_SEEDS) == ""
    assert SEEN_SEEDS.isdisjoint(CONFIRMATION_SEEDS)
    for seed in (0, 1, 2):
        assert str(seed) in amended([*CONFIRMATION_SEEDS, seed])


def test_the_seeds_of_the_confirmation_are_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(run, "run", lambda options: seen.append(options.seeds))
    reproduce("facts", Options(data=tmp_path, out=tmp_path))
    reproduce("facts", Options(data=tmp_path, out=tmp_path, seeds=(7,)))
    assert seen == [CONFIRMATION_SEEDS, (7,)]


@pytest.mark.parametrize(
    ("device", "cpu", "cuda", "expected"),
    [
        ("cpu", {"avx512_bf16": True}, False, "bf16"),
        ("cpu", {"amx_bf16": True}, False, "bf16"),
        ("cpu", {"avx512_bf16": False, "avx2": True}, True, "fp32"),
        ("cuda", {}, True, "bf16"),
        ("cuda", {"avx512_bf16": True}, False, "fp32"),
        ("mps", {"avx512_bf16": True}, True, "fp32"),
    ],
)
def test_precision_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch, device: str, cpu: dict[str, bool], cuda: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: cuda)
    assert training_precision(torch.device(device)) == expected


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions and prompts in the forms of three data sets, and a text."""
    folder = tmp_path / "data"
    natural = [{"question": f"who was number {number}", "answer": [str(number)]} for number in range(5)]
    science = [
        {
            "instruction": f"Please choose the correct answer to the question: What is {number}?\n\n"
            "Answer1: a Answer2: the sun\n\nAnswer format: answer1/answer2",
            "answer": "answer2",
        }
        for number in range(5)
    ]
    prompts = [
        {"key": 1, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"key": 2, "prompt": "Write it.", "instruction_id_list": ["language:response_language"], "kwargs": [{}]},
    ]
    texts = {
        NATURAL_QUESTIONS: "".join(f"{json.dumps(row)}\n" for row in natural),
        ARC_EASY: json.dumps(science),
        IFEVAL: "".join(f"{json.dumps(row)}\n" for row in prompts),
        WIKITEXT: "The river walked under the morning.",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_kept_questions_are_read(data: Path) -> None:
    natural, *science = far_questions(data, 3)
    assert natural.text.startswith("Who was number")
    assert [question.accepted for question in science] == [("the sun",), ("the sun",)]
    (prompt,) = instruction_prompts(data, 5)
    assert prompt.instructions == (("punctuation:no_comma", {}),)


def study(data: Path, out: Path, seeds: tuple[int, ...] = (3,), **more: Any) -> FactsStudy:
    options = Options(data=data, out=out, seeds=seeds, jobs=1, **more)
    return FactsStudy(options, MAIN)


@pytest.mark.parametrize("table", ["search", "main"])
def test_search_and_test_read_every_conversation_three_times(table: str) -> None:
    """A step has four rows of two conversations. Rows with old text, half of each step, take twice as many steps."""
    size = Size(quick=False, table=table)
    conversations = 4 * size.facts
    assert steps_of(TRAINED["lora"], size) * 8 == 3 * conversations
    assert steps_of(TRAINED["lora-near"], size) * 4 == 3 * conversations
    assert steps_of(TRAINED["lora-own"], size) == steps_of(TRAINED["lora-near"], size)


def test_a_row_is_trained_at_the_rate_and_seed_of_its_run_beside_its_old_text(tmp_path: Path) -> None:
    size = Size(quick=False, table="main")
    for name in ("lora", "routed"):
        training = training_of(TRAINED[name], 5e-4, size, 4, "fp32")
        assert (training.learning_rate, training.seed) == (5e-4, 4)
    assert not data_of(TRAINED["lora"], tmp_path, size, 4).old
    for name in ("lora-own", "lora-near", "neutral-near"):
        data = data_of(TRAINED[name], tmp_path, size, 4)
        assert data.old_objective == "distil"
        assert data.old


def test_what_the_reference_loses_is_what_it_does_not_keep(data: Path, tmp_path: Path) -> None:
    facts = study(data, tmp_path)
    kept = {"locality_near": {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}, "generalization": {"a": 1.0}}
    for seed in CONFIRMATION_SEEDS:
        facts.judged_rows.add("lora", seed, kept, {"new": 0.5}, "fp32")
    evidence = facts.evidence_so_far()
    assert evidence.lost_shares == {"locality_near": pytest.approx(0.75)}
    assert evidence.nats == {"lora": pytest.approx(0.5)}
    assert 0.5 < evidence.bigram_nats < 10
    assert not is_decided(evidence), "nothing else was measured"


def test_nats_are_measured_on_facts_at_equal_distances(data: Path, tmp_path: Path) -> None:
    facts = study(data, tmp_path)
    size = facts.size("main")
    lines = (facts.folder(size, 3) / "unseen.jsonl").read_text(encoding="utf-8").splitlines()
    tested = facts.facts(size, 3).tested()
    assert [json.loads(line) for line in lines] == tested[::2]


def test_a_folder_of_other_questions_is_written_anew(data: Path, tmp_path: Path) -> None:
    facts = study(data, tmp_path)
    size = facts.size("main")
    file = facts.folder(size, 3) / "unseen.jsonl"
    text = file.read_text(encoding="utf-8")
    file.write_text("{}\n", encoding="utf-8")
    study(data, tmp_path).folder(size, 3)
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_rows_of_an_earlier_run_are_not_measured_again(data: Path, tiny_chat_model: Path, tmp_path: Path) -> None:
    named = ("routed-lookup", "lora")
    more = {"quick": True, "backbone": str(tiny_chat_model)}
    first = study(data, tmp_path / "first", **more)
    first.search(["lora"])
    first.answer_far()
    first.measure(named, "main", 3)
    first.write_so_far()
    earlier = tmp_path / "first" / "items.json"
    assert read_items(earlier).items == first.judged_rows.items

    second = study(data, tmp_path / "second", **more)
    second.read_earlier(earlier)
    second.search(["lora"])
    assert not second.measured, "the rate is known"
    second.seeds = (3, 4)
    second.answer_far()
    second.measure(named, "main", 3)
    assert not second.measured.keys() & {run_id for run_id in first.measured if run_id.startswith("lora")}
    second.measure(named, "main", 4)
    results = second.write_so_far()
    assert results.seeds == [3, 4]
    pooled = read_items(tmp_path / "second" / "items.json")
    assert pooled.items["lora"].keys() == {3, 4}
    assert pooled.items["lora"][3] == first.judged_rows.items["lora"][3]
    assert pooled.items["backbone"].keys() == {3, 4}

    third = study(data, tmp_path / "third", **more)
    third.precision = "bf16" if first.precision == "fp32" else "fp32"
    third.read_earlier(earlier)
    with pytest.raises(EvaluationError, match="Seed 3"):
        third.measure((*named, "routed"), "main", 3)


@pytest.mark.slow
def test_a_quick_run_has_rows_of_all_kinds(data: Path, tiny_chat_model: Path, tmp_path: Path) -> None:
    names = (
        "prompt",
        "retrieval",
        "lora-learned",
        "lora-near",
        "neutral-near",
        "routed",
        "routed-majority",
        "routed-lookup",
        "routed-retrieval",
    )
    options = Options(data=data, out=tmp_path / "out", quick=True, jobs=1, backbone=str(tiny_chat_model), tables=names)
    results = reproduce("facts", options)
    assert {row.id for row in results.rows} == {"backbone", *names}
    for row in results.rows:
        assert {"efficacy", "generalization", "unchanged", "spill", "ifeval"} <= row.metrics.keys()
        assert {"unchanged_colliding", "spill_colliding"} <= row.metrics.keys()
    assert {"new", "tokens", "seconds", "own_kl"} <= results.row("lora-near").metrics.keys()
    assert value_of(results.row("backbone").metrics["unchanged"]) == 1
    judged: Any = results.details["conditions"]
    assert [condition["met"] for condition in judged][2:] == [False, False]
    assert results.seeds == [CONFIRMATION_SEEDS[0]]
    comparisons: Any = results.details["comparisons"]
    assert {each["name"] for each in comparisons} >= {"generalization: routed less routed-retrieval"}
    assert [each["decided"] for each in comparisons] == [False] * len(comparisons)
    precision = training_precision(default_device())
    assert results.details["precisions"] == {"3": precision, str(SEARCH_SEED): precision}
    assert (tmp_path / "out" / "results.json").exists()
    assert read_items(tmp_path / "out" / "items.json").items.keys() == {"backbone", *names}


@pytest.mark.slow
def test_a_quick_run_of_real_pages_has_results_of_its_own(data: Path, tiny_chat_model: Path, tmp_path: Path) -> None:
    options = Options(
        data=data,
        out=tmp_path / "out",
        seeds=(0,),
        quick=True,
        jobs=1,
        backbone=str(tiny_chat_model),
        tables=("pages", "routed", "routed-lookup", "routed-retrieval"),
    )
    results = reproduce("facts", options)
    pages = [f"page-{name}" for name in PageFacts(QUICK_SIZES["pages"], seed=0).pages]
    assert [row.id for row in results.rows] == ["backbone", "routed-lookup", "routed-retrieval", "routed", *pages]
    assert {"unchanged", "unchanged_colliding", "spill_shared"} <= results.row("backbone").metrics.keys()
    assert value_of(results.row("backbone").metrics["unchanged_colliding"]) == 1
    assert value_of(results.row(pages[0]).metrics["opened"]) == 1
    by_ring: Any = results.details["opened"]
    assert by_ring.keys() == {"trained", "unseen", "near", "colliding", "shared", "far", "instructions"}
    assert {"worst", "comparisons"} <= results.details.keys()
    assert "conditions" not in results.details, "nothing was declared"
    assert (tmp_path / "out" / "pages" / "results.json").exists()


@pytest.mark.slow
def test_a_quick_run_of_many_facts(data: Path, tiny_chat_model: Path, tmp_path: Path) -> None:
    tables = ("search", "large", "lora", "routed", "lora-scaled")
    options = Options(data=data, out=tmp_path / "out", quick=True, jobs=1, backbone=str(tiny_chat_model), tables=tables)
    results = reproduce("facts", options)
    assert [row.id for row in results.rows] == ["backbone", "lora-1000", "routed-1000"]
    search_rows: Any = results.details["search_rows"]
    assert {"lora at 0.8", "lora at 0.6"} <= search_rows.keys()
