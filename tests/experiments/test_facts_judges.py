"""How answers of the facts experiment are judged: right answers, spill, instructions, shares, search scores."""

from __future__ import annotations

import pytest

from experiments.facts.generator import FactSet, Question, read_relations
from experiments.facts.instructions import CHECKS, follows, is_checkable
from experiments.facts.metrics import contains, is_right, is_unchanged, judge, shares, spills
from experiments.facts.page_facts import PageFacts
from experiments.facts.sizes import SIZES
from experiments.facts.summaries import aims_of, over_seeds, search_score
from graftlm.evaluation import Interval, Row

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
