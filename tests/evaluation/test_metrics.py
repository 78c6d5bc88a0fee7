"""Scores equal a literal loop over tokens, bytes sum to the text's, intervals cover, and costs are measured."""

from __future__ import annotations

import dataclasses
import math
import time
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import rotated
from graftlm.errors import DataError, EvaluationError, GraftError
from graftlm.evaluation import Scores, bootstrap, paired_difference, score, share_interval
from graftlm.evaluation.cost import MemoryWatch, decode_speed
from graftlm.evaluation.windows import encode_with_bytes
from tiny import BOS, tiny_model, tiny_tokenizer

DOCUMENTS = [
    "The quick brown fox jumps over the lazy dog, and then the other dogs run after it.",
    "Füße, 語, 🙂 und naïve façades; 日本語のテキスト",
    "x",
    "",
    "def forward(self): return self.down(self.up(hidden_states)) # " + "the " * 16,
]


class Slow:
    """A tokenizer that knows no offsets."""

    is_fast = False
    bos_token_id = None
    pad_token_id = 0

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.inner(text, add_special_tokens=False)["input_ids"]}

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)


class Uniform(torch.nn.Module):
    """Predicts every one of 256 tokens alike."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return types.SimpleNamespace(logits=torch.zeros(*input_ids.shape, 256))


@torch.no_grad()
def literal_losses(model: Any, tokenizer: Any, text: str, length: int, *, bos: bool) -> list[float]:
    """The loss of each scored token by a forward pass of its own: no batch, no padding."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    losses = []
    for i in range(0 if bos else 1, len(ids)):
        context = [BOS] * bos + ids[window_start(i, length - bos) : i]
        logits = model(torch.tensor([context])).logits[0, -1]
        losses.append(-torch.log_softmax(logits.double(), -1)[ids[i]].item())
    return losses


def window_start(i: int, span: int) -> int:
    """Where the window that scores token `i` begins, each window beginning with the last token of the one before."""
    start = 0
    while i >= start + span:
        start += span - 1
    return start


def scores_of(nats: Any, tokens: Any = None) -> Scores:
    nats = np.asarray(nats, dtype=np.float64)
    tokens = np.full(len(nats), 10) if tokens is None else np.asarray(tokens)
    return Scores(nats=nats, tokens=tokens, bytes=tokens * 4, document=np.arange(len(nats)))


@pytest.mark.parametrize(("length", "bos"), rotated([3, 8, 17, 256], [False, True]))
def test_equals_a_literal_loop(model: Any, tokenizer: Any, bos_tokenizer: Any, length: int, bos: bool) -> None:
    chosen = bos_tokenizer if bos else tokenizer
    scores = score(model, chosen, DOCUMENTS, length=length, batch_size=3)
    for index, text in enumerate(DOCUMENTS):
        losses = literal_losses(model, tokenizer, text, length, bos=bos)
        mine = scores.document == index
        assert scores.tokens[mine].sum() == len(losses)
        assert scores.nats[mine].sum() == pytest.approx(sum(losses), abs=1e-5 * max(1, len(losses)))


def test_batch_size_and_order_change_nothing(model: Any, tokenizer: Any) -> None:
    alone = score(model, tokenizer, DOCUMENTS, length=12, batch_size=1)
    together = score(model, tokenizer, DOCUMENTS, length=12, batch_size=7)
    np.testing.assert_allclose(alone.nats, together.nats, rtol=1e-5)
    np.testing.assert_array_equal(alone.document, np.sort(together.document))
    np.testing.assert_array_equal(alone.bytes, together.bytes)


