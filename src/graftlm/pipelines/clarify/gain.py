"""The expected information gain of a question: does its answer change the output?

Section 1.2.3 of the thesis asks for questions that maximise

    I(U; τ | x) = E_τ KL(p(u | x, τ) || p(u | x))                                            (1.19)

Here U is the output that the user wants. A question q has candidate answers a_1 … a_K with prior p_k. The translator's
outputs under each answer give p(y | x, q, a_k). Before the question p(y | x) = Σ_k p_k p(y | x, q, a_k), so the gain is
the Jensen-Shannon divergence of the K distributions. It is 0 if all answers lead to the same outputs. It is at most
the entropy of the prior, which it reaches if no two answers share an output.

Shapes: K answers, Y distinct outputs.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

from graftlm.errors import EvaluationError
from graftlm.pipelines.clarify.conversation import Conversation, Cost, Gain, Question
from graftlm.pipelines.clarify.models import ChatModel
from graftlm.pipelines.clarify.prompts import Prompt, build_prompt
from graftlm.pipelines.clarify.templates import load_template

Numbers = Sequence[float] | np.ndarray
Matrix = Sequence[Sequence[float]] | np.ndarray


def information_gain(prior_K: Numbers, given_KY: Matrix) -> float:
    """E_τ KL(p(u | x, τ) || p(u | x)) in bits, at least 0.

    `prior_K` (each answer's probability) and the rows of `given_KY` (each output's under an answer) sum to 1.

    Raises EvaluationError if the arguments are no probabilities.
    """
    return max(0.0, float(np.dot(prior_K, gains_by_answer(prior_K, given_KY))))


def gains_by_answer(prior_K: Numbers, given_KY: Matrix) -> list[float]:
    """KL(p(u | x, a_k) || p(u | x)) of each answer in bits; 0 for an answer with probability 0.

    Raises EvaluationError if the arguments are no probabilities.
    """
    prior, given = np.asarray(prior_K, dtype=np.float64), np.asarray(given_KY, dtype=np.float64)
    if prior.ndim != 1 or given.ndim != 2 or len(prior) != len(given) or len(prior) == 0:
        raise EvaluationError(
            f"There are {prior.size} shares of answers and {len(given)} distributions of outputs: give one for each."
        )
    for values in (prior, *given):
        if (values < 0).any() or not math.isclose(values.sum(), 1.0, abs_tol=1e-6):
            raise EvaluationError("Shares of answers and of outputs are probabilities: none below 0, and 1 together.")
    mixture_Y = prior @ given
    with np.errstate(divide="ignore", invalid="ignore"):
        terms_KY = np.where(given > 0, given * (np.log2(given) - np.log2(mixture_Y)), 0.0)
    return np.where(prior > 0, terms_KY.sum(axis=1), 0.0).clip(min=0.0).tolist()


def normalize_text(text: str) -> str:
    """The text in Unicode's NFC with single spaces. Case stays: German *sie* and *Sie* differ."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def output_distributions(outputs: Sequence[Sequence[str]]) -> tuple[list[str], np.ndarray]:
    """The distinct outputs in order of appearance, and their relative frequencies under each answer, (K, Y).

    Outputs are equal if `normalize_text` makes them equal.
    """
    distinct: dict[str, str] = {}
    for text in itertools.chain.from_iterable(outputs):
        distinct.setdefault(normalize_text(text), text)
    index = {key: number for number, key in enumerate(distinct)}
    rows = [[index[normalize_text(text)] for text in row] for row in outputs]
    return list(distinct.values()), np.stack([np.bincount(row, minlength=len(index)) / len(row) for row in rows])


def distributions_from_log_likelihoods(nats_KY: Matrix) -> np.ndarray:
    """Normalises log p(y | x, q, a_k) in nats over the decoded outputs: a softmax of each row, (K, Y)."""
    from scipy.special import softmax  # takes a second to import

    return softmax(np.asarray(nats_KY, dtype=np.float64), axis=1)


class GainEstimator:
    """Estimates what the answer to a question changes, by generating an output under each candidate answer.

    `prior` maps the candidate answers to their probabilities; by default they are uniform.
    """

    def __init__(self, model: ChatModel, *, prior: Callable[[Sequence[str]], Sequence[float]] | None = None) -> None:
        self._model, self._prior = model, prior

    def estimate(self, conversation: Conversation, question: Question) -> tuple[Gain | None, Cost]:
        """The gain of a question, and the cost of its estimate. The gain is None for less than two answers."""
        if len(question.answers) < 2:
            return None, Cost()
        template = load_template(conversation.template)
        language, text = conversation.target, conversation.text
        exchanges = [[*conversation.exchanges, (question.text, answer)] for answer in question.answers]
        prompts = [build_prompt(template, "write", language, text, exchanges=given) for given in exchanges]
        replies = [self._model.generate(prompt) for prompt in prompts]
        outputs = [[prompt.without_label(reply.text)] for reply, prompt in zip(replies, prompts, strict=True)]
        return self._gain(question, prompts, outputs), sum((reply.cost for reply in replies), Cost())

    def _gain(self, question: Question, prompts: Sequence[Prompt], outputs: Sequence[Sequence[str]]) -> Gain:
        count = len(question.answers)
        prior = tuple(self._prior(question.answers)) if self._prior else (1 / count,) * count
        texts, given_KY = output_distributions(outputs)
        score = getattr(self._model, "score", None)
        if score is not None:
            given_KY = distributions_from_log_likelihoods([score(prompt, texts) for prompt in prompts])
        return Gain(
            bits=information_gain(prior, given_KY),
            prior=prior,
            outputs=tuple(tuple(row) for row in outputs),
            by_answer=tuple(gains_by_answer(prior, given_KY)),
            likeliest=texts[int(np.argmax(np.asarray(prior) @ given_KY))],
            estimator="decoded" if score is None else "likelihood",
        )
