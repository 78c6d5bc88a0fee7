"""Both models without a graft: a pipeline, a mixture of probabilities, and what their states and inputs allow.

Shape suffixes: B prompts, T tokens, D the width, V the vocabulary, N keys, P digits of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from experiments.kv_arithmetic.data import COMPUTE, END, ArithmeticTask, Form
from graftlm.evaluation.examples import generate_answers

Answer = Callable[[Sequence[ArithmeticTask], Form], list[str]]
"""Gives an answer to each task in a form."""
Rival = Literal["pipeline", "mixture", "oracle"]
Scores = Callable[[Tensor, Tensor], Tensor]
"""Scores (B, V) of the next token, by ids and mask (B, T)."""
_RIDGE = 1e-3


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


def oracle(m_b: Any, tokenizer: Any) -> Answer:
    """m_B, whose first layer gives at each key's end what it gives where the key's value stands there."""
    vocabulary = tokenizer.get_vocab()

    def answer(tasks: Sequence[ArithmeticTask], form: Form) -> list[str]:
        if form == "numeric":
            return answers_of(m_b, tokenizer)(tasks, form)
        values = {}  # by row and token
        for row, task in enumerate(tasks):
            first, both = (len(tokenizer.tokenize(text)) for text in (task.keys.first, str(task.keys)))
            values[row, first - 1] = vocabulary[task.numbers.first]
            values[row, both - 1] = vocabulary[task.numbers.second]
        ends = tuple(map(torch.tensor, zip(*values, strict=True)))
        return _greedy(_with_values(m_b, ends, torch.tensor(list(values.values()))), tasks, form, tokenizer)

    return answer


def _with_values(m_b: Any, ends: tuple[Tensor, ...], values: Tensor) -> Scores:
    """m_B's scores with the first layer's states of `values` at `ends`, (row, token)."""

    def scores(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        states: list[Tensor] = []

        def replace(module: Any, inputs: Any, states_BTD: Tensor) -> None:
            states.append(states_BTD)
            if len(states) == 2:
                states_BTD[ends] = states[0][ends]

        hook = m_b.model.layers[0].register_forward_hook(replace)
        m_b(input_ids=ids_BT.index_put(ends, values), attention_mask=mask_BT)
        logits_BTV = m_b(input_ids=ids_BT, attention_mask=mask_BT).logits
        hook.remove()
        return logits_BTV[:, -1]

    return scores


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


def read_digits(states_ND: Tensor, digits_NP: Tensor) -> list[float]:
    """Of every place, the percent of digits that a linear map reads right; it is fitted on half of the keys.

    Args:
        states_ND: of a model at the end of each key.
        digits_NP: digits of each key's value.
    """
    half = len(states_ND) // 2
    x_ND = functional.pad(states_ND.double(), (0, 1), value=1.0)
    targets_NPV = functional.one_hot(digits_NP, 10).double()
    fitted = x_ND[:half]
    gram = fitted.T @ fitted + _RIDGE * torch.eye(x_ND.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, fitted.T @ targets_NPV[:half].flatten(1))
    read_NP = (x_ND[half:] @ weights).unflatten(-1, (-1, 10)).argmax(-1)
    return (100 * (read_NP == digits_NP[half:]).double().mean(0)).tolist()
