"""The parts of the engine by themselves: text out of tokens, choices, and the line of those who wait."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from graftlm.backbone import Backbone
from graftlm.grafts.mixed import Team
from graftlm.serving import reference
from graftlm.serving.engine.choice import choose
from graftlm.serving.engine.line import Line, Request
from graftlm.serving.engine.words import Words
from graftlm.serving.protocol import Ask
from laws.examples import backbone
from tiny import BOS, EOS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKENS = st.lists(st.integers(0, 299), max_size=12)
TEXTS = st.text(st.sampled_from("aeén ö—😀的 on"), max_size=12)


def marked() -> PreTrainedTokenizerFast:
    """A tokenizer that marks spaces, drops the one at a text's start, and writes unknown characters byte by byte."""
    bytes_ = {f"<0x{n:02X}>": 0.0 for n in range(256)}
    pieces = {
        "<unk>": 0.0,
        "</s>": 0.0,
        "▁": -2.0,
        "▁on": -1.0,
        "▁the": -1.0,
        "a": -3.0,
        "b": -3.0,
        "c": -3.0,
        **bytes_,
    }
    tokenizer = Tokenizer(models.Unigram(list(pieces.items()), unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def pieces_of(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str]):
    """What `Words` shows at each token, the rest, and whether a stop string came."""
    words, shown = Words(tokenizer, prompt, stops), []
    for token in tokens:
        text, stopped = words.add(token)
        shown.append(text)
        if stopped:
            return shown, "", True
    return shown, words.rest(), False


@given(TOKENS, TOKENS, st.lists(st.sampled_from(["on", "a", "é", "the", "nd t", "\n\n"]), max_size=2))
def test_text_is_that_of_the_whole_and_stops_in_time(prompt: list[int], tokens: list[int], stops: list[str]) -> None:
    host: Backbone = backbone("llama")
    shown, rest, stopped = pieces_of(TOKENIZER, prompt, tokens, stops)
    expected = reference.whole(host, tuple(prompt), tokens)
    cut = [
        (count, found)
        for count in range(1, len(tokens) + 1)
        if (found := reference.cut(reference.whole(host, tuple(prompt), tokens[:count]).rstrip("\ufffd"), tuple(stops)))
        is not None
    ]
    assert stopped == bool(cut)
    assert "".join(shown) + rest == (cut[0][1] if cut else expected)
    assert not cut or len(shown) == cut[0][0]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, marked()], ids=["bytes", "marked"])
@pytest.mark.parametrize("stop", ["", "on", "ö—"])
def test_characters_come_whole_with_their_spaces(tokenizer: PreTrainedTokenizerFast, stop: str) -> None:
    @given(TEXTS, TEXTS)
    def law(before: str, after: str) -> None:
        prompt = tokenizer(f"on{before}", add_special_tokens=False)["input_ids"]
        both = tokenizer(f"on{before}{after}", add_special_tokens=False)["input_ids"]
        if both[: len(prompt)] != prompt:  # the two are not split where they meet
            return
        shown, rest, _ = pieces_of(tokenizer, prompt, both[len(prompt) :], [stop])
        assert "".join(shown) + rest == (after.partition(stop)[0] if stop else after)
        assert not any("\ufffd" in text for text in shown)

    law()


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    tokens = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "xabaabcy"]
    shown, rest, stopped = pieces_of(TOKENIZER, [], tokens, ["abc", "zz"])
    assert (shown, rest, stopped) == (["x", "", "", "ab", "a", "", ""], "", True)
    assert pieces_of(TOKENIZER, [], tokens[:3], ["abc"]) == (["x", "", ""], "ab", False)


def test_special_tokens_say_nothing_and_take_no_space_away() -> None:
    tokenizer = marked()
    (end, on), the = tokenizer.convert_tokens_to_ids(["</s>", "▁on"]), tokenizer.convert_tokens_to_ids("▁the")
    assert pieces_of(tokenizer, [on, end], [end, the, end, on], []) == (["", " the", "", " on"], "", False)
    assert pieces_of(TOKENIZER, [BOS], [EOS], []) == ([""], "", False)


LOGITS = st.lists(st.lists(st.floats(-30, 30, width=32), min_size=6, max_size=6), min_size=1, max_size=4)


@given(LOGITS, st.integers(0, 99), st.sampled_from([0.0, 0.3, 1.0, 5.0]), st.sampled_from([1.0, 0.9, 0.5, 1e-9]))
def test_choices_are_those_of_a_row_alone(rows: list[list[float]], seed: int, temperature: float, top_p: float) -> None:
    asks = [
        Ask((1,), "m", temperature=temperature if n % 3 else 0.0, top_p=top_p if n % 2 else 1.0, logprobs=n or None)
        for n in range(len(rows))
    ]
    found = choose(torch.tensor(rows), asks, [random.Random(seed + n) for n in range(len(rows))])
    for n, (row, ask, choice) in enumerate(zip(rows, asks, found, strict=True)):
        assert choice is not None
        assert choice.token == reference.choose(torch.tensor(row), ask, random.Random(seed + n))
        logprobs = torch.tensor(row).log_softmax(-1)
        assert choice.logprob == (
            None if ask.logprobs is None else pytest.approx(float(logprobs[choice.token]), abs=1e-5)
        )
        assert [p for _, p in choice.top] == pytest.approx(logprobs.sort(descending=True).values[:n].tolist(), abs=1e-5)


def test_shares_of_random_choices_are_their_probabilities() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    asks, draw = [Ask((1,), "m", temperature=1.0, top_p=0.9)] * 4000, random.Random(0)
    found = choose(p.log().expand(4000, 4), asks, [draw] * 4000)
    shares = torch.tensor([choice.token for choice in found if choice]).bincount(minlength=4) / 4000
    assert shares.tolist() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0], abs=0.03)


def test_logits_that_are_no_numbers_give_no_choice() -> None:
    rows = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])
    first, second = choose(rows, [Ask((1,), "m")] * 2, [random.Random(0)] * 2)
    assert first is not None
    assert second is None


def test_users_are_served_in_turn() -> None:
    line = Line()
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        line.add(_request(name))
    names = [request.ask.model for request in line.take(9, 1000)]
    assert names == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not len(line)


def test_a_turn_takes_so_many_tokens_and_one_request_at_least() -> None:
    line = Line()
    for name, length in (("a1", 50), ("b1", 6), ("b2", 4), ("a2", 5)):
        line.add(_request(name, length))
    assert [request.ask.model for request in line.take(3, 10)] == ["a1"]
    assert [request.ask.model for request in line.take(1, 10)] == ["b1"]
    assert [one.ask.model for one in line.drop(lambda request: request.ask.model == "b2")] == ["b2"]
    assert [request.ask.model for request in line.take(3, 10)] == ["a2"]


def _request(name: str, length: int = 1) -> Request:
    return Request(Ask((5,) * length, name, user=name[0]), Team(), TOKENIZER, frozenset(), 9.0)
