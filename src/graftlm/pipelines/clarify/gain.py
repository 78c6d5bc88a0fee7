"""The expected information gain of a question: does its answer change the output?

Section 1.2.3 of the thesis selects questions that maximize

    I(U; τ | x) = E_τ KL(p(u | x, τ) || p(u | x))                                            (1.19)

Here U is the output that the user wants. A question q has candidate answers a_1 … a_K with prior p_k. The translator's
outputs under each answer give p(y | x, q, a_k). Before the question p(y | x) = Σ_k p_k p(y | x, q, a_k), so the gain is
the Jensen-Shannon divergence of the K distributions. It is 0 if all answers lead to the same outputs. It is at most
the entropy of the prior, which it reaches if no two answers share an output.

Shapes: K answers, Y distinct outputs.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

from graftlm.errors import EvaluationError
from graftlm.pipelines.clarify.conversation import Conversation, Gain, Question
from graftlm.pipelines.clarify.costs import Cost
from graftlm.pipelines.clarify.models import ChatModel, ScoringModel
from graftlm.pipelines.clarify.prompts import Prompt, build_prompt

Numbers = Sequence[float] | np.ndarray
Matrix = Sequence[Sequence[float]] | np.ndarray


def information_gain(prior_K: Numbers, given_KY: Matrix) -> float:
    """Compute the expected information gain of a question, E_τ KL(p(u | x, τ) || p(u | x)).

    Args:
        prior_K: probability of each answer, (K,).
        given_KY: probability of each output under each answer, (K, Y); rows sum to 1.

    Returns:
        The gain in bits, at least 0.

    Raises:
        EvaluationError: the shapes differ from these, a probability is negative or NaN, or probabilities don't sum to
            1.
    """
    gains_K = gains_by_answer(prior_K, given_KY)
    return max(0.0, float(np.dot(prior_K, gains_K)))


def gains_by_answer(prior_K: Numbers, given_KY: Matrix) -> list[float]:
    """Compute the information gain of each answer, KL(p(u | x, a_k) || p(u | x)).

    Args:
        prior_K: probability of each answer, (K,).
        given_KY: probability of each output under each answer, (K, Y); rows sum to 1.

    Returns:
        The gain of each of the K answers in bits, at least 0; 0 for an answer with probability 0.

    Raises:
        EvaluationError: the shapes differ from these, a probability is negative or NaN, or probabilities don't sum to
            1.
    """
    prior = np.asarray(prior_K, dtype=np.float64)
    given = np.asarray(given_KY, dtype=np.float64)
    _check_probabilities(prior, given)
    mixture_Y = prior @ given
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratios = np.log2(given) - np.log2(mixture_Y)
        terms_KY = np.where(given > 0, given * log_ratios, 0.0)
    gains_K = np.where(prior > 0, terms_KY.sum(axis=1), 0.0)
    return gains_K.clip(min=0.0).tolist()


def _check_probabilities(prior_K: np.ndarray, given_KY: np.ndarray) -> None:
    has_shapes = prior_K.ndim == 1 and given_KY.ndim == 2
    if not has_shapes or len(prior_K) != len(given_KY) or given_KY.size == 0:
        raise EvaluationError(
            f"The probabilities of answers have the shape {prior_K.shape} and those of outputs {given_KY.shape}, but "
            "(K,) and (K, Y) with K >= 1 and Y >= 1 are expected: give one distribution of outputs per answer."
        )
    _check_distribution(prior_K, "answers")
    for number, given_Y in enumerate(given_KY, start=1):
        _check_distribution(given_Y, f"outputs under answer {number}")


def _check_distribution(values: np.ndarray, events: str) -> None:
    if (values < 0).any() or not math.isclose(values.sum(), 1.0, abs_tol=1e-6):
        raise EvaluationError(
            f"The probabilities of the {events} have the minimum {values.min():.6g} and the sum {values.sum():.6g}, "
            "but must be at least 0 and sum to 1: pass finite probabilities, not logits or log-probabilities, and "
            "divide them by their sum."
        )


def normalize_text(text: str) -> str:
    """Return a text in Unicode's NFC, with single spaces and without outer white space.

    Case is kept, since German *sie* and *Sie* differ.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def output_distributions(outputs: Sequence[Sequence[str]]) -> tuple[list[str], np.ndarray]:
    """Count the distinct outputs under each answer.

    Outputs are equal if `normalize_text` makes them equal.

    Args:
        outputs: the outputs under each of K answers, at least one under each.

    Returns:
        The distinct outputs in order of appearance, and their relative frequencies under each answer, (K, Y).
    """
    distinct: dict[str, str] = {}
    for row in outputs:
        for text in row:
            distinct.setdefault(normalize_text(text), text)
    index = {key: number for number, key in enumerate(distinct)}
    frequencies_KY = []
    for row in outputs:
        indices = [index[normalize_text(text)] for text in row]
        counts_Y = np.bincount(indices, minlength=len(index))
        frequencies_KY.append(counts_Y / len(row))
    return list(distinct.values()), np.stack(frequencies_KY)


