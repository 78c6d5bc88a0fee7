"""Prompts with reference answers: generate answers, score them, and score the reference answer's likelihood.

The prompt has the tokens that it has alone, and the answer those that continue it, as in training (`prompt_column`).
The prompt begins with the BOS token that its tokenizer puts before texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from graftlm.backbone import (
    continuation_text,
    end_ids,
    generate_rows,
    leading_bos,
    max_sequence_length,
    read_stops,
)
from graftlm.data import Document
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.inference import LanguageModel, Precision, evaluation_mode
from graftlm.evaluation.scores import Scores, score_windows
from graftlm.evaluation.windows import cut_windows

if TYPE_CHECKING:
    from sacrebleu.metrics.chrf import CHRF

# A checkpoint's own generation settings would change the greedy choice.
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Example:
    """A prompt and its reference answer, as texts without special tokens."""

    prompt: str
    answer: str


def generate_answers(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = ("\n",),
    batch_size: int = 64,
) -> list[str]:
    """Continue each prompt greedily, up to its first stop string or end-of-text token.

    Args:
        model: a `GraftedModel` or any transformers model. Of its `generation_config` only end-of-text tokens are used.
        tokenizer: the model's tokenizer.
        prompts: in any order; prompts of similar length share a batch, padded on the left.
        max_new_tokens: maximum number of new tokens per answer.
        stop: strings that end an answer and are not part of it. A special token ends it by its id.
        batch_size: prompts per batch; it affects speed and memory only.

    Returns:
        The answers in the order of the prompts, without special tokens.

    Raises:
        DataError: a prompt has no tokens, or a stop string is empty or can't match; see `read_stops`.
        EvaluationError: a prompt and its new tokens exceed the model's positions.
    """
    rows = _prompt_rows(model, tokenizer, prompts, max_new_tokens)
    return continue_rows(
        model,
        tokenizer,
        rows,
        end_ids(model, tokenizer),
        stop,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )


def continue_rows(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int]],
    ends: AbstractSet[int],
    stop: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    on_batch: Callable[[int], None] = lambda answers: None,
) -> list[str]:
    """Continue rows of tokens greedily, as `generate_answers` does with prompts.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's tokenizer.
        rows: the token ids of each prompt, at least one, which fit into the model's positions with the answer.
        ends: ids that end an answer.
        stop: strings that end an answer and are not part of it.
        max_new_tokens: maximum number of new tokens per answer.
        batch_size: rows per batch; it affects speed and memory only.
        on_batch: called with the number of answers after each batch.

    Returns:
        The answers in the order of the rows, without special tokens.

    Raises:
        DataError: a stop string is empty or can't match; see `read_stops`.
    """
    stops = read_stops(tokenizer, stop)
    all_ends = stops.ids | ends
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]), reverse=True)
    criterion = _stop_criterion(tokenizer, stops.strings)
    answers = [""] * len(rows)
    with evaluation_mode(model), torch.inference_mode():
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            batch = [rows[number] for number in numbers]
            written = _generate_batch(model, tokenizer, batch, max_new_tokens, all_ends, criterion)
            for number, ids in zip(numbers, written, strict=True):
                text = continuation_text(tokenizer, rows[number], ids)
                answers[number] = _text_before(text, stops.strings)
            on_batch(len(numbers))
    return answers


def _prompt_rows(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int
) -> list[list[int]]:
    """Return the token ids of each prompt, after checking that there are some and that the answer fits."""
    bos = leading_bos(tokenizer)
    prefix = [] if bos is None else [bos]
    limit = max_sequence_length(model)
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        row = [*prefix, *ids]
        if not row:
            raise DataError(f"The prompt of example {number} has no tokens: give it at least one word to continue.")
        size = len(row) + max_new_tokens
        if limit < size:
            raise EvaluationError(
                f"Number of tokens in the prompt of example {number}: {len(row)}, with max_new_tokens {size} in all, "
                f"but the model has {limit} positions: shorten the prompt, or lower max_new_tokens."
            )
        rows.append(row)
    return rows


def _stop_criterion(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> StopStringCriteria | None:
    """Return a criterion that ends a row at a stop string; None where the vocabulary can't write any."""
    if not stop:
        return None
    with suppress(ValueError):
        return StopStringCriteria(tokenizer, list(stop))
    return None


def _generate_batch(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    max_new_tokens: int,
    ends: AbstractSet[int],
    criterion: StopStringCriteria | None,
) -> list[list[int]]:
    """Return the ids of the answers to a batch of prompts, without the token that ends them."""
    longest = max(len(row) for row in rows)
    criteria = StoppingCriteriaList()
    if criterion is not None:

        def stops(ids: Any, scores: Any, **_: object) -> Tensor:
            return criterion(ids[:, longest:], scores)  # Stop strings in prompts don't count.

        criteria.append(stops)
    answers = generate_rows(
        model,
        tokenizer,
        rows,
        ends,
        max_new_tokens=max_new_tokens,
        stopping_criteria=criteria,
        use_cache=True,
        no_repeat_ngram_size=0,
        **GREEDY,
    )
    return [[token for token in answer if token not in ends] for answer in answers]


