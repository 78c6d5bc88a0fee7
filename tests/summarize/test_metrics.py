"""Figures of a summary on texts where they can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.pipelines.summarize.metrics import (
    bootstrap,
    capitalized_names,
    copy_shares,
    faithfulness,
    mean_copy_shares,
    rouge,
)
from graftlm.pipelines.summarize.text import ngrams

pytest.importorskip("rouge_score")


def test_rouge_by_hand() -> None:
    result = rouge(["the cat sat", "on the mat"], ["the cat lay on the mat"])
    assert result["rouge1"] == pytest.approx(100 * 5 / 6)
    assert result["rouge2"] == pytest.approx(100 * 2 * (3 / 5) * (3 / 5) / (6 / 5))
    assert result["rougeL"] == pytest.approx(100 * 5 / 6)  # both sentences together
    assert rouge(["tea"], ["tea"])["rouge3"] == 0


def test_bootstrap_holds_the_mean_and_repeats() -> None:
    values = [1.0, 2.0, 6.0, 3.0]
    result = bootstrap(values)
    assert (result.mean, result.low >= 1, result.high <= 6) == (3.0, True, True)
    assert result == bootstrap(values)
    assert bootstrap([2.0]).low == 2.0 == bootstrap([2.0]).high
    wide = bootstrap([0.0, 1.0] * 200)
    assert (wide.high - wide.low) / 2 == pytest.approx(1.96 * 0.5 / 20, rel=0.1)  # as a mean of 400 throws


def test_copies_are_counted_where_they_come_from() -> None:
    unigrams, bigrams = copy_shares("a b c d e x", "a b c d e", extract="a b", introduction="b c d", max_ngram=2)
    assert (unigrams.n, unigrams.copied, unigrams.extract, unigrams.introduction, unigrams.rest) == pytest.approx(
        (1, 5 / 6, 2 / 6, 2 / 6, 1 / 6)
    )
    assert (bigrams.copied, bigrams.extract, bigrams.introduction, bigrams.rest) == pytest.approx(
        (4 / 5, 1 / 5, 2 / 5, 1 / 5)
    )


@given(*[st.lists(st.sampled_from("abcd"), min_size=1, max_size=12).map(" ".join)] * 3)
def test_shares_add_up_and_fall(summary: str, document: str, extract: str) -> None:
    shares = copy_shares(summary, document, extract=extract)
    assert len(shares) == len(summary.split())
    for share in shares:
        assert share.copied == pytest.approx(share.extract + share.introduction + share.rest)
    whole = copy_shares(summary, summary)
    assert all(share.copied == 1 for share in whole)
    assert set(mean_copy_shares([shares, whole])) == {share.n for share in shares}


def test_what_the_source_does_not_have_is_named() -> None:
    source = "In 2019 Ada Lovelace sold 1,250 cups of tea in Paris."
    result = faithfulness("We learn that Ada sold 1,250 cups in Berlin. In 2020 she left.", source)
    assert result.missing == ("2020", "Berlin")
    assert (result.numbers, result.names) == (0.5, 0.5)
    assert faithfulness("tea", "tea").numbers is None
    assert faithfulness("", "tea").words is None


def test_names_do_not_begin_sentences() -> None:
    assert capitalized_names('Tea by Ada. "Cards" are in Rome, I say! The NASA') == ["Ada", "Rome", "NASA"]


@given(st.lists(st.sampled_from("abc"), max_size=12), *[st.lists(st.sampled_from("abc"), max_size=12)] * 3)
def test_copy_shares_are_those_of_n_grams_looked_up_one_by_one(
    summary: list[str], extract: list[str], introduction: list[str], document: list[str]
) -> None:
    result = copy_shares(*(" ".join(words) for words in (summary, document, extract, introduction)), max_ngram=5)
    assert len(result) == min(5, len(summary))
    for share in result:
        known = [set(ngrams(words, share.n)) for words in (extract, introduction, document)]
        wanted = ngrams(summary, share.n)
        first = [next((index for index, grams in enumerate(known) if gram in grams), 3) for gram in wanted]
        shares = [first.count(index) / len(wanted) for index in range(3)]
        assert [share.extract, share.introduction, share.rest] == pytest.approx(shares)
        assert share.copied == pytest.approx(sum(shares))
