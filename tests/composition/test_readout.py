"""The readout: equations, gradients, values that overflow, and one sentence for each mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from composition import reference
from composition.test_reference import IDS, MASKS, Slow, by_position, double, position_ids
from composition.tools import OTHER_TOKENS, attached, composition, live
from graftlm.backbone import Backbone
from graftlm.errors import GraftError, RecipeError
from graftlm.grafts import graft_config
from graftlm.grafts.composition import Composition
from graftlm.grafts.composition.readout import MixtureGate, mix
from tiny import tiny_ids

V = 11


def with_readout(anchor: Backbone, models: dict[str, Backbone], **config: Any) -> Composition:
    """A composition with random tensors, whose gate is open at some tokens and closed at others."""
    graft = composition(anchor, models, **{"readout": "mixture"} | config)
    assert graft.readout is not None
    return graft


def slow_logits(anchor: Backbone, graft: Composition, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Log-probabilities (B, T, V), one token at a time; the layers are those of `Slow`."""
    gate: Any = graft.readout
    plan = {name: by_position(ids, mask) for name in graft.config.augmenting}
    read: list[Tensor] = []
    handle = anchor.model.get_output_embeddings().register_forward_hook(lambda _m, inputs, _o: read.append(inputs[0]))
    logits = Slow(anchor, graft, plan, anchor.sites.config.num_attention_heads).logits(ids, mask)
    handle.remove()
    rows = []
    for b, hidden in enumerate(read[0]):
        real = torch.arange(len(ids[b])) if mask is None else mask[b].nonzero()[:, 0]
        others = [last_of(model, ids[b, real]) for model in graft.frozen_models().values()]
        row = [logits[b, t] for t in range(len(ids[b]))]
        for s, t in enumerate(real.tolist()):
            all_logits = [logits[b, t], *(written[s] for _, written in others)]
            last = [hidden[t], *(states[s] for states, _ in others)]
            row[t] = reference.mixture(all_logits, last, gate.linear.weight, gate.linear.bias)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@torch.no_grad()
