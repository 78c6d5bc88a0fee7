"""Law 9: routes, updates and their gradients equal `reference.py`, in full passes and token by token."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from graftlm.backbone import Call
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.token_routing import TokenRouting
from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.experts import ExpertTarget, Factors
from graftlm.grafts.token_routing.mixture import MixedProjection, RouteWeights
from graftlm.grafts.token_routing.policy import best_scores, cluster, expert_weights, fit_whitener, scores_of
from graftlm.grafts.token_routing.routing_state import route_spans
from tiny import SPECIAL, tiny_ids, tiny_model
from token_routing import reference
from token_routing.tools import backbone

EXPERTS = {
    "one": {"rank": 2, "targets": ["attention"], "texts": ["The quick brown fox jumps over the lazy dog", "thin fox"]},
    "two": {"rank": 1, "targets": ["ffn"], "texts": ["Le renard brun saute", "par-dessus le chien paresseux"]},
    "three": {
        "rank": 3,
        "targets": ["ffn"],
        "texts": ["def forward(self, hidden_states): return self.down", "self.up(x)", "lazy forward"],
    },
}
CONFIGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["softmax", "nearest", "discriminant"]),
        "temperature": st.sampled_from([0.05, 0.3]),
        "top": st.sampled_from([None, 1, 2]),
        "threshold": st.sampled_from([None, -0.2, 0.3]),
        "every": st.integers(1, 4),
        "reads": st.sampled_from(["all", "prompt"]),
        "window": st.sampled_from([None, 1, 5]),
        "prompt": st.sampled_from(["whole", "causal"]),
        "cache": st.sampled_from(["keep", "recompute"]),
        "embedder": st.fixed_dictionaries(
            {
                "layers": st.sampled_from([0, 1, -1]),
                "centre": st.booleans(),
                "whiten": st.booleans(),
                "centroids": st.sampled_from([1, 2, "all"]),
            }
        ),
    }
).filter(lambda config: (config["reads"], config["prompt"]) != ("prompt", "causal"))
DISCRIMINANT = {"policy": "discriminant", "temperature": 20.0, "threshold": None}


def graft_of(settings: dict[str, Any]) -> TokenRouting:
    if settings.get("policy") == "discriminant":
        settings = {**settings, **DISCRIMINANT, "embedder": {**settings.get("embedder", {}), "whiten": True}}
    config = graft_config({"kind": "token-routing", "experts": EXPERTS, **settings})
    graft = build_graft(config, backbone("llama"))
    assert isinstance(graft, TokenRouting)
    return graft


@functools.cache
def bare() -> Any:
    """The same backbone, never grafted."""
    return tiny_model("llama")


@torch.no_grad()
def vectors_of(tokens: list[int], layers: int) -> list[torch.Tensor]:
    """The token vectors, each (d,), whose mean is the embedding."""
    if layers == 0:
        return list(bare().get_input_embeddings().weight[tokens])
    return list(reference.hidden_states(tokens, layers, bare()))


@functools.cache
def embedded_examples(layers: int) -> list[list[torch.Tensor]]:
    """The embeddings of each expert's examples."""
    tokenizer = backbone("llama").need_tokenizer()
    token_ids = [[tokenizer(text)["input_ids"] for text in expert["texts"]] for expert in EXPERTS.values()]
    return [
        [reference.embed(ids, vectors_of(ids, layers), range(len(SPECIAL))) for ids in group] for group in token_ids
    ]


def literal(graft: TokenRouting, tokens: list[int], prompt: int) -> torch.Tensor:
    """(tokens, E + 1) weights by `reference.py`, from token ids and examples."""
    embedder = graft.config.embedder
    examples, vectors, rows = embedded_examples(embedder.layers), vectors_of(tokens, embedder.layers), []
    whitening = reference.whitening(examples) if embedder.whiten else None
    for i in range(len(tokens)):
        columns = reference.route_columns(i, prompt, graft.config)
        vector = reference.embed(tokens[columns], vectors[columns], range(len(SPECIAL)))
        own = [reference.clusters(group, embedder.centroids) for group in examples]
        rows.append(reference.weights(vector, own, graft.config, whitening))
    return torch.tensor(rows)


