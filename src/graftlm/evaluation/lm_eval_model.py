"""Models of lm-evaluation-harness; importing this module registers `graftlm`, the one for grafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from torch import Tensor

from graftlm.backbone import encode_parts
from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import backbone_of, load_grafts

HFLM: Any = import_module("lm_eval.models.huggingface").HFLM  # Any: its decorators hide its attributes

Request = tuple[tuple[str, str], list[int], list[int]]
"""The texts of context and continuation, and the token ids of both."""


class TextPairHFLM(HFLM):
    """The harness's model of transformers, whose pairs of context and continuation are the tokens of their text.

    The harness cuts the tokens of the joined text at the number of tokens of the context. Where a token covers both,
    that leaves out a part of the continuation, or all of it.
    """

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the token ids of the context, without white space at its end, and of what follows."""
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        if self.backend != "causal":
            return context_ids, continuation_ids
        before = context.rstrip()
        whole = self.tok_encode(context + continuation)
        if whole[: len(context_ids)] == context_ids:
            return context_ids, continuation_ids
        plain = self.tokenizer(before, add_special_tokens=False)["input_ids"]
        special = context_ids[: len(context_ids) - len(plain)]
        parts = encode_parts(self.tokenizer, before, context[len(before) :] + continuation)
        return special + parts.before, parts.ids


@register_model("graftlm")
class GraftedHFLM(TextPairHFLM):
    """A grafted model that reads a question as its prompt, both when it answers and when an answer is scored.

    Args:
        graft: a graft's folder, or a `GraftedModel`.
        backbone: the backbone's name or folder, if it is not where it was when the graft was trained.
        device: device of the backbone, if `graft` is a folder; None for the default device.
        options: further arguments of `HFLM`; the tokenizer is the backbone's unless they have one.

    Raises:
        ArtifactError: the folder is not a complete, readable graft.
        BackboneError: the backbone can't be loaded, or has no tokenizer.
    """

    def __init__(
        self,
        graft: str | Path | GraftedModel,
        backbone: str | None = None,
        device: str | None = None,
        **options: object,
    ) -> None:
        if isinstance(graft, GraftedModel):
            model = graft
        else:
            loaded = backbone_of(graft, backbone, device=device)
            model = GraftedModel(loaded, load_grafts(graft, loaded))
        self._prompt_length = 0
        options.setdefault("tokenizer", model.backbone.need_tokenizer())
        options["pretrained"] = model
        super().__init__(**options)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], *args: object, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one.

        Requests whose contexts have equal lengths run together, because the prompt of a batch has one length.
        """
        groups: dict[int, list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # Longer contexts are truncated to their ends.
            groups[min(len(context), room)].append(number)
        answers: dict[int, tuple[float, bool]] = {}
        for length, numbers in groups.items():
            self._prompt_length = length
            group = [requests[number] for number in numbers]
            likelihoods = super()._loglikelihood_tokens(group, *args, **kwargs)
            answers.update(zip(numbers, likelihoods, strict=True))
        return [answers[number] for number in range(len(requests))]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of ids (B, T), whose first columns are the prompt."""
        columns = torch.arange(inps.shape[1], device=inps.device)
        prompt = (columns < self._prompt_length).expand_as(inps)
        dtype = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return self.model(inps, prompt=prompt).logits
