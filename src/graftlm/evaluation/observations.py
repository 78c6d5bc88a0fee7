"""The description of a graft, and statistics of its forward pass on text, such as shares of open gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graftlm.backbone import Backbone
from graftlm.data import Document
from graftlm.evaluation.scored_text import first_documents
from graftlm.grafted.model import GraftedModel

_TOKENS = 4096
_CHARACTERS = 8 * _TOKENS
_DOCUMENTS = 8


def observe(
    model: GraftedModel, backbone: Backbone, documents: Sequence[Document], length: int
) -> dict[str, list[float]]:
    """Return statistics of a forward pass of the graft named `graft` on the start of documents.

    Args:
        model: a model whose graft is named `graft`.
        backbone: the backbone of this model, whose tokenizer is used.
        documents: the documents; at most 4,096 tokens of the first eight are read, and at least one row. Several
            sources have equal shares.
        length: tokens per row.

    Returns:
        The values of `Graft.observe` by the statistic's name; empty if the documents have no tokens.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """
    tokenizer = backbone.need_tokenizer()
    by_source = first_documents(documents, _DOCUMENTS)
    ids: list[int] = []
    for chosen in by_source:
        text = "\n".join(document.full_text[:_CHARACTERS] for document in chosen)
        ids_of_source = tokenizer(text[:_CHARACTERS], add_special_tokens=False, verbose=False)["input_ids"]
        ids += ids_of_source[: _TOKENS // len(by_source)]
    if not ids:
        return {}
    length = min(len(ids), length)
    rows = max(1, min(len(ids), _TOKENS) // length)
    inputs = torch.tensor(ids[: rows * length], device=backbone.device).view(rows, length)
    observed = model.observe(input_ids=inputs, use_cache=False)["graft"]
    return {name: values.tolist() for name, values in observed.items()}


def graft_statistics(
    model: GraftedModel, backbone: Backbone, tests: Mapping[str, Sequence[Document]], length: int
) -> dict[str, object]:
    """Return the description of the graft named `graft`, and its statistics on test sets, as plain JSON values.

    Args:
        model: a model whose graft is named `graft`.
        backbone: the backbone of this model, whose tokenizer is used.
        tests: test documents by the name of their set.
        length: tokens per row.

    Returns:
        The values of `Graft.describe`, and {set: values} for each statistic of `Graft.observe`, by name.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """
    graft: Any = model.grafts["graft"]
    statistics: dict[str, Any] = dict(graft.describe(backbone))
    for name, documents in tests.items():
        for key, values in observe(model, backbone, documents, length).items():
            statistics.setdefault(key, {})[name] = values
    return statistics
