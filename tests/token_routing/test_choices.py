"""A graft that reads the prompt as a choice between LoRA adapters, which another server can make before a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.token_routing import TokenRouting
from graftlm.testing import attach_graft, randomise
from tiny import tiny_model, tiny_tokenizer

TEXTS = {"one": ["Velmora lies by the sea"], "two": ["Zorvath was built in 1623"]}
PROMPTS = ("Velmora", "hidden states", "Zorvath and Zorvath", "1623", "hidden Velmora states Zorvath")
CONFIG: dict[str, Any] = {
    "kind": "token-routing",
    "experts": {name: {"rank": 2, "targets": ["ffn"], "texts": texts} for name, texts in TEXTS.items()},
    "embedder": {"name": "words", "centroids": "all"},
    "threshold": 0.5,
    "reads": "prompt",
    "top": 1,
}


def made(**changes: Any) -> tuple[TokenRouting, Backbone]:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    with randomise(attach_graft(backbone, CONFIG | changes).eval(), 0.2) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, TokenRouting)
    return graft, backbone


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_choice_is_the_route_of_a_generation(prompt: str) -> None:
    graft, backbone = made()
    graft.fit({})
    ids = backbone.need_tokenizer()(prompt)["input_ids"]
    inputs = torch.tensor([ids])
    with GraftedModel(backbone, {"graft": graft}) as model:
        output = model.eval().generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=3,
            return_dict_in_generate=True,
        )
        traces = model.cache_traces(output.past_key_values)
    trace = traces["graft"]
    for weights in trace.values[0].tolist():
        best = max(range(len(weights)), key=weights.__getitem__)
        assert weights[best] == pytest.approx(1.0)
        name = trace.labels[best]
        assert graft.choose(ids) == (None if name == "none" else name)


def test_the_prompts_need_different_experts() -> None:
    graft, backbone = made()
    graft.fit({})
    tokenizer = backbone.need_tokenizer()
    choices = [graft.choose(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS[:4]]
    assert choices == ["one", None, "two", "two"]


def test_each_choice_has_the_updates_of_its_expert() -> None:
    graft, backbone = made()
    for name, updates in graft.choices(backbone).items():
        factors = graft.factors(name)
        assert updates.keys() == factors.keys()
        for path, update in updates.items():
            expected = factors[path].scale * (factors[path].b.T @ factors[path].a)
            torch.testing.assert_close(update.b @ update.a, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"reads": "all"}, {"top": None}, {"embedder": {"name": "backbone"}}])
def test_other_routes_are_no_choice(changes: dict[str, Any]) -> None:
    graft, backbone = made(**changes)
    with pytest.raises(ArtifactError):
        graft.choices(backbone)
