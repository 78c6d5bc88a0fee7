"""Fast routes and updates equal the literal ones of `reference.py`, in whole passes and token by token."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from graftlm.backbone import Site
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.grafts.token_routing import TokenRouting, reference
from graftlm.grafts.token_routing.experts import Factors, Place
from graftlm.grafts.token_routing.mixture import Mixture, Routes
from tiny import SPECIAL, tiny_ids, tiny_model
from token_routing.tools import backbone

EXPERTS = {
    "one": {"rank": 2, "targets": ["attention"], "texts": ["The quick brown fox jumps over the lazy dog", "thin fox"]},
    "two": {"rank": 1, "targets": ["ffn"], "texts": ["Le renard brun saute", "par-dessus le chien paresseux"]},
    "three": {"rank": 3, "targets": ["ffn"], "texts": ["def forward(self, hidden_states): return self.down"]},
}
CONFIGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["softmax", "nearest"]),
        "temperature": st.sampled_from([0.05, 0.3]),
        "top": st.sampled_from([None, 1, 2]),
        "threshold": st.sampled_from([None, -0.2, 0.3]),
        "every": st.integers(1, 4),
        "reads": st.sampled_from(["all", "prompt"]),
        "window": st.sampled_from([None, 1, 5]),
        "prompt": st.sampled_from(["whole", "causal"]),
        "cache": st.sampled_from(["keep", "recompute"]),
        "embedder": st.fixed_dictionaries(
            {"layers": st.sampled_from([0, 1, -1]), "centre": st.booleans(), "whiten": st.booleans()}
        ),
    }
).filter(lambda one: (one["reads"], one["prompt"]) != ("prompt", "causal"))


def graft_of(settings: dict[str, Any]) -> TokenRouting:
    config = graft_config({"kind": "token-routing", "experts": EXPERTS, **settings})
    graft = build_graft(config, backbone("llama"))
    assert isinstance(graft, TokenRouting)
    return graft


@functools.cache
def bare() -> Any:
    """The same backbone, which no graft meets."""
    return tiny_model("llama")


@torch.no_grad()
def vectors_of(tokens: list[int], graft: TokenRouting) -> torch.Tensor:
    """(tokens, d) what the means are of."""
    layers = graft.config.embedder.layers
    if layers == 0:
        return backbone("llama").sites.module(Site("embedding"))[0].get_parameter("weight").detach()[tokens]
    return reference.hidden_states(tokens, layers, bare())


def root_of(graft: TokenRouting) -> torch.Tensor | None:
    if not graft.config.embedder.whiten:
        return None
    tokenizer, groups = backbone("llama").need_tokenizer(), []
    for one in EXPERTS.values():
        texts = [tokenizer(text)["input_ids"] for text in one["texts"]]
        embedded = [reference.embed(ids, list(vectors_of(ids, graft)), range(len(SPECIAL))) for ids in texts]
        groups.append(torch.stack(embedded))
    return reference.whitening(groups)


def literal(graft: TokenRouting, tokens: list[int], prompt: int) -> torch.Tensor:
    """(tokens, E + 1)."""
    vectors, root, rows = list(vectors_of(tokens, graft)), root_of(graft), []
    for i in range(len(tokens)):
        read = reference.columns_of_route(i, prompt, graft.config)
        vector = reference.embed(tokens[read], vectors[read], range(len(SPECIAL)))
        rows.append(reference.weights(vector, graft.centroids, graft.config, root))
    return torch.tensor(rows)


@given(CONFIGS, st.integers(1, 9), st.integers(10, 16), st.integers(0, 99))
def test_routes_of_a_whole_pass(settings: dict[str, Any], prompt: int, length: int, seed: int) -> None:
    graft, ids = graft_of(settings), tiny_ids(2, length, seed)
    with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": graft}) as model:
        marked = (torch.arange(length) < prompt).expand(2, -1)
        seen: list[torch.Tensor] = []
        weigh = graft._weigh
        graft._weigh = lambda *a, **k: seen.append(weigh(*a, **k)) or seen[-1]
        model(ids, prompt=marked)
    for row in range(2):
        torch.testing.assert_close(seen[0][row], literal(graft, ids[row].tolist(), prompt), rtol=1e-4, atol=1e-5)


@given(CONFIGS, st.integers(2, 9), st.integers(0, 99))
def test_routes_of_a_generation(settings: dict[str, Any], prompt: int, seed: int) -> None:
    graft, ids = graft_of(settings), tiny_ids(2, prompt, seed)
    with GraftedModel(backbone("llama"), {"graft": graft}) as model:
        output = model.generate(
            ids, max_new_tokens=7, min_new_tokens=7, do_sample=False, return_dict_in_generate=True, pad_token_id=0
        )
        found = model.cache_traces(output.past_key_values)["graft"]
    assert found.labels == [*EXPERTS, "none"]
    for row in range(2):
        wanted = literal(graft, output.sequences[row, :-1].tolist(), prompt)
        torch.testing.assert_close(found.values[row], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.values.sum(-1), torch.ones(2, prompt + 6))


@given(CONFIGS, st.integers(1, 9), st.integers(10, 16), st.integers(0, 99))
def test_where_a_route_is_renewed_it_is_that_of_every_token(
    settings: dict[str, Any], prompt: int, length: int, seed: int
) -> None:
    ids, found = tiny_ids(1, length, seed), {}
    for every in (1, settings["every"]):
        graft = graft_of({**settings, "every": every})
        cache = DynamicCache()
        with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": graft}) as model:
            model(ids[:, :prompt], past_key_values=cache)
            model(ids[:, prompt:], past_key_values=cache)
            found[every] = model.cache_traces(cache)["graft"].values[0]
    given_ = prompt if graft.config.prompt == "whole" else 1
    renewed = [i for i in range(length) if i < given_ or (i + 1 - given_) % settings["every"] == 0]
    torch.testing.assert_close(found[settings["every"]][renewed], found[1][renewed], rtol=1e-4, atol=1e-5)


def test_left_padding_changes_no_route() -> None:
    graft = graft_of({"every": 3})
    ids, mask = tiny_ids(2, 9, 5), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with GraftedModel(backbone("llama"), {"graft": graft}) as model:
        how: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        both = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **how)
        alone = model.generate(ids[1:, 4:], return_dict_in_generate=True, **how)
        padded, plain = (model.cache_traces(one.past_key_values)["graft"].values for one in (both, alone))
    torch.testing.assert_close(padded[1, 4:], plain[0], rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 99))
def test_updates_and_their_gradients(ranks: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    experts = {n: Factors(draw(rank, 5), draw(rank, 6), float(1 + n)) for n, rank in enumerate(ranks)}
    mixture = Mixture(experts, Place(5, 6), "exact", frozenset(experts))
    x, weights = draw(1, 3, 5).requires_grad_(), draw(1, 3, len(ranks)).softmax(-1)
    found = mixture(x, Routes.of(weights, sparse=False))
    assert found is not None
    leaves = [
        Factors(one.a.clone().requires_grad_(), one.b.clone().requires_grad_(), one.scale) for one in experts.values()
    ]
    literal_x = x.detach().clone().requires_grad_()
    wanted = torch.stack([reference.update(literal_x[0, t], weights[0, t].tolist(), leaves) for t in range(3)])[None]
    torch.testing.assert_close(found, wanted)
    direction = draw(1, 3, 6)
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    torch.testing.assert_close(x.grad, literal_x.grad)
    for number, leaf in enumerate(leaves):
        torch.testing.assert_close(mixture.a[number].grad, leaf.a.grad)
        torch.testing.assert_close(mixture.b[number].grad, leaf.b.grad)


def test_a_text_that_says_nothing_is_routed_evenly_or_not_at_all() -> None:
    ids = torch.tensor([[2, 1, 1]])
    for settings, wanted in (({}, [1 / 3, 1 / 3, 1 / 3, 0]), ({"threshold": 0.1}, [0, 0, 0, 1.0])):
        graft = graft_of(settings)
        with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": graft}) as model:
            cache = DynamicCache()
            model(ids, past_key_values=cache)
            torch.testing.assert_close(model.cache_traces(cache)["graft"].values[0, -1], torch.tensor(wanted))