def distributions_from_log_likelihoods(nats_KY: Matrix) -> np.ndarray:
    """Normalize log-likelihoods over the outputs, by a softmax over the outputs under each answer.

    Args:
        nats_KY: log p(y | x, q, a_k) in nats, (K, Y).

    Returns:
        Probabilities, float64, (K, Y).
    """
    from scipy.special import softmax  # takes a second to import

    return softmax(np.asarray(nats_KY, dtype=np.float64), axis=1)


class GainEstimator:
    """Estimates the gain of a question by generating an output under each candidate answer.

    Args:
        model: generates the outputs. If it also computes log-likelihoods (`LocalModel.score`), these give the
            probabilities of the outputs; otherwise their frequencies do.
        prior: maps the candidate answers to their probabilities; by default they are uniform.
    """

    def __init__(self, model: ChatModel, *, prior: Callable[[Sequence[str]], Sequence[float]] | None = None) -> None:
        self._model = model
        self._prior = prior

    def estimate(self, conversation: Conversation, question: Question) -> tuple[Gain | None, Cost]:
        """Estimate the gain of a question.

        Args:
            conversation: the conversation so far.
            question: the proposed question.

        Returns:
            The gain, or None if the question has fewer than two answers; and the cost of the estimate.

        Raises:
            EndpointError: the model's server failed.
            DataError: a prompt does not fit a model on this machine.
            EvaluationError: the values of `prior` are not a probability for each answer, or a log-likelihood can't be
                computed or is NaN.
            RecipeError: the template can't be loaded.
        """
        if len(question.answers) < 2:
            return None, Cost()
        template = conversation.task
        prompts = []
        outputs = []
        cost = Cost()
        for answer in question.answers:
            prompt = build_prompt(
                template,
                "write",
                conversation.target,
                conversation.text,
                exchanges=[*conversation.exchanges, (question.text, answer)],
            )
            reply = self._model.generate(prompt)
            prompts.append(prompt)
            outputs.append([prompt.without_label(reply.text)])
            cost = cost + reply.cost
        return self._gain(question, prompts, outputs), cost

    def _gain(self, question: Question, prompts: Sequence[Prompt], outputs: Sequence[Sequence[str]]) -> Gain:
        """Return the gain of a question, given the prompt and the outputs under each of its answers."""
        prior_K = self._prior_of(question.answers)
        texts, given_KY = output_distributions(outputs)
        model = self._model
        has_scores = False
        if isinstance(model, ScoringModel):
            has_scores = True
            nats_KY = [model.score(prompt, texts) for prompt in prompts]
            given_KY = distributions_from_log_likelihoods(nats_KY)
        bits = information_gain(prior_K, given_KY)
        mixture_Y = np.asarray(prior_K) @ given_KY
        return Gain(
            bits=bits,
            prior=prior_K,
            outputs=tuple(tuple(row) for row in outputs),
            by_answer=tuple(gains_by_answer(prior_K, given_KY)),
            likeliest=texts[int(np.argmax(mixture_Y))],
            estimator="likelihood" if has_scores else "decoded",
        )

    def _prior_of(self, answers: Sequence[str]) -> tuple[float, ...]:
        if self._prior is not None:
            return tuple(self._prior(answers))
        count = len(answers)
        return (1 / count,) * count
