"""Weights per request: a row's logits are those of a literal weighted sum, whatever weights its neighbours have."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from torch import Tensor, nn

from cli.tools import invoke
from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.generation.sums import read_summands, sum_of_grafts
from graftlm.grafted.graft_set import GraftSet, MultiGraftModel, _most_columns
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import ExportsLowRank, Graft
from graftlm.grafts.low_rank_taps import LowRankTaps
from graftlm.grafts.sums import MOST_TERMS, read_sum
from graftlm.serving.app import create_app
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.protocol import EngineLimits, GenerationRequest, ServingError, UnknownModelError
from graftlm.serving.service import open_service
from graftlm.store.artifact import save_graft
from laws.examples import EXAMPLES
from serving.engines import Completion, backbone, complete, prompt, trained
from tiny import tiny_model, tiny_tokenizer

LENGTH = 9
KINDS = ("neutral-residues", "token-routing", "lora")
WEIGHTS = (0.7, 2.0, -1.5)


@functools.cache
def raw(kind: str, seed: int = 1) -> Graft:
    """A random graft, made before an engine owns the backbone."""
    return trained("llama", EXAMPLES[kind][2 if kind == "composition" else 0], seed)


@functools.cache
def graft(kind: str, seed: int = 1) -> Graft:
    made = raw(kind, seed)
    return (LowRankTaps.of(made, backbone("llama")) or made).double()


def host() -> Backbone:
    """An equal backbone, which an engine may own."""
    return Backbone.wrap(tiny_model("llama").double(), tiny_tokenizer(), "llama")


@contextmanager
def added(model: nn.Module, path: str, function: object) -> Iterator[None]:
    """Add a function of its input to the output of a module: the literal reference of a weight."""
    handle = model.get_submodule(path).register_forward_hook(
        lambda module, args, output: output + function(args[0])  # type: ignore[operator]
    )
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def last_logits(ids: Sequence[int], weights: Mapping[str, float], grafts: Mapping[str, Graft]) -> Tensor:
    with GraftedModel(backbone("llama"), grafts, weights=weights) as model:
        return model.eval()(input_ids=torch.tensor([ids])).logits[0, -1]


@torch.no_grad()
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_weight_of_lora_scales_its_change_of_the_weights(weight: float) -> None:
    """Literally: W + w B A."""
    bare = backbone("llama")
    lora = raw("lora")
    assert isinstance(lora, ExportsLowRank)
    updates = lora.low_rank_updates(bare)
    ids = prompt(LENGTH)
    found = last_logits(ids, {"a": weight}, {"a": graft("lora")})
    before = {path: bare.model.get_submodule(path).weight.data.clone() for path in updates}
    try:
        for path, update in updates.items():
            bare.model.get_submodule(path).weight.data += weight * (update.b.double() @ update.a.double())
        expected = bare.model(torch.tensor([ids])).logits[0, -1]
    finally:
        for path, unchanged in before.items():
            bare.model.get_submodule(path).weight.data = unchanged
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (found - bare.model(torch.tensor([ids])).logits[0, -1]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_weight_of_a_block_scales_its_output(weight: float) -> None:
    """Literally: FFN(x) + w g(w_g . x + b) W_o (act(W_g x) * W_i x) in each layer."""
    bare, neutral = backbone("llama"), graft("neutral-residues")
    ids = prompt(LENGTH)
    found = last_logits(ids, {"a": weight}, {"a": neutral})

    def block(layer: int, x: Tensor) -> Tensor:
        own = neutral.blocks[layer]  # type: ignore[index, operator]
        gate = own.gate(x).relu()
        return weight * gate * own.w_o(nn.functional.silu(own.w_g(x)) * own.w_i(x))

    hooks = [added(bare.model, f"model.layers.{layer}.mlp", functools.partial(block, layer)) for layer in range(2)]
    with hooks[0], hooks[1]:
        expected = bare.model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (found - last_logits(ids, {}, {"a": neutral})).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_other_weights_in_the_batch_change_nothing(kind: str) -> None:
    grafts = {"a": graft(kind), "b": graft("neutral-residues", 2)}
    mixtures = [{}, {"a": 0.7, "b": 0.3}, {"a": -1.5}, {"a": 1.0}, {"a": 0.7, "b": 0.4}, {"b": 2.0}]
    owners = [GraftSet.of({name: grafts[name] for name in weights}, weights) for weights in mixtures]
    prompts = [prompt(LENGTH + number) for number in range(len(owners))]
    model = MultiGraftModel(backbone("llama"))
    batch, logits = model.prefill(owners, prompts, list(range(len(owners))))
    tokens = [int(row.argmax()) for row in logits]
    following = model.decode(batch, tokens)
    model.detach()
    assert len(model.wired) == 0
    for number, weights in enumerate(mixtures):
        own = {name: grafts[name] for name in weights}
        expected = last_logits(prompts[number], weights, own)
        torch.testing.assert_close(logits[number], expected, rtol=1e-6, atol=1e-6)
        expected = last_logits((*prompts[number], tokens[number]), weights, own)
        torch.testing.assert_close(following[number], expected, rtol=1e-6, atol=1e-6)
    assert (logits[1] - last_logits(prompts[1], {}, grafts)).abs().max() > 1e-4


def test_other_weights_connect_no_further_taps() -> None:
    model = MultiGraftModel(backbone("llama"))
    grafts = {"a": graft("neutral-residues")}
    for number in range(1, 20):
        model.prefill(GraftSet.of(grafts, {"a": number / 10}), [prompt(3)], [None])
    assert model.wired == (GraftSet((("a", grafts["a"]),)),)
    model.detach()


def test_weights_are_left_to_eager_steps() -> None:
    grafts = {"a": graft("neutral-residues")}
    assert _most_columns(GraftSet.of(grafts, {"a": 1.0})) > 0
    assert _most_columns(GraftSet.of(grafts, {"a": 0.5})) == 0


def test_the_weight_1_is_the_graft_alone_to_the_bit() -> None:
    grafts = {"a": graft("neutral-residues")}
    assert GraftSet.of(grafts, {"a": 1.0}) == GraftSet((("a", grafts["a"]),))


WRONG = (
    *("a:0", "a:nan", "a:inf", "a:x", "a:", "a:1_0", "a:- 1", "a:--1", ":1", " :1", "a+", "+a", "a+ +b"),
    *("a:1e400", "a:1e38", "a:100.1", "a:-101", "a:1+a:2", "a:1+ a:2"),
)


@pytest.mark.parametrize("text", [*WRONG, "+".join(f"g{number}" for number in range(MOST_TERMS + 1))])
def test_a_wrong_sum_is_one_sentence(text: str) -> None:
    with pytest.raises(GraftError):
        read_sum(text)


def test_a_sum_may_have_weights_up_to_100_and_spaces() -> None:
    assert read_sum("a:0.7+b:-.3+c+d:2e-1") == {"a": 0.7, "b": -0.3, "c": 1.0, "d": 0.2}
    assert read_sum(" a: 0.7 + b :-100 + c ") == {"a": 0.7, "b": -100.0, "c": 1.0}


@pytest.mark.parametrize("weight", [0.0, 101.0, -1e38, float("inf"), float("nan")])
def test_a_wrong_weight_is_refused_by_a_model_and_a_batch(weight: float) -> None:
    grafts = {"a": graft("neutral-residues")}
    with pytest.raises(GraftError):
        GraftedModel(backbone("llama"), grafts, weights={"a": weight})
    with pytest.raises(GraftError):
        GraftSet.of(grafts, {"a": weight})


@pytest.fixture(scope="module")
def engine() -> Iterator[BatchingEngine]:
    grafts = {"da": graft("neutral-residues"), "law": graft("neutral-residues", 2), "lora": raw("lora")}
    grafts["two"] = raw("composition")
    built = BatchingEngine(host(), grafts, "llama", EngineLimits(batch_size=8))
    yield built
    built.close(0)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [[output.token for output in one.outputs] for one in completions]


def test_requests_with_weights_are_answered_together(engine: BatchingEngine) -> None:
    models = ["llama", "da:0.7+law:0.3", "da:0.3+law:0.7", "da", "da:1+law:1", "da+law", "lora:-0.5+da", "lora"]
    requests = [GenerationRequest(prompt(70), model, max_tokens=6, temperature=0.0, logprobs=1) for model in models]
    together = complete(engine, requests)
    alone = [complete(engine, [request])[0] for request in requests]
    assert tokens(together) == tokens(alone)
    assert together[4].content[0] == together[5].content[0], "weights of 1 are no weights"
    again = complete(engine, requests)  # from the prefix cache, which must not mix weights up
    assert all(one.finish.cached_tokens for one in again)
    assert tokens(again) == tokens(together)
    for one, other in zip(again, together, strict=True):
        found = [output.logprob for output in one.outputs]
        assert found == pytest.approx([output.logprob for output in other.outputs], abs=1e-6)


@pytest.mark.parametrize(
    ("model", "kind", "named"),
    [
        ("da:nan", ServingError, "da:nan"),
        ("da:0+law", ServingError, "da:0"),
        ("da:1e38", ServingError, "da:1e38"),
        ("da:-101+law", ServingError, "da:-101"),
        (" nobody : 0.5 + da", UnknownModelError, "'nobody'"),
        (" llama", UnknownModelError, "' llama'"),
        ("da:0.5+da:0.5", ServingError, "da twice"),
        ("nobody:0.5", UnknownModelError, "nobody"),
        ("two:0.5", ServingError, "two"),
        ("llama:0.5", ServingError, "llama"),
        ("llama:0.5+da", ServingError, "llama"),
    ],
)
def test_a_model_that_cannot_be_weighted_is_named(
    model: str, kind: type[ServingError], named: str, engine: BatchingEngine
) -> None:
    with pytest.raises(ServingError) as error:
        engine.submit([GenerationRequest(prompt(3), model, max_tokens=1)])
    assert type(error.value) is kind
    assert named in str(error.value)


def test_a_name_with_a_colon_is_refused(engine: BatchingEngine) -> None:
    with pytest.raises(GraftError):
        engine.replace("da:0.5", graft("lora"))


def test_a_response_has_the_weights(tmp_path: Path) -> None:
    single = host()
    for name, seed in (("da", 1), ("law", 2)):
        save_graft(graft("neutral-residues", seed), single, tmp_path / name)
    service = open_service(single, folder=tmp_path, name="llama")
    try:
        with TestClient(create_app(service), base_url="http://localhost") as client:
            body = {"model": "da:0.7+law:-0.3", "prompt": "the fox", "max_tokens": 2, "graftlm": {"trace": True}}
            weighted = client.post("/v1/completions", json=body)
            single_graft = client.post("/v1/completions", json=body | {"model": "da"})
            spaced = client.post("/v1/completions", json=body | {"model": "da: 0.7 + law: -0.3"})
            wrong = [
                client.post("/v1/completions", json=body | {"model": model})
                for model in ("da:1e999", "da:1e308", "da:1e38", "da:100.5")
            ]
            streamed = client.post("/v1/completions", json=body | {"stream": True}).text
            metrics = client.get("/metrics").text
    finally:
        service.engine.close(0)
    assert weighted.status_code == 200, weighted.text
    assert single_graft.status_code == 200, single_graft.text
    answer, plain = weighted.json(), single_graft.json()
    assert answer["model"] == "da:0.7+law:-0.3"
    assert answer["choices"][0]["graftlm"]["weights"] == {"da": 0.7, "law": -0.3}
    assert answer["choices"][0]["graftlm"]["trace"]
    assert "weights" not in plain["choices"][0]["graftlm"]
    assert spaced.json()["choices"][0]["graftlm"]["weights"] == {"da": 0.7, "law": -0.3}
    for response in wrong:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert '"weights":{"da":0.7,"law":-0.3}' in streamed
    assert "0.7" not in "".join(line for line in metrics.splitlines() if "model=" in line)


def test_folders_with_weights_are_generated_from(tmp_path: Path, tiny_backbone: object) -> None:
    from graftlm.backbone import load_backbone
    from graftlm.testing import attach_graft, randomise

    base = load_backbone(tiny_backbone("llama"))  # type: ignore[operator]
    saved: dict[str, Graft] = {}
    for name, kind in (("da", "lora"), ("law", "lora"), ("res", "neutral-residues")):
        with randomise(attach_graft(base, dict(EXAMPLES[kind][0].config) | {"kind": kind}).eval(), 0.2) as model:
            saved[name] = model.grafts["graft"]  # type: ignore[assignment]
        save_graft(saved[name], base, tmp_path / name / "graft")
    text = f"{tmp_path}/da:0.7+{tmp_path}/law/graft:0.3+{tmp_path}/res"
    summands = read_summands(text)
    assert list(summands.values()) == [0.7, 0.3, 1.0]
    with sum_of_grafts(summands, base) as model:
        assert model.weights == {"da": 0.7, "law": 0.3, "res": 1.0}
    outcome = invoke("generate", text, "the fox", "--max-new-tokens", "2", "--trace", "--json")
    assert '"weights"' in outcome.out, outcome.err
    for wrong in (
        f"{tmp_path}/da:x+{tmp_path}/law",
        f"{tmp_path}/da+{tmp_path}/da/graft",
        f"{tmp_path}/da:0",
        f"{tmp_path}/da:101",
    ):
        assert invoke("generate", wrong, "the fox").code == 2


def test_a_graft_that_replaces_the_weights_takes_no_weight() -> None:
    tuned = raw("finetune")
    with pytest.raises(GraftError) as error:
        GraftedModel(backbone("llama"), {"tuned": tuned}, weights={"tuned": 0.5})
    assert "finetune" in str(error.value)
