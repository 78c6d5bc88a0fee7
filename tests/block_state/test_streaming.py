"""A text read in several passes gives the logits of one pass, for every variant, split and padding."""

from __future__ import annotations

import copy
import functools
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache

from block_state import tools
from cases import thinned
from graftlm.errors import GraftError
from graftlm.models.block_state.cache import cache_from_tensors, cache_tensors

LENGTH = 19

shared_model = functools.cache(tools.model)  # no test changes it


def single_pass(variant: str, row: Tensor) -> Tensor:
    """Logits of one text without padding, in one pass."""
    with torch.no_grad():
        return shared_model(variant)(row[None], use_cache=False).logits[0]


def several_passes(variant: str, ids: Tensor, mask: Tensor, splits: list[int]) -> Tensor:
    logits = []
    cache = DynamicCache()
    for start, stop in pairwise([0, *splits, ids.shape[1]]):
        with torch.no_grad():
            outputs = shared_model(variant)(
                ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True
            )
        cache = outputs.past_key_values
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
@given(data=st.data())
def test_several_passes_equal_a_single_pass(variant: str, data: st.DataObject) -> None:
    splits = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=8)))
    ids = tools.ids(3, LENGTH)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    for row in (1, 2):
        mask[row, : data.draw(st.integers(0, LENGTH - 1))] = 0
    actual = several_passes(variant, ids, mask, splits)
    for row in range(3):
        tokens = mask[row].bool()
        torch.testing.assert_close(actual[row][tokens], single_pass(variant, ids[row][tokens]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
@given(right=st.integers(0, LENGTH - 1), left=st.integers(0, LENGTH - 1))
def test_padding_on_either_side_changes_nothing(variant: str, right: int, left: int) -> None:
    ids = tools.ids(3, LENGTH)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, LENGTH - right :] = 0
    mask[2, :left] = 0
    with torch.no_grad():
        actual = shared_model(variant)(ids, attention_mask=mask, use_cache=False).logits
    for row in range(3):
        tokens = mask[row].bool()
        torch.testing.assert_close(actual[row][tokens], single_pass(variant, ids[row][tokens]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
@pytest.mark.parametrize("training", thinned([False, True], {True}))  # streaming shows it in evaluation
def test_logits_have_no_gradients_for_later_tokens(variant: str, training: bool) -> None:
    model = copy.deepcopy(shared_model(variant)).train(training)
    embeds = model.get_input_embeddings()(tools.ids(1, LENGTH)).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits[0]
    for t in range(LENGTH):
        (gradient,) = torch.autograd.grad(logits[t].abs().sum(), embeds, retain_graph=True)
        sizes = gradient[0].abs().sum(-1)
        assert float(sizes[t + 1 :].sum()) < 1e-11 * float(sizes.sum())
        assert float(sizes[t]) > 1e-4 * float(sizes.sum())


@pytest.mark.parametrize("variant", tools.default_cases([*tools.BLOCK_STATE, *tools.DSS, *tools.WIDE, "recurrent"]))
def test_context_states_reach_beyond_the_windows(variant: str) -> None:
    model = tools.model(variant, num_hidden_layers=1, mixer_layers=[0], positional_ssm=False)
    embeds = model.get_input_embeddings()(tools.ids(1, LENGTH)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeds, use_cache=False).logits[0, -1].sum(), embeds)
    assert float(gradient[0, 0].abs().sum()) > 1e-8


@pytest.mark.parametrize("last", [2 * tools.W, 2 * tools.W + 1, 3 * tools.W - 1])
def test_states_that_begin_anew_read_no_window_before(last: int) -> None:
    """A layer reads the last W tokens, the window's own, and the three that its first tokens are mixed with."""
    model = tools.model("sh-delta-reset", num_hidden_layers=1, mixer_layers=[0])
    embeds = model.get_input_embeddings()(tools.ids(1, last + 1)).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    (gradient,) = torch.autograd.grad(logits[0, -1].sum(), embeds)
    sizes = gradient[0].abs().sum(-1)
    first = min(last - tools.W + 1, 2 * tools.W - 3)
    assert float(sizes[:first].sum()) < 1e-13 * float(sizes.sum())
    assert float(sizes[first:].min()) > 1e-8 * float(sizes.sum())


@pytest.mark.slow
@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
def test_generation_with_a_cache_equals_generation_without(variant: str) -> None:
    ids = tools.ids(3, 9)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :5] = 0
    mask[2, :2] = 0
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True}):
        actual = []
        for cached in (True, False):
            torch.manual_seed(0)
            out = shared_model(variant).generate(
                ids,
                attention_mask=mask,
                max_new_tokens=10,
                pad_token_id=0,
                use_cache=cached,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
            actual.append(out)
        assert actual[0].sequences.tolist() == actual[1].sequences.tolist()
        torch.testing.assert_close(torch.stack(actual[0].logits), torch.stack(actual[1].logits), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
def test_interleaved_generations_do_not_mix(variant: str) -> None:
    texts = tools.ids(2, LENGTH)
    caches = [DynamicCache(), DynamicCache()]
    actual: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for t in range(LENGTH):
            for row in range(2):
                token = texts[row : row + 1, t : t + 1]
                out = shared_model(variant)(token, past_key_values=caches[row], use_cache=True)
                actual[row].append(out.logits[0])
    for row in range(2):
        torch.testing.assert_close(torch.cat(actual[row]), single_pass(variant, texts[row]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", ["slide", "recurrent", "sh-s4d", "mh-s4d", "mf-s4d", *tools.DSS, *tools.WIDE])
def test_the_cache_does_not_grow(variant: str) -> None:
    def size(length: int) -> int:
        with torch.no_grad():
            cache = shared_model(variant)(tools.ids(1, length), use_cache=True).past_key_values
        # Storage counts, since a view keeps its whole storage alive.
        return sum(value.untyped_storage().nbytes() for value in cache_tensors(cache).values())

    assert size(8) == size(50)


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
def test_a_cache_survives_conversion_to_tensors(variant: str) -> None:
    ids = tools.ids(2, LENGTH)
    with torch.no_grad():
        cache = shared_model(variant)(ids[:, :10], use_cache=True).past_key_values
        restored = cache_from_tensors(cache_tensors(cache))
        actual = shared_model(variant)(ids[:, 10:], past_key_values=restored, use_cache=True).logits
    assert restored.get_seq_length() == LENGTH
    torch.testing.assert_close(actual[0], single_pass(variant, ids[0])[10:], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
def test_training_on_a_second_pass_has_no_gradients_for_the_first(variant: str) -> None:
    model = copy.deepcopy(shared_model(variant)).train()
    ids = tools.ids(1, LENGTH)
    first = model.get_input_embeddings()(ids[:, :10]).detach().requires_grad_()
    cache = model(inputs_embeds=first, use_cache=True).past_key_values
    assert not any(value.requires_grad for value in cache_tensors(cache).values())
    second = model(ids[:, 10:], past_key_values=cache, use_cache=True).logits
    second.sum().backward()
    assert first.grad is None
    torch.testing.assert_close(second.detach()[0], single_pass(variant, ids[0])[10:], rtol=1e-7, atol=1e-7)


def test_a_cache_of_another_model_or_of_other_rows_is_refused() -> None:
    foreign = DynamicCache()
    foreign.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    model = shared_model("sh-s4d")
    with pytest.raises(GraftError) as error:
        model(tools.ids(1, 3), past_key_values=foreign)
    assert "past_key_values" in str(error.value)
    cache = model(tools.ids(2, 3), use_cache=True).past_key_values
    with pytest.raises(GraftError) as error:
        model(tools.ids(3, 3), past_key_values=cache)
    assert "past_key_values" in str(error.value)


def test_a_cache_cannot_be_cropped() -> None:
    cache = shared_model("sh-s4d")(tools.ids(1, 5), use_cache=True).past_key_values
    with pytest.raises(GraftError):
        cache.crop(3)
