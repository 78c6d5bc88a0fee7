"""Figures of a summary on texts where they can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.pipelines.summarize.metrics import capitalized_names, copied_shares, faithfulness, rouge

pytest.importorskip("rouge_score")


def test_rouge_by_hand() -> None:
    result = rouge(["the cat sat", "on the mat"], ["the cat lay on the mat"])
    assert result["rouge1"] == pytest.approx(100 * 5 / 6)
    assert result["rouge2"] == pytest.approx(100 * 2 * (3 / 5) * (3 / 5) / (6 / 5))
    assert result["rougeL"] == pytest.approx(100 * 5 / 6)  # both sentences together
    assert rouge(["tea"], ["tea"])["rouge3"] == 0


def test_what_the_source_does_not_have_is_named() -> None:
    source = "In 2019 Ada Lovelace sold 1,250 cups of tea in Paris."
    result = faithfulness("We learn that Ada sold 1,250 cups in Berlin. In 2020 she left.", source)
    assert result.missing == ("2020", "Berlin")
    assert (result.numbers, result.names) == (0.5, 0.5)
    assert faithfulness("tea", "tea").numbers is None
    assert faithfulness("", "tea").words is None


def test_names_do_not_begin_sentences() -> None:
    assert capitalized_names('Tea by Ada. "Cards" are in Rome, I say! The NASA') == ["Ada", "Rome", "NASA"]


def test_copied_ngrams_by_hand() -> None:
    # Of the pairs, "sat on", "cat a" and "a mat" are not in the source.
    source = "The cat sat. It sat on the cat."
    shares = copied_shares("the cat sat on the cat a mat", source, (1, 2, 3, 9))
    assert shares == {1: pytest.approx(6 / 8), 2: pytest.approx(5 / 7), 3: pytest.approx(3 / 6)}
    assert copied_shares("", source) == {}
    assert copied_shares(source, source, (1, 7)) == {1: 1, 7: 1}


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_longer_ngrams_are_copied_only_where_shorter_ones_are(summary: list[str], source: list[str]) -> None:
    text, words = " ".join(source), len(summary)
    shares = copied_shares(" ".join(summary), text, (1, 2, 3))
    assert list(shares) == [n for n in (1, 2, 3) if n <= words]
    for n, share in shares.items():
        grams = [summary[first : first + n] for first in range(words - n + 1)]
        found = [gram for gram in grams if f" {' '.join(gram)} " in f" {text} "]
        assert share == pytest.approx(len(found) / len(grams))
