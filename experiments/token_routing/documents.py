"""Documents that change domain: a program, then prose. When do the routes switch?

Shape suffix: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache

from experiments.routing_smollm2.runs import AnswerRun
from experiments.token_routing.texts import read_changing
from graftlm.backbone import Backbone, leading_bos
from graftlm.evaluation import Row
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.runs.run import RunContext

SECOND = "reading"  # the domain of the second half
STABLE_TOKENS = 8  # a route has switched when the second half's expert leads for so many tokens
Documents = Sequence[Mapping[str, Any]]


class SwitchRun(AnswerRun):
    """Read the documents that change domain by one mixture: nats and expert weights of every token."""

    def measure(self, context: RunContext) -> Measurement:
        documents = []
        with self.open_model(context) as (model, graft, backbone):
            for halves in read_changing(Path(self.texts), self.part):
                nats, weights = read_tokens(model, graft, backbone, halves)
                first = len(token_ids(backbone, halves[:1]))
                documents.append({"nats": nats.tolist(), "first": first, "weights": np.round(weights, 4).tolist()})
            names = [] if graft is None else list(graft.names)
        row = Row(id=self.id, label=self.id, metrics={**document_metrics(documents, names)})
        return Measurement(row, {"documents": documents, "names": names})


def read_tokens(model: Any, graft: Any, backbone: Backbone, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Nats (T - 1,) of every token but the first of the joined texts, and weights (T, experts + 1)."""
    ids = torch.tensor([token_ids(backbone, texts)], device=backbone.device)
    cache = DynamicCache(config=backbone.model.config)
    with evaluation_mode(model), torch.inference_mode():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, :-1].float()
        nats = functional.cross_entropy(logits, ids[0, 1:], reduction="none").double().cpu().numpy()
    trace = graft.cache_trace(cache) if graft is not None else None
    return nats, np.zeros((ids.shape[1], 0)) if trace is None else trace.values[0].cpu().numpy()


def token_ids(backbone: Backbone, texts: Sequence[str]) -> list[int]:
    """The tokens of texts, each tokenised separately, after the BOS token that the tokenizer expects."""
    tokenizer = backbone.need_tokenizer()
    bos = leading_bos(tokenizer)
    parts = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return [*([] if bos is None else [bos]), *(token for part in parts for token in part)]


def document_metrics(documents: Documents, names: Sequence[str]) -> dict[str, float]:
    """Nats per token of both halves and of whole documents; for routes also when they switch."""
    metrics = half_nats(documents, documents)
    if len(names) > 1:
        tokens = [switched_after(document, names) for document in documents]
        metrics["switch_tokens"] = float(np.median(tokens))
        metrics["switched_within_32"] = float(np.mean([count <= 32 for count in tokens]))
    return metrics


def half_nats(first: Documents, second: Documents) -> dict[str, float]:
    """Nats of tokens before the boundary in `first`, without the first token, and after it in `second`.

    With one expert's documents and another's, the boundary is known by hand.
    """
    before = np.concatenate([np.array(document["nats"])[: document["first"] - 1] for document in first])
    after = np.concatenate([np.array(document["nats"])[document["first"] - 1 :] for document in second])
    halves = {"nll_code_half": before, "nll_prose_half": after, "nll_document": np.concatenate([before, after])}
    return {name: float(nats.mean()) for name, nats in halves.items()}


def switched_after(document: Mapping[str, Any], names: Sequence[str]) -> int:
    """Tokens after the boundary until the second half's expert leads and stays; all of them where it never does."""
    weights = np.array(document["weights"])[document["first"] :, : len(names)]
    right = weights.argmax(-1) == names.index(SECOND)
    stable = (token for token in range(len(right)) if right[token : token + STABLE_TOKENS].all())
    return next(stable, len(right))
