"""Small language models pretrained here, each a run of its own."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from graftlm.data import NEW, DataConfig, Mixture, SourceConfig
from graftlm.data.packing import build_blocks
from graftlm.demo.run import random_llama
from graftlm.evaluation import Row
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.run import Measurement, Run, RunContext
from graftlm.training import TrainingConfig, train
from graftlm.training.language_model import LanguageModel


class PretrainRun(Run):
    """A Llama, trained once over its texts. With a dependency it starts from that run's model.

    Args:
        tokenizer: folder of the tokenizer.
        sources: training texts, each row read once; a model without sources keeps its random weights.
    """

    tokenizer: str
    sources: list[SourceConfig] = []
    width: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    length: int = Field(256, ge=2)
    batch_size: int = Field(8, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    seed: int = 0

    def artefacts(self) -> tuple[str, ...]:
        return ("config.json", "tokenizer.json")

    def measure(self, context: RunContext) -> Measurement:
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        model: Any = self._untrained(tokenizer)
        for start in context.dependencies.values():
            model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
        metrics: dict[str, Any] = {"parameters": count_parameters(model.parameters())}
        if self.sources:
            metrics |= self._train(model, tokenizer, context)
        model.requires_grad_(False)
        model.save_pretrained(context.folder)
        tokenizer.save_pretrained(context.folder)
        return Measurement(Row(id=self.id, label=self.label or self.id, metrics=metrics))

    def _untrained(self, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
        shape = {"width": self.width, "layers": self.layers, "heads": self.heads, "length": self.length}
        return random_llama(tokenizer, **shape, seed=self.seed)

    def _train(self, model: Any, tokenizer: PreTrainedTokenizerBase, context: RunContext) -> dict[str, float]:
        """Train `model` in place over all of its rows once."""
        data = DataConfig(new=self.sources, replay_fraction=0, length=self.length, seed=self.seed)
        blocks = build_blocks(self.sources, data, tokenizer)
        batches = Mixture({NEW: blocks}, {NEW: 1.0}, self.batch_size, self.seed)
        steps = max(1, len(blocks) // self.batch_size)  # type: ignore[arg-type]  # no source streams
        training = TrainingConfig(
            steps=steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            warmup_steps=max(1, steps // 20),
            precision="bf16",
            seed=self.seed,
            checkpoint_every=max(1, steps // 8),
            keep_checkpoints=1,
        )
        folder = context.folder / "training"
        summary = train(LanguageModel(model), batches, training, folder, progress=context.progress)
        return {
            "steps": steps,
            "tokens": summary.tokens,
            "tokens_per_s": summary.tokens_per_s,
            "loss": summary.loss,
        }
