"""Added tokens in tokenizers: round trips, the encoding of old text, learned tokens and refusals."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from graftlm.backbone import AddedTokens
from graftlm.backbone.added_tokens import ExtendedVocabulary, extend
from graftlm.data import Document
from graftlm.data.learned_tokens import _Merger, learn_tokens
from graftlm.errors import BackboneError, DataError
from graftlm.evaluation.windows import cut_windows
from tokenizers_by_kind import KINDS, TEXTS, byte_level, unigram, with_template

NEW = "Fyrtårnet i byen lyser, og fyrtårnets lys når havnen. Æblet ved fyrtårnet er rødt, og æblerne i byen er røde. "
LISTED = [" fyrtårnet", " rødt", "<tool>"]
LEARNING = ["byte-level", "prefix blank", "first blank", "bytes"]


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def extended(tokenizer: PreTrainedTokenizerFast, added: AddedTokens) -> ExtendedVocabulary:
    return extend(tokenizer, added, "tiny")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("word pieces", "prefix blank")])
def test_listed_tokens_are_found_and_decoded(kind: str) -> None:
    tokenizer = KINDS[kind]()
    vocabulary = extended(tokenizer, AddedTokens(tuple(LISTED)))
    text = f"The keeper{LISTED[0]} has{LISTED[1]} boats <tool> and sails."
    ids = ids_of(vocabulary.tokenizer, text)
    new = [token - vocabulary.first for token in ids if token >= vocabulary.first]
    assert new == [0, 1, 2]
    assert decoded(vocabulary.tokenizer, ids) == text
    assert vocabulary.spellings[0] == tuple(ids_of(tokenizer, LISTED[0]))


@pytest.mark.parametrize("kind", LEARNING)
def test_learned_tokens_shorten_the_new_text_and_leave_old_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    before = tokenizer.backend_tokenizer.to_str()
    vocabulary = extended(tokenizer, learn_tokens(tokenizer, [NEW, NEW.upper()], 40))
    assert tokenizer.backend_tokenizer.to_str() == before
    assert 15 < vocabulary.count <= 40, "single bytes of unknown letters are never joined"
    old_ids, new_ids = ids_of(tokenizer, NEW), ids_of(vocabulary.tokenizer, NEW)
    assert len(new_ids) < 0.8 * len(old_ids)
    assert not any("▁" in text[1:] or "Ġ" in text[1:] for text in vocabulary.added.texts if kind != "bytes")
    assert vocabulary.spell(new_ids) == old_ids
    assert decoded(vocabulary.tokenizer, new_ids) == decoded(tokenizer, old_ids)
    for text in TEXTS:
        again = ids_of(vocabulary.tokenizer, text)
        if max(again) < vocabulary.first:
            assert again == ids_of(tokenizer, text)


@given(st.text(alphabet="fyrtånelsøæ EN.\n", max_size=60))
def test_every_text_comes_back_and_is_spelled_by_its_old_tokens(text: str) -> None:
    tokenizer, vocabulary = _byte_level_pair()
    ids = ids_of(vocabulary.tokenizer, text)
    assert decoded(vocabulary.tokenizer, ids) == text
    assert vocabulary.spell(ids) == ids_of(tokenizer, text)


@functools.cache
def _byte_level_pair() -> tuple[PreTrainedTokenizerFast, ExtendedVocabulary]:
    tokenizer = byte_level()
    return tokenizer, extended(tokenizer, learn_tokens(tokenizer, [NEW], 30))


def test_a_pair_that_spells_an_old_token_is_not_joined() -> None:
    """Old merges never make the old token `aus`, since they make `us` first."""
    vocabulary = {text: number for number, text in enumerate(["a", "u", "s", "t", "us", "au", "aus"])}
    model = models.BPE(vocab=vocabulary, merges=[("u", "s"), ("a", "u"), ("au", "s")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    added = learn_tokens(tokenizer, ["aus" * 2, "ustt"] * 9, 9)
    assert added.texts
    assert "aus" not in added.texts
    assert ids_of(extended(tokenizer, added).tokenizer, "aus") == [0, 4]


def test_each_token_has_one_spelling() -> None:
    words = Counter({("a", "bc"): 5, ("ab", "c"): 4, ("x", "y"): 3})
    merges, tokens = _Merger(words, set("abcxy") | {"ab", "bc"}).run(9)
    assert merges == [("a", "bc"), ("x", "y")]
    assert tokens == ["abc", "xy"]


def test_a_window_is_spelled_with_its_prompt_and_its_bytes() -> None:
    tokenizer = byte_level()
    vocabulary = extended(tokenizer, AddedTokens(tuple(LISTED)))
    document = Document(f" has{LISTED[1]} boats", prompt=f"The{LISTED[0]}")
    (window,) = cut_windows(vocabulary.tokenizer, [document], 100)
    spelled = window.spelled(vocabulary)
    prompt = len(ids_of(tokenizer, document.prompt))
    assert (spelled.first, spelled.prompt) == (prompt, prompt)
    assert spelled.ids.tolist() == ids_of(tokenizer, document.prompt + document.text)
    assert spelled.tokens == len(ids_of(tokenizer, document.text)) > window.tokens
    assert spelled.bytes.sum() == window.bytes.sum() == len(document.text.encode())


def test_learned_tokens_never_cross_words_or_special_tokens() -> None:
    tokenizer = with_template("{{ messages }}", ["<|user|>", "<|end|>"])
    learned = learn_tokens(tokenizer, ["<|user|> hus hus hus<|end|>" * 9], 50)
    assert all("<|" not in text and "Ġ" not in text[1:] for text in learned.texts)
    vocabulary = extended(tokenizer, learned)
    text = "<|user|> hus<|end|>"
    specials = ids_of(tokenizer, "<|user|><|end|>")
    assert [token for token in ids_of(vocabulary.tokenizer, text) if token in specials] == specials


@pytest.mark.parametrize("form", ["listed", "learned"])
def test_a_saved_tokenizer_is_the_extended_one(form: str, tmp_path) -> None:
    tokenizer = byte_level()
    added = AddedTokens(tuple(LISTED)) if form == "listed" else learn_tokens(tokenizer, [NEW], 30)
    vocabulary = extended(tokenizer, added)
    vocabulary.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer) + len(added.texts)
    assert ids_of(loaded, NEW) == ids_of(vocabulary.tokenizer, NEW)
    assert decoded(loaded, ids_of(loaded, NEW)) == NEW
    assert copy.deepcopy(vocabulary.tokenizer).get_vocab() == vocabulary.tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("tokens", "key"),
    [
        ([], "0"),
        (["", "a b c"], "''"),
        ([" \n"], "\\n"),
        ([" fyr", " lys", " fyr"], " fyr"),
        ([" the"], " the"),
        (["<eos>"], "<eos>"),
        ([f" t{number}" for number in range(100_001)], "100,001"),
    ],
)
def test_a_token_that_can_not_be_added_is_refused(tokens: list[str], key: str) -> None:
    with pytest.raises(BackboneError) as error:
        extended(byte_level(), AddedTokens(tuple(tokens)))
    assert key in str(error.value)


@pytest.mark.parametrize(("kind", "token"), [("byte-level", "æble"), ("prefix blank", " rødt")])
def test_a_token_that_decoding_changes_is_refused(kind: str, token: str) -> None:
    with pytest.raises(BackboneError) as error:
        extended(KINDS[kind](), AddedTokens((token,)))
    assert token in str(error.value)


def test_tokens_are_learned_by_byte_pairs_only() -> None:
    with pytest.raises(BackboneError) as error:
        learn_tokens(unigram(), [NEW], 10)
    assert "Unigram" in str(error.value)


def test_text_without_a_repeated_pair_teaches_no_token() -> None:
    with pytest.raises(DataError):
        learn_tokens(byte_level(), ["xq"], 10)


def test_merges_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(BackboneError) as error:
        extended(byte_level(), AddedTokens(("▁hus",), (("▁h", "us"),)))
    assert "▁h" in str(error.value)
