"""Invented facts, facts of real pages, their questions, and the lookup of nearest texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.facts.generator import FactSet, Question, read_relations
from experiments.facts.lookup import behind_router, lookup_answers, most_frequent_answers, opened
from experiments.facts.metrics import is_right
from experiments.facts.page_facts import PageFacts, read_pages
from experiments.facts.retrieval import Lexicon
from experiments.facts.sizes import SIZES
from graftlm.backbone import load_backbone


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


def test_the_most_frequent_answer_of_a_relation_is_right_as_often_as_it_is_taught() -> None:
    facts = FactSet(120, seed=0)
    questions = [*facts.unseen(), *facts.near()]
    answers = most_frequent_answers(facts, questions)
    for relation in {question.relation for question in facts.unseen()}:
        values = [fact.value for fact in facts.facts if fact.relation == relation]
        most = max(values.count(value) for value in values)
        asked = [question for question in facts.unseen() if question.relation == relation]
        right = [question for question in asked if is_right(answers[question.id], question.accepted)]
        assert len(right) * len(values) == most * len(asked)


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


def test_the_nearest_texts_share_rare_words() -> None:
    lexicon = Lexicon(["The capital of Vorlia is Tessaby.", "The capital of Brenia is Nora.", "Grass is green."])
    assert lexicon.nearest("What is the capital of Brenia?", 2) == [1, 0]
    assert lexicon.likeness("Grass is green.")[2] == pytest.approx(1)
