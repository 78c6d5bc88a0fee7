"""Checkers: a table's rules, sentences of every language, and the published figures on sets of real translations."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.clarify.checkers import KINDS, Checker, CheckerTable, checker, languages
from graftlm.errors import DataError, MissingExtraError, RecipeError

FORMALITY = [
    ("de", "Können Sie mir helfen?", None, "formal"),
    ("de", "Kannst du mir helfen?", None, "informal"),
    ("de", "Geh nach Hause!", None, "informal"),
    ("de", "Habt ihr das gesehen?", None, "informal"),
    ("de", "Sie wissen, was ich meine.", "You know what I mean.", "formal"),
    ("de", "Sie wissen, was ich meine.", "They know what I mean.", None),
    ("de", "Sie ist müde.", "She is tired, you know.", None),
    ("de", "Du meine Güte!", None, None),
    ("de", "Ihr Hund bellt.", "Your dog barks.", "formal"),
    ("de", "Ihr Hund bellt.", "Her dog barks.", None),
    ("fr", "Tu viens ?", None, "informal"),
    ("fr", "Je t’aime.", None, "informal"),
    ("fr", "Où va-t-il ?", None, None),
    ("fr", "Venez ici.", None, "formal"),
    ("fr", "Il a un rendez-vous chez elle.", None, None),
    ("es", "¿Cómo estás?", None, "informal"),
    ("es", "¿Está usted bien?", None, "formal"),
    ("es", "Las casas son grandes.", None, None),
    ("es", "¿Su perro ladra?", "Does your dog bark?", "formal"),
    ("es", "Su perro ladra.", "His dog barks.", None),
    ("it", "Come ti chiami?", None, "informal"),
    ("it", "Guardi molto la TV?", "Do you watch much TV?", "informal"),
    ("it", "Guarda molto la TV?", "Do you watch much TV?", "formal"),
    ("it", "Lei ha ragione.", "You are right.", "formal"),
    ("it", "I libri sono grandi.", None, None),
    ("pt", "Como te chamas?", None, "informal"),
    ("pt", "O senhor tem razão.", None, "formal"),
    ("ja", "行きましたか？", None, "formal"),
    ("ja", "来てください。", None, "formal"),
    ("ja", "どこに行くの？", None, "informal"),
    ("ja", "ますます寒くなる", None, "informal"),
]
GENDER = [
    ("de", "Sie war Lehrerin.", "feminine"),
    ("de", "Er war Lehrer.", "masculine"),
    ("de", "Gómez war Juniorprofessor in Berlin.", "masculine"),
    ("de", "Der Computer steht im Termin.", None),
    ("de", "Sie sind müde.", None),
    ("fr", "Elle est née à Lyon.", "feminine"),
    ("fr", "Nattier fut rédacteur.", "masculine"),
    ("fr", "Denz est rédactrice.", "feminine"),
    ("fr", "C’est une journaliste.", "feminine"),
    ("fr", "Il y a du pain.", None),
    ("es", "La directora murió.", "feminine"),
    ("es", "Él es médico.", "masculine"),
]
IT = [
    ("fr", "Tu peux la prendre ?", "Can you grab it?", "feminine"),
    ("fr", "Mets-le ici.", "Put it here.", "masculine"),
    ("fr", "Faites tout à la gloire de Dieu.", "Do it all to the glory of God.", None),
    ("es", "Puedo verla.", "I can see it.", "feminine"),
    ("es", "Hágalo.", "Do it.", "masculine"),
    ("de", "Er ist neu.", "It is new.", "masculine"),
    ("de", "Er ist neu.", "He is new, isn't it?", None),
    ("de", "Es gibt Brot.", "There is bread.", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("language", "text", "source", "label"), FORMALITY)
def test_formality(language: str, text: str, source: str | None, label: str | None) -> None:
    assert checker("formality", language).check(text, source).label == label


@pytest.mark.slow
@pytest.mark.parametrize(("language", "text", "label"), GENDER)
def test_gender_of_persons(language: str, text: str, label: str | None) -> None:
    assert checker("gender", language).check(text).label == label


@pytest.mark.parametrize(("language", "text", "source", "label"), IT)
def test_gender_of_a_thing(language: str, text: str, source: str, label: str | None) -> None:
    assert checker("it", language).check(text, source).label == label


def test_markers_are_in_text_order() -> None:
    verdict = checker("formality", "fr").check("Vous et tes amis, venez !")
    assert [marker.text for marker in verdict.markers] == ["Vous", "tes", "venez"]
    assert verdict.scores == {"formal": 3, "informal": 2}
    assert verdict.label == "formal"
    assert verdict.mixed
    assert all(verdict.markers[n].reason for n in range(3))


def test_unicode_forms_make_no_difference() -> None:
    german = checker("formality", "de")
    assert german.check("Weißt du, wa\u0308rst").scores == german.check("Weißt du, wärst").scores


def _table(**changes) -> CheckerTable:
    rule = {"label": "a", "words": ["one"], "reason": "a word"}
    values = {"kind": "k", "language": "en", "labels": ["a", "b"], "method": "m", "rules": [rule]}
    return CheckerTable.parse(values | changes)


def _check(text: str, *rules: dict, lists: dict | None = None, source: str | None = None):
    made = [{"label": "a", "reason": "w"} | rule for rule in rules]
    return Checker(_table(rules=made, lists=lists or {})).check(text, source)


def test_words_have_borders_in_every_script() -> None:
    assert [m.text for m in _check("été été2 l’été étés", {"words": ["été"]}).markers] == ["été", "été"]


def test_a_star_takes_any_ending_and_lists_are_filled_in() -> None:
    found = _check("deine dein sein", {"pattern": "{own}"}, lists={"own": "dein*"})
    assert [m.text for m in found.markers] == ["deine", "dein"]


def test_phrases_of_a_list_are_set_apart_by_commas() -> None:
    assert _table(lists={"p": "good day, sir"}).words_of("p") == ["good day", "sir"]


@pytest.mark.parametrize(("position", "expected"), [("anywhere", [0, 9, 13]), ("start", [0, 9]), ("inside", [13])])
def test_position_in_the_sentence(position: str, expected: list[int]) -> None:
    found = _check("One is. “One one”", {"words": ["one"], "position": position})
    assert [marker.start for marker in found.markers] == expected


def test_overlapping_markers_count_once_for_a_label() -> None:
    found = _check("one two", {"words": ["one two"], "weight": 3}, {"words": ["two"]}, {"words": ["one"], "label": "b"})
    assert found.scores == {"a": 3, "b": 1}


def test_equal_scores_give_no_label() -> None:
    found = _check("one two", {"words": ["one"]}, {"words": ["two"], "label": "b"})
    assert found.label is None
    assert found.mixed


def test_source_after_and_unless() -> None:
    rule = {"words": ["one"], "source": "you", "not_source": "she"}
    assert [_check("one", rule, source=s).label for s in (None, "you", "he", "you she")] == [None, "a", None, None]
    assert _check("one", {"words": ["one"], "not_source": "she"}).label == "a"
    assert [_check(t, {"words": ["one"], "after": "the "}).label for t in ("the one", "one", "bathe one")] == [
        "a",
        None,
        None,
    ]
    assert _check("One", {"words": ["one"], "unless": ["{no}"]}, lists={"no": "one"}).label is None


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ([{"label": "c", "words": ["x"], "reason": "w"}], "'c'"),
        ([{"label": "a", "pattern": "{none}", "reason": "w"}], "'none'"),
        ([{"label": "a", "reason": "w"}], "words or a pattern"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(rules: list[dict], named: str) -> None:
    with pytest.raises(RecipeError) as error:
        _table(rules=rules)
    assert named in str(error.value)


def test_unknown_kinds_and_languages_are_named() -> None:
    with pytest.raises(DataError, match=r"'formalty' \(did you mean formality\?\)"):
        checker("formalty", "de")
    with pytest.raises(DataError, match="'pl'.* de, es, fr, ja"):
        checker("gender", "pl")


def test_without_the_dictionary_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[Checker.__module__]
    monkeypatch.setitem(sys.modules, "simplemma", None)
    module._simplemma.cache_clear()
    with pytest.raises(MissingExtraError, match=r"simplemma.*graftlm\[clarify\]"):
        checker("formality", "es").check("¿Cantabas?")
    module._simplemma.cache_clear()


ALL = [(kind, language) for kind in KINDS for language in languages(kind)]


@pytest.mark.parametrize(("kind", "language"), ALL)
def test_tables_compile_and_state_their_method(kind: str, language: str) -> None:
    table = checker(kind, language).table
    assert (table.kind, table.language) == (kind, language)
    assert len(table.method) > 80
    assert all(table.words_of(name) for name in table.lists)


@pytest.mark.slow
@given(text=st.text(alphabet="aeilrsßéñ SIEdutoyMとます。?!.,'’-“\u2028"), source=st.none() | st.text(max_size=8))
def test_any_text_has_a_result(text: str, source: str | None) -> None:
    for kind, language in ALL:
        verdict = checker(kind, language).check(text, source)
        assert set(verdict.scores) == set(checker(kind, language).table.labels)
        assert verdict.label is None or verdict.scores[verdict.label] == max(verdict.scores.values()) > 0
