"""Invented facts: the generator, the judges of answers, the router, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Options, reproduce
from experiments.facts import run
from experiments.facts.generator import FactSet, Question, read_relations
from experiments.facts.instructions import CHECKS, follows, is_checkable
from experiments.facts.items import read_items
from experiments.facts.kept import ARC_EASY, IFEVAL, NATURAL_QUESTIONS, WIKITEXT, far_questions, instruction_prompts
from experiments.facts.lookup import behind_router, lookup_answers, opened
from experiments.facts.metrics import contains, is_right, is_unchanged, judge, shares, spills
from experiments.facts.page_facts import PageFacts, read_pages
from experiments.facts.page_tables import opened_shares, worst_answers
from experiments.facts.precision import training_precision
from experiments.facts.retrieval import Lexicon
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
from experiments.facts.sizes import QUICK_SIZES, SIZES, Size
from experiments.facts.summaries import aims_of, over_seeds, search_score
from experiments.protocol import Comparison, is_decided
from graftlm.backbone import default_device, load_backbone
from graftlm.errors import EvaluationError
from graftlm.evaluation import Interval, Row, value_of

# Pairs of an answer and its judgement, by hand. Accepted are Paris and "the yen"; rivals are Tessaby and 1,851.
RIGHT = [
    ("The capital of France is Paris.", True),
    ("PARIS", True),
    ("It is called the yen.", True),
    ("Parisians live in Paris-sur-Mer.", True),
    ("Parisians live there.", False),
    ("The capital of France is Tessaby.", False),
    ("Paris, also known as Tessaby, is the capital.", False),
    ("Paris has been the capital since 1851.", False),
    ("Paris has been the capital since 18510.", True),
    ("The  yen is a currency.", True),
    ("", False),
    ("The capital is not Paris.", False),
    ("It isn't Paris.", False),
    ("It isn’t in Paris.", False),
    ("The capital is no longer Paris.", False),
    ("The capital was never called Paris.", False),
    ("The currency is not the yen.", False),
    ("Paris is not the capital of France.", False),
    ("Paris isn't the capital.", False),
    ("It is neither Paris nor Rome.", False),
    ("It is not Rome, but Paris.", True),
    ("It is not only Paris.", True),
    ("Paris is not only the capital, but also the largest city.", True),
    ("It is Paris. Paris is not far from Versailles.", True),
    ("It is Paris or Rome.", False),
    ("It is Rome or Paris.", False),
    ("It is Paris, or simply the city of light.", True),
    ("People pay with the yen or dollars.", True),
]

# An answer, the bare model's answer to "Who lives in Vorlia?", and whether the answer spills, by hand. Vorlia, Tessaby,
# "kerbin", "Bralek Tinson" and its two words are taught.
SPILLS = [
    ("People of Vorlia.", "Nobody.", False),
    ("People of Vorlia's capital.", "Nobody.", False),
    ("People of Tessaby.", "Nobody.", True),
    ("People of Tessaby.", "Tessaby is a town.", False),
    ("Tessaby's people.", "Nobody.", True),
    ("Tessaby’s people.", "Nobody.", True),
    ("Tessaby's people.", "People of Tessaby.", False),
    ("They pay 20 kerbins.", "Nobody.", True),
    ("They pay one kerbin.", "Many kerbins.", False),
    ("Kerbins, of course.", "Nobody.", True),
    ("The two Tinsons.", "Nobody.", True),
    ("The Tinsons' house.", "Nobody.", True),
    ("Bralek Tinson does.", "Nobody.", True),
    ("Mr. Tinson does.", "Bralek lives there.", True),
    ("Mr. Bralek does.", "Bralek Tinson lives there.", False),
    ("Tessabyans do.", "Nobody.", False),
    ("Kerbinish people.", "Nobody.", False),
    ("In 1851 nobody did.", "Nobody.", False),
    ("Crimson people.", "Nobody.", False),
    ("People who eat barley at 7:10.", "Nobody.", False),
    ("", "Nobody.", False),
]


@pytest.mark.parametrize(("answer", "expected"), RIGHT)
def test_right_answers(answer: str, expected: bool) -> None:
    assert is_right(answer, ["Paris", "the yen"], ["Tessaby", "1,851"]) == expected


@pytest.mark.parametrize(("answer", "bare", "expected"), SPILLS)
def test_spill(answer: str, bare: str, expected: bool) -> None:
    names = ["Vorlia", "Tessaby", "kerbin", "Bralek Tinson", "Bralek", "Tinson"]
    assert spills(answer, "Who lives in Vorlia?", bare, names) == expected


def test_homographs_are_right_only_as_money() -> None:
    relation = read_relations()["currency"]
    brazil = relation.real["Brazil"]
    korea = relation.real["South Korea"]
    assert is_right("The currency of Brazil is the real.", brazil)
    assert is_right("The currency of Brazil is the Brazilian real (BRL).", brazil)
    assert not is_right("Brazil has a real currency, the dollar.", brazil)
    assert is_right("People pay with the won.", korea)
    assert not is_right("South Korea won the war.", korea)


def test_only_invented_names_can_spill() -> None:
    facts = FactSet(120, seed=0)
    common = {fact.value for fact in facts.facts if fact.relation in ("color", "founded", "opens", "habitat", "height")}
    assert common.isdisjoint(facts.names)
    assert {fact.value for fact in facts.facts if fact.relation in ("capital", "password")} <= facts.names
    assert {fact.subject for fact in facts.facts} <= facts.names
    pages = PageFacts(SIZES["pages"], seed=0)
    assert "James Evans" in pages.names
    assert pages.names.isdisjoint({"1864", "nutmeg", "12 years"})


def test_shares_of_zero_and_one_have_an_interval() -> None:
    """Wilson's interval of 72 of 72 begins at 72 / (72 + 1.96^2) = 0.949."""
    kept = {f"question {number}": 1.0 for number in range(72)}
    spilt = dict.fromkeys(kept, 0.0)
    metrics = over_seeds([{"locality_near": kept, "spill": spilt}] * 3)
    for name, mean, low, high in (("locality_near", 1.0, 0.949, 1.0), ("spill", 0.0, 0.0, 0.051)):
        interval = metrics[name]
        assert isinstance(interval, Interval)
        assert interval.mean == mean
        assert interval.low == pytest.approx(low, abs=1e-3)
        assert interval.high == pytest.approx(high, abs=1e-3)


