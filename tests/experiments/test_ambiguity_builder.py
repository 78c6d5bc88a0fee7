"""Which sentences of parallel text get a label, and why others are rejected; parses are written by hand."""

from __future__ import annotations

import re

import pytest

from experiments.clarify.builder import AmbiguitySet, build_ambiguity_set
from experiments.clarify.checkers import checker
from experiments.clarify.datasets import ParallelDocument, SentencePair
from graftlm.errors import DataError
from graftlm.pipelines.clarify.ambiguity import Token

FILLER = ("Nothing happened there.", "Rien.")
SHARED = "a form that several persons share"


def built(language: str, kind: str, *pairs: tuple[str, str], parser=None) -> AmbiguitySet:
    rows = [FILLER, FILLER, FILLER, *pairs]
    document = ParallelDocument(
        "d", tuple(SentencePair(f"d:{n}", source, target) for n, (source, target) in enumerate(rows))
    )
    return build_ambiguity_set([document], language, kinds=[kind], parser=parser)


def labels(found: AmbiguitySet) -> list[str | None]:
    return [example.label for example in found.examples]


def reasons(found: AmbiguitySet) -> dict[str, int]:
    return next(iter(found.rejected.values()))


def parsed(text: str, **relations: str) -> Token | object:
    """A parser that knows one sentence, by `word="POS relation head"`, and takes other words for unattached ones."""

    def parse(asked: str) -> list[Token]:
        words = list(re.finditer(r"\w+", asked))
        places = {word[0]: place for place, word in reversed(list(enumerate(words)))}
        tokens = []
        for place, word in enumerate(words):
            pos, dep, head = relations.get(word[0], "X dep -").split() if asked == text else ("X", "dep", "-")
            tokens.append(Token(word[0], word[0].lower(), pos, "NN", dep, places.get(head, place), word.start()))
        return tokens

    return parse


# Formality.


def test_a_plural_form_is_polite_where_nobody_is_addressed_otherwise() -> None:
    assert labels(built("fr", "formality", ("Are you sure?", "Êtes-vous sûre ?"))) == ["formal"]


@pytest.mark.parametrize(
    "other",
    [
        ("Come here.", "Viens ici, toi."),
        ("I wrote to all of you.", "J'ai écrit."),
        ("Help each other.", "Aidez-vous les uns les autres."),
        ("Ready?", "Êtes-vous prêts ?"),
    ],
)
def test_a_plural_form_says_nothing_where_several_may_be_meant(other: tuple[str, str]) -> None:
    found = built("fr", "formality", ("Are you sure?", "Êtes-vous sûre ?"), other)
    assert "d:3:formality" not in [example.id for example in found.examples]
    assert reasons(found)[SHARED] >= 1


@pytest.mark.slow
def test_a_form_of_one_person_needs_nothing_more() -> None:
    around = ("I wrote to all of you.", "Os he escrito.")
    assert labels(built("es", "formality", ("Are you sure?", "¿Está usted segura?"), around))[0] == "formal"
    assert "formal" not in labels(built("es", "formality", ("Are you sure?", "¿Están ustedes seguros?"), around))


def test_weak_markers_decide_no_label() -> None:
    found = built("es", "formality", ("Can you go?", "¿Se puede ir?"))
    assert checker("formality", "es").check("¿Se puede ir?", "Can you go?").label == "formal"
    assert reasons(found) == {"no marker that decides alone": 1}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("When you travel, take a map.", "you that may be people in general"),
        ("You never know.", "you that may be people in general"),
        ("They saw you.", "pronouns of others, which the polite form may stand for"),
        ("You and thy house.", "thou and ye, which show the form"),
    ],
)
def test_sentences_that_leave_a_doubt_about_you(source: str, reason: str) -> None:
    assert reasons(built("de", "formality", (source, "Sie wissen es."))) == {reason: 1}


def test_dialogue_is_kept() -> None:
    assert labels(built("de", "formality", ("When you travel, call me.", "Wenn du reist, ruf mich an."))) == [
        "informal"
    ]
    assert labels(built("fr", "formality", ("They saw you.", "On t'a vu."))) == ["informal"]


@pytest.mark.parametrize("quota", [1, 2, None])
def test_each_kind_and_language_has_at_most_its_quota(quota: int | None) -> None:
    rows = [FILLER] * 3
    for _ in range(3):  # a sentence of each kind, and two words of several meanings in one sentence
        rows += [("Are you sure?", "Êtes-vous sûre ?"), ("The nurse left.", "L'infirmière est partie.")]
        rows += [("The seal sat on the bank.", "Le phoque était assis sur la rive.")]
    pairs = tuple(SentencePair(f"d:{n}", source, target) for n, (source, target) in enumerate(rows))
    kinds = ("formality", "profession", "polysemy")
    found = build_ambiguity_set([ParallelDocument("d", pairs)], "fr", kinds=kinds, quota=quota)
    counts = [sum(example.kind == kind for example in found.examples) for kind in kinds]
    whole = [3, 3, 6]
    assert counts == [count if quota is None else min(count, quota) for count in whole]


