"""Multiple choice as continuations: the text of each answer is scored after the question, normalised by its length.

Benchmarks such as MMLU show the choices with letters and score the letters, which small and base models can't use. Here
each answer's text is scored by itself as the continuation of the question, as in Neutral Residues (arXiv 2410.02744),
and the likeliest per character is chosen (Gu et al., 2024, arXiv 2406.08446): the metric `acc_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping

from graftlm.errors import EvaluationError
from graftlm.evaluation.harness_types import Values

_QUESTIONS = ("question", "question_stem")
_ANSWERS = ("answer", "answerKey", "label")


def cloze_keys(row: Values, task: str) -> dict[str, object]:
    """Return the keys of a task of lm-evaluation-harness that score the texts of answers.

    Args:
        row: a row of the task, which decides about the form.
        task: the task's name, for the error message.

    Raises:
        EvaluationError: the rows have no question with choices.
    """
    try:
        index = cloze_answer(row)
        is_choice = 0 <= index < len(cloze_choices(row)) and bool(cloze_prompt(row))
    except (KeyError, IndexError, StopIteration, TypeError, ValueError):
        is_choice = False
    if not is_choice:
        raise EvaluationError(
            f"The rows of {task} have no question with choices and a right one among them, which cloze needs: leave "
            "cloze out."
        )
    return {
        "output_type": "multiple_choice",
        "doc_to_text": cloze_prompt,
        "doc_to_choice": cloze_choices,
        "doc_to_target": cloze_answer,
        "target_delimiter": " ",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
        "filter_list": None,
        "generation_kwargs": None,
        "gen_prefix": None,
        "process_results": None,
    }


def cloze_prompt(row: Values) -> str:
    """Return the question as a prompt, without the choices."""
    question = next(row[name] for name in _QUESTIONS if name in row)
    return f"Question: {question.strip()}\nAnswer:"


def cloze_choices(row: Values) -> list[str]:
    """Return the texts of the choices."""
    choices = row["choices"]
    return list(choices["text"] if isinstance(choices, Mapping) else choices)


def cloze_answer(row: Values) -> int:
    """Return the index of the right choice, which a row has as an index or as a label."""
    answer = next(row[name] for name in _ANSWERS if name in row)
    if isinstance(answer, int):
        return answer
    choices = row["choices"]
    labels = choices["label"] if isinstance(choices, Mapping) else [chr(ord("A") + n) for n in range(len(choices))]
    return list(labels).index(answer.strip())
