"""Was the question needed? The expected information gain of its answer, in bits.

Section 1.2.3 of the thesis wants questions that maximise

    I(U; τ | x) = E_τ KL(p(u | x, τ) || p(u | x))                                            (1.19)

U is taken to be the output that the user wants. With candidate answers a_1 … a_K to a question q, their prior p_k, and
the translator's outputs under each, p(y | x, q, a_k), the user's wish before the question is
p(y | x) = Σ_k p_k p(y | x, q, a_k), and after an answer p(y | x, q, a_k): the gain is the Jensen-Shannon divergence of
the K distributions. It is 0 where all answers lead to the same outputs, and at most the entropy of the prior, where no
two share one.

Shapes: K answers, Y outputs.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

import numpy as np

from graftlm.errors import EvaluationError

Numbers = Sequence[float] | np.ndarray
Table = Sequence[Sequence[float]] | np.ndarray


def information_gain(prior_K: Numbers, given_KY: Table) -> float:
    """E_τ KL(p(u | x, τ) || p(u | x)) in bits, never below 0.

    Args:
        prior_K: the share of each answer; they sum to 1.
        given_KY: the probability of each output under each answer; rows sum to 1.

    Raises:
        EvaluationError: these are no probabilities.
    """
    prior, given = _checked(prior_K, given_KY)
    return max(0.0, float(np.dot(prior, _divergences(prior, given))))


def gains_by_answer(
    prior_K: Sequence[float] | np.ndarray, given_KY: np.ndarray | Sequence[Sequence[float]]
) -> list[float]:
    """What each answer would bring: KL(p(u | x, a_k) || p(u | x)) in bits."""
    prior, given = _checked(prior_K, given_KY)
    return [max(0.0, float(one)) for one in _divergences(prior, given)]


def _divergences(prior_K: np.ndarray, given_KY: np.ndarray) -> np.ndarray:
    mixture_Y = prior_K @ given_KY
    with np.errstate(divide="ignore", invalid="ignore"):
        terms_KY = np.where(given_KY > 0, given_KY * (np.log2(given_KY) - np.log2(mixture_Y)), 0.0)
    # An answer of no share may allow what the mixture has no share of: it adds nothing to the expectation.
    return np.where(prior_K > 0, terms_KY.sum(axis=1), 0.0)


def shares(outputs: Sequence[Sequence[str]]) -> tuple[list[str], np.ndarray]:
    """The different outputs, in order of appearance, and the share of each under each answer, (K, Y).

    Outputs are the same where they differ in nothing but white space and Unicode's form; capitals count, since in some
    languages they make the difference (German sie and Sie).
    """
    known: dict[str, int] = {}
    places = [[known.setdefault(same_form(text), len(known)) for text in row] for row in outputs]
    texts = {same_form(text): text for row in reversed(outputs) for text in reversed(row)}
    given_KY = np.zeros((len(outputs), len(known)))
    for k, row in enumerate(places):
        for place in row:
            given_KY[k, place] += 1 / len(row)
    return [texts[form] for form in known], given_KY


def same_form(text: str) -> str:
    """A text without what makes no difference."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def from_likelihoods(nats_KY: Table) -> np.ndarray:
    """Probabilities over the outputs that were decoded, from log p(y | x, q, a_k) in nats, (K, Y)."""
    nats = np.asarray(nats_KY, dtype=np.float64)
    odds = np.exp(nats - nats.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def beyond_chance(
    prior_K: Sequence[float], outputs: Sequence[Sequence[str]], *, shuffles: int = 200, seed: int = 0
) -> tuple[float, float]:
    """The gain of outputs that were drawn at random, less what chance alone gives, and that chance.

    Few draws differ between answers even where their distributions are the same, so the counted gain is too large. What
    it is when draws are dealt to the answers at random is taken off; the result is never below 0.

    Args:
        prior_K: the share of each answer.
        outputs: as many draws under each answer, two at least.
        shuffles: how often they are dealt anew.
        seed: of the dealing.
    """
    counts = {len(row) for row in outputs}
    if len(counts) != 1 or min(counts) < 2:
        raise EvaluationError("Chance is told from as many draws under each answer, two at least: draw more.")
    known, given_KY = shares(outputs)
    draws = counts.pop()
    chance, generator = 0.0, np.random.default_rng(seed)
    forms = [same_form(text) for text in known]
    labels = np.array([forms.index(same_form(text)) for row in outputs for text in row])
    for _ in range(shuffles):
        dealt = generator.permutation(labels).reshape(len(outputs), draws)
        dealt_KY = np.stack([np.bincount(row, minlength=len(known)) / draws for row in dealt])
        chance += information_gain(prior_K, dealt_KY) / shuffles
    return max(0.0, information_gain(prior_K, given_KY) - chance), chance


def entropy(shares_K: Numbers) -> float:
    """Of a distribution, in bits: the most that a question with this prior can bring."""
    return -math.fsum(p * math.log2(p) for p in np.asarray(shares_K, dtype=np.float64).tolist() if p > 0)


def _checked(prior_K: Numbers, given_KY: Table) -> tuple[np.ndarray, np.ndarray]:
    prior, given = np.asarray(prior_K, dtype=np.float64), np.asarray(given_KY, dtype=np.float64)
    if prior.ndim != 1 or given.ndim != 2 or len(prior) != len(given) or len(prior) == 0:
        raise EvaluationError(
            f"There are {prior.size} shares of answers and {len(given)} distributions of outputs: give one for each."
        )
    for values in (prior, *given):
        if (values < 0).any() or not math.isclose(values.sum(), 1.0, abs_tol=1e-6):
            raise EvaluationError("Shares of answers and of outputs are probabilities: none below 0, and 1 together.")
    return prior, given
