"""Two tokenizers: at every anchor token, the augmenting model has read the anchor's text so far."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from composition import reference
from composition.tools import OTHER_TOKENS
from graftlm.backbone import Call, StateLayer
from graftlm.grafts.composition.alignment import AlignedInputs, CharacterAlignment
from tiny import BOS, EOS, TEXT, TOKENS, tiny_tokenizer


@functools.cache
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A SentencePiece-style tokenizer: a mark for spaces and for the start of a text, and byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    if name == "pieces":
        return sentencepiece_tokenizer()
    return tiny_tokenizer({"bytes": TOKENS, "other bytes": OTHER_TOKENS}[name])


@functools.cache
def alignment_of(anchor: str, augmenting: str, prompt_only: bool = False) -> CharacterAlignment:
    return CharacterAlignment(tokenizer(anchor), tokenizer(augmenting), prompt_only=prompt_only, name="one")


PAIRS = [("bytes", "other bytes"), ("other bytes", "bytes"), ("bytes", "pieces"), ("pieces", "bytes")]


def paths(passes: list[AlignedInputs], visible: torch.Tensor, row: int = 0) -> list[list[int]]:
    """The tokens that each anchor token sees, in the order of their columns."""
    read = [aligned.inputs["input_ids"][row] for aligned in passes if aligned.inputs]
    ids = torch.cat(read) if read else torch.empty(0, dtype=torch.long)
    return [ids[: len(seen)][seen].tolist() for seen in visible[row, 0]]


def seen(aligned: AlignedInputs) -> torch.Tensor:
    """(B, 1, T, S) the mask, empty where a token sees nothing."""
    mask, non_empty = aligned.visibility.mask, aligned.visibility.non_empty
    assert mask is not None
    return mask if non_empty is None else mask & non_empty[:, None, :, None]


def whole_characters(tokens: PreTrainedTokenizerFast, ids: torch.Tensor) -> str:
    """The text of the longest prefix of tokens that ends with a complete character."""
    texts = (str(tokens.decode(ids[:count])) for count in range(len(ids), -1, -1))
    return next(text for text in texts if "\ufffd" not in text)


@pytest.mark.parametrize(("anchor", "augmenting"), PAIRS)
@settings(max_examples=3 * settings.default.max_examples)
@example(text="maison maisonnette  dans\n\n la forêt 🦊 fin", cut=3)
@given(text=st.text(alphabet=st.sampled_from("abei nt\né🦊.中"), min_size=1, max_size=60), cut=st.integers(0, 60))
def test_each_token_sees_the_text_so_far(anchor: str, augmenting: str, text: str, cut: int) -> None:
    chosen = alignment_of(anchor, augmenting)
    ids = torch.tensor([tokenizer(anchor)(text, add_special_tokens=False)["input_ids"]])
    if not ids.numel():
        return
    whole = chosen.align(Call(input_ids=ids), 0, None)
    actual = paths([whole], seen(whole))
    for t in range(ids.shape[1]):
        so_far = whole_characters(tokenizer(anchor), ids[0, : t + 1])
        expected = reference.tokens_of_text(so_far, tokenizer(augmenting))
        assert sorted(actual[t]) == sorted(expected), (t, so_far)

    cut %= ids.shape[1]
    if cut:  # the same in two passes, with a state between them
        state = StateLayer()
        first = chosen.align(Call(input_ids=ids[:, :cut]), 0, state)
        chosen._trees.clear()  # as if the state's tensors had been replaced
        second = chosen.align(Call(input_ids=ids[:, cut:]), cut, state)
        assert paths([first], seen(first)) == actual[:cut]
        assert paths([first, second], seen(second)) == actual[cut:]


@pytest.mark.parametrize(("anchor", "augmenting"), PAIRS)
def test_whole_words_are_the_tokenizers_own(anchor: str, augmenting: str) -> None:
    ids = torch.tensor([tokenizer(anchor)(TEXT, add_special_tokens=False)["input_ids"]])
    aligned = alignment_of(anchor, augmenting).align(Call(input_ids=ids), 0, None)
    expected = tokenizer(augmenting)(TEXT, add_special_tokens=False)["input_ids"]
    assert sorted(paths([aligned], seen(aligned))[-1]) == sorted(expected)


def test_a_long_run_without_white_space_gets_no_blanks() -> None:
    text = "renard " + "abei中🦊n." * 30
    ids = torch.tensor([tokenizer("bytes")(text, add_special_tokens=False)["input_ids"]])
    aligned = alignment_of("bytes", "pieces").align(Call(input_ids=ids), 0, None)
    assert tokenizer("pieces").decode(paths([aligned], seen(aligned))[-1]) == text


def test_tokens_attend_along_their_own_path() -> None:
    ids = torch.tensor([tokenizer("bytes")("maison maisonnette")["input_ids"]])
    aligned = alignment_of("bytes", "other bytes").align(Call(input_ids=ids), 0, None)
    assert aligned.inputs is not None
    mask, positions = aligned.inputs["attention_mask"][0, 0], aligned.inputs["position_ids"][0]
    assert mask.sum(-1).tolist() == (positions + 1).tolist(), "each token sees itself and its ancestors"
    assert (mask.diagonal()).all()
    assert not mask.triu(1).any(), "the tree grows to the right"


def rows_of(text: str, other: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts as a batch, padded on the left."""
    rows = [tokenizer("bytes")(row)["input_ids"] for row in (text, other)]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def test_a_batch_reads_as_its_rows_do() -> None:
    ids, mask = rows_of("le renard brun saute", "the")
    chosen = alignment_of("bytes", "other bytes")
    together = chosen.align(Call(input_ids=ids, attention_mask=mask, token_mask=mask.bool()), 0, None)
    for row in range(2):
        alone_ids = ids[row][mask[row].bool()][None]
        alone = chosen.align(Call(input_ids=alone_ids), 0, None)
        actual = paths([together], seen(together), row)
        assert actual[ids.shape[1] - alone_ids.shape[1] :] == paths([alone], seen(alone))
        assert not any(actual[: ids.shape[1] - alone_ids.shape[1]]), "padding sees nothing"


