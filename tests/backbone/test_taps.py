"""What a `Call` says, and that each forward pass has its own."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlm.backbone import Backbone, Call, Site, Sites, Tap, TapHooks
from graftlm.errors import TapError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from tiny import DECODERS, tiny_ids, tiny_model

LAYERS = 2


class Probe(Graft):
    """Looks at calls in its taps, and changes nothing."""

    def __init__(self, look: Callable[[Call, Tensor], Any], layer: int = 1) -> None:
        super().__init__()
        self.look, self.layer = look, layer

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", self.layer), "after", "add", self._tap)]

    def _tap(self, call: Call, inputs: Tensor, outputs: Tensor) -> None:
        self.look(call, inputs)


def probed(look: Callable[[Call, Tensor], Any], family: str = "llama") -> GraftedModel:
    return GraftedModel(Backbone.wrap(tiny_model(family)), {"probe": Probe(look)}).eval()


def test_a_call_has_the_inputs_of_its_pass() -> None:
    seen: list[Call] = []
    ids, mask = tiny_ids(), torch.ones_like(tiny_ids())
    mask[1, 20:] = 0
    said = {
        "attention_mask": mask,
        "position_ids": torch.arange(24).expand(2, -1),
        "domain": torch.tensor([0, 1]),
        "totals": torch.tensor([46.0, 24, 20]),
        "extras": {"task": "translate"},
    }
    probed(lambda call, _: seen.append(call))(ids, labels=ids, **said)
    (call,) = seen
    assert torch.equal(call.input_ids, ids)
    assert all(getattr(call, key) is value for key, value in said.items() if key != "extras")
    assert call.extras == {"task": "translate"}
    assert torch.equal(call.token_mask, mask.bool())
    assert call.cache is None
    assert not call.training


def test_a_call_without_inputs_has_none() -> None:
    seen: list[Call] = []
    with probed(lambda call, _: seen.append(call)) as model, torch.no_grad():
        model.model(tiny_ids())
    assert (seen[0].domain, seen[0].totals, seen[0].token_mask, seen[0].extras) == (None, None, None, {})


def test_training_is_training_with_gradients() -> None:
    seen: list[bool] = []
    model = probed(lambda call, _: seen.append(call.training))
    model.train()(tiny_ids())
    model.eval()(tiny_ids())
    with torch.no_grad():
        model.train()(tiny_ids())
    assert seen == [True, False, False]


@pytest.mark.parametrize("family", DECODERS)
def test_a_generation_shows_its_cache_and_the_new_tokens_mask(family: str) -> None:
    seen: list[tuple[Any, ...]] = []

    def look(call: Call, inputs: Tensor) -> None:
        shape = None if call.token_mask is None else tuple(call.token_mask.shape)
        seen.append((tuple(call.input_ids.shape), inputs.shape[1], shape, id(call.cache)))

    mask = torch.ones_like(tiny_ids())
    mask[0, :4] = 0
    probed(look, family).generate(tiny_ids(), attention_mask=mask, max_new_tokens=3, min_new_tokens=3)
    assert [part[:3] for part in seen] == [((2, 24), 24, (2, 24)), ((2, 1), 1, (2, 1)), ((2, 1), 1, (2, 1))]
    assert len({part[3] for part in seen}) == 1, "one cache a generation"


def test_marks_are_for_one_pass_alone() -> None:
    seen: list[Any] = []
    model = probed(lambda call, _: seen.append(call.domain))
    model(tiny_ids(), domain=torch.tensor([0, 1]))
    model(tiny_ids())
    model.generate(tiny_ids(), max_new_tokens=1)
    assert seen[0].tolist() == [0, 1]
    assert seen[1:] == [None, None]


def test_scratch_is_for_one_pass_alone() -> None:
    seen: list[dict[Any, Any]] = []

    def look(call: Call, _: Tensor) -> None:
        seen.append(dict(call.scratch))
        call.scratch["mine"] = True

    model = probed(look)
    model(tiny_ids())
    model(tiny_ids())
    assert seen == [{}, {}]


def test_passes_of_two_threads_do_not_see_each_other() -> None:
    """Both threads stand in the middle of a pass at the same time, at every step."""
    together, wrong = threading.Barrier(2, timeout=60), []

    def look(call: Call, inputs: Tensor) -> None:
        mine = threading.current_thread().name
        together.wait()
        if call.extras.get("who") != mine or call.input_ids.shape != inputs.shape[:2]:
            wrong.append(mine)
        together.wait()

    model = probed(look)
    rows = {"first": tiny_ids(1, 7), "second": tiny_ids(3, 9)}

    def run() -> None:
        name = threading.current_thread().name
        with torch.no_grad():
            for _ in range(3):
                model(rows[name], extras={"who": name})

    threads = [threading.Thread(target=run, name=name) for name in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_pass_within_a_pass_has_its_own_call() -> None:
    """As when a graft asks the same backbone something before each pass."""
    seen: list[tuple[int, Any]] = []

    class Asking(Probe):
        def prepare(self, call: Call) -> None:
            if call.input_ids.shape[1] == 24:
                host.model(tiny_ids(1, 5), use_cache=False)

    host = Backbone.wrap(tiny_model("llama"))
    with GraftedModel(host, {"probe": Asking(lambda call, x: seen.append((x.shape[1], call.domain)))}) as model:
        model(tiny_ids(), domain=torch.tensor([0, 1]))
    assert [length for length, _ in seen] == [5, 24]
    assert seen[1][1].tolist() == [0, 1]


def test_the_loss_is_that_of_the_outer_pass() -> None:
    class Asking(Probe):
        def prepare(self, call: Call) -> None:
            if call.input_ids.shape[1] == 24:
                host.model(tiny_ids(1, 5), use_cache=False)

        def auxiliary_loss(self, call: Call) -> Tensor:
            return torch.tensor(float(call.input_ids.shape[1]))

    host = Backbone.wrap(tiny_model("llama"))
    with GraftedModel(host, {"probe": Asking(lambda call, x: None)}) as model:
        assert model(tiny_ids(), labels=tiny_ids()).auxiliary_loss == 24


def test_embeddings_instead_of_ids() -> None:
    seen: list[Call] = []
    mask = torch.ones(2, 24, dtype=torch.long)
    with probed(lambda call, _: seen.append(call)) as model, torch.no_grad():
        inputs = model.model.get_input_embeddings()(tiny_ids())
        found = model(inputs_embeds=inputs, attention_mask=mask).logits
        torch.testing.assert_close(found, model(tiny_ids(), attention_mask=mask).logits)
    assert seen[0].input_ids is None
    assert seen[0].token_mask.shape == (2, 24)


def test_a_tap_acts_in_a_layer_that_is_called_on_its_own() -> None:
    """Where the FFN ends at another module than it begins, too."""
    seen: list[Tensor] = []
    with probed(lambda call, inputs: seen.append(inputs), "olmo2") as model:
        sites = model.backbone.sites
        hidden = torch.randn(1, 3, sites.width)
        positions = model.model.model.rotary_emb(hidden, torch.arange(3)[None])
        sites.layers[1](hidden, position_embeddings=positions, attention_mask=None)
    assert [tuple(inputs.shape) for inputs in seen] == [(1, 3, 48)]


def test_a_pass_that_fails_keeps_no_activations() -> None:
    """They would hold the graph of a training step that ran out of memory."""
    inputs: list[weakref.ref[Tensor]] = []

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with probed(lambda call, inputs: None, "olmo2") as model:
        layer = model.backbone.sites.layers[1]
        layer.mlp.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0])))
        layer.post_feedforward_layernorm.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(tiny_ids())
        gc.collect()
        assert [reference() for reference in inputs] == [None]


def test_the_end_of_an_ffn_is_not_called_without_its_beginning() -> None:
    with probed(lambda call, inputs: None, "olmo2") as model, pytest.raises(TapError) as error:
        model.backbone.sites.layers[1].post_feedforward_layernorm(torch.zeros(1, 3, 48))
    assert "ffn 1" in str(error.value)


def test_taps_act_on_a_module_called_on_its_own() -> None:
    seen: list[Call] = []
    with probed(lambda call, _: seen.append(call)) as model:
        model.backbone.sites.layers[1].mlp(torch.zeros(1, 3, 48))
    assert seen[0].input_ids is None


class HeadProbe(Probe):
    """Looks at calls at the output layer and in an FFN."""

    def taps(self) -> list[Tap]:
        return [*super().taps(), Tap(Site("head"), "after", "add", self._tap)]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_head_has_the_call_of_its_pass(family: str) -> None:
    seen: list[Call] = []
    backbone = Backbone.wrap(tiny_model(family))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backbone.model.modules()]
    model = GraftedModel(backbone, {"probe": HeadProbe(lambda call, _: seen.append(call))}).eval()
    stack = model._tap_hooks._stack
    with torch.no_grad():
        for ids in (tiny_ids(), tiny_ids(seed=1)):
            seen.clear()
            model(ids)
            assert [call is seen[0] for call in seen] == [True, True]
            assert torch.equal(seen[0].input_ids, ids)
        seen.clear()
        model.encode(tiny_ids())  # without the head
        assert len(seen) == 1
        seen.clear()
        model.generate(tiny_ids(), max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
        assert [seen[n] is seen[n + 1] for n in range(0, 6, 2)] == [True] * 3
        assert (stack.calls, stack.outer) == ([], [])
    model.detach()
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backbone.model.modules()]


@pytest.mark.parametrize("broken", ["head", "body"])
def test_a_pass_that_fails_leaves_no_call(broken: str) -> None:
    """Also a pass within a pass, through the whole model."""
    model: GraftedModel
    fails, numbers, seen = True, [], []

    def look(call: Call, hidden: Tensor) -> None:
        seen.append(call.input_ids)
        if fails and hidden.shape[1] == 5:
            raise ValueError(broken)
        if hidden.shape[1] == 24 and not numbers:
            numbers.append(0)
            with pytest.raises(ValueError, match=broken):
                model.model(tiny_ids(1, 5))

    probe = Probe(look) if broken == "body" else HeadProbe(look)
    model = GraftedModel(Backbone.wrap(tiny_model("llama")), {"probe": probe}).eval()
    with torch.no_grad():
        model(tiny_ids())
        fails = False
        seen.clear()
        model(tiny_ids(1, 5))
    assert all(torch.equal(ids, tiny_ids(1, 5)) for ids in seen)
    assert (model._tap_hooks._stack.calls, model._tap_hooks._stack.outer) == ([], [])


def test_taps_of_several_owners_act_in_order() -> None:
    live, order = tiny_model("llama"), []
    taps = {
        name: [Tap(Site("ffn", 0), "after", "add", lambda call, inputs, outputs, name=name: order.append(name))]
        for name in ("first", "second", "third")
    }
    wiring = TapHooks(live, Sites(live), taps, lambda call: order.append("prepare"))
    live(tiny_ids())
    wiring.remove()
    live(tiny_ids())
    assert order == ["prepare", "first", "second", "third"]


def test_hooks_of_others_stay() -> None:
    live, runs = tiny_model("llama"), []
    live.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append("theirs"))
    host = Backbone.wrap(live)
    with GraftedModel(host, {"probe": Probe(lambda call, x: runs.append("ours"), layer=0)}) as model:
        model(tiny_ids())
    live(tiny_ids())
    assert runs == ["theirs", "ours", "theirs"]


def test_detaching_twice_is_detaching_once() -> None:
    host = Backbone.wrap(tiny_model("llama"))
    first = GraftedModel(host, {"probe": Probe(lambda call, x: None)})
    first.detach()
    with GraftedModel(host, {"probe": Probe(lambda call, x: None)}):
        first.detach()
        assert not any(parameter.requires_grad for parameter in host.model.parameters())
