"""Attached grafts add few operations to a decode step, which waits for the host on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_config, kinds
from graftlm.grafts.base import FitsOnText
from graftlm.grafts.composition import Composition, CompositionConfig
from graftlm.testing.operations import count_operations, decode_operations
from tiny import tiny_ids, tiny_model, tiny_tokenizer

LAYERS = 16  # as in Llama 3.2 1B: what is done once in a step is shared by so many layers
TEXTS = ("The quick brown fox", "def forward(self)", "Le renard brun", "lazy dogs run")


def experts(count: int, *targets: str) -> dict[str, Any]:
    names = [f"expert{number}" for number in range(count)]
    return {
        name: {"rank": 4, "targets": list(targets), "texts": [text]} for name, text in zip(names, TEXTS, strict=False)
    }


IN_PAPER = ("q_proj", "v_proj")
AUGMENTED = {"one": {"name": "in memory"}}
# By name: a config, and the largest ratio of a step's operations to those of the bare backbone, which only falls. With
# a composition, to those of both parents.
GRAFTS: dict[str, tuple[dict[str, Any], float]] = {
    "open gates": ({"kind": "neutral-residues", "gate_init": "open"}, 1.22),
    "adapter": ({"kind": "adapter"}, 1.16),
    "lora": ({"kind": "lora", "capacity": 0.1}, 1.42),
    "one expert": ({"kind": "token-routing", "experts": experts(1, *IN_PAPER)}, 1.21),
    "four experts": ({"kind": "token-routing", "experts": experts(4, *IN_PAPER)}, 1.27),
    "four everywhere": ({"kind": "token-routing", "experts": experts(4, "attention", "ffn")}, 1.68),
    "composition": ({"kind": "composition", "augmenting": AUGMENTED}, 1.1),
    "mixture": ({"kind": "composition", "augmenting": AUGMENTED, "cross": False, "readout": "mixture"}, 1.04),
    "memory": ({"kind": "memory", "window": 32, "heads": 2, "head_width": 8}, 1.31),
    "tasks": ({"kind": "conditional-tasks", "tasks": {"a": {"type": "classification", "labels": ["x", "y"]}}}, 2.82),
    "peft": ({"kind": "peft", "method": "IA3"}, 1.13),
    "llama-pro": ({"kind": "llama-pro", "blocks": 1}, 1.07),
    "finetune": ({"kind": "finetune"}, 1.01),
}


def backbone(seed: int = 0) -> Backbone:
    return Backbone.wrap(tiny_model("llama", seed, num_hidden_layers=LAYERS), tiny_tokenizer())


def steps_of(config: dict[str, Any]) -> tuple[PreTrainedModel, list[PreTrainedModel]]:
    """A grafted model, and the bare models whose steps its own is compared with."""
    parsed = graft_config(config)
    host = backbone()
    bare = [backbone().model]
    graft: Graft
    if isinstance(parsed, CompositionConfig):
        graft = Composition(parsed, host, augmenting={"one": backbone(1)})
        bare.append(backbone(1).model)
    else:
        graft = build_graft(parsed, host)
    if isinstance(graft, FitsOnText):
        graft.fit({})
    return GraftedModel(host, {"graft": graft}).eval().model, bare


@pytest.mark.parametrize("name", GRAFTS)
def test_a_decode_step_has_few_more_operations(name: str) -> None:
    config, most = GRAFTS[name]
    prompt = tiny_ids(1, 8)
    grafted, bare = steps_of(config)
    operations = decode_operations([grafted], prompt)
    bare_operations = decode_operations(bare, prompt)
    ratio = operations.total() / bare_operations.total()
    assert 1 <= ratio <= most, f"{ratio:.3f}: {operations - bare_operations}"


def test_every_kind_is_counted() -> None:
    assert {config["kind"] for config, _ in GRAFTS.values()} == set(kinds())


def test_views_count() -> None:
    counts = count_operations(lambda: torch.ones(2, 3).T.neg())
    assert counts == {"aten.ones.default": 1, "aten.permute.default": 1, "aten.neg.default": 1}