def test_reordered_beams_read_on() -> None:
    ids, mask = rows_of("le renard brun saute", "the thin fo")
    chosen, state = alignment_of("bytes", "other bytes"), StateLayer()
    first = chosen.align(Call(input_ids=ids, attention_mask=mask, token_mask=mask.bool()), 0, state)
    state.reorder_cache(torch.tensor([1, 1]))
    more = torch.tensor([tokenizer("bytes")("r")["input_ids"], tokenizer("bytes")("x")["input_ids"]])
    second = chosen.align(Call(input_ids=more), ids.shape[1], state)
    assert first.inputs is not None
    assert second.inputs is not None
    columns = torch.cat([first.inputs["input_ids"][[1, 1]], second.inputs["input_ids"]], 1)
    for row, end in enumerate("rx"):
        actual = columns[row][seen(second)[row, 0, 0]].tolist()
        text = "the thin fo" + end
        assert actual == reference.tokens_of_text(text, tokenizer("other bytes"))


def test_documents_of_a_row_begin_anew() -> None:
    texts = ("le renard", "the fox jumps")
    token_lists = [tokenizer("bytes")(text)["input_ids"] for text in texts]
    ids = torch.tensor([[token for token_list in token_lists for token in token_list]])
    positions = torch.tensor([[position for token_list in token_lists for position in range(len(token_list))]])
    chosen = alignment_of("bytes", "other bytes")
    together = chosen.align(Call(input_ids=ids, position_ids=positions), 0, None)
    actual = paths([together], seen(together))
    for text, token_list in zip(texts, token_lists, strict=True):
        alone = chosen.align(Call(input_ids=torch.tensor([token_list])), 0, None)
        assert actual[: len(token_list)] == paths([alone], seen(alone)), text
        actual = actual[len(token_list) :]


def test_special_tokens_are_translated_or_left_out() -> None:
    words = tokenizer("bytes")("le renard")["input_ids"]
    ids = torch.tensor([[BOS, *words, EOS, *words]])
    aligned = alignment_of("bytes", "other bytes").align(Call(input_ids=ids), 0, None)
    actual = paths([aligned], seen(aligned))
    assert actual[0] == [], "no text was read yet"
    assert actual[-1].count(EOS) == 1
    assert BOS not in actual[-1]


def test_the_prompt_alone() -> None:
    ids = torch.tensor([tokenizer("bytes")("le renard brun")["input_ids"]])
    prompt = torch.arange(ids.shape[1])[None] < 4
    chosen = alignment_of("bytes", "other bytes", prompt_only=True)
    aligned = chosen.align(Call(input_ids=ids, prompt=prompt), 0, None)
    actual = paths([aligned], seen(aligned))
    alone = chosen.align(Call(input_ids=ids[:, :4]), 0, None)
    assert actual[:4] == paths([alone], seen(alone))
    assert all(path == actual[3] for path in actual[4:])


def test_a_tokenizer_with_a_leading_bos_begins_with_it() -> None:
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer.from_str(tokenizer("other bytes").backend_tokenizer.to_str())
    inner.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    begins: Any = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")
    chosen = CharacterAlignment(tokenizer("bytes"), begins, prompt_only=False, name="one")
    ids = torch.tensor([tokenizer("bytes")("le renard")["input_ids"]])
    aligned = chosen.align(Call(input_ids=ids), 0, None)
    assert all(path[0] == BOS for path in paths([aligned], seen(aligned)))
