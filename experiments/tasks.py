"""Tasks with a prompt, measured for one model and kept beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from graftlm.config import Config
from graftlm.evaluation.examples import Example, chrf, generate_answers, score_answers
from graftlm.io import write_atomically


class Task(Config):
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


def measure_task(model: Any, tokenizer: Any, task: Task) -> dict[str, Any]:
    """The metrics of one task, as plain JSON values."""
    examples = read_examples(task.path)
    scores = score_answers(model, tokenizer, examples)
    found: dict[str, Any] = {
        task.name: scores.interval("nats_per_token").model_dump(),
        f"{task.name}_bpb": scores.interval("bits_per_byte").model_dump(),
        f"{task.name}_answer": float(scores.nats.sum()) / len(examples),
    }
    if task.answers:
        some = examples[: task.answers]
        answers = generate_answers(
            model, tokenizer, [one.prompt for one in some], max_new_tokens=task.max_new_tokens, stop=task.stop
        )
        found[f"{task.name}_chrf"] = chrf(answers, some, beta=1)
    return found


def read_examples(path: str | Path) -> list[Example]:
    """The examples of a JSON Lines file."""
    with Path(path).open(encoding="utf-8") as lines:
        return [Example(prompt=one["prompt"], answer=one["text"]) for one in map(json.loads, lines)]


def kept_tasks(
    model: Callable[[], AbstractContextManager[Any]],
    tokenizer: Any,
    tasks: Sequence[Task],
    folder: Path,
    weights: Sequence[Path],
) -> dict[str, Any]:
    """The metrics of all tasks, by name; those that `folder` keeps of the same task and weights are read back.

    Args:
        model: opens the model that answers; only called where something is missing.
        weights: the files of what answers.
    """
    kept = {task.name: _kept(folder, task, weights) for task in tasks}
    if missing := [task for task in tasks if kept[task.name] is None]:
        with model() as opened:
            for task in missing:
                kept[task.name] = found = measure_task(opened, tokenizer, task)
                content = json.dumps({"key": _key(task, weights), "metrics": found})
                write_atomically(folder / f"task-{task.name}.json", content.encode())
    return {name: value for found in kept.values() if found for name, value in found.items()}


def _kept(folder: Path, task: Task, weights: Sequence[Path]) -> dict[str, Any] | None:
    try:
        values = json.loads((folder / f"task-{task.name}.json").read_text(encoding="utf-8"))
        return values["metrics"] if values["key"] == _key(task, weights) else None
    except (OSError, ValueError, KeyError):
        return None


def _key(task: Task, weights: Sequence[Path]) -> str:
    """SHA-256 over the task, its file, and the weights that answer."""
    digest = hashlib.sha256(task.model_dump_json(exclude={"path"}).encode())
    for file in (Path(task.path), *weights):
        digest.update(file.read_bytes())
    return digest.hexdigest()
