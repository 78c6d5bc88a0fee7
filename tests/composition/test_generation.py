"""Generation beyond the laws: `refresh: prompt`, cropping, and caches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from composition.tools import OTHER_TOKENS, attached, composition, live
from graftlm.errors import GraftError
from graftlm.grafted.model import GraftedModel
from graftlm.testing.laws import NEW_TOKENS, generate, logits, positions_of, prompts
from tiny import TOKENS, tiny_ids

TOKENIZERS = pytest.mark.parametrize("tokens", [TOKENS, OTHER_TOKENS], ids=["one tokenizer", "two tokenizers"])


@pytest.fixture
def model(request: pytest.FixtureRequest, tokens: int) -> Iterator[GraftedModel]:
    anchor, augmenting = live("llama"), live("qwen3", 1, tokens)
    graft = composition(anchor, {"one": augmenting}, spread=0.1, **getattr(request, "param", {}))
    with attached(anchor, graft) as attached_model:
        yield attached_model


PROMPT_ALONE = pytest.mark.parametrize("model", [{"refresh": "prompt"}], indirect=True)


@TOKENIZERS
@PROMPT_ALONE
@pytest.mark.parametrize("beams", [1, 3])
def test_with_refresh_prompt_the_prompt_is_read_once(model: GraftedModel, beams: int) -> None:
    ids, mask = prompts()
    runs: list[int] = []
    graft: Any = model.grafts["graft"]
    augmenting = graft.frozen_models()["one"].model
    handle = augmenting.get_input_embeddings().register_forward_hook(lambda *_: runs.append(1))
    out = generate(model, ids, mask, do_sample=False, num_beams=beams)
    handle.remove()
    assert len(runs) == 1
    steps = torch.stack(out.logits, 1)
    rows = torch.arange(len(steps))[:, None].expand(-1, NEW_TOKENS) if beams == 1 else out.beam_indices[:, :NEW_TOKENS]
    whole = torch.cat([mask, torch.ones(2, NEW_TOKENS, dtype=mask.dtype)], 1)
    given = torch.arange(whole.shape[1])[None].expand_as(whole) < ids.shape[1]
    with torch.no_grad():
        expected = model(out.sequences, attention_mask=whole, position_ids=positions_of(whole), prompt=given).logits
    torch.testing.assert_close(
        steps[rows, torch.arange(NEW_TOKENS)], expected[:, -NEW_TOKENS - 1 : -1], rtol=1e-4, atol=1e-4
    )


@TOKENIZERS
@PROMPT_ALONE
def test_the_answer_does_not_reach_the_encoder(model: GraftedModel) -> None:
    """With the answer hidden, the visible augmenting states do not depend on it."""
    ids, given = tiny_ids(), torch.arange(24)[None].expand(2, -1) < 9
    seen: list[torch.Tensor] = []
    graft: Any = model.grafts["graft"]
    block = graft.blocks["one"][0]
    handle = block.w_o.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    with torch.no_grad():
        model(ids, prompt=given)
        block.w_q.weight.zero_()  # without queries, the output depends only on the visible states
        model(ids, prompt=given)
        model(torch.where(given, ids, (ids + 7) % 250 + 4), prompt=given)
    handle.remove()
    assert not torch.equal(seen[0], seen[1])
    torch.testing.assert_close(seen[1], seen[2])


@pytest.mark.parametrize(("tokens", "model"), [(OTHER_TOKENS, {}), (TOKENS, {"refresh": "prompt"})], indirect=["model"])
def test_assisted_decoding_is_refused_where_cropping_is_impossible(model: GraftedModel) -> None:
    ids = tiny_ids(1, 6).repeat(1, 3)
    with pytest.raises(GraftError):
        model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, prompt_lookup_num_tokens=3)


@TOKENIZERS
def test_copies_of_a_cache_are_independent(model: GraftedModel) -> None:
    """One prompt, two continuations from copies of its cache, as servers do with shared prefixes."""
    ids = tiny_ids(1, 12)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        for last in (40, 90):
            more = torch.tensor([[last, 77]])
            actual = model(more, past_key_values=copy.deepcopy(cache), use_cache=True).logits
            expected = logits(model, torch.cat([ids, more], 1))[:, -2:]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@TOKENIZERS
def test_a_cache_filled_without_the_graft_is_refused(model: GraftedModel) -> None:
    ids = tiny_ids(1, 12)
    anchor = model.detach()
    with torch.no_grad():
        cache = anchor.model(ids, use_cache=True).past_key_values
    graft: Any = model.grafts["graft"]
    with GraftedModel(anchor, {"graft": graft}) as again, pytest.raises(GraftError):
        again(ids[:, :1], past_key_values=cache, use_cache=True)


@TOKENIZERS
def test_embeddings_are_refused(model: GraftedModel) -> None:
    with pytest.raises(GraftError) as caught:
        model(inputs_embeds=torch.zeros(1, 3, 48))
    assert "input_ids" in str(caught.value)


@TOKENIZERS
def test_a_long_text_is_refused(model: GraftedModel) -> None:
    with pytest.raises(GraftError) as caught:
        model(tiny_ids(1, 600))
    assert "512" in str(caught.value)


@TOKENIZERS
def test_observed_statistics(model: GraftedModel) -> None:
    ids, mask = prompts()
    actual = model.observe(input_ids=ids, attention_mask=mask, use_cache=False)["graft"]
    assert {name: len(value) for name, value in actual.items()} == {
        f"one_{quantity}": 2 for quantity in ("written", "attention_here", "attention_before", "attention_bits")
    }
    torch.testing.assert_close(actual["one_attention_here"] + actual["one_attention_before"], torch.ones(2))
    assert (actual["one_attention_bits"] > 0).all()
