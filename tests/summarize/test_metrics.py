"""Figures of a summary on texts where they can be counted by hand."""

from __future__ import annotations

import pytest

from graftlm.pipelines.summarize.metrics import capitalized_names, faithfulness, rouge

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
