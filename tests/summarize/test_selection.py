"""Selectors that learn nothing, and budgets that hold."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.summarize.rivals import SumySelector
from graftlm.errors import RecipeError
from graftlm.pipelines.summarize import (
    Budget,
    DefaultSelector,
    LeadSelector,
    RankedSentence,
    SourceDocument,
    read_text,
    select,
    summarize,
)
from graftlm.pipelines.summarize.default_selector import RankingModel, sentence_features
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.pipelines.summarize.text import split_words
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


@pytest.mark.slow
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
@given(st.integers(1, 400), st.sampled_from(["sentences", "words", "characters", "tokens"]), st.integers(0, 3))
def test_a_budget_is_never_exceeded(amount: int, unit, seed: int) -> None:
    document = speech(8, seed)
    sizes = {
        "sentences": lambda extract: len(extract.indices),
        "words": lambda extract: len(split_words(extract.text)),
        "characters": lambda extract: len(extract.text),
        "tokens": lambda extract: len(extract.text.split()),
    }
    try:
        extract = select(document, Backwards(), Budget(amount=amount, unit=unit), lambda text: len(text.split()))
    except RecipeError as refusal:
        smallest = min(
            len(sentence.text.split()) if unit in ("words", "tokens") else len(sentence.text)
            for sentence in document.sentences
        )
        assert str(amount) in str(refusal)  # noqa: PT017
        assert smallest > amount
        return
    assert extract.used == sizes[unit](extract) <= amount
    assert list(extract.indices) == sorted(set(extract.indices))
    assert extract.scores == tuple(map(float, extract.indices))


def test_the_default_selector_ranks_every_sentence_once() -> None:
    for text in (TEA, "One two.", "Tea. Tea. 12. Water.", "Один два три четыре. Пять шесть семь восемь."):
        document = read_text(text, ".md")
        assert sorted(ranked.index for ranked in DefaultSelector().rank(document)) == document.selectable
    assert DefaultSelector().rank(replace(read_text("One two."), sentences=())) == []


def test_the_score_is_the_network_of_the_features() -> None:
    model = RankingModel(
        features=("a", "b"), linear=(2.0, 0.0), hidden=((1.0, -1.0, 0.5), (0.0, 1.0, 0.0)), output=(3.0, 5.0)
    )
    scores = model.score({"a": np.array([1.0, 0.0]), "b": np.array([0.0, 2.0])})
    assert scores.tolist() == [2 + 3 * 1.5, 3 * 0 + 5 * 2]


def test_a_sentence_that_repeats_a_better_one_comes_later() -> None:
    document = read_text("Tea is good for all. Tea is good for all persons. Water boils at noon here.")
    model = RankingModel(features=("relative",), linear=(-1.0,))
    ranked = [DefaultSelector(model.model_copy(update={"redundancy": weight})).rank(document) for weight in (0, 9)]
    assert [[sentence.index for sentence in row] for row in ranked] == [[0, 1, 2], [0, 2, 1]]


def test_features_know_position_section_title_and_wording() -> None:
    document = read_text("# On tea\n\n## Motivation\n\nTea is good for 12 of us. It is not `hot`.\n\n"
                         "## Proposal\n\nThis document proposes tea: is that good for us?", ".md")  # fmt: skip
    features = {name: values.round(3).tolist() for name, values in sentence_features(document)[0].items()}
    assert features["first"] == features["motivation"][:1] + [0, 0] == [1, 0, 0]
    assert features["relative"] == [0, 0.333, 0.667]
    assert (features["near_heading"], features["early_section"]) == ([1, 0.5, 1], [1, 1, 0.5])
    assert (features["motivation"], features["proposal"]) == ([1, 1, 0], [0, 0, 1])
    assert (features["subject"], features["verb"]) == ([0, 0, 1], [0, 0, 1])
    assert (features["backward_reference"], features["question"]) == ([0, 1, 1], [0, 0, 1])
    assert features["title_similarity"][1] == 0 < features["title_similarity"][0]
    assert max(features["centrality"]) == max(features["lead_similarity"]) == 1
    assert features["length"][0] == pytest.approx(math.log(7), abs=1e-3)


@pytest.mark.slow
def test_a_long_text_is_ranked_in_bounded_memory() -> None:
    document = speech(20_000)
    tracemalloc.start()
    assert len(DefaultSelector().rank(document)) == len(document.selectable)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(document.selectable) ** 2 / 2, "no matrix of all pairs"


def test_repeated_sentences_are_taken_once() -> None:
    extract = select(read_text("Tea is good. Tea is good. Water is wet."), LeadSelector(), Budget(amount=2))
    assert extract.indices == (0, 2)


def test_short_sentences_do_not_fill_the_rest_of_a_budget() -> None:
    document = read_text("Tea is good for all of us. This is quite a long one on water and on cups. It is so clear.")
    ranked, budget = FixedSelector([0, 1, 2]), Budget(amount=12, unit="words")
    assert select(document, ranked, budget).indices == (0, 2)
    assert select(document, ranked, budget, min_filler=5).indices == (0,)
    assert select(document, FixedSelector([2, 0, 1]), budget, min_filler=5).indices == (0, 2), "chosen, and no filler"
    assert select(document, FixedSelector([1, 2]), Budget(amount=4, unit="words"), min_filler=5).indices == (2,)


def test_the_best_of_each_section_of_a_long_document_come_first() -> None:
    sections = (f"# Part {part}\n\n" + " ".join(f"Cup {part} {n} is hot." for n in range(40)) for part in "abc")
    document = read_text("\n\n".join(sections), ".md")
    assert select(document, LeadSelector(), Budget(amount=5), per_section=2).indices == (0, 1, 40, 41, 80)
    assert select(document, LeadSelector(), Budget(amount=7), per_section=2).indices == (0, 1, 2, 40, 41, 80, 81)
    assert select(document, LeadSelector(), Budget(amount=5)).indices == (0, 1, 2, 3, 4)
    short = replace(document, sentences=document.sentences[:90])
    assert select(short, LeadSelector(), Budget(amount=5), per_section=2).indices == (0, 1, 2, 3, 4)


def test_what_the_user_should_know_is_noted() -> None:
    one = select(read_text("Tea is good."), LeadSelector(), Budget())
    assert len(one.notes) == 1
    short = select(read_text("Tea is good. Water is wet."), LeadSelector(), Budget(amount=900, unit="characters"))
    assert len(short.notes) == 1
    assert short.notes != one.notes
    assert select(read_text(TEA, ".md"), LeadSelector(), Budget(amount=2)).notes == ()


def test_chosen_sentences_are_taken_as_given() -> None:
    assert select(read_text(TEA, ".md"), FixedSelector([7, 1]), Budget()).indices == (1, 7)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("10", 10, "sentences"),
        ("3 Sentences", 3, "sentences"),
        ("1200c", 1200, "characters"),
        ("1 word", 1, "words"),
        ("300 tokens", 300, "tokens"),
    ],
)
def test_budgets_are_read(text: str, amount: int, unit: str) -> None:
    assert Budget.read(text) == Budget(amount=amount, unit=unit)


@pytest.mark.parametrize("text", ["", "0", "-3", "ten", "3q", "1.5c"])
def test_what_is_no_budget_is_told(text: str) -> None:
    with pytest.raises(RecipeError) as error:
        Budget.read(text)
    assert repr(text) in str(error.value)


def test_tokens_need_a_tokenizer() -> None:
    with pytest.raises(RecipeError, match="tokenizer"):
        select(read_text(TEA, ".md"), LeadSelector(), Budget(amount=5, unit="tokens"))


def test_summarize_takes_the_best_of_each_section_of_a_long_document() -> None:
    sections = (
        f"# Part {name}\n\n" + " ".join(f"Cat {name} number {n} sleeps all day." for n in range(60)) for name in "AB"
    )
    document = read_text("\n\n".join(sections), ".md")
    summary = summarize(document, selector=LeadSelector(), budget=Budget(amount=7))
    assert summary.extract.indices == (0, 1, 2, 3, 4, 60, 61)


@pytest.mark.slow
def test_an_extract_needs_no_torch_and_lazy_names_are_there() -> None:
    extract = "from graftlm.pipelines.summarize import read_text, summarize; summarize(read_text('Tea is good.'))"
    lazy = "from graftlm.pipelines.summarize import *; import graftlm.pipelines.summarize as s; "
    lazy += "assert s.load_writer and s.train_selector and s.CHAT_LAYOUT; assert not hasattr(s, 'np')"
    code = f"import sys; {extract}; assert 'torch' not in sys.modules; {lazy}"
    subprocess.run([sys.executable, "-c", code], check=True)
