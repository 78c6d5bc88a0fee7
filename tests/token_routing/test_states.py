"""Routing by the backbone's hidden states: the silent pass, its cache, whitening, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from cases import pairwise, rotated, thinned
from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, BackboneError, GraftError, RecipeError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.token_routing import TokenRouting, silent_pass
from graftlm.grafts.token_routing.policy import fit_whitener, whiten
from graftlm.grafts.token_routing.silent_pass import SilentPass
from graftlm.store.artifact import load_graft, save_graft
from tiny import ENCODERS, FAMILIES, USUAL, tiny_ids, tiny_model, tiny_tokenizer
from token_routing import reference
from token_routing.tools import NEW, backbone, generate, recomputed, routing

EXPERTS = {
    "english": {"rank": 2, "targets": ["attention"], "texts": ["The quick brown fox", "jumps over the lazy dog"]},
    "code": {"rank": 3, "targets": ["ffn"], "texts": ["def forward(self):", "return self.down(x)"]},
}


def graft_of(host: Backbone, **settings: Any) -> TokenRouting:
    graft = build_graft(
        graft_config({"kind": "token-routing", "experts": EXPERTS, "temperature": 0.1, **settings}), host
    )
    assert isinstance(graft, TokenRouting)
    generator = torch.Generator().manual_seed(0)
    for parameter in graft.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return graft


# The silent pass


@pytest.mark.parametrize("family", thinned(FAMILIES, USUAL))
def test_a_silent_pass_equals_the_bare_backbone_while_a_graft_acts(family: str) -> None:
    host, ids = Backbone.wrap(tiny_model(family), tiny_tokenizer(), family), tiny_ids()
    with torch.no_grad():
        expected = host.model(ids, output_hidden_states=True).hidden_states
    with torch.no_grad(), GraftedModel(host, {"graft": graft_of(host, prompt="causal")}) as model:
        mixed = model(ids, output_hidden_states=True).hidden_states
        assert (mixed[-1] - expected[-1]).abs().max() > 1e-2
        for layers in range(1, len(expected)):
            states = SilentPass(host, layers).states(ids, None, None, None)
            torch.testing.assert_close(
                states, expected[layers], rtol=1e-5, atol=1e-6
            )  # a second pass may round otherwise


@pytest.mark.parametrize(
    ("family", "layers"), rotated([family for family in FAMILIES if family not in ENCODERS], [1, 2])
)
def test_a_silent_pass_continues_from_its_cache(family: str, layers: int) -> None:
    bare, ids = SilentPass(Backbone.wrap(tiny_model(family), None, family), layers), tiny_ids()
    own = Cache(layers=[DynamicLayer() for _ in range(layers)])
    parts = [bare.states(part, None, None, own) for part in ids.split([11, 1, 1, 3, 8], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), bare.states(ids, None, None, None), rtol=1e-4, atol=1e-5)


def test_a_silent_pass_shares_weights_and_runs_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    host, ids = Backbone.wrap(tiny_model("llama"), None, "llama"), tiny_ids()
    bare = SilentPass(host, 1)
    handle = host.sites.layers[0].register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    before = bare.states(ids, None, None, None)
    handle.remove()
    host.model.double()
    assert bare.states(ids, None, None, None).dtype == torch.double
    host.model.float().compile(backend="eager")
    host.model.base_model.compile(backend="eager")
    torch.testing.assert_close(bare.states(ids, None, None, None), before, rtol=1e-5, atol=1e-6)


def test_other_grafts_do_not_affect_a_silent_pass() -> None:
    host, ids = backbone("llama"), tiny_ids(1, 9)
    embedder = {"layers": -1, "whiten": True}

    def weights(**others: Any) -> Tensor:
        with GraftedModel(host, {**others, "graft": graft_of(host, embedder=embedder)}) as model:
            return model.cache_traces(generate(model, ids, max_length=None).past_key_values)["graft"].values[:, :9]

    other = build_graft(graft_config({"kind": "neutral-residues"}), host)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.testing.assert_close(weights(), weights(other=other), rtol=1e-5, atol=1e-6)  # two passes may round otherwise


def test_a_silent_pass_runs_only_its_layers_on_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    host = backbone("llama")
    layer, layer_lengths, pass_lengths = type(host.sites.layers[0]), [], []
    forward, states = layer.forward, SilentPass.states
    monkeypatch.setattr(layer, "forward", lambda *a, **k: layer_lengths.append(a[1].shape[1]) or forward(*a, **k))
    monkeypatch.setattr(SilentPass, "states", lambda *a, **k: pass_lengths.append(a[1].shape[1]) or states(*a, **k))
    graft = graft_of(host, every=2, embedder={"layers": 1})
    graft.fit({})
    pass_lengths.clear()
    layer_lengths.clear()
    with GraftedModel(host, {"graft": graft}) as model:
        generate(model, tiny_ids(1, 6))
        assert pass_lengths == [6] + [2] * ((NEW - 1) // 2), "two new tokens at every second step"
        assert len(layer_lengths) == NEW * host.sites.n_layers + len(pass_lengths)
        pass_lengths.clear()
    with GraftedModel(host, {"graft": graft_of(host, every=1, reads="prompt", embedder={"layers": 1})}) as model:
        model.grafts["graft"].fit({})  # type: ignore[operator]  # a graft's method
        pass_lengths.clear()
        generate(model, tiny_ids(1, 6))
        assert pass_lengths == [6], "the prompt alone"


# Observation


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_the_observed_weights_are_means_over_real_tokens(cache: str) -> None:
    host = backbone("llama")
    ids = tiny_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    graft = graft_of(host, prompt="causal", every=1, cache=cache, embedder={"layers": 1})
    with torch.no_grad(), GraftedModel(host, {"graft": graft}) as model:
        seen = DynamicCache()
        model(ids, attention_mask=mask, past_key_values=seen)
        trace = model.cache_traces(seen)["graft"]
        observed = model.observe(input_ids=ids, attention_mask=mask, use_cache=False)["graft"]
    expected = trace.values[mask.bool()].mean(0)
    assert expected.std() > 1e-3
    assert list(observed) == [f"weight_{name}" for name in trace.labels]
    torch.testing.assert_close(torch.cat(list(observed.values())), expected)


# In generation


HOSTS = [("llama", 1), ("llama", -1), ("gemma3", 2), ("gpt2", 1), ("qwen3", -1)]


@pytest.mark.parametrize(("tapped", "cache", "every"), pairwise(HOSTS, ["keep", "recompute"], [1, 3]))
def test_cached_logits_are_those_of_a_pass_that_knows_the_prompt(
    tapped: tuple[str, int], cache: str, every: int
) -> None:
    family, layers = tapped
    host = backbone(family)
    graft = graft_of(host, every=every, cache=cache, embedder={"layers": layers, "whiten": True})
    with GraftedModel(host, {"graft": graft}) as model:
        output = generate(model, tiny_ids(2, 11))
        weights = model.cache_traces(output.past_key_values)["graft"].values
        assert weights.std(1).max() > 1e-3, "the routes must move"
        actual = torch.stack(output.logits, 1)
        torch.testing.assert_close(actual, recomputed(model, output.sequences, 11), rtol=1e-4, atol=1e-4)


def test_beam_search_reorders_states(folders: dict[str, str]) -> None:
    with routing("llama", folders, prompt="whole", every=1, embedder={"layers": -1}) as model:
        output = generate(model, tiny_ids(2, 7), num_beams=3, output_scores=True)
        logits = recomputed(model, output.sequences, 7)
        chosen = logits.log_softmax(-1).gather(-1, output.sequences[:, 7:, None]).sum((1, 2))
        torch.testing.assert_close(output.sequences_scores * NEW, chosen, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@given(st.integers(0, 6), st.integers(0, 99), st.sampled_from([None, 3]))
def test_padding_and_neighbours_change_no_weight(padding: int, seed: int, window: int | None) -> None:
    graft = graft_of(backbone("llama"), every=1, window=window, embedder={"layers": 1, "whiten": True})
    ids, mask = tiny_ids(2, 9, seed), torch.ones(2, 9, dtype=torch.long)
    mask[1, :padding] = 0
    with GraftedModel(backbone("llama"), {"graft": graft}) as model:
        both = generate(model, ids, attention_mask=mask)
        alone = generate(model, ids[1:, padding:])
        together, apart = (model.cache_traces(output.past_key_values)["graft"].values for output in (both, alone))
    torch.testing.assert_close(together[1, padding:], apart[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.sum(-1), torch.ones(2, 9 + NEW - 1))


# Whitening


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(2, 7), st.integers(0, 99))
def test_whitening_equals_the_reference_up_to_a_factor(counts: list[int], width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-1, 1, width)
    groups = [torch.randn(max(2, count), width, generator=generator) * scales + 3 for count in counts]
    v = torch.randn(5, width, generator=generator)
    actual, expected = (
        whiten(v, fit_whitener(groups)[0]),
        v.double() @ reference.whitening([list(group.double()) for group in groups]),
    )
    cosines = torch.cosine_similarity(actual, expected.float(), dim=-1)
    torch.testing.assert_close(cosines, torch.ones(5), rtol=0, atol=1e-4)
    assert (actual.norm(dim=-1) / expected.norm(dim=-1)).std() < 1e-3


def test_directions_of_high_variance_count_less() -> None:
    noise = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 1, 1])
    whitener = fit_whitener([noise[:100], noise[100:] + torch.tensor([0.0, 5, 0])])[0]
    loud, quiet, _ = whiten(torch.eye(3), whitener).norm(dim=-1).tolist()
    assert loud * 7 < quiet


def test_identical_examples_cannot_be_whitened() -> None:
    single = {name: {**expert, "texts": expert["texts"][:1]} for name, expert in EXPERTS.items()}
    graft = graft_of(backbone("llama"), experts=single, embedder={"whiten": True})
    with pytest.raises(GraftError) as caught:
        graft.fit({})
    assert "embedder.whiten" in str(caught.value)


def test_vectors_of_the_backbone_are_whitened_by_default_where_examples_differ() -> None:
    host, ids = backbone("llama"), tiny_ids()
    single = {name: {**expert, "texts": expert["texts"][:1]} for name, expert in EXPERTS.items()}
    for experts, plain in ((EXPERTS, {"whiten": True}), (single, {"whiten": False})):
        logits = []
        for embedder in ({}, plain):
            graft = graft_of(host, experts=experts, embedder=embedder)
            with torch.no_grad(), GraftedModel(host, {"graft": graft}) as model:
                logits.append(model(ids).logits)
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=5e-5)


# The artefact


@pytest.mark.parametrize(
    ("policy", "centroids", "lost"),
    [("softmax", 1, "whitener"), ("discriminant", 2, "variance"), ("nearest", "all", "owners")],
)
def test_an_artefact_keeps_what_routes_need(policy: str, centroids: Any, lost: str, tmp_path: Path) -> None:
    host, ids = backbone("llama"), tiny_ids()
    embedder = {"layers": -1, "whiten": True, "centroids": centroids}
    graft = graft_of(host, prompt="causal", policy=policy, embedder=embedder)
    with torch.no_grad(), GraftedModel(host, {"graft": graft}) as model:
        expected = model(ids).logits
        save_graft(graft, host, tmp_path / "graft")
    loaded = load_graft(tmp_path / "graft", host)
    with torch.no_grad(), GraftedModel(host, {"graft": loaded}) as model:
        assert torch.equal(model(ids).logits, expected)
    for change in ("embedder.layers=1", "embedder.layers=0"):
        other = load_graft(tmp_path / "graft", host, [change])
        with GraftedModel(host, {"graft": other}) as model, pytest.raises(ArtifactError):
            model(ids)
    file = tmp_path / "graft" / "graft.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(ArtifactError):
        load_graft(tmp_path / "graft", host)


def test_missing_embedder_keys_have_defaults(tmp_path: Path) -> None:
    host, ids = backbone("llama"), tiny_ids()
    graft = graft_of(host, prompt="causal")
    with torch.no_grad(), GraftedModel(host, {"graft": graft}) as model:
        expected = model(ids).logits
        save_graft(graft, host, tmp_path / "graft")
    file = tmp_path / "graft" / "graft.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["embedder"] = {"name": "backbone", "centre": None, "trust_remote_code": False}
    file.write_text(json.dumps(manifest))
    with torch.no_grad(), GraftedModel(host, {"graft": load_graft(tmp_path / "graft", host)}) as model:
        assert torch.equal(model(ids).logits, expected)


# Mistakes


@pytest.mark.parametrize("layers", [3, -4])
def test_a_layer_that_is_not_there(layers: int) -> None:
    with pytest.raises(GraftError) as caught:
        graft_of(backbone("llama"), embedder={"layers": layers})
    assert f"embedder.layers is {layers}" in str(caught.value)


def test_layers_of_a_sentence_embedder() -> None:
    with pytest.raises(RecipeError) as caught:
        graft_config({"kind": "token-routing", "experts": EXPERTS, "embedder": {"name": "MiniLM", "layers": 1}})
    assert "layers" in str(caught.value)


def test_a_backbone_with_replaced_forwards() -> None:
    model = tiny_model("llama")
    add_hook_to_module(model.get_submodule("model.layers.0"), ModelHook())
    with pytest.raises(BackboneError):
        graft_of(Backbone.wrap(model, tiny_tokenizer(), "llama"), embedder={"layers": 1})


def test_a_sharded_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = SilentPass(backbone("llama"), 1)
    monkeypatch.setattr(silent_pass, "DTensor", torch.nn.Parameter)  # as if its weights were sharded
    with pytest.raises(GraftError) as caught:
        actual.states(tiny_ids(), None, None, None)
    assert "training.sharded" in str(caught.value)


def test_special_tokens_have_a_zero_embedding() -> None:
    graft = graft_of(backbone("llama"), embedder={"layers": 1})
    actual = graft._need_embedder().texts(["", "<bos><eos>", "a"])
    assert actual.abs().sum(-1).gt(0).tolist() == [False, False, True]


def test_long_examples_are_truncated() -> None:
    graft = graft_of(backbone("gpt2"), embedder={"layers": 1})
    assert torch.isfinite(graft._need_embedder().texts(["The fox. " * 600])).all()
