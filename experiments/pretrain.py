"""Small language models pretrained here: one config each, a finished one found again by all that made it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from graftlm.backbone import Backbone
from graftlm.config import Config
from graftlm.data import NEW, DataConfig, Mixture, SourceConfig
from graftlm.data.build import build_blocks
from graftlm.demo.run import random_llama
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.io import write_atomically
from graftlm.training import TrainingConfig, train

DONE = "pretraining.json"


class Pretraining(Config):
    """A Llama, trained once over its texts: from a random start, or from another one's end.

    Args:
        name: how its folder's name begins; no part of what it is.
        sources: what it reads, each row once; a model without sources stays as it started.
        tokenizer: its folder.
        start: the model to go on from; its shape is this one's.
    """

    name: str
    tokenizer: str
    sources: list[SourceConfig] = []
    start: Pretraining | None = None
    width: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    length: int = Field(256, ge=2)
    batch_size: int = Field(8, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    seed: int = 0

    def key(self) -> str:
        """SHA-256 over the settings and the bytes of every file they name, wherever it lies."""
        said = self.model_dump(mode="json", exclude={"name", "tokenizer", "sources", "start"})
        said["tokenizer"] = _digest(Path(self.tokenizer) / "tokenizer.json")
        said["sources"] = [
            one.model_dump(mode="json", exclude={"path"}, exclude_defaults=True) | {"file": _digest(Path(one.name))}
            for one in self.sources
        ]
        said["start"] = self.start.key() if self.start else None
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def folder(self, models: Path) -> Path:
        """Where the finished model lies."""
        return models / f"{self.name}-{self.key()[:10]}"


def pretrain(config: Pretraining, models: Path, *, progress: bool = False) -> Path:
    """Train a model into its folder in `models`, its start before it, unless a whole one is there; gives the folder.

    An interrupted run goes on from its last checkpoint.
    """
    folder = config.folder(models)
    if (folder / DONE).exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    start = pretrain(config.start, models, progress=progress) if config.start else None
    how = {"dtype": "float32"}
    model: Any = AutoModelForCausalLM.from_pretrained(start, **how) if start else _untrained(config, tokenizer)
    summary = dict(_train(model, tokenizer, config, folder, progress)) if config.sources else {}
    model.requires_grad_(False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    said = {"settings": config.model_dump(mode="json"), "parameters": sum(p.numel() for p in model.parameters())}
    write_atomically(folder / DONE, json.dumps(said | summary, indent=1).encode())
    return folder


def _untrained(config: Pretraining, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    shape = {"width": config.width, "layers": config.layers, "heads": config.heads, "length": config.length}
    return random_llama(tokenizer, **shape, seed=config.seed)


def _train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, config: Pretraining, folder: Path, progress: bool
) -> Mapping[str, float]:
    """Train `model` in place over all of its rows once."""
    data = DataConfig(new=config.sources, replay_fraction=0, length=config.length, seed=config.seed)
    blocks = build_blocks(config.sources, data, tokenizer)
    mixture = Mixture({NEW: blocks}, {NEW: 1.0}, config.batch_size, config.seed)
    steps = max(1, len(blocks) // config.batch_size)  # type: ignore[arg-type]  # no source streams
    training = TrainingConfig(
        steps=steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        warmup_steps=max(1, steps // 20),
        precision="bf16",
        seed=config.seed,
        checkpoint_every=max(1, steps // 8),
        keep_checkpoints=1,
    )
    backbone = Backbone.wrap(model, tokenizer, name="pretraining")
    with GraftedModel(backbone, {"all": build_graft(graft_config({"kind": "finetune"}), backbone)}) as whole:
        done = train(whole, mixture, training, folder / "training", progress=progress)
        model.load_state_dict(whole.model.state_dict())
    return {"steps": steps, "tokens": done.tokens, "tokens_per_s": done.tokens_per_s, "loss": done.loss}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
