"""A tiny grafted model and data for tests; as a script, it trains them in all the processes it is launched in."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from graftlm.backbone import Backbone
from graftlm.data import Mixture, TokenBlocks
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.base import FitsOnText
from graftlm.store.artifact import graft_tensors
from graftlm.training import TrainingConfig, train
from laws import examples
from tiny import TOKENS, tiny_model, tiny_tokenizer

LENGTH = 12
GRAFTS: dict[str, dict[str, Any]] = {
    "neutral-residues": {"kind": "neutral-residues", "capacity": 0.2, "alpha": 1.0},
    "adapter": {"kind": "adapter", "capacity": 0.2},
    "lora": {"kind": "lora", "capacity": 0.2},
    "finetune": {"kind": "finetune"},
    "osf": {"kind": "peft", "method": "OSF"},
    "llama-pro": {"kind": "llama-pro", "blocks": 1},
    "routed": {
        "kind": "token-routing",
        "experts": {"code": {"rank": 4, "targets": ["ffn"], "texts": ["def forward(self): return self.down(x)"]}},
    },
    "two-experts": {
        "kind": "token-routing",
        "experts": {
            "english": {"rank": 4, "targets": ["ffn"], "texts": ["The quick brown fox", "thin forest"]},
            "code": {"rank": 4, "targets": ["ffn"], "texts": ["def forward(self): return self.down(x)"]},
        },
    },
    "memory": {"kind": "memory", "window": 6, "sinks": 1, "layers": 2, "heads": 2, "head_width": 8},
}


def toy_model(kind: str = "neutral-residues", backbone: Backbone | None = None, **options: Any) -> GraftedModel:
    backbone = backbone or Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    torch.manual_seed(0)
    graft = build_graft(graft_config(_values(kind)), backbone)
    if isinstance(graft, FitsOnText):
        graft.fit({})
    return GraftedModel(backbone, {"graft": graft}, **options)


def _values(kind: str) -> dict[str, Any]:
    if kind == "composition":  # whose other model lies in a folder
        return examples.EXAMPLES[kind][0].values()
    return GRAFTS[kind]


def toy_mixture(batch_size: int = 8, replay_fraction: float = 0.25) -> Mixture:
    generator = np.random.default_rng(0)
    blocks = {
        domain: TokenBlocks(generator.integers(4, TOKENS // 4, (20, LENGTH)).astype(np.int32), boundaries="joined")
        for domain in (0, 1)
    }
    return Mixture(blocks, {0: replay_fraction, 1: 1 - replay_fraction}, batch_size, seed=0)


def toy_config(**changes: Any) -> TrainingConfig:
    values = {"steps": 6, "batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 2, "checkpoint_every": 2, "clip": 1.0}
    return TrainingConfig.parse(values | changes)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what trains, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def run_jobs(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Train each job's graft, one after the other on one backbone, and write its tensors beside its history."""
    torch.set_num_threads(1)
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    for job in jobs:
        config, out = toy_config(**job.get("training", {})), folder / job["name"]
        objective = job.get("old_objective", "replay")
        with toy_model(job.get("graft", "neutral-residues"), backbone, old_objective=objective) as model:
            train(model, toy_mixture(config.batch_size), config, out, progress=False)
            tensors = graft_tensors(model.grafts["graft"])  # type: ignore[arg-type]  # a ModuleDict holds modules
        after = backbone.model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "the backbone changed"
        if int(os.environ.get("RANK", "0")) == 0:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "final.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", type=json.loads, help="a list of name, graft and training")
    arguments = parser.parse_args()
    run_jobs(arguments.folder, arguments.jobs)
    (arguments.folder / "processes.txt").write_text(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main()
