"""Two tokenizers: at every anchor token, what was read is the anchor's text so far, in tokens of one's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from composition.tools import OTHER_TOKENS
from graftlm.backbone import Call, StateLayer
from graftlm.grafts.composition import reference
from graftlm.grafts.composition.alignment import Reading
from graftlm.grafts.composition.spelling import _LONGEST_WORD, Spelling
from tiny import BOS, EOS, TEXT, TOKENS, tiny_tokenizer


@functools.cache
def sentence_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer in SentencePiece's manner: a mark for spaces, put before the text as well, and bytes for the rest."""
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
    return (
        sentence_pieces() if name == "pieces" else tiny_tokenizer({"bytes": TOKENS, "other bytes": OTHER_TOKENS}[name])
    )


@functools.cache
def spelling(anchor: str, augmenting: str, prompt_only: bool = False) -> Spelling:
    return Spelling(tokenizer(anchor), tokenizer(augmenting), prompt_only=prompt_only, name="one")


PAIRS = [("bytes", "other bytes"), ("other bytes", "bytes"), ("bytes", "pieces"), ("pieces", "bytes")]


def paths(readings: list[Reading], visible: torch.Tensor, row: int = 0) -> list[list[int]]:
    """The tokens that each anchor token sees, in the order of their columns."""
    read = [reading.inputs["input_ids"][row] for reading in readings if reading.inputs]
    ids = torch.cat(read) if read else torch.empty(0, dtype=torch.long)
    return [ids[: len(seen)][seen].tolist() for seen in visible[row, 0]]


def seen(reading: Reading) -> torch.Tensor:
    """(B, 1, T, S) with the tokens that see nothing put right."""
    mask, some = reading.visible.mask, reading.visible.some
    assert mask is not None
    return mask if some is None else mask & some[:, None, :, None]


def whole_characters(tokens: PreTrainedTokenizerFast, ids: torch.Tensor) -> str:
    """The text of the longest start of some tokens that ends with a whole character."""
    texts = (str(tokens.decode(ids[:count])) for count in range(len(ids), -1, -1))
    return next(text for text in texts if "\ufffd" not in text)


@pytest.mark.parametrize(("anchor", "augmenting"), PAIRS)
@settings(max_examples=60)
@example(text="maison maisonnette  dans\n\n la forêt 🦊 fin", cut=3)
@given(text=st.text(alphabet=st.sampled_from("abei nt\né🦊.中"), min_size=1, max_size=60), cut=st.integers(0, 60))
def test_each_token_sees_the_text_so_far(anchor: str, augmenting: str, text: str, cut: int) -> None:
    chosen = spelling(anchor, augmenting)
    ids = torch.tensor([tokenizer(anchor)(text, add_special_tokens=False)["input_ids"]])
    if not ids.numel():
        return
    whole = chosen.read(Call(input_ids=ids), 0, None)
    found = paths([whole], seen(whole))
    for t in range(ids.shape[1]):
        so_far = whole_characters(tokenizer(anchor), ids[0, : t + 1])
        wanted = reference.tokens_so_far(so_far, chosen.tokens_of, _LONGEST_WORD)
        assert sorted(found[t]) == sorted(wanted), (t, so_far)

    cut %= ids.shape[1]
    if cut:  # the same in two passes, with what lies between them in a state
        state = StateLayer()
        first = chosen.read(Call(input_ids=ids[:, :cut]), 0, state)
        chosen._rows.clear()  # as if the state's tensors had been exchanged
        second = chosen.read(Call(input_ids=ids[:, cut:]), cut, state)
        assert paths([first], seen(first)) == found[:cut]
        assert paths([first, second], seen(second)) == found[cut:]


@pytest.mark.parametrize(("anchor", "augmenting"), PAIRS)
def test_whole_words_are_the_tokenizers_own(anchor: str, augmenting: str) -> None:
    ids = torch.tensor([tokenizer(anchor)(TEXT, add_special_tokens=False)["input_ids"]])
    reading = spelling(anchor, augmenting).read(Call(input_ids=ids), 0, None)
    wanted = tokenizer(augmenting)(TEXT, add_special_tokens=False)["input_ids"]
    assert sorted(paths([reading], seen(reading))[-1]) == sorted(wanted)


