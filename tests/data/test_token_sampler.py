"""Texts that are sampled in slots, drawn by random numbers of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.backbone.slot_cache import has_slots
from graftlm.data import token_sampler
from graftlm.data.slot_sampling import SlotSampler
from graftlm.data.token_drawing import Drawing, uniform_numbers
from graftlm.data.token_sampler import TokenSampler, row_bytes
from graftlm.errors import DataError
from tiny import DECODERS, MORE_FAMILIES, tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7], [9], [8, 7, 6, 5, 4, 11], [12, 13], [5], [6, 6], [7]]
ENDS = set(range(20, 45))
TOKENS = 16
DRAWING = Drawing(temperature=0.9, top_p=0.95)
# Their layers have windows, recurrent states or masks of their own.
WITHOUT_SLOTS = {
    "block-state", "cohere2", "exaone4", "gemma2", "gemma3", "gemma3n", "gpt_oss", "lfm2", "ministral", "mistral",
    "mpt", "olmo3", "qwen3_next",
}  # fmt: skip


def backbone(family: str = "llama") -> Backbone:
    return Backbone.wrap(tiny_model(family), tiny_tokenizer(), f"tiny {family}")


def sampled(sampler: TokenSampler, number: int = 0, *, top_p: float = 0.95) -> list[list[int]]:
    with sampler.seeded(number):
        return sampler.sample(PROMPTS, ENDS, TOKENS, temperature=0.9, top_p=top_p)


def by_generate(model: Backbone, rows: int = len(PROMPTS)) -> list[list[int]]:
    """The reference: `generate` of transformers, whose tokens are drawn by the same random numbers."""
    sampler = TokenSampler(model, seed=0, rows=rows)
    sampler._has_slots = False
    return sampled(sampler)


def can_sample(family: str) -> bool:
    model = tiny_model(family)
    return bool(model.can_generate())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("llama", "gpt2") else pytest.mark.slow)
        for family in (*DECODERS, *MORE_FAMILIES)
    ],
)
def test_texts_in_slots_are_those_of_generate(family: str) -> None:
    """For any number of slots, which decides when a text begins and beside which others."""
    if not can_sample(family):
        pytest.skip(f"{family} generates no text")
    model = backbone(family)
    assert has_slots(model.bare_model) == (family not in WITHOUT_SLOTS)
    expected = by_generate(model)
    assert len({len(text) for text in expected}) > 1, "texts end at different times"
    for rows in (1, 3, 16):
        assert sampled(TokenSampler(model, seed=0, rows=rows)) == expected


@pytest.mark.parametrize("in_slots", [True, False])
def test_settings_of_a_checkpoint_change_nothing(in_slots: bool) -> None:
    model = backbone()
    expected = by_generate(model)
    for config in (model.model.generation_config, model.bare_model.generation_config):
        config.update(top_k=2, repetition_penalty=3.0, suppress_tokens=list(range(50, 200)))
    sampler = TokenSampler(model, seed=0, rows=8)
    sampler._has_slots = in_slots
    assert sampled(sampler) == expected
    assert model.bare_model.generation_config.top_k == 2


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_models_that_rotate_by_the_longest_text_have_no_slots(rope: str) -> None:
    parameters = {"rope_type": rope, "factor": 4.0, "rope_theta": 10_000.0}
    if rope == "longrope":
        half = tiny_model("llama").config.head_dim // 2
        parameters |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
        parameters |= {"original_max_position_embeddings": 32}
    assert not has_slots(tiny_model("llama", rope_parameters=parameters))


def test_a_text_depends_on_seed_batch_call_and_index_alone() -> None:
    sampler = TokenSampler(backbone(), seed=0)
    first = sampled(sampler)
    assert sampled(sampler) == first
    assert sampled(sampler, number=1) != first
    assert sampled(TokenSampler(backbone(), seed=1)) != first
    torch.manual_seed(3)
    with sampler.seeded(0):
        once = sampler.sample(PROMPTS[:3], ENDS, TOKENS, temperature=0.9, top_p=0.95)
        again = sampler.sample(PROMPTS[:3], ENDS, TOKENS, temperature=0.9, top_p=0.95)
    assert once == first[:3]
    assert again != once


def test_a_sampler_keeps_its_tensors_for_shorter_and_longer_texts() -> None:
    """Stale keys of earlier texts must not be seen."""
    model = backbone()
    sampler = TokenSampler(model, seed=0, rows=3)
    with sampler.seeded(0):
        for prompts, tokens in ((PROMPTS, 40), (PROMPTS[:2], 3), (PROMPTS[::-1], 40), ([[5] * 70], 20)):
            fresh = TokenSampler(model, seed=0, rows=3)
            with fresh.seeded(0):
                fresh._calls = sampler._calls
                expected = fresh.sample(prompts, ENDS, tokens, temperature=1.0, top_p=1.0)
            assert sampler.sample(prompts, ENDS, tokens, temperature=1.0, top_p=1.0) == expected


def test_drawn_tokens_have_the_probabilities_of_the_model() -> None:
    logits = torch.tensor([2.0, 1.0, -torch.inf, 0.5, -3.0])
    count = 40_000
    uniform = uniform_numbers([(7,)], count, torch.device("cpu"))[0]
    for drawing in (Drawing(1.0, 1.0), Drawing(0.7, 1.0), Drawing(1.0, 0.8), Drawing(2.0, 0.05)):
        p = (logits / drawing.temperature).softmax(-1)
        # The fewest most probable tokens whose probabilities sum to top_p.
        order = p.argsort(descending=True)
        enough = int((p[order].cumsum(0) < drawing.top_p - 1e-6).sum()) + 1
        expected = torch.zeros_like(p)
        expected[order[:enough]] = p[order[:enough]]
        expected /= expected.sum()
        tokens = drawing.tokens(logits.expand(count, -1), uniform)
        shares = torch.bincount(tokens, minlength=len(logits)) / count
        assert (shares[expected == 0] == 0).all()
        deviation = (expected * (1 - expected) / count).sqrt()
        assert ((shares - expected).abs() <= 5 * deviation).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_extreme_random_numbers_draw_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    for top_p in (1.0, 0.9):
        (token,) = Drawing(1.0, top_p).tokens(logits, torch.tensor([uniform], dtype=torch.float64)).tolist()
        assert token in (1, 2)


@pytest.mark.parametrize("in_slots", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_an_error(value: float, in_slots: bool) -> None:
    model = tiny_model("llama")
    head: Any = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[9] = value
    sampler = TokenSampler(Backbone.wrap(model, tiny_tokenizer(), "tiny"), seed=0, rows=3)
    sampler._has_slots = in_slots
    with pytest.raises(DataError, match="logits"):
        sampled(sampler)


@pytest.fixture
def _forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def in_three_slots(model: Backbone, **settings: Any) -> list[list[list[int]]]:
    """Three calls of one sampler, the second with other sizes."""
    sampler = SlotSampler(model.bare_model, 3, **settings)
    uniform = uniform_numbers([(0, index) for index in range(len(PROMPTS))], TOKENS, torch.device("cpu"))
    calls: list[tuple[list[list[int]], Tensor]] = [
        (PROMPTS, uniform),
        (PROMPTS[:2], uniform[:2, :7]),
        (PROMPTS[::-1], uniform),
    ]
    return [sampler.sample(prompts, numbers, sorted(ENDS), DRAWING) for prompts, numbers in calls]


@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "bloom", "qwen3_moe", "falcon"))]
)
def test_all_texts_are_sampled_by_one_compiled_graph(family: str) -> None:
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    model = backbone(family)
    expected = in_three_slots(model)
    assert in_three_slots(model, compiled=True, backend=backend) == expected
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_forget")
def test_texts_of_machine_code_are_those_of_eager_steps() -> None:
    model = backbone()
    assert in_three_slots(model, compiled=True) == in_three_slots(model)


@pytest.mark.usefixtures("_forget")
def test_a_step_that_cannot_be_compiled_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no compiler is installed")

    model = backbone()
    assert in_three_slots(model, compiled=True, backend=backend) == in_three_slots(model)
    assert sum("compiled" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.usefixtures("_forget")
def test_many_sizes_are_compiled() -> None:
    """More than torch.compile accepts by default, which would be an error or slow steps without a word."""
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    model = backbone().bare_model
    uniform = uniform_numbers([(0, 0)], 3, torch.device("cpu"))
    for slots in range(1, 11):
        sampler = SlotSampler(model, slots, compiled=True, backend=backend)
        sampler.sample([[5, 6]], uniform, sorted(ENDS), DRAWING)
    assert len(graphs) == 10


def test_idle_slots_stay_inside_of_the_cache() -> None:
    """Texts that have ended are computed on, off the CPU until the next look and in compiled slots until the end."""
    model = backbone()
    sampler = SlotSampler(model.bare_model, 3)
    sampler._is_watched = False
    positions: list[int] = []
    step = sampler._decode

    def recorded(cache: Any, token: Tensor) -> Tensor:
        positions.append(int(cache.positions.max()))
        return step(cache, token)

    sampler._step = recorded
    uniform = uniform_numbers([(0, 0), (0, 1)], 60, torch.device("cpu"))
    texts = sampler.sample([[5], [6, 7]], uniform, [], DRAWING)
    assert [len(text) for text in texts] == [60, 60]
    assert max(positions) < 2 + 60


def test_unwatched_texts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU, ended texts stay in their slots for some steps, since looking at them makes the host wait."""
    model = backbone()
    expected = in_three_slots(model)
    sampler = SlotSampler(model.bare_model, 3)
    looks = 0
    whole = sampler._replace_ended

    def counted(*arguments: Any) -> None:
        nonlocal looks
        looks += 1
        whole(*arguments)

    monkeypatch.setattr(sampler, "_replace_ended", counted)
    monkeypatch.setattr(sampler, "_is_watched", False)
    uniform = uniform_numbers([(0, index) for index in range(len(PROMPTS))], TOKENS, torch.device("cpu"))
    assert sampler.sample(PROMPTS, uniform, sorted(ENDS), DRAWING) == expected[0]
    assert 1 < looks <= 8


def test_too_little_memory_halves_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = backbone()
    expected = by_generate(model)
    tried = []

    def slots(_model: Any, rows: int, **_settings: Any) -> SlotSampler:
        tried.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError
        return SlotSampler(_model, rows)

    monkeypatch.setattr(token_sampler, "SlotSampler", slots)
    assert sampled(TokenSampler(model, seed=0, rows=8)) == expected
    assert tried == [8, 4, 2]


def test_bytes_of_a_row_are_those_of_its_cache_and_logits() -> None:
    model = tiny_model("llama")
    cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    three, four = row_bytes(model, 3), row_bytes(model, 4)
    assert four - three == held / 3
    assert three - held > model.config.vocab_size * 16, "logits, probabilities and their sum"
