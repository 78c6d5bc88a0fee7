"""The model `graftlm` of lm-evaluation-harness; importing this module registers it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from torch import Tensor

from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import backbone_of, load_grafts

HFLM: Any = import_module("lm_eval.models.huggingface").HFLM  # Any: its decorators hide its attributes


@register_model("graftlm")
class GraftedHFLM(HFLM):
    """A grafted model that reads a question as its prompt, when it answers and when an answer is scored.

    Args:
        graft: a graft's folder, or a `GraftedModel`.
        backbone: the backbone's name or folder, if it is not where it was when the graft was trained.
        device: of the backbone; for a folder.
        options: those of `HFLM`.
    """

    def __init__(
        self, graft: str | Path | GraftedModel, backbone: str | None = None, device: str | None = None, **options: Any
    ) -> None:
        if isinstance(graft, GraftedModel):
            model, loaded = graft, graft.backbone
        else:
            loaded = backbone_of(graft, backbone, device=device)
            model = GraftedModel(loaded, load_grafts(graft, loaded))
        self._prompt_length = 0
        pretrained: Any = model
        super().__init__(**{"tokenizer": loaded.need_tokenizer(), **options, "pretrained": pretrained})

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation; requests whose contexts are equally long run together."""
        groups: dict[int, list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            length = min(len(context), self.max_length + 1 - len(continuation))  # of what is left of the context
            groups.setdefault(length, []).append(number)
        answers: dict[int, tuple[float, bool]] = {}
        for self._prompt_length, numbers in groups.items():
            group = [requests[number] for number in numbers]
            answers |= zip(numbers, super()._loglikelihood_tokens(group, *args, **kwargs), strict=True)
        return [answers[number] for number in range(len(requests))]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """(B, T, V) logits; the first columns of every row are the prompt."""
        columns, dtype = torch.arange(inps.shape[1], device=inps.device), self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return self.model(inps, prompt=(columns < self._prompt_length).expand_as(inps)).logits