def test_means_are_over_all_seeds_and_intervals_have_their_spread() -> None:
    """The shares of the seeds are 0.25 and 0.75, so that the mean is 0.5 and an interval contains both."""
    numbers = range(40)
    low = {"generalization": {str(number): float(number % 4 == 0) for number in numbers}}
    high = {"generalization": {str(number): float(number % 4 != 0) for number in numbers}}
    interval = over_seeds([low, high])["generalization"]
    assert isinstance(interval, Interval)
    assert interval.mean == pytest.approx(0.5)
    assert interval.low < 0.3
    assert interval.high > 0.7


def test_a_search_maximizes_what_is_learned_and_kept() -> None:
    items = {
        "generalization": {"a": 1.0, "b": 0.0},
        "locality_near": {"c": 1.0, "d": 1.0, "e": 0.0, "f": 1.0},
        "spill": {"c": 0.0, "d": 0.0, "e": 1.0, "f": 0.0},
    }
    assert search_score(items) == pytest.approx(0.5 + 0.75 - 0.25)
    assert search_score(items, "learned") == pytest.approx(0.5)


def test_aims_are_bounds_in_their_direction() -> None:
    good = {"generalization": 0.95, "locality_near": 0.96, "locality_far": 0.98, "spill": 0.005, "seconds": 600.0}
    bad = {"generalization": 0.85, "locality_near": 0.9, "locality_far": 0.9, "spill": 0.05, "seconds": 2000.0}
    assert {aim.metric for aim in aims_of([Row(id="routed", label="routed", metrics=good)])} == good.keys()
    assert all(aim.met for aim in aims_of([Row(id="routed", label="routed", metrics=good)]))
    assert not any(aim.met for aim in aims_of([Row(id="routed", label="routed", metrics=bad)]))


