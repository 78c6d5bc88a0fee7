"""Prompts with reference answers: generate answers, score them, and score the reference answer's likelihood.

Prompt and answer are tokenised separately, as in training (`prompt_column`). The prompt begins with the BOS that its
tokenizer puts before texts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from graftlm.backbone import end_ids, generate_rows, leading_bos, max_sequence_length
from graftlm.data import Document
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.metrics import Precision, Scores, cut_windows, evaluation_mode, score_windows
from graftlm.evaluation.sandbox import run_tests

# A checkpoint's own generation settings would change the greedy choice.
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Example:
    """A prompt, its reference answer, and for Python answers the source of their tests."""

    prompt: str
    answer: str
    tests: str = ""


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = ("\n",),
    batch_size: int = 64,
) -> list[str]:
    """Continue each prompt greedily; each answer ends before its first stop string or end-of-text token.

    Args:
        model: a `GraftedModel` or any transformers model. Its `generation_config` gives end-of-text tokens only.
        prompts: in any order; prompts of similar length share a batch, padded on the left.
        stop: strings that end an answer.
        batch_size: prompts per batch; it affects speed and memory only.

    Raises DataError if a prompt has no tokens, and EvaluationError if a prompt and its new tokens exceed the model's
    positions, or a stop string is empty.
    """
    if "" in stop:
        raise EvaluationError("A stop string is empty, and would end every answer before it begins: leave it out.")
    bos = leading_bos(tokenizer)
    start = [] if bos is None else [bos]
    rows = [[*start, *tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]] for prompt in prompts]
    limit = max_sequence_length(model)
    for number, row in enumerate(rows, start=1):
        if not row:
            raise DataError(f"The prompt of example {number} has no tokens: give at least one word to continue.")
        if limit < (size := len(row) + max_new_tokens):
            raise EvaluationError(
                f"The prompt of example {number} and {max_new_tokens} new tokens make {size}, but the model has "
                f"{limit} positions: shorten the prompt, or ask for fewer."
            )
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    answers = [""] * len(rows)
    criterion = None
    if stop:
        with suppress(ValueError):  # a vocabulary that can't write them
            criterion = StopStringCriteria(tokenizer, list(stop))
    with evaluation_mode(model), torch.inference_mode():
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            texts = _generate_batch(model, tokenizer, [rows[i] for i in batch], max_new_tokens, stop, criterion)
            for i, text in zip(batch, texts, strict=True):
                answers[i] = text
    return answers


def score_answers(
    model: Any, tokenizer: Any, examples: Iterable[Example], *, batch_size: int = 16, precision: Precision = "fp32"
) -> Scores:
    """Score every token of each reference answer given its prompt: one window per example, in order.

    The end-of-text token is not scored, as in `score`. Without a prompt and a BOS, neither is the first token.

    Raises DataError if an answer has no token to score, and EvaluationError if an example exceeds the model's
    positions, or the model predicts NaN or infinity.
    """
    documents = [Document(example.answer, prompt=example.prompt) for example in examples]
    windows = list(cut_windows(tokenizer, documents, sys.maxsize))
    if empty := {*range(len(documents))} - {window.document for window in windows}:
        raise DataError(f"The answer of example {min(empty) + 1} has no token to score: give it text, or leave it out.")
    limit = max_sequence_length(model)
    for window in windows:
        if limit < len(window.ids):
            raise EvaluationError(
                f"Prompt and answer of example {window.document + 1} make {len(window.ids)} tokens, but the model has "
                f"{limit} positions: shorten the example, or leave it out."
            )
    return score_windows(model, tokenizer, windows, batch_size=batch_size, precision=precision)


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> np.ndarray:
    """1 where an answer equals the reference after stripping white space, else 0; float64, shape (examples,)."""
    _check_pairs(answers, examples)
    pairs = zip(answers, examples, strict=True)
    return np.array([answer.strip() == example.answer.strip() for answer, example in pairs], dtype=np.float64)


def chrf(answers: Sequence[str], examples: Sequence[Example], *, beta: int = 2) -> float:
    """Corpus chrF by sacrebleu, from 0 to 100: the F-beta score of character n-grams, n from 1 to 6.

    `beta` is the weight of recall over precision: 2 is sacrebleu's default, 1 gives chrF1.
    """
    return chrf_of(chrf_counts(answers, examples).sum(axis=0), beta=beta)


def chrf_counts(answers: Sequence[str], examples: Sequence[Example]) -> np.ndarray:
    """Sufficient statistics of chrF per example: hypothesis, reference and matching n-grams; int64, (examples, 18)."""
    _check_pairs(answers, examples)
    if not answers:
        return np.zeros((0, 18), dtype=np.int64)
    # sacrebleu has no public function for counts per text; its own significance tests use this one.
    return np.array(_sacrebleu()._extract_corpus_statistics(answers, [[example.answer for example in examples]]))


def chrf_of(counts: np.ndarray, *, beta: int = 2) -> float:
    """chrF, from 0 to 100, of `chrf_counts` summed over examples, shape (18,)."""
    return float(_sacrebleu(beta)._compute_score_from_stats(counts.tolist()).score)


def chrf_signature(*, beta: int = 2) -> str:
    """Sacrebleu's signature of this metric, for papers."""
    metric = _sacrebleu(beta)
    metric.sentence_score("a", ["a"])  # the signature contains the number of references, known after a call
    return f"chrF{beta}|{metric.get_signature()}"


