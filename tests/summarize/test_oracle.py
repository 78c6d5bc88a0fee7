"""Oracle labels are those of the loop over rouge-score."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.pipelines.summarize import oracle, oracle_extract, oracle_labels
from graftlm.pipelines.summarize.oracle import rouge_tokens

rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
SCORER = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
WORDS = ["the", "running", "runs", "Tea", "teas", "a", "3.5", "x-ray", "café", "…", "models"]
SENTENCE = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)
LONG = st.lists(st.sampled_from(WORDS), min_size=65, max_size=130).map(" ".join)


def naive(document: list[str], summary: list[str]) -> np.ndarray:
    means = np.zeros((len(document), len(summary)))
    for column, reference in enumerate(summary):
        for row, sentence in enumerate(document):
            scores = SCORER.score(reference, sentence)
            means[row, column] = sum(scores[kind].fmeasure for kind in ("rouge1", "rouge2", "rougeL")) / 3
    return means


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(SENTENCE | LONG, max_size=8), st.lists(SENTENCE | LONG, max_size=4))
def test_scores_are_those_of_rouge_score(document: list[str], summary: list[str]) -> None:
    scores = oracle.rouge_scores(document, summary)
    assert scores.shape == (len(document), len(summary))
    # Both divide and add the same counts; a few operations in float64 are off by less than 1e-12.
    np.testing.assert_allclose(scores, naive(document, summary), rtol=1e-12)


@settings(max_examples=30)
@given(st.lists(SENTENCE, min_size=1, max_size=8), st.lists(SENTENCE, min_size=1, max_size=3), st.integers(1, 3))
def test_labels_are_those_of_the_naive_loop(document: list[str], summary: list[str], each: int) -> None:
    scores = naive(document, summary)
    wanted = [
        sorted(range(len(document)), key=lambda row: (-scores[row, column], row))[:each]
        for column in range(len(summary))
    ]
    assert oracle_labels(document, summary, each) == wanted
    assert oracle_extract(document, summary, each) == sorted({index for labels in wanted for index in labels})


@given(st.text(max_size=60))
def test_words_are_the_tokens_of_rouge_score(text: str) -> None:
    assert rouge_tokens(text) == SCORER._tokenizer.tokenize(text)
