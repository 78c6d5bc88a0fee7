"""Tasks with a prompt: log-perplexity of their answers, and chrF of greedy answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graftlm.config import Config
from graftlm.evaluation.examples import Example, chrf, generate_answers, score_answers


class PromptTask(Config):
    """Prompts and their answers.

    Its metrics: `<name>` in nats per token of the answers, `<name>_bpb` in bits per byte, `<name>_answer` in nats per
    answer, and `<name>_chrf`, which compares greedy answers with the right ones.

    Args:
        name: begins the names of its metrics.
        path: of a JSON Lines file with a `prompt` and a `text` a line.
        answers: so many of the first prompts are answered greedily, for chrF; 0 leaves it out.
        max_new_tokens: of an answer.
        stop: ends an answer.
    """

    name: str
    path: str
    answers: int = 0
    max_new_tokens: int = 48
    stop: tuple[str, ...] = ("\n",)


def measure_task(model: Any, tokenizer: Any, task: PromptTask) -> dict[str, Any]:
    """The metrics of one task."""
    examples = read_examples(task.path)
    scores = score_answers(model, tokenizer, examples)
    metrics: dict[str, Any] = {
        task.name: scores.interval("nats_per_token"),
        f"{task.name}_bpb": scores.interval("bits_per_byte"),
        f"{task.name}_answer": float(scores.nats.sum()) / len(examples),
    }
    if task.answers:
        answered = examples[: task.answers]
        answers = generate_answers(
            model,
            tokenizer,
            [example.prompt for example in answered],
            max_new_tokens=task.max_new_tokens,
            stop=task.stop,
        )
        metrics[f"{task.name}_chrf"] = chrf(answers, answered, beta=1)
    return metrics


def read_examples(path: str | Path) -> list[Example]:
    """The examples of a JSON Lines file."""
    with Path(path).open(encoding="utf-8") as lines:
        return [Example(prompt=example["prompt"], answer=example["text"]) for example in map(json.loads, lines)]


def measure_tasks(model: Any, tokenizer: Any, tasks: Sequence[PromptTask]) -> dict[str, Any]:
    """The metrics of several tasks."""
    return {name: value for task in tasks for name, value in measure_task(model, tokenizer, task).items()}
