"""The growable cache: layers of grafts beside the backbone's, through beams, batches and cropping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from cases import pairwise
from graftlm.backbone import Backbone, Call, Site, StateLayer, Tap, TokenCount, slots, token_count
from graftlm.errors import GraftError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from tiny import LAW_DECODERS, tiny_ids, tiny_model

LAYERS = 2


def caches() -> dict[str, DynamicCache]:
    """As `generate` makes it, and as a model makes it that is given none."""
    return {"by config": DynamicCache(config=tiny_model("llama").config), "lazy": DynamicCache()}


@pytest.mark.parametrize("kind", caches())
def test_slots_come_after_the_backbones_layers(kind: str) -> None:
    cache = caches()[kind]
    assert slots(cache, "memory", 2, LAYERS) == range(2, 4)
    assert slots(cache, "state", 1, LAYERS, StateLayer) == range(4, 5)
    assert slots(cache, "memory", 2, LAYERS) == range(2, 4), "the same owner gets the same layers"
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 4 + [StateLayer]
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", caches())
def test_the_backbone_fills_its_own_layers(kind: str) -> None:
    cache, live = caches()[kind], tiny_model("llama")
    (index,) = slots(cache, "state", 1, LAYERS, StateLayer)
    cache.layers[index].update(torch.zeros(2, 3))
    with torch.no_grad():
        found = [live(tiny_ids()[:, part], past_key_values=cache).logits for part in (slice(20), slice(20, 24))]
        torch.testing.assert_close(torch.cat(found, 1), live(tiny_ids()).logits, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 24
    assert cache.layers[index].keys.shape == (2, 3)


def test_two_caches_share_nothing() -> None:
    first, second = DynamicCache(), DynamicCache()
    slots(first, "memory", 3, LAYERS)
    assert slots(second, "other", 1, LAYERS) == range(2, 3)


def filled() -> tuple[DynamicCache, StateLayer]:
    cache = DynamicCache()
    for layer in range(LAYERS):
        cache.update(torch.arange(3.0).view(3, 1, 1, 1), torch.zeros(3, 1, 1, 1), layer)
    (index,) = slots(cache, "state", 1, LAYERS, StateLayer)
    layer = cache.layers[index]
    assert isinstance(layer, StateLayer)
    layer.update(torch.tensor([[0.0], [1.0], [2.0]]))
    return cache, layer


def test_states_follow_beams_and_batches() -> None:
    cache, state = filled()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert state.keys.flatten().tolist() == cache.layers[0].keys.flatten().tolist() == [2, 0, 0]
    cache.batch_repeat_interleave(2)
    assert state.keys.flatten().tolist() == cache.layers[0].keys.flatten().tolist() == [2, 2, 0, 0, 0, 0]
    cache.batch_select_indices(torch.tensor([1, 5]))
    assert state.keys.flatten().tolist() == cache.layers[0].keys.flatten().tolist() == [2, 0]
    assert state.values.shape == (2, 0)


def test_a_new_state_replaces_the_old() -> None:
    _, state = filled()
    new, _ = state.update(torch.ones(3, 1))
    assert state.keys is new
    assert (state.get_seq_length(), state.get_max_length()) == (0, -1)


def test_an_empty_state_bears_every_operation() -> None:
    cache = DynamicCache()
    (index,) = slots(cache, "state", 1, LAYERS, StateLayer)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    assert cache.layers[index].keys is None


def test_reset_empties_a_state() -> None:
    cache, state = filled()
    cache.reset()
    assert state.keys is None
    assert not state.is_initialized


def test_a_state_says_that_it_can_not_go_back() -> None:
    cache, state = filled()
    assert not cache.is_croppable
    state.crop(0)
    with pytest.raises(GraftError):
        cache.crop(-1)


class Running(Graft):
    """Adds a function of the running mean of what the last FFN read: right only if its state follows its sequence."""

    def __init__(self, host: Backbone) -> None:
        super().__init__()
        self.mix = nn.Linear(host.sites.width, host.sites.width)
        nn.init.normal_(self.mix.weight, 0, 0.3)
        self.layers = host.sites.n_layers

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", -1), "after", "add", self.add)]

    def add(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        real = torch.ones(inputs.shape[:2]) if call.token_mask is None else call.token_mask.float()
        sums = torch.cat([inputs * real[..., None], real[..., None]], -1).cumsum(1)  # (B, T, D + 1), the count last
        if call.cache is not None:
            layer: Any = call.cache.layers[slots(call.cache, "running", 1, self.layers, StateLayer)[0]]
            if layer.is_initialized:
                sums = sums + layer.keys
            layer.update(sums[:, -1:])
        return torch.tanh(self.mix(sums[..., :-1] / sums[..., -1:].clamp(min=1)))


class Looking(Graft):
    """A causal attention of its own over what the first FFN read, with keys and values in the growable cache."""

    def __init__(self, host: Backbone) -> None:
        super().__init__()
        self.queries = nn.Linear(host.sites.width, 8)
        self.keys = nn.Linear(host.sites.width, 8)
        self.values = nn.Linear(host.sites.width, host.sites.width)
        self.layers = host.sites.n_layers

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", 0), "after", "add", self.add)]

    def add(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        keys, values = self.keys(inputs)[:, None], self.values(inputs)[:, None]
        if call.cache is not None:
            index = slots(call.cache, "looking", 1, self.layers)[0]
            keys, values = call.cache.layers[index].update(keys, values)
        length, total = inputs.shape[1], keys.shape[2]
        seen = torch.ones(total, total).tril().bool()[-length:]
        if call.attention_mask is not None:
            itself = torch.eye(total, dtype=torch.bool)[-length:]
            seen = (seen & (call.attention_mask[:, None] == 1)) | itself
        scores = (self.queries(inputs)[:, None] @ keys.mT).masked_fill(~seen.view(-1, 1, length, total), -torch.inf)
        return 3 * (scores.softmax(-1) @ values)[:, 0]


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
}
MEMORIES = {"state": Running, "keys": Looking, "both": (Running, Looking)}


@pytest.mark.parametrize(("family", "memory", "decoding"), pairwise(LAW_DECODERS, MEMORIES, HOW))
def test_grafts_with_a_memory_decode_as_they_compute(family: str, memory: str, decoding: str) -> None:
    kind: Any = MEMORIES[memory]
    how = HOW[decoding]
    host = Backbone.wrap(tiny_model(family))
    grafts = {made.__name__: made(host) for made in (kind if isinstance(kind, tuple) else (kind,))}
    bare = host.model(tiny_ids()).logits
    mask = torch.ones_like(tiny_ids())
    mask[0, :7] = 0
    with GraftedModel(host, grafts) as model, torch.no_grad():
        fixed = {"max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
        out = model.generate(tiny_ids(), attention_mask=mask, **{"do_sample": False, **how}, **fixed)
        whole = torch.cat(
            [mask.repeat_interleave(len(out.sequences) // 2, 0), torch.ones(len(out.sequences), 6)], 1
        ).long()
        places = (whole.cumsum(-1) - 1).clamp(min=0)
        wanted = model(out.sequences, attention_mask=whole, position_ids=places).logits[:, -7:-1]
        assert (model.eval()(tiny_ids()).logits - bare).abs().max() > 0.1
    steps = torch.stack(out.logits, 1)
    rows = out.beam_indices[:, :6] if "num_beams" in how else torch.arange(len(steps))[:, None].expand(-1, 6)
    torch.testing.assert_close(steps[rows, torch.arange(6)], wanted, rtol=1e-4, atol=1e-4)


def test_assisted_decoding_crops_keys_and_refuses_states() -> None:
    host = Backbone.wrap(tiny_model("llama"))
    ids = tiny_ids(1, 6).repeat(1, 3)
    how = {"max_new_tokens": 8, "do_sample": False}
    with GraftedModel(host, {"looking": Looking(host)}) as model:
        assert model.generate(ids, **how).tolist() == model.generate(ids, prompt_lookup_num_tokens=3, **how).tolist()
    with (
        GraftedModel(host, {"running": Running(host)}) as model,
        pytest.raises(GraftError),
    ):
        model.generate(ids, prompt_lookup_num_tokens=3, **how)


@pytest.mark.parametrize("kind", [Running, Looking])
def test_a_cache_made_on_the_way_holds_the_grafts_layers_too(kind: Any) -> None:
    host = Backbone.wrap(tiny_model("llama"))
    with GraftedModel(host, {"memory": kind(host)}) as model, torch.no_grad():
        whole = model(tiny_ids()).logits
        first = model(tiny_ids()[:, :20], use_cache=True)
        second = model(tiny_ids()[:, 20:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, second], 1), whole, rtol=1e-4, atol=1e-4)


def test_tokens_of_a_static_cache_are_known_until_something_else_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_count, "may_read", lambda tensor: False)  # as on an accelerator
    live = tiny_model("llama")
    cache = StaticCache(config=live.config, max_cache_len=32)

    @torch.no_grad()
    def read(length: int, *, counted: bool = True) -> TokenCount:
        count = TokenCount(cache, length)
        live(tiny_ids(1, length), past_key_values=cache, use_cache=True)
        if counted:
            count.keep()
        return count

    counts = [read(length) for length in (4, 1, 2)]
    assert [(count.is_known, count.read()) for count in counts] == [(True, 0), (True, 4), (True, 5)]
    read(3, counted=False)
    later = read(1)
    assert (later.is_known, later.read()) == (False, 10), "the count is that before the pass, though read after it"
    assert not read(1).is_known, "a count that nobody read is not kept"
    cache.reset()
    assert (TokenCount(cache, 1).is_known, TokenCount(cache, 1).read()) == (False, 0)


class Seen(Graft):
    """Keeps the calls of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def prepare(self, call: Call) -> None:
        self.calls.append(call)

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", 0), "after", "add", lambda call, inputs, outputs: None)]


def test_masks_of_a_static_cache_are_known_without_its_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    live = tiny_model("llama")
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    mask[1, 5] = 0  # the new token of a row that has ended
    found = []
    for is_known in (True, False):
        cache = StaticCache(config=live.config, max_cache_len=9)
        with GraftedModel(Backbone.wrap(live), {"seen": (graft := Seen())}) as model, torch.no_grad():
            model(tiny_ids(2, 5), mask[:, :5], past_key_values=cache, use_cache=True)
            columns = torch.nn.functional.pad(mask, (0, 3)).bool()[:, None, None]
            if not is_known:
                monkeypatch.setattr(token_count, "may_read", lambda tensor: False)  # as on an accelerator
                vars(cache).pop(token_count.COUNT_KEY)
            model(tiny_ids(2, 1), columns, past_key_values=cache, use_cache=True)
        call = graft.calls[-1]
        assert call.token_mask is not None
        found.append((call.token_mask.tolist(), call.padding().tolist()))
        assert call.past_is_known == is_known
    assert found == [([[True], [False]], [2, 0])] * 2
