"""Prompts and completions: only completions are predicted, and documents that stay whole are never cut."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from graftlm.data import (
    NEW,
    Batch,
    Document,
    Mixture,
    RowPacker,
    StreamingBlocks,
    chunks,
    pack,
    streams,
)
from graftlm.data.boundaries import Boundaries
from graftlm.data.marked_ids import PADDING, is_prompt, is_start
from graftlm.data.rows import collate
from graftlm.errors import DataError
from tiny import BOS, EOS, SPECIAL, tiny_tokenizer

words = st.text(st.sampled_from("abc déf\n"), max_size=6)
documents = st.builds(Document, words.filter(bool), st.just("in memory"), words)
long_texts = st.builds(Document, st.text("ab c", min_size=30, max_size=90).filter(str.strip))
corpora = st.lists(documents, min_size=1, max_size=10)
boundary = st.sampled_from(["separate", "joined", "whole"])
LENGTH = 26  # no document of a corpus takes more: é is two tokens


def with_bos() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return tokenizer


PLAIN = tiny_tokenizer()
BEGINS = with_bos()
tokenizers = st.sampled_from([PLAIN, BEGINS])


def literal(document: Document, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """A document's ids, and which of them are its prompt's."""
    prompt = tokenizer(document.prompt, add_special_tokens=False)["input_ids"]
    text = tokenizer(document.text, add_special_tokens=False)["input_ids"]
    begin = [BOS] if tokenizer is BEGINS else []
    given = [bool(document.prompt)] * len(begin) + [True] * len(prompt)
    return [*begin, *prompt, *text, EOS], [*given, *[False] * (len(text) + 1)]


def literal_rows(corpus: list[Document], tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
    """Rows without their padding: a document goes into the row if it fits, else begins the next; long ones go on."""
    rows: list[list[int]] = []
    for document in corpus:
        ids, _ = literal(document, tokenizer)
        if not rows or len(rows[-1]) + len(ids) > length:
            rows.append([])
        while ids:
            if len(rows[-1]) == length:
                rows.append([])
            room = length - len(rows[-1])
            rows[-1] += ids[:room]
            ids = ids[room:]
    return rows


def streaming(
    documents: Callable[[], list[Document]], length: int, boundaries: Boundaries, buffer_rows: int
) -> StreamingBlocks:
    return StreamingBlocks(RowPacker(documents, PLAIN, length, boundaries, repeat=True), buffer_rows=buffer_rows)


def batch_of(marked: np.ndarray, boundaries: Boundaries) -> Batch:
    return collate(marked, np.ones(len(marked)), boundaries=boundaries, pad_id=0)


@settings(max_examples=2 * settings.default.max_examples)
@given(corpora, boundary, tokenizers)
def test_every_token_once_and_prompts_are_marked(
    corpus: list[Document], boundaries: Boundaries, tokenizer: PreTrainedTokenizerBase
) -> None:
    corpus = [*corpus, Document("a" * LENGTH * 2, prompt="b")] if boundaries != "whole" else corpus
    blocks = pack(corpus, tokenizer, LENGTH, boundaries=boundaries)
    expected = [literal(document, tokenizer) for document in corpus]
    real = blocks.marked != PADDING
    assert blocks.input_ids[real].tolist() == [token for ids, _ in expected for token in ids]
    assert is_prompt(blocks.marked)[real].tolist() == [given for _, givens in expected for given in givens]
    assert not is_prompt(blocks.marked)[~real].any()
    assert (
        np.flatnonzero(is_start(blocks.marked)[real]).tolist()
        == np.cumsum([0, *(len(ids) for ids, _ in expected)])[:-1].tolist()
    )


@settings(max_examples=2 * settings.default.max_examples)
@given(corpora, boundary, tokenizers)
def test_completions_alone_are_predicted(
    corpus: list[Document], boundaries: Boundaries, tokenizer: PreTrainedTokenizerBase
) -> None:
    corpus = [*corpus, Document("a" * LENGTH * 2, prompt="b")] if boundaries != "whole" else corpus
    blocks = pack(corpus, tokenizer, LENGTH, boundaries=boundaries)
    batch = batch_of(blocks.marked, boundaries)
    predicted = (blocks.marked != PADDING) & ~is_prompt(blocks.marked)
    if boundaries != "joined":
        predicted &= ~is_start(blocks.marked)
    predicted[:, 0] = False
    assert np.array_equal(batch.labels.numpy() != -100, predicted)
    assert torch.equal(batch.labels[torch.from_numpy(predicted)], batch.input_ids[torch.from_numpy(predicted)])
    if batch.prompt is None:
        assert not is_prompt(blocks.marked).any()
    else:
        assert np.array_equal(batch.prompt.numpy(), is_prompt(blocks.marked))
        assert torch.equal(batch.inputs()["prompt"], batch.prompt)
        assert batch.rows(slice(1)).prompt is not None


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(documents | long_texts, min_size=1, max_size=10), tokenizers)
def test_whole_documents_are_cut_only_where_no_row_holds_them_and_rows_are_as_full_as_that_allows(
    corpus: list[Document], tokenizer: PreTrainedTokenizerBase
) -> None:
    blocks = pack(corpus, tokenizer, LENGTH, boundaries="whole")
    expected = literal_rows(corpus, tokenizer, LENGTH)
    assert [
        row[kept].tolist() for row, kept in zip(blocks.input_ids, blocks.marked != PADDING, strict=True)
    ] == expected
    assert blocks.marked.shape == (len(expected), LENGTH)
    assert ((blocks.marked[:, 1:] != PADDING) <= (blocks.marked[:, :-1] != PADDING)).all()
    batch = batch_of(blocks.marked, "whole")
    several = bool(is_start(blocks.marked)[:, 1:].any())
    assert (batch.position_ids is not None) == several, "documents of a row do not see each other"


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(st.text("abc d", min_size=1, max_size=30), min_size=1, max_size=6), st.integers(2, 24))
def test_without_prompts_nothing_changes(corpus: list[str], length: int) -> None:
    corpus = [*corpus, "a" * 2 * length]
    ids = [PLAIN(text, add_special_tokens=False)["input_ids"] for text in corpus]
    stream = np.array([value for one in ids for value in (~one[0], *one[1:], EOS)], dtype=np.int32)
    stream = np.append(stream, np.full(-len(stream) % length, np.iinfo(np.int32).min, dtype=np.int32))
    blocks = pack([Document(text) for text in corpus], PLAIN, length)
    assert blocks.marked.dtype == np.int32
    assert blocks.marked.tobytes() == stream.tobytes()
    batch = batch_of(blocks.marked, "separate")
    assert batch.prompt is None
    assert "prompt" not in batch.inputs()


@settings(max_examples=2 * settings.default.max_examples)
@given(
    st.lists(documents | long_texts, min_size=1, max_size=10),
    boundary,
    st.sampled_from([1, 10, 10**6]),
    st.sampled_from([3, 100]),
)
def test_a_stream_gives_the_rows_of_the_packed_documents(
    corpus: list[Document], boundaries: Boundaries, group: int, chunk: int
) -> None:
    twice = [*corpus, *corpus]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graftlm.data.streams.STREAM_GROUP_CHARACTERS", group)
        patch.setattr(chunks, "CHUNK_CHARACTERS", chunk)
        stream = streaming(lambda: corpus, LENGTH, boundaries, buffer_rows=1)
        if boundaries != "whole" and sum(len(literal(document, PLAIN)[0]) for document in twice) < LENGTH:
            return
        packed = pack(twice, PLAIN, LENGTH, boundaries=boundaries).marked[:-1]  # the last row goes on in the stream
        assert np.array_equal(stream.take(0, len(packed), (0, NEW)), packed)


@pytest.mark.parametrize("size", range(1, 16))
def test_a_stream_waits_for_the_end_of_an_example(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.data.streams.STREAM_GROUP_CHARACTERS", 1)
    monkeypatch.setattr(chunks, "CHUNK_CHARACTERS", 3)
    corpus = [Document("0" * size), Document("1" * 12, prompt="22")]
    stream = streaming(lambda: corpus, 16, "whole", buffer_rows=1)
    packed = pack([*corpus, *corpus], PLAIN, 16, boundaries="whole").marked[:-1]
    assert np.array_equal(stream.take(0, len(packed), (0, NEW)), packed)


EXAMPLES = [Document("la réponse " * (1 + i % 3), f"row {i}", f"question {i}: ") for i in range(20)]


def streamed() -> Mixture:
    return Mixture({NEW: streaming(lambda: EXAMPLES, 48, "whole", buffer_rows=3)}, {NEW: 1}, 4)


@pytest.mark.parametrize("group", [1, 100])
@pytest.mark.parametrize("stop", [1, 5])
def test_a_stream_of_prompts_resumes(stop: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.data.streams.STREAM_GROUP_CHARACTERS", group)
    unbroken = streamed()
    broken = streamed()
    resumed = streamed()
    expected = [unbroken.batch(step) for step in range(12)]
    for step in range(stop):
        broken.batch(step)
    resumed.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    for step in range(stop, 12):
        found = resumed.batch(step)
        assert torch.equal(found.input_ids, expected[step].input_ids)
        assert found.prompt is not None
        assert torch.equal(found.prompt, expected[step].prompt)  # type: ignore[arg-type]


def test_long_prompts_are_tokenised_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = [Document("one\ntwo\nthree\n" * 5, "a", "four\nfive\n" * 9), Document("six", "b"), Document("x", "c", "y")]
    expected = pack(corpus, PLAIN, 16).marked
    monkeypatch.setattr(chunks, "CHUNK_CHARACTERS", 30)
    monkeypatch.setattr(streams, "GROUP_CHARACTERS", 1)
    assert np.array_equal(pack(corpus, PLAIN, 16).marked, expected)
    parts = list(chunks.split_documents(corpus))
    assert max(len(part.text) for part in parts) <= 30
    assert [sum(part.first for part in parts), sum(part.last for part in parts)] == [3, 3]
    assert all(not group[-1].prompt for group in chunks.group_chunks(parts, 1))


def test_a_prompt_without_tokens_leaves_the_start_to_the_text() -> None:
    class Blind:
        """Sees no blanks."""

        eos_token_id, pad_token_id, bos_token_id = EOS, 0, None

        def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[9] * len(text.strip()) for text in texts]}

    blocks = pack([Document("aa", prompt="  "), Document("b", prompt=" ")], Blind(), 5)  # type: ignore[arg-type]
    assert is_start(blocks.marked).tolist() == [[True, False, False, True, False]]


def test_the_fingerprint_tells_a_prompt_from_text() -> None:
    def fingerprint(document: Document) -> str:
        return Mixture({NEW: pack([document], PLAIN, 8, boundaries="whole")}, {NEW: 1}, 2).fingerprint()

    prompted = fingerprint(Document("b", prompt="a"))
    plain = fingerprint(Document("ab"))
    assert PLAIN("ab")["input_ids"] == PLAIN("a")["input_ids"] + PLAIN("b")["input_ids"]
    assert prompted != plain


def test_a_document_may_fill_its_row_to_the_last_token() -> None:
    exact = Document("b" * 7, prompt="cccccc c")
    length = len(literal(exact, PLAIN)[0])
    assert pack([exact, exact], PLAIN, length, boundaries="whole").marked.shape == (2, length)
    stream = streaming(lambda: [exact], length, "whole", buffer_rows=2)
    assert (stream.take(0, 5, (0, 0)) != PADDING).all()
    with pytest.raises(DataError) as error:
        pack([exact], PLAIN, length - 1, boundaries="whole")
    assert "in memory" in str(error.value)
