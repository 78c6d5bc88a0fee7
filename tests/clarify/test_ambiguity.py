"""Detection by words alone, and on parses: written by hand, or of a real parser if there is one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from experiments.clarify.parsing import from_spacy, from_stanza, load_parser
from graftlm.errors import DataError
from graftlm.pipelines.clarify.ambiguity import detect, polysemous_words, word_list

CHEAP = [
    ("Are you sure it is pretty?", {"formality", "it"}),
    ("It is raining.", set()),
    ("It's hard to say.", set()),
    ("Is it possible to pay by card?", set()),
    ("It seems that they left.", set()),
    ("It was John who called.", set()),
    ("It’s late.", set()),
    ("Make it quick.", set()),
    ("Put it there.", {"it"}),
    ("Thank you.", set()),
    ("Sir, are you ready?", set()),
    ("Your dog barks.", {"formality"}),
    ("bank", {"polysemy"}),
    ("I went to the bank to open an account.", set()),
    ("Riley is here.", {"name"}),
    ("Riley lost her keys, and that is all.", set()),
    ("We saw Joan Riley.", set()),
    ("Berners-Riley is here.", set()),
    ("The Riley River is here.", set()),
    ("Mrs. Riley is here.", set()),
    ("The doctor left.", {"profession"}),
    ("The doctors left.", set()),
    ("The doctor lost his way.", set()),
    ("They cook well.", set()),
    ("The cook left.", {"profession"}),
]


@pytest.mark.parametrize(("text", "kinds"), CHEAP)
def test_by_words_alone(text: str, kinds: set[str]) -> None:
    assert set(detect(text).kinds) == kinds


def test_positions_reasons_and_senses() -> None:
    first, second = detect("Is it near the bank?").ambiguities
    assert (first.word, first.start, second.word, second.start) == ("it", 3, "bank", 15)
    assert first.reason
    assert [sense.gloss for sense in second.senses] == ["money", "the side of a river"]


def test_limitations_without_a_parser_are_listed() -> None:
    assert any("imperatives" in one for one in detect("Go.").limitations)
    assert detect("Go.", parser=lambda text: []).limitations == ()


def test_the_context_decides_names_occupations_and_words() -> None:
    assert detect("The doctor left.", context=["He was tired."]).kinds == ()
    assert detect("The doctor left.", context=["He met her."]).kinds == ("profession",)
    assert detect("We reached the bank.", context=["The river was wide."]).kinds == ()


def test_kinds_that_make_no_difference_in_a_language_are_ignored() -> None:
    assert detect("The doctor saw the capital.", language="ja").kinds == ("polysemy",)
    assert detect("the capital", language="es").kinds == ()  # one word serves both meanings
    assert detect("the capital", language="de").kinds == ("polysemy",)
    assert detect("You and it", kinds=["it"]).kinds == ("it",)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(DataError) as error:
        detect("bank", kinds=["polysemi"])
    assert "'polysemi' (did you mean polysemy?)" in str(error.value)


def _parse(*rows: tuple[str, str, str, str, int]):
    """A parser that knows one sentence: word, part of speech, tag, relation, head."""
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
    words, parts, tags, relations, heads = (list(column) for column in zip(*rows, strict=True))
    vocab = spacy.blank("en").vocab
    lemmas = [word.lower() for word in words]
    document = spacy.tokens.Doc(vocab, words=words, pos=parts, tags=tags, deps=relations, heads=heads, lemmas=lemmas)
    return document.text, (lambda text: from_spacy(document))


def _kinds(*rows: tuple[str, str, str, str, int]) -> tuple[str, ...]:
    text, parser = _parse(*rows)
    return detect(text, parser=parser).kinds


def test_a_parse_detects_imperatives() -> None:
    close = (("Close", "VERB", "VB", "ROOT", 0), ("the", "DET", "DT", "det", 2), ("door", "NOUN", "NN", "dobj", 0))
    assert _kinds(*close) == ("formality",)
    assert _kinds(("We", "PRON", "PRP", "nsubj", 1), ("close", "VERB", "VB", "ROOT", 1)) == ()


def test_a_parse_detects_antecedents() -> None:
    before = (("Cars", "NOUN", "NNS", "nsubj", 1), ("break", "VERB", "VBP", "ROOT", 1))
    it = (("sell", "VERB", "VBP", "conj", 1), ("it", "PRON", "PRP", "dobj", 2))
    assert _kinds(*before, *it) == ("it",)
    assert _kinds(("Cars", "NOUN", "NN", "nsubj", 1), *before[1:], *it) == ()


def test_a_parse_detects_expletives() -> None:
    it = ("It", "PRON", "PRP", "nsubj", 1)
    assert _kinds(it, ("pleases", "VERB", "VBZ", "ROOT", 1)) == ("it",)
    assert _kinds(("It", "PRON", "PRP", "expl", 1), ("pleases", "VERB", "VBZ", "ROOT", 1)) == ()
    extraposed = (it, ("seem", "VERB", "VBP", "ROOT", 1), ("pleased", "VERB", "VBN", "xcomp", 1))
    assert _kinds(*extraposed) == ()


def test_a_parse_tells_nouns_from_verbs_and_names_from_words() -> None:
    assert _kinds(("People", "NOUN", "NNS", "nsubj", 1), ("model", "VERB", "VBP", "ROOT", 1)) == ()
    assert _kinds(("No", "DET", "DT", "det", 1), ("model", "NOUN", "NN", "ROOT", 1)) == ("profession",)
    joan = (
        ("Joan", "PROPN", "NNP", "compound", 1),
        ("Riley", "PROPN", "NNP", "nsubj", 2),
        ("left", "VERB", "VBD", "ROOT", 2),
    )
    assert _kinds(*joan) == ()
    assert _kinds(("Then", "ADV", "RB", "advmod", 2), *joan[1:]) == ("name",)
    assert _kinds(("Drew", "VERB", "VBD", "ROOT", 0), ("straws", "NOUN", "NNS", "dobj", 0)) == ()


def test_spaces_do_not_shift_heads() -> None:
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
    words = ["We", "  ", "go"]
    parts = ["PRON", "SPACE", "VERB"]
    document = spacy.tokens.Doc(
        spacy.blank("en").vocab, words=words, pos=parts, heads=[2, 0, 2], deps=["nsubj", "dep", "ROOT"]
    )
    assert [(token.text, token.head) for token in from_spacy(document)] == [("We", 1), ("go", 1)]


def test_stanza_heads_count_over_sentences() -> None:
    def word(number: int, text: str, head: int, start: int) -> SimpleNamespace:
        names = {"id": number, "text": text, "lemma": text, "upos": "X", "xpos": "X", "deprel": "root", "head": head}
        return SimpleNamespace(**names, start_char=start)

    sentences = [[word(1, "Go", 0, 0)], [word(1, "We", 2, 4), word(2, "go", 0, 7)]]
    document = SimpleNamespace(sentences=[SimpleNamespace(words=words) for words in sentences])
    assert [(token.text, token.head, token.start) for token in from_stanza(document)] == [
        ("Go", 0, 0),
        ("We", 2, 4),
        ("go", 2, 7),
    ]


@pytest.mark.parametrize("name", ["spacy", "udpipe:en", ""])
def test_a_parser_is_named_by_library_and_model(name: str) -> None:
    with pytest.raises(DataError) as error:
        load_parser(name)
    assert repr(name) in str(error.value)


def test_a_missing_model_is_an_error() -> None:
    pytest.importorskip("spacy", reason="spaCy is not installed")
    with pytest.raises(DataError) as error:
        load_parser("spacy:no_such_model")
    assert "'no_such_model'" in str(error.value)


def test_on_a_real_parser() -> None:
    model = os.environ.get("GRAFTLM_SPACY")
    if not model:
        pytest.skip("GRAFTLM_SPACY names no English model of spaCy")
    parser = load_parser(f"spacy:{model}")
    assert detect("I bought a car and sold it.", parser=parser).kinds == ()
    assert detect("Close the door.", parser=parser).kinds == ("formality",)
    assert detect("What time is it?", parser=parser).kinds == ()


def test_word_tables_are_complete() -> None:
    for word, senses in polysemous_words().items():
        assert len(senses) > 1, word
        assert all(
            sense.cues and all(sense.translations(code) for code in ("es", "fr", "de", "ja")) for sense in senses
        )
    assert "riley" in word_list("names")
