"""Which part of a test set was measured: the tokens and documents of each of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TypedDict

import numpy as np

from graftlm.data import Document
from graftlm.evaluation.scores import Scores
from graftlm.evaluation.windows import numbers_by_source


class ScoredPart(TypedDict):
    """What was scored of a source of a test set, as plain JSON values.

    Attributes:
        source: title of the source; empty for texts from memory.
        tokens: number of scored tokens.
        documents: number of documents that have scored tokens.
        of_documents: number of all documents.
    """

    source: str
    tokens: int
    documents: int
    of_documents: int


def scored_parts(scores: Scores, documents: Sequence[str | Document]) -> list[ScoredPart]:
    """Return what was scored of each source of a test set.

    Args:
        scores: the scores of the documents.
        documents: all documents of the set.
    """
    tokens = np.bincount(scores.document, weights=scores.tokens, minlength=len(documents)).astype(np.int64)
    parts: list[ScoredPart] = []
    for source, numbers in numbers_by_source(documents).items():
        of_source = tokens[numbers]
        part: ScoredPart = {
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
