"""One expert: plain LoRA on one domain, by the house's loop, left as a folder that PEFT reads."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed

from experiments.token_routing.setting import Setting
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, Mixture, SourceConfig, build_mixture
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.io import write_atomically
from graftlm.runs.graft_run import count_parameters
from graftlm.training import TrainingConfig, train
from graftlm.training.checkpoint import read_history

DONE = "expert.json"


class Lesson(Config):
    """The training of one expert, or of a router between experts.

    Args:
        domains: whose questions and answers are read; all of their text is predicted.
        targets: the modules that an expert changes.
    """

    domains: tuple[str, ...]
    backbone: str
    texts: str
    setting: Setting
    rate: float
    targets: tuple[str, ...] = ("attention", "ffn")
    seed: int = 0
    device: str | None = None

    def key(self) -> str:
        """SHA-256 over the settings, the texts and the backbone's weights."""
        digest = hashlib.sha256(self.model_dump_json(exclude={"backbone", "texts", "device", "adapters"}).encode())
        for file in [*self.files(), Path(self.backbone) / "model.safetensors"]:
            digest.update(file.read_bytes() if file.exists() else str(file).encode())
        return digest.hexdigest()

    def files(self) -> list[Path]:
        """The training texts."""
        return [Path(self.texts) / f"{domain}-train.jsonl" for domain in self.domains]

    def load(self) -> Backbone:
        """The backbone."""
        return BackboneConfig(name=self.backbone, device=self.device).load()

    def mixture(self, backbone: Backbone) -> Mixture:
        """The rows of every step."""
        sources = [SourceConfig(path=str(file)) for file in self.files()]
        data = DataConfig(
            new=sources, replay_fraction=0, length=self.setting.length, boundaries="whole", seed=self.seed
        )
        return build_mixture(data, backbone.need_tokenizer(), self.setting.batch_size)

    def training(self) -> TrainingConfig:
        """The numbers of the run."""
        steps = self.setting.steps
        return TrainingConfig(
            steps=steps,
            batch_size=self.setting.batch_size,
            learning_rate=self.rate,
            warmup_steps=max(1, min(10, steps // 4)),
            precision="bf16",
            seed=self.seed,
            checkpoint_every=max(1, steps // 2),
            keep_checkpoints=1,
        )


def train_expert(lesson: Lesson, folder: Path) -> Path:
    """Train an expert into `folder`, unless that very one is there; gives the folder, which PEFT reads."""
    key = lesson.key()
    if _done(folder, key):
        return folder
    (domain,) = lesson.domains
    backbone = lesson.load()
    mixture = lesson.mixture(backbone)
    set_seed(lesson.seed)
    started = time.process_time()
    new = {"rank": lesson.setting.rank, "targets": list(lesson.targets)}
    graft: Any = build_graft(graft_config({"kind": "token-routing", "experts": {domain: new}}), backbone)
    with GraftedModel(backbone, {"graft": graft}) as model:
        done = train(model, mixture, lesson.training(), folder / "training", identity={"key": key}, progress=False)
        graft.write_adapter(domain, folder)
        said = {
            "key": key,
            "parameters": count_parameters(model.trainable_parameters().values()),
            "tokens": done.tokens,
            "cpu_s": round(time.process_time() - started, 1),
            "losses": [[line["step"], line["loss"]] for line in read_history(done.history)],
        }
    write_atomically(folder / DONE, json.dumps(said).encode())
    return folder


def read_expert(folder: Path) -> dict[str, Any]:
    """What `train_expert` left beside the weights."""
    return json.loads((folder / DONE).read_text(encoding="utf-8"))


def _done(folder: Path, key: str) -> bool:
    try:
        return read_expert(folder)["key"] == key
    except (OSError, ValueError, KeyError):
        return False
