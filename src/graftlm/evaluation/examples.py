"""Prompts and answers: what a model answers, how right that is, and how well it predicts the right answer.

Prompt and answer are tokenised apart, as they are in training (`prompt_column`): the prompt, with the BOS that its
tokenizer puts before texts, then new tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from graftlm.backbone import leading_bos, max_sequence_length, padding_id
from graftlm.data import Document
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.harness import hf_model
from graftlm.evaluation.metrics import Precision, Scores, device_of, evaluation_mode, score_windows
from graftlm.evaluation.sandbox import run_tests
from graftlm.evaluation.windows import Window, cut_windows

# More than the tokens that a decoder joins with their neighbours, such as the bytes of one character.
_SLACK = 4


@dataclass(frozen=True)
class Example:
    """What a model is asked, what it should answer, and Python that tests an answer which is Python."""

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
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Continue each prompt greedily; gives the new text up to its first stop string or end-of-text token, without it.

    Args:
        model: a `GraftedModel` or any transformers model. Of its own generation settings only its end-of-text tokens
            count.
        tokenizer: the model's.
        prompts: in any order; those of like length are run together, padded on the left.
        max_new_tokens: tokens to add to each, at most.
        stop: texts that end an answer.
        batch_size: prompts per batch; it changes nothing but speed and memory.
        progress: called after each batch with the number of prompts it answered.

    Raises:
        DataError: a prompt has no tokens.
        EvaluationError: a prompt and its new tokens do not fit the model, or a stop string is empty.
    """
    if "" in stop:
        raise EvaluationError("A stop string is empty, and would end every answer before it begins: leave it out.")
    rows = [_encode(tokenizer, prompt) for prompt in prompts]
    _check_prompts(model, rows, max_new_tokens)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    answers = [""] * len(rows)
    with evaluation_mode(model), torch.inference_mode():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            texts = _continue(model, tokenizer, [rows[i] for i in chosen], max_new_tokens, stop)
            for i, text in zip(chosen, texts, strict=True):
                answers[i] = text
            if progress is not None:
                progress(len(chosen))
    return answers


