"""Taps that add to attention scores: on every family what the same numbers in the mask would do, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases import rotated
from graftlm.backbone import Call, Site, Sites, Tap, TapHooks
from graftlm.backbone.attention_bias import biased_mask
from graftlm.errors import TapError
from tiny import DECODERS, ENCODERS, FAMILIES, tiny_ids, tiny_model

BIASED = [family for family in FAMILIES if family != "block-state"]
LENGTH = 12


def logits(family: str, bias: Any, mask: Tensor | None = None) -> Tensor:
    """Of a model with `bias(call, inputs)` in every layer."""
    live = tiny_model(family)
    sites = Sites(live)
    taps = [Tap(Site("attention", layer), "before", "bias", bias) for layer in range(sites.n_layers)]
    wiring = TapHooks(live, sites, {"bias": taps}, lambda call: None)
    try:
        return live(tiny_ids()[:, :LENGTH], attention_mask=mask).logits
    finally:
        wiring.remove()


def bare(family: str, mask: Tensor | None = None) -> Tensor:
    return tiny_model(family)(tiny_ids()[:, :LENGTH], attention_mask=mask).logits


@pytest.mark.parametrize(("family", "padded"), rotated(BIASED, [False, True]))
def test_the_same_number_everywhere_changes_nothing(family: str, padded: bool) -> None:
    mask = torch.ones(len(tiny_ids()), LENGTH, dtype=torch.long)
    mask[0, :5] = 0 if padded else 1
    found = logits(family, lambda call, inputs: torch.full((1, 1, LENGTH, LENGTH), 3.0), mask)
    there = mask.bool()
    torch.testing.assert_close(found[there], bare(family, mask)[there], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [family for family in BIASED if family != "roberta"])  # counts positions from ids
def test_a_key_with_very_little_is_not_seen(family: str) -> None:
    """As if the row's mask hid the first tokens: what comes after them is the same."""

    def hide(call: Call, inputs: Tensor) -> Tensor:
        bias = torch.zeros(1, 1, LENGTH, LENGTH)
        bias[..., :4] = -1e9
        return bias

    mask = torch.ones(len(tiny_ids()), LENGTH, dtype=torch.long)
    mask[:, :4] = 0
    places = None if family in ENCODERS else torch.arange(LENGTH)[None]
    wanted = tiny_model(family)(tiny_ids()[:, :LENGTH], attention_mask=mask, position_ids=places).logits[:, 4:]
    torch.testing.assert_close(logits(family, hide)[:, 4:], wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - bare(family)[:, 4:]).abs().max() > 0.01


@pytest.mark.parametrize("family", BIASED)
def test_what_is_added_has_gradients(family: str) -> None:
    bias = torch.zeros(1, 1, LENGTH, LENGTH, requires_grad=True)
    logits(family, lambda call, inputs: bias).pow(2).sum().backward()
    assert bias.grad is not None
    seen = bias.grad[0, 0].abs() > 0
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    assert bool(seen[later].any()) == (family in ENCODERS)
    assert seen.tril(-1).sum() > 10


@pytest.mark.parametrize("family", BIASED)
def test_none_changes_no_bit(family: str) -> None:
    assert torch.equal(logits(family, lambda call, inputs: None), bare(family))


@pytest.mark.parametrize("family", [family for family in DECODERS if family != "block-state"])
def test_two_biases_are_summed(family: str) -> None:
    live, chance = tiny_model(family), torch.Generator().manual_seed(0)
    one, other = (torch.randn(1, 1, LENGTH, LENGTH, generator=chance) for _ in range(2))
    site = Site("attention", 0)
    taps = {name: [Tap(site, "before", "bias", lambda call, inputs, b=b: b)] for name, b in (("a", one), ("b", other))}
    wiring = TapHooks(live, Sites(live), taps, lambda call: None)
    both = live(tiny_ids()[:, :LENGTH]).logits
    wiring.remove()
    wiring = TapHooks(
        live, Sites(live), {"a": [Tap(site, "before", "bias", lambda *_: one + other)]}, lambda call: None
    )
    torch.testing.assert_close(both, live(tiny_ids()[:, :LENGTH]).logits, rtol=1e-4, atol=1e-4)
    wiring.remove()


def test_sites_and_models_without_a_bias_raise() -> None:
    live = tiny_model("llama")
    for tap in (Tap(Site("ffn", 0), "before", "bias", print), Tap(Site("attention", 0), "after", "bias", print)):
        with pytest.raises(TapError) as error:
            TapHooks(live, Sites(live), {"a": [tap]}, lambda call: None)
        assert str(tap.site) in str(error.value)
    own = tiny_model("block-state")
    with pytest.raises(TapError) as error:
        TapHooks(own, Sites(own), {"a": [Tap(Site("attention", 0), "before", "bias", print)]}, lambda call: None)
    assert own.config.model_type in str(error.value)


def test_queries_after_cached_keys_see_all_of_these() -> None:
    """Without a mask, query i of the last T of S keys sees the keys up to S - T + i."""
    for queries in (1, 2):
        mask = biased_mask(None, torch.zeros(1, 1, queries, 5), causal=True)
        visible = [[key <= 5 - queries + query for key in range(5)] for query in range(queries)]
        assert (mask[0, 0] == 0).tolist() == visible
