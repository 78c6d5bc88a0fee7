"""PEFT's own ways to mix the same experts: X-LoRA, whose router is trained, and Arrow, which is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from peft import ArrowConfig, XLoraConfig, create_arrow_model, get_peft_model
from torch import Tensor, nn

from experiments.token_routing.lessons import Lesson
from graftlm.grafts.model import GraftedOutput, language_modelling_loss
from graftlm.training import train


class Peer(nn.Module):
    """A PEFT model as the training loop takes it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        totals: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> GraftedOutput:
        """The loss of one batch, whose documents are kept apart by their positions."""
        places = {"attention_mask": attention_mask, "position_ids": position_ids}
        logits = self.model(input_ids=input_ids, use_cache=False, **places).logits
        loss = language_modelling_loss(logits, labels, totals)
        return GraftedOutput(loss=loss, lm_loss=loss.detach())


def load_xlora(lesson: Lesson, adapters: Mapping[str, str]) -> Any:
    """X-LoRA between frozen experts, with PEFT's settings: a linear router on the last states of the bare backbone."""
    model: Any = lesson.load().model
    model.config.use_cache = False  # it can't use one
    # It looks for its adapters under their numbers, whatever they are called.
    numbered = {str(number): path for number, path in enumerate(adapters.values())}
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=model.config.hidden_size, adapters=numbered)
    return get_peft_model(model, config)


def train_xlora(lesson: Lesson, adapters: Mapping[str, str], folder: Path) -> Any:
    """X-LoRA, its router trained on the texts of all domains, in as many steps of as many rows as one expert was."""
    mixture = lesson.mixture(lesson.load())
    set_seed(lesson.seed)
    model = load_xlora(lesson, adapters)
    train(Peer(model), mixture, lesson.training(), folder / "training", identity={"key": lesson.key()}, progress=False)
    return model


def load_arrow(lesson: Lesson, adapters: Mapping[str, str]) -> Any:
    """Arrow between frozen experts, with PEFT's settings: each token of each layer takes the three that fit it best."""
    paths = list(adapters.values())
    config = ArrowConfig(top_k=min(3, len(paths)), rng_seed=lesson.seed)
    return create_arrow_model(lesson.load().model, paths, config)
