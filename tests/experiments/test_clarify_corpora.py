"""Readers of the corpora of AmbigMT, WordNet and alignments, on small files of their form; Japanese checkers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from experiments.clarify.builder import build_ambiguity_set
from experiments.clarify.checkers import checker
from experiments.clarify.corpora import read_alignments, read_opensubtitles, read_wikipedia_biographies
from experiments.clarify.datasets import SentencePair
from experiments.clarify.polysemy import aligned_translations, distinct_senses, polysemous_words, polysemy_examples
from graftlm.errors import DataError, MissingExtraError

BIOGRAPHY = [
    ("7", "Margaret Hill was born in Leeds.", "Margaret Hill wurde in Leeds geboren.", "Female"),
    ("7", "Leeds is in the north.", "Leeds liegt im Norden.", "Female"),
    ("7", "The city is old.", "Die Stadt ist alt.", "Female"),
    ("7", "The nurse wrote a book.", "Die Pflegekraft schrieb ein Buch.", "Female"),
    ("8", "The band played.", "Die Gruppe spielte.", "Neutral"),
]


def subtitles(folder: Path, *, ids: list[str] | None = None) -> Path:
    lines = {
        "en": ["Hi.", "Are you sure?", "Stop."],
        "fr": ["Salut.", "Tu es sûr ?", "Arrête."],
        "ids": ids
        or [
            "en/1999/1.xml.gz\tfr/1999/1.xml.gz\t1\t1",
            "en/1999/1.xml.gz\tfr/1999/1.xml.gz\t2\t2 3",
            "en/2.gz\tfr/2.gz\t1\t1",
        ],
    }
    for ending, content in lines.items():
        (folder / f"OpenSubtitles.en-fr.{ending}").write_text("".join(f"{line}\n" for line in content))
    return folder


def test_a_document_of_opensubtitles_is_a_film(tmp_path: Path) -> None:
    first, second = read_opensubtitles(subtitles(tmp_path), "fr")
    assert [pair.source for pair in first.pairs] == ["Hi.", "Are you sure?"]
    assert [(pair.source, pair.target) for pair in second.pairs] == [("Stop.", "Arrête.")]
    assert first.gender is None


@pytest.mark.parametrize("ids", [["en/1\tfr/1\t1\t1"], ["en/1 fr/1", "en/1\tfr/1\t1\t1", "en/1\tfr/1\t1\t1"]])
def test_subtitles_of_another_form_are_refused(tmp_path: Path, ids: list[str]) -> None:
    with pytest.raises(DataError):
        read_opensubtitles(subtitles(tmp_path, ids=ids), "fr")
    with pytest.raises(DataError):
        read_opensubtitles(tmp_path, "de")


def biographies(folder: Path, *, header: str | None = None) -> Path:
    names = header or "sourceLanguage,targetLanguage,documentID,stringID,sourceText,translatedText,perceivedGender"
    path = folder / "biographies.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"{names}\n")
        rows = csv.writer(file)
        for number, (document, source, target, gender) in enumerate(BIOGRAPHY):
            rows.writerow(["en", "de", document, f"{document}-{number}", source, target, gender])
        rows.writerow(["en", "es", "9", "9-1", "She sang.", "Cantó.", "Female"])
    return path


def test_biographies_state_the_gender_of_their_person(tmp_path: Path) -> None:
    person, band = read_wikipedia_biographies(biographies(tmp_path), "de")
    assert (person.id, person.gender, len(person.pairs)) == ("7", "feminine", 4)
    assert (band.id, band.gender) == ("8", None)
    (spanish,) = read_wikipedia_biographies(tmp_path / "biographies.csv", "es")
    assert spanish.pairs[0].target == "Cantó."
    examples = build_ambiguity_set([person], "de", kinds=["profession"]).examples
    assert [(one.source, one.label) for one in examples] == [("The nurse wrote a book.", "feminine")], (
        "neither sentence nor translation shows it"
    )
    assert examples[0].context == tuple(pair.source for pair in person.pairs[:3])


def test_biographies_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_wikipedia_biographies(biographies(tmp_path), "ja")
    with pytest.raises(DataError) as error:
        read_wikipedia_biographies(biographies(tmp_path, header="a,b,c,d,e,f,g"), "de")
    assert "sourceLanguage" in str(error.value)
    path = biographies(tmp_path)
    path.write_text(path.read_text() + "en,de,7\n")
    with pytest.raises(DataError):
        read_wikipedia_biographies(path, "de")


PAIRS = [
    *(SentencePair(f"c:{n}", "The plant grows .", "La plante pousse .") for n in range(3)),
    *(SentencePair(f"c:{n}", "A Plant, closed", "Une usine fermée") for n in range(3, 6)),
    SentencePair("c:6", "The plant works .", "Le truc marche ."),
    SentencePair("c:7", "The plant of the plant", "La plante de l'usine"),
]
LINKS = ["0-0 1-1 2-2 3-3"] * 3 + ["0-0 1-1 2-2"] * 3 + ["0-0 1-1", ""]


def test_translations_are_what_words_are_aligned_to(tmp_path: Path) -> None:
    path = tmp_path / "aligned"
    path.write_text("".join(f"{line}\n" for line in LINKS))
    alignments = read_alignments(path, PAIRS)
    assert alignments[0] == ((0, 0), (1, 1), (2, 2), (3, 3))
    found = aligned_translations(PAIRS, alignments, ["plant", "other"])
    assert found == {"plant": ("plante", "usine")}, "the one seen once is left out"
    assert aligned_translations(PAIRS, alignments, ["plant"], min_count=1, min_share=0)["plant"][2] == "truc"
    examples = polysemy_examples(PAIRS, found, "fr")
    assert [one.reference for one in examples] == ["plante"] * 3 + ["usine"] * 3, "exactly one of the translations"
    assert {(one.source, one.kind, one.label == one.reference) for one in examples} == {("plant", "polysemy", True)}
    assert len(polysemy_examples(PAIRS, found, "fr", per_word=2)) == 2
    assert len(polysemy_examples(PAIRS, found, "fr", quota=4)) == 4
    assert polysemy_examples(PAIRS, {"plant": ["plante"]}, "fr") == [], "one translation leaves nothing open"


@pytest.mark.parametrize("lines", [LINKS[:-1], [*LINKS[:-1], "0-9"], [*LINKS[:-1], "9-0"], [*LINKS[:-1], "0:0"]])
def test_alignments_of_other_sentences_are_refused(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "aligned").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(DataError):
        read_alignments(tmp_path / "aligned", PAIRS)


def test_definitions_that_share_a_synonym_count_once() -> None:
    senses = [{"works"}, {"works", "mill"}, {"flora"}, set(), {"mill"}]
    assert distinct_senses(frozenset(words) for words in senses) == 4, "the second shares works with the first"


def wordnet(folder: Path, senses: dict[str, list[list[str]]]) -> Path:
    """Write a WordNet of nouns: for each word, the other words of each of its synsets."""
    files = folder / "corpora" / "wordnet"
    files.mkdir(parents=True)
    for name in ("cntlist.rev", "index.sense", *(f"{part}.exc" for part in ("adj", "adv", "noun", "verb"))):
        (files / name).write_text("")
    for part in ("adj", "adv", "verb"):
        for kind in ("index", "data"):
            (files / f"{kind}.{part}").write_text("  1 WordNet 3.0 Copyright\n")
    (files / "lexnames").write_text("".join(f"{number:02d}\tname.{number}\t1\n" for number in range(45)))
    data = "  1 WordNet 3.0 Copyright\n"
    offsets: dict[str, list[int]] = {}
    for word, synsets in senses.items():
        for others in synsets:
            words = [word, *others]
            listed = " ".join(f"{one} 0" for one in words)
            for one in words:
                offsets.setdefault(one, []).append(len(data))
            data += f"{len(data):08d} 03 n {len(words):02x} {listed} 000 | a meaning\n"
    (files / "data.noun").write_text(data)
    index = "  1 WordNet 3.0 Copyright\n"
    for word in sorted(offsets):
        places = " ".join(f"{offset:08d}" for offset in offsets[word])
        index += f"{word} n {len(offsets[word])} 0 {len(offsets[word])} 0 {places}\n"
    (files / "index.noun").write_text(index)
    return folder


def test_words_of_wordnet_with_more_than_three_meanings(tmp_path: Path) -> None:
    pytest.importorskip("nltk")
    apart = [["aaa"], ["bbb"], ["ccc"], ["ddd"]]
    overlapping = [["aaa"], ["aaa", "bbb"], ["ccc"], ["ddd"]]
    data = wordnet(tmp_path, {"plant": apart, "board": overlapping, "bank": apart, "spring": apart[:3]})
    assert polysemous_words(data) == ["plant"], "the others have an overlap, four letters, or three meanings"


def test_a_machine_without_wordnet_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as error:
        polysemous_words(tmp_path)
    assert "\n" not in str(error.value)
    monkeypatch.setitem(__import__("sys").modules, "nltk.data", None)
    with pytest.raises(MissingExtraError):
        polysemous_words(wordnet(tmp_path, {"plant": [["aaa"]]}))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("彼女は医者です。", "feminine"),
        ("彼は医者です。", "masculine"),
        ("彼らは医者です。", None),
        ("彼女たちは来た。", None),
        ("その女性は看護師だ。", "feminine"),
        ("俺は行く。", None),
        ("夫人が来た。", "feminine"),
        ("夫は弁護士だ。", "masculine"),
        ("医者が来た。", None),
    ],
)
def test_gender_of_persons_in_japanese(text: str, label: str | None) -> None:
    assert checker("gender", "ja").check(text).label == label


def test_it_in_japanese_shows_a_gender_only_by_a_pronoun() -> None:
    rules = checker("it", "ja")
    assert rules.check("彼女は速い。", "It is fast.").label == "feminine"
    assert rules.check("彼を見て。", "Look at it.").label == "masculine"
    assert rules.check("彼女は速い。", "She says it is fast.").label is None
    assert rules.check("それは速い。", "It is fast.").label is None