@pytest.mark.parametrize("layers", [0, 1, -1])
def test_centroids_are_the_mean_of_the_examples(layers: int) -> None:
    graft = graft_of({"embedder": {"layers": layers}})
    graft.fit({})
    expected = torch.stack(reference.centroids(embedded_examples(layers)))
    torch.testing.assert_close(graft.centroids, expected, rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([2, 3, 9]),
    st.integers(0, 99),
)
def test_clusters_are_lloyds(kinds: list[int], width: int, count: int, seed: int) -> None:
    points = torch.randn(6, width, generator=torch.Generator().manual_seed(seed))[kinds]  # with equal ones
    actual, expected = cluster(points, count), reference.clusters(list(points.double()), count)
    torch.testing.assert_close(actual, torch.stack(expected).float(), rtol=1e-4, atol=1e-5)
    distinct = len(set(kinds))
    assert len(actual) == min(count, distinct)
    assert torch.equal(cluster(points, "all"), points)


def test_discriminant_scores_are_log_posteriors_up_to_what_experts_share() -> None:
    groups = [
        torch.randn(200, 3, generator=torch.Generator().manual_seed(n)) * torch.tensor([3.0, 1, 0.3]) for n in (0, 1)
    ]
    groups[1] = groups[1] + torch.tensor([2.0, 0.5, 0.2])
    whitener, variance = fit_whitener(groups)
    centroids, v = torch.stack([group.mean(0) for group in groups]), torch.tensor([[0.5, 0.1, 0.4], [2.0, 0.0, -0.1]])
    actual = scores_of(centroids, v, centroids.mean(0), whitener, variance)
    covariance = reference.whitening([list(group.double()) for group in groups]).inverse().matrix_power(2)
    normal = [torch.distributions.MultivariateNormal(c.double(), covariance).log_prob(v.double()) for c in centroids]
    torch.testing.assert_close(actual.softmax(-1), torch.stack(normal, -1).softmax(-1).float(), rtol=1e-3, atol=1e-4)


def test_an_expert_has_the_score_of_its_best_centroid() -> None:
    scores, owners = torch.tensor([[-3.0, -1, -2, -5]]), torch.tensor([0, 1, 0, 1])
    assert best_scores(scores, owners, 2).tolist() == [[-2.0, -1.0]]


def test_temperatures_by_default() -> None:
    for policy, temperature in (("softmax", 0.03), ("discriminant", 1.0)):
        config = TokenRoutingConfig.model_validate({"experts": EXPERTS, "policy": policy})
        scores = torch.tensor([0.03, 0.06, 0.0])
        torch.testing.assert_close(expert_weights(scores, config)[:3], (scores / temperature).softmax(-1))


@given(CONFIGS, st.integers(1, 9), st.integers(10, 16), st.integers(0, 99))
def test_routes_of_a_full_pass(settings: dict[str, Any], prompt: int, length: int, seed: int) -> None:
    graft, ids = graft_of(settings), tiny_ids(2, length, seed)
    with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": graft}) as model:
        marked = (torch.arange(length) < prompt).expand(2, -1)
        seen: list[torch.Tensor] = []
        weigh = graft._token_weights
        graft._token_weights = lambda *a, **k: seen.append(weigh(*a, **k)) or seen[-1]
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
        actual = model.cache_traces(output.past_key_values)["graft"]
    assert actual.labels == [*EXPERTS, "none"]
    for row in range(2):
        expected = literal(graft, output.sequences[row, :-1].tolist(), prompt)
        torch.testing.assert_close(actual.values[row], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.values.sum(-1), torch.ones(2, prompt + 6))


@pytest.mark.slow
@given(CONFIGS, st.integers(1, 9), st.integers(10, 16), st.integers(0, 99))
def test_updated_weights_do_not_depend_on_the_interval(
    settings: dict[str, Any], prompt: int, length: int, seed: int
) -> None:
    ids, actual = tiny_ids(1, length, seed), {}
    for every in (1, settings["every"]):
        graft = graft_of({**settings, "every": every})
        cache = DynamicCache()
        with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": graft}) as model:
            model(ids[:, :prompt], past_key_values=cache)
            model(ids[:, prompt:], past_key_values=cache)
            actual[every] = model.cache_traces(cache)["graft"].values[0]
    given_ = prompt if graft.config.prompt == "whole" else 1
    updated = [i for i in range(length) if i < given_ or (i + 1 - given_) % settings["every"] == 0]
    torch.testing.assert_close(actual[settings["every"]][updated], actual[1][updated], rtol=1e-4, atol=1e-5)


