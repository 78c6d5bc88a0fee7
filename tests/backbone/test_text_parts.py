"""The tokens of a text in parts decode to the text, for the kinds of tokenizers that real models have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graftlm.backbone import IncrementalDetokenizer, continuation_ids, continuation_text, encode_parts, token_texts
from graftlm.data import Document
from graftlm.data import chunks as chunks_module
from graftlm.data.chunks import split_documents, tokenize
from graftlm.data.marked_ids import is_prompt, unmark
from graftlm.evaluation.windows import cut_windows
from tokenizers_by_kind import KINDS

LOSSLESS = ("byte-level", "prefix blank", "first blank", "bytes")  # for texts without a blank at their beginning
PIECES = st.sampled_from(
    [
        "the",
        " the",
        "keeper",
        "un",
        "happily",
        " ",
        "  ",
        "\n",
        "\n\n",
        "12",
        ", ",
        ": ",
        ".",
        "é",
        "港",
        "灯台",
        "a",
        "\t",
    ]
)
PARTS = st.lists(PIECES, max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: make() for name, make in KINDS.items()}


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_its_continuation_are_the_text(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]

    @settings(max_examples=4 * settings.default.max_examples)
    @given(PARTS, PARTS)
    @example("The boats sail 2, 4, 6, ", "8")
    @example("def keeper(name):\n", "    return name")
    @example("灯台は", "町の北")
    @example("un", "happily")
    @example("Oda: ", " Brandt")
    def law(prompt: str, text: str) -> None:
        whole = encoded(tokenizer, prompt + text)
        parts = encode_parts(tokenizer, prompt, text)
        assert decoded(tokenizer, parts.before + parts.ids) == decoded(tokenizer, whole)
        if decoded(tokenizer, whole) == prompt + text:
            assert parts.before == encoded(tokenizer, prompt), "the prompt has the tokens of a generation"
        if whole[: len(parts.before)] == parts.before:
            assert parts.before + parts.ids == whole
        assert parts.ends is not None
        assert len(parts.ends) == len(parts.ids)
        assert all(0 <= end <= len(text) for end in parts.ends)

    law()


def test_a_piece_of_a_word_continues_the_word(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["word pieces"]
    parts = encode_parts(tokenizer, "the sailors sail un", "happily sailing")
    assert decoded(tokenizer, parts.before + parts.ids) == "the sailors sail unhappily sailing"
    apart = encoded(tokenizer, "the sailors sail un") + encoded(tokenizer, "happily sailing")
    assert decoded(tokenizer, apart) == "the sailors sail un happily sailing"


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_scoring_read_the_same_tokens(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    pairs = [
        ("The keeper: ", "Oda Brandt"),
        ("boats:\n", "    sail()"),
        ("港の", "灯台"),
        ("12, ", "3"),
        ("", "the boats"),
    ]
    documents = [Document(text, prompt=prompt) for prompt, text in pairs]
    group = list(split_documents(documents))
    streams = tokenize(group, tokenizer)
    rows: list[list[np.ndarray]] = []
    for chunk, stream in zip(group, streams, strict=True):
        if chunk.first:
            rows.append([])
        rows[-1].append(stream)
    windows = list(cut_windows(tokenizer, documents, 512))
    assert [window.document for window in windows] == list(range(len(pairs)))
    for (prompt, text), window, row in zip(pairs, windows, rows, strict=True):
        marked = np.concatenate(row)
        ids = unmark(marked, 0)[:-1]  # without EOS
        assert ids.tolist() == window.ids.tolist()
        assert int(is_prompt(marked).sum()) == window.prompt
        assert decoded(tokenizer, ids.tolist()) == decoded(tokenizer, encoded(tokenizer, prompt + text))
        if prompt:
            assert window.bytes.sum() == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_a_long_text_are_the_text(
    tokenizers: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers[kind]
    monkeypatch.setattr(chunks_module, "CHUNK_CHARACTERS", 40)
    lines = "The keeper sails 12 boats.\nThe sailors' boats sail unhappily, a boat sails unhappily on\nand on."
    texts = [lines]
    if kind in LOSSLESS:
        texts.append("unhappilysailing" * 8)  # cut inside of a word
    for text in texts:
        for document in (Document(text), Document("on", prompt=text), Document(text, prompt=text)):
            group = list(split_documents([document]))
            assert len(group) > 2
            streams = tokenize(group, tokenizer)
            ids = unmark(np.concatenate(streams), 0)[:-1].tolist()
            assert decoded(tokenizer, ids) == decoded(tokenizer, encoded(tokenizer, document.prompt + document.text))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_shows_what_the_tokens_say(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]

    @settings(max_examples=2 * settings.default.max_examples)
    @given(PARTS, PARTS)
    @example("", "éé")
    def law(prompt: str, text: str) -> None:
        parts = encode_parts(tokenizer, prompt, text)
        before = decoded(tokenizer, parts.before)
        both = decoded(tokenizer, parts.before + parts.ids)
        shown = continuation_text(tokenizer, parts.before, parts.ids)
        pieces = token_texts(tokenizer, parts.ids, parts.before, clean_up_tokenization_spaces=False)
        detokenizer = IncrementalDetokenizer(tokenizer, parts.before, ())
        streamed = [detokenizer.add(token)[0] for token in parts.ids]
        assert "".join(streamed) + detokenizer.rest() == shown
        if "<unk>" not in both:
            assert shown == both.removeprefix(before)
            assert "".join(pieces) == shown

    law()


def test_parts_of_a_layout_have_no_blanks_between_them(tokenizers: dict[str, Any]) -> None:
    for kind in LOSSLESS:
        tokenizer = tokenizers[kind]
        ids = encoded(tokenizer, "keeper:\n")
        ids += continuation_ids(tokenizer, "keeper:\n", "Oda")
        ids += continuation_ids(tokenizer, "Oda", " sails.")
        ids += continuation_ids(tokenizer, " sails.", "\n12")
        assert decoded(tokenizer, ids) == "keeper:\nOda sails.\n12", kind
    word_pieces = tokenizers["word pieces"]
    ids = encoded(word_pieces, "un") + continuation_ids(word_pieces, "un", "happily")
    assert decoded(word_pieces, ids) == "unhappily"


def test_a_special_token_in_a_source_is_plain_text(tokenizers: dict[str, Any]) -> None:
    for kind in ("byte-level", "prefix blank"):
        tokenizer = tokenizers[kind]
        end = tokenizer.eos_token
        ids = continuation_ids(tokenizer, "the keeper", f" {end}", split_special_tokens=True)
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.eos_token_id in continuation_ids(tokenizer, "the keeper", f" {end}")
