"""Selectors that learn nothing, and budgets that hold."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.errors import RecipeError
from graftlm.pipelines.summarize import (
    Budget,
    LeadSelector,
    RankedSentence,
    SourceDocument,
    SumySelector,
    read_text,
    select,
)
from graftlm.pipelines.summarize.selection import FixedSelector
from summarize.tools import TEA

pytest.importorskip("sumy")
KINDS = ("lexrank", "lsa", "sumbasic")


def speech(sentences: int, seed: int = 0) -> SourceDocument:
    chance = random.Random(seed)
    words = [f"{first}{second}en" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "au", "ei")]
    lines = [" ".join(chance.choices(words, k=chance.randint(3, 12))).capitalize() + "." for _ in range(sentences)]
    return read_text(" ".join(lines))


@pytest.mark.parametrize("seed", range(3))
def test_lexrank_by_matrices_ranks_as_sumy_does(seed: int) -> None:
    document = speech(60, seed)
    matrix, loop = (SumySelector("lexrank", pairwise=pairwise).rank(document) for pairwise in (False, True))
    scores = {ranked.index: ranked.score for ranked in loop}
    assert {ranked.index: ranked.score for ranked in matrix} == pytest.approx(scores)
    # Sentences may change places only where the loop's scores are equal up to rounding.
    order = [scores[ranked.index] for ranked in matrix]
    assert order == pytest.approx([ranked.score for ranked in loop])


@pytest.mark.parametrize("kind", KINDS)
def test_every_sentence_with_words_has_a_rank(kind) -> None:
    for text in (TEA, "One two.", "One two. Three four.", "Tea. Tea. 12. Water."):
        document = read_text(text, ".md")
        ranks = SumySelector(kind).rank(document)
        assert sorted(ranked.index for ranked in ranks) == document.selectable
        assert all(ranked.score == ranked.score for ranked in ranks)  # no nan


def test_a_long_document_is_ranked_in_blocks() -> None:
    document = speech(1000)
    found = SumySelector(block_size=100).rank(document)
    assert 40 <= len(found) <= 50
    assert len({ranked.index for ranked in found}) == len(found)
    tracemalloc.start()
    SumySelector(block_size=100).rank(document)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000 * 1000 * 8  # what one matrix of all pairs would take


class Backwards:
    name = "backwards"

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        return [RankedSentence(index, float(index)) for index in reversed(document.selectable)]


@settings(max_examples=50)
@given(st.integers(1, 400), st.sampled_from(["sentences", "characters", "tokens"]), st.integers(0, 3))
def test_a_budget_is_never_exceeded(amount: int, unit, seed: int) -> None:
    document = speech(8, seed)
    sizes = {"sentences": lambda extract: len(extract.indices), "characters": lambda extract: len(extract.text),
             "tokens": lambda extract: len(extract.text.split())}  # fmt: skip
    try:
        extract = select(document, Backwards(), Budget(amount=amount, unit=unit), lambda text: len(text.split()))
    except RecipeError as refusal:
        smallest = min(
            len(sentence.text.split()) if unit == "tokens" else len(sentence.text) for sentence in document.sentences
        )
        assert "fits into a budget" in str(refusal) and smallest > amount  # noqa: PT017, PT018
        return
    assert extract.used == sizes[unit](extract) <= amount
    assert list(extract.indices) == sorted(set(extract.indices))
    assert extract.scores == tuple(map(float, extract.indices))


def test_repeated_sentences_are_taken_once() -> None:
    extract = select(read_text("Tea is good. Tea is good. Water is wet."), LeadSelector(), Budget(amount=2))
    assert extract.indices == (0, 2)


def test_what_the_user_should_know_is_noted() -> None:
    one = select(read_text("Tea is good."), LeadSelector(), Budget())
    assert one.notes == ("The text is one sentence long: its summary is that sentence.",)
    short = select(read_text("Tea is good. Water is wet."), LeadSelector(), Budget(amount=900, unit="characters"))
    assert short.notes == ("The text is no longer than the requested summary: the extract is all of it.",)
    assert select(read_text(TEA, ".md"), LeadSelector(), Budget(amount=2)).notes == ()


def test_chosen_sentences_are_taken_as_given() -> None:
    assert select(read_text(TEA, ".md"), FixedSelector([7, 1]), Budget()).indices == (1, 7)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("10", 10, "sentences"),
        ("3 Sentences", 3, "sentences"),
        ("1200c", 1200, "characters"),
        ("300 tokens", 300, "tokens"),
    ],
)
def test_budgets_are_read(text: str, amount: int, unit: str) -> None:
    assert Budget.read(text) == Budget(amount=amount, unit=unit)


@pytest.mark.parametrize("text", ["", "0", "-3", "ten", "3q", "1.5c"])
def test_what_is_no_budget_is_told(text: str) -> None:
    with pytest.raises(RecipeError, match="is no budget"):
        Budget.read(text)


def test_tokens_need_a_tokenizer() -> None:
    with pytest.raises(RecipeError, match="needs a model's tokenizer"):
        select(read_text(TEA, ".md"), LeadSelector(), Budget(amount=5, unit="tokens"))
