"""A carrier with several grafts and a mixture of two, and what each of them generates."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.export import export_many
from graftlm.export.many import CARRIER, SETTINGS
from graftlm.export.shared import SharedGraft
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, HasTensors
from integrations.vllm.comparison import Continuation
from integrations.vllm.models import PROMPTS, Exported, continuations, first_logprobs, random_graft

BARE = "bare"
MIXTURE = "mixture"
LORA = "lora"
FIRST = "relu"
GRAFTS: dict[str, dict[str, Any]] = {
    FIRST: {"kind": "neutral-residues", "width": 47},
    "sigmoid": {"kind": "neutral-residues", "width": 9, "gate": "sigmoid"},
    "adapter": {"kind": "adapter", "width": 7},
    LORA: {"kind": "lora", "rank": 4},
}
"""Configs of the grafts of a carrier."""
INSTEAD = "adapter"
"""The graft that is mixed with the first where LoRA can't be exported."""
WEIGHTS = (0.7, 0.3)
"""The weights of the two grafts of the mixture."""
_OUTPUTS = ("w_o.weight", "lora_B.weight")
"""Ends of the names of the matrices in which the outputs of a graft are linear."""


def exported_carrier(backbone: Backbone, folder: Path) -> Exported:
    """Export grafts and their mixture with a carrier, and continue each prompt with each of them and with none.

    All continuations are rows of one batch, in which the grafts take turns. LoRA is left out, with a note, if it can't
    share the backbone.

    Raises:
        GraftError: the other grafts can't be exported.
    """
    grafts, note = _grafts(backbone)
    weights: dict[str, float] = dict(zip((FIRST, LORA if LORA in grafts else INSTEAD), WEIGHTS, strict=True))
    export_many(grafts, backbone, folder, {MIXTURE: weights})
    sets = {BARE: {}, **{name: {name: graft} for name, graft in grafts.items()}}
    sets[MIXTURE] = {name: _scaled(grafts[name], weight) for name, weight in weights.items()}

    bare = first_logprobs(backbone.model)
    effects = []
    expected: dict[str, list[Continuation]] = {}
    for name, members in sets.items():
        model: nn.Module = backbone.model
        if members:
            with GraftedModel(backbone, members) as model:
                model.eval()
                expected[name] = continuations(model)
                effects.append(float((first_logprobs(model) - bare).abs().max()))
        else:
            expected[name] = continuations(model)
    rows = [(name, number) for number in range(len(PROMPTS)) for name in sets]
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    return Exported(
        folder=folder / CARRIER,
        expected=[expected[name][number] for name, number in rows],
        effect=min(effects),
        prompts=[PROMPTS[number] for _, number in rows],
        names=[f"{name}, prompt {number + 1}" for name, number in rows],
        loras=[None if name == BARE else str(folder / name) for name, _ in rows],
        engine=_engine(settings, len(rows)),
        note=note,
    )


def _engine(settings: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the options of vLLM's engine for a carrier's settings and a number of rows in one batch."""
    return {
        "enable_lora": True,
        "max_loras": settings["max_loras"],
        "max_lora_rank": settings["max_lora_rank"],
        "lora_target_modules": settings["target_modules"],
        "max_num_seqs": rows,
    }


def _grafts(backbone: Backbone) -> tuple[dict[str, Graft], str]:
    """Return random grafts by name, and a note if LoRA is not among them."""
    grafts = {}
    note = ""
    for seed, (name, config) in enumerate(GRAFTS.items(), start=1):
        try:
            graft = random_graft(config, backbone, seed)
            SharedGraft.of(name, graft, backbone)
        except GraftError as error:
            if name != LORA:
                raise
            fault, _, _ = str(error).partition(": ")  # without what a user can do
            note = f"without LoRA. {fault}"
            continue
        grafts[name] = graft
    return grafts, note


@torch.no_grad()
def _scaled(graft: Graft, weight: float) -> Graft:
    """Return a copy of a graft whose outputs are multiplied by a weight."""
    result = copy.deepcopy(graft)
    tensors = result.tensors() if isinstance(result, HasTensors) else result.state_dict()
    names = [name for name in tensors if name.endswith(_OUTPUTS)]
    assert names, "the graft has matrices of outputs"
    for name in names:
        tensors[name] = weight * tensors[name]
    if isinstance(result, HasTensors):
        result.load_tensors(tensors)
    else:
        result.load_state_dict(tensors)
    return result
