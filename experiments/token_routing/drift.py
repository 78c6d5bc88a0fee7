"""What `cache: keep` costs beside `recompute`: the same tokens read under both, and how far what they say lies apart.

Shape suffixes: T predicted tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.evaluation.metrics import evaluation_mode

Text = tuple[Sequence[int], int]
"""Token ids, and how many of them were given; those after them are predicted."""


def say(model: Any, backbone: Backbone, texts: Sequence[Text], *, prompts: bool) -> list[Tensor]:
    """(T, V) log-probabilities of the predicted tokens of each text; with `prompts`, what was given is a prompt."""
    found = []
    for ids, given in texts:
        ids_1S = torch.tensor([ids], device=backbone.device)
        marks = (torch.arange(len(ids), device=backbone.device) < given)[None] if prompts else None
        with evaluation_mode(model), torch.inference_mode():
            logits = model(ids_1S, prompt=marks, use_cache=False).logits[0, given - 1 : -1]
        found.append(logits.float().cpu())
    return found


def apart(kept: Sequence[Tensor], again: Sequence[Tensor], texts: Sequence[Text]) -> dict[str, float]:
    """How far the logits of `keep` are from those of `recompute`, over all predicted tokens.

    Nats per token of both, the mean distance of a token's nats, the largest of a logit, and the share of tokens at
    which the likeliest token is another.
    """
    right = [torch.tensor(ids[given:]) for ids, given in texts]
    nats = [
        torch.cat([-one.log_softmax(-1).gather(-1, t[:, None])[:, 0] for one, t in zip(said, right, strict=True)])
        for said in (kept, again)
    ]
    pairs = list(zip(kept, again, strict=True))
    changed = torch.cat([one.argmax(-1) != other.argmax(-1) for one, other in pairs])
    return {
        "nats_keep": float(nats[0].mean()),
        "nats_recompute": float(nats[1].mean()),
        "nats_apart": float((nats[0] - nats[1]).abs().mean()),
        "largest_logit": float(np.max([float((one - other).abs().max()) for one, other in pairs])),
        "changed_tokens": float(changed.float().mean()),
    }