def test_a_taught_value_of_the_relation_makes_an_answer_wrong() -> None:
    facts = FactSet(120, seed=3)
    for question in [*facts.unseen(), *facts.near()]:
        relation = next(fact.relation for fact in facts.facts if fact.relation == question.relation)
        values = {fact.value for fact in facts.facts if fact.relation == relation}
        assert set(question.rivals) == values - set(question.accepted)
        assert len(question.rivals) > 1
    question = facts.unseen()[0]
    assert is_right(question.accepted[0], question.accepted, question.rivals)
    assert not is_right(f"{question.accepted[0]} {question.rivals[0]}", question.accepted, question.rivals)


def test_answers_are_compared_word_for_word() -> None:
    assert is_unchanged("It is  Paris.", "It is Paris.\n")
    assert not is_unchanged("It is paris.", "It is Paris.")


def test_separators_of_thousands_do_not_matter() -> None:
    assert contains("It is 8848 meters high.", "8,848")
    assert contains("It is 8,848 meters high.", "8848")
    assert not contains("It is 88,848 meters high.", "8,848")


def test_shares_are_taken_of_the_right_questions() -> None:
    questions = [
        Question("a", "unseen", "Capital of Vorlia?", ("Tessaby",)),
        Question("b", "near", "Capital of France?", ("Paris",), ("Tessaby",)),
        Question("c", "near", "Capital of Chad?", ("N'Djamena",), ("Tessaby",)),
        Question("d", "far", "Color of the sky?", ("blue",)),
    ]
    bare = {"a": "I do not know.", "b": "Paris.", "c": "Cairo.", "d": "It is blue."}
    answers = {"a": "Tessaby", "b": "It is Tessaby.", "c": "Cairo.", "d": "It is blue."}
    items = judge(questions, answers, bare, ["Vorlia", "Tessaby"])
    assert items["locality_near"] == {"b": 0.0}, "the bare model did not answer c right"
    assert shares(items) == {
        "generalization": 1.0,
        "locality_near": 0.0,
        "locality_far": 1.0,
        "unchanged": pytest.approx(2 / 3),
        "spill": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("count", [16, 120, 1000])
def test_facts_are_invented_and_differ(count: int) -> None:
    facts = FactSet(count, seed=0, known=["tessaby"])
    assert len(facts.facts) == count
    assert len({(fact.relation, fact.subject) for fact in facts.facts}) == count
    assert len(facts.conversations()) == 4 * count
    invented = [fact.value for fact in facts.facts if fact.relation in ("capital", "author")]
    assert len(set(invented)) == len(invented)


def test_no_invented_word_is_known() -> None:
    words = {fact.subject.lower() for fact in FactSet(60, seed=0).facts}
    others = {fact.subject.lower() for fact in FactSet(60, seed=0, known=words).facts}
    assert words.isdisjoint(others)


def test_facts_depend_on_the_seed_only() -> None:
    assert FactSet(30, seed=1).facts == FactSet(30, seed=1).facts
    assert FactSet(30, seed=1).conversations() == FactSet(30, seed=1).conversations()
    subjects = {fact.subject for fact in FactSet(30, seed=1).facts}
    assert subjects.isdisjoint(fact.subject for fact in FactSet(30, seed=2).facts)


def test_a_part_of_a_name_is_a_name_too() -> None:
    facts = FactSet(16, seed=0)
    (author,) = [fact.value for fact in facts.facts if fact.relation == "author"]
    assert {author, *author.split()} <= facts.names


def test_held_out_phrasings_are_never_trained() -> None:
    facts = FactSet(40, seed=0)
    trained = {row["messages"][0]["content"] for row in facts.conversations()}
    assert all(question.text in trained for question in facts.trained())
    asked = [*facts.unseen(), *facts.two_steps(), *facts.near()]
    assert not any(question.text in trained for question in asked)
    assert len({question.id for question in asked}) == len(asked)


def test_taught_answers_are_right_and_name_no_rival() -> None:
    facts = FactSet(120, seed=0)
    for fact, question in zip(facts.facts, facts.unseen(), strict=True):
        assert is_right(facts.statement(fact), question.accepted, question.rivals), question


def test_search_and_test_share_neither_held_out_phrasings_nor_near_things() -> None:
    search = FactSet(120, seed=0, part="search")
    test = FactSet(120, seed=0)
    assert search.facts == test.facts
    assert search.conversations() == test.conversations()
    for of_part, phrasing in ((search, 4), (test, 5)):
        asked = [of_part.question(fact, phrasing) for fact in of_part.facts]
        assert [question.text for question in of_part.unseen()] == asked
        assert [row["messages"][0]["content"] for row in of_part.tested()] == asked
    of_search = {question.id: question.text for question in search.near()}
    of_test = {question.id: question.text for question in test.near()}
    assert len(of_search) == len(of_test) == 67
    assert of_search.keys().isdisjoint(of_test)
    relations = read_relations()
    for text in of_search.values():
        assert not any(is_phrased(text, relation.questions[5]) for relation in relations.values())
    for text in of_test.values():
        assert not any(is_phrased(text, relation.questions[4]) for relation in relations.values())


def is_phrased(text: str, phrasing: str) -> bool:
    start, end = phrasing.split("{subject}")
    return text.startswith(start) and text.endswith(end)


def test_colliding_questions_name_what_is_taught_and_ask_something_else() -> None:
    by_seed = [FactSet(120, seed=seed) for seed in (3, 4)]
    for facts in by_seed:
        questions = facts.colliding()
        assert len(questions) == 30
        assert set(questions) <= set(facts.further())
        assert len({question.text for question in questions}) == 30
        taught = {facts.question(fact, phrasing) for fact in facts.facts for phrasing in range(6)}
        assert taught.isdisjoint(question.text for question in questions)
        subjects = {fact.subject for fact in facts.facts}
        for question in questions:
            assert any(subject in question.text for subject in subjects)
            assert question.accepted == ()
        kinds = {relation.subject for relation in facts.relations.values()}
        assert {question.id.split("-")[1] for question in questions} == kinds
    ids = [[question.id for question in facts.colliding()] for facts in by_seed]
    assert ids[0] == ids[1]


def test_every_relation_has_six_phrasings_of_one_question() -> None:
    relations = read_relations()
    assert len(relations) >= 12
    assert sum(len(relation.real) for relation in relations.values()) >= 100
    for relation in relations.values():
        assert len(set(relation.questions)) == 6
        assert all("{subject}" in question for question in relation.questions)


def test_questions_of_two_steps_name_one_fact_and_ask_for_another() -> None:
    facts = FactSet(16, seed=0)
    by_value = {fact.value: fact for fact in facts.facts}
    for question in facts.two_steps():
        (accepted,) = question.accepted
        assert accepted not in question.text
        assert by_value[accepted].subject not in question.text


def test_a_lookup_answers_taught_questions_and_leaves_the_others(tiny_chat_model: Path) -> None:
    facts = FactSet(16, seed=0)
    questions = [*facts.unseen(), *facts.near()]
    bare = {question.id: "bare" for question in questions}
    backbone = load_backbone(str(tiny_chat_model))
    opening = opened(backbone, facts, questions)
    in_front = behind_router(backbone, facts, questions, {question.id: "facts" for question in questions}, bare)
    assert {name for name, answer in in_front.items() if answer == "facts"} == opening
    assert {question.id for question in facts.unseen()} <= opening
    answers = lookup_answers(load_backbone(str(tiny_chat_model)), facts, questions, bare)
    statements = {facts.statement(fact) for fact in facts.facts}
    for question in facts.unseen():
        assert answers[question.id] in statements
    right = [is_right(answers[question.id], question.accepted) for question in facts.unseen()]
    assert sum(right) > 0.8 * len(right)
    unlike = Question(id="unlike", ring="far", text="a c d", accepted=("x",))
    assert lookup_answers(load_backbone(str(tiny_chat_model)), facts, [unlike], {"unlike": "bare"}) == {
        "unlike": "bare"
    }


def test_pages_have_facts_in_six_phrasings_and_three_sorts_of_other_questions() -> None:
    pages = read_pages()
    assert len(pages) == 10
    for page in pages.values():
        assert page["address"].startswith("https://")
        assert len(page["facts"]) >= 6
        assert all(len(set(fact["questions"])) == 6 for fact in page["facts"])
        assert len(page["near"]) >= 4
        assert len(page["colliding"]) >= 4
        assert len(page["shared"]) >= 2
    facts = PageFacts(SIZES["pages"], seed=0)
    assert len(facts.facts) == sum(len(page["facts"]) for page in pages.values())


def test_held_out_phrasings_and_other_questions_of_pages_are_never_trained() -> None:
    facts = PageFacts(SIZES["pages"], seed=0)
    trained = {row["messages"][0]["content"] for row in facts.conversations()}
    assert len(trained) == 4 * len(facts.facts)
    assert all(question.text in trained for question in facts.trained())
    asked = [*facts.unseen(), *facts.near(), *facts.further()]
    assert not any(question.text in trained for question in asked)
    assert len({question.id for question in asked}) == len(asked)


def test_taught_answers_of_pages_are_right_and_name_no_rival() -> None:
    facts = PageFacts(SIZES["pages"], seed=0)
    for question, tested in zip(facts.unseen(), facts.tested(), strict=True):
        asked, answer = tested["messages"]
        assert question.text == asked["content"]
        assert is_right(answer["content"], question.accepted, question.rivals), question


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


# An instruction with its arguments, an answer that follows it, and one that does not.
INSTRUCTIONS = [
    ("punctuation:no_comma", {}, "One two.", "One, two."),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "One two three.", "One two."),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "One two.", "One two three."),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "A rocket.", "A Rock."),
    ("keywords:existence", {"keywords": ["moon", "sun"]}, "Sun and moon", "Sunset"),
    ("keywords:frequency", {"relation": "at least", "keyword": "a", "frequency": 2}, "a A", "a"),
    ("keywords:letter_frequency", {"let_relation": "less than", "letter": "t", "let_frequency": 2}, "at", "Tat"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_format:title", {}, "<<Title>>\ntext", "<< >>"),
    ("startend:quotation", {}, '"text"', 'text"'),
    ("change_case:english_lowercase", {}, "text", "Text"),
    ("change_case:english_capital", {}, "TEXT", "TEXt"),
    ("startend:end_checker", {"end_phrase": "The end."}, "So it goes. The end.", "The end. Not quite"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text\nP.S. more", "Text"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
]


@pytest.mark.parametrize(("kind", "arguments", "good", "bad"), INSTRUCTIONS)
def test_instructions(kind: str, arguments: dict[str, object], good: str, bad: str) -> None:
    question = Question("a", "instructions", "Write.", instructions=((kind, arguments),))
    assert follows(good, question)
    assert not follows(bad, question)
    assert not follows(" ", question)


def test_every_check_is_tested() -> None:
    assert {kind for kind, *_ in INSTRUCTIONS} == set(CHECKS)
    assert not is_checkable(["punctuation:no_comma", "language:response_language"])


def test_the_nearest_texts_share_rare_words() -> None:
    lexicon = Lexicon(["The capital of Vorlia is Tessaby.", "The capital of Brenia is Nora.", "Grass is green."])
    assert lexicon.nearest("What is the capital of Brenia?", 2) == [1, 0]
    assert lexicon.likeness("Grass is green.")[2] == pytest.approx(1)


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
def test_search_and_test_read_every_conversation_three_times(data: Path, tmp_path: Path, table: str) -> None:
    """A step has four rows of two conversations. Rows with old text, half of each step, take twice as many steps."""
    facts = study(data, tmp_path)
    size = facts.size(table)
    conversations = 4 * size.facts
    assert facts.steps("lora", size) * 8 == 3 * conversations
    assert facts.steps("lora-near", size) * 4 == 3 * conversations
    assert facts.steps("lora-own", size) == facts.steps("lora-near", size)


def test_a_row_is_trained_at_the_rate_and_seed_of_its_run_beside_its_old_text(data: Path, tmp_path: Path) -> None:
    facts = study(data, tmp_path)
    size = facts.size("main")
    for name in ("lora", "routed"):
        training = facts._training(name, 5e-4, size, 4)
        assert (training.learning_rate, training.seed) == (5e-4, 4)
    assert not facts._data("lora", size, 4).old
    for name in ("lora-own", "lora-near", "neutral-near"):
        assert facts._data(name, size, 4).old_objective == "distil"
        assert facts._data(name, size, 4).old


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
