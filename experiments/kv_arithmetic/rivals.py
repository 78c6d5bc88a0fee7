"""Both models without a graft: a pipeline and a mixture of probabilities.

Shape suffixes: B prompts, T tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from experiments.kv_arithmetic.data import COMPUTE, END, ArithmeticTask, Form
from graftlm.evaluation.examples import generate_answers

Answer = Callable[[Sequence[ArithmeticTask], Form], list[str]]  # gives an answer to each task in a form
Rival = Literal["pipeline", "mixture"]
Scores = Callable[[Tensor, Tensor], Tensor]  # scores (B, V) of the next token, by ids and mask (B, T)


def answers_of(model: Any, tokenizer: Any) -> Answer:
    """The greedy answers of a model."""

    def answer(tasks: Sequence[ArithmeticTask], form: Form) -> list[str]:
        prompts = [task.prompt(form) for task in tasks]
        return generate_answers(
            model, tokenizer, prompts, max_new_tokens=_longest(tasks, form, tokenizer), stop=(END,), batch_size=256
        )

    return answer


def pipeline(m_a: Any, m_b: Any, tokenizer: Any) -> Answer:
    """m_A writes the substitution as text, and m_B computes it; a direct answer leaves the substitution out."""
    by_a, by_b = answers_of(m_a, tokenizer), answers_of(m_b, tokenizer)

    def answer(tasks: Sequence[ArithmeticTask], form: Form) -> list[str]:
        if form == "numeric":
            return by_b(tasks, form)
        prompts = [written + COMPUTE for written in by_a(tasks, "substitution")]
        longest = _longest(tasks, "direct", tokenizer)
        results = generate_answers(m_b, tokenizer, prompts, max_new_tokens=longest, stop=(END,), batch_size=256)
        return results if form == "direct" else [a + b for a, b in zip(prompts, results, strict=True)]

    return answer


def mixture(m_a: Any, m_b: Any, tokenizer: Any, weight: float) -> Answer:
    """Each token is the likeliest by both models' probabilities, m_A's with this weight."""

    def scores(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        a_BV, b_BV = (m(input_ids=ids_BT, attention_mask=mask_BT).logits[:, -1].softmax(-1) for m in (m_a, m_b))
        return weight * a_BV + (1 - weight) * b_BV

    return lambda tasks, form: _greedy(scores, tasks, form, tokenizer)


def _longest(tasks: Sequence[ArithmeticTask], form: Form, tokenizer: Any) -> int:
    return max(len(tokenizer.tokenize(task.completion(form))) for task in tasks) + len(END)


def _greedy(scores: Scores, tasks: Sequence[ArithmeticTask], form: Form, tokenizer: Any) -> list[str]:
    prompts = [task.prompt(form) for task in tasks]
    read = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    ids_BT, mask_BT = read["input_ids"], read["attention_mask"]
    start = ids_BT.shape[1]
    with torch.inference_mode():
        for _ in range(_longest(tasks, form, tokenizer)):
            best_B1 = scores(ids_BT, mask_BT).argmax(-1, keepdim=True)
            ids_BT, mask_BT = torch.cat([ids_BT, best_B1], 1), functional.pad(mask_BT, (0, 1), value=1)
    return [text.split(END, 1)[0] for text in tokenizer.batch_decode(ids_BT[:, start:])]
