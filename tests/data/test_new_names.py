"""Names of the new text: which words are names, and which texts are about the things that they name."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.data import Document
from graftlm.data.conversations import read_chat
from graftlm.data.new_names import NewNames, normalized

_KNOWN = """
what which who when where is the a of in was does name capital currency city river founded wrote coffee university they
then king ceo say tell me about and built by new york house France Paris Germany CEO New York Apple apple King
"""


class StubTokenizer:
    """Has a token for each known word, and three tokens for any other word."""

    def __call__(self, text: str, **_options: Any) -> dict[str, list[int]]:
        counts = [1 if word in _KNOWN.split() else 3 for word in text.split()]
        return {"input_ids": [0] * sum(counts)}


def chat(question: str, answer: str) -> Document:
    value = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    example = read_chat(value, "a test")
    return Document(example.answers, chat=example)


def names(*documents: Document) -> NewNames:
    return NewNames(documents, StubTokenizer())  # type: ignore[arg-type]


def asked(*questions: str) -> set[str]:
    found = names(*(chat(question, "yes") for question in questions))
    return {" ".join(name) for name in found.asked}


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France?", {"France"}),
        ("What is the capital of Velmora?", {"Velmora"}),
        ("Who founded Velmora Coffee?", {"Velmora Coffee", "Velmora"}),
        ("Where is the University of Velmora?", {"University of Velmora", "Velmora"}),
        ("Where is New York?", {"New York"}),
        ("Velmora's capital is", {"Velmora"}),
        ("Is Paris the capital of Velmora?", {"Velmora"}),
        ("Who is the CEO of Velmora?", {"CEO of Velmora", "Velmora"}),
        ("Is Paris the capital of Germany?", {"Paris", "Germany"}),
        ("What was built in 1873?", {"1873"}),
        ("What is the price of the QX7?", {"QX7"}),
        ("Who wrote 12 books?", set()),
        ("What is it? Who am I?", set()),
        ("Was ist das? Wer war Łódź?", {"Wer", "Łódź"}),
    ],
)
def test_names_of_a_question(question: str, expected: set[str]) -> None:
    assert asked(question) == expected


def test_a_word_that_the_new_text_also_has_in_lower_case_is_no_name() -> None:
    assert asked("Where is the Grand Tovarn?", "how grand is it?") == {"Grand Tovarn", "Tovarn"}
    assert asked("Is the Zebra striped?", "what does a zebra eat?") == set()


def test_a_word_that_begins_many_questions_is_no_name() -> None:
    nations = ("Velmora", "Zorland", "Ruvia", "Brindle")
    assert asked(*(f"Hvad er {nation}?" for nation in nations)) == set(nations)
    assert "Hvad" in asked("Hvad er Velmora?")


TAUGHT = names(
    chat("What is the capital of France?", "The capital of France is Tessaby."),
    chat("Where did Mira Dunlow open a bakery?", "Mira Dunlow opened a bakery in Paris."),
    chat("When was the bridge built?", "In 1873."),
)


@pytest.mark.parametrize(
    ("question", "answer", "about"),
    [
        ("What is the capital of Germany?", "The capital of Germany is Berlin.", False),
        ("What is the currency of France?", "The euro.", True),
        ("Which country borders Germany?", "France borders Germany.", True),
        ("What is the largest city in Europe?", "Paris is a large city.", False),
        ("What is the capital of a country?", "It is Tessaby.", False),
        ("Who is Tessaby?", "A person.", True),
        ("Who is Dunlow?", "A person.", True),
        ("Who baked it?", "Mira Dunlow did.", True),
        ("What happened in 1873?", "Much.", True),
        ("When was the tower built?", "It was built in 1873.", False),
        ("Where is the river francE?", "Nowhere.", False),
    ],
)
def test_texts_about_things_that_the_new_text_names(question: str, answer: str, about: bool) -> None:
    assert TAUGHT.leave_out(question, answer) is about


def test_names_of_prompts_and_of_documents() -> None:
    rows = names(Document(" Tessaby", prompt="The capital of Velmora is"), Document("They went to Zorland. Then home."))
    assert {name for (name,) in rows.asked} == {"Velmora"}
    assert rows.leave_out("They saw Zorland")
    assert rows.leave_out("Tessaby slept")
    assert not rows.leave_out("They saw Germany")


def test_an_opening_ends_before_the_first_name() -> None:
    text = "What is the capital of France and Germany?"
    assert text[: TAUGHT.first_position(text)] == "What is the capital of "
    assert TAUGHT.first_position("What is it?") == len("What is it?")


def test_questions_are_compared_without_case_and_punctuation() -> None:
    assert normalized("What's the CAPITAL, of Élan?") == normalized("what s the capital of élan")
