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
from graftlm.evaluation.cost import count_parameters
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
        amounts: amounts of text.
        vocabulary: number of tokens of the backbone.
        width: width of the backbone.
        layers: layers of the backbone.
        heads: attention heads of the backbone.
        length: tokens of a row, for the backbone and the experts.
        backbone_batch: batch size of the training of the backbone, which reads its texts once.
        rank: rank of every expert.
        steps: training steps of every expert, and of the router of X-LoRA.
        batch_size: batch size of these trainings.
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
    """The base of all runs of token routing.

    Args:
        domains: domains of the experts; training reads their questions and predicts all of their text.
        backbone: folder or hub name of a model.
        texts: folder of the texts.
        sizes: sizes of the models and the training.
        seed: seed of the training, and of the examples in centroids.
        device: device of the models; None for the fastest one.
        dtype: dtype of the backbone.
        answers_only: whether training predicts only the answers, and not the prompts.
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
        """Return a copy of the backbone, because PEFT changes its modules. It is loaded once in a process."""
        loaded = load_once(self.backbone, self.device, self.dtype)
        return Backbone.wrap(copy.deepcopy(loaded.model), loaded.tokenizer, loaded.name)

    def mixture(self, backbone: Backbone) -> Mixture:
        """Return the training batches."""
        columns = {"text_column": "answer", "prompt_column": "prompt"} if self.answers_only else {}
        sources = []
        for domain in self.domains:
            file = Path(self.texts) / f"{domain}-train.jsonl"
            sources.append(SourceConfig.parse({"path": str(file), **columns}))
        data = DataConfig(
            new=sources,
            replay_fraction=0,
            length=self.sizes.length,
            boundaries="whole",
            seed=self.seed,
        )
        return build_mixture(data, backbone.need_tokenizer(), self.sizes.batch_size)

    def train(self, model: Any, batches: Mixture, learning_rate: float, context: RunContext) -> TrainingSummary:
        """Train a model in the folder of a run."""
        steps = self.sizes.steps
        config = training_config(
            steps,
            self.sizes.batch_size,
            learning_rate,
            self.seed,
            precision="bf16",
            warmup_steps=max(1, min(10, steps // 4)),
            checkpoint_every=max(1, steps // 2),
        )
        return train(
            model,
            batches,
            config,
            context.folder / "training",
            identity={"run": context.key},
            progress=False,
        )

    def train_xlora(self, backbone: Backbone, adapters: Sequence[Path], rate: float, context: RunContext) -> Any:
        """Return X-LoRA whose router is trained on all domains, with the steps and rows of one expert."""
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
    """Load a backbone that all runs of a process share."""
    return BackboneConfig.parse({"name": name, "device": device, "dtype": dtype}).load()


class ExpertRun(RoutingRun):
    """Trains plain LoRA on one domain, or on several. The artefact is a folder that PEFT reads.

    Args:
        learning_rate: learning rate of the training.
        targets: modules that the expert changes.
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
        expert = {"rank": self.sizes.rank, "targets": list(self.targets)}
        graft = build_routing(backbone, {domain: expert})
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
    """Return a token-routing graft.

    Args:
        backbone: the backbone.
        experts: config of each expert, or the folder of its adapter.
        **routing: the config of the graft without its experts.
    """
    configs = {}
    for name, expert in experts.items():
        configs[name] = {"path": str(expert)} if isinstance(expert, Path) else expert
    config = graft_config({"kind": "token-routing", "experts": configs, **routing})
    return build_graft(config, backbone)


def load_xlora(backbone: Backbone, adapters: Sequence[str | Path]) -> Any:
    """Return X-LoRA over frozen experts, with PEFT's defaults: a linear router on the backbone's last hidden states."""
    model: Any = backbone.model
    model.config.use_cache = False  # X-LoRA cannot use a cache
    config = XLoraConfig(
        task_type="CAUSAL_LM",
        hidden_size=model.config.hidden_size,
        # X-LoRA finds its adapters by number, regardless of their names.
        adapters={str(number): str(path) for number, path in enumerate(adapters)},
    )
    model = get_peft_model(model, config)
    model.base_model.internal_xlora_classifier.float()  # float32, also on a backbone in half precision
    return model


def load_arrow(backbone: Backbone, adapters: Sequence[str | Path], seed: int) -> Any:
    """Return Arrow over frozen experts, with PEFT's defaults: the three closest experts at each token of each layer."""
    config = ArrowConfig(top_k=min(3, len(adapters)), rng_seed=seed)
    return create_arrow_model(backbone.model, [str(path) for path in adapters], config)
