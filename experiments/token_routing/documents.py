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
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.run import RunContext

SECOND = "reading"  # the domain of the second half
STABLE_TOKENS = 8  # a route has switched when the expert of the second half leads for this number of tokens
Documents = Sequence[Mapping[str, Any]]


class SwitchRun(AnswerRun):
    """Reads the documents that change domain with one mixture: nats and expert weights of every token."""

    def measure(self, context: RunContext) -> Measurement:
        documents: list[dict[str, Any]] = []
        names: list[str] = []
        with self.open_model(context) as (model, graft, backbone):
            for halves in read_changing(Path(self.texts), self.part):
                nats, weights = read_tokens(model, graft, backbone, halves)
                document = {
                    "nats": nats.tolist(),
                    "first": len(token_ids(backbone, halves[:1])),
                    "weights": np.round(weights, 4).tolist(),
                }
                documents.append(document)
            if graft is not None:
                names = list(graft.names)
        row = Row(id=self.id, label=self.id, metrics={**document_metrics(documents, names)})
        return Measurement(row, {"documents": documents, "names": names})


def read_tokens(model: Any, graft: Any, backbone: Backbone, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return nats (T - 1,) of every token but the first of the joined texts, and weights (T, experts + 1)."""
    ids = torch.tensor([token_ids(backbone, texts)], device=backbone.device)
    cache = DynamicCache(config=backbone.model.config)
    with evaluation_mode(model), torch.inference_mode():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        nats = functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
    trace = None if graft is None else graft.cache_trace(cache)
    weights = np.zeros((ids.shape[1], 0))
    if trace is not None:
        weights = trace.values[0].cpu().numpy()
    return nats.double().cpu().numpy(), weights


def token_ids(backbone: Backbone, texts: Sequence[str]) -> list[int]:
    """Return the tokens of texts that are tokenised separately, after the BOS token that the tokenizer expects."""
    tokenizer = backbone.need_tokenizer()
    ids: list[int] = []
    bos = leading_bos(tokenizer)
    if bos is not None:
        ids.append(bos)
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def document_metrics(documents: Documents, names: Sequence[str]) -> dict[str, float]:
    """Return nats per token of both halves and of whole documents; for routes also when they switch."""
    metrics = half_nats(documents, documents)
    if len(names) > 1:
        tokens = [switched_after(document, names) for document in documents]
        metrics["switch_tokens"] = float(np.median(tokens))
        metrics["switched_within_32"] = float(np.mean([count <= 32 for count in tokens]))
    return metrics


def half_nats(first: Documents, second: Documents) -> dict[str, float]:
    """Return nats per token before the boundary in `first`, without the first token, and after it in `second`.

    With the documents of two different experts, these are the nats of a mixture that switches at the boundary.
    """
    before = np.concatenate([np.array(document["nats"])[: document["first"] - 1] for document in first])
    after = np.concatenate([np.array(document["nats"])[document["first"] - 1 :] for document in second])
    return {
        "nll_code_half": float(before.mean()),
        "nll_prose_half": float(after.mean()),
        "nll_document": float(np.concatenate([before, after]).mean()),
    }


def switched_after(document: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the number of tokens after the boundary until the expert of the second half leads and stays.

    If it never does, this is the number of all tokens after the boundary.
    """
    weights = np.array(document["weights"])[document["first"] :, : len(names)]
    is_right = weights.argmax(-1) == names.index(SECOND)
    for token in range(len(is_right)):
        if is_right[token : token + STABLE_TOKENS].all():
            return token
    return len(is_right)
