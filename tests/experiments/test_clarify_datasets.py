"""Readers and the builder, on small files of our own and, where they are, on the real sets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from experiments.ambiguity_checkers.run import read_bible, read_ntrex
from experiments.clarify.builder import (
    MASK,
    build_ambiguity_set,
    buildable,
    mask_pronouns,
    read_examples,
    write_examples,
)
from experiments.clarify.datasets import (
    ParallelDocument,
    SentencePair,
    english_gender,
    mt_geneval_contexts,
    read_ambigmt,
    read_cocoa_mt,
    read_discevalmt,
    read_lines,
    read_mt_geneval,
    read_tsv,
    read_winomt,
)
from graftlm.errors import DataError


@pytest.fixture
def data() -> Path:
    """The folder of real data sets."""
    folder = os.environ.get("GRAFTLM_DATA")
    if not folder or not (Path(folder) / "ambig").is_dir():
        pytest.skip("GRAFTLM_DATA names no folder with ambig in it")
    return Path(folder)


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes('one\u2028still one\r\n\x85"two\n'.encode() + b"\xff\xfe\n\n")
    assert read_lines(tmp_path / "a") == ["one\u2028still one", '\x85"two', "\ufffd\ufffd", ""]
    with pytest.raises(DataError):
        read_lines(tmp_path / "none")


def test_ambigmt(tmp_path: Path) -> None:
    files = {
        "formality/formality_en_de.tsv": "formality\tsrc\tsrc_ctx\ttrg\nneutral\t \tHi. - You?\tYou.\tMan.\n",
        "it_resolution/it_resolution_en_es.tsv": 'src\ttrg\tsrc_ctx\tgender\n"It\u2028is.\tEs.\t- A. - B.\tfeminine\n',
        "it_resolution/it_resolution_en_fr.tsv": "src\ttrg\tsrc_ctx\tgender\nIt is.\tC'est.\tA.\t \nx\tx\n\tx\ty\t \n",
        "neutral_names/gender_neutral_names_en_fr.tsv": "src\ttrg\tsrc_ctx\n[pr] left.\tIl est parti.\tHe left.\n",
        "neutral_professions/neutral_professions_en_de.tsv": "src_ctx\tsrc\ttrg\nShe sang.\t[pr] sings.\tSie singt.\n",
        "polysemy/polysemy_en_es.tsv": "src_word\ttrg_word\tsrc_ctx\nTRUE\tbien\tIt is true.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    examples, unusable = read_ambigmt(tmp_path)
    by_file = {example.id: example for example in examples}
    formal = by_file["formality_en_de:2"]
    assert (formal.label, formal.source, formal.reference, formal.context) == (
        "neutral",
        "You.",
        "Man.",
        ("Hi.", "You?"),
    )
    assert by_file["it_resolution_en_es:2"].source == '"It\u2028is.'
    assert by_file["it_resolution_en_es:2"].context == ("A.", "B.")
    assert by_file["it_resolution_en_fr:2"].label is None
    word = by_file["polysemy_en_es:2"]
    assert (word.word, word.source, word.reference) == ("true", "true", "bien")
    assert {example.kind for example in examples} == {"formality", "it", "name", "profession", "polysemy"}
    assert unusable == [
        "it_resolution_en_fr.tsv:3: 2 fields, but 4 are expected",
        "it_resolution_en_fr.tsv:4: the source or its translation is empty",
    ]
    with pytest.raises(DataError):
        read_ambigmt(tmp_path / "none")


def _write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_cocoa_mt_gives_each_translation_and_its_contrast(tmp_path: Path) -> None:
    stem = "formality-control.train.chat.en-de"
    texts = {"en": "Hi you.\n", "formal.de": "Sie.\n", "informal.de": "Du.\n", "formal.annotated.de": "[F]Sie[/F].\n"}
    _write(tmp_path, **{f"{stem}.{end}": text for end, text in texts.items()})
    with pytest.raises(DataError):
        read_cocoa_mt(tmp_path, "de", "train")
    _write(tmp_path, **{f"{stem}.informal.annotated.de": "Du.\nmore\n"})
    with pytest.raises(DataError):
        read_cocoa_mt(tmp_path, "de", "train")
    _write(tmp_path, **{f"{stem}.informal.annotated.de": "Du.\n"})
    formal, informal = read_cocoa_mt(tmp_path, "de", "train")
    assert (formal.reference, formal.contrast, formal.marks, formal.label) == ("Sie.", "Du.", ("Sie",), "formal")
    assert (informal.reference, informal.marks, informal.id) == ("Du.", (), "train.chat.en-de:1:informal")
    with pytest.raises(DataError, match=r"no CoCoA-MT file .*en-fr\.en"):
        read_cocoa_mt(tmp_path, "fr")


def test_mt_geneval_contexts_are_labelled_by_their_pronouns(tmp_path: Path) -> None:
    pairs = "She sang. <sep> The singer left.\nHe saw her. <sep> The cook left.\n"
    names = {"2to1-test.en_de.en": pairs, "original-test.en_de.de": "A\nB\n", "flipped-test.en_de.de": "C\nD\n"}
    _write(tmp_path, **{f"geneval-context-wikiprofessions-{name}": text for name, text in names.items()})
    first, second = mt_geneval_contexts(tmp_path, "de")
    assert (first.source, first.context, first.label) == ("The singer left.", ("She sang.",), "feminine")
    assert (first.reference, first.contrast) == ("A", "C")
    assert second.label is None


def test_winomt_and_discevalmt(tmp_path: Path) -> None:
    (tmp_path / "en.txt").write_text("female\t1\tThe cook left because she did.\tcook\n")
    (only,) = read_winomt(tmp_path / "en.txt")
    assert (only.label, only.word, only.language) == ("feminine", "cook", "")
    (tmp_path / "en.txt").write_text("The cook\n")
    with pytest.raises(DataError, match=r"en.txt:1 has 1 fields"):
        read_winomt(tmp_path / "en.txt")
    right = {"correct": ["La rue.", "Elle."], "incorrect": ["La rue.", "Il."], "type": "f.sg"}
    half = {"semi-correct": ["Le lac.", "Il."], "incorrect": ["Le lac.", "Elle."], "type": "m.sg"}
    plural = {"correct": ["Les rues.", "Elles."], "incorrect": ["Les rues.", "Ils."], "type": "f.pl"}
    anaphora = {
        "1": {"src": ["The road.", "It."], "trg": [right, half]},
        "2": {"src": ["The roads.", "They."], "trg": [plural]},
        "3": {"src": ["The roads.", "They like it."], "trg": [plural]},
        "4": {"src": ["The road.", "This one."], "trg": [right]},
    }
    _write(tmp_path, **{"anaphora.json": json.dumps(anaphora)})
    (it,) = read_discevalmt(tmp_path)
    assert (it.label, it.context, it.reference, it.contrast) == ("feminine", ("The road.",), "Elle.", "Il.")
    _write(tmp_path, **{"anaphora.json": "[]"})
    with pytest.raises(DataError):
        read_discevalmt(tmp_path)


@pytest.mark.parametrize(
    ("text", "gender"), [("She left.", "feminine"), ("His.", "masculine"), ("He, she", None), ("", None)]
)
def test_pronouns_tell_a_gender(text: str, gender: str | None) -> None:
    assert english_gender(text) == gender


def test_the_real_sets_have_their_published_sizes(data: Path) -> None:
    ambig = data / "ambig"
    assert len(read_cocoa_mt(ambig / "cocoa_mt", "de", "train")) == 800
    assert len(read_cocoa_mt(ambig / "cocoa_mt", "it")) == 1200
    assert len(read_mt_geneval(ambig / "mt_geneval", "fr", "dev")) == 2400
    assert len(mt_geneval_contexts(ambig / "mt_geneval", "de")) == 1100
    assert len(read_winomt(ambig / "winomt" / "en.txt")) == 3888
    assert len(read_discevalmt(ambig / "discevalmt")) == 44, "of 100 pronouns, 44 are a singular it"


# The builder.


def _document(*pairs: tuple[str, str]) -> ParallelDocument:
    return ParallelDocument(
        "d", tuple(SentencePair(f"d:{n}", source, target) for n, (source, target) in enumerate(pairs, start=1))
    )


FILLER = ("Nothing happened there.", "Rien.")


def test_formality_by_the_translation_with_the_sentences_before() -> None:
    documents = [_document(FILLER, FILLER, ("Last one.", "Fin."), ("Are you ready?", "Es-tu prêt ?"))]
    built = build_ambiguity_set(documents, "fr", kinds=["formality"])
    (only,) = built.examples
    assert (only.label, only.context, only.word) == ("informal", (FILLER[0], FILLER[0], "Last one."), "you")
    assert built.counts() == {"formality": {"informal": 1}}


def test_reasons_of_rejections_are_counted() -> None:
    long = ("Are you " + "so " * 20 + "ready?", "Es-tu prêt ?")
    documents = [_document(("Are you?", "Es-tu ?"), FILLER, FILLER, FILLER, long, ("You.", "Toi et vous."))]
    built = build_ambiguity_set(documents, "fr", kinds=["formality"])
    assert built.examples == ()
    assert built.rejected == {
        "formality": {"too little context": 1, "20 words or more": 1, "no marker decides, or both labels": 1}
    }


@pytest.mark.parametrize(("words", "sentences"), [(1, 5), (5, 5), (7, 3), (6, 4)])
def test_three_to_five_sentences_of_context_by_their_words(words: int, sentences: int) -> None:
    before = [(" ".join(["word"] * words), "x")] * 6
    (only,) = build_ambiguity_set([_document(*before, ("Are you?", "Es-tu ?"))], "fr", kinds=["formality"]).examples
    assert len(only.context) == sentences


def test_it_by_the_gender_of_its_pronoun() -> None:
    rows = [
        ("Can we sell it?", "On peut la vendre ?"),
        ("It is raining.", "Il pleut."),
        ("She sold it.", "Elle le vend."),
    ]
    (only,) = build_ambiguity_set([_document(FILLER, FILLER, FILLER, *rows)], "fr", kinds=["it"]).examples
    assert (only.source, only.label) == ("Can we sell it?", "feminine")


def test_names_have_their_pronouns_masked_and_the_sentences_after() -> None:
    after = [("She left.", "x"), ("Then.", "x"), ("End.", "x")]
    documents = [_document(("Riley sold his car.", "x"), *after), _document(("Riley is here.", "x"), *after)]
    first, second = build_ambiguity_set(documents, "fr", kinds=["name"]).examples
    assert (first.source, first.label) == (f"Riley sold {MASK} car.", "masculine")
    assert (second.label, second.context) == ("feminine", ("She left.", "Then.", "End."))


def test_professions_by_pronouns_or_by_the_translation() -> None:
    rows = [("The cook is here.", "La cuisinière est ici."), ("The cook lost his way.", "x"), ("The cooks.", "x")]
    found = build_ambiguity_set([_document(FILLER, FILLER, FILLER, *rows)], "fr", kinds=["profession"]).examples
    assert [(example.source, example.label) for example in found] == [
        ("The cook is here.", "feminine"),
        (f"The cook lost {MASK} way.", "masculine"),
    ]


def test_words_by_a_translation_of_one_meaning() -> None:
    rows = [("We saw the bank.", "On voyait la berge."), ("The bank.", "La banque et la rive."), ("A bank.", "Rien.")]
    (only,) = build_ambiguity_set([_document(*rows)], "fr", kinds=["polysemy"]).examples
    assert (only.source, only.reference, only.context) == ("bank", "berge", ("We saw the bank.",))


def test_what_can_be_built_in_a_language() -> None:
    assert buildable("fr") == ("formality", "it", "name", "profession", "polysemy")
    assert buildable("ja") == ("formality", "it", "name", "profession", "polysemy")
    assert buildable("it") == ("formality",)


def test_masks_leave_other_words_alone() -> None:
    assert mask_pronouns("He took this from HER sheep") == f"{MASK} took this from {MASK} sheep"


def test_examples_round_trip(tmp_path: Path) -> None:
    documents = [_document(FILLER, FILLER, FILLER, ("Are\u2028you ready?", "Es-tu prêt ?"))]
    examples = list(build_ambiguity_set(documents, "fr").examples)
    assert read_examples(write_examples(examples, tmp_path / "a.jsonl")) == examples
    for bad in ('{"id": 1}', "no", json.dumps({"id": "", "kind": "x", "language": "", "source": ""})):
        (tmp_path / "a.jsonl").write_text(bad + "\n")
        with pytest.raises(DataError, match="a.jsonl:1 is not an example"):
            read_examples(tmp_path / "a.jsonl")


def test_parallel_files(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("d1\tOne.\tUn.\nd1\tTwo.\tDeux.\nd2\tThree.\tTrois.\n")
    first, second = read_tsv(tmp_path / "a.tsv")
    assert [pair.id for pair in (*first.pairs, *second.pairs)] == ["a:1", "a:2", "a:3"]
    (tmp_path / "a.tsv").write_text("One.\tUn.\n")
    with pytest.raises(DataError, match="a.tsv:1 has 2 columns"):
        read_tsv(tmp_path / "a.tsv")
    _write(
        tmp_path,
        en="### Genesis\n\n[1:1] In\n[1:2] And\n### Exodus\n[1:1] Now\n",
        fr="### Genesis\n[1:2] Et\n[1:3] x\n",
    )
    (only,) = read_bible(tmp_path / "en", tmp_path / "fr")
    assert [(pair.source, pair.target) for pair in only.pairs] == [("And", "Et")]
    with pytest.raises(DataError):
        read_bible(tmp_path / "en", tmp_path / "a.tsv")
    with pytest.raises(DataError, match="no code of NTREX for the language 'xx'"):
        read_ntrex(tmp_path, "xx")


def test_the_real_parallel_text(data: Path) -> None:
    documents = read_ntrex(data / "parallel" / "ntrex", "es")
    assert (len(documents), sum(len(document.pairs) for document in documents)) == (123, 1997)
    built = build_ambiguity_set(documents[:20], "es")
    assert {"formality", "profession"} <= set(built.counts())
