"""Names of common words are found by the capital letters of their words."""

from __future__ import annotations

import pytest

from graftlm.grafts.token_routing.names import names_in

NAMES = {
    "What does Dice Theme Park cost?": {"Dice Theme Park"},
    "Who wrote the Ledger of the Seven Lamps?": {"Ledger of the Seven"},  # the first four words of a longer name
    "When was King's Landing built, and the Blue-Green Lamp?": {"King s Landing", "Blue Green Lamp"},
    "Does the shop in Paris, France open on Monday?": set(),  # two names of one word each
    "Dice Theme Park costs what?": set(),
    'Is "Dice Theme Park" a game?': {"Dice Theme Park"},
    "Is Dice Theme Park a game?": set(),
    "When I visit it, what do I pay?": set(),
    "Is a Plan B in the Model 3?": set(),
    "is it in Windows Eleven 24 today": {"Windows Eleven 24"},
    "It is cold. The Big Lamp is off.\nOn Big Lamp Day it is on.": set(),
    "How cold is it on Big Lamp Day? Who is on Lamp Island?": {"Big Lamp Day", "Lamp Island"},
    "WHO RUNS THE BIG LAMP?": set(),
    "What Is The Big Lamp?": set(),
    "wie heißt die Große Straße von Österreich": {"Große Straße von Österreich"},
    "何ですか": set(),
    "": set(),
}


@pytest.mark.parametrize("text", NAMES)
def test_names_are_runs_of_words_with_capital_letters(text: str) -> None:
    assert names_in(text) == NAMES[text]