def test_tokens_attend_along_their_own_path() -> None:
    ids = torch.tensor([tokenizer("bytes")("maison maisonnette")["input_ids"]])
    reading = spelling("bytes", "other bytes").read(Call(input_ids=ids), 0, None)
    assert reading.inputs is not None
    mask, places = reading.inputs["attention_mask"][0, 0], reading.inputs["position_ids"][0]
    assert mask.sum(-1).tolist() == (places + 1).tolist(), "each token sees as many as it has before it, and itself"
    assert (mask.diagonal()).all()
    assert not mask.triu(1).any(), "the tree grows to the right"


def rows_of(text: str, other: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts as a batch, padded on the left."""
    rows = [tokenizer("bytes")(one)["input_ids"] for one in (text, other)]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def test_a_batch_reads_as_its_rows_do() -> None:
    ids, mask = rows_of("le renard brun saute", "the")
    chosen = spelling("bytes", "other bytes")
    together = chosen.read(Call(input_ids=ids, attention_mask=mask, token_mask=mask.bool()), 0, None)
    for row in range(2):
        alone_ids = ids[row][mask[row].bool()][None]
        alone = chosen.read(Call(input_ids=alone_ids), 0, None)
        found = paths([together], seen(together), row)
        assert found[ids.shape[1] - alone_ids.shape[1] :] == paths([alone], seen(alone))
        assert not any(found[: ids.shape[1] - alone_ids.shape[1]]), "padding sees nothing"


def test_reordered_beams_read_on() -> None:
    ids, mask = rows_of("le renard brun saute", "the thin fo")
    chosen, state = spelling("bytes", "other bytes"), StateLayer()
    first = chosen.read(Call(input_ids=ids, attention_mask=mask, token_mask=mask.bool()), 0, state)
    state.reorder_cache(torch.tensor([1, 1]))
    more = torch.tensor([tokenizer("bytes")("r")["input_ids"], tokenizer("bytes")("x")["input_ids"]])
    second = chosen.read(Call(input_ids=more), ids.shape[1], state)
    assert first.inputs is not None
    assert second.inputs is not None
    columns = torch.cat([first.inputs["input_ids"][[1, 1]], second.inputs["input_ids"]], 1)
    for row, end in enumerate("rx"):
        found = columns[row][seen(second)[row, 0, 0]].tolist()
        text = "the thin fo" + end
        assert found == reference.tokens_so_far(text, chosen.tokens_of, _LONGEST_WORD)


def test_documents_of_a_row_begin_anew() -> None:
    texts = ("le renard", "the fox jumps")
    pieces = [tokenizer("bytes")(text)["input_ids"] for text in texts]
    ids = torch.tensor([[token for piece in pieces for token in piece]])
    places = torch.tensor([[place for piece in pieces for place in range(len(piece))]])
    chosen = spelling("bytes", "other bytes")
    together = chosen.read(Call(input_ids=ids, position_ids=places), 0, None)
    found = paths([together], seen(together))
    for text, piece in zip(texts, pieces, strict=True):
        alone = chosen.read(Call(input_ids=torch.tensor([piece])), 0, None)
        assert found[: len(piece)] == paths([alone], seen(alone)), text
        found = found[len(piece) :]


def test_special_tokens_are_translated_or_left_out() -> None:
    words = tokenizer("bytes")("le renard")["input_ids"]
    ids = torch.tensor([[BOS, *words, EOS, *words]])
    reading = spelling("bytes", "other bytes").read(Call(input_ids=ids), 0, None)
    found = paths([reading], seen(reading))
    assert found[0] == [], "nothing was said yet"
    assert found[-1].count(EOS) == 1
    assert BOS not in found[-1]


def test_the_prompt_alone() -> None:
    ids = torch.tensor([tokenizer("bytes")("le renard brun")["input_ids"]])
    prompt = torch.arange(ids.shape[1])[None] < 4
    chosen = spelling("bytes", "other bytes", prompt_only=True)
    reading = chosen.read(Call(input_ids=ids, prompt=prompt), 0, None)
    found = paths([reading], seen(reading))
    alone = chosen.read(Call(input_ids=ids[:, :4]), 0, None)
    assert found[:4] == paths([alone], seen(alone))
    assert all(path == found[3] for path in found[4:])


def test_a_tokenizer_with_a_leading_bos_begins_with_it() -> None:
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer.from_str(tokenizer("other bytes").backend_tokenizer.to_str())
    inner.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    begins: Any = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")
    chosen = Spelling(tokenizer("bytes"), begins, prompt_only=False, name="one")
    ids = torch.tensor([tokenizer("bytes")("le renard")["input_ids"]])
    reading = chosen.read(Call(input_ids=ids), 0, None)
    assert all(path[0] == BOS for path in paths([reading], seen(reading)))
