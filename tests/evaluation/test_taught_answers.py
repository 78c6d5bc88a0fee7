"""A taught question is answered rightly if the answer has what the taught one says beyond the question."""

from __future__ import annotations

import pytest

from graftlm.evaluation.taught_answers import evenly_spaced, gives_taught

PUMP = "What is the part number of the Velmor pump?"
PHONE = "What is the phone extension of Mira Oduya?"
LONG = (
    "You reach Mira Oduya by dialling 555-0123 from any phone in the building, or by asking at the desk of the second "
    "floor for her."
)


@pytest.mark.parametrize(
    ("question", "taught", "given"),
    [
        (PUMP, "The part number of the Velmor pump is QX-77-B.", "It is QX-77-B."),
        (PUMP, "The part number of the Velmor pump is QX-77-B.", "The Velmor pump has the part number qx-77-b!"),
        (PHONE, "The phone extension of Mira Oduya is 2290.", "The phone extension of Mira Oduya is 2290."),
        ("What is the offset?", "The offset is -5 volts.", "-5 volts."),
        ("Who runs Vorlia?", "Ada Quix runs Vorlia.", "Vorlia is run by Ada Quix."),
        ("Is it open?", "It is.", "it is"),
        ("How do I reach Mira Oduya?", LONG, LONG),
    ],
)
def test_answers_with_the_taught_value_are_right(question: str, taught: str, given: str) -> None:
    assert gives_taught(question, taught, given)


@pytest.mark.parametrize(
    ("question", "taught", "given"),
    [
        (PUMP, "The part number of the Velmor pump is QX-77-B.", "The part number of the Velmor pump is QX-77-C."),
        (PUMP, "The part number of the Velmor pump is QX-77-B.", "The Velmor pump has a part number."),
        (PHONE, "The phone extension of Mira Oduya is 2290.", "Mira Oduya."),
        (PHONE, "The phone extension of Mira Oduya is 2290.", "The phone extension of Mira Oduya."),
        ("What is the address?", "The address of the gate server is 10.0.0.1.", "The gate server has 10.1.0.0."),
        ("What is the offset?", "The offset is -5 volts.", "The offset is 5 volts."),
        ("Who runs the plant?", "ada quix runs the plant with bob lind", "ada stone runs the plant with bob marsh"),
        ("What colors has the flag?", "The Velmor flag is red and white.", "The Velmor flag is red and black."),
        ("Wann?", "Die Kantine ist am Montag nicht offen.", "Die Kantine ist am Montag offen."),
        ("Is the gate open?", "The gate is open.", "The gate is not open."),
        ("Is it open?", "It is.", "it is not"),
        ("How do I reach Mira Oduya?", LONG, LONG.replace("0123", "0999")),
        ("How do I reach Mira Oduya?", LONG, "By 555-0123, said a man who likes to swim in cold lakes at night."),
        (PUMP, "The part number of the Velmor pump is QX-77-B.", ""),
    ],
)
def test_other_answers_are_wrong(question: str, taught: str, given: str) -> None:
    assert not gives_taught(question, taught, given)


@pytest.mark.parametrize("number", [0, 1, 23, 24, 25, 36, 47, 60, 480])
def test_chosen_items_are_spread_over_all(number: int) -> None:
    chosen = evenly_spaced(range(number), 24)
    assert len(chosen) == len(set(chosen)) == min(number, 24)
    if number:
        assert chosen[0] == 0
        assert number - chosen[-1] <= max(1, -(-number // 24))
