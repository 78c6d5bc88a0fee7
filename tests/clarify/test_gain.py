"""The information gain: compared with a literal equation 1.19, and on known cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clarify import reference
from graftlm.errors import EvaluationError
from graftlm.pipelines.clarify.gain import (
    distributions_from_log_likelihoods,
    gains_by_answer,
    information_gain,
    output_distributions,
)


def shares_of(weights: list[int]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


WEIGHTS = st.integers(0, 20)
SHARES = st.lists(WEIGHTS, min_size=1, max_size=5).filter(sum).map(shares_of)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], list[list[float]]]:
    prior = draw(SHARES)
    width = draw(st.integers(1, 5))
    row = st.lists(WEIGHTS, min_size=width, max_size=width).filter(sum).map(shares_of)
    return prior, [draw(row) for _ in prior]


@given(cases())
def test_the_gain_is_equation_1_19(case: tuple[list[float], list[list[float]]]) -> None:
    prior, given_KY = case
    gain = information_gain(prior, given_KY)
    assert gain == pytest.approx(reference.information_gain(prior, given_KY), abs=1e-9)
    assert gain == pytest.approx(reference.mutual_information(prior, given_KY), abs=1e-9)
    by_answer = gains_by_answer(prior, given_KY)
    assert gain == pytest.approx(math.fsum(p * g for p, g in zip(prior, by_answer, strict=True)), abs=1e-9)


@given(cases())
def test_the_gain_lies_between_nothing_and_the_prior(case: tuple[list[float], list[list[float]]]) -> None:
    prior, given_KY = case
    gain = information_gain(prior, given_KY)
    assert 0 <= gain <= reference.entropy(prior) + 1e-9
    assert gain <= math.log2(len(given_KY[0])) + 1e-9
    order = np.random.default_rng(0).permutation(len(given_KY[0]))
    assert information_gain(prior, np.array(given_KY)[:, order]) == pytest.approx(gain, abs=1e-9)
    order = np.random.default_rng(0).permutation(len(prior))
    turned = information_gain(np.array(prior)[order], np.array(given_KY)[order])
    assert turned == pytest.approx(gain, abs=1e-9)


@given(SHARES, SHARES)
def test_an_answer_that_changes_nothing_brings_nothing(prior: list[float], row: list[float]) -> None:
    assert information_gain(prior, [row] * len(prior)) == pytest.approx(0, abs=1e-12)


@given(SHARES)
def test_answers_that_decide_everything_bring_their_entropy(prior: list[float]) -> None:
    assert information_gain(prior, np.eye(len(prior))) == pytest.approx(reference.entropy(prior), abs=1e-9)


@given(cases())
def test_merged_outputs_have_no_larger_gain(case: tuple[list[float], list[list[float]]]) -> None:
    prior, given_KY = case
    table = np.array(given_KY)
    if table.shape[1] > 1:
        merged = np.concatenate([table[:, :1] + table[:, 1:2], table[:, 2:]], axis=1)
        assert information_gain(prior, merged) <= information_gain(prior, table) + 1e-9


def test_worked_by_hand() -> None:
    assert information_gain([0.5, 0.5], [[1, 0], [0, 1]]) == 1.0
    assert information_gain([0.25] * 4, np.eye(4)) == 2.0
    assert information_gain([0.25] * 4, [[1, 0], [1, 0], [0, 1], [0, 1]]) == 1.0
    assert information_gain([1.0, 0.0], [[1, 0], [0, 1]]) == 0.0, "an answer that nobody gives"
    # H(1/4) - H(0)/2 - H(1/2)/2
    assert information_gain([0.5, 0.5], [[0.5, 0.5], [0, 1]]) == pytest.approx(0.8112781 - 0.5)


def test_outputs_are_the_same_but_for_white_space_and_form() -> None:
    known, given_KY = output_distributions(
        [["E\u0301tes-vous\u00a0là ?"], ["Êtes-vous  là ?\n".replace("Ê", "É")], ["és"], ["És"]]
    )
    assert given_KY.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], "capitals count: German sie and Sie"
    assert known[0] == "E\u0301tes-vous\u00a0là ?", "as it was written first"


def test_likelihoods_become_shares() -> None:
    shares = distributions_from_log_likelihoods([[-1000.0, -1000.0], [-2.0, -2.0 - math.log(3)]])
    assert shares.tolist() == [[0.5, 0.5], pytest.approx([0.75, 0.25])]


@pytest.mark.parametrize(
    ("prior", "given_KY"),
    [
        ([0.5, 0.5], [[1.0]]),
        ([0.5, 0.6], [[1.0], [1.0]]),
        ([1.5, -0.5], [[1.0], [1.0]]),
        ([1.0], [[0.5]]),
        ([], np.zeros((0, 1))),
        ([1.0], np.float64(1.0)),
    ],
)
def test_invalid_distributions_are_refused(prior: list[float], given_KY: list[list[float]]) -> None:
    with pytest.raises(EvaluationError):
        information_gain(prior, given_KY)