def pass_at_1(
    answers: Sequence[str], examples: Sequence[Example], *, timeout_s: float = 5.0, memory_mb: int = 512
) -> np.ndarray:
    """1 where prompt plus answer is Python that passes the example's tests, else 0; float64, shape (examples,).

    The programs run one after the other in a sandbox. `graftlm.evaluation.sandbox` says what that protects from.

    Args:
        examples: their prompts and tests, in the same order.
        timeout_s: CPU seconds for each program with its tests.
        memory_mb: MiB of address space for each program.

    Raises EvaluationError if an example has no tests, or this operating system is not supported.
    """
    _check_pairs(answers, examples)
    for number, example in enumerate(examples, start=1):
        if not example.tests.strip():
            raise EvaluationError(f"Example {number} has no tests, which every answer would pass: give it some.")
    run = partial(run_tests, timeout_s=timeout_s, memory_mb=memory_mb)
    pairs = zip(answers, examples, strict=True)
    return np.array([run(example.prompt + answer, example.tests).passed for answer, example in pairs], dtype=np.float64)


def _sacrebleu(beta: int = 2) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(beta=beta)


def _check_pairs(answers: Sequence[str], examples: Sequence[Example]) -> None:
    if len(answers) != len(examples):
        raise EvaluationError(f"There are {len(answers)} answers to {len(examples)} examples: give one for each.")


def _generate_batch(
    model: Any, tokenizer: Any, rows: list[list[int]], max_new_tokens: int, stop: Sequence[str], criterion: Any
) -> list[str]:
    """The answers of one batch of prompts' ids; the `criterion` finds stop strings, which don't count in prompts."""
    ends, start = end_ids(model, tokenizer), max(map(len, rows))
    criteria = [lambda ids, scores, **_: criterion(ids[:, start:], scores)] if criterion else []
    options = GREEDY | {"max_new_tokens": max_new_tokens, "use_cache": True, "no_repeat_ngram_size": 0}
    new = generate_rows(model, tokenizer, rows, ends, stopping_criteria=StoppingCriteriaList(criteria), **options)
    return [_decode_answer(tokenizer, row, ids, ends, stop) for row, ids in zip(rows, new, strict=True)]


def _decode_answer(tokenizer: Any, row: list[int], new: list[int], ends: set[int], stop: Sequence[str]) -> str:
    """The text of new tokens, cut before the first end-of-text token or stop string."""
    new = [token for token in new if token not in ends]
    # Decoded with the prompt, because some decoders drop a blank at the start of a text.
    text = _decode(tokenizer, row + new).removeprefix(_decode(tokenizer, row))
    return text[: min((text.index(end) for end in stop if end in text), default=len(text))]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
