"""Which part of a test set was measured: the tokens and documents of each of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from pydantic import JsonValue

from graftlm.data import Document
from graftlm.evaluation.scores import Scores
from graftlm.evaluation.windows import numbers_by_source


def scored_parts(scores: Scores, documents: Sequence[str | Document]) -> list[dict[str, JsonValue]]:
    """Return what was scored of each source of a test set, as plain JSON values.

    Args:
        scores: the scores of the documents.
        documents: all documents of the set.

    Returns:
        For each source its title as `source`, the number of scored `tokens`, the number of `documents` that have scored
        tokens, and the number of all documents, `of_documents`.
    """
    tokens = np.bincount(scores.document, weights=scores.tokens, minlength=len(documents)).astype(np.int64)
    parts: list[dict[str, JsonValue]] = []
    for source, numbers in numbers_by_source(documents).items():
        of_source = tokens[numbers]
        part: dict[str, JsonValue] = {
            "source": source,
            "tokens": int(of_source.sum()),
            "documents": int((of_source > 0).sum()),
            "of_documents": len(numbers),
        }
        parts.append(part)
    return parts


def first_documents(documents: Sequence[Document], count: int) -> list[list[Document]]:
    """Return the first documents of each source.

    Args:
        documents: the documents of a test set.
        count: number of documents in all; every source has an equal share of it, and at least one document.

    Returns:
        A list of documents for each source.
    """
    by_source = numbers_by_source(documents)
    each = max(1, count // max(1, len(by_source)))
    return [[documents[number] for number in islice(numbers, each)] for numbers in by_source.values()]