@pytest.mark.parametrize("fast", [True, False])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_add_up_to_the_text(fast: bool, text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids, sizes = encode_with_bytes(tokenizer if fast else Slow(tokenizer), text)
    assert len(ids) == len(sizes)
    assert (sizes >= 0).all()
    assert sizes.sum() == len(text.encode())


@pytest.mark.parametrize("length", [3, 5, 64])
def test_scored_bytes_are_those_of_all_but_the_first_token(model: Any, tokenizer: Any, length: int) -> None:
    scores = score(model, tokenizer, DOCUMENTS, length=length)
    for index, text in enumerate(DOCUMENTS):
        first = int(encode_with_bytes(tokenizer, text)[1][:1].sum())
        assert scores.bytes[scores.document == index].sum() == len(text.encode()) - first


def test_bytes_of_whole_characters_are_exact(tokenizer: Any) -> None:
    ids, sizes = encode_with_bytes(tokenizer, "aéz語b")
    assert dict(zip(tokenizer.convert_ids_to_tokens(ids.tolist()), sizes.tolist(), strict=True))["b"] == 1
    assert sizes.sum() == 8


def test_bits_per_byte_do_not_depend_on_the_tokens() -> None:
    coarse, fine = scores_of([20.0, 30.0], [10, 10]), scores_of([20.0, 30.0], [10, 10])
    fine = dataclasses.replace(fine, tokens=fine.tokens * 3)
    assert fine.value("nats_per_token") == pytest.approx(coarse.value("nats_per_token") / 3)
    assert fine.value("bits_per_byte") == coarse.value("bits_per_byte") == pytest.approx(50 / math.log(2) / 80)


def test_a_uniform_model_needs_the_same_bits_per_byte_in_any_window(tokenizer: Any) -> None:
    uniform = Uniform()
    for length in (3, 50):
        assert score(uniform, tokenizer, ["abc"], length=length).value("nats_per_token") == pytest.approx(math.log(256))


def test_limit_stops_at_the_exact_token(model: Any, tokenizer: Any) -> None:
    whole = score(model, tokenizer, DOCUMENTS, length=10)
    part = score(model, tokenizer, iter(DOCUMENTS), length=10, limit_tokens=25)
    assert part.tokens.sum() == 25
    np.testing.assert_allclose(part.nats[:2], whole.nats[:2], rtol=1e-6)


def test_documents_may_be_objects_and_the_mode_comes_back(model: Any, tokenizer: Any) -> None:
    model.train()
    scores = score(model, tokenizer, [types.SimpleNamespace(text=DOCUMENTS[0])])
    assert model.training
    model.eval()
    assert scores.value("nats_per_token") == score(model, tokenizer, [DOCUMENTS[0]]).value("nats_per_token")


def test_bf16_is_near_fp32(model: Any, tokenizer: Any) -> None:
    full = score(model, tokenizer, DOCUMENTS).value("nats_per_token")
    assert score(model, tokenizer, DOCUMENTS, precision="bf16").value("nats_per_token") == pytest.approx(full, rel=0.02)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        result = scores_of(rng.gamma(4.0, 5.0, size=60)).interval(resamples=300, seed=seed)
        covered += result.low <= 2.0 <= result.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_paired_interval_is_narrower_than_two_single_ones() -> None:
    rng = np.random.default_rng(1)
    base = rng.gamma(4.0, 5.0, size=100)
    a, b = scores_of(base + 1 + 0.1 * rng.standard_normal(100)), scores_of(base)
    result = paired_difference(a, b)
    assert result.mean == pytest.approx(a.value("nats_per_token") - b.value("nats_per_token"))
    assert result.low <= result.mean <= result.high
    assert result.high - result.low < 0.1 * (a.interval().high - a.interval().low)
    assert paired_difference(a, a).high == 0


def test_many_windows_are_resampled_in_runs() -> None:
    rng = np.random.default_rng(2)
    scores = scores_of(rng.gamma(4.0, 5.0, size=10_001))
    result = scores.interval()
    expected = 2 * 1.96 * scores.nats.std() / math.sqrt(10_001) / 10
    assert result.high - result.low == pytest.approx(expected, rel=0.15)


def test_other_windows_do_not_pair() -> None:
    with pytest.raises(EvaluationError):
        paired_difference(scores_of([1.0, 2.0]), scores_of([1.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_an_error(tokenizer: Any, value: float) -> None:
    broken = tiny_model("llama")
    with torch.no_grad():
        next(broken.parameters()).fill_(value)
    with pytest.raises(GraftError) as caught:
        score(broken, tokenizer, DOCUMENTS)
    assert "NaN" in str(caught.value)


def test_nothing_to_score_and_wrong_arguments(model: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError):
        score(model, tokenizer, ["", "x"])
    with pytest.raises(EvaluationError) as caught:
        score(model, tokenizer, DOCUMENTS, length=1024)
    assert "512" in str(caught.value)
    with pytest.raises(EvaluationError):
        score(model, tokenizer, DOCUMENTS, length=2)
    with pytest.raises(EvaluationError) as caught:
        score(model, tokenizer, DOCUMENTS, precision="fp8")  # type: ignore[arg-type]
    assert "fp8" in str(caught.value)
    with pytest.raises(EvaluationError) as caught:
        scores_of([1.0]).interval("ppl")  # type: ignore[arg-type]
    assert "ppl" in str(caught.value)


class Counting:
    """Counts calls of a model's `generate`."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.outputs = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def generate(self, **arguments: Any) -> torch.Tensor:
        self.outputs.append(self.inner.generate(**arguments))
        return self.outputs[-1]


def test_every_prompt_yields_all_new_tokens() -> None:
    model = Counting(tiny_model("llama"))
    assert decode_speed(model, tiny_tokenizer(), ["the dog " * 30, "", "le chien"], new_tokens=9, prompt_tokens=4) > 0
    assert [out.shape[1] for out in model.outputs[:2]] == [4 + 8, 4 + 9]
    assert len(model.outputs) == 3


def test_no_prompts() -> None:
    with pytest.raises(DataError):
        decode_speed(tiny_model("llama"), tiny_tokenizer(), [""])


def test_the_watch_sees_a_large_tensor_that_is_gone_again() -> None:
    with MemoryWatch() as before:
        pass
    with MemoryWatch(every=0.001) as watch:
        block = torch.ones(2**25)
        size = block.nbytes
        time.sleep(0.1)
        del block
    assert watch.peak >= before.peak + 0.8 * size


def test_bootstrap_holds_the_mean_and_repeats() -> None:
    values = [1.0, 2.0, 6.0, 3.0]
    result = bootstrap(values)
    assert (result.mean, result.low >= 1, result.high <= 6) == (3.0, True, True)
    assert result == bootstrap(values)
    assert bootstrap([2.0]).low == 2.0 == bootstrap([2.0]).high
    wide = bootstrap([0.0, 1.0] * 200)
    assert (wide.high - wide.low) / 2 == pytest.approx(1.96 * 0.5 / 20, rel=0.1)  # as a mean of 400 throws


def test_intervals_of_nothing_are_refused() -> None:
    with pytest.raises(EvaluationError):
        bootstrap([])
    with pytest.raises(EvaluationError):
        share_interval(0, 0)
