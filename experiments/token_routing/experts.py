"""What token routing trains: one LoRA expert per domain, and PEFT's own mixtures of the same experts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from peft import ArrowConfig, XLoraConfig, create_arrow_model, get_peft_model
from pydantic import Field

from experiments.token_routing.texts import QUICK_TEXT_SIZES, RoutingTextSizes
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, Mixture, SourceConfig, build_mixture
from graftlm.evaluation import Row
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, Run, RunContext
from graftlm.training import TrainingConfig, train
from graftlm.training.checkpoint import read_history

TARGETS = ("attention", "ffn")  # chosen by `--table choices`, as are the learning rates


class RoutingSizes(Config):
    """Sizes of one reproduction.

    Args:
        amounts: of text.
        vocabulary, width, layers, heads: of the backbone.
        length: tokens of a row, for the backbone and the experts.
        backbone_batch: batch size of the backbone's training, which reads its texts once.
        rank: of every expert.
        steps, batch_size: of every expert, and of X-LoRA's router.
        centroids: number of examples in an expert's centroid, drawn anew for every seed.
    """

    amounts: RoutingTextSizes = Field(default_factory=RoutingTextSizes)
    vocabulary: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 320
    backbone_batch: int = Field(6, ge=1)
    rank: int = Field(16, ge=1)
    steps: int = Field(80, ge=1)
    batch_size: int = Field(6, ge=1)
    centroids: int = Field(300, ge=1)


QUICK_SIZES = RoutingSizes(
    amounts=QUICK_TEXT_SIZES,
    vocabulary=320,
    width=16,
    layers=2,
    heads=2,
    length=128,
    backbone_batch=2,
    rank=2,
    steps=2,
    batch_size=2,
    centroids=4,
)


class RoutingRun(Run):
    """What all runs of token routing share.

    Args:
        domains: of the experts; training reads their questions and predicts all of their text.
        backbone: a model's folder or hub name.
        texts: folder of the texts.
        seed: of training, and of the examples in centroids.
        device: the fastest device where it is None.
    """

    domains: tuple[str, ...] = ()
    backbone: str
    texts: str
    sizes: RoutingSizes
    seed: int = 0
    device: str | None = None

    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in super().settings().items() if key != "device"}

    def load_backbone(self) -> Backbone:
        return BackboneConfig(name=self.backbone, device=self.device).load()

    def mixture(self, backbone: Backbone) -> Mixture:
        """The training batches."""
        sources = [SourceConfig(path=str(Path(self.texts) / f"{domain}-train.jsonl")) for domain in self.domains]
        data = DataConfig(new=sources, replay_fraction=0, length=self.sizes.length, boundaries="whole", seed=self.seed)
        return build_mixture(data, backbone.need_tokenizer(), self.sizes.batch_size)

    def training(self, learning_rate: float) -> TrainingConfig:
        steps = self.sizes.steps
        return TrainingConfig(
            steps=steps,
            batch_size=self.sizes.batch_size,
            learning_rate=learning_rate,
            warmup_steps=max(1, min(10, steps // 4)),
            precision="bf16",
            seed=self.seed,
            checkpoint_every=max(1, steps // 2),
            keep_checkpoints=1,
        )


class ExpertRun(RoutingRun):
    """Train plain LoRA on one domain. The artefact is a folder that PEFT reads.

    Args:
        targets: the modules that the expert changes.
    """

    learning_rate: float
    targets: tuple[str, ...] = TARGETS

    def artefacts(self) -> tuple[str, ...]:
        return ("adapter_config.json", "adapter_model.safetensors")

    def measure(self, context: RunContext) -> Measurement:
        (domain,) = self.domains
        backbone = self.load_backbone()
        mixture = self.mixture(backbone)
        set_seed(self.seed)
        started = time.process_time()
        graft = build_routing(backbone, {domain: {"rank": self.sizes.rank, "targets": list(self.targets)}})
        identity = {"run": context.key}
        with GraftedModel(backbone, {"graft": graft}) as model:
            training = self.training(self.learning_rate)
            summary = train(model, mixture, training, context.folder / "training", identity=identity, progress=False)
            graft.write_adapter(domain, context.folder)
            metrics = {
                "parameters": count_parameters(model.trainable_parameters().values()),
                "tokens": summary.tokens,
                "cpu_s": round(time.process_time() - started, 1),
            }
        losses = [[line["step"], line["loss"]] for line in read_history(summary.history)]
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics=metrics), {"losses": losses})


def build_routing(backbone: Backbone, experts: dict[str, Any], **routing: Any) -> Any:
    """A token-routing graft; `routing` is its config without the experts."""
    return build_graft(graft_config({"kind": "token-routing", "experts": experts, **routing}), backbone)


def load_xlora(backbone: Backbone, adapters: Sequence[str | Path]) -> Any:
    """X-LoRA over frozen experts, with PEFT's defaults: a linear router on the backbone's last hidden states."""
    model: Any = backbone.model
    model.config.use_cache = False  # X-LoRA cannot use a cache
    # X-LoRA looks its adapters up by number, whatever their names are.
    numbered = {str(number): str(path) for number, path in enumerate(adapters)}
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=model.config.hidden_size, adapters=numbered)
    return get_peft_model(model, config)


def load_arrow(backbone: Backbone, adapters: Sequence[str | Path], seed: int) -> Any:
    """Arrow over frozen experts, with PEFT's defaults: each token of each layer takes its three closest experts."""
    config = ArrowConfig(top_k=min(3, len(adapters)), rng_seed=seed)
    return create_arrow_model(backbone.model, [str(path) for path in adapters], config)