def last_of(model: Backbone, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The last hidden states and the logits of one row."""
    states = model.model.base_model(ids[None], use_cache=False).last_hidden_state
    return states[0], model.model(ids[None], use_cache=False).logits[0]


# Each padding is in the default run once, and the layers' own attention to other models with one of them.
@pytest.mark.parametrize(
    ("padding", "cross"),
    [
        pytest.param(padding, cross, marks=[] if cross == (padding == "left") else pytest.mark.slow)
        for padding in MASKS
        for cross in (True, False)
    ],
)
def test_the_mixture_equals_the_reference(padding: str, cross: bool) -> None:
    anchor, one, two = live("llama"), live("llama", 1), live("gpt2", 2)
    double(anchor, one, two)
    graft = with_readout(anchor, {"one": one, "two": two}, cross=cross).double()
    mask, parameters = MASKS[padding], list(graft.parameters())
    real = torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask.bool()
    direction = torch.randn(int(real.sum()), anchor.sites.config.vocab_size, dtype=torch.float64)
    expected = slow_logits(anchor, graft, IDS, mask)[real].log_softmax(-1)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), parameters)
    with attached(anchor, graft) as model:
        actual = model(IDS, attention_mask=mask, position_ids=position_ids(IDS, mask)).logits[real].log_softmax(-1)
        actual_gradients = torch.autograd.grad((actual * direction).sum(), parameters)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-6, atol=1e-6)


def test_a_closed_gate_keeps_every_bit_and_learns() -> None:
    """dL/db = the sum over targets y of 1 - p_A(y) / p_B(y), where the gate is exactly closed."""
    anchor, one = live("llama"), live("llama", 1)
    graft = with_readout(anchor, {"one": one}, cross=False, spread=0.0)
    ids = tiny_ids()
    with attached(anchor, graft) as model:
        output = model(ids, labels=ids)
        (output.loss * ids[:, 1:].numel()).backward()
    with torch.no_grad():
        bare, other = (backbone.model(ids).logits for backbone in (anchor, one))
    assert torch.equal(output.logits, bare)
    p_B, p_A = (x[:, :-1].softmax(-1).gather(-1, ids[:, 1:, None]) for x in (bare, other))
    gate: Any = graft.readout
    torch.testing.assert_close(gate.linear.bias.grad, (1 - p_A / p_B).sum()[None], rtol=1e-3, atol=1e-2)


def test_a_gate_that_is_shut_can_open_again() -> None:
    readout = MixtureGate([4, 4])
    with torch.no_grad():
        readout.linear.bias.fill_(-3.0)
    shares = readout([torch.randn(2, 5, 4), torch.randn(2, 5, 4)])
    assert torch.equal(shares, torch.tensor([1.0, 0.0]).expand(2, 5, 2))
    shares[..., 1].sum().backward()
    torch.testing.assert_close(readout.linear.bias.grad, torch.tensor([10 * 0.1]))


def test_shares_add_up() -> None:
    """r = (0, 2, 40): shares are (1, 0, e^2 - 1, e^30 - 1) over their sum."""
    readout = MixtureGate([4, 4, 4, 4])
    with torch.no_grad():
        readout.linear.bias.copy_(torch.tensor([-1.0, 2.0, 40.0]))
    opened = torch.tensor([0.0, 2.0, 30.0]).exp() - 1
    expected = torch.cat([torch.ones(1), opened]) / (1 + opened.sum())
    torch.testing.assert_close(readout([torch.randn(1, 1, 4)] * 4)[0, 0], expected)


def shares_of(*values: float) -> Tensor:
    return torch.tensor(values).view(1, 1, -1)


def test_probabilities_add_up() -> None:
    torch.manual_seed(0)
    logits = [3 * torch.randn(1, 1, V) for _ in range(3)]
    expected = sum(s * x.softmax(-1) for s, x in zip((0.2, 0.5, 0.3), logits, strict=True))
    actual = mix(logits[0], logits[1:], shares_of(0.2, 0.5, 0.3)).exp()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.5, 1.0])
def test_extreme_logits_stay_finite(share: float) -> None:
    own = torch.tensor([[[1e4, 0.0, float("-inf"), -1e4]]], requires_grad=True)
    other = torch.tensor([[[-1e4, 1e4, float("-inf"), 0.0]]])
    shares = shares_of(1 - share, share).requires_grad_()
    mixed = mix(own, [other], shares)
    loss = functional.cross_entropy(mixed[0], torch.tensor([1]))
    loss.backward()
    expected = {0.0: 1e4, 1e-6: 13.8155, 0.5: 0.6931, 1.0: 0.0}[share]
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert shares.grad is not None
    assert shares.grad.isfinite().all()


@pytest.mark.parametrize("size", [V - 3, V + 3])
def test_vocabularies_that_are_padded_differently(size: int) -> None:
    own, other = torch.zeros(1, 1, V), torch.randn(1, 1, size)
    actual = mix(own, [other], shares_of(0.5, 0.5)).exp()
    rest = functional.pad(other[..., :V].softmax(-1), (0, max(0, V - size)))
    torch.testing.assert_close(actual, 0.5 / V + 0.5 * rest)


def test_half_precision_is_mixed_in_float32() -> None:
    own, other = (torch.randn(1, 1, V).bfloat16() for _ in range(2))
    expected = mix(own.float(), [other.float()], shares_of(0.5, 0.5))
    actual = mix(own, [other], shares_of(0.5, 0.5))
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected.bfloat16())


@pytest.mark.parametrize("keep", [1, 4])
def test_the_last_tokens_alone(keep: int) -> None:
    anchor = live("llama")
    graft = with_readout(anchor, {"one": live("gpt2", 1)})
    with attached(anchor, graft) as model, torch.no_grad():
        torch.testing.assert_close(model(IDS, logits_to_keep=keep).logits, model(IDS).logits[:, -keep:])


def test_the_gate_is_observed_and_described() -> None:
    anchor, mask = live("llama"), MASKS["left"]
    graft = with_readout(anchor, {"one": live("gpt2", 1), "two": live("llama", 2)}, cross=False)
    seen: list[Tensor] = []
    gate: Any = graft.readout
    handle = gate.register_forward_hook(lambda _m, _i, output: seen.append(output))
    with attached(anchor, graft) as model:
        actual = model.observe(input_ids=IDS, attention_mask=mask, use_cache=False)["graft"]
    handle.remove()
    assert mask is not None
    expected = seen[0][mask.bool()].mean(0)
    assert actual.keys() == {"one_gate", "two_gate"}
    torch.testing.assert_close(torch.cat(list(actual.values())), expected[1:])
    assert (
        graft.describe(anchor)["readout: parameters"] == 2 * (3 * 48 + 1) == sum(p.numel() for p in gate.parameters())
    )


def refusals() -> Sequence[Any]:
    soft = {"final_logit_softcapping": 5.0}
    return [
        pytest.param("llama", ("llama", 1, OTHER_TOKENS), {}, "The tokens of one", id="tokens"),
        pytest.param("bert", ("llama", 1), {}, "The backbone (bert)", id="encoder"),
        pytest.param("gemma3", ("llama", 1), soft, "The backbone (gemma3_text)", id="soft cap"),
    ]


@pytest.mark.parametrize(("anchor", "one", "changes", "offender"), refusals())
def test_models_that_have_no_mixture(anchor: str, one: tuple[Any, ...], changes: Any, offender: str) -> None:
    with pytest.raises(GraftError) as caught:
        composition(live(anchor, **changes), {"one": live(*one)}, readout="mixture", cross=False)
    assert offender in str(caught.value)
    assert "readout" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"cross": False}, "set readout to mixture"),
        ({"readout": "mixture", "refresh": "prompt"}, "set refresh to every"),
    ],
)
def test_recipes(config: dict[str, Any], remedy: str) -> None:
    with pytest.raises(RecipeError) as caught:
        graft_config({"kind": "composition", "augmenting": {"one": {"name": "x"}}} | config)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