def test_left_padding_changes_no_route() -> None:
    graft = graft_of({"every": 3, "temperature": 1.0})
    ids, mask = tiny_ids(2, 9, 5), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with GraftedModel(backbone("llama"), {"graft": graft}) as model:
        how: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        both = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **how)
        alone = model.generate(ids[1:, 4:], return_dict_in_generate=True, **how)
        padded, plain = (model.cache_traces(output.past_key_values)["graft"].values for output in (both, alone))
    torch.testing.assert_close(padded[1, 4:], plain[0], rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 99))
def test_updates_and_their_gradients(ranks: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    experts = {n: Factors(draw(rank, 5), draw(rank, 6), float(1 + n)) for n, rank in enumerate(ranks)}
    mixture = MixedProjection(experts, ExpertTarget(5, 6), "exact", frozenset(experts))
    x, weights = draw(1, 3, 5).requires_grad_(), draw(1, 3, len(ranks)).softmax(-1)
    actual = mixture(x, RouteWeights.of(weights, sparse=False))
    assert actual is not None
    leaves = [Factors(e.a.clone().requires_grad_(), e.b.clone().requires_grad_(), e.scale) for e in experts.values()]
    literal_x = x.detach().clone().requires_grad_()
    expected = torch.stack([reference.update(literal_x[0, t], weights[0, t].tolist(), leaves) for t in range(3)])[None]
    torch.testing.assert_close(actual, expected)
    direction = draw(1, 3, 6)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(x.grad, literal_x.grad)
    for number, leaf in enumerate(leaves):
        torch.testing.assert_close(mixture.a[number].grad, leaf.a.grad)
        torch.testing.assert_close(mixture.b[number].grad, leaf.b.grad)


def test_an_empty_text_has_equal_weights_or_no_expert() -> None:
    ids = torch.tensor([[2, 1, 1]])
    for settings, expected in (({}, [1 / 3, 1 / 3, 1 / 3, 0]), ({"threshold": 0.1}, [0, 0, 0, 1.0])):
        graft = graft_of(settings)
        with torch.no_grad(), GraftedModel(backbone("llama"), {"graft": graft}) as model:
            cache = DynamicCache()
            model(ids, past_key_values=cache)
            torch.testing.assert_close(model.cache_traces(cache)["graft"].values[0, -1], torch.tensor(expected))


def test_the_nearest_expert_stays_the_first_where_all_cosines_are_negative() -> None:
    config = TokenRoutingConfig.model_validate({"experts": EXPERTS, "policy": "nearest", "boost": 4.0})
    weights = expert_weights(torch.tensor([[-0.2, -0.5, -0.9]]), config)[0, :3]
    expected = torch.tensor([-0.2 / 4, -0.5, -0.9]).softmax(-1)
    torch.testing.assert_close(weights, expected)


def test_in_training_the_nearest_expert_has_all_weight() -> None:
    host = backbone("llama")
    graft: Any = build_graft(graft_config({"kind": "token-routing", "experts": EXPERTS}), host)
    routes, weights = graft._routes, []
    graft._routes = lambda weights_BTE: weights.append(weights_BTE) or routes(weights_BTE)
    with GraftedModel(host, {"graft": graft}) as model:
        for number, expert in enumerate(EXPERTS.values()):
            ids = host.need_tokenizer()(expert["texts"][0], return_tensors="pt")["input_ids"]
            model.train()(ids, labels=ids)
            assert weights[-1].argmax(-1).unique().tolist() == [number]
            assert (weights[-1].amax(-1) == 1).all()


def test_in_training_a_route_ends_at_the_last_real_token() -> None:
    config = TokenRoutingConfig.model_validate({"experts": EXPERTS})
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    for call in (Call(tiny_ids(2, 6), mask), Call(tiny_ids(2, 6), token_mask=mask.bool())):
        call.training = True
        spans = route_spans(call, config, None, causal=True)
        assert spans.end[0].tolist() == [5] * 6
        assert spans.end[1, :4].tolist() == [3] * 4
