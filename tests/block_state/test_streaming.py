"""A text in pieces is the text as a whole, for every variant, wherever it is cut and however it is padded."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache

from block_state import tools
from graftlm.errors import GraftError
from graftlm.models.block_state.memory import restored, saved

LENGTH = 19
MODELS = {variant: tools.model(variant) for variant in tools.VARIANTS}


def alone(variant: str, row: Tensor) -> Tensor:
    """Logits of one text without padding, in one pass."""
    with torch.no_grad():
        return MODELS[variant](row[None], use_cache=False).logits[0]


def in_pieces(variant: str, ids: Tensor, mask: Tensor, cuts: list[int]) -> Tensor:
    found, cache = [], DynamicCache()
    for start, stop in pairwise([0, *cuts, ids.shape[1]]):
        with torch.no_grad():
            one = MODELS[variant](
                ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True
            )
        cache = one.past_key_values
        found.append(one.logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("variant", tools.VARIANTS)
@settings(max_examples=25)
@given(data=st.data())
def test_pieces_are_the_whole(variant: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=8)))
    ids = tools.ids(3, LENGTH)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    for row in (1, 2):
        mask[row, : data.draw(st.integers(0, LENGTH - 1))] = 0
    found = in_pieces(variant, ids, mask, cuts)
    for row in range(3):
        there = mask[row].bool()
        torch.testing.assert_close(found[row][there], alone(variant, ids[row][there]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.VARIANTS)
@given(right=st.integers(0, LENGTH - 1), left=st.integers(0, LENGTH - 1))
@settings(max_examples=15)
def test_padding_on_either_side_changes_nothing(variant: str, right: int, left: int) -> None:
    ids, mask = tools.ids(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, LENGTH - right :] = 0
    mask[2, :left] = 0
    with torch.no_grad():
        found = MODELS[variant](ids, attention_mask=mask, use_cache=False).logits
    for row in range(3):
        there = mask[row].bool()
        torch.testing.assert_close(found[row][there], alone(variant, ids[row][there]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.VARIANTS)
@pytest.mark.parametrize("training", [False, True])
def test_no_token_is_seen_by_those_before_it(variant: str, training: bool) -> None:
    model = copy.deepcopy(MODELS[variant]).train(training)
    embeds = model.get_input_embeddings()(tools.ids(1, LENGTH)).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits[0]
    for t in range(LENGTH):
        (gradient,) = torch.autograd.grad(logits[t].abs().sum(), embeds, retain_graph=True)
        sizes = gradient[0].abs().sum(-1)
        assert float(sizes[t + 1 :].sum()) < 1e-11 * float(sizes.sum())
        assert float(sizes[t]) > 1e-4 * float(sizes.sum())


@pytest.mark.parametrize("variant", [*tools.BLOCK_STATE, "recurrent"])
def test_context_states_reach_further_back_than_windows(variant: str) -> None:
    model = tools.model(variant, num_hidden_layers=1, mixer_layers=[0], positional_ssm=False)
    embeds = model.get_input_embeddings()(tools.ids(1, LENGTH)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeds, use_cache=False).logits[0, -1].sum(), embeds)
    assert float(gradient[0, 0].abs().sum()) > 1e-8


@pytest.mark.parametrize("variant", tools.VARIANTS)
def test_generation_from_a_cache_is_that_from_the_whole(variant: str) -> None:
    ids, mask = tools.ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :5] = mask[2, :2] = 0
    for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True}):
        found = []
        for cached in (True, False):
            torch.manual_seed(0)
            out = MODELS[variant].generate(
                ids,
                attention_mask=mask,
                max_new_tokens=10,
                pad_token_id=0,
                use_cache=cached,
                output_logits=True,
                return_dict_in_generate=True,
                **how,
            )
            found.append(out)
        assert found[0].sequences.tolist() == found[1].sequences.tolist()
        torch.testing.assert_close(torch.stack(found[0].logits), torch.stack(found[1].logits), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.VARIANTS)
def test_generations_that_take_turns_do_not_mix(variant: str) -> None:
    texts = tools.ids(2, LENGTH)
    caches, found = [DynamicCache(), DynamicCache()], [[], []]
    with torch.no_grad():
        for t in range(LENGTH):
            for one in range(2):
                out = MODELS[variant](texts[one : one + 1, t : t + 1], past_key_values=caches[one], use_cache=True)
                found[one].append(out.logits[0])
    for one in range(2):
        torch.testing.assert_close(torch.cat(found[one]), alone(variant, texts[one]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", ["slide", "recurrent", "sh-s4d", "mh-s4d", "mf-s4d"])
def test_what_is_remembered_does_not_grow(variant: str) -> None:
    def size(length: int) -> int:
        with torch.no_grad():
            cache = MODELS[variant](tools.ids(1, length), use_cache=True).past_key_values
        return sum(value.untyped_storage().nbytes() for value in saved(cache).values())  # a view keeps all alive

    assert size(8) == size(50)


@pytest.mark.parametrize("variant", tools.VARIANTS)
def test_what_is_remembered_can_be_written_down(variant: str) -> None:
    ids = tools.ids(2, LENGTH)
    with torch.no_grad():
        cache = MODELS[variant](ids[:, :10], use_cache=True).past_key_values
        again = restored(saved(cache))
        found = MODELS[variant](ids[:, 10:], past_key_values=again, use_cache=True).logits
    assert again.get_seq_length() == LENGTH
    torch.testing.assert_close(found[0], alone(variant, ids[0])[10:], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variant", tools.VARIANTS)
def test_training_on_a_second_piece_leaves_the_first_one_alone(variant: str) -> None:
    model, ids = copy.deepcopy(MODELS[variant]).train(), tools.ids(1, LENGTH)
    first = model.get_input_embeddings()(ids[:, :10]).detach().requires_grad_()
    cache = model(inputs_embeds=first, use_cache=True).past_key_values
    assert not any(value.requires_grad for value in saved(cache).values())
    second = model(ids[:, 10:], past_key_values=cache, use_cache=True).logits
    second.sum().backward()
    assert first.grad is None
    torch.testing.assert_close(second.detach()[0], alone(variant, ids[0])[10:], rtol=1e-7, atol=1e-7)


def test_a_cache_of_another_model_and_of_other_rows_is_refused() -> None:
    foreign = DynamicCache()
    foreign.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    model = MODELS["sh-s4d"]
    with pytest.raises(GraftError, match="keys and values of another model"):
        model(tools.ids(1, 3), past_key_values=foreign)
    cache = model(tools.ids(2, 3), use_cache=True).past_key_values
    with pytest.raises(GraftError, match="remembers 2 rows, and the input has 3"):
        model(tools.ids(3, 3), past_key_values=cache)


def test_tokens_can_not_be_taken_back() -> None:
    cache = MODELS["sh-s4d"](tools.ids(1, 5), use_cache=True).past_key_values
    with pytest.raises(GraftError, match="can't take tokens back"):
        cache.crop(3)
