"""The prefix cache changes no answer, for any graft: what a row reads behind known blocks is what it reads alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from graftlm.backbone import Backbone
from graftlm.backbone.prefix_blocks import BLOCK_TOKENS, PrefixBlocks, as_cache
from graftlm.grafts import Graft, graft_class
from graftlm.grafts.base import ReplacesModel
from graftlm.serving import batching
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.protocol import EngineLimits, GenerationRequest
from graftlm.serving.scheduler import next_pass
from graftlm.serving.service import open_service
from graftlm.serving.settings import ServerSettings
from laws.examples import EXAMPLES, examples, first_example
from serving.engines import Completion, backbone, complete, grafts, prompt, trained
from serving.web import running
from tiny import tiny_model, tiny_tokenizer

TEXT = prompt(200)


def request(length: int, ending: int = 0, model: str = "llama", new: int = 3, **options: Any) -> GenerationRequest:
    """A prompt that begins as `TEXT` does."""
    ids = (*TEXT[:length], *prompt(ending))
    return GenerationRequest(ids, model, max_tokens=new, logprobs=3, **options)


def answers(
    served: dict[str, Graft], rounds: Sequence[Sequence[GenerationRequest]], tokens: int, family: str = "llama"
) -> tuple[list[Completion], BatchingEngine]:
    """The completions of requests, those of a round at once."""
    engine = BatchingEngine(backbone(family), served, family, EngineLimits(batch_size=5, prefix_tokens=tokens))
    done = [completion for requests in rounds for completion in complete(engine, requests)]
    assert engine.close(10)
    return done, engine


def assert_same(with_cache: Sequence[Completion], without: Sequence[Completion]) -> None:
    for one, other in zip(with_cache, without, strict=True):
        assert [output.token for output in one.outputs] == [output.token for output in other.outputs]
        assert one.text == other.text
        for output, like in zip(one.outputs, other.outputs, strict=True):
            assert [p for _, p in output.top] == pytest.approx([p for _, p in like.top], abs=1e-5)  # logits are float32


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_PART_TOKENS", 48)


REQUESTS = st.builds(
    request,
    st.integers(1, 200),
    st.integers(0, 20),
    st.sampled_from(["llama", "llama", "a", "b", "two", "calm", "a+b", "a+calm"]),
    st.integers(1, 80),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
)


@pytest.mark.slow
@settings(max_examples=8, derandomize=True, phases=[Phase.generate])
@given(st.lists(st.lists(REQUESTS, min_size=1, max_size=6), min_size=1, max_size=3), st.sampled_from([64, 256, 8192]))
def test_answers_are_those_without_a_cache(rounds: list[list[GenerationRequest]], tokens: int) -> None:
    served = grafts("llama") | {"calm": trained("llama", EXAMPLES["composition"][0])}
    found, engine = answers(served, rounds, tokens)
    expected, _ = answers(served, rounds, 0)
    assert_same(found, expected)
    assert len(engine._prefixes) * BLOCK_TOKENS <= tokens


def example_params() -> list[Any]:
    """The first example of each kind, and that of two tokenizers, which is left out of the cache; others are slow."""
    return [
        pytest.param(example, id=str(example), marks=[] if is_default else pytest.mark.slow)
        for example in examples()
        if not example.exception("llama")
        for is_default in [example is first_example(example.kind) or str(example) == "two-tokenizers"]
    ]


@pytest.mark.parametrize("example", example_params())
def test_every_graft_uses_the_cache_or_is_left_out_of_it(example: Any) -> None:
    if issubclass(graft_class(example.kind), ReplacesModel):
        pytest.skip("acts on every row of a batch: no server has it")
    graft = trained("llama", example)
    rounds = [[request(10, model="g")], [request(150, model="g")], [request(150, 9, model="g"), request(140, 3)]]
    found, _ = answers({"g": graft}, rounds, 8192)
    expected, _ = answers({"g": graft}, rounds, 0)
    assert_same(found, expected)
    left_out = example.kind in ("token-routing", "memory") or str(example) in ("two-tokenizers", "prompt")
    assert [done.finish.cached_tokens for done in found] == [0, 0, 0 if left_out else 128, 0]


def test_each_row_of_a_group_keeps_its_own_layers() -> None:
    """Blocks that are full when two rows of a graft with keys and values of its own end, behind a row of another."""
    texts = [prompt(length)[:60] for length in (150, 160)]
    first = [request(3, new=20), *(GenerationRequest(text, "calm", max_tokens=8) for text in texts)]
    served = {"calm": trained("llama", EXAMPLES["composition"][0])}
    written, _ = answers(served, [first], 0)
    known = [(*text, *(output.token for output in done.outputs)) for text, done in zip(texts, written[1:], strict=True)]
    again = [GenerationRequest((*text, 7), "calm", max_tokens=3, logprobs=3) for text in known]
    found, _ = answers(served, [first, again], 8192)
    expected, _ = answers(served, [first, again], 0)
    assert_same(found, expected)
    assert [done.finish.cached_tokens for done in found[-2:]] == [64] * 2


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "block-state"])
def test_families_with_other_caches(family: str) -> None:
    rounds = [[request(100, model=family)], [request(100, model=family)], [request(100, 20, model=family)]]
    found, _ = answers({}, rounds, 8192, family)
    expected, _ = answers({}, rounds, 0, family)
    assert_same(found, expected)
    assert [done.finish.cached_tokens > 0 for done in found[1:]] == [family == "gpt2"] * 2


def test_a_beginning_is_read_once_by_requests_that_come_together() -> None:
    rounds = [[request(5)], [request(130, ending, seed=ending) for ending in range(1, 5)]]
    found, _ = answers({}, rounds, 8192)
    assert sorted(done.finish.cached_tokens > 0 for done in found[1:]) == [False, True, True, True]


def test_an_answer_is_known_to_the_next_turn() -> None:
    first, engine = answers({}, [[request(100, new=60)]], 8192)
    answer = [output.token for output in first[0].outputs]
    assert len(engine._prefixes) * BLOCK_TOKENS == (100 + len(answer) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = engine._prefixes.longest(next(iter(engine._readable_in_parts)), [*TEXT[:100], *answer, 7])
    assert len(blocks) * BLOCK_TOKENS == len(engine._prefixes) * BLOCK_TOKENS


def test_a_replaced_graft_leaves_nothing() -> None:
    first, second = (trained("llama", EXAMPLES["neutral-residues"][0], seed) for seed in (1, 2))
    served = {"g": first}
    engine = BatchingEngine(backbone("llama"), served, "llama", EngineLimits(prefix_tokens=8192))
    complete(engine, [request(150, model="g")])
    assert len(engine._prefixes) * BLOCK_TOKENS == 128
    engine.replace("g", second)
    (again,) = complete(engine, [request(150, model="g")])
    assert again.finish.cached_tokens == 0
    engine.replace("g", None)
    complete(engine, [request(10)])
    assert len(engine._prefixes) * BLOCK_TOKENS == 0
    assert engine.close(10)
    fresh, _ = answers({"g": second}, [[request(150, model="g")]], 0)
    assert_same([again], fresh)


def filled(length: int) -> list[tuple[Any, int]]:
    layer = DynamicLayer()
    layer.update(torch.arange(float(length)).view(1, 1, length, 1), torch.zeros(1, 1, length, 1))
    return [(layer, 0)]


def test_blocks_last_used_are_kept_beginnings_longest() -> None:
    prefixes, texts = PrefixBlocks(4 * BLOCK_TOKENS + 5), [prompt(2 * BLOCK_TOKENS + n) for n in (1, 2, 3)]
    for text in texts[:2]:
        prefixes.add("o", text, filled(len(text)))
    assert [len(prefixes.longest("o", text)) for text in texts] == [2, 2, 0]
    assert not prefixes.longest("another", texts[0])
    prefixes.longest("o", texts[0])
    prefixes.add("o", texts[2][: BLOCK_TOKENS + 1], filled(BLOCK_TOKENS + 1))
    assert [len(prefixes.longest("o", text)) for text in texts] == [2, 1, 1]
    assert len(prefixes.longest("o", texts[0][: 2 * BLOCK_TOKENS])) == 1, "the last token is always read"


def test_padding_is_no_part_of_a_block() -> None:
    prefixes, text = PrefixBlocks(1024), prompt(BLOCK_TOKENS)
    prefixes.add("o", text, filled(BLOCK_TOKENS + 7))
    layer: Any = as_cache(prefixes.longest("o", (*text, 1)), 10, None, {}).layers[0]
    assert layer.keys.flatten().tolist() == list(range(7, 17))


def test_rows_of_a_pass() -> None:
    def rows(lengths: list[int], known: list[int | None], owners: str = "a" * 9, share_prefixes: bool = True) -> Any:
        return next_pass(
            [TEXT[:length] for length in lengths],
            known,
            owners[: len(lengths)],
            part_tokens=100,
            share_prefixes=share_prefixes,
        )

    assert rows([10, 20, 30], [0, 0, 0]) == ([0, 1, 2], 0)
    assert rows([100, 10, 80], [64, 0, 64]) == ([0, 2], 36)
    assert rows([66, 140], [64, 128]) == ([0, 1], 12)
    assert rows([100, 170], [64, 128]) == ([0, 1], 42)
    assert rows([150, 40], [0, 0]) == ([1], 0)
    assert rows([1, 48, 40, 24, 16], [0] * 5, share_prefixes=False) == ([1, 2, 3, 4], 0), (
        "padding of 64 tokens, and 111 with the first"
    )
    assert rows([150], [0]) == ([0], 150)
    assert rows([20, 30, 10], [0] * 3, "aba") == ([0, 2, 1], 0), "rows of one owner follow each other"
    assert rows([40, 40, 32], [0] * 3) == ([0, 2], 0), "of 32 tokens the last would be read anyway"
    assert rows([70, 70, 70], [0] * 3, "aab") == ([0, 2], 0), "the second may use what the first leaves"
    assert rows([90, 90, 90], [64, 64, 64], "aba") == ([0, 2], 26)
    assert rows([150, 140, 150], [None, 0, None], "aba") == ([0, 2], 0), "those that can't be read in parts are whole"


def test_openai_s_client_is_told_what_was_cached() -> None:
    served = Backbone.wrap(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer(), "tiny")
    with running(open_service(served, settings=ServerSettings(port=0))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)
        ids = [*TEXT[:150]]
        usages = [client.completions.create(model="tiny", prompt=ids, n=2, max_tokens=2).usage for _ in range(2)]
    assert usages[0] is not None
    assert usages[0].prompt_tokens_details is None
    assert usages[1] is not None
    assert usages[1].prompt_tokens_details is not None
    assert usages[1].prompt_tokens_details.cached_tokens == 128


def test_a_long_text_is_looked_up_in_one_walk() -> None:
    text = prompt(64) * 2000
    prefixes = PrefixBlocks(len(text))
    prefixes.add("o", text[:6400], filled(6400))
    start = time.perf_counter()
    assert len(prefixes.longest("o", text)) == 200
    assert time.perf_counter() - start < 1, "128,000 tokens: the walk ends at the first unknown block"