def score_answers(
    model: Any,
    tokenizer: Any,
    examples: Iterable[Example],
    *,
    batch_size: int = 16,
    precision: Precision = "fp32",
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Score every token of each answer given its prompt, one window an example, in their order.

    The end-of-text token is not scored, as in `score`. Without a prompt and a BOS the first token is not either.

    Raises:
        DataError: an answer has no token to score.
        EvaluationError: an example does not fit the model, or the model predicts NaN or infinity.
    """
    documents = [Document(example.answer, prompt=example.prompt) for example in examples]
    windows = list(cut_windows(tokenizer, documents, sys.maxsize))
    _check_windows(model, windows, len(documents))
    return score_windows(model, tokenizer, windows, batch_size=batch_size, precision=precision, progress=progress)


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> np.ndarray:
    """1 where an answer is the right one but for white space around it, else 0; float64, shape (examples,)."""
    _check_pairs(answers, examples)
    pairs = zip(answers, examples, strict=True)
    return np.array([answer.strip() == example.answer.strip() for answer, example in pairs], dtype=np.float64)


def chrf(answers: Sequence[str], examples: Sequence[Example], *, beta: int = 2) -> float:
    """chrF of all answers together, from 0 to 100: the F score of character n-grams, n from 1 to 6, by sacrebleu.

    Args:
        beta: how many times recall counts as much as precision: 2 is sacrebleu's own, 1 gives chrF1.
    """
    return chrf_of(chrf_counts(answers, examples).sum(axis=0), beta=beta)


def chrf_counts(answers: Sequence[str], examples: Sequence[Example]) -> np.ndarray:
    """What chrF sums over examples: n-grams answered, expected and matched, n from 1 to 6; int64, (examples, 18)."""
    _check_pairs(answers, examples)
    if not answers:
        return np.zeros((0, 18), dtype=np.int64)
    # sacrebleu gives counts per text to its own significance tests alone, and those compare systems in another form.
    return np.array(_sacrebleu()._extract_corpus_statistics(answers, [[example.answer for example in examples]]))


def chrf_of(counts: np.ndarray, *, beta: int = 2) -> float:
    """chrF, from 0 to 100, of counts (18,) as `chrf_counts` gives them, summed over the examples."""
    return float(_sacrebleu(beta)._compute_score_from_stats(counts.tolist()).score)


def chrf_signature(*, beta: int = 2) -> str:
    """How sacrebleu describes this chrF, for papers."""
    metric = _sacrebleu(beta)
    metric.sentence_score("a", ["a"])  # a signature counts the references, which are known once there are some
    return f"chrF{beta}|{metric.get_signature()}"


def pass_at_1(
    answers: Sequence[str], examples: Sequence[Example], *, timeout_s: float = 5.0, memory_mb: int = 512
) -> np.ndarray:
    """1 where a prompt and its answer together are Python that passes the tests, else 0; float64, shape (examples,).

    The programs run one after the other in a sandbox: read in `graftlm.evaluation.sandbox` what that protects from.

    Args:
        timeout_s: seconds of one core for each program with its tests.
        memory_mb: MiB of address space for each.

    Raises:
        EvaluationError: an example has no tests, or this machine can't run programs so.
    """
    _check_pairs(answers, examples)
    for number, example in enumerate(examples, start=1):
        if not example.tests.strip():
            raise EvaluationError(f"Example {number} has no tests, which every answer would pass: give it some.")
    pairs = zip(answers, examples, strict=True)
    verdicts = (
        run_tests(example.prompt + answer, example.tests, timeout_s=timeout_s, memory_mb=memory_mb)
        for answer, example in pairs
    )
    return np.array([verdict.passed for verdict in verdicts], dtype=np.float64)


def _sacrebleu(beta: int = 2) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(beta=beta)


def _check_pairs(answers: Sequence[str], examples: Sequence[Example]) -> None:
    if len(answers) != len(examples):
        raise EvaluationError(f"There are {len(answers)} answers to {len(examples)} examples: give one for each.")


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    bos = leading_bos(tokenizer)
    ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if bos is None else [bos, *ids]


def _check_prompts(model: Any, rows: list[list[int]], new: int) -> None:
    for number, row in enumerate(rows, start=1):
        if not row:
            raise DataError(f"The prompt of example {number} has no tokens: give at least one word to continue.")
        if (limit := max_sequence_length(model)) < len(row) + new:
            raise EvaluationError(
                f"The prompt of example {number} and {new} new tokens make {len(row) + new}, but the model has {limit} "
                "positions: shorten the prompt, or ask for fewer."
            )


def _check_windows(model: Any, windows: list[Window], count: int) -> None:
    if silent := sorted(set(range(count)) - {window.document for window in windows}):
        raise DataError(f"The answer of example {silent[0] + 1} has no token to score: give it text, or leave it out.")
    for window in windows:
        if (limit := max_sequence_length(model)) < len(window.ids):
            raise EvaluationError(
                f"Prompt and answer of example {window.document + 1} make {len(window.ids)} tokens, but the model has "
                f"{limit} positions: shorten the example, or leave it out."
            )


def _continue(model: Any, tokenizer: Any, rows: list[list[int]], max_new_tokens: int, stop: Sequence[str]) -> list[str]:
    """The answers of one batch."""
    width, ends = max(map(len, rows)), _ends(model, tokenizer)
    ids = torch.full((len(rows), width), padding_id(tokenizer))
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    device = device_of(model)
    tokens: Tensor = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        stopping_criteria=StoppingCriteriaList([_Stops(tokenizer, stop, width)] if stop else []),
        eos_token_id=ends or None,
        pad_token_id=padding_id(tokenizer),
        use_cache=True,
        # Checkpoints bring generation settings of their own, which would change what is likeliest.
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )
    new = tokens[:, width:].tolist()
    return [_answer(tokenizer, row, added, ends, stop) for row, added in zip(rows, new, strict=True)]


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text, by the model's settings and by its tokenizer, with which it was trained."""
    of_model = getattr(getattr(hf_model(model), "generation_config", None), "eos_token_id", None)
    listed = of_model if isinstance(of_model, list) else [of_model]
    return sorted({int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None})


def _answer(tokenizer: Any, row: list[int], new: list[int], ends: list[int], stop: Sequence[str]) -> str:
    """The text of new tokens, up to the first of what ends it."""
    new = new[: next((i for i, token in enumerate(new) if token in ends), len(new))]
    # Decoded with the prompt: some decoders drop a blank at the start of a text.
    text = _decode(tokenizer, row + new).removeprefix(_decode(tokenizer, row))
    return text[: min((text.index(end) for end in stop if end in text), default=len(text))]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _Stops(StoppingCriteria):
    """Ends a row whose new tokens hold a stop string; where exactly is for `_answer` to say."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], start: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, start
        self._span = max(len(text.encode()) for text in stop) + _SLACK  # every token holds a byte or more
        self._known: dict[int, bool] = {}

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        rows = input_ids[:, max(self._start, input_ids.shape[1] - self._span) :].tolist()
        found = [self._may_end(row[-1]) and self._ended(row) for row in rows]
        return torch.tensor(found, device=input_ids.device)

    def _may_end(self, token: int) -> bool:
        """Whether a token may be the last of a stop string; part of a character may be anything."""
        if token not in self._known:
            text = _decode(self._tokenizer, [token])
            self._known[token] = "\ufffd" in text or any(end[-1] in text for end in self._stop)
        return self._known[token]

    def _ended(self, row: list[int]) -> bool:
        text = _decode(self._tokenizer, row)
        return any(end in text for end in self._stop)
