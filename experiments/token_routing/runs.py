"""The runs that train LoRA experts, and PEFT's own mixtures of them."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from peft import ArrowConfig, XLoraConfig, create_arrow_model, get_peft_model
from pydantic import Field

from experiments.study import losses, training_config
from experiments.token_routing.texts import QUICK_TEXT_SIZES, RoutingTextSizes
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, Mixture, SourceConfig, build_mixture
from graftlm.evaluation import Row
from graftlm.evaluation.evaluator import count_parameters
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.run import Run, RunContext
from graftlm.training import TrainingSummary, train
from graftlm.training.language_model import LanguageModel

TARGETS = ("attention", "ffn")


class RoutingSizes(Config):
    """Sizes of one reproduction.

    Args:
        amounts: of text.
        vocabulary, width, layers, heads: of the backbone.
        length: tokens of a row, for the backbone and the experts.
        backbone_batch: batch size of the backbone's training, which reads its texts once.
        rank: of every expert.
        steps, batch_size: of every expert, and of X-LoRA's router.
        centroids: maximum number of examples of each domain in the centroids.
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
    length=192,
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
        dtype: of the backbone.
        answers_only: training predicts the answers, and not the prompts.
    """

    domains: tuple[str, ...] = ()
    backbone: str
    texts: str
    sizes: RoutingSizes
    seed: int = 0
    device: str | None = None
    dtype: str = "auto"
    answers_only: bool = False

    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in super().settings().items() if key != "device"}

    def load_backbone(self) -> Backbone:
        """A copy of the backbone, which is loaded once in a process: PEFT changes its modules."""
        loaded = load_once(self.backbone, self.device, self.dtype)
        return Backbone.wrap(copy.deepcopy(loaded.model), loaded.tokenizer, loaded.name)

    def mixture(self, backbone: Backbone) -> Mixture:
        """The training batches."""
        columns = {"text_column": "answer", "prompt_column": "prompt"} if self.answers_only else {}
        files = [str(Path(self.texts) / f"{domain}-train.jsonl") for domain in self.domains]
        sources = [SourceConfig.parse({"path": file, **columns}) for file in files]
        data = DataConfig(new=sources, replay_fraction=0, length=self.sizes.length, boundaries="whole", seed=self.seed)
        return build_mixture(data, backbone.need_tokenizer(), self.sizes.batch_size)

    def train(self, model: Any, batches: Mixture, learning_rate: float, context: RunContext) -> TrainingSummary:
        steps = self.sizes.steps
        more: dict[str, Any] = {"warmup_steps": max(1, min(10, steps // 4)), "checkpoint_every": max(1, steps // 2)}
        config = training_config(steps, self.sizes.batch_size, learning_rate, self.seed, precision="bf16", **more)
        return train(model, batches, config, context.folder / "training", identity={"run": context.key}, progress=False)

    def train_xlora(self, backbone: Backbone, adapters: Sequence[Path], rate: float, context: RunContext) -> Any:
        """X-LoRA with a router trained on all domains, for as many steps and rows as one expert."""
        mixture = self.mixture(backbone)
        set_seed(self.seed)
        model = load_xlora(backbone, adapters)
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        trainee = LanguageModel(model)
        for parameter in frozen:
            parameter.requires_grad_(False)
        self.train(trainee, mixture, rate, context)
        return model


@functools.cache
def load_once(name: str, device: str | None, dtype: str) -> Backbone:
    """A backbone that the runs of a process share."""
    return BackboneConfig.parse({"name": name, "device": device, "dtype": dtype}).load()


class ExpertRun(RoutingRun):
    """Train plain LoRA on one domain, or on several. The artefact is a folder that PEFT reads.

    Args:
        targets: the modules that the expert changes.
    """

    learning_rate: float
    targets: tuple[str, ...] = TARGETS

    def artefacts(self) -> tuple[str, ...]:
        return ("adapter_config.json", "adapter_model.safetensors")

    def measure(self, context: RunContext) -> Measurement:
        domain = "-".join(self.domains)
        backbone = self.load_backbone()
        mixture = self.mixture(backbone)
        set_seed(self.seed)
        started = time.process_time()
        graft = build_routing(backbone, {domain: {"rank": self.sizes.rank, "targets": list(self.targets)}})
        with GraftedModel(backbone, {"graft": graft}) as model:
            summary = self.train(model, mixture, self.learning_rate, context)
            graft.write_adapter(domain, context.folder)
            metrics = {
                "parameters": count_parameters(model.trainable_parameters().values()),
                "tokens": summary.tokens,
                "cpu_s": round(time.process_time() - started, 1),
            }
        row = Row(id=self.id, label=self.id, metrics=metrics)
        return Measurement(row, {"losses": losses(summary.history)})


def build_routing(backbone: Backbone, experts: Mapping[str, Any], **routing: Any) -> Any:
    """A token-routing graft; `routing` is its config without the experts, whose folders may stand for their configs."""
    configs = {name: {"path": str(expert)} if isinstance(expert, Path) else expert for name, expert in experts.items()}
    return build_graft(graft_config({"kind": "token-routing", "experts": configs, **routing}), backbone)


def load_xlora(backbone: Backbone, adapters: Sequence[str | Path]) -> Any:
    """X-LoRA over frozen experts, with PEFT's defaults: a linear router on the backbone's last hidden states."""
    model: Any = backbone.model
    model.config.use_cache = False  # X-LoRA cannot use a cache
    # X-LoRA looks its adapters up by number, whatever their names are.
    numbered = {str(number): str(path) for number, path in enumerate(adapters)}
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=model.config.hidden_size, adapters=numbered)
    model = get_peft_model(model, config)
    model.base_model.internal_xlora_classifier.float()  # also on a backbone in half precision
    return model


def load_arrow(backbone: Backbone, adapters: Sequence[str | Path], seed: int) -> Any:
    """Arrow over frozen experts, with PEFT's defaults: each token of each layer takes its three closest experts."""
    config = ArrowConfig(top_k=min(3, len(adapters)), rng_seed=seed)
    return create_arrow_model(backbone.model, [str(path) for path in adapters], config)
