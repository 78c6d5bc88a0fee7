"""Measure the other models that a graft reads, each alone on the test texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from graftlm.backbone import Backbone
from graftlm.data import Document
from graftlm.data.text_sets import ONE_SET, TextSets
from graftlm.errors import EvaluationError
from graftlm.evaluation.audit.differences import tokenizer_difference
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.inference import Precision
from graftlm.evaluation.results import Metric
from graftlm.evaluation.scores import Scores, learning_and_forgetting, score
from graftlm.evaluation.windows import numbers_by_source

_FIRST_TOKEN = 64  # maximum number of bytes of a document's first token, which may not be scored


def measure_alone(
    model: Backbone,
    backbone: Backbone,
    tests: Mapping[str, Sequence[Document]],
    backbone_scores: Mapping[str, Scores],
    *,
    length: int,
    batch_size: int,
    precision: Precision,
    sets: TextSets = ONE_SET,
) -> dict[str, Metric]:
    """Measure a model on the text on which a backbone was measured.

    Args:
        model: the model. Without a tokenizer, it reads the backbone's tokens.
        backbone: the backbone.
        tests: the test documents by set.
        backbone_scores: the backbone's scores of these sets.
        length: maximum number of tokens of a window.
        batch_size: windows per forward pass.
        precision: see `score`.
        sets: the names of the sets of new and old text.

    Returns:
        The number of parameters and the metrics of the sets. If the tokenizers differ, these are bits per byte only,
        since losses per token can't be compared.

    Raises:
        EvaluationError: the model predicts no text, or can't read windows of this length.
    """
    if not (model.sites.family.causal and model.model.can_generate()):
        raise EvaluationError(f"{model.name} predicts no text, so it can't be measured on text: measure it on tasks.")
    base_tokenizer = backbone.need_tokenizer()
    tokenizer = model.tokenizer or base_tokenizer
    same_tokens = tokenizer_difference(base_tokenizer, tokenizer) is None
    metrics: dict[str, Metric] = {}
    scores = {}
    for name, documents in tests.items():
        scores[name] = score(
            model.bare_model,
            tokenizer,
            documents if same_tokens else _scored_documents(documents, backbone_scores[name]),
            length=length,
            batch_size=batch_size,
            precision=precision,
            limit_tokens=int(backbone_scores[name].tokens.sum()) if same_tokens else None,
        )
    if same_tokens:
        metrics.update(learning_and_forgetting(backbone_scores, scores, sets))
    else:
        for name, of_set in scores.items():
            metrics[f"{name}_bpb"] = of_set.interval("bits_per_byte")
    metrics["total_parameters"] = count_parameters(model.model.parameters())
    return metrics


def _scored_documents(documents: Sequence[Document], scores: Scores) -> list[Document]:
    """Return the documents of which tokens were scored, the last one of each source cut where the scoring ended."""
    scored = []
    byte_counts = np.bincount(scores.document, weights=scores.bytes, minlength=len(documents)).astype(np.int64)
    for numbers in numbers_by_source(documents).values():
        of_source = [number for number in numbers if byte_counts[number]]
        scored += [documents[number] for number in of_source]
        if of_source:
            scored[-1] = _beginning(scored[-1], int(byte_counts[of_source[-1]]))
    return scored


def _beginning(document: Document, scored: int) -> Document:
    """Return a document up to about where its scoring ended; a conversation is not cut.

    Args:
        document: the document.
        scored: number of scored bytes; those of the first token may be missing.
    """
    text = document.text.encode()
    if document.chat is not None or len(text) - scored <= _FIRST_TOKEN:
        return document
    return replace(document, text=text[:scored].decode(errors="ignore"))
