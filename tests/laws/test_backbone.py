"""Laws 1 to 3: the backbone never changes, an untrained graft changes nothing, and a detached one leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.grafts import GraftedModel, build_graft, graft_config
from laws.examples import Example, backbone, examples
from laws.tools import Bomb, bare_logits, calls_under_way, digest, graft_onto, hooks_of, logits, randomise, tensors_of
from tiny import ENCODERS, tiny_ids

pytestmark = pytest.mark.encoders


def test_every_registered_kind_has_an_example() -> None:
    from graftlm.grafts import kinds

    assert {example.kind for example in examples()} == set(kinds())


def test_training_never_touches_the_backbone(example: Example, name: str, attach: Any) -> None:
    live = backbone(name).model
    own, before = tensors_of(live), digest(tensors_of(live))
    model = attach(example, name).train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        optimiser.zero_grad()
        model(tiny_ids(seed=step), labels=tiny_ids(seed=step), domain=torch.tensor([0, 1])).loss.backward()
        optimiser.step()
    assert all(tensor.grad is None for tensor in own.values())
    assert digest(own) == before
    model.detach()
    assert all(tensor is own[key] for key, tensor in tensors_of(live).items())
    assert list(tensors_of(live)) == list(own)


def test_only_the_graft_trains_and_flags_and_modes_come_back(example: Example, name: str) -> None:
    live = backbone(name).model
    wanted = {key: i % 2 == 0 for i, (key, _) in enumerate(live.named_parameters())}
    for key, parameter in live.named_parameters():
        parameter.requires_grad_(wanted[key])
    own = {id(parameter) for parameter in live.parameters()}
    live.base_model.train()
    modes = {module: module.training for module in live.modules()}
    model = graft_onto(backbone(name), example)
    trained = model.trainable_parameters()
    assert trained
    assert own.isdisjoint(map(id, trained.values()))
    assert all(not parameter.requires_grad for parameter in live.parameters() if id(parameter) in own)
    assert not any(module.training for module in modes)
    model.detach()
    assert {key: parameter.requires_grad for key, parameter in live.named_parameters()} == wanted
    assert {module: module.training for module in live.modules()} == modes
    live.eval()


def test_untrained_graft_changes_no_bit(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name, untrained=True)
    assert torch.equal(logits(model, tiny_ids()), bare_logits(name))


def test_frozen_backbone_stays_still_in_training_mode(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name).train()
    if model.model is not backbone(name).model:
        pytest.skip("a graft that trains a copy of the whole model trains it with its dropout")
    assert torch.equal(logits(model, tiny_ids()), logits(model, tiny_ids()))
    assert torch.equal(logits(model, tiny_ids()), logits(model.eval(), tiny_ids()))


def test_detached_graft_leaves_no_bit(example: Example, name: str) -> None:
    before = bare_logits(name)
    live = backbone(name).model
    model = randomise(graft_onto(backbone(name), example), example.spread)
    logits(model, tiny_ids())
    model.detach()
    assert torch.equal(logits(live, tiny_ids()), before)
    assert not any(hooks_of(module) for module in live.modules())


def _with_bomb(example: Example, name: str, passes: int) -> GraftedModel:
    host = backbone(name)
    graft = build_graft(graft_config(example.values()), host)
    return randomise(GraftedModel(host, {"graft": graft, "bomb": Bomb(passes)}), example.spread)


def test_exception_in_a_tap_leaves_no_trace(example: Example, name: str) -> None:
    before = bare_logits(name)
    with _with_bomb(example, name, passes=-1) as model:
        model.eval()
        wanted = logits(model, tiny_ids())
        model.grafts["bomb"].passes_left = 1  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError):
            logits(model, tiny_ids(seed=3))
        assert torch.equal(logits(model, tiny_ids()), wanted), "the model no longer says what it said"
        assert not calls_under_way(model), "a call stayed on the stack, with its cache"
    assert torch.equal(logits(backbone(name).model, tiny_ids()), before)


def test_exception_in_generate_leaves_no_trace(example: Example, name: str) -> None:
    if name in ENCODERS:
        pytest.skip("an encoder does not generate")
    before = bare_logits(name)
    model = _with_bomb(example, name, passes=4)
    with pytest.raises(ZeroDivisionError), model:
        model.generate(tiny_ids(), max_new_tokens=8, min_new_tokens=8)
    assert torch.equal(logits(backbone(name).model, tiny_ids()), before)