def test_a_quota_of_nothing_is_refused() -> None:
    with pytest.raises(DataError):
        build_ambiguity_set([], "fr", quota=0)


# It.

SOLD = {"We": "PRON nsubj sold", "sold": "VERB root sold", "it": "PRON obj sold"}
FELL = {"It": "PRON nsubj fell", "fell": "VERB root fell"}


def it(language: str, source: str, target: str, **relations: str) -> AmbiguitySet:
    return built(language, "it", (source, target), parser=parsed(source, **relations))


def test_a_pronoun_in_the_role_of_it_decides() -> None:
    assert labels(it("fr", "We sold it.", "Nous la vendions.", **SOLD)) == ["feminine"]
    assert labels(it("fr", "It fell.", "Il tomba.", **FELL)) == ["masculine"]
    assert labels(it("es", "We sold it.", "No lo vendimos.", **SOLD)) == ["masculine"]
    assert labels(it("de", "We sold it.", "Wir haben ihn verkauft.", **SOLD)) == ["masculine"]


@pytest.mark.parametrize(
    ("language", "source", "target", "relations"),
    [
        ("fr", "We sold it.", "Elle fut vendue.", SOLD),
        ("fr", "It fell.", "On peut la voir.", FELL),
        ("de", "We sold it.", "Er wurde verkauft.", SOLD),
    ],
)
def test_a_pronoun_in_another_role_does_not(language: str, source: str, target: str, relations: dict) -> None:
    assert reasons(it(language, source, target, **relations)) == {"a pronoun in another role": 1}


def test_neuter_pronouns_decide_nothing() -> None:
    found = it("de", "It fell.", "Es fiel.", **FELL)
    assert reasons(found) == {"neuter, which stands for clauses and for nothing as well": 1}


@pytest.mark.parametrize(
    ("source", "relations", "reason"),
    [
        (
            "We know it.",
            {"We": "PRON nsubj know", "know": "VERB root know", "it": "PRON obj know"},
            "a verb of saying or doing: it may stand for a clause",
        ),
        ("We sold it out.", SOLD | {"out": "ADP prt sold"}, "a clause or a particle depends on its verb"),
        ("We sold it to go.", SOLD | {"go": "VERB xcomp sold"}, "a clause or a particle depends on its verb"),
        (
            "It be blue to go.",
            {"It": "PRON nsubj be", "be": "AUX root be", "blue": "ADJ acomp be", "go": "VERB xcomp blue"},
            "a clause or a particle depends on its verb",
        ),
        ("It be here.", {"It": "PRON nsubj be", "be": "AUX root be"}, "a noun or a place after be"),
    ],
)
def test_a_masculine_one_may_stand_for_a_clause(source: str, relations: dict[str, str], reason: str) -> None:
    masculine, feminine = (
        ("Il est là.", "Elle est là.") if relations.get("It") else ("On le voit, je le dis.", "Je la dis.")
    )
    (found,) = reasons(it("fr", source, masculine, **relations))
    assert found.startswith(reason)
    assert labels(it("fr", source, feminine, **relations)) == ["feminine"], "a feminine one may not"


@pytest.mark.parametrize(
    ("source", "relations", "reason"),
    [
        ("Paris sold it.", SOLD | {"Paris": "PROPN nsubj sold"}, "a referent in the sentence itself"),
        (
            "As it fell, the tree broke.",
            {
                "it": "PRON nsubj fell",
                "fell": "VERB advcl broke",
                "tree": "NOUN nsubj broke",
                "broke": "VERB root broke",
            },
            "a referent in the sentence itself",
        ),
        ("We spoke of it.", {"it": "PRON pobj of"}, "it that is neither subject nor object"),
    ],
)
def test_sentences_that_leave_a_doubt_about_it(source: str, relations: dict[str, str], reason: str) -> None:
    assert reasons(it("fr", source, "Je la vois.", **relations)) == {reason: 1}


def test_by_words_alone_roles_are_not_known() -> None:
    assert labels(built("fr", "it", ("Can we sell it?", "Elle est vendue ?"))) == ["feminine"]
    found = built("fr", "it", ("Can we do it?", "On peut le faire ?"))
    assert reasons(found) == {"a verb of saying or doing: it may stand for a clause": 1}


# Names.


@pytest.mark.parametrize(("relation", "kept"), [("nsubj", True), ("obj", False)])
def test_names_beside_others_are_subjects(relation: str, kept: bool) -> None:
    source = "Riley Smith saw Paris"
    relations = {"Riley": f"PROPN {relation} saw", "Smith": "PROPN flat Riley", "Paris": "PROPN obj saw"}
    after = [("She left.", "x"), FILLER, FILLER]
    found = built("fr", "name", (source, "x"), *after, parser=parsed(source, **relations))
    assert labels(found) == (["feminine"] if kept else [])
    alone = "Riley Smith left"
    found = built(
        "fr", "name", (alone, "x"), *after, parser=parsed(alone, Riley="PROPN obj left", Smith="PROPN flat Riley")
    )
    assert labels(found) == ["feminine"], "a surname is no other name"
