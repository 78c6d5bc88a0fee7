"""Packing: no token is lost, and no document sees or predicts another."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from graftlm.data import Batch, Document, TokenBlocks, chunks, pack
from graftlm.data.blocks import RowsWithoutTarget
from graftlm.data.boundaries import Boundaries, check_boundaries, split_rows, window_bounds
from graftlm.data.marked_ids import PADDING, is_start
from graftlm.data.rows import collate
from graftlm.errors import DataError, RecipeError
from tiny import tiny_model, tiny_tokenizer

corpora = st.lists(st.text(st.sampled_from("abc déf\n"), min_size=1, max_size=40), min_size=1, max_size=8)
lengths = st.integers(2, 24)


def without_eos() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


TOKENIZERS = {"eos": tiny_tokenizer(), "no eos": without_eos()}


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]


def packed(corpus: list[str], length: int, boundaries: Boundaries = "separate", kind: str = "eos") -> TokenBlocks:
    return pack([Document(text) for text in corpus], TOKENIZERS[kind], length, boundaries=boundaries)


def whole(blocks: TokenBlocks) -> Batch:
    """All rows in order, as one batch."""
    marks = np.ones(len(blocks))
    return collate(blocks.marked, marks, boundaries=blocks.boundaries, pad_id=blocks.pad_id)


def long_enough(corpus: list[str], length: int, kind: str = "eos") -> list[str]:
    return [*corpus, "a" * (2 * length)]


@settings(deadline=None, max_examples=50)
@given(corpora, lengths, st.sampled_from(sorted(TOKENIZERS)))
def test_every_token_once_and_in_order(corpus: list[str], length: int, kind: str) -> None:
    corpus = long_enough(corpus, length)
    blocks = packed(corpus, length, kind=kind)
    expected = [ids_of(text, TOKENIZERS[kind]) for text in corpus]
    flat = blocks.input_ids.ravel()
    starts = np.flatnonzero(is_start(blocks.marked).ravel())
    n_tokens = int((blocks.marked != PADDING).sum())
    assert n_tokens == sum(map(len, expected))
    assert [flat[a:b].tolist() for a, b in pairwise([*starts, n_tokens])] == expected
    assert len(blocks) == -(-n_tokens // length)


@settings(deadline=None, max_examples=50)
@given(corpora, lengths)
def test_separate_documents_do_not_predict_each_other(corpus: list[str], length: int) -> None:
    blocks = packed(long_enough(corpus, length), length)
    batch = whole(blocks)
    starts = torch.from_numpy(is_start(blocks.marked))
    padding = torch.from_numpy(blocks.marked == PADDING)
    unpredicted = starts | padding
    unpredicted[:, 0] = True
    assert torch.equal(batch.labels == -100, unpredicted)
    assert torch.equal(batch.labels[~unpredicted], batch.input_ids[~unpredicted])
    if batch.attention_mask is None:
        assert not padding.any()
    else:
        assert torch.equal(batch.attention_mask == 0, padding)


@settings(deadline=None, max_examples=50)
@given(corpora, lengths)
def test_positions_restart_at_every_document(corpus: list[str], length: int) -> None:
    blocks = packed(long_enough(corpus, length), length)
    batch = whole(blocks)
    several = bool(is_start(blocks.marked)[:, 1:].any())
    assert (batch.position_ids is not None) == several
    if batch.position_ids is None:
        return
    padding = blocks.marked == PADDING
    for row, starts, padded in zip(batch.position_ids.tolist(), is_start(blocks.marked), padding, strict=True):
        expected = []
        position = 0
        for column in range(length):
            anew = starts[column] or (padded[column] and not padded[column - 1])
            position = 0 if anew else position
            expected.append(position)
            position += 1
        assert row == expected


def test_joined_documents_are_one_stream() -> None:
    batch = whole(packed(["abc", "déf", "a" * 40], 8, "joined"))
    assert batch.position_ids is None
    assert batch.attention_mask is not None
    predicted = batch.attention_mask.bool()
    predicted[:, 0] = False
    assert torch.equal(batch.labels != -100, predicted)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gemma3", "qwen3", "phi", "gpt2", "gpt_neox", "olmo2"]
)
def test_neighbours_in_a_row_change_nothing(family: str) -> None:
    model = tiny_model(family).eval()
    blocks = packed(["the dog", "le chien dans la forêt", "def f(x)", "x", "return self.down(x) + 3"], 24)
    batch = whole(blocks)
    inputs = {name: value for name, value in batch.inputs().items() if name not in ("domain", "token_mask")}
    documents = (is_start(blocks.marked) | (np.arange(24) == 0)).cumsum(axis=1)
    documents[blocks.marked == PADDING] = 0
    with torch.no_grad():
        logits = model(**inputs).logits
        for row, document in {(r, int(d)) for r in range(len(blocks)) for d in documents[r] if d}:
            here = torch.from_numpy(documents[row] == document)
            alone = model(input_ids=batch.input_ids[row, here][None]).logits[0]
            torch.testing.assert_close(logits[row, here], alone, atol=1e-5, rtol=1e-5)


def test_inputs_of_a_forward_pass() -> None:
    several = whole(packed(["abc", "déf " * 9], 16))
    one = whole(packed(["abc " * 9], 16))
    assert set(several.inputs()) == {"input_ids", "labels", "domain", "position_ids", "token_mask", "use_cache"}
    assert set(one.inputs()) == {"input_ids", "labels", "domain", "attention_mask", "use_cache"}
    assert several.inputs()["use_cache"] is False


def test_totals_count_targets_and_tokens_of_each_domain() -> None:
    blocks = packed(["abc", "déf " * 9], 16)
    batch = collate(blocks.marked, np.arange(len(blocks)) % 2, boundaries="separate", pad_id=0)
    totals = batch.totals()
    real = (blocks.marked != PADDING).sum(axis=1)
    assert totals.dtype == torch.float32
    assert totals.tolist() == [(batch.labels[:, 1:] != -100).sum(), real[0::2].sum(), real[1::2].sum()]


def test_rows_add_up() -> None:
    batch = whole(packed(["abc", "déf " * 20], 16))
    parts = [batch.rows(slice(i, i + 2)) for i in range(0, len(batch), 2)]
    assert torch.equal(torch.stack([part.totals() for part in parts]).sum(dim=0), batch.totals())
    assert all(part.position_ids is not None and len(part) <= 2 for part in parts)
    assert torch.equal(batch.to("cpu").labels, batch.labels)


@settings(deadline=None, max_examples=50)
@given(corpora, st.integers(2, 6), st.sampled_from(["separate", "joined", "whole"]), st.booleans())
def test_rows_without_a_label_are_counted_by_their_cause(
    corpus: list[str], length: int, boundaries: Boundaries, has_prompts: bool
) -> None:
    texts = long_enough([*corpus, "a"], length)
    documents = [Document(text) for text in texts]
    if has_prompts:
        boundaries = "separate"  # prompts may be longer than a row
        documents = [Document("a", prompt=text) for text in texts]
    blocks = pack(documents, TOKENIZERS["no eos"], length, boundaries=boundaries)
    batch = whole(blocks)
    without = (batch.labels == -100).all(dim=1)
    prompts = torch.zeros_like(without) if batch.prompt is None else batch.prompt.any(dim=1)
    found = blocks.without_target()
    assert found == RowsWithoutTarget(unscored=int((without & prompts).sum()), single=int((without & ~prompts).sum()))
    assert has_prompts or not found.unscored


@pytest.mark.parametrize(("tokens", "single"), [(16, 0), (17, 1), (18, 0)])
def test_a_last_row_of_one_token_has_none_to_learn(tokens: int, single: int) -> None:
    rows = split_rows(np.arange(tokens, dtype=np.int32), 8, "separate")
    assert TokenBlocks(rows).without_target() == RowsWithoutTarget(unscored=0, single=single)


def test_too_little_text() -> None:
    with pytest.raises(DataError) as error:
        packed(["abc"], 99)
    assert {"4", "99"} <= set(re.findall(r"\d+", str(error.value)))
    with pytest.raises(DataError):
        packed([], 2)


def test_long_documents_are_cut_where_it_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = ["one line\n\ntwo lines\nthree  lines \n four\nfive\n" * 30, "short"]
    expected = packed(corpus, 16).marked
    monkeypatch.setattr(chunks, "CHUNK_CHARACTERS", 100)
    documents = [Document(text) for text in corpus]
    parts = list(chunks.split_documents(documents))
    assert len(parts) > 10
    assert max(len(part.text) for part in parts) <= 100
    blocks = pack(documents, TOKENIZERS["eos"], 16)
    np.testing.assert_array_equal(blocks.marked, expected)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab \n"), max_size=60), st.integers(3, 20))
def test_chunks_make_up_the_document(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_CHARACTERS", size)
        parts = list(chunks.split_documents([Document(text)]))
    assert "".join(part.text for part in parts) == text
    assert [part.first for part in parts] == [number == 0 for number in range(len(parts))]
    assert [part.last for part in parts] == [number == len(parts) - 1 for number in range(len(parts))]
    assert all(0 < len(part.text) <= size for part in parts)


def test_documents_begin_with_the_bos_that_the_tokenizer_adds_by_itself() -> None:
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)]
    )
    tokenizer.bos_token = tokenizer.eos_token
    blocks = pack([Document("one two", "a"), Document("three", "b")], tokenizer, 4)
    ids = tokenizer(["one two", "three"], add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    assert blocks.input_ids[blocks.marked != PADDING].tolist() == [bos, *ids[0], eos, bos, *ids[1], eos]


def test_documents_are_kept_separate_by_models_that_take_position_ids() -> None:
    check_boundaries(tiny_model("llama"), "separate", "stop")
    check_boundaries(tiny_model("block-state"), "joined", "stop")
    with pytest.raises(RecipeError) as error:
        check_boundaries(tiny_model("block-state"), "whole", "set data.boundaries to joined")
    assert "data.boundaries" in str(error.value)


@settings(deadline=None)
@given(st.integers(0, 80), st.integers(3, 12), st.integers(0, 2))
def test_windows_cover_every_token_and_share_their_overlap(tokens: int, length: int, overlap: int) -> None:
    windows = list(window_bounds(tokens, length, overlap=overlap))
    new = [range(start + (overlap if start else 0), stop) for start, stop in windows]
    assert [token for window in new for token in window] == list(range(tokens))
    assert all(stop - start == length for start, stop in windows[:-1])
    assert all(0 < stop - start <= length for start, stop in windows)


@settings(deadline=None)
@given(st.lists(st.integers(1, 15), max_size=12), st.integers(2, 12))
def test_windows_cut_a_document_only_where_none_can_hold_it(sizes: list[int], length: int) -> None:
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    stops = [stop for _, stop in window_bounds(sum(sizes), length, starts=starts)]
    for start, end in zip(starts, ends, strict=False):
        assert end - start > length or not any(start < stop < end for stop in stops)
