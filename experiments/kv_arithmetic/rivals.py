"""Both models without a graft: a pipeline and a mixture of probabilities.

Shape suffixes: B prompts, T tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from experiments.kv_arithmetic.data import COMPUTE, END, Form
from graftlm.evaluation.examples import generate_answers


class Task(Protocol):
    """An expression that a model is asked in several forms."""

    def prompt(self, form: Form) -> str:
        """Return the prompt of a form."""
        ...

    def completion(self, form: Form) -> str:
        """Return the right completion of a form, without the end of the line."""
        ...


# Returns an answer to each task in a form.
Answer = Callable[[Sequence[Task], Form], list[str]]
Rival = Literal["pipeline", "mixture"]
# Returns scores (B, V) of the next token, given ids (B, T) and mask (B, T).
Scores = Callable[[Tensor, Tensor], Tensor]


def answers_of(model: Any, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Return the greedy answers of a model."""

    def answer(tasks: Sequence[Task], form: Form) -> list[str]:
        prompts = [task.prompt(form) for task in tasks]
        longest = _longest(tasks, form, tokenizer)
        return _generate(model, tokenizer, prompts, longest)

    return answer


def pipeline(m_a: Any, m_b: Any, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Return answers of both models in turn: m_A writes the substitution as text, and m_B computes its result.

    A direct answer leaves the substitution out.
    """
    answers_of_a = answers_of(m_a, tokenizer)
    answers_of_b = answers_of(m_b, tokenizer)

    def answer(tasks: Sequence[Task], form: Form) -> list[str]:
        if form == "numeric":
            return answers_of_b(tasks, form)
        prompts = [written + COMPUTE for written in answers_of_a(tasks, "substitution")]
        longest = _longest(tasks, "direct", tokenizer)
        results = _generate(m_b, tokenizer, prompts, longest)
        if form == "direct":
            return results
        return [prompt + result for prompt, result in zip(prompts, results, strict=True)]

    return answer


def mixture(m_a: Any, m_b: Any, tokenizer: PreTrainedTokenizerBase, weight: float) -> Answer:
    """Return greedy answers by a mixture of both models' probabilities.

    Args:
        m_a: the first model.
        m_b: the second model.
        tokenizer: tokenizer of both.
        weight: weight of m_A.
    """

    def probabilities(model: Any, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits
        return logits_BTV[:, -1].softmax(-1)

    def scores(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        a_BV = probabilities(m_a, ids_BT, mask_BT)
        b_BV = probabilities(m_b, ids_BT, mask_BT)
        return weight * a_BV + (1 - weight) * b_BV

    def answer(tasks: Sequence[Task], form: Form) -> list[str]:
        return _greedy(scores, tasks, form, tokenizer)

    return answer


def _generate(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[str], longest: int) -> list[str]:
    return generate_answers(
        model,
        tokenizer,
        prompts,
        max_new_tokens=longest,
        stop=(END,),
        batch_size=256,
    )


def _longest(tasks: Sequence[Task], form: Form, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens of the longest completion, with its end."""
    lengths = [len(tokenizer.tokenize(task.completion(form))) for task in tasks]
    return max(lengths) + len(END)


def _greedy(
    scores: Scores,
    tasks: Sequence[Task],
    form: Form,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    prompts = [task.prompt(form) for task in tasks]
    encoded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    ids_BT = encoded["input_ids"]
    mask_BT = encoded["attention_mask"]
    start = ids_BT.shape[1]
    with torch.inference_mode():
        for _ in range(_longest(tasks, form, tokenizer)):
            best_B1 = scores(ids_BT, mask_BT).argmax(-1, keepdim=True)
            ids_BT = torch.cat([ids_BT, best_B1], 1)
            mask_BT = functional.pad(mask_BT, (0, 1), value=1)
    texts = tokenizer.batch_decode(ids_BT[:, start:])
    return [text.split(END, 1)[0] for text in texts]
