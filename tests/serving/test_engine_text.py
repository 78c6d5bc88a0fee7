"""The parts of the engine by themselves: detokenization, sampling, the queue, and streams."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from benchmarks import serial_engine as reference
from graftlm.backbone import Backbone
from graftlm.backbone.detokenizer import IncrementalDetokenizer
from graftlm.grafted.graft_set import GraftSet
from graftlm.serving.protocol import Finish, GenerationRequest, RequestStream, TokenOutput
from graftlm.serving.sampling import RowSampling, sample
from graftlm.serving.scheduler import RequestQueue, ScheduledRequest
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


def detokenized(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str]):
    """The text that is final after each token, the rest, and whether a stop string came."""
    detokenizer, shown = IncrementalDetokenizer(tokenizer, prompt, stops), []
    for token in tokens:
        text, stopped = detokenizer.add(token)
        shown.append(text)
        if stopped:
            return shown, "", True
    return shown, detokenizer.rest(), False


@given(TOKENS, TOKENS, st.lists(st.sampled_from(["on", "a", "é", "the", "nd t", "\n\n"]), max_size=2))
def test_text_is_that_of_the_whole_and_stops_in_time(prompt: list[int], tokens: list[int], stops: list[str]) -> None:
    host: Backbone = backbone("llama")
    texts = [reference.full_text(host, tuple(prompt), tokens[:count]) for count in range(len(tokens) + 1)]
    before_stop = [reference.text_before_stop(text.rstrip("\ufffd"), tuple(stops)) for text in texts]
    stops_at = next((count for count, text in enumerate(before_stop) if text is not None), None)
    shown, rest, stopped = detokenized(TOKENIZER, prompt, tokens, stops)
    assert stopped == (stops_at is not None)
    assert "".join(shown) + rest == (texts[-1] if stops_at is None else before_stop[stops_at])
    assert stops_at is None or len(shown) == stops_at


@pytest.mark.parametrize("tokenizer", [TOKENIZER, marked()], ids=["bytes", "marked"])
@pytest.mark.parametrize("stop", ["", "on", "ö—"])
def test_characters_come_whole_with_their_spaces(tokenizer: PreTrainedTokenizerFast, stop: str) -> None:
    @given(TEXTS, TEXTS)
    def law(before: str, after: str) -> None:
        prompt = tokenizer(f"on{before}", add_special_tokens=False)["input_ids"]
        both = tokenizer(f"on{before}{after}", add_special_tokens=False)["input_ids"]
        if both[: len(prompt)] != prompt:  # the two are not split where they meet
            return
        shown, rest, _ = detokenized(tokenizer, prompt, both[len(prompt) :], [stop])
        assert "".join(shown) + rest == (after.partition(stop)[0] if stop else after)
        assert not any("\ufffd" in text for text in shown)

    law()


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    tokens = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "xabaabcy"]
    shown, rest, stopped = detokenized(TOKENIZER, [], tokens, ["abc", "zz"])
    assert (shown, rest, stopped) == (["x", "", "", "ab", "a", "", ""], "", True)
    assert detokenized(TOKENIZER, [], tokens[:3], ["abc"]) == (["x", "", ""], "ab", False)


def test_special_tokens_say_nothing_and_take_no_space_away() -> None:
    tokenizer = marked()
    (end, on), the = tokenizer.convert_tokens_to_ids(["</s>", "▁on"]), tokenizer.convert_tokens_to_ids("▁the")
    assert detokenized(tokenizer, [on, end], [end, the, end, on], []) == (["", " the", "", " on"], "", False)
    assert detokenized(TOKENIZER, [BOS], [EOS], []) == ([""], "", False)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, marked()], ids=["bytes", "marked"])
def test_many_special_tokens_cost_no_more_than_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token_id is not None
    (letter,) = tokenizer.convert_tokens_to_ids(["a"])

    def seconds(token: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer, [letter], ())
        start = time.process_time()
        for _ in range(2000):
            detokenizer.add(token)
        return time.process_time() - start

    assert seconds(tokenizer.eos_token_id) < 2 * seconds(letter)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, marked()], ids=["bytes", "marked"])
def test_added_tokens_without_text_are_those_that_are_special(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    tokenizer.add_tokens(["<|call|>"])
    end, call, letter = tokenizer.convert_tokens_to_ids(["<|end|>", "<|call|>", "a"])
    tokens = [end, call, end, letter]
    shown, rest, _ = detokenized(tokenizer, [letter], tokens, [])
    whole = tokenizer.decode([letter, *tokens], skip_special_tokens=True)
    assert "".join(shown) + rest == whole.removeprefix("a")
    assert "<|call|>" in whole


LOGITS = st.lists(st.lists(st.floats(-30, 30, width=32), min_size=6, max_size=6), min_size=1, max_size=4)


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
        "top_k": st.sampled_from([0, 1, 2, 9]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, -1.0]),
        "logit_bias": st.sampled_from([(), ((0, 5.0), (3, -100.0))]),
        "stop_tokens": st.sampled_from([(), (0, 3)]),
        "ignore_eos": st.booleans(),
    }
)


@given(LOGITS, st.integers(0, 99), st.lists(OPTIONS, min_size=4, max_size=4), st.lists(st.integers(0, 5), max_size=4))
def test_choices_are_those_of_a_row_alone(
    logits: list[list[float]], seed: int, options: list[dict[str, Any]], before: list[int]
) -> None:
    requests = [
        GenerationRequest((1, 4), "m", seed=seed + n, logprobs=n or None, **options[n]) for n in range(len(logits))
    ]
    found = sample(torch.tensor(logits), [after(request, before) for request in requests])
    for n, (row, request, choice) in enumerate(zip(logits, requests, found, strict=True)):
        assert choice is not None
        changed = reference.changed(torch.tensor(row), after(request, before))
        assert choice.token == reference.sample_row(changed, request, random.Random(seed + n))
        logprobs = torch.tensor(row).log_softmax(-1)
        assert choice.logprob == (
            None if request.logprobs is None else pytest.approx(float(logprobs[choice.token]), abs=1e-5)
        )
        assert [p for _, p in choice.top] == pytest.approx(logprobs.sort(descending=True).values[:n].tolist(), abs=1e-5)


def after(request: GenerationRequest, tokens: list[int]) -> RowSampling:
    """A row that has sampled these tokens."""
    row = RowSampling(request, {2})
    for token in tokens:
        row.add(token)
    return row


def test_end_tokens_of_the_model_and_of_the_request_end_the_answer() -> None:
    request = GenerationRequest((1,), "m", stop_tokens=(3,), turn_ends=(4,))
    assert after(request, []).ends == {2, 3, 4}
    assert after(replace(request, ignore_eos=True), []).ends == {3}


def test_shares_of_random_choices_are_their_probabilities() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    requests = [GenerationRequest((1,), "m", temperature=1.0, top_p=0.9, seed=seed) for seed in range(2000)]
    found = sample(p.log().expand(2000, 4), [RowSampling(request) for request in requests])
    shares = torch.tensor([choice.token for choice in found if choice]).bincount(minlength=4) / 2000
    assert shares.tolist() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0], abs=0.03)


def test_logits_that_are_no_numbers_give_no_choice() -> None:
    rows = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])
    first, second = sample(rows, [RowSampling(GenerationRequest((1,), "m")) for _ in rows])
    assert first is not None
    assert second is None


def test_users_are_served_in_turn() -> None:
    queue = RequestQueue()
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(_request(name))
    names = [scheduled.request.model for scheduled in queue.take(9, 1000)]
    assert names == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not len(queue)


def test_a_turn_takes_so_many_tokens_and_one_request_at_least() -> None:
    queue = RequestQueue()
    for name, length in (("a1", 50), ("b1", 6), ("b2", 4), ("a2", 5)):
        queue.add(_request(name, length))
    assert [scheduled.request.model for scheduled in queue.take(3, 10)] == ["a1"]
    assert [scheduled.request.model for scheduled in queue.take(1, 10)] == ["b1"]
    assert [scheduled.request.model for scheduled in queue.drop(lambda scheduled: scheduled.request.model == "b2")] == [
        "b2"
    ]
    assert [scheduled.request.model for scheduled in queue.take(3, 10)] == ["a2"]


def _request(name: str, length: int = 1) -> ScheduledRequest:
    sampling = RowSampling(GenerationRequest((5,) * length, name, user=name[0]))
    return ScheduledRequest(sampling, GraftSet(), RequestStream(), 0, 9.0)


def test_a_stream_hands_outputs_from_a_thread_to_a_loop() -> None:
    stream, reading = RequestStream(2), threading.Event()
    items = [TokenOutput(5, "a", index=1), Finish("stop", 1, 1, index=1), TokenOutput(6, "b"), Finish("length", 1, 1)]

    def write() -> None:
        stream.put(items[0])  # before anyone reads
        assert reading.wait(10)
        for item in items[1:]:
            stream.put(item)
            RequestStream.wake_readers([stream])

    async def read() -> list[TokenOutput | Finish]:
        received = []
        async for item in stream:
            received.append(item)
            reading.set()
        return received

    writer = threading.Thread(target=write)
    writer.start()
    assert asyncio.run(asyncio.wait_for(read(), 10)) == items, "it ends when both continuations have finished"
    writer.join()
    RequestStream.wake_readers([stream])  # its loop is closed


def test_all_streams_of_a_loop_wake_it_once() -> None:
    async def wakes() -> int:
        loop, calls = asyncio.get_running_loop(), []
        streams = [RequestStream() for _ in range(3)]
        readers = [asyncio.create_task(anext(aiter(stream))) for stream in streams]
        await asyncio.sleep(0)
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: calls.append(call) or original(*call)  # type: ignore[method-assign]
        for stream in streams:
            stream.put(Finish("stop", 1, 0))
        RequestStream.wake_readers(streams)
        await asyncio.wait_for(asyncio.gather(*readers), 10)
        return len(calls)

    assert asyncio.run(wakes()) == 1