def _text_before(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop string."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts, default=len(text))]


def score_answers(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[Example],
    *,
    batch_size: int = 16,
    precision: Precision = "fp32",
) -> Scores:
    """Score every token of each reference answer given its prompt: one window per example, in order.

    The end-of-text token is not scored, as in `score`. Without a prompt and a BOS token, the first token of the answer
    is context only.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's tokenizer.
        examples: prompts with reference answers.
        batch_size: examples per call of the model; it affects speed and memory only.
        precision: see `score`.

    Raises:
        DataError: an answer has no token to score, or there are no examples.
        EvaluationError: an example exceeds the model's positions, the model predicts NaN or infinity, or the precision
            is unknown.
    """
    documents = [Document(example.answer, prompt=example.prompt) for example in examples]
    windows = list(cut_windows(tokenizer, documents, sys.maxsize))
    scored = {window.document for window in windows}
    for number in range(len(documents)):
        if number not in scored:
            raise DataError(
                f"The answer of example {number + 1} has no token to score: give it text, or leave the example out."
            )
    limit = max_sequence_length(model)
    for window in windows:
        if limit < len(window.ids):
            raise EvaluationError(
                f"Prompt and answer of example {window.document + 1} have {len(window.ids)} tokens, but the model has "
                f"{limit} positions: shorten the example, or leave it out."
            )
    return score_windows(model, tokenizer, windows, batch_size=batch_size, precision=precision)


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> np.ndarray:
    """Compare answers with the reference answers after stripping white space at both ends.

    Args:
        answers: generated answers, one for each example.
        examples: the examples, with their reference answers.

    Returns:
        (examples,) float64, 1 where the texts are equal, else 0.

    Raises:
        EvaluationError: the numbers of answers and examples differ.
    """
    _check_pairs(answers, examples)
    matches = np.zeros(len(examples))
    for number, (answer, example) in enumerate(zip(answers, examples, strict=True)):
        if answer.strip() == example.answer.strip():
            matches[number] = 1
    return matches


def chrf(answers: Sequence[str], examples: Sequence[Example], *, beta: int = 2) -> float:
    """Return corpus chrF by sacrebleu, from 0 to 100: the F-beta score of character n-grams, n from 1 to 6.

    It is 0 without answers.

    Args:
        answers: generated answers, one for each example.
        examples: the examples, with their reference answers.
        beta: the weight of recall over precision: 2 is sacrebleu's default, 1 gives chrF1.

    Raises:
        EvaluationError: the numbers of answers and examples differ.
    """
    counts = chrf_counts(answers, examples)
    return chrf_of(counts.sum(axis=0), beta=beta)


def chrf_counts(answers: Sequence[str], examples: Sequence[Example]) -> np.ndarray:
    """Count the character n-grams of each example, from which chrF is computed.

    Args:
        answers: generated answers, one for each example.
        examples: the examples, with their reference answers.

    Returns:
        (examples, 18) int64: for each n from 1 to 6 the numbers of n-grams of the answer, the reference, and both.

    Raises:
        EvaluationError: the numbers of answers and examples differ.
    """
    _check_pairs(answers, examples)
    if not answers:
        return np.zeros((0, 18), dtype=np.int64)
    references = [example.answer for example in examples]
    # sacrebleu has no public function for counts per text; its own significance tests use this one.
    return np.array(_sacrebleu()._extract_corpus_statistics(answers, [references]))


def chrf_of(counts: np.ndarray, *, beta: int = 2) -> float:
    """Return chrF, from 0 to 100, from counts of n-grams.

    Args:
        counts: (18,), the sum of `chrf_counts` over examples.
        beta: the weight of recall over precision.
    """
    return float(_sacrebleu(beta)._compute_score_from_stats(counts.tolist()).score)


def chrf_signature(*, beta: int = 2) -> str:
    """Return sacrebleu's signature of chrF for papers: its version and settings.

    Args:
        beta: the weight of recall over precision.
    """
    metric = _sacrebleu(beta)
    metric.sentence_score("a", ["a"])  # The signature contains the number of references, known after a call.
    return f"chrF{beta}|{metric.get_signature()}"


def _sacrebleu(beta: int = 2) -> CHRF:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(beta=beta)


def _check_pairs(answers: Sequence[str], examples: Sequence[Example]) -> None:
    if len(answers) != len(examples):
        raise EvaluationError(
            f"The number of answers is {len(answers)}, but that of examples is {len(examples)}: give one answer for "
            "each example."
        )
