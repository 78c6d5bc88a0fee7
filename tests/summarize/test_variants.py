"""Variants of the thesis: whose sentences a writer reads in training and in use."""

from __future__ import annotations

import pytest

from graftlm.errors import RecipeError
from graftlm.pipelines.summarize import Budget, LeadSelector, oracle_extract, read_text
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.pipelines.summarize.summarized import SummarizedDocument
from graftlm.pipelines.summarize.variants import (
    OracleSelector,
    Purpose,
    Variant,
    mean_oracle_size,
    oracle_selection,
    writer_examples,
)
from summarize.tools import TEA

pytest.importorskip("sentencex")
rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
SUMMARY = "Tea drinkers sorted 12% more cards. Attention rose in all groups."
DOCUMENTS = [
    SummarizedDocument(read_text(TEA, ".md"), SUMMARY),
    SummarizedDocument(read_text("Milk is very white. Cows give milk to all. Nobody asks them."), "Milk is white."),
]


@pytest.mark.parametrize(
    ("variant", "purpose", "is_oracle"),
    [
        ("gm", "training", True),
        ("gm", "test", False),
        ("mm", "training", False),
        ("mm", "test", False),
        ("gg", "training", True),
        ("gg", "test", True),
    ],
)
def test_the_letters_name_whose_sentences_are_read(variant: Variant, purpose: Purpose, is_oracle: bool) -> None:
    examples = writer_examples(DOCUMENTS, variant, purpose, LeadSelector(), Budget(amount=2))
    assert [example.summary for example in examples] == [document.summary for document in DOCUMENTS]
    for example, summarized in zip(examples, DOCUMENTS, strict=True):
        document = summarized.document
        texts = [document.sentences[index].text for index in document.selectable]
        oracle = [document.selectable[position] for position in oracle_extract(texts, summarized.summary_sentences)]
        lead = document.selectable[:2]
        assert oracle != lead or len(DOCUMENTS) > 1
        assert list(example.extract.indices) == (oracle if is_oracle else lead)
    assert writer_examples([], variant, purpose, LeadSelector(), Budget()) == []


def test_the_oracle_ranks_by_the_best_score_with_a_sentence_of_the_summary() -> None:
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    document = DOCUMENTS[0].document
    references = DOCUMENTS[0].summary_sentences
    assert len(references) == 2
    scores = {}
    for index in document.selectable:
        text = document.sentences[index].text
        results = [scorer.score(reference, text).values() for reference in references]
        scores[index] = [sum(score.fmeasure for score in result) / 3 for result in results]
    wanted = set()
    for column in range(2):
        wanted |= set(sorted(scores, key=lambda index, column=column: (-scores[index][column], index))[:2])
    ranked = OracleSelector(references).rank(document)
    assert {sentence.index for sentence in ranked} == wanted
    for sentence in ranked:
        assert sentence.score == pytest.approx(max(scores[sentence.index]))
    assert [sentence.score for sentence in ranked] == sorted((sentence.score for sentence in ranked), reverse=True)
    extract = oracle_selection(DOCUMENTS[0])
    assert set(extract.indices) == wanted
    assert list(extract.indices) == sorted(extract.indices)
    assert mean_oracle_size(DOCUMENTS[:1]) == len(wanted)


def test_the_models_extract_keeps_its_budget_and_the_oracle_takes_all() -> None:
    (example,) = writer_examples(DOCUMENTS[:1], "mm", "test", FixedSelector([5, 1, 3]), Budget(amount=2))
    assert example.extract.indices == (1, 5)
    (example,) = writer_examples(DOCUMENTS[:1], "gg", "test", FixedSelector([5]), Budget(amount=1), per_sentence=3)
    assert len(example.extract.indices) > 3
    with pytest.raises(RecipeError):
        writer_examples(DOCUMENTS, "mm", "test", LeadSelector(), Budget(amount=3, unit="tokens"))
